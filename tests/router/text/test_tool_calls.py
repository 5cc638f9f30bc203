"""Tool calls: found in text that comes in any pieces, shown to the model, and as the official client reads them."""

from __future__ import annotations

import json
from collections.abc import Callable, Collection
from contextlib import AbstractContextManager
from dataclasses import replace
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import openai
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from starlette.applications import Starlette

from pdserve.engine.grammar import grammar_of
from pdserve.router.text.tokenizer import Tokenizer
from pdserve.router.text.tool_calls import ToolCalls

if TYPE_CHECKING:
    from tests.router.conftest import Client, ScriptedBackend

CHAT = "/v1/chat/completions"
FORMATS = ["hermes", "llama"]
ARGUMENTS = '{"city": "Par}is \\"</tool_call>\\"", "days": [1, {"a": {}}]}'
CALL = {
    "hermes": f'<tool_call>\n{{"name": "weather", "arguments": {ARGUMENTS}}}\n</tool_call>',
    "llama": f'{{"name": "weather", "parameters": {ARGUMENTS}}}',
}
TOOLS: list[Any] = [
    {"type": "function", "function": {"name": "weather", "parameters": {"type": "object", "properties": {}}}},
    {"type": "function", "function": {"name": "time", "description": "what time it is"}},
]
ASKING: dict[str, Any] = {"model": "demo", "messages": [{"role": "user", "content": "sunny?"}], "tools": TOOLS}


def divided(
    kind: str, pieces: list[str], single: bool = False, names: Collection[str] = ("weather", "time")
) -> tuple[str, list[tuple[str, str]]]:
    """The text that is no call, and the name and arguments of each call."""
    calls = ToolCalls(kind, names, single)
    text = ""
    found: dict[int, tuple[str, str]] = {}
    for parts in [*map(calls.push, pieces), calls.finish()]:
        text += parts.text
        for part in parts.calls:
            name, arguments = found.get(part.index, (part.name, ""))
            found[part.index] = name, arguments + part.arguments
    return text, [found[i] for i in sorted(found)]


WEATHER = ("weather", ARGUMENTS)
HERMES: list[tuple[str, str, list[tuple[str, str]]]] = [
    (CALL["hermes"], "", [WEATHER]),
    (f"Let me see.\n{CALL['hermes']}", "Let me see.", [WEATHER]),
    (CALL["hermes"] * 2, "", [WEATHER] * 2),
    (f"{CALL['hermes']}\n{CALL['hermes']}\n", "", [WEATHER] * 2),
    (CALL["hermes"].removesuffix("\n</tool_call>") + " done", "done", [WEATHER]),
    ('<tool_call>{"arguments": {"a": 1}, "name": "time"}</tool_call>', "", [("time", '{"a": 1}')]),
    ('<tool_call>{"name": "time", "arguments": {}}', "", [("time", "{}")]),
    ('<tool_call>{"name": "time", "arguments": {"a', "", [("time", '{"a')]),
    ("a < b <tool", "a < b <tool", []),
    ("no call \n", "no call \n", []),
    ("<tool_call>no JSON</tool_call>", "<tool_call>no JSON</tool_call>", []),
    ('<tool_call>{"name": "rm", "arguments": {}}', '<tool_call>{"name": "rm", "arguments": {}}', []),
    ('<tool_call>{"name": [], "arguments": {}}', '<tool_call>{"name": [], "arguments": {}}', []),
    ('<tool_call>{"name": "time", "arguments": 5}x', '<tool_call>{"name": "time", "arguments": 5}x', []),
    ('<tool_call>{"na', '<tool_call>{"na', []),
]
LLAMA: list[tuple[str, str, list[tuple[str, str]]]] = [
    (CALL["llama"], "", [WEATHER]),
    (f" \n{CALL['llama']}; {CALL['llama']}", "", [WEATHER] * 2),
    (f"As JSON: {CALL['llama']}", f"As JSON: {CALL['llama']}", []),
    ('{"answer": [1, 2]} it is; {"name": "time", "parameters": {}}',) * 2 + ([],),
    ('{"answer"', '{"answer"', []),
]


@pytest.mark.parametrize(("kind", "case"), [("hermes", one) for one in HERMES] + [("llama", one) for one in LLAMA])
def test_calls_in_text(kind: str, case: tuple[str, str, list[tuple[str, str]]]) -> None:
    whole, text, calls = case
    assert divided(kind, [whole]) == (text, calls)

    @settings(max_examples=8, deadline=None)
    @given(st.lists(st.integers(0, len(whole)), max_size=len(whole)))
    def check(cuts: list[int]) -> None:
        ends = [0, *sorted(cuts), len(whole)]
        assert divided(kind, [whole[a:b] for a, b in pairwise(ends)]) == (text, calls)

    check()
    assert divided(kind, list(whole)) == (text, calls)


