"""Values of arguments in tags: JSON only where the schema allows the result, and otherwise the text."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdserve.router.text.parsers.registry import TOOL_PARSERS
from pdserve.router.text.parsers.tool_parser import Tools
from tests.cpu_time import cpu_seconds

FORMS = {
    "qwen3_coder": "<tool_call>\n<function=f>\n<parameter=a>\n{}\n</parameter>\n</function>\n</tool_call>",
    "glm45": "<tool_call>f\n<arg_key>a</arg_key>\n<arg_value>{}</arg_value>\n</tool_call>",
}
OPTIONAL = {"anyOf": [{"type": "string"}, {"type": "null"}], "default": None}
DEFINITIONS = {
    "Text": {"type": "string", "title": "Text"},
    "Code": {"enum": ["1", "true", "null"]},
    "Point": {"type": "object", "properties": {"x": {"type": "integer"}}},
    "Tree": {"anyOf": [{"$ref": "#/$defs/Tree"}, {"type": "array", "items": {"$ref": "#/$defs/Tree"}}]},
}


def value_of(name: str, schema: dict[str, Any], text: str, definitions: dict[str, Any] = DEFINITIONS) -> object:
    root = {"type": "object", "properties": {"a": schema}, "$defs": definitions}
    output = TOOL_PARSERS[name](Tools({"f": root}), {}).push(FORMS[name].format(text), is_end=True)
    return json.loads("".join(call.arguments for call in output.calls))["a"]


@pytest.mark.parametrize("name", FORMS)
@pytest.mark.parametrize(
    "schema",
    [
        OPTIONAL,
        {"type": ["string", "null"]},
        {"oneOf": [{"$ref": "#/$defs/Text"}, {"type": "null"}]},
        {"$ref": "#/$defs/Text"},
        {"allOf": [{"$ref": "#/$defs/Text"}]},
        {"type": "string", "nullable": True},
        {"anyOf": [{"type": "string", "minLength": 1}, {"const": None}]},
    ],
)
@pytest.mark.parametrize("text", ["10115", "1e3", "true", "True", '{"x": 1}', "[1]", "-0", "Ulm"])
def test_strings_stay_strings(name: str, schema: dict[str, Any], text: str) -> None:
    assert value_of(name, schema, text) == text


@pytest.mark.parametrize("name", FORMS)
@pytest.mark.parametrize(
    ("schema", "text", "value"),
    [
        (OPTIONAL, "null", None),
        ({"$ref": "#/$defs/Code"}, "1", "1"),
        ({"$ref": "#/$defs/Code"}, "true", "true"),
        ({"enum": [1, "2"]}, "1", 1),
        ({"enum": [1, "2"]}, "2", "2"),
        ({"const": 5}, "5", 5),
        ({"const": "5"}, "5", "5"),
        ({"anyOf": [{"type": "integer"}, {"type": "string"}]}, "5", 5),
        ({"anyOf": [{"type": "integer"}, {"type": "string"}]}, "5.5", "5.5"),
        ({"anyOf": [{"type": "integer"}, {"type": "string"}]}, "true", "true"),
        ({"type": "boolean"}, "True", True),
        ({"type": "number"}, "1e3", 1000),
        ({"type": "integer"}, "many", "many"),
        ({"anyOf": [{"$ref": "#/$defs/Point"}, {"type": "string"}]}, '{"x": 1}', {"x": 1}),
        ({"anyOf": [{"$ref": "#/$defs/Point"}, {"type": "string"}]}, "[1]", "[1]"),
        ({"$ref": "#/$defs/Tree"}, "[[1]]", [[1]]),
        ({"$ref": "#/$defs/Missing"}, "5", 5),
        ({}, "5", 5),
        ({"description": "anything"}, '{"x": ', '{"x": '),
        ({"type": "array"}, '["\\ud800"]', '["\\ud800"]'),
        ({"$ref": "#/$defs/Point"}, "{'x': True, \"y\": None,}", {"x": True, "y": None}),
        ({"type": "array"}, "['it\\'s', (1, -2.5)]", ["it's", [1, -2.5]]),
        ({"type": ["object", "null"]}, '{"code": "a\n\tb", "is_new": true}', {"code": "a\n\tb", "is_new": True}),
        ({"type": "object"}, '{"a": 1}, b={}', '{"a": 1}, b={}'),
        ({"type": "object"}, "{open('x'): 1}", "{open('x'): 1}"),
        ({"type": ["object", "string"]}, "{'x': 1}", "{'x': 1}"),
    ],
)
def test_json_where_the_schema_allows_it(name: str, schema: dict[str, Any], text: str, value: object) -> None:
    assert value_of(name, schema, text) == value


@pytest.mark.parametrize("name", FORMS)
def test_a_long_chain_of_references_ends_no_answer(name: str) -> None:
    chain = {str(i): {"$ref": f"#/$defs/{i + 1}"} for i in range(900)}
    assert value_of(name, {"$ref": "#/$defs/0"}, "5", chain) == 5


@pytest.mark.slow
def test_a_value_is_compared_with_a_limited_number_of_schemas() -> None:
    """The client has written them, and all streams wait meanwhile."""

    def seconds(count: int) -> float:
        schema = {"anyOf": [{"type": "integer"} for _ in range(count)]}
        assert value_of("qwen3_coder", schema, "[1]") == [1]
        return cpu_seconds(lambda: value_of("qwen3_coder", schema, "[1]"))

    assert seconds(200_000) < 4 * seconds(2000)


@given(st.text().map(str.strip).filter(lambda text: text and not set(text) & set("<{}")))
def test_any_text_is_kept_where_only_strings_are_allowed(text: str) -> None:
    expected = None if text in ("null", "None") else text
    if not text.startswith('"'):
        assert value_of("qwen3_coder", OPTIONAL, text) == expected
