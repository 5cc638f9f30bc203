"""ASGI middleware around all endpoints: request ids, checks, limits of bodies, and the formats of errors."""

import asyncio
import json
import re
import secrets
from collections.abc import Callable, Mapping, Sequence

from pydantic_core import to_json
from starlette.datastructures import MutableHeaders
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from pdserve.errors import BadRequest, RequestError, TooLarge, TooSlow
from pdserve.router.api.http_responses import CLIENT_GONE, InternalError, error_response
from pdserve.router.api.messages import error_body
from pdserve.router.client_connection import ClientConnection
from pdserve.router.limits.body_budget import BodyBudget
from pdserve.router.web.endpoint import Handler

ID_HEADER = b"x-request-id"
ID_PATTERN = re.compile(r"[A-Za-z0-9._-]{1,128}")
MESSAGES_PATH = "/v1/messages"
DRAIN_FACTOR = 8  # at most this many times the limit is read of a body that is too large

Check = Callable[[Scope], RequestError | None]  # returns why a request is refused; may add to the scope's state


class RequestIds:
    """Gives each request its id, the client's own or a new one. Endpoints read it from `request.state.request_id`.

    `prefixes` are those of new ids, by path.
    """

    def __init__(self, prefixes: Mapping[str, str]) -> None:
        self.prefixes = prefixes

    def check(self, scope: Scope) -> RequestError | None:
        given = next((value for name, value in scope["headers"] if name == ID_HEADER), None)
        if given is not None and ID_PATTERN.fullmatch(text := given.decode("latin-1")):
            scope["state"]["request_id"] = text
            return None
        scope["state"]["request_id"] = self.prefixes.get(scope["path"], "req-") + secrets.token_hex(12)
        if given is None:
            return None
        message = "X-Request-Id must have 1 to 128 of the characters A-Z, a-z, 0-9, '.', '_' and '-'"
        return BadRequest(message, kind="invalid_request_id", param="X-Request-Id")


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

    def apply(self, scope: Scope, receive: Receive) -> "LimitedBody | None":
        """Return the body of a scope, with the limits of its path; None if all of it has arrived within them."""
        max_bytes, size = self.larger.get(scope["path"], self.max_bytes), scope["state"]["client"].body_size()
        if size is not None and size <= max_bytes:
            return None
        return LimitedBody(self, max_bytes, scope, receive)


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


class Middleware:
    """Refuses what a check refuses, limits the body, calls the endpoint, and adds headers to its response.

    These are the request's id, and those that checks and endpoints set in `request.state.headers`. All of this is one layer,
    because each costs every request a coroutine, and it calls the handlers of generation itself: the layers and the router of
    FastAPI and Starlette would take a tenth of a short request's time.

    Args:
        app: FastAPI's application, which answers all requests but POSTs to the paths of `handlers`.
        checks: called in turn. The first is that of `RequestIds`.
    """

    def __init__(
        self, app: ASGIApp, handlers: Mapping[str, Handler], checks: Sequence[Check], body_limit: BodyLimit
    ) -> None:
        self._app = app
        self._handlers = handlers
        self._checks = checks
        self._body_limit = body_limit

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        scope = _as_routed(scope)
        path, state, started = scope["path"], scope.setdefault("state", {}), False
        state.setdefault("client", ClientConnection())

        async def respond(message: Message) -> None:
            nonlocal started
            if message["type"] == "http.response.start":
                started = True
                added = {ID_HEADER.decode(): state["request_id"], **state.get("headers", {})}
                headers = [(name.lower().encode(), value.encode("latin-1")) for name, value in added.items()]
                message["headers"] = [*message["headers"], *headers]
            await send(message)

        if path.startswith(MESSAGES_PATH):
            send = _with_message_errors(send, state)
        for check in self._checks:
            if (refusal := check(scope)) is not None:
                await error_response(refusal)(scope, receive, respond)
                return
        body = self._body_limit.apply(scope, receive)
        receive = receive if body is None else body
        handle = self._handlers.get(path) if scope["method"] == "POST" else None
        try:
            if handle is None:
                await self._app(scope, receive, respond)
                return
            response = await handle(Request(scope, receive))
            await response(scope, receive, respond)
        except RequestError as error:  # before the first byte of a response; streams report later errors themselves
            await error_response(error)(scope, receive, respond)
        except ClientDisconnect:
            await Response(status_code=CLIENT_GONE)(scope, receive, respond)
        except Exception:
            if not started:
                await error_response(InternalError())(scope, receive, respond)
            raise  # the server logs its traceback
        finally:
            if body is not None:
                body.close()


def _as_routed(scope: Scope) -> Scope:
    """Return the scope that is routed: HEAD is a GET whose body the server leaves out, and `/health/` is `/health`."""
    path: str = scope["path"]
    if len(path) > 1 and path[-1] == "/" and path[-2] != "/":
        scope = {**scope, "path": path[:-1]}
    return {**scope, "method": "GET"} if scope["method"] == "HEAD" else scope


def _with_message_errors(send: Send, state: Mapping[str, str]) -> Send:
    """Return `send` for a path of /v1/messages: errors, wherever they come from, leave in Anthropic's format."""
    failed: Message | None = None  # the beginning of an error's response

    async def send_converted(message: Message) -> None:
        nonlocal failed
        if message["type"] == "http.response.start" and message["status"] >= 400:
            failed = message
        elif failed is None:
            await send(message)
        elif not message.get("body"):  # the client is gone
            await send(failed)
            await send(message)
        else:
            error = json.loads(message["body"])["error"]
            converted = error_body(failed["status"], error["message"], error["code"])
            body = to_json({**converted, "request_id": state["request_id"]})
            MutableHeaders(scope=failed)["Content-Length"] = str(len(body))
            await send(failed)
            await send({**message, "body": body})

    return send_converted
