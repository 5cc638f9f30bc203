"""Values of lists without equal items: a grammar can hold those whose values are listed, with a bit for each."""

import json
from typing import Any

from pdserve.grammars.schema_keywords import Place, Schema, Unsupported

MAX_VALUES = 63  # bits of a parameter of llguidance's rules that it can count
OF_TYPE: dict[str, list[Any]] = {"null": [None], "boolean": [False, True]}
KINDS = {"null": type(None), "boolean": bool, "string": str, "array": list, "object": dict}


def listed_items(schema: Schema, definitions: dict[str, Any]) -> list[Any]:
    """Return the different values that items of a prepared schema with `uniqueItems` may have.

    Raises:
        Unsupported: they are not listed, or too many.
    """
    place: Place = schema["uniqueItems"]
    values = _values(schema.get("items", True), definitions, 0)
    if values is None or "prefixItems" in schema:
        problem = "of items whose values are not listed by enum, const, boolean, null or a small range of integers"
        raise Unsupported(f'"uniqueItems" {problem} (without it, a client can drop what is repeated)', place)
    different = {json.dumps(_canonical(value), sort_keys=True): value for value in reversed(values)}
    if len(different) > MAX_VALUES:
        raise Unsupported(f'"uniqueItems" of more than {MAX_VALUES} listed values', place)
    return list(reversed(different.values()))


def _values(schema: Any, definitions: dict[str, Any], depth: int) -> list[Any] | None:
    """Return the values of a prepared schema, possibly some of them twice; None if it does not list them."""
    if schema is False:
        return []
    if not isinstance(schema, dict) or depth > MAX_VALUES:
        return None
    keys = schema.keys() - {"type"}
    if schema.keys() == {"$ref"}:
        return _values(definitions[schema["$ref"].rpartition("/")[2]], definitions, depth + 1)
    if schema.keys() == {"anyOf"}:
        return _all([_values(one, definitions, depth + 1) for one in schema["anyOf"]])
    types = schema.get("type", [])
    if keys in ({"enum"}, {"const"}):
        listed = schema["enum"] if "enum" in schema else [schema["const"]]
        return [value for value in listed if not types or any(_is_of(value, kind) for kind in types)]
    if types == ["integer"]:
        return _integers(schema)
    return _all([OF_TYPE.get(kind) for kind in types]) if types and not keys else None


def _all(lists: list[list[Any] | None]) -> list[Any] | None:
    return None if None in lists else [value for one in lists if one is not None for value in one]


def _integers(schema: Schema) -> list[Any] | None:
    """Return the integers within bounds; None if there are no bounds, or other keywords."""
    lows = [schema["minimum"]] if "minimum" in schema else []
    lows += [schema["exclusiveMinimum"] + 1] if "exclusiveMinimum" in schema else []
    highs = [schema["maximum"]] if "maximum" in schema else []
    highs += [schema["exclusiveMaximum"] - 1] if "exclusiveMaximum" in schema else []
    bounds = [*lows, *highs]
    if not (lows and highs) or any(one != one // 1 for one in bounds) or "multipleOf" in schema:
        return None
    low, high = int(max(lows)), int(min(highs))
    return list(range(low, high + 1)) if high - low <= MAX_VALUES else None


def _is_of(value: Any, kind: str) -> bool:
    if kind not in KINDS:
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        return is_number and (kind == "number" or value == value // 1)
    return isinstance(value, KINDS[kind])


def _canonical(value: Any) -> Any:
    """Return a value so that equal ones have the same JSON."""
    if isinstance(value, list):
        return [_canonical(one) for one in value]
    if isinstance(value, dict):
        return {key: _canonical(one) for key, one in value.items()}
    return int(value) if isinstance(value, float) and value.is_integer() else value
