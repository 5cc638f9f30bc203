"""The guard of routers without API keys: refuses what a browser sends on behalf of foreign web pages.

Without keys, a web page that a user of this machine or network visits could otherwise use the router through the browser:
by a cross-site POST, or, on loopback, under a name of its own that resolves to 127.0.0.1 (DNS rebinding).
"""

import ipaddress

from starlette.types import Scope

from pdserve.config import RouterConfig
from pdserve.errors import BadRequest

LOOPBACK_NAMES = frozenset({"localhost", "127.0.0.1", "::1"})
MAX_KNOWN = 64  # Host headers


class Forbidden(BadRequest):
    """The request is valid and not allowed."""

    status = 403


class Misdirected(BadRequest):
    """The request is addressed to another host."""

    status = 421


class BrowserGuard:
    """Refuses requests with a foreign Origin header and, if the router listens on loopback, with a foreign Host header.

    An origin is foreign unless it has the host and port of the Host header or is in --cors-origins. A host is foreign unless
    it is a name of loopback, the --host, or in --allowed-hosts.
    """

    def __init__(self, config: RouterConfig) -> None:
        self._origins = frozenset(origin.strip() for origin in config.cors_origins.split(","))
        allowed = frozenset(name.strip().lower() for name in config.allowed_hosts.split(","))
        self._checks_host = is_loopback(config.host) and "*" not in allowed
        self._hosts = LOOPBACK_NAMES | {config.host.lower()} | allowed - {""}
        self._known = set[bytes]()  # Host headers that have passed

    def check(self, scope: Scope) -> BadRequest | None:
        """Return why a request is refused; None if it is not."""
        host = origin = None
        for name, value in scope["headers"]:
            if name == b"host":
                host = value
            elif name == b"origin":
                origin = value
        if host is not None and host not in self._known and not self._admit(host):
            message = (
                "a router without API keys that listens on loopback does not answer to this Host header; use localhost, "
                "name the host in --allowed-hosts, or set API keys"
            )
            return Misdirected(message, kind="host_not_allowed")
        if origin is not None and not self._allows_origin(origin.decode("latin-1"), host):
            message = (
                "a router without API keys does not answer web pages of other origins; list this one in --cors-origins"
            )
            return Forbidden(message, kind="origin_not_allowed")
        return None

    def _admit(self, host: bytes) -> bool:
        """Return whether a Host header is allowed, and remember it if so: few values occur, in every request."""
        if self._checks_host and hostname(host.decode("latin-1")) not in self._hosts:
            return False
        if len(self._known) < MAX_KNOWN:
            self._known.add(host)
        return True

    def _allows_origin(self, origin: str, host: bytes | None) -> bool:
        if origin in self._origins or "*" in self._origins:
            return True
        return host is not None and origin.partition("://")[2].lower() == host.decode("latin-1").lower()


def is_loopback(host: str) -> bool:
    """Return whether a listen address accepts connections from this machine only."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def hostname(host: str) -> str:
    """Return the name or address in a Host header, in lower case, without port and brackets."""
    if host.startswith("["):
        return host[1:].partition("]")[0].lower()
    return host.partition(":")[0].lower()
