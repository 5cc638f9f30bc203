"""The routers of a fleet, by their addresses."""

import json
import socket

import httpx
import pytest

from pdserve.errors import Conflict, SetupError
from pdserve.router.instances.controller_lease import ControllerLease
from pdserve.tools.autoscaler.router_client import RouterClient


def test_a_name_stands_for_all_of_its_addresses_at_the_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """DNS and the routers are fakes."""
    asked: list[str] = []
    addresses = ["10.0.0.1", "10.0.0.2"]

    def answer(request: httpx.Request) -> httpx.Response:
        asked.append(f"{request.url.host}:{request.url.port}")
        return httpx.Response(200, json={"holder": "me", "changes": []})

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
    for url, reason in (("dns://nowhere.invalid:99999", "Port out of range"), ("dns://[x", "Invalid IPv6 URL")):
        with pytest.raises(SetupError, match=reason):
            RouterClient([url]).observe(1.0)


def test_two_controllers_that_ask_routers_in_different_orders_agree_on_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """The leases are a router's, its web server is a fake. One router restarts, so that it has forgotten the lease."""
    leases = {"one": ControllerLease(), "two": ControllerLease()}

    def answer(request: httpx.Request) -> httpx.Response:
        body = json.loads(request.content)
        try:
            leases[request.url.host].renew(body["holder"], body["lease_seconds"], now=0.0)
        except Conflict as refusal:
            return httpx.Response(409, json={"error": {"message": str(refusal)}})
        return httpx.Response(200, json={"holder": body["holder"], "changes": []})

    real = httpx.Client
    monkeypatch.setattr(httpx, "Client", lambda **options: real(transport=httpx.MockTransport(answer), **options))
    a, b = RouterClient(["http://one", "http://two"]), RouterClient(["http://two", "http://one"])
    assert a.hold_lease("a", 60.0) == "" and "the controller a holds the lease" in b.hold_lease("b", 60.0)
    leases["two"] = ControllerLease()
    assert "a holds" in b.hold_lease("b", 60.0) and a.hold_lease("a", 60.0) == ""
    leases["two"] = ControllerLease()
    leases["two"].renew("b", 60.0, now=0.0)  # as if it asked while the other one is asking
    assert "b holds" in a.hold_lease("a", 60.0) and b.hold_lease("b", 60.0) == ""
    for client in (a, b):
        client.close()
