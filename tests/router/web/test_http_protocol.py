"""Limits of connections: heads, their number, and what clients do not read. Over TCP and over TLS."""

from __future__ import annotations

import asyncio
import inspect
import json
import logging
import resource
import socket
import ssl
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

import httptools
import pytest
import trustme
import uvicorn
from uvicorn.protocols.http.flow_control import FlowControl
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol, RequestResponseCycle

from pdserve.config import RouterConfig
from pdserve.router.server import HttpServer, default_max_connections
from pdserve.router.web import http_protocol
from pdserve.router.web.application import Application
from pdserve.router.web.http_protocol import MAX_HEAD_BYTES, MAX_PIPELINED, HttpProtocol
from pdserve.router.web.listening import listen

if TYPE_CHECKING:
    from tests.router.conftest import ScriptedBackend

HEALTH = b"GET /health HTTP/1.1\r\nHost: localhost\r\n"

Connect = Callable[..., socket.socket]


@pytest.fixture(params=["tcp", "tls"])
def serve(
    request: pytest.FixtureRequest, serving: Callable[..., Any], tmp_path: Path
) -> Callable[..., AbstractContextManager[Connect]]:
    """Context manager: `with serve(app, **settings) as connect`, where connect(receive_buffer) returns a new connection."""
    settings: dict[str, Any] = {}
    context: ssl.SSLContext | None = None
    if request.param == "tls":
        authority = trustme.CA()
        issued, chain, key = authority.issue_cert("127.0.0.1"), tmp_path / "chain.pem", tmp_path / "key.pem"
        issued.cert_chain_pems[0].write_to_path(chain)
        issued.private_key_pem.write_to_path(key)
        settings = {"ssl_certfile": str(chain), "ssl_keyfile": str(key)}
        context = ssl.create_default_context()
        authority.configure_trust(context)

    @contextmanager
    def run(app: Any, listener: socket.socket | None = None, **more: Any) -> Iterator[Connect]:
        opened: list[socket.socket] = []
        with serving(app, listener, **settings, **more) as url:

            def connect(receive_buffer: int | None = None) -> socket.socket:
                connection = _connect(url, receive_buffer)
                opened.append(connection)
                if context is not None:
                    connection = context.wrap_socket(connection, server_hostname="127.0.0.1")
                    opened.append(connection)
                return connection

            yield connect
            for connection in opened:
                connection.close()

    return run


def _connect(url: str, receive_buffer: int | None = None) -> socket.socket:
    address, connection = urlsplit(url), socket.socket()
    if receive_buffer is not None:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
    connection.settimeout(600)
    connection.connect((address.hostname, address.port))
    return connection


def begin(connect: Connect, data: bytes) -> socket.socket:
    """Return a new connection on which these data were sent. One that was ended before that is replaced."""
    while True:
        connection = connect()
        with suppress(ConnectionError, ssl.SSLError):
            connection.sendall(data)
            return connection


def read_all(connection: socket.socket) -> bytes:
    """Return what arrives until the connection ends, however it ends."""
    parts = []
    try:
        while part := connection.recv(65536):
            parts.append(part)
    except (ConnectionError, ssl.SSLError):
        pass
    return b"".join(parts)


def error_of(answer: bytes, status: int) -> str:
    """Return the code of an error in OpenAI's format, whose connection is announced to close."""
    head, _, body = answer.partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 %d " % status), answer
    assert b"\r\nconnection: close" in head.lower()
    error = json.loads(body)["error"]
    assert error["message"] and "param" in error
    return str(error["code"])


