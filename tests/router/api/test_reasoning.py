"""Reasoning in chats: fields and events of all endpoints, budgets, grammars, and the prompts of later turns."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import openai
import pytest

from pdserve.output import Output
from pdserve.reasoning import ReasoningSpan, ReasoningTracker
from pdserve.router.text.tokenizer import Tokenizer
from pdserve.router.web.application import Application
from tests.lazy import anthropic

if TYPE_CHECKING:
    from tests.router.conftest import Client, ScriptedBackend

CHAT = "/v1/chat/completions"
QUESTION = {"role": "user", "content": "hello"}
TOOLS: list[Any] = [{"type": "function", "function": {"name": "time", "parameters": {"type": "object"}}}]
CALL = '<tool_call>\n{"name": "time", "arguments": {"a": 1}}\n</tool_call>'
OUTPUT = f"<think>\nHm. 漢\n</think>\n\nI look.\n{CALL}"


@pytest.fixture
def reasoning_app(
    reasoning_tokenizer: Tokenizer, make_app: Callable[..., Application], backend: ScriptedBackend
) -> Application:
    assert backend.info is not None
    backend.info = replace(backend.info, max_model_len=1000, common_model_len=1000)
    backend.generates([*reasoning_tokenizer.encode(OUTPUT), 0], "stop")
    return make_app(reasoning_tokenizer)


@pytest.fixture
def reasoning_client(reasoning_app: Application, make_client: type[Client]) -> Client:
    return make_client(reasoning_app)


@pytest.fixture
def num_reasoning(reasoning_tokenizer: Tokenizer) -> int:
    return len(reasoning_tokenizer.encode("\nHm. 漢\n"))


@pytest.mark.parametrize("at_once", [False, True])
def test_chat(
    at_once: bool,
    reasoning_app: Application,
    reasoning_tokenizer: Tokenizer,
    backend: ScriptedBackend,
    num_reasoning: int,
    serving: Callable[..., AbstractContextManager[str]],
) -> None:
    if at_once:
        backend.script.chunks = [[Output([*reasoning_tokenizer.encode(OUTPUT), 0], "stop")]]
    body: dict[str, Any] = {"model": "demo", "messages": [QUESTION], "tools": TOOLS}
    with serving(reasoning_app) as url, openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:
        whole = client.chat.completions.create(**body)
        options: dict[str, Any] = {"stream_options": {"include_usage": True}}
        chunks = list(client.chat.completions.create(**body, stream=True, **options))
    message: Any = whole.choices[0].message
    assert message.reasoning == message.reasoning_content == "Hm. 漢"
    assert (message.content, whole.choices[0].finish_reason) == ("I look.", "tool_calls")
    [call] = message.tool_calls
    assert (call.function.name, call.function.arguments) == ("time", '{"a": 1}')
    deltas: list[Any] = [chunk.choices[0].delta for chunk in chunks if chunk.choices]
    for name in ("reasoning", "reasoning_content"):
        assert "".join(getattr(delta, name, None) or "" for delta in deltas) == "Hm. 漢"
    assert "".join(delta.content or "" for delta in deltas) == "I look."
    for usage in (whole.usage, chunks[-1].usage):
        assert usage is not None and usage.completion_tokens_details is not None
        assert usage.completion_tokens_details.reasoning_tokens == num_reasoning


def test_a_call_ends_reasoning_unless_a_grammar_follows_it(
    reasoning_client: Client, backend: ScriptedBackend, reasoning_tokenizer: Tokenizer
) -> None:
    backend.generates([*reasoning_tokenizer.encode(f"<think>\nHm.\n{CALL}"), 0], "stop")
    fields = {"messages": [QUESTION], "tools": TOOLS}
    [choice] = reasoning_client.post(CHAT, fields).json()["choices"]
    assert (choice["message"]["reasoning"], choice["message"]["content"], choice["finish_reason"]) == (
        "Hm.",
        None,
        "tool_calls",
    )
    assert [call["function"]["arguments"] for call in choice["message"]["tool_calls"]] == ['{"a": 1}']
    [choice] = reasoning_client.post(CHAT, {**fields, "tool_choice": "required"}).json()["choices"]
    assert choice["message"]["reasoning"] == f"Hm.\n{CALL}" and not choice["message"].get("tool_calls")


def test_reasoning_may_be_left_out(reasoning_client: Client) -> None:
    body = {"messages": [QUESTION], "tools": TOOLS, "include_reasoning": False}
    message = reasoning_client.post(CHAT, body).json()["choices"][0]["message"]
    assert "reasoning" not in message and message["content"] == "I look."


def test_messages(
    reasoning_app: Application, backend: ScriptedBackend, serving: Callable[..., AbstractContextManager[str]]
) -> None:
    body: dict[str, Any] = {"model": "demo", "max_tokens": 100, "messages": [QUESTION]}
    body |= {"tools": [{"name": "time", "input_schema": {"type": "object"}}]}
    body |= {"thinking": {"type": "enabled", "budget_tokens": 50}}
    with serving(reasoning_app) as url, anthropic.Anthropic(base_url=url, api_key="none", max_retries=0) as client:
        whole = client.messages.create(**body)
        with client.messages.stream(**body) as stream:
            kinds = [event.type for event in stream]
            streamed = stream.get_final_message()
        for message in (whole, streamed):
            thinking, text, call = (block.to_dict() for block in message.content)
            assert thinking == {"type": "thinking", "thinking": "Hm. 漢", "signature": ""}
            assert (text["text"], call["name"], call["input"]) == ("I look.", "time", {"a": 1})
            assert message.stop_reason == "tool_use"
        assert kinds.index("content_block_stop") < kinds.index("text")
        results: list[Any] = [{"type": "tool_result", "tool_use_id": whole.content[2].to_dict()["id"], "content": "ok"}]
        turns = [QUESTION, {"role": "assistant", "content": whole.content}, {"role": "user", "content": results}]
        client.messages.create(**{**body, "messages": turns})
        client.messages.create(**{**body, "thinking": {"type": "disabled"}})
    first, second, third, fourth = (request.sampling.reasoning for request in backend.requests)
    assert first is not None and first == second == third and first.budget == 50
    assert fourth is None, "the prompt has closed the reasoning"


def test_responses(
    reasoning_app: Application,
    reasoning_tokenizer: Tokenizer,
    backend: ScriptedBackend,
    num_reasoning: int,
    serving: Callable[..., AbstractContextManager[str]],
) -> None:
    backend.generates([*reasoning_tokenizer.encode("<think>\nHm. 漢\n</think>\n\nParis."), 0], "stop")
    with serving(reasoning_app) as url, openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:
        whole = client.responses.create(model="demo", input="hello")
        with client.responses.stream(model="demo", input="hello") as stream:
            kinds = [event.type for event in stream]
            streamed = stream.get_final_response()
        for response in (whole, streamed):
            reasoning, message = (item.to_dict() for item in response.output)
            assert reasoning["content"] == [{"type": "reasoning_text", "text": "Hm. 漢"}]
            assert message["type"] == "message" and response.output_text == "Paris."
            assert response.usage is not None
            assert response.usage.output_tokens_details.reasoning_tokens == num_reasoning
        again: list[Any] = [{"role": "user", "content": "hello"}, *(item.to_dict() for item in whole.output)]
        client.responses.create(model="demo", input=[*again, {"role": "user", "content": "and?"}])
    position = kinds.index("response.reasoning_text.done")
    assert kinds.index("response.reasoning_text.delta") < position < kinds.index("response.output_text.delta")
    assert kinds.count("response.output_item.added") == kinds.count("response.output_item.done") == 2


@pytest.mark.parametrize(
    ("fields", "budget", "is_required"),
    [
        ({}, None, None),
        ({"thinking_token_budget": 0}, 0, False),
        ({"thinking_token_budget": 7, "response_format": {"type": "json_object"}}, 7, True),
        ({"tools": TOOLS, "tool_choice": "required"}, None, True),
        ({"thinking_token_budget": 7, "chat_template_kwargs": {"enable_thinking": False}}, None, None),
        ({"thinking": {"type": "disabled"}, "response_format": {"type": "json_object"}}, None, None),
    ],
)
def test_what_instances_are_told_of_reasoning(
    fields: dict[str, Any],
    budget: int | None,
    is_required: bool | None,
    reasoning_client: Client,
    reasoning_tokenizer: Tokenizer,
    backend: ScriptedBackend,
) -> None:
    response = reasoning_client.post(CHAT, {"messages": [QUESTION], **fields})
    assert response.status_code == 200, response.text
    start, end = reasoning_tokenizer.encode("<think></think>")
    expected = ReasoningSpan((start,), ((end,),), (end,), budget, is_required) if is_required is not None else None
    assert backend.requests[0].sampling.reasoning == expected


def test_a_budget_is_not_enforced_inside_of_a_call_that_ends_the_reasoning(
    reasoning_client: Client, reasoning_tokenizer: Tokenizer, backend: ScriptedBackend
) -> None:
    body = {"messages": [QUESTION], "tools": TOOLS, "thinking_token_budget": 20}
    backend.generates([*reasoning_tokenizer.encode(f"<think>\nHm.\n{CALL}"), 0], "stop")
    message = reasoning_client.post(CHAT, body).json()["choices"][0]["message"]
    assert message["reasoning"] == "Hm." and len(message["tool_calls"]) == 1
    span = backend.requests[0].sampling.reasoning
    assert span is not None
    tracker, output = ReasoningTracker(span), list[int]()
    for token in reasoning_tokenizer.encode(f"<think>\nHm.\n{CALL}"):
        assert tracker.forced_token(output, 0) is None
        output.append(token)
        tracker.follow(output, 0)
    assert len(output) > 20 and tracker.forced_token(output, 0) is None
    del body["tools"]
    reasoning_client.post(CHAT, body)
    span = backend.requests[1].sampling.reasoning
    assert span is not None and len(span.ends) == 1, "without tools there are no calls"


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"thinking_token_budget": 5}, "thinking_token_budget limits reasoning, but this model does not reason"),
        (
            {"use_beam_search": True, "thinking_token_budget": 5},
            "thinking_token_budget cannot be combined with use_beam",
        ),
        ({"thinking_token_budget": -2}, "thinking_token_budget must be from 0 to"),
        ({"thinking": {"type": "enabled"}}, "this model does not reason; leave thinking out"),
        (
            {"messages": [{**QUESTION, "reasoning_content": "a"}]},
            "only messages with role assistant may have reasoning",
        ),
    ],
)
def test_invalid_fields(expect_error: Callable[..., dict[str, Any]], fields: dict[str, Any], message: str) -> None:
    assert message in expect_error(CHAT, {"messages": [QUESTION], **fields})["message"]


@pytest.mark.parametrize("text", ["<think>\nI", "<think>\nI</think>It"])
def test_an_answer_goes_on_in_the_reasoning_of_the_final_message(
    reasoning_client: Client, reasoning_tokenizer: Tokenizer, backend: ScriptedBackend, text: str
) -> None:
    backend.generates([*reasoning_tokenizer.encode(" see.</think>Paris."), 0], "stop")
    messages = []
    for content in (text, [{"type": "text", "text": text}]):
        turns = [QUESTION, {"role": "assistant", "content": content}]
        response = reasoning_client.post(CHAT, {"messages": turns, "continue_final_message": True})
        messages.append(response.json()["choices"][0]["message"])
    assert messages[0] == messages[1] and ("reasoning" in messages[0]) == ("</think>" not in text)


def test_prompts_of_later_turns(
    reasoning_client: Client, reasoning_tokenizer: Tokenizer, backend: ScriptedBackend
) -> None:
    """In a loop of calls the prompt goes on after the output, as long as clients send reasoning back; after the next question
    it goes on after the last prompt without reasoning, and the KV of the output need not be stored."""
    message = reasoning_client.post(CHAT, {"messages": [QUESTION], "tools": TOOLS}).json()["choices"][0]["message"]
    message.pop("refusal")
    result = {"role": "tool", "tool_call_id": message["tool_calls"][0]["id"], "content": "noon"}
    looped = [QUESTION, message, result]
    reasoning_client.post(CHAT, {"messages": looped, "tools": TOOLS})
    reasoning_client.post(CHAT, {"messages": [*looped, {"role": "assistant", "content": "b"}, QUESTION]})
    first, second, third = backend.requests
    output = reasoning_tokenizer.encode(OUTPUT)
    assert second.prompt[: len(first.prompt) + len(output)] == [*first.prompt, *output]
    assert reasoning_tokenizer.encode("<think>")[0] not in third.prompt
    assert (first.multi_turn, third.multi_turn) == (True, False)


HARMONY = (
    "<|channel|>analysis<|message|>Hm. 漢<|end|><|start|>assistant<|channel|>commentary to=functions.time "
    '<|constrain|>json<|message|>{"a": "é"}<|call|>'
)


@pytest.mark.parametrize("skips", [True, False])
@pytest.mark.parametrize("size", [1, 4, 1000])
def test_harmony_by_special_tokens(
    size: int,
    skips: bool,
    harmony_tokenizer: Tokenizer,
    make_app: Callable[..., Application],
    make_client: type[Client],
    backend: ScriptedBackend,
) -> None:
    """The delimiters are tokens, which skip_special_tokens does not hide; the same strings as text are text."""
    assert backend.info is not None
    backend.info = replace(backend.info, max_model_len=1000, common_model_len=1000)
    ids = [*harmony_tokenizer.encode(HARMONY), 0]
    client = make_client(make_app(harmony_tokenizer))
    answers = []
    for output in (
        ids,
        [*harmony_tokenizer.encode("<|channel|>final<|message|>"), *_as_text(harmony_tokenizer, HARMONY), 0],
    ):
        chunks = [Output(output[i : i + size]) for i in range(0, len(output), size)]
        chunks[-1].finish_reason = "stop"
        backend.script.chunks = [chunks]
        body = {"messages": [QUESTION], "tools": TOOLS, "skip_special_tokens": skips}
        answers.append(client.post(CHAT, body).json()["choices"][0])
    message = answers[0]["message"]
    assert (message["reasoning"], message["content"], answers[0]["finish_reason"]) == ("Hm. 漢", None, "tool_calls")
    assert message["tool_calls"][0]["function"] == {"name": "time", "arguments": '{"a": "é"}'}
    assert answers[1]["message"] == {"role": "assistant", "content": HARMONY, "refusal": None}
    message.pop("refusal")
    result = {"role": "tool", "tool_call_id": message["tool_calls"][0]["id"], "content": "noon"}
    response = client.post(CHAT, {"messages": [QUESTION, message, result]})
    assert response.status_code == 200, response.text
    prompt = harmony_tokenizer.decode(backend.requests[-1].prompt, skip_special_tokens=False)
    assert ' to=time<|channel|>analysis<|message|>{"a": "é"}<|call|>' in prompt


@pytest.mark.parametrize(
    "header", ["<|channel|>commentary to=", "<|channel|>analysis to=", " to=functions.time<|channel|>analysis"]
)
def test_a_call_in_any_channel_ends_harmonys_budget(
    header: str,
    harmony_tokenizer: Tokenizer,
    make_app: Callable[..., Application],
    make_client: type[Client],
    backend: ScriptedBackend,
) -> None:
    """Otherwise the end of the reasoning would be forced into the arguments."""
    assert backend.info is not None
    backend.info = replace(backend.info, max_model_len=1000, common_model_len=1000)
    body = {"messages": [QUESTION], "tools": TOOLS, "thinking_token_budget": 20}
    assert make_client(make_app(harmony_tokenizer)).post(CHAT, body).status_code == 200
    span = backend.requests[-1].sampling.reasoning
    assert span is not None and span.budget == 20
    output = harmony_tokenizer.encode(f"<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant{header}")
    tracker = ReasoningTracker(span)
    tracker.follow(output, 0)
    assert tracker.answer_start is not None


def _as_text(tokenizer: Tokenizer, text: str) -> list[int]:
    """Return the tokens of a text whose special tokens are ordinary text."""
    return [token_id for part in text.split("|") for token_id in tokenizer.encode(part + "|")][:-1]


def test_others_are_served_while_a_long_answer_is_parsed(
    reasoning_tokenizer: Tokenizer, reasoning_app: Application, backend: ScriptedBackend
) -> None:
    assert backend.info is not None
    backend.info = replace(backend.info, max_model_len=9000, common_model_len=9000)
    thought = reasoning_tokenizer.encode("the quick brown fox ") * 300
    ids = [*reasoning_tokenizer.encode("<think>\n"), *thought, *reasoning_tokenizer.encode("</think>Paris."), 0]
    backend.script.chunks = [[Output(ids, "stop")]]
    turns, sent = [0, 0], list[Any]()

    async def scenario() -> None:
        incoming = [{"type": "http.request", "body": json.dumps({"messages": [QUESTION]}).encode()}]

        async def receive() -> Any:
            return incoming.pop() if incoming else await asyncio.Future()

        async def send(message: Any) -> None:
            sent.append(message)

        async def count_turns() -> None:
            while True:
                turns[bool(backend.streams)] += 1
                await asyncio.sleep(0)

        other = asyncio.create_task(count_turns())
        scope = {"type": "http", "method": "POST", "path": CHAT, "query_string": b"", "headers": []}
        await reasoning_app(scope, receive, send)
        other.cancel()

    asyncio.run(asyncio.wait_for(scenario(), 600))
    [choice] = json.loads(sent[-1]["body"])["choices"]
    assert choice["message"]["reasoning"] == reasoning_tokenizer.decode(thought) and choice["finish_reason"] == "stop"
    assert choice["message"]["content"] == "Paris." and turns[1] > len(ids) // 300
