"""JSON schemas in the form that llguidance takes: annotations are left out, and what a grammar cannot hold is refused.

llguidance refuses what it does not implement, even where that only annotates, and it names no place. So each schema is
written anew, with the keywords that apply to its types. Objects that do not say which further properties they may have have
none, except where several schemas apply to one value. Definitions are named by number.
"""

import functools
import json
import operator
from collections.abc import Callable, Sequence
from typing import Any
from urllib.parse import unquote

from pdserve.grammars import regexes
from pdserve.grammars.schema_keywords import (
    FORMATS,
    TYPES,
    Path,
    Place,
    Schema,
    Unsupported,
    checked,
    count,
    expect,
    format_of,
    kinds_of,
    listed_values,
    may_both_match,
    number_keywords,
    pointer,
    size_keywords,
    string_patterns,
    subschemas,
    text_patterns,
)

OF_TYPE = {  # keywords that apply to values of a type
    "number": ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"),
    "string": ("minLength", "maxLength", "pattern", "format"),
    "array": (
        *("items", "prefixItems", "additionalItems", "minItems", "maxItems", "uniqueItems"),
        *("contains", "minContains", "maxContains", "unevaluatedItems"),
    ),
    "object": (
        *("properties", "required", "additionalProperties", "patternProperties", "propertyNames"),
        *("minProperties", "maxProperties", "unevaluatedProperties"),
        *("dependentRequired", "dependentSchemas", "dependencies"),
    ),
}
TYPED = {keyword for keywords in OF_TYPE.values() for keyword in keywords}
ANY_TYPE = ("enum", "const", "anyOf", "oneOf", "allOf", "$ref", "not", "if", "$dynamicRef", "$recursiveRef")
TRIVIAL: dict[str, Any] = {"not": False, "dependentRequired": {}, "dependentSchemas": {}, "dependencies": {}}
REFUSED = {"if", "contains", "$dynamicRef", "$recursiveRef", *TRIVIAL}
MAX_DISJOINT_DEPTH = 8
MAX_TRIALS = 64
NO_TAG = "^[^<]*$"  # of strings in tags


def prepared(schema: Any, *, is_in_tags: bool = False, at: Sequence[object] = ()) -> Schema:
    """Return a JSON schema as llguidance takes it.

    Args:
        is_in_tags: no string has a `<`, unless the schema lists it.
        at: the place in it of the schema that is meant; the others are those to which it may refer.

    Raises:
        Unsupported: a grammar cannot hold it; with the keyword and its place.
    """
    return _Writer(schema, is_in_tags).document(tuple(at))


def place_of_fault(schema: Any, holds: Callable[[Path], bool]) -> str:
    """Return a JSON pointer to the innermost schema that cannot be held by itself, in one that cannot.

    Args:
        holds: whether the schema at a place can be; called for MAX_TRIALS places at most.
    """
    path: Path = ()
    trials = iter(range(MAX_TRIALS))
    value = schema
    while True:
        inner = _inner_schemas(value)
        found = next((key for key, _ in zip(inner, trials, strict=False) if not holds((*path, *key))), None)
        if found is None:
            return pointer(path)
        path, value = (*path, *found), inner[found]


def _inner_schemas(schema: Schema) -> dict[Path, Schema]:
    """Return the schemas within one, by their places in it, apart from true and false."""
    found: dict[Path, Any] = {}
    for key, value in schema.items():
        if key in ("properties", "patternProperties", "$defs", "definitions") and isinstance(value, dict):
            found |= {(key, name): one for name, one in value.items()}
        elif key in ("anyOf", "allOf", "oneOf", "prefixItems", "items") and isinstance(value, list):
            found |= {(key, i): one for i, one in enumerate(value)}
        elif key in ("items", "additionalProperties"):
            found[key,] = value
    return {place: one for place, one in found.items() if isinstance(one, dict)}