def test_a_head_that_is_too_large(app: Application, serve: Callable[..., Any]) -> None:
    with serve(app) as connect:
        for head in (
            HEALTH + b"X: " + b"a" * MAX_HEAD_BYTES,  # without an end
            HEALTH + b"X: " + b"a" * MAX_HEAD_BYTES + b"\r\n\r\n",
            b"GET /" + b"a" * MAX_HEAD_BYTES,
            HEALTH + b"a:b\r\n" * 101,
        ):
            connection = connect()
            connection.sendall(head)
            assert error_of(read_all(connection), 431) == "headers_too_large"
        connection = connect()
        connection.sendall(HEALTH + b"a:b\r\n" * 98 + b"X: " + b"a" * 60_000 + b"\r\n\r\n")
        assert connection.recv(100).startswith(b"HTTP/1.1 200")


def send_further(connection: socket.socket) -> None:
    """Send more of something endless; over TLS not as fast as possible, which would only cost time in ciphers."""
    connection.sendall(b"a" * 65536)
    if isinstance(connection, ssl.SSLSocket):
        time.sleep(0.02)


def test_an_endless_header_is_not_read_to_its_end(app: Application, serve: Callable[..., Any]) -> None:
    with serve(app) as connect:
        connection, sent = connect(), 0
        connection.sendall(HEALTH + b"X: ")
        with pytest.raises((ConnectionError, ssl.SSLError)):
            while True:
                send_further(connection)
                sent += 65536
        if not isinstance(
            connection, ssl.SSLSocket
        ):  # the end of TLS discards what arrives until the other side agrees
            assert sent < 50_000_000  # what the kernel buffers


def test_a_large_body_beside_its_head_is_not_counted(app: Application, serve: Callable[..., Any]) -> None:
    with serve(app) as connect:
        connection = connect()
        head = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: 150000\r\n\r\n"
        connection.sendall(head + b" " * 150_000)
        assert error_of(read_all(connection), 413) == "body_too_large"
        connection, chunk = connect(), b"1\r\n{\r\n"
        connection.sendall(head.replace(b"Content-Length: 150000", b"Transfer-Encoding: chunked"))
        connection.sendall(chunk * 15_000 + b"0\r\n\r\n")
        assert connection.recv(100).startswith(b"HTTP/1.1 400"), "90,000 bytes in parts of one byte are no head"


@pytest.mark.parametrize("endless", [b"0\r\nX: ", b"1;x="])
def test_what_surrounds_a_chunked_body_is_limited(app: Application, serve: Callable[..., Any], endless: bytes) -> None:
    """Trailers and chunk extensions."""
    with serve(app) as connect:
        connection = connect()
        connection.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n")
        connection.sendall(b"1\r\n{\r\n" + endless)
        with pytest.raises((ConnectionError, ssl.SSLError)):
            while True:
                send_further(connection)


