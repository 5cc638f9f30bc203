"""The endpoints: answers, streams, errors, ids, and what happens when a client leaves."""

from __future__ import annotations

import asyncio
import http.client
import json
import socket
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

import httpx
import openai
import pytest
from starlette.applications import Starlette

from pdserve import __version__
from pdserve.config import RouterConfig
from pdserve.errors import BadRequest, Conflict, Overloaded, RequestError, Unavailable
from pdserve.router.listening import listen
from pdserve.router.stream import Chunk
from pdserve.router.tokenizer import Tokenizer

if TYPE_CHECKING:
    from tests.router.conftest import Client, ScriptedBackend

Events = Callable[[httpx.Response], list[dict[str, Any]]]
COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
HELLO: dict[str, Any] = {"model": "demo", "prompt": "hello"}
CHATTING: dict[str, Any] = {"model": "demo", "messages": [{"role": "user", "content": "hello"}]}
BODIES = {COMPLETIONS: HELLO, CHAT: CHATTING}


def text_of(events: list[dict[str, Any]], index: int = 0) -> str:
    choices = [choice for event in events for choice in event["choices"] if choice["index"] == index]
    return "".join(choice["text"] if "text" in choice else choice["delta"]["content"] for choice in choices)


def token_ids_of(choices: list[dict[str, Any]]) -> list[int]:
    return [token_id for choice in choices for token_id in choice.get("token_ids", [])]


def logprobs_of(choices: list[dict[str, Any]]) -> dict[str, list[Any]]:
    """Those of the events of one choice, put together."""
    whole: dict[str, list[Any]] = {}
    for choice in choices:
        for name, values in (choice["logprobs"] or {}).items():
            whole.setdefault(name, []).extend(values or [])
    return whole


# ---- answers --------------------------------------------------------------------------------------------------


def test_a_completion(client: Client, backend: ScriptedBackend, tokenizer: Tokenizer) -> None:
    hello = len(tokenizer.encode("hello"))
    backend.script.cached_tokens = 1
    before = int(time.time())
    response = client.post(COMPLETIONS, HELLO)
    answer = response.json()
    assert response.status_code == 200
    assert answer.pop("id") == response.headers["x-request-id"]
    assert before <= answer.pop("created") <= time.time()
    assert answer == {
        "object": "text_completion",
        "model": "demo",
        "choices": [{"index": 0, "text": " Paris.", "logprobs": None, "finish_reason": "length"}],
        "usage": {
            "prompt_tokens": hello,
            "completion_tokens": 2,
            "total_tokens": hello + 2,
            "prompt_tokens_details": {"cached_tokens": 1},
        },
    }
    assert [stream.cancelled for stream in backend.streams] == [False]


def test_a_chat(client: Client) -> None:
    answer = client.post(CHAT, CHATTING).json()
    assert answer["object"] == "chat.completion"
    assert answer["id"].startswith("chatcmpl-")
    message = {"role": "assistant", "content": " Paris.", "refusal": None}
    assert answer["choices"] == [{"index": 0, "message": message, "logprobs": None, "finish_reason": "length"}]


def test_what_curl_sends_by_itself_is_json_too(client: Client) -> None:
    headers = {"Content-Type": "application/x-www-form-urlencoded"}
    response = client.request("POST", COMPLETIONS, content=json.dumps(HELLO).encode(), headers=headers)
    assert response.json()["choices"][0]["text"] == " Paris."


def test_a_streamed_completion(client: Client, events: Events) -> None:
    response = client.post(COMPLETIONS, {**HELLO, "stream": True})
    got = events(response)
    assert text_of(got) == " Paris."
    assert [event["choices"][0]["finish_reason"] for event in got] == [None, "length"]
    assert {event["id"] for event in got} == {response.headers["x-request-id"]}
    assert all("usage" not in event for event in got)


