"""Commands for operators, against sockets that tests make up."""

import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest

from pdserve.admin_client import AdminClient
from pdserve.cli.operate import health
from pdserve.errors import SetupError

READY = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\nConnection: close\r\n\r\n{}"


@contextmanager
def answering(answer: bytes) -> Iterator[str]:
    """Give one connection this answer; yield the URL."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.settimeout(60)

        def serve() -> None:
            connection, _ = listener.accept()
            with connection:
                connection.recv(4096)
                connection.sendall(answer)

        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
        thread.join()


@pytest.fixture
def proxied(monkeypatch: pytest.MonkeyPatch) -> None:
    """An environment with a proxy that cannot be reached, as for every address of this machine."""
    for name in ("http_proxy", "HTTP_PROXY", "ALL_PROXY"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    for name in ("no_proxy", "NO_PROXY"):
        monkeypatch.delenv(name, raising=False)


@pytest.mark.usefixtures("proxied")
def test_no_proxy_is_asked_for_what_runs_here() -> None:
    with answering(READY) as url:
        assert health(url)
    rows = READY.replace(b"2\r\n", b"17\r\n").replace(b"{}", b'{"instances": []}')
    with answering(rows) as url, AdminClient(url) as client:
        assert client.instances() == []


@pytest.mark.parametrize(
    "ask",
    [lambda url: url, lambda url: "http://127.0.0.1:port"],
    ids=["of another protocol", "with a port that is none"],
)
def test_what_is_no_http_is_not_ready(ask: Callable[[str], str], capsys: pytest.CaptureFixture[str]) -> None:
    with answering(b"-ERR unknown command\r\n") as url:
        assert not health(ask(url))
        if ask(url) != url:
            health(url)  # ends the thread
    error = capsys.readouterr().err
    assert "is not ready: " in error and "Traceback" not in error


def test_health_says_why_in_words(capsys: pytest.CaptureFixture[str]) -> None:
    body = b'{"error": {"message": "not ready: no decode instance"}}'
    head = b"HTTP/1.1 503 Service Unavailable\r\nContent-Length: %d\r\n\r\n" % len(body)
    with answering(head + body) as url:
        assert not health(url)
    assert not health(url), "it is gone"
    with answering(b"HTTP/1.1 503 Service Unavailable\r\nContent-Length: 9000\r\n\r\n" + b"[" * 9000) as url:
        assert not health(url)
    said = [line.partition(" is not ready: ")[2] for line in capsys.readouterr().err.splitlines()]
    assert said == ["no decode instance", "Connection refused", "Service Unavailable"]


def test_an_invalid_url_of_a_router_is_one_line() -> None:
    with pytest.raises(SetupError, match=r"^'http://router:port' is not the URL of a router: "):
        AdminClient("http://router:port")
    with pytest.raises(SetupError, match=r"^'router:8000' is not the URL of a router; write http://127"):
        AdminClient("router:8000")
