"""The schemas of request bodies."""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import pytest
from pydantic import ValidationError

from pdserve.errors import BadRequest
from pdserve.router.api import schemas
from pdserve.router.api.parsing import MAX_DEPTH, MAX_FIELDS, Body, parse_body
from pdserve.router.api.schemas import MAX_ENTRIES, NO_OPS, ChatBody, CompletionBody
from pdserve.router.dialects import adapters, embeddings
from pdserve.router.dialects.batches import schemas as of_batches
from pdserve.router.dialects.messages import schemas as of_messages
from pdserve.router.dialects.responses import conversion
from pdserve.router.dialects.responses import schemas as of_responses
from pdserve.router.dialects.responses.schemas import ResponseBody
from pdserve.router.text.tokenizer import Tokenizer
from pdserve.router.web.application import Application

if TYPE_CHECKING:
    from tests.router.conftest import Client

MANY = 5000
NOTHING = object()  # of no type that a field may have
MODULES = (schemas, of_messages, of_responses, of_batches, embeddings, adapters)
CLASSES = {
    one: None for each in MODULES for _, one in inspect.getmembers(each, inspect.isclass) if issubclass(one, Body)
}
ExpectError = Callable[..., dict[str, Any]]


def test_special_tokens_are_added_to_prompts_and_not_to_chats(client: Client) -> None:
    """As vLLM has it by default: the chat template writes those of a chat."""
    bodies: dict[str, dict[str, Any]] = {
        "/v1/completions": {"prompt": "hello"},
        "/v1/chat/completions": {"messages": [{"role": "user", "content": "hello"}]},
    }
    for path, body in bodies.items():
        statuses = [client.post(path, {**body, "add_special_tokens": one}).status_code for one in (True, False)]
        assert statuses == ([400, 200] if "messages" in body else [200, 400])


def test_no_field_is_both_supported_and_unsupported() -> None:
    assert not set(NO_OPS) & (set(CompletionBody.model_fields) | set(ChatBody.model_fields))


def num_errors(model: type[Body], fields: dict[str, Any]) -> int:
    """Return how many errors pydantic builds for a body with this value of one field."""
    with pytest.raises(ValidationError) as raised:
        model.model_validate(fields)
    return raised.value.error_count()


def schemas_of(node: object, kind: str) -> Iterator[dict[str, Any]]:
    """Yield all parts of a core schema of a type such as `list`."""
    if isinstance(node, dict):
        if node.get("type") == kind:
            yield node
        for item in node.values():
            yield from schemas_of(item, kind)
    elif isinstance(node, list):
        for item in node:
            yield from schemas_of(item, kind)


@pytest.mark.parametrize("model", CLASSES)
def test_a_body_of_wrong_types_has_few_errors(model: type[Body]) -> None:
    """Of whatever field: a new list or object of another type than `Array` and `Object` fails here."""
    core = model.__pydantic_core_schema__
    lists = [found for kind in ("list", "set", "frozenset", "tuple") for found in schemas_of(core, kind)]
    assert all(found.get("fail_fast") for found in lists)
    assert all(found["max_length"] <= MAX_ENTRIES for found in schemas_of(core, "dict"))
    for name, field in model.model_fields.items():
        key = field.alias or name
        most = MAX_ENTRIES + len(model.model_fields)
        if "Any" not in str(field.annotation):
            assert num_errors(model, {key: [NOTHING] * MANY}) <= most
            assert num_errors(model, {key: {str(i): NOTHING for i in range(MANY)}}) <= most
            assert num_errors(model, {key: [{str(i): NOTHING for i in range(MANY)}] * MANY}) <= most
    assert num_errors(model, {str(i): NOTHING for i in range(MANY)}) == 1
    assert num_errors(model, {str(i): NOTHING for i in range(MAX_FIELDS)}) <= MAX_FIELDS + len(model.model_fields)


@pytest.mark.parametrize(
    ("fields", "param", "message"),
    [
        ({"messages": [0] * MANY}, "messages[0]", "messages[0] must be an object, not a number"),
        (
            {"logit_bias": {str(i): "" for i in range(MANY)}},
            "logit_bias",
            "logit_bias must be an object with at most 1024 fields, not with 5000",
        ),
        ({str(i): 0 for i in range(MANY)}, "", "the body must be an object with at most 128 fields, not with 5001"),
        ({"messages": [{}] * 16_385}, "messages[0].role", "messages[0].role is required"),
        ({"messages": [{"role": "user"}] * 16_385}, "messages", "messages must have at most 16384 items"),
        ({"user": "u" * 513}, "user", "user must have at most 512 characters"),
        ({"logit_bias": {"9" * MANY: ""}}, "logit_bias." + "9" * 89 + "…", None),
    ],
)
def test_what_is_too_much(fields: dict[str, Any], param: str, message: str | None) -> None:
    raw = json.dumps({"messages": [{"role": "user", "content": "hello"}], **fields}).encode()
    with pytest.raises(BadRequest) as raised:
        parse_body(ChatBody, raw)
    assert raised.value.param == param
    assert str(raised.value) == message or (message is None and len(str(raised.value)) < 200)


