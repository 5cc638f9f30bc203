"""What browsers send on behalf of foreign web pages to a router without API keys."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import pytest

from pdserve.router.text.tokenizer import Tokenizer
from pdserve.router.web.application import Application

if TYPE_CHECKING:
    from tests.router.conftest import Client, ScriptedBackend

PAGE = "https://page.example"
FORM = "application/x-www-form-urlencoded"
LOCAL_HOSTS = ["localhost", "localhost:8000", "LOCALHOST", "127.0.0.1:8000", "[::1]:8000", "[::1]"]
FOREIGN_HOSTS = ["page.example", "page.example:8000", "localhost.page.example", "127.0.0.1.page.example", "::1", ""]
COMPLETE = ("POST", "/v1/completions", b'{"prompt": "hello"}')

Send = Callable[..., tuple[int, str]]


@pytest.fixture
def send(make_app: Callable[..., Application], make_client: type[Client], tokenizer: Tokenizer) -> Send:
    """send({"Host": "localhost"}, **settings) → status and error code of a completion request."""

    def post(headers: dict[str, str], request: tuple[str, str, bytes] = COMPLETE, **settings: Any) -> tuple[int, str]:
        method, path, body = request
        key = {"Authorization": "Bearer one"} if "api_key" in settings else {}
        client = make_client(make_app(tokenizer, **settings))
        response = client.request(method, path, content=body, headers={**key, **headers})
        return response.status_code, response.json()["error"]["code"] if response.status_code >= 400 else ""

    return post


def test_only_names_of_loopback_are_answered(send: Send, backend: ScriptedBackend) -> None:
    for host in FOREIGN_HOSTS:
        assert send({"Host": host}) == (421, "host_not_allowed"), host
        assert send({"Host": host}, ("GET", "/debug/overview", b"")) == (421, "host_not_allowed"), host
    assert backend.requests == []
    for host in LOCAL_HOSTS:
        assert send({"Host": host}) == (200, ""), host


def test_hosts_that_are_allowed(send: Send) -> None:
    assert send({"Host": "gpu1:8000"}, allowed_hosts="gpu0, GPU1") == (200, "")
    assert send({"Host": "page.example"}, allowed_hosts="gpu0,gpu1") == (421, "host_not_allowed")
    assert send({"Host": "page.example"}, allowed_hosts="*") == (200, "")
    assert send({"Host": "127.0.0.2:8000"}, host="127.0.0.2") == (200, "")


@pytest.mark.parametrize("settings", [{"api_key": "one"}, {"host": "0.0.0.0"}])
def test_a_router_with_keys_or_on_the_network_answers_to_any_host(send: Send, settings: dict[str, str]) -> None:
    assert send({"Host": "llm.example"}, **settings) == (200, "")


def test_foreign_origins_are_refused(send: Send, backend: ScriptedBackend) -> None:
    for origin in (PAGE, "null", "http://localhost.page.example:8000", "http://localhost:8001", "localhost:8000"):
        for settings in ({}, {"host": "0.0.0.0"}):
            headers = {"Host": "localhost:8000", "Origin": origin, "Content-Type": "application/json"}
            assert send(headers, **settings) == (403, "origin_not_allowed"), origin
    assert backend.requests == []


@pytest.mark.parametrize(
    ("origin", "settings"),
    [
        ("http://localhost:8000", {}),  # the router's own pages
        ("https://localhost:8000", {}),  # behind a proxy with TLS
        (PAGE, {"cors_origins": f"https://a.example, {PAGE}"}),
        (PAGE, {"cors_origins": "*"}),
        ("null", {"cors_origins": "null"}),
        (PAGE, {"api_key": "one"}),
    ],
)
def test_origins_that_are_answered(send: Send, origin: str, settings: dict[str, str]) -> None:
    headers = {"Host": "localhost:8000", "Origin": origin, "Content-Type": "application/json"}
    assert send(headers, **settings) == (200, "")


@pytest.mark.parametrize("settings", [{}, {"cors_origins": "*"}, {"api_key": "one"}])
def test_bodies_of_forms_are_refused(send: Send, settings: dict[str, str]) -> None:
    """Browsers send them to other origins without asking. `curl -d` sends the first kind, without an Origin."""
    for kind in (FORM, "text/plain", "multipart/form-data; boundary=x", ""):
        headers = {"Host": "localhost", "Origin": "http://localhost", "Content-Type": kind}
        assert send(headers, **settings) == (415, "unsupported_content_type"), kind
    assert send({"Host": "localhost", "Content-Type": FORM}, **settings) == (200, "")
