"""Keywords of JSON schemas that apply to values of one type, checked and in the form that llguidance takes."""

import json
import math
from collections.abc import Iterator
from typing import Any

from llguidance import LLMatcher

from pdserve.grammars import regexes

Schema = dict[str, Any]
Path = tuple[object, ...]  # place in a schema: keys and indices
TYPES = ("null", "boolean", "number", "string", "array", "object")
FORMATS = {"date-time", "time", "date", "duration", "email", "hostname", "ipv4", "ipv6", "uuid", "uri"}
LEAP_YEAR = "(?:[0-9]{2}(?:0[48]|[2468][048]|[13579][26])|(?:0[48]|[2468][048]|[13579][26])00)"
YEAR = "(?:[1-9]...|0[1-9]..|00[1-9].|000[1-9])"  # without 0, which Python's dates lack
REAL_DATE = f"(?:{YEAR}-(?:(?:0[13-9]|1[0-2])-..|02-(?:[01].|2[0-8]))|{LEAP_YEAR}-02-29)"
FRACTION = r"[0-9](?:\.[0-9]{1,9})?[Zz+-].*$"  # of seconds, and what follows
PATTERNS = {  # of further formats; of days and seconds that FORMATS allow and calendars lack; and of numbers without an end
    "date": f"^{REAL_DATE}$",
    "date-time": f"^{REAL_DATE}.{{6}}:[0-5]{FRACTION}",
    "time": f"^.{{5}}:[0-5]{FRACTION}",
    "duration": "^P(?:[0-9]{1,6}[YMWD])*(?:T(?:[0-9]{1,9}[HMS])+)?$",
    "json-pointer": "^(?:/(?:[^~/]|~[01])*)*$",
    "relative-json-pointer": "^(?:0|[1-9][0-9]*)(?:#|(?:/(?:[^~/]|~[01])*)*)$",
    **{f"uuid{version}": f"^.{{14}}{version}.{{4}}[89ABab]" for version in range(1, 9)},
}
UNHELD_FORMATS = {"idn-email", "idn-hostname", "iri", "iri-reference", "regex", "uri-reference", "uri-template"}
MAX_NUMBER = 10**18  # llguidance takes no larger bounds
MAX_SHOWN = 30  # characters of a number in an error message


class Place(tuple[object, ...]):
    """The place of a keyword, which a prepared schema has in its stead, for rules that cannot hold it."""


class Unsupported(ValueError):
    """A grammar cannot hold what a schema says at a place."""

    def __init__(self, problem: str, path: tuple[object, ...]) -> None:
        super().__init__(f"{problem} at {pointer(path)} cannot be held by a grammar")


def pointer(path: Path) -> str:
    """Return the JSON pointer to a place, for messages."""
    return "".join("/" + str(part).replace("~", "~0").replace("/", "~1") for part in path) or "the top"


def format_of(schema: Schema, path: Path) -> str:
    """Return the format of strings by a schema; empty if it has none."""
    return str(expect(schema.get("format", ""), str, '"format"', path))


def string_patterns(given: Schema, path: Path = ()) -> list[str]:
    """Return the patterns that a string must match by its `pattern` and `format`, apart from FORMATS."""
    patterns = []
    if "pattern" in given:
        try:
            patterns = regexes.without_lookaheads(expect(given["pattern"], str, '"pattern"', path))
        except ValueError as error:
            raise Unsupported(f'"pattern" with {error}', path) from None
    kind = format_of(given, path)
    if kind in UNHELD_FORMATS:
        raise Unsupported(f'"format" {kind!r}', path)
    patterns += [PATTERNS[kind]] if kind in PATTERNS else []
    return [checked(pattern, path) for pattern in patterns]


