"""Rules in Lark's syntax for JSON by a schema that `schema.py` has prepared.

Objects, lists, alternatives and definitions are rules of their own. llguidance writes those of what is left: strings, numbers
with bounds, listed values, and values to which several schemas apply.
"""

import json
from collections.abc import Callable, Iterator
from typing import Any

from pdserve.grammars import regexes
from pdserve.grammars.schema_keywords import TYPES, Place, Schema, Unsupported, listed_items, subschemas

# White space is as json.dumps writes it: unbounded white space could go on until max_tokens.
OPTIONS = {"item_separator": ", ", "key_separator": ": ", "whitespace_flexible": False}
LITERALS = {"null": "/null/", "boolean": "/true|false/"}
PYTHON_LITERALS = {"null": "/null|None/", "boolean": "/true|false|True|False/"}
# A number with a larger exponent is infinite to most readers.
INTEGER = "/-?(0|[1-9][0-9]{0,99})/"  # as in NUMBER; without an end, a model may write digits until max_tokens
NUMBER = r"/-?(0|[1-9][0-9]{0,99})(\.[0-9]{1,99})?|-?(0|[1-9][0-9]{0,7})(\.[0-9]{1,99})?[eE][+-]?[12]?[0-9]{1,2}/"
COMMA, COLON = '", "', '": "'
OF_OBJECTS = {
    "type",
    "properties",
    "required",
    "patternProperties",
    "additionalProperties",
    "minProperties",
    "maxProperties",
}
BOUNDS = {"minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"}
OF_LISTS = {"type", "prefixItems", "items", "minItems", "maxItems", "uniqueItems"}


