"""The router's HTTP application: one table of routes, and one pass over each request.

A request has one id: the `id` field of the response, its `X-Request-Id` header (the client's own, if it sent one) and the id
at /debug/requests/{id} are the same. If it asks for several choices, choice i is `{id}-{i}`.

Without API keys, a web page that a user of this machine or network visits could use the router through the browser: by a
cross-site POST, or, on loopback, under a name of its own that resolves to 127.0.0.1 (DNS rebinding). `BrowserGuard` refuses
these.
"""

import asyncio
import difflib
import hashlib
import hmac
import ipaddress
import logging
import re
import secrets
from collections.abc import Callable, Mapping, Sequence

from fastapi.exceptions import RequestValidationError
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from pdserve.config import RouterConfig
from pdserve.errors import BadRequest, InvalidParameter, NotFound, RequestError, TooLarge, TooSlow
from pdserve.router.api.http_responses import CLIENT_GONE, ErrorBody, InternalError, error_response
from pdserve.router.api.streaming import ClientConnection
from pdserve.router.limits.body_budget import BodyBudget
from pdserve.router.limits.key_file import ANONYMOUS, ApiKey
from pdserve.router.limits.quota import RATE_HEADERS
from pdserve.router.web.dialect import Dialect
from pdserve.router.web.endpoint import Access, Endpoint
from pdserve.router.web.pages import PageFile

ID_PATTERN = re.compile(r"[A-Za-z0-9._-]{1,128}")
DRAIN_FACTOR = 8  # at most this many times the limit is read of a body that is too large
LOOPBACK_NAMES = frozenset({"localhost", "127.0.0.1", "::1"})
MAX_KNOWN = 64  # Host headers
MAX_LOGGED = 100  # characters of a path
SIMILAR = 0.9  # of a path without a route to one that has a route
log = logging.getLogger(__name__)


class Unauthorized(BadRequest):
    """The request lacks a valid key."""

    status = 401


class Forbidden(BadRequest):
    """The request is valid and not allowed."""

    status = 403


class Misdirected(BadRequest):
    """The request is addressed to another host."""

    status = 421


class MethodNotAllowed(BadRequest):
    """The path exists, but not for this method."""

    status = 405


class Routes:
    """The routes by path."""

    def __init__(self, routes: Sequence[Endpoint | PageFile]) -> None:
        self._fixed: dict[str, list[Endpoint | PageFile]] = {}
        self._patterns: list[Endpoint | PageFile] = []
        for route in routes:
            if "{" in route.path:
                self._patterns.append(route)
            else:
                self._fixed.setdefault(route.path, []).append(route)
        self._error_bodies = {
            route.path: route.error_body for route in routes if isinstance(route, Endpoint) and route.error_body
        }

    def at(self, path: str) -> list[Endpoint | PageFile]:
        """Return the routes of a path, one for each method."""
        return self._fixed.get(path) or [route for route in self._patterns if route.path_regex.match(path)]

    def like(self, path: str) -> str:
        """Return the path that a client may have meant, such as one with another base URL; empty: none is like it."""
        ends = [one for one in self._fixed if len(one) > 1 and (one.endswith(path) or path.endswith(one))]
        similar = difflib.get_close_matches(path[:MAX_LOGGED], self._fixed, 1, SIMILAR)
        return min(ends, key=lambda one: abs(len(one) - len(path)), default="") or "".join(similar)

    def error_body(self, path: str) -> ErrorBody | None:
        """Return what makes the errors of a path: the dialect of the closest route there or above; None: there is none."""
        above = max((one for one in self._error_bodies if path.startswith(one)), key=len, default="")
        return self._error_bodies.get(above)


