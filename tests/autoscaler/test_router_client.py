"""The routers of a fleet, by their addresses."""

import socket

import httpx
import pytest

from pdserve.autoscaler.router_client import RouterClient
from pdserve.errors import SetupError


def test_a_name_stands_for_all_of_its_addresses_at_the_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """DNS and the routers are fakes."""
    asked: list[str] = []
    addresses = ["10.0.0.1", "10.0.0.2"]

    def answer(request: httpx.Request) -> httpx.Response:
        asked.append(f"{request.url.host}:{request.url.port}")
        return httpx.Response(200, json={"holder": "me"})

    def look_up(host: str, port: int, **_: object) -> list[tuple[object, ...]]:
        assert (host, port) == ("routers", 8000)
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (address, port)) for address in addresses]

    real = httpx.Client
    monkeypatch.setattr(httpx, "Client", lambda **options: real(transport=httpx.MockTransport(answer), **options))
    monkeypatch.setattr(socket, "getaddrinfo", look_up)
    client = RouterClient(["dns://routers:8000"])
    assert client.hold_lease("me", 1.0) == ""
    addresses[0] = "10.0.0.3"
    assert client.hold_lease("me", 1.0) == ""
    assert asked == ["10.0.0.1:8000", "10.0.0.2:8000", "10.0.0.2:8000", "10.0.0.3:8000"]
    client.close()


def test_a_name_without_an_address_is_an_error() -> None:
    with pytest.raises(SetupError, match=r"dns://nowhere\.invalid:1 has no address"):
        RouterClient(["dns://nowhere.invalid:1"]).observe(1.0)
