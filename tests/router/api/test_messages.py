"""/v1/messages with Anthropic's own client: whole and streamed messages, an agent's session, and errors in its format."""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest
from pydantic import BaseModel

from pdserve.errors import Overloaded, Unavailable
from pdserve.grammars.specification import lark_grammar
from pdserve.router.text.tokenizer import Tokenizer
from pdserve.router.web.application import Application
from tests.grammars.byte_matcher import ByteMatcher
from tests.lazy import anthropic

if TYPE_CHECKING:
    from tests.router.conftest import Client, ScriptedBackend

Serving = Callable[..., AbstractContextManager[str]]

MESSAGES = "/v1/messages"
ASKED: dict[str, Any] = {"model": "demo", "max_tokens": 20, "messages": [{"role": "user", "content": "hello"}]}
TOOLS: list[Any] = [
    {"name": "weather", "description": "of a city", "input_schema": {"type": "object", "properties": {}}},
    {"name": "time", "input_schema": {"type": "object"}, "cache_control": {"type": "ephemeral"}},
]
CALLS = (
    'Let me see.<tool_call>\n{"name": "weather", "arguments": {"city": "Paris"}}\n</tool_call>\n'
    '<tool_call>\n{"name": "time", "arguments": {}}\n</tool_call>'
)


def connect(url: str, **options: Any) -> Any:
    return anthropic.Anthropic(base_url=url, api_key="none", max_retries=0, **options)


def generates_text(backend: ScriptedBackend, tokenizer: Tokenizer, text: str) -> None:
    assert backend.info is not None
    backend.info = replace(backend.info, max_model_len=4000, common_model_len=4000)
    backend.generates([*tokenizer.encode(text), 0], "stop")


def test_a_whole_message(app: Application, backend: ScriptedBackend, tokenizer: Tokenizer, serving: Serving) -> None:
    backend.generates([*tokenizer.encode(" Paris."), 0], "stop", cached_tokens=3)
    with serving(app) as url, connect(url) as client:
        message = client.messages.create(
            **ASKED,
            system=[{"type": "text", "text": "be brief", "cache_control": {"type": "ephemeral"}}],
            stop_sequences=["x"],
            metadata={"user_id": "ann"},
            thinking={"type": "disabled"},
            extra_body={"temperature": 0.5, "top_k": 4},
        )
        counted = client.messages.count_tokens(model="demo", system="be brief", messages=ASKED["messages"])
    assert [block.to_dict() for block in message.content] == [{"type": "text", "text": " Paris."}]
    assert (message.type, message.role, message.model, message.stop_reason) == (
        "message",
        "assistant",
        "demo",
        "end_turn",
    )
    assert message.id.startswith("msg_")
    [request] = backend.requests
    assert (request.sampling.max_tokens, request.sampling.temperature, request.sampling.top_k) == (20, 0.5, 4)
    assert request.session == "ann"
    text = "<|start|>system\nbe brief<|end|><|start|>user\nhello<|end|><|start|>assistant\n"
    assert tokenizer.decode(request.prompt, skip_special_tokens=False) == text
    assert counted.input_tokens == len(request.prompt)
    usage = message.usage
    assert (usage.input_tokens, usage.cache_read_input_tokens) == (len(request.prompt) - 3, 3)
    assert usage.output_tokens == len(tokenizer.encode(" Paris.")) + 1


@pytest.mark.parametrize(
    ("stop", "reason", "matched"),
    [(["ri"], "stop_sequence", "ri"), (None, "max_tokens", None), (["z"], "max_tokens", None)],
)
def test_stop_reasons(client: Client, stop: list[str] | None, reason: str, matched: str | None) -> None:
    body = {**ASKED, "stop_sequences": stop}
    message = client.post(MESSAGES, body).json()
    assert (message["stop_reason"], message["stop_sequence"]) == (reason, matched)
    last = [
        json.loads(line[6:])
        for line in client.post(MESSAGES, {**body, "stream": True}).text.splitlines()
        if "stop_reason" in line
    ]
    assert last[-1]["delta"] == {"stop_reason": reason, "stop_sequence": matched}