def test_arguments_come_while_they_are_written() -> None:
    calls = ToolCalls("hermes", {"time"})
    assert not calls.push('<tool_call>{"name": "tim').calls
    [head, first] = calls.push('e", "arguments": {"a": ').calls
    assert (head.name, head.arguments, first.arguments) == ("time", "", '{"a": ')
    assert [part.arguments for part in calls.push('"bc').calls] == ['"bc']
    assert [part.arguments for part in calls.push('"}}').calls] == ['"}']


def test_calls_after_the_first_may_be_left_out() -> None:
    assert divided("hermes", [CALL["hermes"] * 3], single=True) == ("", [WEATHER])


@pytest.fixture
def tool_app(request: Any, make_app: Callable[..., Starlette], tool_tokenizers: dict[str, Tokenizer]) -> Starlette:
    return make_app(tool_tokenizers[request.param])


def plays(backend: ScriptedBackend, tokenizer: Tokenizer, text: str) -> None:
    assert backend.info is not None
    backend.info = replace(backend.info, max_model_len=2000)
    backend.plays([*tokenizer.encode(text), 0], "stop")


@pytest.mark.parametrize(("tool_app", "kind"), [(kind, kind) for kind in FORMATS], indirect=["tool_app"])
def test_the_official_client_calls_a_tool_and_answers_it(
    tool_app: Starlette,
    kind: str,
    backend: ScriptedBackend,
    tool_tokenizers: dict[str, Tokenizer],
    serving: Callable[[Starlette], AbstractContextManager[str]],
) -> None:
    tokenizer = tool_tokenizers[kind]
    plays(backend, tokenizer, CALL[kind])
    with serving(tool_app) as url, openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:
        choice = client.chat.completions.create(**ASKING).choices[0]
        assert (choice.finish_reason, choice.message.content) == ("tool_calls", None)
        assert choice.message.tool_calls is not None
        [call] = choice.message.tool_calls
        assert call.type == "function"
        assert (call.function.name, call.function.arguments) == WEATHER

        with client.chat.completions.stream(**{**ASKING, "max_tokens": 99}) as stream:
            streamed = stream.get_final_completion().choices[0]
        assert streamed.finish_reason == "tool_calls" and streamed.message.tool_calls is not None
        assert [(one.function.name, one.function.arguments) for one in streamed.message.tool_calls] == [WEATHER]

        plays(backend, tokenizer, "It is.")
        answer = {"role": "tool", "tool_call_id": call.id, "content": "sunny"}
        turn = [*ASKING["messages"], choice.message, answer]
        last = client.chat.completions.create(**{**ASKING, "messages": turn}).choices[0]
        assert (last.message.content, last.message.tool_calls, last.finish_reason) == ("It is.", None, "stop")
    shown = tokenizer.decode(backend.requests[-1].prompt)
    assert '"name": "time"' in shown and "what time it is" in shown and shown.endswith("tool\nsunnyassistant\n")
    if kind == "hermes":
        [called] = [
            json.loads(part.split("</tool_call>assis")[0].split("</tool_call>tool")[0])
            for part in shown.split("<tool_call>")[1:]
        ]
        assert called == {"name": "weather", "arguments": json.loads(ARGUMENTS)}


@pytest.mark.parametrize("tool_app", ["hermes"], indirect=True)
def test_without_a_choice_of_tools_the_model_is_shown_none(
    tool_app: Starlette, make_client: type[Client], backend: ScriptedBackend, tool_tokenizers: dict[str, Tokenizer]
) -> None:
    tokenizer = tool_tokenizers["hermes"]
    plays(backend, tokenizer, CALL["hermes"])
    choice = make_client(tool_app).post(CHAT, {**ASKING, "tool_choice": "none"}).json()["choices"][0]
    assert (choice["message"]["content"], choice["finish_reason"]) == (CALL["hermes"], "stop")
    assert backend.requests[0].prompt == tokenizer.render_chat(ASKING["messages"])