class _Writer:
    """Writes one schema anew, and the definitions to which it refers."""

    def __init__(self, root: Any, is_in_tags: bool) -> None:
        self._root, self._in_tags = root, is_in_tags
        self._embedded = [where for one, where in subschemas(root) if where and isinstance(one.get("$id"), str)]
        self._numbers: dict[tuple[str, bool, frozenset[str]], int] = {}  # of definitions
        self._pending: list[tuple[Any, Path, bool, frozenset[str]]] = []
        self._definitions: dict[str, Schema | bool] = {}
        self._unions: list[tuple[list[Any], frozenset[str], Path]] = []  # of which one schema may hold

    def document(self, path: Path) -> Schema:
        target = functools.reduce(operator.getitem, path, self._root)
        written = self._schema(target, path, closed=True)
        for number, (target, path, closed, required) in enumerate(self._pending):  # which grows
            self._definitions[str(number)] = self._schema(target, path, closed=closed, required=required)
        for options, marks, path in self._unions:  # now that their keywords are known to be of the right types
            if not all(self._disjoint(a, b, marks) for i, a in enumerate(options) for b in options[:i]):
                raise Unsupported('"oneOf" with schemas that may both hold', path)
        if written is False:
            raise Unsupported("false, which allows no value,", path)
        return {**({} if written is True else written), "$defs": self._definitions}

    def _schema(
        self, schema: Any, path: Path, *, closed: bool, required: frozenset[str] = frozenset()
    ) -> Schema | bool:
        """Return a schema as llguidance takes it.

        Args:
            closed: no other schema applies to the same value, so objects may be closed.
            required: further required properties.
        """
        if schema is False:
            return False
        schema = expect({} if schema is True else schema, dict, "a schema", path)
        if schema.get("not") in ({}, True):
            return False
        given = self._applicable(schema, path)
        types = given.pop("type")
        composed = [key for key in ("allOf", "anyOf", "oneOf", "$ref") if key in given]
        own = bool(given.keys() - composed)
        if composed == ["allOf"] and (own or types == list(TYPES)):
            rest = {key: value for key, value in schema.items() if key != "allOf"}
            flat = self._flattened([*expect(given["allOf"], list, '"allOf"', path), *([rest] if own else [])])
            if len(flat) == 1:
                return self._schema(flat[0], (*path, "allOf", 0), closed=closed, required=required)
        alone = closed and len(composed) + own < 2
        written: Schema = {"type": types} if types != list(TYPES) else {}
        written |= {key: given[key] for key in ("enum", "const") if key in given}
        if own or (not composed and (required or self._in_tags)):
            closes = alone or (closed and self._names_in([given[key] for key in composed]) <= _names(given))
            parts = self._typed(given, types, path, closed=closes, required=required)
            written |= {} if {"enum", "const"} & given.keys() and self._in_tags else parts
        for key in composed:
            if key == "$ref":
                written["$ref"] = self._reference(given["$ref"], path, alone, required if not own else frozenset())
                continue
            options, marks = expect(given[key], list, f'"{key}"', path), required
            if key == "oneOf":
                marks = required | _discriminator(schema)
                self._unions.append((options, marks, path))
                key = "anyOf" if "anyOf" not in composed else key
            branches = [
                self._schema(one, (*path, key, i), closed=alone and key != "allOf", required=marks)
                for i, one in enumerate(options)
            ]
            written.setdefault(key, []).extend(branches)
        return written or True

    def _applicable(self, schema: Schema, path: Path) -> Schema:
        """Return the keywords of a schema that restrict values, in the form of draft 2020-12; with a list as its type."""
        given_types = schema.get("type", list(TYPES))
        types = [given_types] if isinstance(given_types, str) else given_types
        if not (isinstance(types, list) and types and all(kind in (*TYPES, "integer") for kind in types)):
            raise Unsupported(f'"type" {json.dumps(types)}, which is not a type,', path)
        if schema.get("nullable") is True and "null" not in types:
            types = [*types, "null"]  # as in OpenAPI 3.0
        kinds = {"number" if kind == "integer" else kind for kind in types}
        known = {keyword for kind in kinds for keyword in OF_TYPE.get(kind, ())} | set(ANY_TYPE)
        given = {key: value for key, value in schema.items() if key in known}
        if "enum" in given and not expect(given["enum"], list, '"enum"', path):
            raise Unsupported('"enum" without a value', path)
        if isinstance(given.get("items"), list):
            given["prefixItems"] = given.pop("items")
            if "additionalItems" in given:
                given["items"] = given["additionalItems"]
        given.pop("additionalItems", None)
        given.pop("minContains" if "contains" not in given else "", None)
        given.pop("maxContains" if "contains" not in given else "", None)
        applied = {"allOf", "anyOf", "oneOf", "$ref", "if", "not"} & given.keys()
        for key, rest in (("unevaluatedProperties", "additionalProperties"), ("unevaluatedItems", "items")):
            if key in given and not applied:
                given.setdefault(rest, given[key])
            if given.pop(key, True) not in (True, {}) and applied:
                raise Unsupported(f'"{key}" beside {min(applied)}', path)
        if given.pop("uniqueItems", False) is True and given.get("maxItems") not in (0, 1):
            given["uniqueItems"] = Place(path)
        if "then" not in schema and "else" not in schema:
            given.pop("if", None)
        for key in sorted(given.keys() & REFUSED):
            if given[key] != TRIVIAL.get(key):
                raise Unsupported(f'"{key}"', path)
            del given[key]
        return {**given, "type": types}

    # ---- several schemas for one value --------------------------------------------------------------------------

    def _flattened(self, schemas: list[Any], depth: int = 0) -> list[Any]:
        """Return one schema in place of all, if they are of objects and only name properties; otherwise these schemas."""
        merged: Schema = {"type": "object", "properties": {}, "required": []}
        if len(schemas) < 2 or depth > MAX_DISJOINT_DEPTH:
            return schemas
        for one in schemas:
            target = self._target(one["$ref"])[0] if _restrictions(one) == {"$ref"} else one
            if isinstance(target, dict) and isinstance(target.get("allOf"), list):
                rest = {key: value for key, value in target.items() if key != "allOf"}
                has_more = _restrictions(rest) - ({"type"} if rest.get("type") == "object" else set())
                inner = self._flattened([*target["allOf"], *([rest] if has_more else [])], depth + 1)
                target = inner[0] if len(inner) == 1 else None
            given = target if isinstance(target, dict) else {}
            properties, required = given.get("properties", {}), given.get("required", [])
            if not _restrictions(given) <= {"type", "properties", "required"} or given.get("type") != "object":
                return schemas
            if not (isinstance(properties, dict) and isinstance(required, list)):
                return schemas
            if merged["properties"].keys() & properties.keys():
                return schemas
            merged["properties"] |= properties
            merged["required"] += required
        return [merged]

    def _names_in(self, schemas: Any, depth: int = 0) -> set[str]:
        """Return the names of the properties of which schemas speak, and `*` if they may speak of others."""
        if isinstance(schemas, list):
            return {name for one in schemas for name in self._names_in(one, depth + 1)}
        if isinstance(schemas, str) or depth > MAX_DISJOINT_DEPTH:
            return {"*"}
        if not isinstance(schemas, dict):
            return set()
        rest = schemas.keys() & {"patternProperties", "additionalProperties", "propertyNames", "$ref"}
        inner = self._names_in([schemas[key] for key in ("allOf", "anyOf", "oneOf") if key in schemas], depth)
        return _names(schemas) | inner | ({"*"} if rest else set())

    def _disjoint(self, one: Any, other: Any, required: frozenset[str], depth: int = 0) -> bool:
        """Return whether no value is valid by both schemas, as far as types, listed values and required properties show."""
        if one is False or other is False:
            return True
        if not isinstance(one, dict) or not isinstance(other, dict) or depth > MAX_DISJOINT_DEPTH:
            return False
        for a, b in ((one, other), (other, one)):
            both = [*a.get("allOf", []), *([self._target(a["$ref"])[0]] if "$ref" in a else [])]
            if any(self._disjoint(part, b, required, depth + 1) for part in both):
                return True
            options = a.get("anyOf", a.get("oneOf"))
            if isinstance(options, list) and all(self._disjoint(part, b, required, depth + 1) for part in options):
                return True
        values, others = listed_values(one), listed_values(other)
        if values is not None and others is not None:
            return not values & others
        kinds = kinds_of(one, values) & kinds_of(other, others)
        if kinds != {"object"}:
            return not kinds
        needed, needed_too = ({*schema.get("required", []), *required} for schema in (one, other))
        mine, theirs = one.get("properties", {}), other.get("properties", {})
        if (_has_no_others(other) and needed - theirs.keys()) or (_has_no_others(one) and needed_too - mine.keys()):
            return True
        shared = needed & needed_too & mine.keys() & theirs.keys()
        return any(self._disjoint(mine[name], theirs[name], frozenset(), depth + 1) for name in shared)

    # ---- references -------------------------------------------------------------------------------------------------

    def _reference(self, reference: Any, path: Path, closed: bool, required: frozenset[str]) -> str:
        target, where = self._target(expect(reference, str, '"$ref"', path), path)
        seen, one = {reference}, target
        while _restrictions(one) == {"$ref"}:
            if (further := str(one["$ref"])) in seen:
                raise Unsupported(f'"$ref" to {reference!r}, which leads to itself,', path)
            seen.add(further)
            one, _ = self._target(further, path)
        if reference.startswith("#") and any(path[: len(one)] == one for one in self._embedded):
            raise Unsupported(f'"$ref" to {reference!r} within a schema that has an "$id" of its own', path)
        key = (reference, closed, required)
        if key not in self._numbers:
            self._numbers[key] = len(self._pending)
            self._pending.append((target, where, closed, required))
        return f"#/$defs/{self._numbers[key]}"

    def _target(self, reference: str, path: Path = ()) -> tuple[Any, Path]:
        """Return the schema to which a reference leads, and its place."""
        base, _, fragment = str(reference).partition("#")
        for document, where in subschemas(self._root):
            is_base = document is self._root if not base else document.get("$id", document.get("id")) == base
            if is_base and (found := _follow(document, unquote(fragment))) is not None:
                return found[0], (*where, *found[1])
            if fragment and not base and document.get("$anchor") == fragment:
                return document, where
        raise Unsupported(f'"$ref" to {reference!r}, which is not in the schema,', path)

    # ---- values of one type -----------------------------------------------------------------------------------------

    def _typed(self, given: Schema, types: list[str], path: Path, *, closed: bool, required: frozenset[str]) -> Schema:
        """Return the keywords that apply to some types only."""
        written: Schema = {}
        if {"number", "integer"} & set(types):
            written |= number_keywords(given, path)
        if "string" in types:
            written |= self._string(given, path)
        if "array" in types:
            written |= self._array(given, path, closed)
        if "object" in types:
            written |= self._object(given, path, closed, required)
        return written

    def _string(self, given: Schema, path: Path) -> Schema:
        written: Schema = {key: count(given, key, path) for key in ("minLength", "maxLength") if key in given}
        patterns = string_patterns(given, path) + ([NO_TAG] if self._in_tags else [])
        kind = format_of(given, path)
        if kind in FORMATS or kind.startswith("uuid"):
            written["format"] = "uuid" if kind.startswith("uuid") else kind
        if patterns:
            written["pattern"] = patterns.pop()
        return {**written, **({"allOf": [{"pattern": one} for one in patterns]} if patterns else {})}

    def _array(self, given: Schema, path: Path, closed: bool) -> Schema:
        written: Schema = {key: count(given, key, path) for key in ("minItems", "maxItems") if key in given}
        written |= {"uniqueItems": given["uniqueItems"]} if "uniqueItems" in given else {}
        if "prefixItems" in given:
            written["prefixItems"] = [
                self._schema(one, (*path, "prefixItems", i), closed=closed)
                for i, one in enumerate(expect(given["prefixItems"], list, '"prefixItems"', path))
            ]
        if "items" in given or self._in_tags:
            written["items"] = self._child(given.get("items", True), (*path, "items"), closed)
        return written

    def _child(self, schema: Any, path: Path, closed: bool) -> Schema | bool:
        """Return a schema; in tags, that of any value is a definition, which refers to itself."""
        if self._in_tags and schema in (True, {}):
            self._numbers.setdefault(("any", True, frozenset()), len(self._pending))
            number = self._numbers["any", True, frozenset()]
            if number == len(self._pending):
                self._pending.append((True, (), True, frozenset()))
            return {"$ref": f"#/$defs/{number}"}
        return self._schema(schema, path, closed=closed)

    def _object(self, given: Schema, path: Path, closed: bool, required: frozenset[str]) -> Schema:
        given = self._with_named_keys(given, path)
        properties = dict(expect(given.get("properties", {}), dict, '"properties"', path))
        names = expect(given.get("required", []), list, '"required"', path)
        for name in names:
            expect(name, str, 'a name in "required"', path)
        needed = list(dict.fromkeys([*names, *sorted(required - set(names))]))
        patterns = expect(given.get("patternProperties", {}), dict, '"patternProperties"', path)
        rest = given.get("additionalProperties", not (closed and ("properties" in given or patterns)))
        if closed and not patterns:
            for name in needed:
                if name in properties:
                    continue
                if given.get("additionalProperties", True) is False:
                    raise Unsupported(f'"required" of {name!r}, which "additionalProperties" excludes,', path)
                properties[name] = given.get("additionalProperties", True)
                rest = rest if "additionalProperties" in given else False
        written: Schema = {
            "properties": {
                name: self._child(one, (*path, "properties", name), closed) for name, one in properties.items()
            },
            "patternProperties": {
                checked(pattern, (*path, "patternProperties")): self._child(
                    one, (*path, "patternProperties", pattern), closed
                )
                for pattern, one in patterns.items()
            },
            "required": needed,
        }
        key_pattern = self._key_pattern(given, properties, path)
        if patterns and rest is not False and closed:
            if rest not in (True, {}):
                raise Unsupported('"additionalProperties" beside "patternProperties"', path)
            rest = False  # a key that matches a pattern could be written as one that does not
        if rest is not False and (key_pattern or ((properties or self._in_tags) and closed)):
            other = f"^(?:{regexes.except_texts(list(properties), '<' if self._in_tags else '')})$"
            keys = key_pattern or (other if properties else NO_TAG)
            written["patternProperties"][keys] = self._child(rest, (*path, "additionalProperties"), closed)
            rest = False
        if rest is False:
            written["additionalProperties"] = False
            _check_keys(patterns, properties, (*path, "patternProperties"))
        elif rest is not True and rest != {}:
            written["additionalProperties"] = self._child(rest, (*path, "additionalProperties"), closed)
        is_closed = rest is False and not written["patternProperties"]
        written |= size_keywords(given, path, len(needed), len(properties) if is_closed else None)
        return {key: value for key, value in written.items() if value not in ({}, []) or key == "additionalProperties"}

    def _with_named_keys(self, given: Schema, path: Path) -> Schema:
        """Return an object's keywords with properties in place of the keys that `propertyNames` lists, if some are named."""
        names = self._property_names(given, path)
        if not isinstance(names, dict) or not _names(given) or "patternProperties" in given:
            return given
        if listed_values(names) is None or names.keys() & (TYPED | {*ANY_TYPE}) - {"enum", "const"}:
            return given
        named, rest = given.get("properties", {}), given.get("additionalProperties", True)
        listed = [names["const"]] if "const" in names else names["enum"]
        allowed = [name for name in listed if isinstance(name, str)]
        properties = {name: named.get(name, rest) for name in [*filter(allowed.__contains__, named), *allowed]}
        kept = {key: value for key, value in given.items() if key != "propertyNames"}
        return {**kept, "properties": properties, "additionalProperties": False}

    def _property_names(self, given: Schema, path: Path) -> Any:
        names = given.get("propertyNames", True)
        while isinstance(names, dict) and "$ref" in names:
            names = self._target(names["$ref"], (*path, "propertyNames"))[0]
        return names

    def _key_pattern(self, given: Schema, properties: Schema, path: Path) -> str:
        """Return the pattern of keys beside the properties by `propertyNames`; empty for any."""
        names, where = self._property_names(given, path), (*path, "propertyNames")
        if names is True or not (keys := expect(names, dict, '"propertyNames"', path).keys() & (TYPED | {*ANY_TYPE})):
            return ""
        values = listed_values(names)
        if values is not None and keys <= {"enum", "const"}:
            allowed = [name for value in sorted(values) if isinstance(name := json.loads(value)[1], str)]
            if not allowed:
                raise Unsupported('"propertyNames" that allow no name', path)
            pattern = f"^(?:{'|'.join(map(regexes.literal, allowed))})$"
        elif keys == {"pattern"} and len(patterns := string_patterns(names, where)) == 1:
            pattern = patterns[0]
        elif (
            keys <= {"pattern", "format", "minLength", "maxLength"} and len(patterns := text_patterns(names, where)) < 2
        ):
            pattern = f"^(?:{patterns[0]})$" if patterns else ""
        else:
            raise Unsupported(f'"propertyNames" with "{min(keys)}"', path)
        if properties and pattern:
            raise Unsupported('"propertyNames" beside "properties"', path)
        return pattern