def test_events_of_a_stream(app: Application, serving: Serving) -> None:
    with serving(app) as url, connect(url) as client, client.messages.stream(**ASKED) as stream:
        events = [event.type for event in stream if event.type != "text"]
        message = stream.get_final_message()
    assert events[:2] == ["message_start", "content_block_start"]
    assert events[-3:] == ["content_block_stop", "message_delta", "message_stop"]
    assert set(events[2:-3]) == {"content_block_delta"}
    assert message.content[0].to_dict() == {"type": "text", "text": " Paris."}
    assert (message.stop_reason, message.usage.output_tokens) == ("max_tokens", 2)


@pytest.fixture
def tools(tool_tokenizers: dict[str, Tokenizer]) -> Tokenizer:
    return tool_tokenizers["hermes"]


@pytest.mark.parametrize("is_streamed", [False, True])
def test_an_agents_session(
    make_app: Callable[..., Application],
    backend: ScriptedBackend,
    tools: Tokenizer,
    serving: Serving,
    is_streamed: bool,
) -> None:
    """The model calls two tools, gets their results, and answers."""

    def send(client: Any, messages: list[Any]) -> Any:
        options: dict[str, Any] = {"model": "demo", "max_tokens": 400, "tools": TOOLS, "messages": messages}
        if not is_streamed:
            return client.messages.create(**options)
        with client.messages.stream(**options) as stream:
            return stream.get_final_message()

    generates_text(backend, tools, CALLS)
    with serving(make_app(tools)) as url, connect(url) as client:
        asked: list[Any] = [{"role": "user", "content": "sunny?"}]
        first = send(client, asked)
        assert first.stop_reason == "tool_use"
        text, *calls = first.content
        assert text.text.strip() == "Let me see."
        assert [(call.name, call.input) for call in calls if call.type == "tool_use"] == [
            ("weather", {"city": "Paris"}),
            ("time", {}),
        ]
        results = [
            {"type": "tool_result", "tool_use_id": calls[0].id, "content": [{"type": "text", "text": "rain"}]},
            {"type": "tool_result", "tool_use_id": calls[-1].id, "content": "noon", "is_error": False},
            {"type": "text", "text": "so?", "cache_control": {"type": "ephemeral"}},
        ]
        thought = {"type": "thinking", "thinking": "hm", "signature": "s"}
        answer = {"role": "assistant", "content": [thought, *(block.to_dict() for block in first.content)]}
        generates_text(backend, tools, "No.")
        second = send(client, [*asked, answer, {"role": "user", "content": results}])
    assert [block.text for block in second.content] == ["No."] and second.stop_reason == "end_turn"
    prompt = tools.decode(backend.requests[1].prompt, skip_special_tokens=False)
    turns = prompt.partition("<|start|>user")[2].split("<|start|>")
    assert turns[1].startswith("assistant\nLet me see.") and turns[1].count("<tool_call>") == 2
    assert turns[2:5] == ["tool\nrain<|end|>", "tool\nnoon<|end|>", "user\nso?<|end|>"]
    assert "hm" not in prompt.split("<|start|>assistant")[1]