def test_a_streamed_chat_begins_with_the_role(client: Client, events: Events) -> None:
    got = events(client.post(CHAT, {**CHATTING, "stream": True}))
    assert got[0]["object"] == "chat.completion.chunk"
    assert got[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert text_of(got) == " Paris."
    assert got[-1]["choices"][0]["finish_reason"] == "length"


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
def test_token_ids_beside_the_text(
    client: Client, events: Events, backend: ScriptedBackend, tokenizer: Tokenizer, path: str
) -> None:
    ids = tokenizer.encode(" Paris.")
    answer = client.post(path, {**BODIES[path], "return_token_ids": True}).json()
    assert answer["choices"][0]["token_ids"] == ids
    assert answer["prompt_token_ids"] == backend.requests[0].prompt
    got = events(client.post(path, {**BODIES[path], "return_token_ids": True, "stream": True}))
    assert token_ids_of([event["choices"][0] for event in got]) == ids
    assert [event["prompt_token_ids"] for event in got if "prompt_token_ids" in event] == [backend.requests[0].prompt]


def test_several_prompts_and_choices(client: Client, events: Events, backend: ScriptedBackend) -> None:
    """Each of the four choices says something else; the prompt of two choices counts once."""
    words = [[7, 8], [9], [10, 11, 12], [13]]
    backend.script.chunks = [[*(Chunk([i]) for i in ids[:-1]), Chunk(ids[-1:], "length")] for ids in words]
    backend.script.cached_tokens = 2
    body = {"prompt": [[5, 5, 5], [6, 6]], "n": 2, "return_token_ids": True}
    answer = client.post(COMPLETIONS, body).json()
    assert [choice["index"] for choice in answer["choices"]] == [0, 1, 2, 3]
    assert [choice["token_ids"] for choice in answer["choices"]] == words
    assert answer["prompt_token_ids"] == body["prompt"]
    assert answer["usage"] == {
        "prompt_tokens": 5,
        "completion_tokens": 7,
        "total_tokens": 12,
        "prompt_tokens_details": {"cached_tokens": 4},
    }
    got = events(client.post(COMPLETIONS, {**body, "stream": True}))
    for index, ids in enumerate(words):
        parts = [event["choices"][0] for event in got if event["choices"][0]["index"] == index]
        assert token_ids_of(parts) == ids
        assert [part["finish_reason"] for part in parts] == [None] * (len(ids) - 1) + ["length"]
    order = [event["choices"][0]["index"] for event in got]
    assert order != sorted(order), "choices wait for each other"


def test_a_prompt_is_cached_only_as_far_as_no_choice_computed_it(client: Client, backend: ScriptedBackend) -> None:
    class Later(list[Any]):
        def append(self, stream: Any) -> None:
            super().append(stream)
            stream._script = type(stream._script)(cached_tokens=3 * (len(self) - 1))

    backend.streams = Later()
    answer = client.post(COMPLETIONS, {"prompt": [5, 5, 5, 5], "n": 3}).json()
    assert answer["usage"]["prompt_tokens_details"] == {"cached_tokens": 0}


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
def test_no_event_holds_half_a_character(
    client: Client, events: Events, backend: ScriptedBackend, tokenizer: Tokenizer, path: str
) -> None:
    text = "漢字 👩‍👩‍👧 é"
    backend.plays(tokenizer.encode(text))
    got = events(client.post(path, {**BODIES[path], "stream": True}))
    assert text_of(got) == text
    assert "\ufffd" not in json.dumps(got, ensure_ascii=False)


@pytest.mark.parametrize("stream", [False, True])
def test_logprobs_of_a_completion(
    client: Client, events: Events, backend: ScriptedBackend, tokenizer: Tokenizer, stream: bool
) -> None:
    ids = [*tokenizer.encode(" Paris 漢"), 0]
    backend.plays(ids, "stop")
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
    client: Client, events: Events, backend: ScriptedBackend, tokenizer: Tokenizer, stream: bool
) -> None:
    ids = tokenizer.encode("hello 漢. world")
    backend.plays(ids)
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
    assert len(content) == len(used) < len(ids), "up to the stop string, as the ids"
    assert bytes(byte for one in content for byte in one["bytes"]).startswith("hello 漢. w".encode())
    for one in content:
        assert one["top_logprobs"] == [{name: one[name] for name in ("token", "logprob", "bytes")}]
    assert (
        client.post(CHAT, {**CHATTING, "logprobs": True}).json()["choices"][0]["logprobs"]["content"][0]["top_logprobs"]
        == []
    )


