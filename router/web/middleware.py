"""Around every request: its id, the limits of its body, and errors in OpenAI's format."""

import asyncio
import re
import secrets
from collections.abc import Callable, Coroutine, Mapping
from typing import Any

from starlette.datastructures import Headers, MutableHeaders
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from pdserve.errors import BadRequest, RequestError, TooLarge, TooSlow
from pdserve.router.api.http_responses import CLIENT_GONE, error_response

ID_HEADER = "x-request-id"
ID_FORM = re.compile(r"[A-Za-z0-9._-]{1,128}")
ID_PREFIX = {"/v1/completions": "cmpl-", "/v1/chat/completions": "chatcmpl-", "/v1/responses": "resp_"}
DRAIN_FACTOR = 8

Endpoint = Callable[[Request], Coroutine[Any, Any, Response]]


class RequestId:
    """Gives each request its id, the client's own or a new one, and each response the header with it.

    The endpoints find it in `request.state.request_id`, and may put further headers into `request.state.headers`.
    """

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        given = Headers(scope=scope).get(ID_HEADER)
        if given is not None and not ID_FORM.fullmatch(given):
            message = "X-Request-Id must have 1 to 128 characters out of A-Z, a-z, 0-9, '.', '_' and '-'"
            refusal = BadRequest(message, kind="invalid_request_id", param="X-Request-Id")
            await error_response(refusal)(scope, receive, send)
            return
        request_id = given or ID_PREFIX.get(scope["path"], "req-") + secrets.token_hex(12)
        scope.setdefault("state", {})["request_id"] = request_id

        async def send_with_id(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                headers[ID_HEADER] = request_id
                headers.update(scope["state"].get("headers", {}))
            await send(message)

        await self.app(scope, receive, send_with_id)


class BodyLimit:
    """Raises TooLarge where the body is read, as soon as it is longer than the limit, announced or not; TooSlow when nothing
    of it comes for `silence_s`.

    The rest of one that is too long is read and thrown away, up to a few times the limit: a client that is still sending
    would otherwise see a broken connection instead of the answer.
    """

    def __init__(self, app: ASGIApp, max_bytes: int, silence_s: float) -> None:
        self.app = app
        self.max_bytes = max_bytes
        self.silence_s = silence_s

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        received, whole = 0, False

        async def limited() -> Message:
            nonlocal received, whole
            if whole:  # what comes next is that the client left, at any time
                return await receive()
            message = await self._next(receive)
            received += len(message.get("body", b""))
            whole = not message.get("more_body", False)
            if received <= self.max_bytes:
                return message
            while message.get("more_body", False) and received < DRAIN_FACTOR * self.max_bytes:
                message = await self._next(receive)
                received += len(message.get("body", b""))
            raise TooLarge(f"the body is larger than {self.max_bytes} bytes", kind="body_too_large")

        await self.app(scope, limited if scope["type"] == "http" else receive, send)

    async def _next(self, receive: Receive) -> Message:
        try:
            async with asyncio.timeout(self.silence_s):
                return await receive()
        except TimeoutError:
            raise TooSlow(f"nothing of the body came for {self.silence_s:g} s", kind="body_too_slow") from None


class FastPath:
    """Some POST endpoints, past Starlette's router and what it puts around each: 7 % of a short request, by a profile."""

    def __init__(self, app: ASGIApp, endpoints: Mapping[str, Endpoint]) -> None:
        self.app = app
        self.endpoints = endpoints

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        endpoint = self.endpoints.get(scope["path"]) if scope["type"] == "http" and scope["method"] == "POST" else None
        if endpoint is None:
            await self.app(scope, receive, send)
            return
        try:
            response = await endpoint(Request(scope, receive))
            await response(scope, receive, send)
        except RequestError as error:  # before the first byte of an answer: streams word later ones themselves
            await error_response(error)(scope, receive, send)
        except ClientDisconnect:
            await Response(status_code=CLIENT_GONE)(scope, receive, send)
