"""Histories: whatever an answer of ours has, it can be sent back, however it ended and wherever it was cut."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pdserve.errors import BadRequest
from pdserve.output import Output
from pdserve.router.api.chat import MAX_MENDED, template_messages
from pdserve.router.api.schemas import CalledFunction, Message, ToolCall

if TYPE_CHECKING:
    from pdserve.router.text.tokenizer import Tokenizer
    from pdserve.router.web.application import Application
    from tests.router.conftest import Client, ScriptedBackend

CHAT, RESPONSES, MESSAGES = "/v1/chat/completions", "/v1/responses", "/v1/messages"
HERMES_CALL = '<tool_call>\n{"name": "f", "arguments": {"code": "a\n\\d", "n": [1, {"x": None}]}}\n</tool_call>'
OUTPUTS = [
    "<think>\nHm.\n</think>\n\n",
    "First. ",
    HERMES_CALL,
    '<tool_call>{"name": "f", "arguments": {"a": 1 b',
    "\nLast.",
    "é",
]
QUESTION = {"role": "user", "content": "go on"}
FUNCTION = {"name": "f", "parameters": {"type": "object"}}


@pytest.fixture
def talk(
    make_app: Callable[..., Application], make_client: type[Client], backend: ScriptedBackend, reasoning_tokenizer: Tokenizer
) -> Callable[..., dict[str, Any]]:  # fmt: skip
    """talk(path, body, text, finish_reason) returns the answer that has this text of the model."""
    assert backend.info is not None
    backend.info = replace(backend.info, max_model_len=4096, common_model_len=4096)
    client = make_client(make_app(reasoning_tokenizer))

    def post(path: str, body: dict[str, Any], text: str = "Yes.", finish_reason: str = "stop") -> dict[str, Any]:
        ids = reasoning_tokenizer.encode(text, add_special_tokens=False) or [0]
        backend.generates([*ids, 0] if finish_reason == "stop" else ids, finish_reason)
        response = client.post(path, body)
        assert response.status_code == 200, response.text
        if not body.get("stream"):
            return dict(response.json())
        return {"events": events_of(response.text)}

    return post


def again_in_chat(talk: Callable[..., dict[str, Any]], text: str, finish_reason: str) -> None:
    body: dict[str, Any] = {"messages": [QUESTION], "tools": [{"type": "function", "function": FUNCTION}]}
    [choice] = talk(CHAT, body, text, finish_reason)["choices"]
    message, calls = choice["message"], choice["message"].get("tool_calls", [])
    results = [{"role": "tool", "tool_call_id": call["id"], "content": None} for call in calls]
    talk(CHAT, {**body, "messages": [QUESTION, message, *results, QUESTION]})
    if choice["finish_reason"] == "tool_calls":
        assert all(isinstance(json.loads(call["function"]["arguments"]), dict) for call in calls) and calls


def again_in_responses(talk: Callable[..., dict[str, Any]], text: str, finish_reason: str) -> None:
    body: dict[str, Any] = {"input": [QUESTION], "tools": [{"type": "function", **FUNCTION}], "max_output_tokens": 400}
    whole = talk(RESPONSES, body, text, finish_reason)
    streamed = talk(RESPONSES, {**body, "stream": True}, text, finish_reason)["events"][-1]["response"]
    shown = [
        [(item["type"], item.get("content"), item.get("arguments")) for item in one["output"]]
        for one in (whole, streamed)
    ]
    assert shown[0] == shown[1]
    for output in (whole["output"], streamed["output"]):
        calls = [item for item in output if item["type"] == "function_call"]
        results = [{"type": "function_call_output", "call_id": call["call_id"], "output": "x"} for call in calls]
        talk(RESPONSES, {**body, "input": [QUESTION, *output, *results, QUESTION]})


def again_in_messages(talk: Callable[..., dict[str, Any]], text: str, finish_reason: str) -> None:
    tool = {"name": "f", "input_schema": {"type": "object"}}
    body: dict[str, Any] = {"messages": [QUESTION], "tools": [tool], "max_tokens": 400}
    answer = talk(MESSAGES, body, text, finish_reason)
    calls = [block for block in answer["content"] if block["type"] == "tool_use"]
    assert (answer["stop_reason"] == "tool_use") <= bool(calls)
    results = [{"type": "tool_result", "tool_use_id": call["id"], "content": None} for call in calls]
    asked = {"role": "user", "content": [*results, {"type": "text", "text": "go on"}]}
    talk(MESSAGES, {**body, "messages": [QUESTION, {"role": "assistant", "content": answer["content"]}, asked]})


@pytest.mark.parametrize("again", [again_in_chat, again_in_responses, again_in_messages])
def test_any_answer_can_be_sent_back(again: Callable[..., None], talk: Callable[..., dict[str, Any]]) -> None:
    @settings(max_examples=25, deadline=None, derandomize=True)
    @given(st.lists(st.sampled_from(OUTPUTS), max_size=4).map("".join), st.data())
    def check(text: str, data: st.DataObject) -> None:
        end = data.draw(st.integers(0, len(text)))
        again(talk, text[:end], data.draw(st.sampled_from(["stop", "length"])))

    check()


@pytest.mark.parametrize(
    ("arguments", "shown"),
    [
        ('{"city": "Ul', {"city": "Ul"}),
        ('{"a": 1, "b', {"a": 1, "b": None}),
        ("", {}),
        ("null", {}),
        ('["a"]', {}),
        ("f(a=1)", {}),
        ('{"code": "a\nb"}', {"code": "a\nb"}),
        ('{"a": NaN}', {"a": "NaN"}),
        ('{"a": ' + "[" * 5000, None),
    ],
)
def test_the_template_sees_what_is_left_of_arguments(
    arguments: str, shown: object, talk: Callable[..., Any], backend: ScriptedBackend, reasoning_tokenizer: Tokenizer
) -> None:
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": arguments}}
    message = {"role": "assistant", "content": None, "tool_calls": [call]}
    talk(
        CHAT,
        {"messages": [QUESTION, message, {"role": "tool", "tool_call_id": "c", "content": "cut off"}], "max_tokens": 9},
    )
    prompt = reasoning_tokenizer.decode(backend.requests[-1].prompt, skip_special_tokens=False)
    assert shown is None or f'"arguments": {json.dumps(shown)}' in prompt


def test_what_is_mended_of_the_arguments_of_one_body_is_limited() -> None:
    """Each character takes some microseconds of a worker that others wait for. JSON is not limited."""

    def messages(*arguments: str) -> list[Message]:
        calls = [ToolCall(function=CalledFunction(name="f", arguments=text)) for text in arguments]
        return [Message(role="assistant", tool_calls=[call]) for call in calls]

    cut = '{"a": "' + "x" * (MAX_MENDED // 2)
    first, whole = template_messages(messages(cut, cut + '"}' + " " * MAX_MENDED))
    assert first["tool_calls"][0]["function"]["arguments"] == whole["tool_calls"][0]["function"]["arguments"]
    with pytest.raises(BadRequest, match="have more than 262144 characters; send JSON objects"):
        template_messages(messages(cut, cut))


@pytest.mark.parametrize(
    "message",
    [
        {"role": "assistant", "content": None},
        {"role": "assistant"},
        {"role": "assistant", "content": None, "tool_calls": []},
        {"role": "assistant", "content": None, "reasoning": "hm", "reasoning_content": "hm", "refusal": None},
    ],
)
def test_an_assistant_may_have_said_nothing(message: dict[str, Any], talk: Callable[..., dict[str, Any]]) -> None:
    talk(CHAT, {"messages": [QUESTION, message, QUESTION], "max_tokens": 9})


def test_text_and_calls_of_one_chunk_keep_their_order(
    make_app: Callable[..., Application], make_client: type[Client], backend: ScriptedBackend, reasoning_tokenizer: Tokenizer
) -> None:  # fmt: skip
    """The model's order is kept even where a chunk has the end of a call and the text after it."""
    text = f"First. {HERMES_CALL}\nThen.{HERMES_CALL}Last."
    assert backend.info is not None
    backend.info = replace(backend.info, max_model_len=4096, common_model_len=4096)
    ids, client = reasoning_tokenizer.encode(text), make_client(make_app(reasoning_tokenizer))
    bodies: dict[str, dict[str, Any]] = {
        RESPONSES: {"input": "hi", "tools": [{"type": "function", **FUNCTION}]},
        MESSAGES: {
            "messages": [QUESTION],
            "max_tokens": 400,
            "tools": [{"name": "f", "input_schema": {"type": "object"}}],
        },
    }
    for path, body in bodies.items():
        for size in (1, 7, len(ids)):
            chunks = [Output(ids[first : first + size]) for first in range(0, len(ids), size)]
            chunks[-1] = Output([*chunks[-1].token_ids, 0], "stop")
            backend.script.chunks = [chunks]
            streamed = items_of(events_of(client.post(path, {**body, "stream": True}).text))
            answer = client.post(path, body).json()
            whole = [(item["type"], text_of(item)) for item in answer.get("output") or answer["content"]]
            assert streamed == whole
            assert [text for _, text in whole][::2] == ["First.", "Then.", "Last."]
            assert all(json.loads(text)["code"] == "a\n\\d" for _, text in whole[1::2])


