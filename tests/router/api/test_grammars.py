"""Structured output: the grammar that reaches the backend, and the errors for invalid ones."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from pdserve.router.text.tokenizer import Tokenizer
    from pdserve.router.web.application import Application
    from tests.router.conftest import Client, ScriptedBackend

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
HELLO: dict[str, Any] = {"model": "demo", "prompt": "hello"}
CHATTING: dict[str, Any] = {"model": "demo", "messages": [{"role": "user", "content": "hello"}]}
ExpectError = Callable[..., dict[str, Any]]


SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}


@pytest.mark.parametrize(
    ("field", "grammar"),
    [
        ({"response_format": {"type": "text"}}, None),
        ({"response_format": {"type": "json_object"}}, {"json": {"type": "object"}}),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "s", "schema": SCHEMA}}},
            {"json": SCHEMA},
        ),
        ({"guided_json": SCHEMA}, {"json": SCHEMA}),
        ({"guided_json": json.dumps(SCHEMA)}, {"json": SCHEMA}),
        ({"guided_regex": "a+"}, {"regex": "a+"}),
        ({"structured_outputs": {"choice": ["a", "b"]}}, {"choice": ["a", "b"]}),
        ({"structured_outputs": {"json_object": True, "regex": None}}, {"json": {"type": "object"}}),
        ({"structured_outputs": {"grammar": 'root ::= "a"'}}, {"grammar": 'root ::= "a"'}),
    ],
)
def test_grammars_arrive(client: Client, backend: ScriptedBackend, field: dict[str, Any], grammar: object) -> None:
    for path, body in ((COMPLETIONS, HELLO), (CHAT, CHATTING)):
        assert client.post(path, {**body, **field}).status_code == 200
        sent = backend.requests[-1].sampling.grammar
        assert (json.loads(sent) if sent else None) == grammar


@pytest.mark.parametrize(
    ("field", "message"),
    [
        (
            {"guided_regex": "a", "response_format": {"type": "json_object"}},
            "response_format and guided_regex exclude each other; send one of them",
        ),
        ({"response_format": {"type": "json_schema"}}, "response_format must be "),
        ({"response_format": {"type": "xml"}}, "response_format.type must be "),
        ({"guided_choice": []}, "guided_choice must be a list of strings, none of them empty"),
        ({"guided_choice": "a"}, "guided_choice must be a list of strings"),
        ({"guided_json": "{"}, "guided_json must be a JSON schema, as an object or as JSON in a string"),
        ({"guided_json": '{"const": 1, "const": 2}'}, "an object of the body has two fields 'const'"),
        ({"guided_json": '{"const": NaN}'}, "the body holds NaN"),
        ({"guided_grammar": 5}, "guided_grammar must be a string in EBNF"),
        (
            {"structured_outputs": {"xml": 1}},
            "unknown field 'structured_outputs.xml'; structured_outputs takes choice, grammar, json, json_object, regex",
        ),
        ({"structured_outputs": {"json_object": False}}, "structured_outputs.json_object must be true, or left out"),
        ({"guided_regex": "a", "ignore_eos": True}, "ignore_eos and guided_regex contradict each other: "),
        ({"guided_regex": "a", "min_tokens": 1}, "min_tokens and guided_regex contradict each other: "),
        ({"guided_regex": "a" * 70000}, "the body is larger than"),
    ],
)
def test_invalid_grammars(client: Client, field: dict[str, Any], message: str) -> None:
    assert client.post(COMPLETIONS, {**HELLO, **field}).json()["error"]["message"].startswith(message)


def test_instances_without_grammar_support(expect_error: ExpectError, backend: ScriptedBackend) -> None:
    assert backend.info is not None
    backend.info = replace(backend.info, supports_grammars=False)
    error = expect_error(CHAT, {**CHATTING, "response_format": {"type": "json_object"}})
    assert error["message"].startswith("response_format is not supported by all instances, some of which are older")


def test_a_nested_tool_schema(
    tool_tokenizers: dict[str, Tokenizer], make_app: Callable[..., Application], make_client: type[Client]
) -> None:
    schema: dict[str, Any] = {"type": "string"}
    for _ in range(100):
        schema = {"type": "array", "items": schema}
    parameters = {"type": "object", "properties": {"a": schema}}
    body = {"tools": [{"type": "function", "function": {"name": "f", "parameters": parameters}}]}
    client = make_client(make_app(tool_tokenizers["hermes"]))
    reply = client.post(CHAT, {**CHATTING, **body, "tool_choice": "required"})
    assert reply.status_code == 400, reply.text
    message = "tools is nested too deeply; at most 64 levels are allowed"
    error = {"message": message, "type": "invalid_request_error", "param": "tools", "code": "invalid_grammar"}
    assert reply.json() == {"error": error}
