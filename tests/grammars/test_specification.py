# ruff: noqa: E501 — a case per line
"""What grammars of specifications allow: of JSON schemas, regular expressions, choices and formats."""

import json
from typing import Any

import pytest

from pdserve.grammars.formats import any_text, either, literal, optional, sequence, specified
from pdserve.grammars.specification import lark_grammar
from tests.grammars.byte_matcher import ByteMatcher

STRING = {"type": "string", "minLength": 1, "maxLength": 3}
A = {"type": "object", "properties": {"kind": {"const": "a", "default": "a"}, "next": {"$ref": "#"}}}
B = {"type": "object", "properties": {"kind": {"const": "b"}}, "required": ["kind"]}
UNION = {"oneOf": [{"$ref": "#/$defs/A"}, {"$ref": "#/$defs/B"}], "$defs": {"A": A, "B": B}}
DECIMAL = r"^(?!^[-+.]*$)[+-]?0*\d*\.?\d*$"  # as Pydantic writes it
EMAIL = {
    "type": "string",
    "format": "email",
    "pattern": r"^(?!\.)(?!.*\.\.)([A-Za-z0-9_'+\-\.]*)[A-Za-z0-9_+-]@([A-Za-z0-9][A-Za-z0-9\-]*\.)+[A-Za-z]{2,}$",
}
UUID = "7f8a2c1e-0b7e-4f5a-9c1d-2b3c4d5e6f70"
PASSWORD = r"^(?=.*[A-Z])(?=.*\d).{4,}$"
ALL_OF = {
    "allOf": [{"$ref": "#/definitions/A"}, {"type": "object", "properties": {"b": {}}, "required": ["b"]}],
    "definitions": {"A": {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}},
}
EITHER_REQUIRED = {
    "type": "object",
    "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}},
    "anyOf": [{"required": ["a"]}, {"required": ["b"]}],
}
TREE = {"$ref": "#/components/T", "components": {"T": {"type": "array", "items": {"$ref": "#/components/T"}}}}

SET = {"type": "array", "uniqueItems": True}


def matcher(spec: dict[str, Any]) -> ByteMatcher:
    return ByteMatcher(lark_grammar(spec, {}))


def object_of(properties: dict[str, Any] | None = None, **keywords: Any) -> dict[str, Any]:
    return {"type": "object", **({} if properties is None else {"properties": properties}), **keywords}