def events_of(text: str) -> list[dict[str, Any]]:
    datas = [event.partition("data: ")[2] for event in text.split("\n\n")]
    return [json.loads(data) for data in datas if data and data != "[DONE]"]


def items_of(events: list[dict[str, Any]]) -> list[tuple[str, str]]:
    """Return the types and texts of the items or blocks of a stream, by its deltas."""
    items: list[tuple[str, str]] = []
    for event in events:
        if started := event.get("content_block") or (event["type"].endswith("item.added") and event["item"]):
            items.append((started["type"], ""))
        delta = event.get("delta")
        if isinstance(delta, dict):
            delta = delta.get("text") or delta.get("partial_json")
        if delta:
            items[-1] = (items[-1][0], items[-1][1] + delta)
    return items


def text_of(item: dict[str, Any]) -> str:
    parts = item.get("content") or [item]
    return str(parts[0].get("text") or item.get("arguments") or json.dumps(item["input"]))


PARSED = {
    "parsed": {"a": [1]},
    "library": None,
}  # as OpenAI's library adds to what it has parsed; and a field of another server
CALLED = {"name": "f", "arguments": "{}", "parsed_arguments": {"a": 1}, "library": None}


@pytest.mark.parametrize(
    ("path", "items"),
    [
        (CHAT, [{"role": "assistant", "content": "{}", **PARSED}]),
        (
            CHAT,
            [
                {
                    "role": "assistant",
                    "tool_calls": [{"id": "c", "type": "function", "function": CALLED, "custom": None}],
                },
                {"role": "tool", "tool_call_id": "c", "content": "x"},
            ],
        ),
        (
            RESPONSES,
            [
                {"type": "reasoning", "summary": [], "library": None},
                {
                    **{"type": "message", "role": "assistant", "phase": "final_answer", "library": None},
                    "content": [{"type": "output_text", "text": "{}", **PARSED}],
                },
                {"type": "function_call", "call_id": "c", **CALLED},
                {"type": "function_call_output", "call_id": "c", "output": "x", "caller": None},
            ],
        ),
        (MESSAGES, [{"role": "assistant", "content": [{"type": "text", "text": "{}", "library": None}]}]),
        *(
            (CHAT, [{"role": "assistant", "tool_calls": [call]}])
            for call in (
                {"function": {"name": "f", "arguments": {"code": "a"}}},  # as Ollama returns it
                {"id": None, "type": None, "function": {"name": "f"}},
                {"id": "", "function": {"name": "f", "arguments": None}},
            )
        ),
    ],
)
def test_messages_may_have_what_libraries_of_clients_add(
    path: str, items: list[dict[str, Any]], talk: Callable[..., dict[str, Any]]
) -> None:
    sent = [QUESTION, *items, QUESTION]
    talk(path, {"input": sent, "max_output_tokens": 16} if path == RESPONSES else {"messages": sent, "max_tokens": 9})


def test_all_items_of_reasoning_before_an_answer_are_its_reasoning(
    talk: Callable[..., Any], backend: ScriptedBackend, reasoning_tokenizer: Tokenizer
) -> None:
    thoughts = [
        {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": text}]}
        for text in ("Hm.", "So!")
    ]
    call = {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"}
    result = {"type": "function_call_output", "call_id": "c", "output": "x"}
    talk(RESPONSES, {"input": [QUESTION, *thoughts, call, result], "max_output_tokens": 16})
    prompt = reasoning_tokenizer.decode(backend.requests[-1].prompt, skip_special_tokens=False)
    assert "<think>\nHm.\nSo!\n</think>" in prompt
