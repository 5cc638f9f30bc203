"""Log probabilities in the formats of completions and chat."""

from __future__ import annotations

import asyncio
import re
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import httpx
import pytest

from pdserve.router.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from tests.router.conftest import Client, ScriptedBackend

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
HELLO: dict[str, Any] = {"model": "demo", "prompt": "hello"}
CHATTING: dict[str, Any] = {"model": "demo", "messages": [{"role": "user", "content": "hello"}]}
Events = Callable[[httpx.Response], list[dict[str, Any]]]


def logprobs_of(choices: list[dict[str, Any]]) -> dict[str, list[Any]]:
    """Join the logprobs of the events of one choice."""
    whole: dict[str, list[Any]] = {}
    for choice in choices:
        for name, values in (choice["logprobs"] or {}).items():
            whole.setdefault(name, []).extend(values or [])
    return whole


@pytest.mark.parametrize("stream", [False, True])
def test_logprobs_of_a_completion(
    client: Client, events: Events, backend: ScriptedBackend, tokenizer: Tokenizer, stream: bool
) -> None:
    ids = [*tokenizer.encode(" Paris 漢"), 0]
    backend.generates(ids, "stop")
    response = client.post(COMPLETIONS, {**HELLO, "logprobs": 2, "stream": stream, "echo": False})
    answers = events(response) if stream else [response.json()]
    logprobs = logprobs_of([answer["choices"][0] for answer in answers])
    assert logprobs["token_logprobs"] == [-0.5] * len(ids)
    tokens, starts = logprobs["tokens"], logprobs["text_offset"]
    assert tokens[-1] == "<|end|>" and tokens[-2].startswith("bytes:\\x")
    text = " Paris 漢"
    whole = [i for i, token in enumerate(tokens[:-1]) if not token.startswith("bytes:")]
    assert whole and all(text[starts[i] :].startswith(tokens[i]) for i in whole)
    assert starts[-1] == len(text)
    other = tokenizer.decode([40])
    assert logprobs["top_logprobs"] == [{token: -0.5, other: -9999.0} for token in tokens]


@pytest.mark.parametrize("stream", [False, True])
def test_logprobs_of_a_chat(
    client: Client,
    events: Events,
    backend: ScriptedBackend,
    tokenizer: Tokenizer,
    stream: bool,
    token_ids_of: Callable[..., list[int]],
) -> None:
    ids = tokenizer.encode("hello 漢. world")
    backend.generates(ids)
    body = {
        **CHATTING,
        "logprobs": True,
        "top_logprobs": 1,
        "stream": stream,
        "stop": [". w"],
        "return_token_ids": True,
    }
    response = client.post(CHAT, body)
    choices = [answer["choices"][0] for answer in (events(response) if stream else [response.json()])]
    content = logprobs_of(choices)["content"]
    used = token_ids_of(choices)
    assert len(content) == len(used) < len(ids), "like the ids, they end with the stop string"
    assert bytes(byte for one in content for byte in one["bytes"]).startswith("hello 漢. w".encode())
    for one in content:
        assert one["top_logprobs"] == [{name: one[name] for name in ("token", "logprob", "bytes")}]
    assert (
        client.post(CHAT, {**CHATTING, "logprobs": True}).json()["choices"][0]["logprobs"]["content"][0]["top_logprobs"]
        == []
    )


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (COMPLETIONS, {**HELLO, "logprobs": 2, "n": 2, "echo": True}),
        (COMPLETIONS, {**HELLO, "logprobs": 1, "prompt_logprobs": 1, "prompt": ["hello", "the fox"]}),
        (COMPLETIONS, {**HELLO, "logprobs": 1, "echo": True, "stream": True}),
        (CHAT, {**CHATTING, "logprobs": True, "top_logprobs": 2, "prompt_logprobs": 2, "n": 2}),
        (CHAT, {**CHATTING, "logprobs": True, "top_logprobs": 1, "stream": True}),
    ],
)
def test_answers_with_many_log_probabilities_are_the_same_built_in_a_thread(
    client: Client, monkeypatch: pytest.MonkeyPatch, path: str, body: dict[str, Any]
) -> None:
    def answer() -> str:
        threads.clear()
        monkeypatch.setattr("asyncio.to_thread", record)
        response = client.post(path, body, headers={"X-Request-Id": "same"})
        assert response.status_code == 200
        return re.sub(r'"created":\d+', "", response.text)

    async def record(build: Callable[..., object], *args: object) -> object:
        threads.append(await to_thread(threading.get_ident))
        return await to_thread(build, *args)

    to_thread, threads = asyncio.to_thread, list[int]()
    plain = answer()
    assert not threads
    monkeypatch.setattr("pdserve.router.api.logprobs.MANY", 0)
    assert answer() == plain and threads and threading.get_ident() not in threads


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        (COMPLETIONS, {**HELLO, "prompt": [[1] * 10] * 2, "n": 2, "prompt_logprobs": 4}, "prompt_logprobs"),
        (COMPLETIONS, {**HELLO, "prompt": [1] * 21, "logprobs": 4, "echo": True, "max_tokens": 1}, "prompt_logprobs"),
        (COMPLETIONS, {**HELLO, "n": 2, "logprobs": 4, "max_tokens": 11}, "logprobs"),
        (CHAT, {**CHATTING, "n": 2, "prompt_logprobs": 20}, "prompt_logprobs"),
        (CHAT, {**CHATTING, "n": 2, "logprobs": True, "top_logprobs": 4, "max_tokens": 11}, "logprobs"),
    ],
)
def test_limits_hold_for_all_choices_and_prompts_together(
    client: Client, monkeypatch: pytest.MonkeyPatch, path: str, body: dict[str, Any], param: str
) -> None:
    monkeypatch.setattr("pdserve.router.api.requests.MAX_LOGPROBS_OF_ANSWER", 100)
    error = client.post(path, body).json()["error"]
    assert (error["param"], error["code"]) == (param, "invalid_parameter") and "100" in error["message"]
    small = {name: value for name, value in body.items() if name not in ("echo", "n", "prompt_logprobs")}
    assert client.post(path, {**small, "max_tokens": 1}).status_code == 200


def test_without_max_tokens_an_answer_is_as_long_as_its_log_probabilities_may_be(
    client: Client, backend: ScriptedBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pdserve.router.api.requests.MAX_LOGPROBS_OF_ANSWER", 100)
    body = {**CHATTING, "n": 2, "logprobs": True, "top_logprobs": 4}
    assert client.post(CHAT, body).status_code == 200
    assert client.post(CHAT, {**body, "stream": True}).status_code == 200
    assert client.post(CHAT, CHATTING).status_code == 200
    lengths = [request.sampling.max_tokens for request in backend.requests]
    assert lengths[:2] == [10, 10] and min(lengths[2:]) > 100