MONTHS = r"(?:0[13578]|1[02])-(?:0[1-9]|[12]\d|3[01])|(?:0[469]|11)-(?:0[1-9]|[12]\d|30)|02-(?:0[1-9]|1\d|2[0-8])"
TEXT_FORMATS = {  # whole
    "date": rf"(?:\d{{4}}-(?:{MONTHS})|{LEAP_YEAR}-02-29)",
    "time": r"(?:[01]\d|2[0-3]):[0-5]\d:[0-5]\d(?:\.\d{1,9})?(?:Z|[+-](?:[01]\d|2[0-3]):[0-5]\d)",
    "uuid": r"[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}",
    **{
        f"uuid{version}": rf"[0-9a-f]{{8}}-[0-9a-f]{{4}}-{version}[0-9a-f]{{3}}-[89ab][0-9a-f]{{3}}-[0-9a-f]{{12}}"
        for version in range(1, 9)
    },
}
TEXT_FORMATS["date-time"] = f"{TEXT_FORMATS['date']}T{TEXT_FORMATS['time']}"


def text_patterns(schema: Schema, path: Path = ()) -> list[str]:
    """Return the regular expressions of strings by a schema that restricts them by LIMITS only: each matches all of a string.

    Raises:
        Unsupported: a grammar cannot hold it.
    """
    kind = format_of(schema, path)
    if kind in FORMATS - TEXT_FORMATS.keys():
        raise Unsupported(f'"format" {kind!r} of a key or a string without quotes', path)
    parts = {key: value for key, value in schema.items() if key != "format" or kind not in TEXT_FORMATS}
    patterns = [regexes.whole(pattern) for pattern in string_patterns(parts, path)]
    least, most = (count(schema, key, path) if key in schema else "" for key in ("minLength", "maxLength"))
    patterns += [f"(?s:.{{{least or 0},{most}}})"] if (least, most) != ("", "") else []
    return [*patterns, *([regexes.translated(TEXT_FORMATS[kind])] if kind in TEXT_FORMATS else [])]


def checked(pattern: str, path: Path) -> str:
    """Return a pattern in llguidance's syntax."""
    try:
        translated = regexes.translated(pattern, in_json=True)
    except ValueError as error:
        raise Unsupported(f'"pattern" with {error}', path) from None
    schema = json.dumps({"type": "string", "pattern": translated})
    found = LLMatcher.validate_grammar(json.dumps({"grammars": [{"json_schema": json.loads(schema)}]}))
    if found:
        reason = next((line for line in found.splitlines() if line.startswith("error: ")), found.splitlines()[0])
        raise Unsupported(f'"pattern" {pattern!r} ({reason.removeprefix("error: ")})', path)
    return translated


def may_both_match(pattern: str, other: str) -> bool:
    """Return whether there is a string that two patterns in llguidance's syntax match."""
    schema = {"type": "string", "pattern": pattern, "allOf": [{"pattern": other}]}
    return "Regex is empty" not in LLMatcher.validate_grammar(json.dumps({"grammars": [{"json_schema": schema}]}))


def number_keywords(given: Schema, path: Path) -> Schema:
    written: Schema = {}
    for side, exclusive, sign in (("minimum", "exclusiveMinimum", -1), ("maximum", "exclusiveMaximum", 1)):
        bounds = {key: given[key] for key in (side, exclusive) if key in given}
        if isinstance(bounds.get(exclusive), bool):  # as in draft 4
            is_exclusive = bounds.pop(exclusive)
            bounds = {exclusive: bounds[side]} if is_exclusive and side in bounds else bounds
        for key, bound in bounds.items():
            if isinstance(bound, bool) or not isinstance(bound, int | float) or bound != bound:  # NaN
                raise Unsupported(f'"{key}" {json.dumps(bound)}, which is not a number,', path)
            if bound * sign < -MAX_NUMBER:
                raise Unsupported(f'"{key}" {str(bound)[:MAX_SHOWN]}', path)
            written[key] = sign * MAX_NUMBER if bound * sign > MAX_NUMBER else bound  # a narrower range
    if written and "multipleOf" not in given:  # an infinite number is within one bound
        for side, exclusive, sign in (("minimum", "exclusiveMinimum", -1), ("maximum", "exclusiveMaximum", 1)):
            if not written.keys() & {side, exclusive}:
                written[side] = sign * MAX_NUMBER
    if "multipleOf" in given:
        step = given["multipleOf"]
        if isinstance(step, bool) or not isinstance(step, int | float) or not 0 < step < math.inf:
            raise Unsupported(f'"multipleOf" {json.dumps(step)}, which is not a positive number,', path)
        written["multipleOf"] = step
    return written