@pytest.mark.parametrize("is_streamed", [False, True])
def test_the_tool_runner_of_the_client(
    make_app: Callable[..., Application],
    backend: ScriptedBackend,
    serving: Serving,
    tools: Tokenizer,
    is_streamed: bool,
) -> None:
    """It calls the functions itself, and sends what they return until an answer has no calls."""
    asked_for = []

    @anthropic.beta_tool
    def weather(city: str) -> str:
        """The weather of a city."""
        asked_for.append(city)
        return "It is sunny there."

    generates_text(backend, tools, CALLS[: CALLS.index("\n<tool_call>", 20)])
    with serving(make_app(tools)) as url, connect(url) as client:
        asked: Any = {"model": "demo", "max_tokens": 40, "messages": ASKED["messages"], "tools": [weather]}
        messages: list[Any] = []
        turn: Any
        for turn in client.beta.messages.tool_runner(**asked, stream=is_streamed):
            messages.append(turn.get_final_message() if is_streamed else turn)
            generates_text(backend, tools, "Sunny.")
    assert [message.stop_reason for message in messages] == ["tool_use", "end_turn"]
    assert asked_for == ["Paris"] and messages[1].content[0].text == "Sunny."
    assert "It is sunny there." in tools.decode(backend.requests[1].prompt)


class Report(BaseModel):
    sunny: bool


def test_structured_answers_and_strict_tools(
    make_app: Callable[..., Application], backend: ScriptedBackend, serving: Serving, tools: Tokenizer
) -> None:
    generates_text(backend, tools, '{"sunny": true}')
    with serving(make_app(tools)) as url, connect(url) as client:
        asked: Any = {"model": "demo", "max_tokens": 20, "messages": [{"role": "user", "content": "Sunny?"}]}
        parsed = client.messages.parse(**asked, output_format=Report)
        assert parsed.parsed_output == Report(sunny=True)
        with client.messages.stream(**asked, output_format=Report) as stream:
            assert stream.get_final_message().parsed_output == Report(sunny=True)
        function: Any = {"name": "f", "input_schema": {"type": "object", "properties": {}}, "strict": True}
        client.messages.create(**asked, tools=[function])
        with pytest.raises(anthropic.BadRequestError, match=r"tools\[0\]\.strict must be a boolean"):
            client.messages.create(**asked, tools=[function | {"strict": 1}])
    first, second, third = (json.loads(request.sampling.grammar) for request in backend.requests)
    assert first == second and first["json"]["required"] == ["sunny"]
    allows = ByteMatcher(lark_grammar(third, {})).matches
    call = '<tool_call>\n{{"name": "f", "arguments": {}}}\n</tool_call>'.format
    assert [allows(text) for text in (call("{}"), "Sunny.", call('{"a": 1}'))] == [True, True, False]


@pytest.mark.parametrize(
    ("choice", "names", "is_parallel"),
    [
        ({"type": "any"}, {"weather", "time"}, True),
        ({"type": "tool", "name": "time", "disable_parallel_tool_use": True}, {"time"}, False),
        ({"type": "auto"}, set(), True),
    ],
)
def test_the_choice_of_a_tool(
    make_app: Callable[..., Application],
    make_client: type[Client],
    backend: ScriptedBackend,
    tools: Tokenizer,
    choice: Any,
    names: set[str],
    is_parallel: bool,
) -> None:
    generates_text(backend, tools, CALLS)
    message = make_client(make_app(tools)).post(MESSAGES, {**ASKED, "tools": TOOLS, "tool_choice": choice}).json()
    grammar = backend.requests[0].sampling.grammar
    assert {name for name in ("weather", "time") if json.dumps(f'"{name}"')[1:-1] in grammar} == names
    assert sum(block["type"] == "tool_use" for block in message["content"]) == 1 + is_parallel