class JsonRules:
    """Writes the rules of one schema.

    Args:
        document: the schema, with `$defs`.
        define: adds a rule or, with the kind `T`, a terminal, and returns its name.
        reserve: returns a name for a rule whose expression is not known yet, and the function that sets that; given what
            follows the name where it is defined.
        is_python: write values as in Python as well.
    """

    def __init__(
        self,
        document: Schema,
        define: Callable[[str, str], str],
        reserve: Callable[[str], tuple[str, Callable[[str], None]]],
        *,
        is_python: bool,
    ) -> None:
        self._definitions: dict[str, Any] = document["$defs"]
        self._define, self._reserve = define, reserve
        self._literals = PYTHON_LITERALS if is_python else LITERALS
        self._names: dict[str, str] = {}  # of rules by what they are
        self._pending: list[tuple[Any, Callable[[str], None]]] = []
        self.start = self._value({key: value for key, value in document.items() if key != "$defs"})
        for schema, set_expression in self._pending:  # which grows
            set_expression(self._value(schema))

    def _value(self, schema: Any) -> str:
        """Return the expression of values by a schema."""
        if schema is False:
            raise ValueError("the schema false, which allows no value, is required somewhere")
        if schema in (True, {}):
            return self._later("any", {"type": list(TYPES)})
        keys = schema.keys() - {"type"}
        if keys == {"$ref"} and "type" not in schema:
            number = schema["$ref"].rpartition("/")[2]
            return self._later(number, self._definitions[number])
        if keys == {"anyOf"} and "type" not in schema:
            options = [self._value(one) for one in schema["anyOf"] if one is not False]
            return self._define("r", " | ".join(options)) if options else self._leaf(schema)
        types = schema.get("type", TYPES)
        if keys & {"anyOf", "allOf", "$ref", "enum", "const"}:
            return self._leaf(schema)
        return self._define("r", " | ".join(dict.fromkeys(self._of_type(kind, schema) for kind in types)))

    def _later(self, key: str, schema: Any) -> str:
        """Return the name of the rule of a definition, which is written once."""
        if key not in self._names:
            self._names[key], set_expression = self._reserve("")
            self._pending.append((schema, set_expression))
        return self._names[key]

    def _of_type(self, kind: str, schema: Schema) -> str:
        """Return the expression of the values of one type."""
        if kind in self._literals:
            return self._terminal(self._literals[kind])
        if kind == "number" and not schema.keys() & BOUNDS:
            return self._terminal(NUMBER)
        if kind == "integer" and not schema.keys() & BOUNDS:
            return self._terminal(INTEGER)
        if kind == "array":
            return self._list(schema)
        if kind == "object":
            return self._object(schema)
        own = OF_OBJECTS | OF_LISTS
        return self._leaf({"type": kind, **{key: value for key, value in schema.items() if key not in own}})

    def _leaf(self, schema: Any) -> str:
        """Return the expression of values whose rules llguidance writes."""
        found = set(_references(schema))
        definitions = dict[str, Any]()
        while found - definitions.keys():
            number = min(found - definitions.keys())
            definitions[number] = self._definitions[number]
            found |= set(_references(self._definitions[number]))
        for part, _ in subschemas([schema, definitions]):
            if isinstance(place := part.get("uniqueItems"), Place):
                raise Unsupported('"uniqueItems" beside other schemas of the same list, or further properties,', place)
        text = json.dumps({**schema, **({"$defs": definitions} if definitions else {}), "x-guidance": OPTIONS})
        if text not in self._names:
            self._names[text] = self._define("r", f"%json {text}")
        return self._names[text]

    def _terminal(self, expression: str) -> str:
        if expression not in self._names:
            self._names[expression] = self._define("T", expression)
        return self._names[expression]

    def _text(self, text: str) -> str:
        return self._terminal(regexes.between_slashes(regexes.literal(text)))

    def _list(self, schema: Schema) -> str:
        first, rest = schema.get("prefixItems", []), schema.get("items", True)
        least, most = schema.get("minItems", 0), schema.get("maxItems")
        for i, one in enumerate(first):
            if one is False:
                first, rest = first[:i], False
                break
        if rest is False:
            most = min(len(first), len(first) if most is None else most)
        if most is not None and least > most:
            raise ValueError(f"a list has at least {least} and at most {most} items")
        if "uniqueItems" in schema:
            return self._set(schema, least, most)
        opening, closing, comma = self._text("["), self._text("]"), self._terminal(COMMA)
        if most == 0:
            return f"{opening} {closing}"
        element = self._value(rest) if rest is not False else ""
        first = [self._value(one) for one in first[:most]]
        tail = ""
        if most is None or most > len(first):
            num_before = max(1, len(first))
            low, high = max(0, least - num_before), "" if most is None else most - num_before
            tail = self._define("r", f"({comma} {element}){{{low},{high}}}") if high != 0 else ""
        for i, one in reversed(list(enumerate(first[1:], start=1))):
            further = f"{comma} {one} {tail}"
            tail = self._define("r", further if i < least else f"({further})?")
        body = f"{first[0] if first else element} {tail}"
        return f"{opening} {body} {closing}" if least else f"{opening} ({body})? {closing}"

    def _set(self, schema: Schema, least: int, most: int | None) -> str:
        """Return lists without equal items, whose values are listed: a rule with a bit for each that has been written."""
        values = listed_items(schema, self._definitions)
        most = len(values) if most is None else min(most, len(values))
        if least > most:
            raise ValueError(f"a list has at least {least} different items of {len(values)}")
        items = [self._leaf({"const": value}) for value in values]
        rest, set_expression = self._reserve("::_")
        further = [
            f"{self._terminal(COMMA)} {item} {rest}::set_bit({i}) %if and(bit_clear({i}), bit_count_lt(_, {most}))"
            for i, item in enumerate(items)
        ]
        set_expression(" | ".join([f'"" %if bit_count_ge(_, {least})', *further]))
        body = " | ".join(f"{item} {rest}::{1 << i}" for i, item in enumerate(items))
        return f"{self._text('[')} ({body}){'' if least else '?'} {self._text(']')}"

    def _object(self, schema: Schema) -> str:
        properties, required = schema.get("properties", {}), set(schema.get("required", ()))
        patterns, rest = schema.get("patternProperties", {}), schema.get("additionalProperties", True)
        least, most = schema.get("minProperties", 0), schema.get("maxProperties")
        is_open = rest is not False
        is_sized = bool(least) or most is not None
        if (properties and (is_sized or is_open)) or (patterns and is_open) or required - properties.keys():
            given = {key: value for key, value in schema.items() if key in OF_OBJECTS}
            return self._leaf({**given, "type": "object"})
        pair = self._pair({**patterns, **({"": rest} if is_open else {})})
        if properties:
            body, may_be_empty = self._members(properties, required, pair)
        else:
            body, may_be_empty = self._map(pair, least, most), not least
        return f"{self._text('{')} {f'({body})?' if may_be_empty and body else body} {self._text('}')}"

    def _pair(self, patterns: dict[str, Any]) -> str:
        """Return a key that matches a pattern, empty for any key, and its value; empty if there is none."""
        pairs = []
        for pattern, one in patterns.items():
            if one is not False:
                key = self._leaf({"type": "string", **({"pattern": pattern} if pattern else {})})
                pairs.append(f"{key} {self._terminal(COLON)} {self._value(one)}")
        return self._define("r", " | ".join(pairs)) if pairs else ""

    def _map(self, pair: str, least: int, most: int | None) -> str:
        """Return a number of pairs, at least one unless there can be none."""
        if not pair or most == 0:
            if least:
                raise ValueError(f"an object has at least {least} properties and can have none")
            return ""
        high = "" if most is None else most - 1
        return pair if high == 0 else f"{pair} ({self._terminal(COMMA)} {pair}){{{max(0, least - 1)},{high}}}"

    def _members(self, properties: dict[str, Any], required: set[str], pair: str) -> tuple[str, bool]:
        """Return properties in their order and then any number of pairs, and whether there may be none of them."""
        comma = self._terminal(COMMA)
        tail = self._define("r", f"({comma} {pair})*") if pair else ""
        beginnings, may_be_empty = [f"{pair} {tail}"] if pair else [], True
        for name, one in reversed(properties.items()):
            if one is False:
                if name in required:
                    raise ValueError(f"the required property {name!r} can have no value")
                continue
            key = self._text(json.dumps(name, ensure_ascii=False))
            member = self._define("r", f"{key} {self._terminal(COLON)} {self._value(one)}")
            beginning = f"{member} {tail}"
            if name in required:
                beginnings, may_be_empty = [beginning], False
                tail = self._define("r", f"{comma} {member} {tail}")
            else:
                beginnings = [beginning, *beginnings]
                tail = self._define("r", f"({comma} {member})? {tail}")
        return (self._define("r", " | ".join(beginnings)) if beginnings else ""), may_be_empty


def _references(schema: Any) -> Iterator[str]:
    """Yield the numbers of the definitions to which a schema refers, which listed values do not."""
    if isinstance(schema, list):
        for one in schema:
            yield from _references(one)
    for key, value in schema.items() if isinstance(schema, dict) else ():
        if key == "$ref":
            yield value.rpartition("/")[2]
        elif key not in ("enum", "const"):
            yield from _references([*value.values()] if key in ("properties", "patternProperties") else value)