class KeySet:
    """A set of keys that authorise the same paths."""

    def __init__(self, keys: Sequence[ApiKey]) -> None:
        self.keys = keys

    def identify(self, key: str) -> str | None:
        """Return the name of the key, or None if it is wrong.

        Takes the same time for every key, valid or not, so that timing reveals nothing about the valid ones.
        """
        digest = hashlib.sha256(key.encode("latin-1")).digest()  # the encoding that header bytes were decoded with
        names = [valid.name for valid in self.keys if hmac.compare_digest(digest, valid.digest)]
        return names[0] if names else None


def presented_key(headers: Mapping[str, str]) -> str:
    """Return the key that a client sent; empty if it sent none."""
    scheme, _, key = headers.get("authorization", "").partition(" ")
    if scheme.lower() != "bearer":
        key = headers.get("x-api-key", "")  # of Anthropic's clients
    return key.strip()


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

    def check(self, host: bytes | None, origin: bytes | None) -> None:
        """Raise `Misdirected` or `Forbidden` because of the Host or the Origin header of a request."""
        if host is not None and host not in self._known and not self._admit(host):
            message = (
                "a router without API keys that listens on loopback does not answer to this Host header; use localhost, "
                "name the host in --allowed-hosts, or set API keys"
            )
            raise Misdirected(message, kind="host_not_allowed")
        if origin is not None and not self._allows_origin(origin.decode("latin-1"), host):
            message = (
                "a router without API keys does not answer web pages of other origins; list this one in --cors-origins"
            )
            raise Forbidden(message, kind="origin_not_allowed")

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


class BodyLimit:
    """Limits the size of request bodies, the time between their parts, and the memory of all that are being read.

    Reading a body raises TooLarge as soon as it exceeds `max_bytes`, whatever its Content-Length says, TooSlow if no part
    arrives for `idle_timeout_s` seconds, and Overloaded if the budget has no room for it.
    """

    def __init__(
        self, max_bytes: int, idle_timeout_s: float, budget: BodyBudget, larger: Mapping[str, int] | None = None
    ) -> None:
        """`larger` has the limits of paths with another one, whose bodies do not stay in memory."""
        self.max_bytes = max_bytes
        self.idle_timeout_s = idle_timeout_s
        self.budget = budget
        self.larger = larger or {}

    def of(self, path: str) -> int:
        """Return the most bytes of a body of a path."""
        return self.larger.get(path, self.max_bytes)


class LimitedBody:
    """A body that is being read: an ASGI `receive`. What it takes of the budget is free once it is complete, or closed.

    The length that its head declares is reserved at once, so a body that has been begun is not refused later. The rest of a
    body that is too large is read and discarded, up to `DRAIN_FACTOR` times the limit: a client that is still sending would
    otherwise see a broken connection and no answer.
    """

    def __init__(self, limit: BodyLimit, max_bytes: int, scope: Scope, receive: Receive) -> None:
        self._limit = limit
        self._max_bytes = max_bytes
        self._scope = scope
        self._receive = receive
        self._received = self._reserved = 0
        self._is_complete = False

    async def __call__(self) -> Message:
        if self._is_complete:  # the next message is the disconnect, at any time
            return await self._receive()
        if not self._received:
            length = next((value for name, value in self._scope["headers"] if name == b"content-length"), b"0")
            self._reserve(min(int(length), self._max_bytes))  # the server has parsed it, too
        message = await self._receive_part()
        self._is_complete = not message.get("more_body", False)
        if self._received <= self._max_bytes:
            self._reserve(self._received)
            if self._is_complete:
                self.close()
            return message
        while message.get("more_body", False) and self._received < DRAIN_FACTOR * self._max_bytes:
            message = await self._receive_part()
        raise TooLarge(f"the body is larger than {self._max_bytes} bytes", kind="body_too_large")

    def close(self) -> None:
        """Give back what it has of the budget."""
        if self._reserved:
            self._limit.budget.release(self._scope["state"]["key"], self._reserved)
            self._reserved = 0

    def _reserve(self, num_bytes: int) -> None:
        """Have this much of the budget at least."""
        if num_bytes > self._reserved and self._scope["path"] not in self._limit.larger:
            self._limit.budget.reserve(self._scope["state"]["key"], num_bytes - self._reserved)
            self._reserved = num_bytes

    async def _receive_part(self) -> Message:
        timeout_s = self._limit.idle_timeout_s
        try:
            async with asyncio.timeout(timeout_s):
                message = await self._receive()
        except TimeoutError:
            raise TooSlow(f"no part of the body arrived for {timeout_s:g} s", kind="body_too_slow") from None
        self._received += len(message.get("body", b""))
        return message