@pytest.mark.parametrize("tool_app", ["hermes"], indirect=True)
@pytest.mark.parametrize(
    ("field", "message"),
    [
        ({"tool_choice": "any"}, 'tool_choice must be "none", "auto", "required", or {"type": "function", '),
        ({"tool_choice": "required", "tools": []}, "tool_choice must be "),
        ({"tool_choice": {"type": "function", "function": {"name": "rm"}}}, "tool_choice must be "),
        ({"tool_choice": "required", "min_tokens": 2}, "min_tokens and tool_choice contradict each other"),
        (
            {"tool_choice": "required", "guided_regex": "a"},
            "tool_choice asks for a call, and another field for an answer",
        ),
        (
            {
                "tool_choice": "required",
                "tools": [{"type": "function", "function": {"name": "a", "parameters": {"type": "string"}}}],
            },
            "the parameters of a must be the JSON schema of an object",
        ),
        ({"tools": [TOOLS[0]] * 2}, "each function of tools must have a name of its own"),
        (
            {"tools": [{"type": "function", "function": {"name": "a b"}}]},
            "a function's name must have 1 to 64 characters",
        ),
        ({"tools": [{"type": "mcp"}]}, "tools[0].type must be 'function', not 'mcp'"),
        ({"messages": [{"role": "tool", "content": "a"}]}, "messages[0]: tool_call_id belongs to"),
        ({"messages": [{"role": "user", "content": "a", "tool_call_id": "b"}]}, "messages[0]: tool_call_id belongs to"),
    ]
    + [
        (
            {
                "messages": [
                    {
                        "role": role,
                        "content": "",
                        "tool_calls": [
                            {"id": "1", "type": "function", "function": {"name": "time", "arguments": arguments}}
                        ],
                    }
                ]
            },
            message,
        )
        for role, arguments, message in [
            ("user", "{}", "messages[0]: tool_calls belong to messages of the role assistant"),
            ("assistant", "[1]", "messages[0]: the arguments of a tool call must be a JSON object in a string"),
            ("assistant", "{", "messages[0]: the arguments of a tool call must be a JSON object in a string"),
        ]
    ],
)
def test_what_cannot_be(tool_app: Starlette, make_client: type[Client], field: dict[str, Any], message: str) -> None:
    response = make_client(tool_app).post(CHAT, {**ASKING, **field})
    assert response.status_code == 400 and response.json()["error"]["message"].startswith(message), response.text


DEFINING: list[Any] = [
    {
        "type": "function",
        "function": {
            "name": name,
            "parameters": {
                "type": "object",
                "$defs": {"Of": {"enum": [name]}},
                "properties": {"of": {"$ref": "#/$defs/Of"}},
                "required": ["of"],
            },
        },
    }
    for name in ("one", "two")
]


@pytest.mark.parametrize("kind", FORMATS)
@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "two"}}])
def test_an_answer_may_have_to_be_a_call(
    kind: str,
    choice: Any,
    backend: ScriptedBackend,
    make_app: Callable[..., Starlette],
    make_client: type[Client],
    tool_tokenizers: dict[str, Tokenizer],
) -> None:
    tokenizer = tool_tokenizers[kind]
    plays(backend, tokenizer, "anything")
    client = make_client(make_app(tokenizer))
    body = {**ASKING, "tools": DEFINING, "tool_choice": choice}
    assert client.post(CHAT, body).status_code == 200
    assert client.post(CHAT, {**body, "tool_choice": "auto"}).status_code == 200
    forced, free = (request.sampling.grammar for request in backend.requests)
    assert not free
    accepted = [text for text in CALLS[kind] if follows(json.loads(forced), text)]
    assert accepted == (CALLS[kind][:2] if choice == "required" else CALLS[kind][1:2])
    if choice == "required":
        assert [divided(kind, [text], names={"one", "two"})[1] for text in accepted] == [
            [(name, f'{{"of": "{name}"}}')] for name in ("one", "two")
        ]


CALLS = {
    "hermes": [
        f'<tool_call>\n{{"name": "{name}", "arguments": {{"of": "{of}"}}}}\n</tool_call>'
        for name, of in (("one", "one"), ("two", "two"), ("one", "two"), ("rm", "rm"))
    ],
    "llama": [
        f'{{"name": "{name}", "parameters": {{"of": "{of}"}}}}'
        for name, of in (("one", "one"), ("two", "two"), ("one", "two"), ("rm", "rm"))
    ],
}


def follows(spec: dict[str, Any], text: str) -> bool:
    """Whether an instance could generate the text, and end there."""
    xgrammar = pytest.importorskip("xgrammar")
    bytes_and_end = xgrammar.TokenizerInfo([bytes([i]) for i in range(256)] + [b"<|end|>"], stop_token_ids=[256])
    matcher = xgrammar.GrammarMatcher(xgrammar.GrammarCompiler(bytes_and_end).compile_grammar(grammar_of(spec)))
    return all(matcher.accept_token(token) for token in [*text.encode(), 256])


def test_a_model_that_knows_no_tools(client: Client) -> None:
    error = client.post(CHAT, ASKING).json()["error"]
    assert error["message"].startswith("this model's chat template teaches no tool calls") and error["param"] == "tools"
    turn = [{"role": "tool", "tool_call_id": "1", "content": "a"}]
    error = client.post(CHAT, {**ASKING, "tools": [], "messages": turn}).json()["error"]
    assert error["message"] == "this model's chat template knows no tool calls; leave out such messages"