@pytest.mark.parametrize("stream", [False, True])
def test_echo(client: Client, events: Events, tokenizer: Tokenizer, stream: bool) -> None:
    prompts = [tokenizer.encode("hello"), tokenizer.encode("world")]
    response = client.post(COMPLETIONS, {"prompt": prompts, "n": 2, "echo": True, "stream": stream})
    answers = events(response) if stream else [response.json()]
    assert [text_of(answers, i) for i in range(4)] == ["hello Paris."] * 2 + ["world Paris."] * 2


@pytest.mark.parametrize("stream", [False, True])
def test_a_stop_string_across_tokens_ends_the_choice(
    client: Client, events: Events, backend: ScriptedBackend, tokenizer: Tokenizer, stream: bool
) -> None:
    ids = tokenizer.encode("one 1 + 2 END")
    backend.plays(ids, finish_reason=None, hang=True)  # it would never end by itself
    response = client.post(COMPLETIONS, {**HELLO, "stop": [" EN"], "stream": stream})
    got = events(response) if stream else [response.json()]
    assert text_of(got) == "one 1 + 2"
    assert got[-1]["choices"][0]["finish_reason"] == "stop"
    assert backend.streams[0].cancelled and backend.streams[0].timeline.finish_reason == "stop"


def test_the_stop_string_may_be_included(client: Client, backend: ScriptedBackend, tokenizer: Tokenizer) -> None:
    backend.plays(tokenizer.encode("one END two"))
    answer = client.post(COMPLETIONS, {**HELLO, "stop": "END", "include_stop_str_in_output": True}).json()
    assert answer["choices"][0]["text"] == "one END"


def test_the_token_that_ends_gives_no_text(client: Client, backend: ScriptedBackend, tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("one.")
    for last in (0, tokenizer.encode("x")[0]):
        backend.plays([*ids, last], finish_reason="stop")
        answer = client.post(COMPLETIONS, {**HELLO, "return_token_ids": True, "stop_token_ids": [last]}).json()
        [choice] = answer["choices"]
        assert (choice["text"], choice["finish_reason"]) == ("one.", "stop")
        assert choice["token_ids"] == [*ids, last]


# ---- the official client --------------------------------------------------------------------------------------


@pytest.fixture
def official(url: str) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)


def test_the_official_client(official: openai.OpenAI) -> None:
    completion = official.completions.create(model="demo", prompt="hello", n=2)
    assert [choice.text for choice in completion.choices] == [" Paris.", " Paris."]
    chat = official.chat.completions.create(model="demo", messages=[{"role": "user", "content": "hello"}])
    assert chat.choices[0].message.content == " Paris."
    assert chat.usage is not None and chat.usage.completion_tokens == 2
    assert [model.id for model in official.models.list()] == ["demo"]
    assert official.models.retrieve("demo").id == "demo"


def test_the_official_client_sends_an_answer_back(official: openai.OpenAI) -> None:
    chat = official.chat.completions.create(model="demo", messages=[{"role": "user", "content": "hello"}])
    messages: Any = [{"role": "user", "content": "hello"}, chat.choices[0].message, {"role": "user", "content": "?"}]
    assert official.chat.completions.create(model="demo", messages=messages).choices


def test_the_official_client_streams(official: openai.OpenAI) -> None:
    parts = official.completions.create(model="demo", prompt="hello", stream=True)
    assert "".join(part.choices[0].text for part in parts) == " Paris."
    chat = list(
        official.chat.completions.create(
            model="demo",
            messages=[{"role": "user", "content": "hello"}],
            stream=True,
            stream_options={"include_usage": True},
        )
    )
    assert "".join(part.choices[0].delta.content or "" for part in chat if part.choices) == " Paris."
    assert chat[-1].usage is not None and chat[-1].usage.total_tokens > 2


