"""What clients of agents send beside the usual fields, and streams that wait."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import httpx
import pytest

from pdserve.errors import Unavailable
from pdserve.lines.event_stream import read_events

if TYPE_CHECKING:
    from contextlib import AbstractContextManager

    from pdserve.router.telemetry.metrics import Metrics
    from pdserve.router.text.tokenizer import Tokenizer
    from pdserve.router.web.application import Application
    from tests.router.conftest import Client, ScriptedBackend

CHAT, RESPONSES, MESSAGES = "/v1/chat/completions", "/v1/responses", "/v1/messages"
CACHE = {"cache_control": {"type": "ephemeral"}}
WEATHER = {"name": "weather", "input_schema": {"type": "object"}}
# vllm.sampling_params.StructuredOutputsParams() as JSON.
OUTPUTS_OF_VLLM = {
    **dict.fromkeys(("json", "regex", "choice", "grammar", "json_object", "whitespace_pattern", "structural_tag")),
    **dict.fromkeys(("disable_fallback", "disable_any_whitespace", "disable_additional_properties"), False),
}
TEXT = {"type": "text", "text": "hi", "x": 1}
HI: dict[str, Any] = {"role": "user", "content": "hi"}
BODIES: dict[str, dict[str, Any]] = {
    CHAT: {"messages": [HI]},
    RESPONSES: {"input": "hi"},
    MESSAGES: {"messages": [HI], "max_tokens": 5},
}


def said(part: dict[str, Any]) -> dict[str, Any]:
    return {"role": "user", "content": [part]}


@pytest.mark.parametrize(
    ("path", "fields"),
    [
        (CHAT, {"store": True, "service_tier": "flex", "verbosity": "low"}),
        (CHAT, {"messages": [{"role": "user", "content": [{"type": "text", "text": "hi", **CACHE}], **CACHE}]}),
        (CHAT, {"tools": [{"type": "function", "function": {"name": "f"}, **CACHE}], "tool_choice": "none"}),
        (RESPONSES, {"include": ["reasoning.encrypted_content"], "store": True, "service_tier": "priority"}),
        (RESPONSES, {"text": {"verbosity": "medium"}, "reasoning": {"effort": None, "summary": "detailed"}}),
        (RESPONSES, {"context_management": [{"type": "compaction", "compact_threshold": 1000}]}),
        (MESSAGES, {"context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]}}),
        (
            MESSAGES,
            {"tools": [{**WEATHER, "type": None, "eager_input_streaming": True}], "tool_choice": {"type": "none"}},
        ),
        (MESSAGES, {"messages": [{**HI, "id": None, "content": [{"type": "text", "text": "hi", "citations": None}]}]}),
        # What vLLM's and SGLang's clients write at its default, or as these servers' pages show.
        (CHAT, {"echo": False, "documents": [], "mm_processor_kwargs": {}, "return_tokens_as_token_ids": False}),
        (
            CHAT,
            {"separate_reasoning": True, "stream_reasoning": True, "no_stop_trim": False, "truncation_side": "left"},
        ),
        (CHAT, {"thinking_token_budget": -1, "session_id": "one"}),
        (CHAT, {"messages": [{"role": "user", "content": [{"type": "text", "text": "hi", "annotations": None}]}]}),
        (CHAT, {"structured_outputs": {**OUTPUTS_OF_VLLM, "choice": ["a", "b"]}}),
    ],
)
def test_hints_without_effect_are_accepted(client: Client, path: str, fields: dict[str, Any]) -> None:
    response = client.post(path, {**BODIES[path], **fields})
    assert response.status_code == 200, response.text


@pytest.mark.parametrize("path", BODIES)
def test_unknown_fields_may_be_ignored(
    make_app: Callable[..., Application], make_client: type[Client], tokenizer: Tokenizer, metrics: Metrics, path: str
) -> None:
    body = {**BODIES[path], "chat_id": "x", "options": {"a": 1}}
    refused = make_client(make_app(tokenizer)).post(path, body)
    assert refused.status_code == 400 and "unknown field 'chat_id'" in refused.text
    client = make_client(make_app(tokenizer, unknown_fields="ignore"))
    assert client.post(path, body).status_code == 200
    assert metrics.ignored_fields._value.get() == 2
    assert client.post(path, {**BODIES[path], "temperature": "hot"}).status_code == 400
    assert client.post(path, {**BODIES[path], **{f"x{i}": 1 for i in range(40)}}).status_code == 400


def test_unknown_fields_may_be_ignored_anywhere(
    make_app: Callable[..., Application], make_client: type[Client], tokenizer: Tokenizer
) -> None:
    client = make_client(make_app(tokenizer, unknown_fields="ignore"))
    body = {"messages": [{**HI, "id": 1}], "stream": True, "stream_options": {"include_usage": True, "x": 1}}
    assert client.post(CHAT, body).status_code == 200


@pytest.mark.parametrize(
    ("path", "fields", "param"),
    [
        (CHAT, {"messages": [said(TEXT)]}, "messages[0].content[0].x"),
        (CHAT, {"structured_outputs": {"choice": ["a"], "x": 1}}, "structured_outputs.x"),
        (CHAT, {"prediction": {"type": "content", "content": [TEXT]}}, "prediction.content[0].x"),
        ("/tokenize", {"messages": [said(TEXT)]}, "messages[0].content[0].x"),
        (RESPONSES, {"input": [{**HI, "x": 1}]}, "input[0].x"),
        (RESPONSES, {"input": [said({**TEXT, "type": "input_text"})]}, "input[0].content[0].x"),
        (RESPONSES, {"input": [{"type": "reasoning", "summary": [], "x": 1}, HI]}, "input[0].x"),
        (MESSAGES, {"messages": [{**HI, "x": 1}]}, "messages[0].x"),
        (MESSAGES, {"messages": [said(TEXT)]}, "messages[0].content[0].x"),
        (MESSAGES, {"system": [TEXT]}, "system[0].x"),
        (MESSAGES, {"tools": [{**WEATHER, "x": 1}], "tool_choice": {"type": "none"}}, "tools[0].x"),
        (MESSAGES, {"tools": [WEATHER], "tool_choice": {"type": "none", "x": 1}}, "tool_choice.x"),
        (MESSAGES, {"thinking": {"type": "disabled", "x": 1}}, "thinking.x"),
    ],
)  # fmt: skip
def test_an_unknown_field_of_a_nested_object_is_named_or_ignored(
    make_app: Callable[..., Application], make_client: type[Client], tokenizer: Tokenizer, metrics: Metrics, path: str,
    fields: dict[str, Any], param: str,
) -> None:  # fmt: skip
    body = {**BODIES.get(path, {}), **fields}
    refused = make_client(make_app(tokenizer)).post(path, body)
    assert refused.status_code == 400 and f"unknown field '{param}'" in refused.json()["error"]["message"]
    if path != MESSAGES:
        assert (refused.json()["error"]["param"], refused.json()["error"]["code"]) == (param, "unknown_field")
    client = make_client(make_app(tokenizer, unknown_fields="ignore"))
    assert client.post(path, body).status_code == 200
    assert metrics.ignored_fields._value.get() == 1


def test_answers_come_back_as_litellm_keeps_them(
    make_app: Callable[..., Application], make_client: type[Client], backend: ScriptedBackend,
    reasoning_tokenizer: Tokenizer,
) -> None:  # fmt: skip
    """Second turn of a conversation with a tool call, with the fields that LiteLLM adds, taken from its source."""
    assert backend.info is not None
    backend.info = replace(backend.info, max_model_len=4096, common_model_len=4096)
    text = '<think>\nHm.\n</think>\n\n<tool_call>{"name": "f", "arguments": {"a": 1}}</tool_call>'
    backend.generates([*reasoning_tokenizer.encode(text, add_special_tokens=False), 0], "stop")
    client = make_client(make_app(reasoning_tokenizer))
    tools = [{"type": "function", "function": {"name": "f", "description": "d", "parameters": {"type": "object"}}}]
    body: dict[str, Any] = {"model": "demo", "tools": tools, "tool_choice": "auto", "parallel_tool_calls": True}
    [choice] = client.post(CHAT, {**body, "messages": [HI]}).json()["choices"]
    message = choice["message"]
    unknown = {name: message.pop(name) for name in ("reasoning", "refusal")}
    [call] = message["tool_calls"]
    kept: dict[str, Any] = {
        **message,
        "tool_calls": [{**call, "index": 0, "provider_specific_fields": None, "extra_content": {"google": {}}}],
        "function_call": None,
        "thinking_blocks": [{"type": "thinking", "thinking": "Hm.", "signature": ""}],
        "provider_specific_fields": {**unknown, "reasoning_content": message["reasoning_content"]},
    }
    result = {"role": "tool", "name": "f", "content": "2", "tool_call_id": call["id"]}
    for answer in (kept, {"role": "assistant", "content": None, "tool_calls": [call], "reasoning_content": "Hm."}):
        assert client.post(CHAT, {**body, "messages": [HI, answer, result]}).status_code == 200
    _, first, second = (request.prompt for request in backend.requests)
    assert first == second and "Hm." in reasoning_tokenizer.decode(first)


@pytest.mark.parametrize("kind", ["thinking", "reasoning"])
def test_reasoning_may_come_back_as_a_part(
    make_app: Callable[..., Application], make_client: type[Client], backend: ScriptedBackend,
    reasoning_tokenizer: Tokenizer, kind: str,
) -> None:  # fmt: skip
    name = "thinking" if kind == "thinking" else "text"
    client = make_client(make_app(reasoning_tokenizer))
    text = {"type": "text", "text": "Yes."}
    parts = [{"type": kind, name: "Hm.", "signature": "s"}, {"type": "redacted_thinking", "data": "x"}, text]
    for answer in ({"content": parts}, {"content": "Yes.", "reasoning": "Hm."}):
        body = {"messages": [HI, {"role": "assistant", **answer}], "continue_final_message": True, "max_tokens": 5}
        assert client.post(CHAT, body).status_code == 200
    first, second = (request.prompt for request in backend.requests)
    assert first == second
    assert "Hm." in reasoning_tokenizer.decode(first)
    for wrong in ({"role": "user", "content": parts}, {"role": "assistant", "content": [{"type": kind}]}):
        assert client.post(CHAT, {"messages": [wrong]}).status_code == 400


@pytest.mark.parametrize(
    ("path", "comment"), [(CHAT, ": keep-alive"), (RESPONSES, ": keep-alive"), (MESSAGES, "event: ping")]
)
def test_a_stream_that_waits_gets_comments(
    make_app: Callable[..., Application], serving: Callable[..., AbstractContextManager[str]], backend: ScriptedBackend,
    tokenizer: Tokenizer, path: str, comment: str,
) -> None:  # fmt: skip
    gate = threading.Semaphore(0)
    backend.generates(tokenizer.encode(" Paris."), gate=gate)
    body = {**BODIES[path], "stream": True}
    with (
        serving(make_app(tokenizer, sse_keep_alive=0.02)) as url,
        httpx.stream("POST", url + path, json=body, timeout=600) as response,
    ):
        pieces = response.iter_text()
        waited = next(pieces) + next(pieces)
        gate.release(100)
        assert response.status_code == 200 and waited.count(comment) >= 2
        text = waited + "".join(pieces)
    without = "\n\n".join(event for event in text.split("\n\n") if not event.startswith(comment))
    assert "Par" in without and text.endswith("\n\n")
    assert not [stream for stream in backend.streams if stream.cancelled]


def test_a_queued_stream_gets_comments_and_then_its_error(
    make_app: Callable[..., Application], serving: Callable[..., AbstractContextManager[str]], backend: ScriptedBackend,
    tokenizer: Tokenizer,
) -> None:  # fmt: skip
    gate = threading.Semaphore(0)
    backend.generates(tokenizer.encode(" Paris."), gate=gate)
    app = make_app(tokenizer, sse_keep_alive=0.02, max_requests=1)
    body = {**BODIES[CHAT], "stream": True}
    with (
        serving(app) as url,
        httpx.Client(timeout=600) as http,
        http.stream("POST", url + CHAT, json=body) as first,
        http.stream("POST", url + CHAT, json=body) as second,
    ):
        pieces = second.iter_text()
        waited = next(pieces)
        backend.fails(Unavailable("no instance is ready", kind="no_instance"), error_at_open=True)
        gate.release(100)
        assert ": keep-alive" in waited and second.status_code == 200
        assert "[DONE]" in first.read().decode()
        events = [event for event in "".join(pieces).split("\n\n") if event.startswith("data: ")]
        assert "no instance is ready" in events[0] and events[1:] == ["data: [DONE]"]


def test_an_error_before_the_first_comment_has_a_status(
    make_app: Callable[..., Application], make_client: type[Client], backend: ScriptedBackend, tokenizer: Tokenizer
) -> None:
    backend.fails(Unavailable("no instance is ready", kind="no_instance"), error_at_open=True)
    response = make_client(make_app(tokenizer, sse_keep_alive=600)).post(CHAT, {**BODIES[CHAT], "stream": True})
    assert response.status_code == 503


def test_a_client_that_leaves_while_it_waits_frees_its_place(
    make_app: Callable[..., Application], serving: Callable[..., AbstractContextManager[str]], backend: ScriptedBackend,
    tokenizer: Tokenizer,
) -> None:  # fmt: skip
    backend.generates(tokenizer.encode(" Paris."), None, hang=True)
    app = make_app(tokenizer, sse_keep_alive=0.02, max_requests=1)
    body = {**BODIES[CHAT], "stream": True}
    with serving(app) as url, httpx.Client(timeout=600) as http:
        with http.stream("POST", url + CHAT, json=body) as first:
            next(first.iter_text())
            with http.stream("POST", url + CHAT, json=body) as second:
                next(second.iter_text())
        backend.generates(tokenizer.encode(" Paris."))
        assert http.post(url + CHAT, json=BODIES[CHAT]).status_code == 200


def test_an_echo_without_an_answer(client: Client, tokenizer: Tokenizer) -> None:
    body = {"prompt": "The capital", "max_tokens": 0, "echo": True, "logprobs": 1}
    whole = client.post("/v1/completions", body).json()
    [choice] = whole["choices"]
    ids = tokenizer.encode("The capital")
    assert (choice["text"], choice["finish_reason"]) == ("The capital", "length")
    assert len(choice["logprobs"]["tokens"]) == len(choice["logprobs"]["token_logprobs"]) == len(ids)
    assert (whole["usage"]["prompt_tokens"], whole["usage"]["completion_tokens"]) == (len(ids), 0)
    response = client.post("/v1/completions", {**body, "stream": True})
    events = [json.loads(data) for data in read_events([response.content]) if data != "[DONE]"]
    assert "".join(event["choices"][0]["text"] for event in events) == "The capital"
    assert client.post("/v1/completions", {"prompt": "a", "max_tokens": 0}).status_code == 400


def test_tokens_of_prompts_with_tools(
    make_app: Callable[..., Application], make_client: type[Client], tool_tokenizers: dict[str, Tokenizer]
) -> None:
    client = make_client(make_app(tool_tokenizers["hermes"]))
    tools = [{"type": "function", "function": {"name": "look", "description": "looks"}}]
    plain, with_tools = (
        client.post("/tokenize", {"messages": [HI], **more}).json()["tokens"] for more in ({}, {"tools": tools})
    )
    answer = client.post(CHAT, {"messages": [HI], "tools": tools}).json()
    assert len(plain) < len(with_tools) == answer["usage"]["prompt_tokens"]
    assert client.post("/tokenize", {"prompt": "hi", "tools": tools}).status_code == 400


def test_the_list_of_models_may_end_with_a_slash(client: Client) -> None:
    assert client.get("/v1/models/").json() == client.get("/v1/models").json()
