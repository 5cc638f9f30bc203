"""Commands that call a router's operator endpoints."""

import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import httpx
import pytest

from pdserve.admin_client import AdminClient
from pdserve.errors import SetupError
from pdserve.tools.autoscaler.router_client import RouterClient
from pdserve.tools.profiling.imports import from_fleet


class Router(BaseHTTPRequestHandler):
    """A router without instances, whose --admin-key is `first,second`."""

    def do_GET(self) -> None:
        allowed = self.headers["Authorization"] in ("Bearer first", "Bearer second")
        self.send_response(200 if allowed else 401)
        self.end_headers()
        self.wfile.write(b'{"instances": []}' if allowed else b'{"error": {"message": "the admin key is missing"}}')

    def log_message(self, format: str, *args: object) -> None:
        pass


@pytest.fixture
def router() -> Iterator[str]:
    with ThreadingHTTPServer(("127.0.0.1", 0), Router) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


@pytest.mark.parametrize("keys", ["first", "second", "first,second", " first , second"])
def test_of_several_admin_keys_one_is_sent(router: str, keys: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A command in a router's container has the variable that the router read, which may list several keys."""
    monkeypatch.setenv("PDSERVE_ADMIN_KEY", keys)
    with AdminClient(router) as client:
        assert client.instances() == []
    with pytest.raises(SetupError, match="has no instance"):
        from_fleet(router)


def test_without_an_admin_key_the_refusal_is_the_routers(router: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PDSERVE_ADMIN_KEY", raising=False)
    with AdminClient(router) as client, pytest.raises(SetupError, match="the admin key is missing"):
        client.instances()


@pytest.mark.parametrize("key", ["a\x7fb", "a\nb"])
def test_a_key_that_no_header_can_have_is_one_line(router: str, key: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PDSERVE_ADMIN_KEY", key)
    with pytest.raises(SetupError, match=r"^PDSERVE_ADMIN_KEY must have printable characters only"):
        AdminClient(router)


@pytest.mark.parametrize(
    "answer", [*(b"", b"<html>", b"[]", b"{}", b'{"instances": 5}'), b'{"instances": [{}]}', b"[" * 10**5]
)
def test_an_answer_of_another_server_is_one_line(answer: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    """To each command of a router: it answers 200 to everything."""
    real = httpx.Client
    other = httpx.MockTransport(lambda _: httpx.Response(200, content=answer))
    failing = httpx.MockTransport(lambda _: httpx.Response(500, content=answer))
    monkeypatch.setattr(httpx, "Client", lambda **options: real(transport=other, **options))
    with AdminClient("http://router") as client, pytest.raises(SetupError, match=r"^http://router/? is not a router: "):
        client.instances()
    monkeypatch.setattr(httpx, "Client", lambda **options: real(transport=failing, **options))
    with AdminClient("http://router") as client, pytest.raises(SetupError, match="responds with 500"):
        client.instances()
    monkeypatch.setattr(httpx, "Client", lambda **options: real(transport=other, **options))
    routers = RouterClient(["http://router"])
    for ask in (lambda: routers.observe(1.0), lambda: routers.hold_lease("me", 1.0)):
        with pytest.raises(SetupError, match=r"^http://router/.* is not a router: "):
            ask()