class Application:
    """Answers HTTP requests: checks them, limits their bodies, calls their routes, and makes the answers to errors.

    All of this is one layer, because each costs every request a coroutine. Endpoints read `request_id`, `key` and `client`
    from `request.state`; what they set as `headers` there are headers of the answer.

    Args:
        guard: of a router without API keys.
        on_unauthorized: called with `missing` or `wrong` for each request without a valid key.
        cors_origins: of web pages that may read the answers.
        dialects: those that it serves, to be started and closed.
    """

    def __init__(
        self,
        routes: Sequence[Endpoint | PageFile],
        guard: BrowserGuard | None,
        clients: KeySet,
        operators: KeySet,
        on_unauthorized: Callable[[str], None],
        body_limit: BodyLimit,
        cors_origins: Sequence[str],
        *,
        dialects: Sequence[Dialect] = (),
    ) -> None:
        self._dialects = dialects
        self.routes = Routes(routes)
        self._guard = guard
        self._clients = clients
        self._operators = operators
        self._on_unauthorized = on_unauthorized
        self._body_limit = body_limit
        self._answer: ASGIApp = self._answer_request
        if cors_origins:
            self._answer = CORSMiddleware(
                self._answer,
                allow_origins=cors_origins,
                allow_methods=["GET", "POST", "DELETE"],
                allow_headers=["*"],
                expose_headers=["X-Request-Id", "Retry-After", *RATE_HEADERS],
            )

    def start(self) -> None:
        """Begin what its dialects run besides requests. To be called once, on the event loop."""
        for dialect in self._dialects:
            dialect.start()

    async def close(self) -> None:
        """End what its dialects run besides requests."""
        for dialect in reversed(self._dialects):
            await dialect.close()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self._answer(scope, receive, send)

    async def _answer_request(self, scope: Scope, receive: Receive, send: Send) -> None:
        path, method, started, body = scope["path"], scope["method"], False, None
        if len(path) > 1 and path[-1] == "/" and path[-2] != "/":  # `/health/` is `/health`
            scope = {**scope, "path": (path := path[:-1])}
        if method == "HEAD":  # a GET whose body the server leaves out
            scope = {**scope, "method": (method := "GET")}
        state = scope.setdefault("state", {})
        client: ClientConnection = state.setdefault("client", ClientConnection())

        async def respond(message: Message) -> None:
            nonlocal started
            if message["type"] == "http.response.start":
                started = True
                added = message["headers"] = [*message["headers"], (b"x-request-id", state["request_id"].encode())]
                if state.get("headers"):
                    added += [
                        (name.lower().encode(), value.encode("latin-1")) for name, value in state["headers"].items()
                    ]
            await send(message)

        try:
            routes = self.routes.at(path)
            self._check(scope, state, routes)
            most, size = self._body_limit.of(path), client.body_size
            if size is None or size > most:
                receive = body = LimitedBody(self._body_limit, most, scope, receive)
            for route in routes:
                if method in (route.methods or ()):
                    await route.answer(scope, receive, respond)
                    return
            await self._no_route(scope, routes)(scope, receive, respond)
        except RequestError as error:  # before the first byte of a response; streams report later errors themselves
            await self._error_response(error.with_traceback(None), scope)(scope, receive, respond)
        except RequestValidationError as invalid:  # of a query, by FastAPI
            (first, *_) = invalid.errors()
            name = str(first["loc"][-1])
            wrong = InvalidParameter(name, f"{name} is wrong: {first['msg']}")
            await self._error_response(wrong, scope)(scope, receive, respond)
        except ClientDisconnect:
            await Response(status_code=CLIENT_GONE)(scope, receive, respond)
        except Exception:
            if not started:
                await self._error_response(InternalError(), scope)(scope, receive, respond)
            raise  # the server logs its traceback
        finally:
            if body is not None:
                body.close()

    def _check(self, scope: Scope, state: dict[str, object], routes: Sequence[Endpoint | PageFile]) -> None:
        """Give the request its id, the client's own or a new one, and its key's name.

        Raises:
            RequestError: it may not be answered: its id is invalid, a web page has sent it, or it has no valid key.
        """
        headers = dict(reversed(scope["headers"]))
        given = headers.get(b"x-request-id")
        if given is not None and ID_PATTERN.fullmatch(text := given.decode("latin-1")):
            state["request_id"] = text
        else:
            state["request_id"] = (routes[0].id_prefix if routes else "req-") + secrets.token_hex(12)
            if given is not None:
                message = "X-Request-Id must have 1 to 128 of the characters A-Z, a-z, 0-9, '.', '_' and '-'"
                raise BadRequest(message, kind="invalid_request_id", param="X-Request-Id")
        if self._guard is not None:
            self._guard.check(headers.get(b"host"), headers.get(b"origin"))
        state["key"] = ANONYMOUS
        access = routes[0].access if routes else Access.CLIENT
        valid_keys = self._clients if access is Access.CLIENT else self._operators
        if access is Access.OPEN or not (valid_keys.keys or (access is Access.OPERATOR and self._clients.keys)):
            return
        key = presented_key(Request(scope).headers)
        for keys in (
            (valid_keys,) if routes else (valid_keys, self._operators)
        ):  # without a route, any valid key will do
            if key and (name := keys.identify(key)) is not None:
                state["key"] = name
                return
        self._on_unauthorized("wrong" if key else "missing")
        if key:
            address = (scope.get("client") or ("an unknown address",))[0]
            log.warning("a wrong key from %s for %s", address, scope["path"][:MAX_LOGGED])
        state["headers"] = {"WWW-Authenticate": "Bearer"}
        message = "this path is closed because the router has no admin key; start it with --admin-key"
        if valid_keys.keys:
            message = f"this path needs a valid {access.value}, in the header `Authorization: Bearer KEY`"
        raise Unauthorized(message, kind="invalid_api_key")

    def _error_response(self, error: RequestError, scope: Scope) -> Response:
        make_body = self.routes.error_body(scope["path"])
        return error_response(error, make_body and make_body(error, scope["state"]["request_id"]))

    def _no_route(self, scope: Scope, routes: Sequence[Endpoint | PageFile]) -> Response:
        """Return the answer to a method that no route of the path has."""
        if (scope["method"], scope["path"]) == ("OPTIONS", "*"):  # of the server as a whole
            return Response(status_code=204, headers={"Allow": "DELETE, GET, HEAD, OPTIONS, POST"})
        if not routes:
            like = self.routes.like(scope["path"])
            hint = f"did you mean {like}?" if like else "try /v1/models or /v1/completions"
            raise NotFound(f"there is no such path; {hint}", kind="not_found")
        methods = {method for route in routes for method in route.methods or ()}
        allowed = {"Allow": ", ".join(sorted({*methods, "OPTIONS", *({"HEAD"} if "GET" in methods else ())}))}
        if scope["method"] == "OPTIONS":
            return Response(status_code=204, headers=allowed)
        message = f"this path does not support {scope['method']}; use {' or '.join(sorted(methods))}"
        error = MethodNotAllowed(message, kind="method_not_allowed")
        response = self._error_response(error, scope)
        response.headers.update(allowed)
        return response