def _restrictions(schema: Any) -> set[str]:
    """Return the keywords of a schema that restrict values."""
    return schema.keys() & (TYPED | {*ANY_TYPE, "type"}) if isinstance(schema, dict) else set()


def _has_no_others(schema: Schema) -> bool:
    """Return whether an object has no other properties than those that a schema names."""
    return schema.get("additionalProperties") is False and not schema.get("patternProperties")


def _check_keys(patterns: Schema, properties: Schema, path: Path) -> None:
    """Raise Unsupported if two different schemas may apply to a value: each key would be written for one of them."""
    named = [(f"^(?:{regexes.literal(name)})$", one) for name, one in properties.items()]
    seen = list[tuple[str, Any]]()
    for pattern, one in patterns.items():
        key = checked(pattern, path)
        if any(one != other and may_both_match(key, other_key) for other_key, other in (*seen, *named)):
            raise Unsupported(f'"patternProperties" {pattern!r}, where others may apply to the same key,', path)
        seen.append((key, one))


def _names(schema: Schema) -> set[str]:
    """Return the names of properties in a schema."""
    properties, required = schema.get("properties", {}), schema.get("required", [])
    return {
        *(properties if isinstance(properties, dict) else ()),
        *map(str, required if isinstance(required, list) else ()),
    }


def _discriminator(schema: Schema) -> frozenset[str]:
    """Return the property that tells the schemas of a union apart, as OpenAPI names it."""
    found = schema.get("discriminator")
    name = found.get("propertyName") if isinstance(found, dict) else None
    return frozenset([name] if isinstance(name, str) else [])


def _follow(document: Any, pointer: str) -> tuple[Any, Path] | None:
    """Return what a JSON pointer leads to, and its place; None if it leads nowhere."""
    if pointer and not pointer.startswith("/"):
        return None
    value, path = document, list[object]()
    for part in pointer.split("/")[1:]:
        key: object = part.replace("~1", "/").replace("~0", "~")
        if isinstance(value, list) and part.isdecimal():
            key = int(part)
        try:
            value = value[key]
        except (KeyError, IndexError, TypeError):
            return None
        path.append(key)
    return value, tuple(path)