@pytest.mark.parametrize(
    ("schema", "good", "bad"),
    [
        # strings
        (STRING, ['"a"', '"é漢😀"'], ['""', '"abcd"', '"a\x13"', b'"\xed\xa0\x80"', '"\\"', 'a"']),
        ({"type": "string", "maxLength": 2}, ['""', '"ab"', '"\\n\\""'], ['"abc"', '"\x00"']),
        ({"type": "string", "pattern": "^b+$", "minLength": 2}, ['"bb"'], ['"b"', '"ab"']),
        ({"type": "string", "pattern": "[0-9]{2}"}, ['"a12b"'], ['"1a2"']),
        # what one reader of patterns takes for white space, a digit, a letter or a line break, is nothing else to another
        *(({"type": "string", "pattern": pattern}, ['"a@b"'], ['"a\u00a0@b"', '"a\u3000@b"', '"\ufeff@b"', '"\u0085@b"', '"a @b"']) for pattern in (r"^\S+$", r"^[^\s@]+@[\S]+$", r"^[^\s]*$")),
        *(({"type": "string", "pattern": pattern}, ['"!?"', '"\U0001f600"'], ['"é"', '"²"', '"٣"', '"a"']) for pattern in (r"^\W+$", r"^[^\w]+$", r"^[\W]+$")),
        *(({"type": "string", "pattern": pattern}, ['"!é"'], ['"٣"', '"1"']) for pattern in (r"^\D+$", r"^[^\d]+$", r"^[\D]+$")),
        ({"type": "string", "pattern": r"^[^\S\n]$"}, ['" "', '"\\t"'], ['"a"', '"\\n"', '"\u00a0"']),
        ({"type": "string", "pattern": "^a.b$"}, ['"axb"', '"a\u00a0b"'], ['"a\\nb"', '"a\\rb"', '"a\u2028b"']),
        ({"type": "string", "pattern": r"^[\s\S][\D\d][\w\W]$"}, ['"a\u3000b"', '"\\n\u2028\\""'], ['"ab"']),
        ({"type": "string", "pattern": "^{[[a]}$"}, ['"{[}"', '"{a}"'], ['"[[a]"']),
        ({"type": "string", "pattern": DECIMAL}, ['"5"', '"-0.50"'], ['"-."', '""', '"5a"']),
        ({"type": "string", "pattern": PASSWORD}, ['"aB1c"'], ['"aB1"', '"abcd1"', '"ABCD"']),
        ({"type": "string", "format": "uuid4"}, ['"3fa85f64-5717-4562-b3fc-2c963f66afa6"'], ['"3fa85f64"', '"3fa85f64-5717-4562-f3fc-2c963f66afa6"']),
        ({"type": "string", "format": "duration"}, ['"P1Y2M3DT4H5M6S"', '"P999999Y"', '"P3W"', '"PT999999999S"'], ['"P"', '"P1000000Y"', '"PT1"', '"PT1000000000S"']),
        ({"type": "string", "format": "date-time"}, ['"2024-02-29T23:59:59.123456789+01:00"', '"2026-01-01T00:00:00Z"'], ['"2023-02-29T00:00:00Z"', '"0000-01-01T00:00:00Z"', '"2026-01-01T00:00:60Z"', '"2026-01-01T00:00:00.1234567890Z"']),
        ({"type": "string", "format": "time"}, ['"23:59:59.1Z"', '"00:00:00+01:00"'], ['"00:00:60Z"', '"00:00:00"', '"00:00:00.1234567890Z"']),
        ({"type": "string", "format": "json-pointer", "minLength": 2}, ['"/a~1b/é"'], ['"/~"', '"a"', '"/"']),
        ({"type": "string", "format": "ipvanyaddress"}, ['"any"'], ["5"]),
        ({"minLength": 2}, ['"ab"', "5", "null", "[5]", '{"a": ""}'], ['"a"']),
        # numbers
        ({"type": "number"}, ["-1.5e-200", "1e22", "100000", "0.5"], ["1e400", "2e939", "99999999999e299", "01"]),
        ({"type": "number"}, ["0." + "3" * 99], ["0." + "3" * 100, "0." + "3" * 100 + "e1"]),
        ({"type": "integer"}, ["-0", "-7", "1" * 100], ["1" * 101, "1.0", "1e2", "01"]),
        ({}, ["1e299", '{"a": [1e2]}'], ["1e400", '{"a": [1e400]}']),
        ({"type": "integer", "minimum": 5, "exclusiveMinimum": True}, ["6", "10"], ["5", "-7", "6.0"]),
        ({"type": "number", "minimum": 0, "maximum": 1e308, "multipleOf": 0.5}, ["0.5", "12"], ["0.3", "-1"]),
        ({"type": "integer", "maximum": 1e400}, ["5"], ["5.5"]),
        # listed values
        ({"type": ["string", "null"], "enum": ["a", None, 5]}, ['"a"', "null"], ["5"]),
        ({"enum": [True, 1, {"a": [1]}]}, ["true", "1", '{"a": [1]}'], ['"a"', '{"a": [2]}']),
        # what patterns exclude, of what is escaped in JSON
        ({"type": "string", "pattern": r'^[^"\\]*$'}, ['"a\\n"'], [r'"\""', r'"\\"']),
        ({"type": "string", "pattern": r"^[\x00-\x21\u0023-\x7f]$"}, [r'"\\"', '"a"', r'"\u0001"'], [r'"\""', r'"\u0000"']),
        ({"type": "string", "pattern": r"^[^\p{L}'\"]+$"}, ['"1"'], [r'"\""', '"a"']),
        ({"type": "string", "pattern": r'^(?!["a]*$)'}, ['"b"'], [r'"\""', '"a"']),
        (object_of({'"a': {"const": 1}}, additionalProperties={}), [r'{"\"a": 1, "b": 2}', r'{"\"ab": 2}'], [r'{"\"a": 2}']),
        # lookaheads that exclude strings; the first is that of addresses as Zod writes it
        (EMAIL, ['"a@b.co"', '"x.y\'z@q-r.st"'], ['".a@b.co"', '"a..b@c.de"', '"a@b"']),
        ({"type": "string", "pattern": r"^(?!00)[0-9]+$"}, ['"0"', '"01"'], ['"00"', '"001"']),
        ({"type": "string", "pattern": r"^(?!\d0$)\d*$"}, ['""', '"1"', '"101"'], ['"10"']),
        ({"type": "string", "pattern": r"^(?!.*ab)[a-c]*$"}, ['"bacaa"'], ['"cab"', '"aab"']),
        ({"type": "string", "pattern": r"^(?!.*[-.]$)(?!.*\s).*$"}, ['""', '"a-b"'], ['"a-"', '"a b"']),
        # lists
        ({"type": "array", "items": {"type": "integer"}, "minItems": 1, "maxItems": 2}, ["[1]", "[1, 2]"], ["[]", "[1, 2, 3]"]),
        ({"prefixItems": [{"const": 1}, {"const": 2}], "minItems": 1, "items": {"const": 3}}, ["[1]", "[1, 2, 3, 3]", "4"], ["[]", "[1, 3]"]),
        ({"type": "array", "items": [{"const": 1}], "additionalItems": False}, ["[1]", "[]"], ["[1, 1]"]),
        ({"type": "array", "uniqueItems": False, "items": False}, ["[]"], ["[1]"]),
        (TREE, ["[[], [[]]]"], ["[1]"]),
        ({**SET, "items": {"enum": ["a", 1, 1.0, None]}}, ["[]", '["a", 1, null]', '[null, "a"]'], ['["a", "a"]', "[1, 1.0]"]),
        ({**SET, "items": {"$ref": "#/$defs/E"}, "minItems": 2, "maxItems": 2, "$defs": {"E": {"enum": ["x", "y", "z"]}}}, ['["z", "x"]'], ['["x"]', '["x", "x"]', '["x", "y", "z"]']),
        ({**SET, "items": {"type": "integer", "minimum": 0, "exclusiveMaximum": 63}}, [json.dumps([*range(63)][::-1])], ["[63]", "[7, 1, 7]"]),
        ({**SET, "items": {"anyOf": [{"type": ["boolean", "null"]}, {"const": {"a": [1]}}]}}, ['[true, {"a": [1]}, null]'], ["[true, null, true]"]),
        # objects
        (object_of({"a": STRING, "b": {}}, required=["b"]), ['{"b": 1}', '{"a": "x", "b": []}'], ['{"a": "x"}', '{"b": 1, "c": 1}']),
        (object_of({}), ["{}"], ['{"a": 1}']),
        (object_of(), ["{}", '{"a": {"b": 1}}'], ["{", '{"a"}']),
        (object_of({"a": {}}, required=["a", "b"]), ['{"a": 1, "b": 2}'], ['{"a": 1}']),
        (object_of({"a": {"type": "integer"}}, additionalProperties={"const": "s"}), ['{"a": 1, "b": "s"}', '{"aa": "s"}'], ['{"a": "s"}', '{"\\u0061": "s"}']),
        (object_of(additionalProperties={"const": 1}, minProperties=1, maxProperties=2), ['{"a": 1, "b": 1}'], ["{}", '{"a": 1, "b": 1, "c": 1}']),
        (object_of(propertyNames={"enum": ["a", "b c"]}), ['{"b c": 1}'], ['{"c": 1}']),
        (object_of(propertyNames={"enum": ["b", "a"]}, required=["b", "a"], additionalProperties={"type": "number"}), ['{"b": 1, "a": 2}'], ['{"b": 1}', '{"b": 1, "a": ""}', '{"b": 1, "a": 2, "c": 3}']),
        (object_of({"a": {"const": 1}, "c": {}}, propertyNames={"enum": ["b", "a"]}), ["{}", '{"a": 1, "b": {}}', '{"b": 2}'], ['{"a": 2}', '{"c": 1}']),
        (object_of(propertyNames={"maxLength": 2}, additionalProperties={"const": 1}), ['{"ab": 1}'], ['{"abc": 1}', '{"ab": 2}']),
        (object_of(propertyNames={"format": "date"}), ['{"2024-02-29": 1}'], ['{"2023-02-29": 1}', '{"a": 1}']),
        (object_of(propertyNames={"format": "uuid4"}), [f'{{"{UUID}": 1}}'], ['{"a": 1}', f'{{"{UUID[1:]}": 1}}']),
        (object_of({"a": {}}, propertyNames={"format": "unknown"}), ['{"a": 1}'], []),
        (object_of(patternProperties={"^x": {"const": 1}}), ['{"xy": 1}', "{}"], ['{"y": 1}', '{"x": 2}']),
        (object_of({"a": {"const": 1}}, patternProperties={"^x": {"const": 2}, "^y": {"const": 3}, "^[yz]": {"const": 3}}), ['{"a": 1, "xa": 2, "y": 3}'], ['{"y": 2}', '{"x": 1}']),
        # several schemas
        ({"anyOf": [STRING, {"type": "null"}]}, ['"a"', "null"], ['"\x13"']),
        ({**UNION, "discriminator": {"propertyName": "kind"}}, ['{"kind": "a", "next": {"kind": "b"}}'], ["{}", '{"kind": "c"}']),
        (ALL_OF, ['{"a": 1, "b": null}'], ['{"a": 1}', '{"a": 1, "b": 1, "c": 1}']),
        (object_of({"c": {}}, required=["c"], allOf=[{"$ref": "#/d"}], d=object_of({"a": {}})), ['{"c": 1}', '{"a": 1, "c": 1}'], ['{"a": 1}', '{"c": 1, "b": 1}']),
        (EITHER_REQUIRED, ['{"b": 1}', '{"a": 1, "b": 1}'], ["{}", '{"b": 1, "c": 1}']),
        ({"allOf": [{"type": "integer"}, {"minimum": 5}]}, ["5"], ["4", "null"]),
        # annotations, and what is for other types
        ({"type": "boolean", "default": 1, "title": "x", "x-any": {}, "contains": {}, "minLength": 9}, ["true"], ["null"]),
        ({"x-guidance": {"whitespace_flexible": True}, "type": "array"}, ["[1, 2]"], ["[1,2]"]),
        ({"type": "string", "nullable": True}, ["null", '"a"'], ["1"]),
        # what is beside a reference, or beside an "allOf" in an "allOf", holds too
        ({"allOf": [{"$ref": "#/d", "required": ["z"]}, object_of({"b": {}})], "d": object_of({"a": {}, "z": {}})}, ['{"z": 1}'], ["{}", '{"a": 1, "b": 1}']),
        ({"allOf": [{"$ref": "#/d"}, object_of({"b": {}})], "d": {"allOf": [object_of({"a": {}})], "required": ["a"]}}, ['{"a": 1}'], ["{}", '{"b": 1}']),
        ({"allOf": [{"$ref": "#/d"}, object_of({"b": {}})], "d": {"allOf": [object_of({"a": {}})], "type": "object", "title": "D"}}, ['{"a": 1, "b": 1}'], ["1"]),
        # values that look like references
        (object_of({"a": {"const": {"$ref": "#/$defs/0"}}, "$ref": {"enum": [1]}}, additionalProperties=True), ['{"a": {"$ref": "#/$defs/0"}, "$ref": 1}'], ['{"a": 1}', '{"$ref": 2}']),
    ],
)  # fmt: skip
def test_json_schemas(schema: dict[str, Any], good: list[str], bad: list[str | bytes]) -> None:
    allows = matcher({"json": schema}).matches
    assert ([*filter(allows, good)], [*filter(allows, bad)]) == (good, [])