@pytest.mark.parametrize("effort", ["low", "max", None])
def test_effort(
    make_app: Callable[..., Application],
    backend: ScriptedBackend,
    serving: Serving,
    tokenizer: Tokenizer,
    monkeypatch: pytest.MonkeyPatch,
    effort: Any,
) -> None:
    """A chat template gets it in its own words; to one without that variable it says nothing."""
    asked: Any = ASKED | ({"output_config": {"effort": effort}} if effort else {})
    with serving(make_app(tokenizer)) as url, connect(url) as client:
        client.messages.create(**asked)
        with pytest.raises(anthropic.BadRequestError, match=r"output_config.effort must be 'low', 'medium'"):
            client.messages.create(**ASKED, extra_body={"output_config": {"effort": "most"}})
    template = "{{ reasoning_effort }}|" + (tokenizer._hf.chat_template or "")
    monkeypatch.setattr(tokenizer._hf, "chat_template", template)
    monkeypatch.delitem(tokenizer.__dict__, "knows_effort", raising=False)
    with serving(make_app(tokenizer)) as url, connect(url) as client:
        client.messages.create(**asked)
        counted = client.messages.count_tokens(**{name: value for name, value in asked.items() if name != "max_tokens"})
    without, prompt = (tokenizer.decode(request.prompt, skip_special_tokens=False) for request in backend.requests)
    words = {"low": "low", "max": "xhigh", None: ""}
    assert prompt == f"{words[effort]}|{without}" and counted.input_tokens == len(backend.requests[1].prompt)


@pytest.mark.parametrize(("end", "arguments"), [('ity"', {}), ('ris"', {}), ("}}", {"city": "Paris"})])
def test_a_call_that_is_cut_off_is_a_call_whether_streamed_or_not(
    make_app: Callable[..., Application],
    backend: ScriptedBackend,
    tools: Tokenizer,
    serving: Serving,
    end: str,
    arguments: dict[str, Any],
) -> None:
    """As at Anthropic, whose clients look at the type of the last block if the reason is max_tokens."""
    generates_text(backend, tools, "")
    backend.generates(tools.encode(CALLS[: CALLS.index(end)]), "length")
    with serving(make_app(tools)) as url, connect(url) as client:
        whole = client.messages.create(**ASKED, tools=TOOLS)
        with client.messages.stream(**ASKED, tools=TOOLS) as stream:
            streamed = stream.get_final_message()
    for message in (whole, streamed):
        assert message.stop_reason == "max_tokens"
        call = message.content[-1]
        assert (call.type, call.name, call.input) == ("tool_use", "weather", arguments)


def test_the_answer_continues_a_last_message_of_the_assistant(
    client: Client, backend: ScriptedBackend, tokenizer: Tokenizer
) -> None:
    messages = [*ASKED["messages"], {"role": "assistant", "content": "The capital is"}]
    assert client.post(MESSAGES, {**ASKED, "messages": messages}).status_code == 200
    assert tokenizer.decode(backend.requests[0].prompt).endswith("assistant\nThe capital is")