@pytest.mark.parametrize(
    ("path", "body", "message"),
    [
        (
            "/v1/messages",
            {"messages": [{"role": "user", "content": "a"}], "metadata": {"user_id": "u" * 513}},
            "metadata.user_id must have at most 512 characters",
        ),
        (
            "/v1/messages",
            {
                "messages": [{"role": "user", "content": "a"}],
                "tools": [{"name": "f", "input_schema": {str(i): i for i in range(1025)}}],
            },
            "input_schema must be an object with at most 1024 fields, not with 1025",
        ),
        (
            "/v1/messages",
            {"messages": [{"role": "user", "content": 1}] * 16_385},
            "messages must have at most 16384 items",
        ),
        (
            "/v1/messages",
            {"messages": [{"role": "user", "content": [{"type": "tool_result", "tool_use_id": "a"}] * 16_385}]},
            "messages must have at most 16384 items",
        ),
        (
            "/v1/responses",
            {"input": [{"role": "user", "content": "a"}] * 16_385},
            "input must have at most 16384 items",
        ),
        (
            "/v1/responses",
            {"input": [{"type": "function_call_output", "output": "a", "call_id": "c" * 513}]},
            "call_id must have at most 512 characters",
        ),
    ],
)
def test_the_limits_of_chats_hold_for_what_is_converted_to_one(
    make_app: Callable[..., Application],
    make_client: type[Client],
    tokenizer: Tokenizer,
    path: str,
    body: dict[str, Any],
    message: str,
) -> None:
    body |= {"max_tokens": 1} if path == "/v1/messages" else {}
    response = make_client(make_app(tokenizer, max_body_bytes=4_000_000)).post(path, body)
    assert (response.status_code, response.json()["error"]["message"]) == (400, message)


def test_many_calls_in_one_turn() -> None:
    """Of one message of the assistant; each was copied with all before it."""
    calls = [{"type": "function_call", "name": "f", "arguments": "{}", "call_id": str(i)} for i in range(MANY)]
    [message] = conversion.to_chat_body(ResponseBody.model_validate({"input": calls})).messages
    assert message.tool_calls is not None
    assert [call.id for call in message.tool_calls] == [str(i) for i in range(MANY)]


def test_two_fields_of_one_name_are_an_error(expect_raw_error: Callable[[bytes], str]) -> None:
    for raw in (b'{"prompt": "a", "prompt": "b"}', b'{"prompt": "a", "metadata": {"x": [{"prompt": 1, "prompt": 1}]}}'):
        assert expect_raw_error(raw) == "an object of the body has two fields 'prompt'"


def test_deep_bodies(client: Client, expect_raw_error: Callable[[bytes], str]) -> None:
    for depth in (MAX_DEPTH - 6, MAX_DEPTH + 100):
        part = b'{"type": "text", "text": "hello", "cache_control": {"a": %s1%s}}' % (b"[" * depth, b"]" * depth)
        raw = b'{"messages": [{"role": "user", "content": [%s]}]}' % part
        response = client.request("POST", "/v1/chat/completions", content=raw)
        if depth < MAX_DEPTH:
            assert response.status_code == 200, response.text
        else:
            assert expect_raw_error(raw) == f"the body is nested too deeply; at most {MAX_DEPTH} levels are allowed"


@pytest.fixture
def expect_raw_error(client: Client) -> Callable[[bytes], str]:
    """Function that sends a body which is refused as no valid JSON, and returns the message."""

    def refused(raw: bytes) -> str:
        response = client.request("POST", "/v1/completions", content=raw)
        assert (response.status_code, response.json()["error"]["code"]) == (400, "invalid_json")
        return str(response.json()["error"]["message"])

    return refused


def test_pairs_are_counted_before_they_are_tokenized(monkeypatch: pytest.MonkeyPatch) -> None:
    documents = ["a"] * (embeddings.MAX_INPUTS + 1)
    body = embeddings.RerankBody.model_validate({"query": "q", "documents": documents})
    info: Any = type("Info", (), {"name": "demo", "classifies": True, "embedding_size": 1})
    with pytest.raises(BadRequest, match=r"documents has 2049 texts; at most 2048 are allowed"):
        embeddings.parse_rerank(body, None, None, info)  # type: ignore[arg-type]  # without a tokenizer
