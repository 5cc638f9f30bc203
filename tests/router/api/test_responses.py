"""/v1/responses: whole responses and events, as the official client reads them."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import openai
import pytest

from pdserve.config import RouterConfig
from pdserve.errors import Unavailable
from pdserve.output import Output
from pdserve.router.limits.key_file import load_api_keys
from pdserve.router.telemetry.metrics import Metrics
from pdserve.router.text.tokenizer import Tokenizer
from pdserve.router.web.admission import AdmissionController
from pdserve.router.web.app import create_app
from pdserve.router.web.application import Application

if TYPE_CHECKING:
    from tests.router.conftest import Client, ScriptedBackend

RESPONSES = "/v1/responses"
TURNS: list[Any] = [
    {"role": "user", "content": "one"},
    {
        "type": "message",
        "id": "msg_1",
        "role": "assistant",
        "status": "completed",
        "content": [{"type": "output_text", "text": "two", "annotations": [], "logprobs": []}],
    },
    {"role": "user", "content": [{"type": "input_text", "text": "three"}, {"type": "input_text", "text": "four"}]},
]
CHAT = [
    {"role": "system", "content": "be brief"},
    {"role": "user", "content": "one"},
    {"role": "assistant", "content": "two"},
    {"role": "user", "content": "three\nfour"},
]


def test_the_official_client(url: str, backend: ScriptedBackend, tokenizer: Tokenizer) -> None:
    schema = {"type": "json_schema", "name": "s", "schema": {"type": "object"}}
    extra: dict[str, Any] = {"text": {"format": schema}, "metadata": {"a": "b"}}
    common: dict[str, Any] = {"model": "demo", "instructions": "be brief", "input": TURNS, "temperature": 0.5}
    backend.generates([*tokenizer.encode(" Paris 漢."), 0], "stop")
    with openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:
        whole = client.responses.create(**common, **extra)
        with client.responses.stream(**common, max_output_tokens=9) as stream:
            kinds = [event.type for event in stream]
            streamed = stream.get_final_response()
    for response in (whole, streamed):
        assert (response.output_text, response.status, response.temperature) == (" Paris 漢.", "completed", 0.5)
        assert response.id.startswith("resp_") and response.usage is not None
        assert response.usage.input_tokens == len(tokenizer.render_chat(CHAT))
        assert response.usage.output_tokens == len(tokenizer.encode(" Paris 漢.")) + 1
    assert whole.metadata == {"a": "b"}
    first, second = backend.requests
    assert first.prompt == second.prompt == tokenizer.render_chat(CHAT)
    assert (json.loads(first.sampling.grammar), second.sampling.grammar) == ({"json": {"type": "object"}}, "")
    assert second.sampling.max_tokens == 9
    assert [kind for kind in kinds if kind != "response.output_text.delta"] == [
        "response.created",
        "response.in_progress",
        "response.output_item.added",
        "response.content_part.added",
        "response.output_text.done",
        "response.content_part.done",
        "response.output_item.done",
        "response.completed",
    ]


TOOLS: list[Any] = [
    {
        "type": "function",
        "name": "weather",
        "description": "of a city",
        "parameters": {"type": "object"},
        "strict": False,
    },
    {"type": "function", "name": "time", "parameters": {}, "strict": False},
]
CALLS = (
    'Let me see.<tool_call>\n{"name": "weather", "arguments": {"city": "Paris"}}\n</tool_call>\n'
    '<tool_call>\n{"name": "time", "arguments": {}}\n</tool_call>'
)


def test_function_calls(
    metrics: Metrics,
    tool_tokenizers: dict[str, Tokenizer],
    backend: ScriptedBackend,
    serving: Callable[..., AbstractContextManager[str]],
) -> None:
    """Whole and streamed, then continued by the results, sent back as items or by the id of the response."""
    tokenizer = tool_tokenizers["hermes"]
    assert backend.info is not None
    backend.info = replace(backend.info, max_model_len=4000, common_model_len=4000)
    common: dict[str, Any] = {"model": "demo", "tools": TOOLS}
    config = RouterConfig(model="demo", response_store="memory", max_body_bytes=20_000)
    admission = AdmissionController(load_api_keys("", ""), config, metrics, time.monotonic)
    app = create_app(config, tokenizer, backend, admission, list, backend.log.latest, dict)
    with serving(app) as url:
        client = openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)
        backend.generates([*tokenizer.encode(CALLS), 0], "stop")
        whole = client.responses.create(**common, input="one", parallel_tool_calls=True)
        events = [*client.responses.create(**common, input="one", stream=True)]
        assert events[-1].type == "response.completed"
        streamed = events[-1].response
        for response in (whole, streamed):
            assert (response.status, response.output_text) == ("completed", "Let me see.")
            found = [(one.name, one.arguments, one.status) for one in response.output if one.type == "function_call"]
            assert found == [("weather", '{"city": "Paris"}', "completed"), ("time", "{}", "completed")]
            assert [tool.to_dict() for tool in response.tools] == TOOLS
        deltas = ["", "", ""]
        for event in events:
            if event.type in ("response.output_text.delta", "response.function_call_arguments.delta"):
                deltas[event.output_index] += event.delta
        assert deltas == ["Let me see.", '{"city": "Paris"}', "{}"]
        added = [event.item for event in events if event.type == "response.output_item.added"]
        done = [event.item for event in events if event.type == "response.output_item.done"]
        assert [item.id for item in added] == [item.id for item in done] == [item.id for item in streamed.output]
        assert done == streamed.output and {item.status for item in added} == {"in_progress"}
        ends = [event for event in events if event.type == "response.function_call_arguments.done"]
        assert [(event.name, event.arguments) for event in ends] == [("weather", '{"city": "Paris"}'), ("time", "{}")]

        calls = [item for item in whole.output if item.type == "function_call"]
        results: Any = [
            {"type": "function_call_output", "call_id": calls[0].call_id, "output": "sunny"},
            {
                "type": "function_call_output",
                "call_id": calls[1].call_id,
                "output": [{"type": "input_text", "text": "noon"}],
            },
        ]
        backend.generates([*tokenizer.encode(" Paris."), 0], "stop")
        sent: Any = [{"role": "user", "content": "one"}, *(item.to_dict() for item in whole.output), *results]
        by_items = client.responses.create(**common, input=sent)
        by_id = client.responses.create(**common, input=results, previous_response_id=whole.id)
        assert by_items.output_text == by_id.output_text == " Paris."
    called = [
        {
            "type": "function",
            "id": call.call_id,
            "function": {"name": call.name, "arguments": json.loads(call.arguments)},
        }
        for call in calls
    ]
    conversation: list[Any] = [
        {"role": "user", "content": "one"},
        {"role": "assistant", "content": "Let me see.", "tool_calls": called},
        {"role": "tool", "content": "sunny", "tool_call_id": calls[0].call_id},
        {"role": "tool", "content": "noon", "tool_call_id": calls[1].call_id},
    ]
    shown: list[Any] = [
        {
            "type": "function",
            "function": {name: tool[name] for name in ("name", "description", "parameters") if name in tool},
        }
        for tool in TOOLS
    ]
    assert (
        backend.requests[-2].prompt == backend.requests[-1].prompt == tokenizer.render_chat(conversation, tools=shown)
    )


def test_allowed_tools(
    make_app: Callable[..., Application],
    make_client: type[Client],
    tool_tokenizers: dict[str, Tokenizer],
    backend: ScriptedBackend,
) -> None:
    client = make_client(make_app(tool_tokenizers["hermes"]))
    choice = {"type": "allowed_tools", "mode": "required", "tools": [{"type": "function", "name": "time"}]}
    response = client.post(RESPONSES, {"input": "hello", "tools": TOOLS, "tool_choice": choice})
    assert response.status_code == 200 and response.json()["tool_choice"] == choice
    forced = client.post(RESPONSES, {"input": "hello", "tools": TOOLS, "tool_choice": choice["tools"][0]})
    assert forced.status_code == 200
    several, one = backend.requests
    assert several.sampling.grammar == one.sampling.grammar and several.prompt == one.prompt
    faults: list[dict[str, Any]] = [
        {"mode": "none"},
        {"tools": []},
        {"tools": [{"type": "function", "name": "rm"}]},
        {"a": 1},
    ]
    for wrong in faults:
        response = client.post(RESPONSES, {"input": "hello", "tools": TOOLS, "tool_choice": {**choice, **wrong}})
        assert response.status_code == 400 and response.json()["error"]["param"] == "tool_choice"


def test_a_forced_call(
    make_app: Callable[..., Application],
    make_client: type[Client],
    tool_tokenizers: dict[str, Tokenizer],
    backend: ScriptedBackend,
) -> None:
    """It follows a grammar, and one that is cut off is incomplete."""
    tokenizer, client = tool_tokenizers["hermes"], make_client(make_app(tool_tokenizers["hermes"]))
    body = {"input": "hello", "tools": TOOLS, "tool_choice": {"type": "function", "name": "time"}}
    backend.generates(tokenizer.encode('<tool_call>\n{"name": "time", "arguments": {"zone'), "length")
    response = client.post(RESPONSES, body).json()
    begin, *_ = json.loads(backend.requests[0].sampling.grammar)["format"]["elements"]
    assert begin["text"] == '<tool_call>\n{"name": "time", "arguments": '
    [item] = response["output"]
    assert (item["type"], item["status"], item["name"], item["arguments"]) == (
        "function_call",
        "incomplete",
        "time",
        '{"zone',
    )


def events_of(text: str) -> list[dict[str, Any]]:
    parts = [part.split("\n") for part in text.split("\n\n") if part]
    events = [json.loads(data.removeprefix("data: ")) for _, data in parts]
    assert [name for name, _ in parts] == [f"event: {event['type']}" for event in events]
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    return events


def test_a_response_cut_off_by_max_output_tokens(
    client: Client, backend: ScriptedBackend, tokenizer: Tokenizer
) -> None:
    backend.generates(tokenizer.encode(" Paris."), "length")
    whole = client.post(RESPONSES, {"input": "hello"}).json()
    events = events_of(client.post(RESPONSES, {"input": "hello", "stream": True}).text)
    assert events[-1]["type"] == "response.incomplete"
    deltas = [event["delta"] for event in events if event["type"] == "response.output_text.delta"]
    assert "".join(deltas) == " Paris." and len(deltas) == 2
    for response in (whole, events[-1]["response"]):
        assert response["incomplete_details"] == {"reason": "max_output_tokens"}
        assert [(item["status"], item["content"][0]["text"]) for item in response["output"]] == [
            ("incomplete", " Paris.")
        ]
    assert events[0]["response"]["output"] == [] and events[0]["response"]["usage"] is None


def test_extra_parameters_of_vllm(client: Client, backend: ScriptedBackend) -> None:
    extra = {"ignore_eos": True, "top_k": 7, "min_p": 0.1, "seed": 5, "repetition_penalty": 1.5, "cache_salt": "s"}
    assert client.post(RESPONSES, {"input": "hello", "max_output_tokens": 9, **extra}).status_code == 200
    [request] = backend.requests
    sampling = {name: getattr(request.sampling, name) for name in extra if name != "cache_salt"}
    assert {**sampling, "cache_salt": "s"} == extra and request.salt
    backend.generates([40, 41, 42], "length")
    assert client.post(RESPONSES, {"input": "hello", "stop": "H"}).json()["output"][0]["content"][0]["text"] == "G"


def test_an_error_within_a_stream(client: Client, backend: ScriptedBackend) -> None:
    backend.fails(Unavailable("instance d0 was lost", kind="instance_lost"))
    assert client.post(RESPONSES, {"input": "hello", "stream": True}).status_code == 503
    backend.script.chunks = [[Output([40])]]
    events = events_of(client.post(RESPONSES, {"input": "hello", "stream": True}).text)
    assert (events[-1]["type"], events[-1]["code"]) == ("error", "instance_lost")


@pytest.mark.parametrize(
    ("field", "message"),
    [
        ({"input": None}, "input must be a string or a list of messages"),
        ({"input": []}, "input must hold at least one message"),
        (
            {"input": [{"role": "tool", "content": "a"}]},
            "input[0] must have content and one of the roles system, developer, ",
        ),
        ({"input": [{"role": "user", "content": 5}]}, "input[0].content must be a string or a list of text parts"),
        (
            {"input": [{"role": "user", "content": [{"type": "input_image"}]}]},
            'input[0].content[0] must be a text part, {"type": "input_text", "text": "…"}; others are not supported',
        ),
        (
            {"input": [{"type": "computer_call"}]},
            "input[0] must be a message, reasoning, a function_call or a function_",
        ),
        (
            {"input": [{"type": []}]},
            "input[0] must be a message, reasoning, a function_call or a function_call_output; '[",
        ),
        ({"input": [{"type": "function_call"}]}, "input[0] must have name, arguments, call_id as strings; it may have"),
        (
            {"input": [{"type": "function_call_output", "call_id": "1"}]},
            "input[0] must have output, call_id as strings",
        ),
        ({"tools": [{"type": "web_search"}]}, "tools[0].type must be 'function', not 'web_search'"),
        ({"tools": [{"type": "function"}]}, "tools[0].name is required"),
        ({"max_output_tokens": 0}, "max_output_tokens must be at least 1, not 0"),
        ({"max_output_tokens": 9000}, "this model's context is 256 tokens; you asked for "),
        (
            {"reasoning": {"effort": "low"}},
            "this model's chat template has no variable 'reasoning_effort'; leave it out",
        ),
        ({"tools": [{"type": "web_search", "name": "a"}]}, "tools[0].type must be 'function', not 'web_search'"),
        ({"tools": [{"type": "function", "name": "a"}]}, "this model's chat template has no tool-call format"),
        ({"tool_choice": {"type": "function", "name": "a"}}, 'tool_choice must be "none", "auto", "required", {'),
        (
            {"previous_response_id": "r"},
            "previous_response_id is not supported: this router keeps no responses; send the whole conversation",
        ),
        ({"max_tokens": 5}, "unknown field 'max_tokens'; did you mean 'max_output_tokens'?"),
        ({"messages": []}, "unknown field 'messages'; did you mean 'input'?"),
        ({"text": {"format": {"type": "json_schema"}, "tone": "low"}}, "unknown field 'text.tone'"),
        ({"include": ["message.output_text.logprobs"]}, "include[0] must be "),
        ({"model": "gpt"}, "the model 'gpt' does not exist"),
    ],
)
def test_invalid_bodies(client: Client, field: dict[str, Any], message: str) -> None:
    response = client.post(RESPONSES, {"input": "hello", **field})
    assert response.status_code in (400, 404)
    assert response.json()["error"]["message"].startswith(message), response.text


def test_only_the_last_item_of_an_answer_is_cut_off(
    make_app: Callable[..., Application],
    make_client: type[Client],
    tool_tokenizers: dict[str, Tokenizer],
    backend: ScriptedBackend,
) -> None:
    tokenizer, client = tool_tokenizers["hermes"], make_client(make_app(tool_tokenizers["hermes"]))
    for at_once in (False, True):
        ids = tokenizer.encode(CALLS[: CALLS.rindex("}}")])
        backend.script.chunks = [
            [Output(ids, "length")] if at_once else [*map(Output, ([i] for i in ids[:-1])), Output(ids[-1:], "length")]
        ]
        body = {"input": "hello", "tools": TOOLS}
        whole = client.post(RESPONSES, body).json()
        *_, last = events_of(client.post(RESPONSES, {**body, "stream": True}).text)
        for response in (whole, last["response"]):
            statuses = [(item["type"], item["status"]) for item in response["output"]]
            assert statuses == [
                ("message", "completed"),
                ("function_call", "completed"),
                ("function_call", "incomplete"),
            ]


def test_text_after_calls_is_an_item_with_an_id_of_its_own(
    make_app: Callable[..., Application],
    tool_tokenizers: dict[str, Tokenizer],
    backend: ScriptedBackend,
    serving: Callable[..., AbstractContextManager[str]],
) -> None:
    ids = tool_tokenizers["hermes"].encode(CALLS.replace("\n<tool_call>", " And:<tool_call>") + " Done.")
    backend.script.chunks = [[*map(Output, ([i] for i in ids[:-1])), Output(ids[-1:], "stop")]]
    request: Any = {"model": "demo", "input": "hello", "tools": TOOLS}
    with (
        serving(make_app(tool_tokenizers["hermes"])) as url,
        openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client,
    ):
        whole = client.responses.create(**request)
        with client.responses.stream(**request) as stream:  # raises if two items have one id
            streamed = stream.get_final_response()
    for response in (whole, streamed):
        items = [item.to_dict() for item in response.output]
        assert [item["type"] for item in items] == ["message", *["function_call", "message"] * 2]
        assert len({item["id"] for item in items}) == 5
        assert [item["id"] for item in items[::2]] == [f"msg_{response.id}{suffix}" for suffix in ("", "_2", "_4")]
