"""/v1/responses: whole responses and events, as the official client reads them."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import openai
import pytest

from pdserve.errors import Unavailable
from pdserve.router.backend import Chunk
from pdserve.router.text.tokenizer import Tokenizer

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
    backend.script.chunks = [[Chunk([40])]]
    events = events_of(client.post(RESPONSES, {"input": "hello", "stream": True}).text)
    assert (events[-1]["type"], events[-1]["code"]) == ("error", "instance_lost")


@pytest.mark.parametrize(
    ("field", "message"),
    [
        ({"input": None}, "input must be a string or a list of messages"),
        ({"input": []}, "messages must hold at least one message"),
        (
            {"input": [{"role": "tool", "content": "a"}]},
            "input[0] must have content and one of the roles system, developer, ",
        ),
        ({"input": [{"role": "user", "content": 5}]}, "input[0].content must be a string or a list of text parts"),
        (
            {"input": [{"role": "user", "content": [{"type": "input_image"}]}]},
            'input[0].content[0] must be a text part, {"type": "input_text", "text": "…"}; others are not supported',
        ),
        ({"input": [{"type": "function_call"}]}, "input[0] must be a message; 'function_call' is not supported here"),
        ({"tools": [{"type": "web_search"}]}, "tools is not supported; leave it out or send []"),
        (
            {"store": True},
            "store is not supported: this router keeps no responses; send the whole conversation in input",
        ),
        (
            {"previous_response_id": "r"},
            "previous_response_id is not supported: this router keeps no responses; send the whole conversation",
        ),
        ({"max_tokens": 5}, "unknown field 'max_tokens'"),
        ({"text": {"format": {"type": "json_schema"}, "verbosity": "low"}}, "unknown field 'text.verbosity'"),
        ({"model": "gpt"}, "the model 'gpt' does not exist"),
    ],
)
def test_invalid_bodies(client: Client, field: dict[str, Any], message: str) -> None:
    response = client.post(RESPONSES, {"input": "hello", **field})
    assert response.status_code in (400, 404)
    assert response.json()["error"]["message"].startswith(message), response.text
