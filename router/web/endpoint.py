"""Helpers shared by the endpoints: the route constructor, and reading JSON bodies."""

from collections.abc import Callable, Coroutine
from typing import Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from pdserve.errors import BadRequest

Endpoint = Callable[[Request], Coroutine[Any, Any, Response]]


class UnsupportedMediaType(BadRequest):
    """The body is not JSON."""

    status = 415


def route(method: str, path: str, endpoint: Endpoint) -> Route:
    """Return a route for exactly one method; Starlette would add HEAD to GET."""
    made = Route(path, endpoint, methods=[method])
    made.methods = {method}
    return made


async def json_body(request: Request) -> bytes:
    """Return the raw body; raise UnsupportedMediaType if its content type is not JSON.

    A missing content type and the one that `curl -d` sends by default are accepted as JSON, but not from a web page, which
    could send them to other origins without asking.
    """
    media_type = content_type(request)
    accepted = media_type == "application/json" or media_type.endswith("+json")
    if not accepted and media_type in ("", "application/x-www-form-urlencoded"):
        accepted = "origin" not in request.headers
    if not accepted:
        message = "the body must be JSON, with Content-Type: application/json"
        raise UnsupportedMediaType(message, kind="unsupported_content_type", param="Content-Type")
    return await request.body()


def content_type(request: Request) -> str:
    """Return the media type of the body in lower case, without parameters."""
    return request.headers.get("content-type", "").split(";")[0].strip().lower()
