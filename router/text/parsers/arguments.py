"""The arguments of a function one by one, for formats of calls that do not write them as a JSON object."""

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from pdserve.grammars.limits import MAX_CHARS
from pdserve.router.text.parsers.tool_parser import Schema

DEFINITIONS = ("$defs", "definitions")
KEYWORDS = {"type", "properties", "required", "additionalProperties", *DEFINITIONS}
ANNOTATIONS = {"title", "description", "default", "examples", "deprecated", "readOnly", "writeOnly", "$comment"}
MAX_SCHEMAS = 1000
MAX_LEVELS = 100
PYTHON_TYPES = {"string": str, "boolean": bool, "null": type(None), "object": dict, "array": list}


@dataclass(frozen=True)
class Argument:
    """An argument; its schema holds the definitions to which it refers."""

    name: str
    schema: Schema
    is_required: bool


def arguments_of(schema: Schema) -> list[Argument]:
    """Return the arguments that the schema of an object names.

    Raises:
        ValueError: it says more about the object than which arguments it has, or is invalid.
    """
    properties, required = schema.get("properties", {}), schema.get("required", [])
    if others := schema.keys() - KEYWORDS - ANNOTATIONS - {"$schema", "$id"}:
        raise ValueError(f"{min(others)} beside properties")
    if not (
        isinstance(properties, dict)
        and isinstance(required, list)
        and all(isinstance(name, str) and name in properties for name in required)
    ):
        raise ValueError("required arguments that are not among properties")
    definitions = {name: schema[name] for name in DEFINITIONS if name in schema}
    found = [Argument(name, _with_definitions(properties[name], definitions), name in required) for name in properties]
    num_referring = sum(one.schema.keys() >= definitions.keys() for one in found) if definitions else 0
    if num_referring * len(json.dumps(definitions)) > MAX_CHARS:  # they would be written with each
        raise ValueError(f"{min(definitions)} to which {num_referring} arguments refer")
    return found


def keywords_in(schema: Any) -> Iterator[tuple[str, Any]]:
    """Yield the keys and values of all objects in a schema."""
    children = schema.values() if isinstance(schema, dict) else schema if isinstance(schema, list) else ()
    yield from schema.items() if isinstance(schema, dict) else ()
    for child in children:
        yield from keywords_in(child)


def may_match(pattern: str, character: str) -> bool:
    """Return whether a string that matches a regular expression may have a character; when in doubt, it may."""
    atoms = re.findall(r"\\x..|\\u....|\\.|\[\^?\]?(?:\\.|[^\]\\])*\]|[^\\\[\](){}|?*+^$]", pattern)
    try:
        return any(re.fullmatch(atom, character) for atom in atoms)
    except re.error:
        return True


def allows(schema: object, value: object, root: Schema) -> bool:
    """Return whether a schema allows a value, as far as its types, its values and what it is composed of say.

    So does one with more than `MAX_SCHEMAS` in it that would have to be looked at, or more than `MAX_LEVELS` of them: all
    streams wait meanwhile.

    Args:
        root: what its references point into.
    """
    known: dict[int, bool] = {}  # by schema, so that each is looked at once

    def check(one: object, level: int) -> bool:
        if not isinstance(one, Mapping):
            return one is not False
        if id(one) not in known and len(known) < MAX_SCHEMAS and level < MAX_LEVELS:
            known[id(one)] = True  # as far as a reference to itself says
            known[id(one)] = fits(one, level + 1)
        return known.get(id(one), True)

    def fits(one: Schema, level: int) -> bool:
        if value is None and one.get("nullable") is True:
            return True
        choices = [one["const"]] if "const" in one else one.get("enum")
        if isinstance(choices, list) and not any(_is_same(value, choice) for choice in choices):
            return False
        kinds = one.get("type")
        if kinds is not None and not any(
            _is_a(value, kind) for kind in (kinds if isinstance(kinds, list) else [kinds])
        ):
            return False
        if isinstance(reference := one.get("$ref"), str) and not check(_resolve(reference, root), level):
            return False
        lists = ((all, "allOf"), (any, "anyOf"), (any, "oneOf"))
        return all(
            how(check(part, level) for part in one[name]) for how, name in lists if isinstance(one.get(name), list)
        )

    return check(schema, 0)


def _is_a(value: object, kind: object) -> bool:
    if kind not in ("integer", "number"):
        return isinstance(value, PYTHON_TYPES.get(str(kind), object))
    is_whole = isinstance(value, int) or (isinstance(value, float) and value.is_integer())
    return not isinstance(value, bool) and (is_whole or (kind == "number" and isinstance(value, float)))


def _is_same(value: object, choice: object) -> bool:
    return value == choice and isinstance(value, bool) == isinstance(choice, bool)


def _resolve(reference: str, root: Schema) -> object:
    """Return the schema to which a reference points; True, which allows anything, if it is none of this document."""
    found: object = root if reference.startswith("#") else True
    for name in reference.split("/")[1:]:
        found = found.get(name.replace("~1", "/").replace("~0", "~"), True) if isinstance(found, Mapping) else True
    return found


def _with_definitions(schema: object, definitions: dict[str, Any]) -> Schema:
    if schema is True:
        return {}
    if not isinstance(schema, dict):
        raise ValueError("an argument without a schema")
    references = [value for key, value in keywords_in(schema) if key == "$ref"]
    if not all(
        isinstance(one, str) and one.startswith(tuple(f"#/{name}/" for name in DEFINITIONS)) for one in references
    ):
        raise ValueError("a $ref that does not point to $defs")
    return {**schema, **definitions} if references else schema