def test_the_official_client_understands_our_errors(official: openai.OpenAI, backend: ScriptedBackend) -> None:
    with pytest.raises(openai.NotFoundError, match="this router serves 'demo'") as caught:
        official.completions.create(model="gpt", prompt="hello")
    assert caught.value.code == "model_not_found"
    with pytest.raises(openai.BadRequestError, match="length_penalty is not supported"):
        official.completions.create(model="demo", prompt="hello", extra_body={"length_penalty": 2})
    backend.fails(Overloaded("too much to do", kind="overloaded", retry_after_s=7), error_at_open=True)
    with pytest.raises(openai.RateLimitError, match="too much to do") as limited:
        official.completions.create(model="demo", prompt="hello")
    assert limited.value.response.headers["retry-after"] == "7"


def test_the_official_client_raises_on_an_error_within_a_stream(
    official: openai.OpenAI, backend: ScriptedBackend
) -> None:
    backend.plays([7, 8], finish_reason=None, error=Unavailable("instance d0 was lost", kind="instance_lost"))
    parts = official.completions.create(model="demo", prompt="hello", stream=True)
    got = []
    with pytest.raises(openai.APIError, match="instance d0 was lost") as caught:
        for part in parts:
            got.append(part.choices[0].text)
    assert len(got) == 2
    assert caught.value.code == "instance_lost"


# ---- errors while generating ----------------------------------------------------------------------------------

