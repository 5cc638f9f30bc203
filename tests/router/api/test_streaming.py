"""Streams of events: their contents, writes, errors, and clients that disconnect."""

from __future__ import annotations

import asyncio
import http.client
import json
import socket
import threading
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any
from unittest.mock import patch
from urllib.parse import urlsplit

import httpx
import pytest
from starlette.types import Message

from pdserve.errors import BadRequest, Overloaded, RequestError, Unavailable
from pdserve.output import Output
from pdserve.router.api.streaming import ClientConnection
from pdserve.router.text.tokenizer import Tokenizer
from pdserve.router.web.application import Application

if TYPE_CHECKING:
    from tests.router.conftest import Client, ScriptedBackend

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
HELLO: dict[str, Any] = {"model": "demo", "prompt": "hello"}
CHATTING: dict[str, Any] = {"model": "demo", "messages": [{"role": "user", "content": "hello"}]}
BODIES = {COMPLETIONS: HELLO, CHAT: CHATTING}
Events = Callable[[httpx.Response], list[dict[str, Any]]]


IDS = [40, 41, 42]
USAGE = {"include_usage": True, "continuous_usage_stats": True}
LOST = Unavailable("instance d0 was lost", kind="instance_lost")


def test_a_streamed_completion(client: Client, events: Events, text_of: Callable[..., str]) -> None:
    response = client.post(COMPLETIONS, {**HELLO, "stream": True})
    got = events(response)
    assert text_of(got) == " Paris."
    assert [event["choices"][0]["finish_reason"] for event in got] == [None, "length"]
    assert {event["id"] for event in got} == {response.headers["x-request-id"]}
    assert all("usage" not in event for event in got)


