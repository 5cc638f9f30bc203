"""The arguments of a function one by one, for formats of calls that do not write them as a JSON object."""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from pdserve.router.text.parsers.tool_parser import Schema

DEFINITIONS = ("$defs", "definitions")
KEYWORDS = {"type", "properties", "required", "additionalProperties", *DEFINITIONS}
ANNOTATIONS = {"title", "description", "default", "examples", "deprecated", "readOnly", "writeOnly", "$comment"}


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
    return [Argument(name, _with_definitions(properties[name], definitions), name in required) for name in properties]


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
