"""ASGI middleware: request ids, formats of errors, limits of the request body, and a fast path past FastAPI's router."""

import asyncio
import json
import re
import secrets
from collections.abc import Mapping

from pydantic_core import to_json
from starlette.datastructures import Headers, MutableHeaders
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from pdserve.errors import BadRequest, RequestError, TooLarge, TooSlow
from pdserve.router.api.http_responses import CLIENT_GONE, error_response
from pdserve.router.api.messages import error_body
from pdserve.router.web.endpoint import Handler

ID_HEADER = "x-request-id"
ID_PATTERN = re.compile(r"[A-Za-z0-9._-]{1,128}")
MESSAGES_PATH = "/v1/messages"
DRAIN_FACTOR = 8  # at most this many times the limit is read of a body that is too large


class RequestId:
    """Assigns each request its id, the client's own or a new one, and adds it to the response as a header.

    Endpoints read it from `request.state.request_id`, and may set further response headers in `request.state.headers`.
    `prefixes` are those of new ids, by path.
    """

    def __init__(self, app: ASGIApp, prefixes: Mapping[str, str]) -> None:
        self.app = app
        self.prefixes = prefixes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        client_id = Headers(scope=scope).get(ID_HEADER)
        if client_id is not None and not ID_PATTERN.fullmatch(client_id):
            message = "X-Request-Id must have 1 to 128 of the characters A-Z, a-z, 0-9, '.', '_' and '-'"
            refusal = BadRequest(message, kind="invalid_request_id", param="X-Request-Id")
            await error_response(refusal)(scope, receive, send)
            return
        request_id = client_id or self.prefixes.get(scope["path"], "req-") + secrets.token_hex(12)
        scope.setdefault("state", {})["request_id"] = request_id

        async def send_with_id(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                headers[ID_HEADER] = request_id
                headers.update(scope["state"].get("headers", {}))
            await send(message)

        await self.app(scope, receive, send_with_id)


class BodyLimit:
    """Limits the size of request bodies, and the time between their parts.

    Reading a body raises TooLarge as soon as it exceeds `max_bytes`, whatever its Content-Length says, and TooSlow if no
    part arrives for `idle_timeout_s` seconds. The rest of a body that is too large is read and discarded, up to
    `DRAIN_FACTOR` times the limit: a client that is still sending would otherwise see a broken connection and no answer.
    """

    def __init__(
        self, app: ASGIApp, max_bytes: int, idle_timeout_s: float, larger: Mapping[str, int] | None = None
    ) -> None:
        """`larger` has the limits of paths with another one."""
        self.app = app
        self.max_bytes = max_bytes
        self.idle_timeout_s = idle_timeout_s
        self.larger = larger or {}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        received, complete = 0, False
        max_bytes = self.larger.get(scope.get("path", ""), self.max_bytes)

        async def limited() -> Message:
            nonlocal received, complete
            if complete:  # the next message is the disconnect, at any time
                return await receive()
            message = await self._receive_part(receive)
            received += len(message.get("body", b""))
            complete = not message.get("more_body", False)
            if received <= max_bytes:
                return message
            while message.get("more_body", False) and received < DRAIN_FACTOR * max_bytes:
                message = await self._receive_part(receive)
                received += len(message.get("body", b""))
            raise TooLarge(f"the body is larger than {max_bytes} bytes", kind="body_too_large")

        await self.app(scope, limited if scope["type"] == "http" else receive, send)

    async def _receive_part(self, receive: Receive) -> Message:
        try:
            async with asyncio.timeout(self.idle_timeout_s):
                return await receive()
        except TimeoutError:
            raise TooSlow(f"no part of the body arrived for {self.idle_timeout_s:g} s", kind="body_too_slow") from None


class MessageErrors:
    """Puts the errors of /v1/messages, wherever they come from, into Anthropic's format."""

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or not scope["path"].startswith(MESSAGES_PATH):
            await self.app(scope, receive, send)
            return
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
                text = json.loads(message["body"])["error"]["message"]
                body = to_json({**error_body(failed["status"], text), "request_id": scope["state"]["request_id"]})
                MutableHeaders(scope=failed)["Content-Length"] = str(len(body))
                await send(failed)
                await send({**message, "body": body})

        await self.app(scope, receive, send_converted)


class FastPath:
    """Calls some POST endpoints directly, past FastAPI's router and its wrappers.

    By a profile, Starlette's router alone takes 7 % of the time of a short request.
    """

    def __init__(self, app: ASGIApp, handlers: Mapping[str, Handler]) -> None:
        self.app = app
        self.handlers = handlers

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        handle = self.handlers.get(scope["path"]) if scope["type"] == "http" and scope["method"] == "POST" else None
        if handle is None:
            await self.app(scope, receive, send)
            return
        try:
            response = await handle(Request(scope, receive))
            await response(scope, receive, send)
        except RequestError as error:  # before the first byte of a response; streams report later errors themselves
            await error_response(error)(scope, receive, send)
        except ClientDisconnect:
            await Response(status_code=CLIENT_GONE)(scope, receive, send)