IMAGE = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": ""}}


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"max_tokens": None}, "max_tokens is required"),
        ({"max_tokens": 0}, "max_tokens must be at least 1, not 0"),
        ({"messages": []}, "messages must hold at least one message"),
        ({"messages": [{"role": "tool", "content": "a"}]}, "messages[0].role must be user, assistant or system"),
        (
            {"messages": [{"role": "user", "content": []}, {"role": "user", "content": "a"}]},
            "messages[0].content must hold at least one block",
        ),
        ({"messages": [{"role": "user"}]}, "messages[0] must be an object with role and content"),
        ({"messages": [{"role": "user", "content": 7}]}, "messages[0].content must be a string or a list of blocks"),
        ({"messages": [{"role": "user", "content": [IMAGE]}]}, "'image' is not supported here"),
        ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "messages[0].content[0].text is required"),
        (
            {"messages": [{"role": "user", "content": [{"type": "text", "text": 1}]}]},
            "text must be a string, not a number",
        ),
        (
            {"messages": [{"role": "user", "content": [{"type": "text", "text": "a", "b": 1}]}]},
            "[0].content[0].b'; messages[0]",
        ),
        ({"system": 3}, "system must be a string or a list of blocks, not a number"),
        ({"thinking": {"type": "enabled", "budget_tokens": 4}}, "this model does not reason; leave thinking out"),
        ({"thinking": {"type": "enabled", "budget_tokens": 1024}}, "with a number of tokens less than max_tokens"),
        ({"thinking": {"type": "enabled"}}, "thinking must be"),
        ({"thinking": {"type": "disabled", "budget_tokens": 4}}, "thinking must be"),
        ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "tools[0] is a tool of the server"),
        ({"tools": [{"name": "f"}]}, "tools[0] must have a name and an input_schema"),
        ({"tool_choice": {"type": "tool"}}, "tool_choice must be"),
        ({"tool_choice": {"type": []}}, "tool_choice must be"),
        ({"messages": [{"role": [], "content": "a"}]}, "messages[0].role must be user, assistant or system"),
        ({"tool_choice": {"type": "any"}}, 'tool_choice must be {"type": "auto"}, "any"'),
        ({"tool_choice": {"type": "tool", "name": "f"}}, "with a name of tools"),
        ({"metadata": {"user_id": 1}}, "metadata.user_id must be a string"),
        ({"mcp_servers": [{}]}, "mcp_servers is not supported"),
        ({"temprature": 1}, "did you mean 'temperature'?"),
        ({"max_tokens": 10**6}, "this model's context is"),
    ],
)
def test_invalid_bodies(client: Client, fields: dict[str, Any], message: str) -> None:
    body = {name: value for name, value in {**ASKED, **fields}.items() if value is not None}
    response = client.post(MESSAGES, body)
    assert response.status_code == 400, response.text
    error = response.json()
    assert message in error["error"]["message"]
    assert (error["type"], error["error"]["type"]) == ("error", "invalid_request_error")
    assert error["request_id"] == response.headers["x-request-id"]


def test_fields_may_be_null(client: Client) -> None:
    """As /openapi.json says, too: Schemathesis holds the router to it."""
    schema = client.get("/openapi.json").json()["components"]["schemas"]["CountTokensBody"]["properties"]
    optional = [name for name in schema if name not in ("messages", "model")]
    assert [name for name in optional if "null" not in str(schema[name])] == [], schema
    body = {"messages": ASKED["messages"], **dict.fromkeys(optional)}
    assert client.post(f"{MESSAGES}/count_tokens", body).status_code == 200


def test_errors_raise_the_clients_exceptions(
    make_app: Callable[..., Application], backend: ScriptedBackend, tokenizer: Tokenizer, serving: Serving
) -> None:
    with serving(make_app(tokenizer, api_key="secret")) as url:
        with connect(url) as client, pytest.raises(anthropic.AuthenticationError, match="needs a valid API key"):
            client.messages.create(**ASKED)
        with connect(url).with_options(api_key="secret") as client:
            assert client.messages.create(**ASKED).content
            with pytest.raises(anthropic.NotFoundError, match="does not exist"):
                client.messages.create(**{**ASKED, "model": "other"})
            with pytest.raises(anthropic.NotFoundError, match="does not exist"):
                client.messages.count_tokens(model="other", messages=ASKED["messages"])
            with pytest.raises(anthropic.RequestTooLargeError, match="larger than"):
                client.messages.create(**{**ASKED, "system": "x" * 30_000})
            backend.fails(Overloaded("busy", kind="max_requests"), error_at_open=True)
            with pytest.raises(anthropic.RateLimitError, match="busy"):
                client.messages.create(**ASKED)
            backend.fails(Unavailable("gone", kind="no_instance"), error_at_open=True)
            with pytest.raises(anthropic.APIStatusError, match="overloaded_error"):
                client.messages.create(**ASKED)


def test_an_error_in_the_middle_of_a_stream(
    app: Application, backend: ScriptedBackend, tokenizer: Tokenizer, serving: Serving
) -> None:
    backend.generates(tokenizer.encode(" Paris"), None)
    backend.script.error = Unavailable("instance was lost", kind="instance_lost")
    with serving(app) as url, connect(url) as client, pytest.raises(anthropic.APIStatusError, match="was lost"):
        for _ in client.messages.create(**ASKED, stream=True):
            pass