@pytest.mark.parametrize(
    ("keywords", "problem"),
    [
        (SET, '"uniqueItems" of items whose values are not listed'),
        ({**SET, "items": {"type": "string"}}, '"uniqueItems" of items whose values are not listed'),
        ({**SET, "items": {"enum": [*range(64)]}}, '"uniqueItems" of more than 63 listed values'),
        ({**SET, "enum": [[1]]}, '"uniqueItems" beside other schemas of the same list'),
        ({"not": {"const": 1}}, '"not"'),
        ({"if": {"const": 1}, "then": {}}, '"if"'),
        ({"contains": {}}, '"contains"'),
        ({"dependentRequired": {"a": ["b"]}}, '"dependentRequired"'),
        ({"oneOf": [{"type": "integer"}, {"type": "number"}]}, '"oneOf" with schemas that may both hold'),
        (UNION | {"oneOf": [A, A]}, '"oneOf" with schemas that may both hold'),
        ({"$ref": "http://other/schema"}, "\"$ref\" to 'http://other/schema', which is not in the schema,"),
        ({"type": "string", "pattern": "a(?!b)"}, "\"pattern\" 'a(?!b)' (look-around"),
        ({"type": "string", "pattern": r"[^\"]|\x00"}, '"pattern" with a NUL'),
        ({"type": "string", "pattern": "^a{,3}$"}, '"pattern" with {,n}, which is a quantifier to some readers'),
        ({"type": "string", "format": "regex"}, "\"format\" 'regex'"),
        ({"type": "objct"}, '"type" ["objct"], which is not a type,'),
        (object_of({"b": {}}, required=["a"], additionalProperties=False), "\"required\" of 'a'"),
        (object_of({"a": {}, "b": {}}, minProperties=2), '"minProperties" beside optional properties'),
        (object_of(minProperties=2), '"minProperties" of more than the required properties and 1'),
        ({"type": "string", "pattern": "^(?!a|b)c"}, '"pattern" with a lookahead that excludes strings'),
        (object_of(propertyNames={"format": "email"}), "\"format\" 'email' of a key"),
        (object_of({"a": {}}, propertyNames={"pattern": "a"}), '"propertyNames" beside "properties"'),
        ({"allOf": [{}, {}], "unevaluatedProperties": False}, '"unevaluatedProperties" beside allOf'),
        ({"required": [1]}, 'a name in "required" must be a string'),
        ({"minimum": "1"}, '"minimum" "1", which is not a number,'),
        ({"minItems": -1}, '"minItems" -1, which is not a count,'),
        ({"minimum": 10**400}, '"minimum" 1000'),
        ({"maximum": -(10**400)}, '"maximum" -1000'),
        ({"format": {}}, '"format" must be a string'),
        (object_of(additionalProperties=0), "a schema must be an object"),
        (object_of(additionalProperties=1), "a schema must be an object"),
        ({**SET, "items": {"enum": 5}}, '"enum" must be a list'),
        ({"oneOf": [{"allOf": 5}, {"type": "string"}]}, '"allOf" must be a list'),
        ({"oneOf": [{"type": "object", "required": 5}, {"type": "object"}]}, '"required" must be a list'),
        ({"oneOf": [{"type": [{}]}, {"type": "string"}]}, '"type" [{}], which is not a type,'),
        (
            {"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}},
            "\"$ref\" to '#/$defs/a', which leads to itself,",
        ),
        ({"oneOf": [{"const": 1}, {"const": 1.0}]}, '"oneOf" with schemas that may both hold'),
        (
            {
                "oneOf": [
                    object_of({"x": {}}, required=["x"]),
                    object_of(patternProperties={"^x": {}}, additionalProperties=False),
                ]
            },
            '"oneOf" with schemas that may both hold',
        ),
        ({"allOf": [{"type": "object", "properties": []}, object_of({})]}, '"properties" must be an object'),
        (object_of(patternProperties={"^x": {}, "^y": {"const": 1}, "a$": {"const": 2}}), "\"patternProperties\" 'a$'"),
        (object_of({"x-id": {"type": "integer"}}, patternProperties={"^x-": {}}), "\"patternProperties\" '^x-'"),
        (object_of(patternProperties={"^[0-9]": {"const": 1}, "^\\d": {"const": 2}}), "\"patternProperties\" '^\\\\d'"),
        ({"enum": []}, '"enum" without a value'),
        (object_of(propertyNames={"enum": ["a"]}, required=["b"]), "\"required\" of 'b'"),
        (object_of(propertyNames={"const": 5}), '"propertyNames" that allow no name'),
        (
            {"$id": "inner", "$ref": "#/$defs/x", "$defs": {"x": {}}},
            '"$ref" to \'#/$defs/x\' within a schema that has an "$id"',
        ),
    ],
)
def test_what_a_grammar_cannot_hold_is_refused_with_its_place(keywords: dict[str, Any], problem: str) -> None:
    schema = {"properties": {"u/v": {"items": keywords}}, "$defs": keywords.get("$defs", {})}
    with pytest.raises(ValueError) as raised:
        lark_grammar({"json": schema}, {})
    assert str(raised.value).startswith(problem) and " at /properties/u~1v/items" in str(raised.value)


@pytest.mark.parametrize(
    ("spec", "good", "bad"),
    [
        ({"regex": r"^[ab]{3}-\d{2}/{x}$"}, ["aba-12/{x}"], ["aba-1٣/{x}", "ab-12/{x}"]),
        ({"regex": r"\p{Lu}\P{L}{2}\u{41}"}, ["É12A"], ["é12A", "ÉabA"]),
        ({"regex": r"[^\s]\S[\s\S]."}, ["ab\u3000\r"], ["ab\u3000\n", "\u3000bcd"]),
        ({"regex": ""}, [""], ["a"]),
        ({"choice": ["Paris", 'Bonn "am\nRhein" é']}, ["Paris", 'Bonn "am\nRhein" é'], ["Bonn"]),
        ({"json": {"type": ["boolean", "null"]}, "place": "python"}, ["True", "true", "None"], ["TRUE"]),
        ({"json": object_of({"a<": {}, "b": {"enum": ["x<y"]}}), "place": "xml"}, ['{"a<": {"u": [1]}, "b": "x<y"}'], ['{"a<": "<"}', '{"a<": {"<": 1}}']),
        ({"text": {"pattern": "^a|b$", "maxLength": 3}}, ["ax", "xb"], ["xx", "a<", "axyz"]),
        ({"text": {"format": "date"}}, ["2026-01-31"], ["2026-01-32", "2026-02-30"]),
        ({"text": {"format": "uuid4"}}, [UUID], [UUID[:-1], UUID.replace("-4", "-1")]),
    ],
)  # fmt: skip
def test_other_specifications(spec: dict[str, Any], good: list[str], bad: list[str]) -> None:
    allows = matcher(spec).matches
    assert ([*filter(allows, good)], [*filter(allows, bad)]) == (good, [])


def test_texts_end_where_what_follows_begins() -> None:
    """A lexer that took each part by itself would take the beginning of the next one with it."""
    value = either(any_text("</v>"), literal("a</v>b"))
    form = sequence(literal("<v>"), value, literal("</v>"), optional(specified({"json": {"type": "integer"}})))
    allows = matcher({"format": form}).matches
    assert [allows(text) for text in ("<v></v>", "<v>a</</v>5", "<v>a</v>b</v>", "<v>a</v>c</v>")] == [True] * 3 + [
        False
    ]


def test_special_tokens_are_tokens_in_formats_and_no_text() -> None:
    form = sequence(literal("<call>"), any_text("<call>"), literal("<end>"))
    grammar = lark_grammar({"format": form}, {"<call>": 300, "<end>": None})
    assert "<[300]>" in grammar and "end" not in grammar


def test_a_schema_may_be_deep_and_refer_in_circles() -> None:
    schema: dict[str, Any] = {"$ref": "#/$defs/0"}
    schema["$defs"] = {str(i): object_of({"a": {"$ref": f"#/$defs/{(i + 1) % 100}"}}) for i in range(100)}
    text: Any = {}
    for _ in range(150):
        text = {"a": text}
    assert matcher({"json": schema}).matches(json.dumps(text))
