"""Request ids, and the limits of request bodies."""

from __future__ import annotations

import asyncio
import http.client
import json
import socket
from collections.abc import Callable
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

import httpx
import pytest
from starlette.applications import Starlette

from pdserve.router.text.tokenizer import Tokenizer

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


def test_a_disconnect_while_sending_is_not_an_error(app: Starlette, backend: ScriptedBackend) -> None:
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