def test_a_streamed_chat_begins_with_the_role(client: Client, events: Events, text_of: Callable[..., str]) -> None:
    got = events(client.post(CHAT, {**CHATTING, "stream": True}))
    assert got[0]["object"] == "chat.completion.chunk"
    assert got[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert text_of(got) == " Paris."
    assert got[-1]["choices"][0]["finish_reason"] == "length"


def test_events_of_a_chat_that_would_say_nothing_are_left_out(
    client: Client, events: Events, backend: ScriptedBackend, tokenizer: Tokenizer
) -> None:
    """While a character or what may be a stop string is incomplete; some clients take an empty content for an answer."""
    ids = tokenizer.encode("👍 Rome")
    backend.generates([*ids, 0], "stop")
    body = {"stream": True, "stop": "Rom!", "max_tokens": 20}
    first, *others = (one["choices"][0]["delta"] for one in events(client.post(CHAT, CHATTING | body)))
    texts = [one["content"] for one in others]
    assert first["content"] == "" and "".join(texts) == "👍 Rome" and all(texts[:-1]) and len(texts) < len(ids)
    for other, count in ((HELLO, 1), (CHATTING | {"stream_options": USAGE}, 3), (CHATTING | {"logprobs": True}, 2)):
        path = COMPLETIONS if other is HELLO else CHAT
        assert len(events(client.post(path, other | body))) == len(ids) + count, "one for each token"


def test_usage_in_a_stream(client: Client, events: Events, backend: ScriptedBackend) -> None:
    backend.script.cached_tokens = 1
    got = events(client.post(COMPLETIONS, {**HELLO, "stream": True, "stream_options": {"include_usage": True}}))
    *others, last = got
    assert [event["usage"] for event in others] == [None, None]
    assert last["choices"] == []
    assert last["usage"]["completion_tokens"] == 2
    assert last["usage"]["prompt_tokens_details"] == {"cached_tokens": 1}


def test_usage_with_every_event(client: Client, events: Events) -> None:
    options = {"continuous_usage_stats": True, "include_usage": True}
    got = events(client.post(COMPLETIONS, {**HELLO, "stream": True, "stream_options": options}))
    assert [event["usage"]["completion_tokens"] for event in got] == [1, 2, 2]


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
def test_token_ids(
    client: Client,
    events: Events,
    backend: ScriptedBackend,
    tokenizer: Tokenizer,
    path: str,
    token_ids_of: Callable[..., list[int]],
) -> None:
    ids = tokenizer.encode(" Paris.")
    answer = client.post(path, {**BODIES[path], "return_token_ids": True}).json()
    assert answer["choices"][0]["token_ids"] == ids
    assert answer["prompt_token_ids"] == backend.requests[0].prompt
    got = events(client.post(path, {**BODIES[path], "return_token_ids": True, "stream": True}))
    assert token_ids_of([event["choices"][0] for event in got]) == ids
    assert [event["prompt_token_ids"] for event in got if "prompt_token_ids" in event] == [backend.requests[0].prompt]


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
def test_no_event_holds_half_a_character(
    client: Client,
    events: Events,
    backend: ScriptedBackend,
    tokenizer: Tokenizer,
    path: str,
    text_of: Callable[..., str],
) -> None:
    text = "漢字 👩‍👩‍👧 é"
    backend.generates(tokenizer.encode(text))
    got = events(client.post(path, {**BODIES[path], "stream": True}))
    assert text_of(got) == text
    assert "\ufffd" not in json.dumps(got, ensure_ascii=False)


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("at_open", [False, True])
@pytest.mark.parametrize(
    ("error", "status", "kind"),
    [
        (LOST, 503, "service_unavailable"),
        (Overloaded("full", kind="overloaded"), 429, "rate_limit_error"),
        (BadRequest("this can never fit", kind="too_long"), 400, "invalid_request_error"),
        (RequestError("a bug in an instance", kind="internal"), 500, "server_error"),
    ],
)
def test_an_error_before_the_first_token_sets_the_status(
    client: Client,
    backend: ScriptedBackend,
    path: str,
    stream: bool,
    at_open: bool,
    error: RequestError,
    status: int,
    kind: str,
) -> None:
    backend.fails(error, error_at_open=at_open)
    response = client.post(path, {**BODIES[path], "stream": stream})
    assert response.status_code == status
    expected = {"message": str(error), "type": kind, "param": None, "code": error.kind}
    assert response.json() == {"error": expected}
    assert response.headers.get("retry-after") == ("1" if status == 429 else None)
    assert response.headers["x-request-id"]


def test_a_later_error_is_the_last_event(client: Client, events: Events, backend: ScriptedBackend) -> None:
    backend.generates([7, 8], finish_reason=None, error=LOST)
    *parts, last = events(client.post(COMPLETIONS, {**HELLO, "stream": True}))
    assert len(parts) == 2
    expected = {"message": str(LOST), "type": "service_unavailable", "param": None, "code": "instance_lost"}
    assert last == {"error": expected}


def test_an_error_replaces_a_whole_answer(client: Client, backend: ScriptedBackend) -> None:
    backend.generates([7, 8], finish_reason=None, error=LOST)
    assert client.post(COMPLETIONS, HELLO).status_code == 503


def test_an_unexpected_exception_is_an_internal_error(client: Client, events: Events, backend: ScriptedBackend) -> None:
    expected = {"type": "server_error", "param": None, "code": "internal_error"}
    for body in (HELLO, {**HELLO, "stream": True}):
        backend.script.error, backend.script.chunks = KeyError("secret"), []
        response = client.post(COMPLETIONS, body)
        assert response.status_code == 500
        assert response.json()["error"].items() >= expected.items()
        assert "secret" not in response.text
    backend.generates([7], finish_reason=None, error=KeyError("secret"))
    response = client.post(COMPLETIONS, {**HELLO, "stream": True})
    assert "internal_error" in response.text
    assert "secret" not in response.text
    assert "[DONE]" not in response.text, "the connection is broken off and the traceback logged"


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("tokens", [0, 3])
def test_a_disconnect_cancels_all_choices(
    url: str, backend: ScriptedBackend, eventually: Callable[..., None], path: str, stream: bool, tokens: int
) -> None:
    backend.generates([7, 8, 9], finish_reason=None, hang=True)
    backend.script.chunks[0] = backend.script.chunks[0][:tokens]
    connection = http.client.HTTPConnection(urlsplit(url).netloc)
    connection.request("POST", path, json.dumps({**BODIES[path], "n": 2, "stream": stream}))
    eventually(lambda: len(backend.streams) == 2)
    if stream and tokens:
        assert connection.getresponse().read(6) == b"data: "
    assert not any(stream.cancelled for stream in backend.streams)
    connection.sock.shutdown(socket.SHUT_RDWR)
    connection.close()
    eventually(lambda: all(stream.cancelled for stream in backend.streams))
    assert httpx.get(f"{url}/health").status_code == 200


def test_tokens_arrive_one_by_one(url: str, backend: ScriptedBackend) -> None:
    """Each token is generated only when the previous one has arrived."""
    gate, arrived = threading.Semaphore(1), 0
    backend.generates([7, 8, 9, 10], gate=gate)
    with httpx.stream("POST", url + COMPLETIONS, json={**HELLO, "stream": True}) as response:
        for line in response.iter_lines():
            if line.startswith("data: {"):
                arrived += 1
                gate.release()
    assert arrived == 4


def writes(app: Application, **body: Any) -> list[bytes]:
    """Return the parts of a streamed completion's body as they are handed to the server."""
    sent: list[Message] = []

    async def scenario() -> None:
        incoming = [{"type": "http.request", "body": json.dumps({"prompt": "hello", "stream": True, **body}).encode()}]

        async def receive() -> Message:
            return incoming.pop() if incoming else await asyncio.Future()

        async def send(message: Message) -> None:
            sent.append(message)

        scope = {"type": "http", "method": "POST", "path": "/v1/completions", "query_string": b"", "headers": []}
        await app(scope, receive, send)

    asyncio.run(asyncio.wait_for(scenario(), 600))
    assert [message["type"] for message in sent] == ["http.response.start", *["http.response.body"] * (len(sent) - 1)]
    assert [message["more_body"] for message in sent[1:]] == [True] * (len(sent) - 2) + [False]
    return [message["body"] for message in sent[1:]]


def test_each_token_is_one_write_and_the_last_includes_the_end(app: Application, backend: ScriptedBackend) -> None:
    backend.generates(IDS)
    bodies = writes(app, stream_options=USAGE)
    assert [body.count(b"data: ") for body in bodies] == [1, 1, 3]
    assert b'"finish_reason":"length"' in bodies[-1] and bodies[-1].endswith(b"data: [DONE]\n\n")


def test_tokens_that_arrive_together_share_one_write(app: Application, backend: ScriptedBackend) -> None:
    backend.generates(IDS, at_once=True)
    (body,) = writes(app, stream_options=USAGE, return_token_ids=True)
    *events, usage, done = body.split(b"\n\n")[:-1]
    parsed = [json.loads(event.removeprefix(b"data: ")) for event in events]
    assert [event["choices"][0]["token_ids"] for event in parsed] == [[token_id] for token_id in IDS]
    assert [event["usage"]["completion_tokens"] for event in parsed] == [1, 2, 3]
    assert b'"choices":[]' in usage and done == b"data: [DONE]"


def test_many_tokens_that_arrive_together_are_sent_in_parts(app: Application, backend: ScriptedBackend) -> None:
    """A client that has read nothing for a while would keep the event loop busy otherwise."""
    backend.generates([40] * 200, at_once=True)
    bodies = writes(app)
    assert len(bodies) > 2 and sum(body.count(b'"text"') for body in bodies) == 200


def test_a_stop_string_ends_the_choice_before_its_text_is_sent(
    app: Application, backend: ScriptedBackend, tokenizer: Tokenizer
) -> None:
    """A client that is slow to read, or leaves, does not make instances go on."""
    backend.generates(tokenizer.encode("hello Paris fox"), finish_reason=None, at_once=True, hang=True)
    reasons = list[tuple[bool, str]]()

    async def send(message: Message) -> None:
        reasons.append((backend.streams[0].cancelled, backend.streams[0].timeline.finish_reason))

    body = [{"type": "http.request", "body": json.dumps({**HELLO, "stream": True, "stop": "Paris"}).encode()}]

    async def receive() -> Message:
        return body.pop() if body else await asyncio.Future()

    scope = {"type": "http", "method": "POST", "path": COMPLETIONS, "query_string": b"", "headers": []}
    asyncio.run(asyncio.wait_for(app(scope, receive, send), 600))
    assert set(reasons) == {(True, "stop")}


def test_others_are_served_while_a_long_answer_becomes_text(app: Application, backend: ScriptedBackend) -> None:
    assert backend.info is not None
    backend.info = replace(backend.info, max_model_len=9000, common_model_len=9000)
    backend.script.chunks = [[Output([40] * 8000, "length")]]
    body = [{"type": "http.request", "body": json.dumps({**HELLO, "max_tokens": 8000, "logprobs": 0}).encode()}]
    turns = [0, 0]

    async def receive() -> Message:
        return body.pop() if body else await asyncio.Future()

    async def send(message: Message) -> None:
        pass

    async def count_turns() -> None:
        while True:
            turns[bool(backend.streams)] += 1
            await asyncio.sleep(0)

    async def scenario() -> None:
        other = asyncio.create_task(count_turns())
        scope = {"type": "http", "method": "POST", "path": COMPLETIONS, "query_string": b"", "headers": []}
        with patch("asyncio.to_thread", lambda function: asyncio.sleep(0, function())):  # its turns do not count
            await app(scope, receive, send)
        other.cancel()

    asyncio.run(asyncio.wait_for(scenario(), 600))
    assert turns[1] > 8000 // 300


def test_nothing_runs_for_a_client_that_has_disconnected() -> None:
    client, ran = ClientConnection(), False

    async def work() -> None:
        nonlocal ran
        ran = True

    client.disconnect()
    assert asyncio.run(client.run(work())) is False and not ran


@pytest.mark.parametrize("turns", range(8))
def test_a_disconnect_near_the_end_cancels_the_work_or_nothing(turns: int) -> None:
    """`turns` iterations of the loop separate the two; a late cancel would hit whatever the task does next."""

    async def scenario() -> bool:
        client, ended = ClientConnection(), False

        async def work() -> None:
            nonlocal ended
            asyncio.get_running_loop().call_soon(client.disconnect)
            for _ in range(turns):
                await asyncio.sleep(0)
            ended = True

        finished = await client.run(work())
        for _ in range(8):
            await asyncio.sleep(0)
        task = asyncio.current_task()
        assert task is not None and task.cancelling() == 0 and finished == ended
        return finished

    finished = asyncio.run(asyncio.wait_for(scenario(), 600))
    if turns in (0, 7):
        assert finished == (turns == 0)
