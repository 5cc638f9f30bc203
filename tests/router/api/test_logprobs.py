"""Log probabilities in the formats of completions and chat."""

from __future__ import annotations

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