def test_a_head_that_is_too_slow(app: Application, serve: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pdserve.router.server.KEEP_ALIVE_S", 2.0)
    with serve(app, client_timeout_seconds=1) as connect:
        silent, blank, slow, idle = (begin(connect, data) for data in (b"", b"\r\n", HEALTH, HEALTH + b"\r\n"))
        of_slow, of_idle = read_all(slow), read_all(idle)
        for _ in range(5):  # this process may have got no core for the second that it had to send them
            of_slow = of_slow or read_all(begin(connect, HEALTH))
            of_idle = of_idle or read_all(begin(connect, HEALTH + b"\r\n"))
        assert error_of(of_slow, 408) == "head_too_slow"
        assert read_all(silent) == read_all(blank) == b"", "there is no request to answer"
        assert of_idle.startswith(b"HTTP/1.1 200"), "it is closed after its answer"


def test_a_running_request_is_not_cut_off(
    app: Application, backend: ScriptedBackend, serve: Callable[..., Any]
) -> None:
    backend.generates([5], pause=4.0)
    body = b'{"prompt": "hello"}'
    head = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\nContent-Length: %d\r\n\r\n"
    with serve(app, client_timeout_seconds=1) as connect:
        answers = (read_all(begin(connect, head % len(body) + body)) for _ in range(3))
        answer = next(filter(None, answers), b"")  # one that was sent too late, by this process, has none
        assert answer.startswith(b"HTTP/1.1 200")


@pytest.mark.parametrize("seconds", [600.0, 0.05])
def test_shutdown_serves_requests_that_are_on_their_way(
    app: Application,
    serve: Callable[..., Any],
    eventually: Callable[..., None],
    monkeypatch: pytest.MonkeyPatch,
    seconds: float,
) -> None:
    monkeypatch.setattr(http_protocol, "LAST_REQUEST_S", seconds)
    servers: list[HttpServer] = []
    with serve(app, on_start=servers.append) as connect:
        (server,) = servers
        server.config.timeout_graceful_shutdown = 600
        fresh, used = connect(), connect()
        used.sendall(HEALTH + b"\r\n")
        assert used.recv(1000).startswith(b"HTTP/1.1 200")
        eventually(lambda: all(isinstance(one, HttpProtocol) for one in server.open.connections))
        assert len(server.open.connections) == 2
        server.should_exit = True
        eventually(lambda: server.open.is_shutting_down)
        for connection in (fresh, used):
            if seconds > 1:
                connection.sendall(HEALTH + b"\r\n")
                answer = read_all(connection)
                assert answer.startswith(b"HTTP/1.1 200") and b"connection: close" in answer
            else:
                assert read_all(connection) == b""


def test_connections_beyond_the_maximum(
    app: Application, backend: ScriptedBackend, serve: Callable[..., Any], eventually: Callable[..., None]
) -> None:
    backend.generates([5], finish_reason=None, hang=True)
    body = b'{"prompt": "hello", "stream": true}'
    with serve(app, max_connections=3) as connect:
        held: list[socket.socket] = [connect() for _ in range(3)]
        for connection in held:
            head = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: %d\r\n\r\n" % len(body)
            connection.sendall(head + body)
            assert connection.recv(100).startswith(b"HTTP/1.1 200")
        for _ in range(20):
            if isinstance(held[0], ssl.SSLSocket):
                with pytest.raises((ConnectionError, ssl.SSLError)):
                    connect()
            else:
                assert error_of(read_all(connect()), 503) == "too_many_connections"
        held.pop().close()

        def accepted() -> bool:
            try:
                connection: socket.socket = connect()
                connection.sendall(HEALTH + b"\r\n")
                return connection.recv(100).startswith(b"HTTP/1.1 200")
            except (ConnectionError, ssl.SSLError):
                return False

        eventually(accepted)


def test_what_a_client_does_not_read_stays_with_its_source(serve: Callable[..., Any]) -> None:
    sent, is_over = 0, threading.Event()

    async def endless(scope: Any, receive: Any, send: Any) -> None:
        nonlocal sent
        await receive()
        disconnected = asyncio.create_task(receive())
        await send({"type": "http.response.start", "status": 200, "headers": []})
        while not disconnected.done() and sent < 100_000_000:
            await send({"type": "http.response.body", "body": b"a" * 65536, "more_body": True})
            sent += 65536
            await asyncio.sleep(0)
        is_over.set()

    listener = listen(RouterConfig(port=0, client_timeout_seconds=1))
    with serve(endless, listener) as connect:
        connection = connect()
        connection.sendall(HEALTH + b"\r\n")
        assert is_over.wait(600), "the client is cut off"
    assert 0 < sent < 50_000_000


def test_a_client_that_does_not_read_its_stream_is_cut_off(
    app: Application, backend: ScriptedBackend, serve: Callable[..., Any], eventually: Callable[..., None]
) -> None:
    backend.generates([5] * 2000, finish_reason=None, hang=True)
    body = b'{"prompt": "hello", "stream": true}'
    head = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: %d\r\n\r\n" % len(body)
    with serve(app, listen(RouterConfig(port=0, client_timeout_seconds=1))) as connect:
        connection = connect(4096)
        connection.sendall(head + body)
        eventually(lambda: [stream.cancelled for stream in backend.streams] == [True])
        other = connect()
        other.sendall(HEALTH + b"\r\n")
        assert other.recv(100).startswith(b"HTTP/1.1 200")


def test_pipelined_requests_are_limited(
    app: Application, backend: ScriptedBackend, serve: Callable[..., Any], eventually: Callable[..., None]
) -> None:
    body = b'{"prompt": "hello"}'
    request = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: %d\r\n\r\n" % len(body) + body
    with serve(app) as connect:
        backend.generates([5], pause=0.1)  # all requests have arrived before the first answer
        connection = connect()
        connection.sendall(request * (MAX_PIPELINED + 5))
        *answers, last = read_all(connection).split(b"HTTP/1.1 ")[1:]
        assert MAX_PIPELINED + 1 <= len(answers) <= MAX_PIPELINED + 4 and all(
            one.startswith(b"200 ") for one in answers
        )
        assert error_of(b"HTTP/1.1 " + last, 431) == "too_many_pipelined"
        backend.generates([5], finish_reason=None, hang=True)
        connection, before = connect(), len(backend.streams)
        connection.sendall(request * 2)
        eventually(lambda: len(backend.streams) == before + 1)
        connection.close()
        eventually(lambda: backend.streams[before].cancelled)


@pytest.mark.parametrize(
    "broken",
    [
        b"POST /v1/completions HTTP/1.1\r\nTransfer-Encoding: xchunked\r\n\r\n1\r\n{\r\n0\r\n\r\n",
        b"POST /v1/completions HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n%x\r\n" % 2**64,
        b"GET http://localhost HTTP/1.1\r\n\r\n",  # without a path
    ],
)
def test_a_broken_request_behind_others(
    app: Application, backend: ScriptedBackend, serve: Callable[..., Any], broken: bytes
) -> None:
    backend.generates([5], pause=0.1)
    good = b'{"prompt": "hello"}'
    request = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: %d\r\n\r\n" % len(good) + good
    with serve(app) as connect:
        for earlier in range(3):
            connection = connect()
            connection.sendall(request * earlier + broken)
            *answers, last = read_all(connection).split(b"HTTP/1.1 ")[1:]
            assert [one[:3] for one in answers] == [b"200"] * earlier, "earlier requests are answered"
            assert error_of(b"HTTP/1.1 " + last, 400) == "invalid_http"
    assert len(backend.streams) == 3


def test_a_slow_body(
    app: Application, serve: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, eventually: Callable[..., None]
) -> None:
    """Some bytes each second, so that no pause is too long."""
    monkeypatch.setattr(http_protocol, "MIN_BODY_RATE", 1_000_000)
    head = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: 10000\r\n\r\n"
    with serve(app, client_timeout_seconds=1) as connect:
        connection, is_over = connect(), threading.Event()
        connection.sendall(head)

        def trickle() -> None:
            with suppress(ConnectionError, ssl.SSLError):
                while not is_over.wait(0.2):
                    connection.sendall(b"1")

        thread = threading.Thread(target=trickle)
        thread.start()
        answer = read_all(connection)
        is_over.set()
        thread.join()
        assert error_of(answer, 408) == "body_too_slow"


@pytest.mark.parametrize("protocol", [b"h2c", b"websocket", b"anything, at/all"])
@pytest.mark.parametrize("split", ["at once", "after the head", "every byte"])
def test_offers_of_another_protocol_are_declined(
    app: Application, backend: ScriptedBackend, serve: Callable[..., Any], protocol: bytes, split: str
) -> None:
    """The body belongs to its request, however it arrives, and so does the next request."""
    backend.generates([5])
    body = b'{"prompt": "GET /version HTTP/1.1\\r\\nX-Request-Id: smuggled\\r\\n\\r\\n"}'
    heads = [
        b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nX-Request-Id: %s\r\n%s\r\n" % (name, more)
        for name, more in (
            (b"first", b"Content-Length: %d\r\n" % len(body)),
            (b"second", b"Transfer-Encoding: chunked\r\n"),
        )
    ]
    offer = b"Connection: Upgrade, HTTP2-Settings\r\nUpgrade: %s\r\nHTTP2-Settings: AAMAAABkAAQAAP__\r\n" % protocol
    heads = [head.replace(b"X-Request-Id", offer + b"X-Request-Id") for head in heads]
    last = b"GET /health HTTP/1.1\r\nHost: localhost\r\nUpgrade: %s\r\nConnection: upgrade, close\r\n\r\n" % protocol
    parts = [heads[0], body, heads[1], b"%x\r\n%s\r\n0\r\n\r\n" % (len(body), body), last]
    if split == "at once":
        parts = [b"".join(parts)]
    elif split == "every byte":
        parts = [bytes([byte]) for byte in b"".join(parts)]
    with serve(app) as connect:
        connection = connect()
        for part in parts:
            connection.sendall(part)
            time.sleep(0.001 if split == "every byte" else 0.05)
        answers = read_all(connection).split(b"HTTP/1.1 ")[1:]
    assert [answer[:3] for answer in answers] == [b"200"] * 3
    assert b"first" in answers[0] and b"second" in answers[1] and b"alive" in answers[2]
    assert b"smuggled" not in b"".join(answers), "no request is read from a body"
    assert [len(request.prompt) for request in backend.requests] == [len(backend.requests[0].prompt)] * 2


def test_trailers_are_no_headers(app: Application, serve: Callable[..., Any]) -> None:
    """A proxy may have checked, set and removed headers, and the router has when it begins to read the body."""
    head = b"POST /tokenize HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\nTransfer-Encoding: chunked\r\n\r\n"
    trailers = b"X-Request-Id: of-a-trailer\r\nOrigin: http://other.example\r\nContent-Encoding: gzip\r\n\r\n"
    with serve(app) as connect:
        answer = read_all(begin(connect, head + b'e\r\n{"prompt":"a"}\r\n0\r\n' + trailers))
    assert answer.startswith(b"HTTP/1.1 200 ") and b"of-a-trailer" not in answer


@pytest.mark.parametrize("stream", [True, False])
def test_clients_of_http_1_0_get_no_chunks(
    app: Application, backend: ScriptedBackend, serve: Callable[..., Any], stream: bool
) -> None:
    backend.generates([5, 6, 7])
    body = json.dumps({"prompt": "hello", "stream": stream}).encode()
    head = b"POST /v1/completions HTTP/1.0\r\nHost: localhost\r\nContent-Length: %d\r\n\r\n" % len(body)
    with serve(app) as connect:
        answered, _, text = read_all(begin(connect, head + body)).partition(b"\r\n\r\n")
    assert answered.startswith(b"HTTP/1.1 200 ") and b"transfer-encoding" not in answered.lower()
    events = text.removesuffix(b"data: [DONE]\n\n").split(b"\n\n")[:-1] if stream else [text]
    assert all(json.loads(event.removeprefix(b"data: "))["choices"] for event in events) and events


def test_no_offer_makes_a_proxy_of_the_router(app: Application, serve: Callable[..., Any]) -> None:
    with serve(app) as connect:
        connection = connect()
        connection.sendall(b"CONNECT example.org:443 HTTP/1.1\r\nHost: example.org:443\r\n\r\nGET / HTTP/1.1\r\n\r\n")
        assert error_of(read_all(connection), 400) == "invalid_http"


def test_the_names_of_uvicorn_that_the_protocol_uses() -> None:
    """They are private, so pyproject.toml has a bound below uvicorn's next version."""
    cycle = inspect.signature(RequestResponseCycle).parameters
    assert {"scope", "transport", "flow", "message_event", "keep_alive", "on_response"} <= cycle.keys()
    source = (
        inspect.getsource(HttpToolsProtocol) + inspect.getsource(RequestResponseCycle) + inspect.getsource(FlowControl)
    )
    for name in ("pipeline", "cycle", "flow", "headers", "url", "scope", "parser", "connections", "tasks", "transport"):
        assert f"self.{name} = " in source or f"self.{name}: " in source, name
    for name in ("disconnected", "response_started", "response_complete", "message_event", "more_body", "read_paused"):
        assert f"self.{name} = " in source, name
    assert "self.chunked_encoding: bool | None = None" in source and "self.expected_content_length = 0" in source
    for name in (
        "_start_asgi_task",
        "on_response_complete",
        "on_message_complete",
        "on_body",
        "_unset_keepalive_if_required",
    ):
        assert callable(getattr(HttpToolsProtocol, name))
    assert callable(uvicorn.Server.on_tick) and STATUS_LINE[431].startswith(b"HTTP/1.1 431 ")
    assert callable(httptools.HttpRequestParser(object()).set_dangerous_leniencies)


def test_what_is_not_http(app: Application, serve: Callable[..., Any], caplog: pytest.LogCaptureFixture) -> None:
    with serve(app) as connect, caplog.at_level(logging.INFO):
        for wrong in (b"\x16\x03\x01 hello\r\n\r\n", b"GET / HTTP/9\r\n\r\n", HEALTH + b"a b: c\r\n\r\n"):
            connection = connect()
            connection.sendall(wrong)
            assert error_of(read_all(connection), 400) == "invalid_http"
    assert not caplog.records, "a client cannot fill the log"


def test_a_handshake_that_is_too_slow(
    app: Application, serving: Callable[..., Any], tmp_path: Path, eventually: Callable[..., None]
) -> None:
    issued = trustme.CA().issue_cert("127.0.0.1")
    issued.private_key_and_cert_chain_pem.write_to_path(tmp_path / "all.pem")
    settings = {"ssl_certfile": str(tmp_path / "all.pem"), "ssl_keyfile": str(tmp_path / "all.pem")}
    with serving(app, **settings, client_timeout_seconds=1, max_connections=2) as url:
        with _connect(url) as silent, _connect(url) as slow, _connect(url) as third:
            slow.sendall(b"\x16\x03\x01\x02\x00\x01")  # the beginning of a ClientHello
            assert read_all(third) == b"", "connections count before their handshake"
            assert read_all(silent) == read_all(slow) == b""
        with _connect(url) as plain:
            plain.sendall(HEALTH + b"\r\n")
            assert not read_all(plain).startswith(b"HTTP")


def test_a_stall_of_the_router_does_not_end_handshakes(serving: Callable[..., Any], tmp_path: Path) -> None:
    certificate, authority, is_stalled = tmp_path / "all.pem", trustme.CA(), threading.Event()
    authority.issue_cert("127.0.0.1").private_key_and_cert_chain_pem.write_to_path(certificate)
    context = ssl.create_default_context()
    authority.configure_trust(context)

    async def stall(scope: Any, receive: Any, send: Any) -> None:
        if scope["path"] == "/stall":
            is_stalled.set()
            time.sleep(4)  # the stall
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b""})

    settings = {"ssl_certfile": str(certificate), "ssl_keyfile": str(certificate), "client_timeout_seconds": 3}
    with serving(stall, **settings) as url, _connect(url) as early, _connect(url) as second:
        other = context.wrap_socket(second, server_hostname="127.0.0.1")  # so the router has accepted `early` too
        other.sendall(b"GET /stall HTTP/1.1\r\nHost: localhost\r\n\r\n")
        assert is_stalled.wait(600)
        with other, context.wrap_socket(early, server_hostname="127.0.0.1") as connection:
            connection.sendall(HEALTH + b"\r\n")
            assert connection.recv(100).startswith(b"HTTP/1.1 200")


@pytest.mark.parametrize(("descriptors", "expected"), [(1024, 768), (1_000_000, 16_384), (-1, 16_384), (1, 1)])
def test_the_default_maximum_leaves_descriptors_for_instances(
    monkeypatch: pytest.MonkeyPatch, descriptors: int, expected: int
) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda _: (descriptors, descriptors))
    assert default_max_connections() == expected