LOST = Unavailable("instance d0 was lost", kind="instance_lost")


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
def test_an_error_before_the_first_token_has_its_status(
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


def test_an_error_within_a_stream_is_its_last_event(client: Client, events: Events, backend: ScriptedBackend) -> None:
    backend.plays([7, 8], finish_reason=None, error=LOST)
    *parts, last = events(client.post(COMPLETIONS, {**HELLO, "stream": True}))
    assert len(parts) == 2
    expected = {"message": str(LOST), "type": "service_unavailable", "param": None, "code": "instance_lost"}
    assert last == {"error": expected}


def test_an_error_within_an_answer_is_the_answer(client: Client, backend: ScriptedBackend) -> None:
    backend.plays([7, 8], finish_reason=None, error=LOST)
    assert client.post(COMPLETIONS, HELLO).status_code == 503


@pytest.mark.parametrize("stream", [False, True])
def test_tokens_that_end_without_a_reason_are_an_error(
    client: Client, events: Events, backend: ScriptedBackend, stream: bool
) -> None:
    backend.plays([7], finish_reason=None)
    response = client.post(COMPLETIONS, {**HELLO, "stream": stream})
    answer = events(response)[-1] if stream else response.json()
    assert answer["error"]["message"] == "the tokens ended without a reason"


def test_a_mistake_of_ours_is_told_apart(client: Client, events: Events, backend: ScriptedBackend) -> None:
    expected = {"type": "server_error", "param": None, "code": "internal_error"}
    for body in (HELLO, {**HELLO, "stream": True}):
        backend.script.error, backend.script.chunks = KeyError("secret"), []
        response = client.post(COMPLETIONS, body)
        assert response.status_code == 500
        assert response.json()["error"].items() >= expected.items()
        assert "secret" not in response.text
    backend.plays([7], finish_reason=None, error=KeyError("secret"))
    response = client.post(COMPLETIONS, {**HELLO, "stream": True})
    assert "internal_error" in response.text
    assert "secret" not in response.text
    assert "[DONE]" not in response.text, "the connection breaks, and the traceback is logged"


@pytest.mark.parametrize("stream", [False, True])
def test_one_failed_choice_ends_the_others(
    client: Client, backend: ScriptedBackend, stream: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    backend.plays([7], finish_reason=None, hang=True)
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


def test_a_choice_that_is_refused_cancels_those_before(
    client: Client, backend: ScriptedBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    real_open = backend.open

    def open_two(request: Any) -> Any:
        if len(backend.streams) == 2:
            raise LOST
        return real_open(request)

    monkeypatch.setattr(backend, "open", open_two)
    assert client.post(COMPLETIONS, {**HELLO, "n": 3}).status_code == 503
    assert [stream.cancelled for stream in backend.streams] == [True, True]


# ---- the client leaves ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("tokens", [0, 3])
def test_a_client_that_leaves_frees_all_its_choices(
    url: str, backend: ScriptedBackend, eventually: Callable[..., None], path: str, stream: bool, tokens: int
) -> None:
    backend.plays([7, 8, 9], finish_reason=None, hang=True)
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


def test_a_client_that_reads_nothing_is_cut_off(
    app: Starlette, backend: ScriptedBackend, serving: Callable[..., Any], eventually: Callable[..., None]
) -> None:
    backend.plays([5] * 2000, finish_reason=None, hang=True)
    listening = listen(RouterConfig(port=0, client_timeout_seconds=1))
    with serving(app, listening) as url, socket.socket() as client:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        address = urlsplit(url)
        client.connect((address.hostname, address.port))
        body = json.dumps({**HELLO, "stream": True}).encode()
        head = f"POST {COMPLETIONS} HTTP/1.1\r\nHost: router\r\nContent-Length: {len(body)}\r\n\r\n"
        client.sendall(head.encode() + body)
        eventually(lambda: [stream.cancelled for stream in backend.streams] == [True])


def test_a_client_that_sends_nothing_more_is_cut_off(
    make_app: Callable[..., Starlette], tokenizer: Tokenizer, serving: Callable[..., Any], backend: ScriptedBackend
) -> None:
    with serving(make_app(tokenizer, client_timeout_seconds=1)) as url:
        connection = http.client.HTTPConnection(urlsplit(url).netloc)
        connection.putrequest("POST", COMPLETIONS)
        connection.putheader("Content-Length", "100")
        connection.endheaders(b"{")
        reply = connection.getresponse()
        assert (reply.status, reply.getheader("Connection")) == (408, "close")
        error = json.loads(reply.read())["error"]
        assert (error["code"], error["message"]) == ("body_too_slow", "nothing of the body came for 1 s")
        connection.close()
        backend.plays([5], pause=1.5)
        address, body = urlsplit(url), json.dumps(HELLO).encode()
        with socket.create_connection((address.hostname, address.port)) as client:
            head = f"POST {COMPLETIONS} HTTP/1.1\r\nHost: router\r\nContent-Length: {len(body)}\r\n\r\n"
            client.sendall(head.encode() + body)  # at once, or a busy machine may be too slow with the rest of it
            assert client.recv(100).startswith(b"HTTP/1.1 200 "), "an answer may take longer"


def test_a_client_that_leaves_while_it_sends_is_no_error(app: Starlette, backend: ScriptedBackend) -> None:
    messages = [{"type": "http.request", "body": b"{", "more_body": True}, {"type": "http.disconnect"}]
    sent: list[Any] = []

    async def receive() -> Any:
        return messages.pop(0)

    async def send(message: Any) -> None:
        sent.append(message)

    scope = {"type": "http", "method": "POST", "path": COMPLETIONS, "headers": [], "query_string": b""}
    asyncio.run(app(scope, receive, send))
    assert sent[0]["status"] == 499
    assert backend.requests == []


def test_tokens_arrive_one_by_one(url: str, backend: ScriptedBackend) -> None:
    """Each is made when the one before has arrived."""
    gate, arrived = threading.Semaphore(1), 0
    backend.plays([7, 8, 9, 10], gate=gate)
    with httpx.stream("POST", url + COMPLETIONS, json={**HELLO, "stream": True}) as response:
        for line in response.iter_lines():
            if line.startswith("data: {"):
                arrived += 1
                gate.release()
    assert arrived == 4


# ---- bodies, paths, ids ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("chunked", [False, True])
def test_a_body_over_the_limit(url: str, backend: ScriptedBackend, chunked: bool) -> None:
    body = json.dumps({"prompt": "a" * 20_000}).encode()
    content: Any = iter([body[i : i + 1000] for i in range(0, len(body), 1000)]) if chunked else body
    response = httpx.post(url + COMPLETIONS, content=content, headers={"Content-Type": "application/json"})
    assert response.status_code == 413
    assert response.json()["error"]["message"] == "the body is larger than 20000 bytes"
    assert response.headers["connection"] == "close"
    assert backend.requests == []


def test_a_body_far_over_the_limit_is_not_read_to_its_end(url: str) -> None:
    sent = 0
    address = urlsplit(url)
    with socket.create_connection((address.hostname, address.port)) as connection:
        connection.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 1000000000\r\n\r\n")
        connection.settimeout(600)
        with pytest.raises(ConnectionError):
            while sent < 1_000_000_000:
                sent += connection.send(b" " * 65536)
    assert sent < 100_000_000


def test_a_body_up_to_the_limit_is_fine(client: Client) -> None:
    body = json.dumps(HELLO).encode()
    padded = body + b" " * (20_000 - len(body))
    assert client.request("POST", COMPLETIONS, content=padded).status_code == 200
    assert client.request("POST", COMPLETIONS, content=padded + b" ").status_code == 413


@pytest.mark.parametrize("kind", ["text/plain", "multipart/form-data; boundary=x", "application/xml"])
def test_another_content_type(client: Client, kind: str) -> None:
    response = client.request("POST", COMPLETIONS, content=b"{}", headers={"Content-Type": kind})
    assert response.status_code == 415
    assert response.json()["error"]["message"] == "the body must be JSON, with Content-Type: application/json"


def test_unknown_paths_and_methods(client: Client) -> None:
    unknown = client.get("/v2/completions")
    assert unknown.status_code == 404
    assert unknown.json()["error"]["message"] == "there is no such path; try /v1/models or /v1/completions"
    wrong = client.get(COMPLETIONS)
    assert (wrong.status_code, wrong.headers["allow"]) == (405, "POST")
    assert wrong.json()["error"] == {
        "message": "this path does not take GET",
        "type": "invalid_request_error",
        "param": None,
        "code": "method_not_allowed",
    }


def test_the_clients_own_id_is_the_only_id(client: Client, backend: ScriptedBackend) -> None:
    response = client.post(COMPLETIONS, HELLO, headers={"X-Request-Id": "order-66.a_b"})
    assert response.headers["x-request-id"] == response.json()["id"] == "order-66.a_b"
    assert backend.requests[0].request_id == "order-66.a_b"
    assert client.get("/debug/requests/order-66.a_b").json()["request_id"] == "order-66.a_b"


@pytest.mark.parametrize("bad", ["", "a b", "a/b", "x" * 129, "a\u00e9".encode("latin-1")])
def test_ids_that_cannot_be(client: Client, backend: ScriptedBackend, bad: str | bytes) -> None:
    response = client.post(COMPLETIONS, HELLO, headers={"X-Request-Id": bad})
    assert response.status_code == 400
    assert response.json()["error"]["message"].startswith("X-Request-Id must have 1 to 128 characters out of")
    assert backend.requests == []


# ---- the other endpoints --------------------------------------------------------------------------------------


def test_debug_finds_each_choice(client: Client, backend: ScriptedBackend) -> None:
    one = client.post(COMPLETIONS, HELLO).json()["id"]
    assert client.get(f"/debug/requests/{one}").json()["prompt_tokens"] == len(backend.requests[0].prompt)
    three = client.post(COMPLETIONS, {**HELLO, "n": 3}).json()["id"]
    found = client.get(f"/debug/requests/{three}").json()
    assert [choice["request_id"] for choice in found["choices"]] == [f"{three}-{i}" for i in range(3)]
    assert client.get(f"/debug/requests/{three}-1").json()["request_id"] == f"{three}-1"
    latest = client.get("/debug/requests").json()["requests"]
    assert [timeline["request_id"] for timeline in latest] == [f"{three}-2", f"{three}-1", f"{three}-0", one]
    unknown = client.get("/debug/requests/nobody")
    assert unknown.status_code == 404
    assert (
        unknown.json()["error"]["message"]
        == "no request with this id is remembered here; a router knows those that it served itself"
    )


def test_models(client: Client, backend: ScriptedBackend) -> None:
    [card] = client.get("/v1/models").json()["data"]
    assert card.items() >= {"id": "demo", "object": "model", "owned_by": "pdserve", "max_model_len": 256}.items()
    assert Path(card["root"], "tokenizer.json").exists(), "vLLM's benchmark client looks for it there"
    assert client.get("/v1/models/demo").json() == card
    assert client.get("/v1/models/org/other").json()["error"]["message"] == "the model 'org/other' does not exist"
    backend.info = None
    assert client.get("/v1/models").json() == {"object": "list", "data": []}


def test_health_and_readiness(client: Client, backend: ScriptedBackend) -> None:
    assert client.get("/health").status_code == 200
    assert client.get("/ready").json() == {"status": "ready", "instances": 1}
    backend.not_ready = "no decode instance"
    response = client.get("/ready")
    assert (response.status_code, response.headers["retry-after"]) == (503, "1")
    assert response.json()["error"]["message"] == "not ready: no decode instance"
    assert client.get("/health").status_code == 200


def test_what_operators_ask(client: Client) -> None:
    metrics = client.get("/metrics")
    assert metrics.text == "pdserve_up 1\n"
    assert metrics.headers["content-type"] == "text/plain; version=0.0.4; charset=utf-8"
    assert client.get("/version").json() == {"version": __version__}
    assert client.get("/debug/instances").json() == {"instances": [{"instance_id": "p0", "role": "prefill"}]}


def test_operators_give_orders(client: Client, backend: ScriptedBackend) -> None:
    json_only: Any = {"headers": {"Content-Type": "application/json"}}
    orders = "/admin/instances/decode-0"
    assert client.request("POST", f"{orders}/drain", **json_only).status_code == 202
    assert client.post(f"{orders}/role", {"role": "prefill"}, **json_only).status_code == 202
    assert backend.drained == [("decode-0", ""), ("decode-0", "prefill")]
    for body in ({}, {"role": "leader"}, {"role": ""}, {"role": "both", "now": True}):
        assert client.post(f"{orders}/role", body, **json_only).status_code == 400
    refused = client.post(f"{orders}/role", {"role": "leader"}, **json_only)
    assert refused.json()["error"]["message"] == "role must be 'prefill', 'decode' or 'both', not 'leader'"
    for path in ("drain", "role"):  # as a page of another origin could send it to a router without keys
        assert client.post(f"{orders}/{path}", {"role": "prefill"}).status_code == 415
    assert len(backend.drained) == 2
    backend.fails(Conflict("it is the last one", kind="last_instance"))
    assert client.request("POST", f"{orders}/drain", **json_only).status_code == 409


def test_tokenize_and_back(client: Client, tokenizer: Tokenizer) -> None:
    text = "hello 漢<|end|>"
    answer = client.post("/tokenize", {"model": "demo", "prompt": text, "return_token_strs": True}).json()
    ids = tokenizer.encode(text)
    strings = [tokenizer.token(token_id) for token_id in ids]
    assert answer == {"count": len(ids), "max_model_len": 256, "tokens": ids, "token_strs": strings}
    assert client.post("/detokenize", {"model": "demo", "tokens": ids}).json() == {"prompt": text}


def test_tokenize_a_chat(client: Client, tokenizer: Tokenizer) -> None:
    answer = client.post("/tokenize", CHATTING).json()
    assert answer["tokens"] == tokenizer.render_chat(CHATTING["messages"])
    assert answer["token_strs"] is None
    shorter = client.post("/tokenize", {**CHATTING, "add_generation_prompt": False}).json()
    assert shorter["count"] < answer["count"]


@pytest.mark.parametrize(
    ("path", "body", "message"),
    [
        ("/tokenize", {}, "send either prompt or messages"),
        ("/tokenize", {"prompt": "a", "messages": []}, "send either prompt or messages"),
        ("/tokenize", {"promt": "a"}, "unknown field 'promt'; did you mean 'prompt'?"),
        ("/detokenize", {}, "tokens is required"),
        ("/detokenize", {"tokens": [300]}, "tokens holds the token id 300; this model knows 0 to 299"),
        ("/detokenize", {"tokens": ["a"]}, "tokens[0] must be a valid integer, not a string"),
    ],
)
def test_tokenize_mistakes(client: Client, path: str, body: object, message: str) -> None:
    response = client.post(path, body)
    assert response.status_code == 400
    assert response.json()["error"]["message"] == message


def test_a_large_body_is_tokenized_aside(client: Client, backend: ScriptedBackend, monkeypatch: Any) -> None:
    """The same answer, through the thread."""
    monkeypatch.setattr("pdserve.router.api.LARGE_BODY", 10)
    assert client.post(COMPLETIONS, HELLO).json()["choices"][0]["text"] == " Paris."
    assert client.post(COMPLETIONS, {**HELLO, "n": 0}).status_code == 400
