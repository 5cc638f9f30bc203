"""Attacks by connections and heads of requests: endless, silent, ambiguous, or from a page of another origin."""

import random
import time
from contextlib import ExitStack, suppress

from attacking.target import ENDED, Target, expect

SILENT_CONNECTIONS = 50
ENDLESS = 1 << 20  # bytes
SMUGGLED = b"GET /version HTTP/1.1\r\nHost: localhost\r\nX-Request-Id: smuggled\r\n\r\n"


def endless_header(target: Target) -> None:
    with target.connect() as connection:
        with suppress(*ENDED):
            connection.sendall(b"GET /health HTTP/1.1\r\nX: " + b"a" * ENDLESS)
        expect(connection, {431})


def many_headers(target: Target) -> None:
    with target.connect() as connection:
        connection.sendall(b"GET /health HTTP/1.1\r\n" + b"X: a\r\n" * 101 + b"\r\n")
        expect(connection, {431})


def silent_connections(target: Target) -> None:
    with ExitStack() as stack:
        silent = [stack.enter_context(target.connect()) for _ in range(SILENT_CONNECTIONS // 2)]
        for connection in silent:
            connection.sendall(b"GET /hea")
        # Over TLS, these do not even begin the handshake.
        silent += [stack.enter_context(target.connect_tcp()) for _ in range(SILENT_CONNECTIONS // 2)]
        for connection in silent:
            expect(connection, {408, None})


def upgrades(target: Target) -> None:
    """A request that asks for another protocol: its body must not be read as a request."""
    protocol = random.choice(["h2c", "websocket", "anything"])
    headers = ("Content-Type: application/json", "Connection: Upgrade", f"Upgrade: {protocol}")
    with target.connect() as connection:
        head = target.head("POST", "/tokenize", *headers, f"Content-Length: {len(SMUGGLED)}")
        if random.random() < 0.5:
            connection.sendall(head)
            time.sleep(0.1)
            connection.sendall(SMUGGLED)
        else:
            connection.sendall(head + SMUGGLED)
        connection.sendall(target.get("/health"))
        body = expect(connection, {400})
    if b"smuggled" in body:
        raise RuntimeError(f"the body of a request with Upgrade: {protocol} was served as a request: {body!r}")


def odd_framing(target: Target) -> None:
    bad = random.choice(
        [
            b"Transfer-Encoding: xchunked\r\n\r\n",
            b"Transfer-Encoding: chunked\r\n\r\n10000000000000000\r\n",
            b"Content-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
            b"Content-Length: 1\r\nContent-Length: 2\r\n\r\n{}",
        ]
    )
    with target.connect() as connection:
        connection.sendall(target.head("POST", "/v1/completions").removesuffix(b"\r\n") + bad)
        expect(connection, {400, 501})


def foreign_pages(target: Target) -> None:
    """Requests of a page of another origin, which a router without keys must refuse."""
    target.ask(target.completion("Origin: http://evil.example"), {403})
    target.ask(b"GET /health HTTP/1.1\r\nHost: evil.example\r\nConnection: close\r\n\r\n", {421})


def descriptions(target: Target) -> None:
    """What is open to everyone, again and again."""
    for path in ("/openapi.json", "/metrics", "/docs", "/version"):
        target.ask(target.without_key().get(path), {200})


def wrong_keys(target: Target) -> None:
    for _ in range(100):
        target.ask(target.without_key().completion("Authorization: Bearer wrong"), {401})
