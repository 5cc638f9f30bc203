"""Request ids, and the limits of request bodies."""

from __future__ import annotations

import asyncio
import http.client
import json
import socket
from collections.abc import Callable
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

import httpx
import pytest

from pdserve.router.limits import body_budget
from pdserve.router.telemetry.metrics import Metrics
from pdserve.router.text.tokenizer import Tokenizer
from pdserve.router.web.application import Application

if TYPE_CHECKING:
    from tests.router.conftest import Client, ScriptedBackend

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
HELLO: dict[str, Any] = {"model": "demo", "prompt": "hello"}


def test_the_clients_id_is_used_everywhere(client: Client, backend: ScriptedBackend) -> None:
    response = client.post(COMPLETIONS, HELLO, headers={"X-Request-Id": "order-66.a_b"})
    assert response.headers["x-request-id"] == response.json()["id"] == "order-66.a_b"
    assert backend.requests[0].request_id == "order-66.a_b"
    assert client.get("/debug/requests/order-66.a_b").json()["request_id"] == "order-66.a_b"


@pytest.mark.parametrize("bad", ["", "a b", "a/b", "x" * 129, "a\u00e9".encode("latin-1")])
def test_invalid_ids(client: Client, backend: ScriptedBackend, bad: str | bytes) -> None:
    response = client.post(COMPLETIONS, HELLO, headers={"X-Request-Id": bad})
    assert response.status_code == 400
    assert response.json()["error"]["message"].startswith("X-Request-Id must have 1 to 128 of the characters")
    assert backend.requests == []


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
        connection.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: 1000000000\r\n\r\n")
        connection.settimeout(600)
        with pytest.raises(ConnectionError):
            while sent < 1_000_000_000:
                sent += connection.send(b" " * 65536)
    assert sent < 100_000_000


def test_a_body_at_the_limit(client: Client) -> None:
    body = json.dumps(HELLO).encode()
    padded = body + b" " * (20_000 - len(body))
    assert client.request("POST", COMPLETIONS, content=padded).status_code == 200
    assert client.request("POST", COMPLETIONS, content=padded + b" ").status_code == 413


def test_a_client_that_stops_sending_is_cut_off(
    make_app: Callable[..., Application], tokenizer: Tokenizer, serving: Callable[..., Any], backend: ScriptedBackend
) -> None:
    with serving(make_app(tokenizer, client_timeout_seconds=1)) as url:
        connection = http.client.HTTPConnection(urlsplit(url).netloc)
        connection.putrequest("POST", COMPLETIONS)
        connection.putheader("Content-Length", "100")
        connection.endheaders(b"{")
        reply = connection.getresponse()
        assert (reply.status, reply.getheader("Connection")) == (408, "close")
        error = json.loads(reply.read())["error"]
        assert (error["code"], error["message"]) == ("body_too_slow", "no part of the body arrived for 1 s")
        connection.close()
        backend.generates([5], pause=1.5)
        address, body = urlsplit(url), json.dumps(HELLO).encode()
        with socket.create_connection((address.hostname, address.port)) as sender:
            head = f"POST {COMPLETIONS} HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(body)}\r\n\r\n"
            sender.sendall(
                head.encode() + body
            )  # in one write: a busy machine may delay a second one beyond the timeout
            assert sender.recv(100).startswith(b"HTTP/1.1 200 "), "the timeout does not apply to the answer"


def test_unfinished_bodies_of_one_key_leave_room_for_those_of_another(
    make_app: Callable[..., Application],
    tokenizer: Tokenizer,
    serving: Callable[..., Any],
    monkeypatch: pytest.MonkeyPatch,
    metrics: Metrics,
    eventually: Callable[..., None],
) -> None:
    """What a head declares is reserved; without a declaration, what has arrived."""
    monkeypatch.setattr(body_budget, "MAX_BYTES", 200_000)  # 50,000 of each key
    budgets = list[body_budget.BodyBudget]()
    create = body_budget.BodyBudget.__init__

    def remember(self: body_budget.BodyBudget, **arguments: Any) -> None:
        budgets.append(self)
        create(self, **arguments)

    monkeypatch.setattr(body_budget.BodyBudget, "__init__", remember)
    app = make_app(tokenizer, api_key="mallory,alice")
    body = json.dumps(HELLO).encode().ljust(20_000)
    with serving(app) as url, ExitStack() as stack:
        [budget] = budgets

        def begin(key: str, framing: str, part: bytes) -> socket.socket:
            address = urlsplit(url)
            connection = stack.enter_context(socket.create_connection((address.hostname, address.port)))
            connection.settimeout(600)
            head = f"POST {COMPLETIONS} HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer {key}\r\n{framing}\r\n\r\n"
            connection.sendall(head.encode() + part)
            return connection

        held = [begin("mallory", "Content-Length: 20000", b"{"), begin("mallory", "Content-Length: 20000", b"{")]
        eventually(lambda: budget.num_bytes == 40_000)
        held.append(begin("mallory", "Transfer-Encoding: chunked", b"2328\r\n" + bytes(9000) + b"\r\n"))
        eventually(lambda: budget.num_bytes == 49_000)
        for framing, part in (
            ("Content-Length: 20000", b"{"),
            ("Transfer-Encoding: chunked", b"2328\r\n" + bytes(9000) + b"\r\n"),
        ):
            assert b"body_bytes" in begin("mallory", framing, part).recv(2000)
        assert metrics.key_refusals.labels(key="key-1", reason="body_bytes")._value.get() == 2
        slow = begin("alice", "Content-Length: 20000", body[:-1])
        eventually(lambda: budget.num_bytes == 69_000)
        slow.sendall(body[-1:])
        assert slow.recv(100).startswith(b"HTTP/1.1 200 ")
        assert budget.num_bytes == 49_000, "a body that has been read has given back its room"
        large = begin("alice", "Content-Length: 20001", b" " * 20_001)
        assert large.recv(100).startswith(b"HTTP/1.1 413 ")
        eventually(lambda: budget.num_bytes == 49_000)
        for connection in held:
            connection.close()
        eventually(lambda: budget.num_bytes == 0)


def test_probes_by_head_and_options(url: str) -> None:
    for path in ("/health", "/health/", "/ready", "/version", "/metrics", "/v1/models", "/openapi.json"):
        whole, head = httpx.get(url + path), httpx.head(url + path)
        assert whole.status_code == head.status_code == 200
        assert head.content == b"" and head.headers["content-length"] == str(len(whole.content))
        assert httpx.options(url + path).headers["allow"] == "GET, HEAD, OPTIONS"
    assert httpx.options(url + COMPLETIONS).status_code == 204
    assert httpx.options(url + COMPLETIONS).headers["allow"] == "OPTIONS, POST"
    for method in ("HEAD", "PUT"):
        reply = httpx.request(method, url + COMPLETIONS)
        assert (reply.status_code, reply.headers["allow"]) == (405, "OPTIONS, POST")
    with httpx.Client() as http:
        of_server = http.request("OPTIONS", url, extensions={"target": b"*"})
    assert (of_server.status_code, of_server.headers["allow"]) == (204, "DELETE, GET, HEAD, OPTIONS, POST")
    assert httpx.options(f"{url}/nothing").status_code == httpx.head(f"{url}//health").status_code == 404


def test_a_disconnect_while_sending_is_not_an_error(app: Application, backend: ScriptedBackend) -> None:
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
