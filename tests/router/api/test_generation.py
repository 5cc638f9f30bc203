"""Generations: several choices, usage, stop strings, errors, and cancellation of what still runs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import httpx
import pytest

from pdserve.errors import Unavailable
from pdserve.output import Output
from pdserve.router.text.parsers.json_calls import HermesParser
from pdserve.router.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from tests.router.conftest import Client, ScriptedBackend

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
HELLO: dict[str, Any] = {"model": "demo", "prompt": "hello"}
Events = Callable[[httpx.Response], list[dict[str, Any]]]


LOST = Unavailable("instance d0 was lost", kind="instance_lost")


def test_several_prompts_and_choices(
    client: Client, events: Events, backend: ScriptedBackend, token_ids_of: Callable[..., list[int]]
) -> None:
    """The four choices generate different tokens; the prompt of two choices counts once."""
    outputs = [[7, 8], [9], [10, 11, 12], [13]]
    backend.script.chunks = [[*(Output([i]) for i in ids[:-1]), Output(ids[-1:], "length")] for ids in outputs]
    backend.script.cached_tokens = 2
    body = {"prompt": [[5, 5, 5], [6, 6]], "n": 2, "return_token_ids": True}
    answer = client.post(COMPLETIONS, body).json()
    assert [choice["index"] for choice in answer["choices"]] == [0, 1, 2, 3]
    assert [choice["token_ids"] for choice in answer["choices"]] == outputs
    assert answer["prompt_token_ids"] == body["prompt"]
    assert answer["usage"] == {
        "prompt_tokens": 5,
        "completion_tokens": 7,
        "total_tokens": 12,
        "prompt_tokens_details": {"cached_tokens": 4},
    }
    got = events(client.post(COMPLETIONS, {**body, "stream": True}))
    for index, ids in enumerate(outputs):
        parts = [event["choices"][0] for event in got if event["choices"][0]["index"] == index]
        assert token_ids_of(parts) == ids
        assert [part["finish_reason"] for part in parts] == [None] * (len(ids) - 1) + ["length"]
    order = [event["choices"][0]["index"] for event in got]
    assert order != sorted(order), "the events of different choices are interleaved"


def test_cached_tokens_are_those_that_no_choice_computed(client: Client, backend: ScriptedBackend) -> None:
    class LaterCacheMore(list[Any]):
        def append(self, stream: Any) -> None:
            super().append(stream)
            stream._script = type(stream._script)(cached_tokens=3 * (len(self) - 1))

    backend.streams = LaterCacheMore()
    answer = client.post(COMPLETIONS, {"prompt": [5, 5, 5, 5], "n": 3}).json()
    assert answer["usage"]["prompt_tokens_details"] == {"cached_tokens": 0}


@pytest.mark.parametrize("stream", [False, True])
def test_a_stop_string_across_tokens_ends_the_choice(
    client: Client,
    events: Events,
    backend: ScriptedBackend,
    tokenizer: Tokenizer,
    stream: bool,
    text_of: Callable[..., str],
) -> None:
    ids = tokenizer.encode("one 1 + 2 END")
    backend.generates(ids, finish_reason=None, hang=True)  # never ends without the stop string
    response = client.post(COMPLETIONS, {**HELLO, "stop": [" EN"], "stream": stream})
    got = events(response) if stream else [response.json()]
    assert text_of(got) == "one 1 + 2"
    assert got[-1]["choices"][0]["finish_reason"] == "stop"
    assert backend.streams[0].cancelled and backend.streams[0].timeline.finish_reason == "stop"


def test_the_stop_string_may_be_included(client: Client, backend: ScriptedBackend, tokenizer: Tokenizer) -> None:
    backend.generates(tokenizer.encode("one END two"))
    answer = client.post(COMPLETIONS, {**HELLO, "stop": "END", "include_stop_str_in_output": True}).json()
    assert answer["choices"][0]["text"] == "one END"


def test_a_stop_token_adds_no_text(client: Client, backend: ScriptedBackend, tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("one.")
    for last in (0, tokenizer.encode("x")[0]):
        backend.generates([*ids, last], finish_reason="stop")
        answer = client.post(COMPLETIONS, {**HELLO, "return_token_ids": True, "stop_token_ids": [last]}).json()
        [choice] = answer["choices"]
        assert (choice["text"], choice["finish_reason"]) == ("one.", "stop")
        assert choice["token_ids"] == [*ids, last]


@pytest.mark.parametrize("stream", [False, True])
def test_a_failed_choice_cancels_the_others(
    client: Client, backend: ScriptedBackend, stream: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    backend.generates([7], finish_reason=None, hang=True)
    real_open = backend.open

    def open_and_fail_third(request: Any) -> Any:
        opened = real_open(request)
        if request.request_id.endswith("-2"):
            opened._script = type(opened._script)(error=LOST)
        return opened

    monkeypatch.setattr(backend, "open", open_and_fail_third)
    response = client.post(COMPLETIONS, {**HELLO, "n": 3, "stream": stream})
    assert "instance d0 was lost" in response.text
    assert [stream.cancelled for stream in backend.streams] == [True, True, True]


def test_a_refused_choice_cancels_those_before(
    client: Client, backend: ScriptedBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    real_open = backend.open

    def open_two(request: Any) -> Any:
        if len(backend.streams) == 2:
            raise LOST
        return real_open(request)

    monkeypatch.setattr(backend, "open", open_two)
    assert client.post(COMPLETIONS, {**HELLO, "prompt": ["one", "two", "three"]}).status_code == 503
    assert [stream.cancelled for stream in backend.streams] == [True, True]


def test_a_parser_that_cannot_be_opened_leaves_no_stream(
    client: Client, backend: ScriptedBackend, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It may be another package's. Nothing that was started goes on."""

    class Broken(HermesParser):
        opened = 0

        def __init__(self, *arguments: Any) -> None:
            super().__init__(*arguments)
            Broken.opened += 1
            if Broken.opened == 2:
                raise KeyError("tags")

    monkeypatch.setattr(tokenizer, "parsers", replace(tokenizer.parsers, tools=Broken))
    tools = [{"type": "function", "function": {"name": "f"}}]
    body = {"messages": [{"role": "user", "content": "hello"}], "tools": tools, "n": 2}
    for stream in (False, True):
        Broken.opened = 0
        assert client.post(CHAT, {**body, "stream": stream}).status_code == 500
    assert all(one.cancelled for one in backend.streams)