def count(given: Schema, key: str, path: Path) -> int:
    value = given[key]
    if isinstance(value, bool) or not isinstance(value, int | float) or value < 0 or value != value // 1:
        raise Unsupported(f'"{key}" {json.dumps(value)}, which is not a count,', path)
    return int(value)


def size_keywords(given: Schema, path: Path, num_required: int, num_properties: int | None) -> Schema:
    """Return the limits of the number of properties, `num_properties` being that of a closed object."""
    least, most = (count(given, key, path) if key in given else None for key in ("minProperties", "maxProperties"))
    written = {}
    if least is not None and least > num_required:
        if num_properties is not None and least >= num_properties:
            raise Unsupported('"minProperties" beside optional properties', path)
        if least > 1:  # a key could be written twice
            raise Unsupported('"minProperties" of more than the required properties and 1', path)
        written["minProperties"] = least
    if most is not None and not (num_properties is not None and most >= num_properties):
        if num_properties is not None and num_properties > num_required:
            raise Unsupported('"maxProperties" beside optional properties', path)
        written["maxProperties"] = most
    return written


def expect(value: Any, kind: type, name: str, path: Path) -> Any:
    if not isinstance(value, kind):
        kinds: dict[type, str] = {dict: "an object", list: "a list", str: "a string"}
        raise Unsupported(f"{name} must be {kinds[kind]}, which it is not,", path)
    return value


def listed_values(schema: Schema) -> set[str] | None:
    """Return the values that a schema lists, each as JSON of its kind and itself; None if it lists none."""
    listed = [schema["const"]] if "const" in schema else schema.get("enum")
    if not isinstance(listed, list):
        return None
    return {json.dumps([_kind(one), _canonical(one)], sort_keys=True) for one in listed}


def _kind(value: Any) -> str:
    kinds = {bool: "boolean", int: "number", float: "number", str: "string", list: "array", dict: "object"}
    return kinds.get(type(value), "null")


def kinds_of(schema: Schema, values: set[str] | None) -> set[str]:
    """Return the types of the values of a schema."""
    if values is not None:
        return {json.loads(value)[0] for value in values}
    types = schema.get("type", list(TYPES))
    listed = [types] if isinstance(types, str) else types
    return {"number" if kind == "integer" else kind for kind in listed}


def subschemas(value: Any, path: Path = ()) -> Iterator[tuple[Schema, Path]]:
    """Yield all objects in a schema with their places, itself first."""
    if isinstance(value, dict):
        yield value, path
    for key, child in value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ():
        yield from subschemas(child, (*path, key))


# ---- lists without equal items --------------------------------------------------------------------------------------

MAX_LISTED = 63  # bits of a parameter of llguidance's rules that it can count
LISTED: dict[str, list[Any]] = {"null": [None], "boolean": [False, True]}
CLASSES = {"null": type(None), "boolean": bool, "string": str, "array": list, "object": dict}


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
    if len(different) > MAX_LISTED:
        raise Unsupported(f'"uniqueItems" of more than {MAX_LISTED} listed values', place)
    return list(reversed(different.values()))


def _values(schema: Any, definitions: dict[str, Any], depth: int) -> list[Any] | None:
    """Return the values of a prepared schema, possibly some of them twice; None if it does not list them."""
    if schema is False:
        return []
    if not isinstance(schema, dict) or depth > MAX_LISTED:
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
    return _all([LISTED.get(kind) for kind in types]) if types and not keys else None


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
    return list(range(low, high + 1)) if high - low <= MAX_LISTED else None


def _is_of(value: Any, kind: str) -> bool:
    if kind not in CLASSES:
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        return is_number and (kind == "number" or value == value // 1)
    return isinstance(value, CLASSES[kind])


def _canonical(value: Any) -> Any:
    """Return a value so that equal ones have the same JSON."""
    if isinstance(value, list):
        return [_canonical(one) for one in value]
    if isinstance(value, dict):
        return {key: _canonical(one) for key, one in value.items()}
    return int(value) if isinstance(value, float) and value.is_integer() else value
