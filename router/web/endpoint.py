"""Endpoints and their declaration: path, models, errors and access in one place.

An endpoint is a method of a subclass of `Endpoints` with the decorator `@endpoint`. FastAPI derives /openapi.json from the
decorator and from the types of the method's parameters and answer; `access` is what `Application` enforces. A parameter
of the type `JsonBody` gets the unparsed body, because FastAPI's own parsing has errors of another format.
"""

from collections.abc import Callable, Coroutine, Iterable, Mapping
from enum import Enum
from functools import cache, cached_property
from inspect import signature
from typing import Annotated, Any, ClassVar, TypeVar, get_args, get_origin

import fastapi
from fastapi.middleware.asyncexitstack import AsyncExitStackMiddleware
from fastapi.routing import APIRoute
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import compile_path
from starlette.types import ASGIApp, Receive, Scope, Send

from pdserve.errors import BadRequest, RequestError
from pdserve.router.api.answers import Answer, Error
from pdserve.router.api.http_responses import ErrorBody, json_response
from pdserve.router.api.parsing import JsonBody, quote

COMMON_ERRORS = {400, 401, 403, 408, 421, 431, 500, 503}  # 503: too many connections
BODY_ERRORS = {413, 415}
ERRORS = {
    400: "The request is invalid; the message says what would be valid",
    401: "The API key is missing or wrong",
    403: "A web page of another site sent the request",
    404: "There is no such model, request or instance",
    408: "The headers or the body did not arrive in time",
    409: "The order conflicts with the state of the instances",
    411: "The upload has no Content-Length",
    413: "The body is too large",
    415: "The body is not JSON",
    421: "The Host header names no host that this router serves",
    429: "The router or the API key is over a limit; Retry-After says when to retry",
    431: "The headers are too large, or too many requests are pipelined",
    500: "Internal error; the router's log has the details",
    503: "No instance can serve the request now, or the router has too many connections",
}


class Access(Enum):
    """API key that a path requires; the value is its name in error messages, empty for none."""

    OPEN = ""
    CLIENT = "API key"
    OPERATOR = "admin key"


Method = TypeVar("Method", bound=Callable[..., Coroutine[Any, Any, Any]])


def endpoint(method: str, path: str, access: Access, **options: Any) -> Callable[[Method], Method]:
    """Declare an endpoint; `options` are those of `Endpoint`."""

    def declare(function: Method) -> Method:
        function.declaration = {"method": method, "path": path, "access": access, **options}  # type: ignore[attr-defined]
        return function

    return declare


def example(**fields: Any) -> Any:
    """The body in the documentation, to be sent as it is."""
    return fastapi.Body(openapi_examples={"example": {"value": fields}})


def generation_examples(**fields: Any) -> Any:
    """The same, for an endpoint that also streams."""
    return fastapi.Body(
        openapi_examples={"whole": {"value": fields}, "streamed": {"value": {**fields, "stream": True}}}
    )


@cache
def _error_fields(model: type[Answer]) -> Mapping[int | str, Any]:
    """Return FastAPI's description of a body of each status, for all endpoints: there are 400, and each takes 0.2 ms."""
    described: dict[int | str, dict[str, Any]] = {status: {"model": model} for status in ERRORS}
    return APIRoute("/", lambda: None, responses=described).response_fields


class Endpoint:
    """The route of an endpoint. FastAPI describes it, and answers it unless it has a JsonBody, once either is needed.

    Args:
        errors: statuses besides those of every endpoint, or of every endpoint with a body.
        id_prefix: of the request ids that the router generates here.
        error_model: the body of its errors,
        error_body: and what makes it, also below its path; None: what is above it.
        json_only: answer 415 unless the content type is exactly JSON.
        options: of FastAPI's APIRoute.
    """

    def __init__(
        self,
        function: Callable[..., Any],
        *,
        method: str,
        path: str,
        access: Access,
        errors: Iterable[int] = (),
        id_prefix: str = "req-",
        json_only: bool = False,
        error_model: type[Answer] = Error,
        error_body: ErrorBody | None = None,
        **options: Any,
    ) -> None:
        self.function, self.method, self.methods, self.path = function, method, {method}, path
        self.access = access
        self.id_prefix = id_prefix
        self.error_body = error_body
        self.has_body = _has_body(function)
        self.path_regex, self.path_format, _ = compile_path(path)
        self._json_only = json_only
        self._errors, self._error_model, self._options = errors, error_model, options
        self._has_params = "{" in path

    @cached_property
    def described(self) -> APIRoute:
        """FastAPI's route, which takes it a millisecond to derive."""
        has_body = self.has_body or self._json_only
        statuses = sorted({*self._errors, *COMMON_ERRORS, *(BODY_ERRORS if has_body else ())})
        responses: dict[int | str, dict[str, Any]] = {status: {"description": ERRORS[status]} for status in statuses}
        route = APIRoute(
            self.path,
            self.function,
            methods=[self.method],
            operation_id=self.function.__name__,
            response_description="The answer",
            **{**self._options, "responses": {**self._options.get("responses", {}), **responses}},
        )
        route.response_fields |= {status: _error_fields(self._error_model)[status] for status in statuses}
        return route

    @cached_property
    def _app(self) -> ASGIApp:
        return AsyncExitStackMiddleware(self.described.app)

    async def answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request to this path; with a JsonBody this needs nothing of FastAPI."""
        if self._has_params and (found := self.path_regex.match(scope["path"])) is not None:
            scope = {**scope, "path_params": found.groupdict()}
        if self._json_only:
            require_json(Request(scope))
        if not self.has_body:
            await self._app(scope, receive, send)
            return
        response = await self.respond(Request(scope, receive))
        await response(scope, receive, send)

    def body_of(self, error: RequestError, request_id: str) -> Mapping[str, object]:
        """Return the body of an error."""
        return error.body() if self.error_body is None else self.error_body(error, request_id)

    async def respond(self, request: Request) -> Response:
        """Return the response to a request with a JsonBody."""
        answer = await self.function(request, await read_json(request), **request.path_params)
        return answer if isinstance(answer, Response) else json_response(answer, self._options.get("status_code", 200))


class Endpoints:
    """A group of endpoints. Those with a JsonBody have the parameters request, body, and the path's, in this order.

    Attributes:
        tag: their heading in the documentation.
        error_model: describes the body of their errors.
    """

    tag: ClassVar[str]
    error_model: ClassVar[type[Answer]] = Error

    def error_body(self, error: RequestError, request_id: str) -> Mapping[str, object]:
        """Return the body of an error at one of their paths, or below one; OpenAI's unless a dialect has another."""
        return error.body()

    def routes(self) -> list[Endpoint]:
        functions = [function for function in vars(type(self)).values() if hasattr(function, "declaration")]
        common: dict[str, Any] = {
            "tags": [self.tag],
            "error_model": self.error_model,
            "error_body": self.error_body,
        }
        return [Endpoint(getattr(self, function.__name__), **common, **function.declaration) for function in functions]


def _has_body(function: Callable[..., Any]) -> bool:
    """Return whether a parameter is a JsonBody."""
    annotations = [parameter.annotation for parameter in signature(function).parameters.values()]
    types = [get_args(one)[0] if get_origin(one) is Annotated else one for one in annotations]
    return any(get_origin(one) is JsonBody for one in types)


# ---- bodies -------------------------------------------------------------------------------------------------------


class UnsupportedMediaType(BadRequest):
    """The body is not JSON, or compressed."""

    status = 415


async def read_json(request: Request) -> bytes:
    """Return the raw body; raise UnsupportedMediaType if its content type is not JSON, or it is compressed.

    A missing content type and the one that `curl -d` sends by default are accepted as JSON, but not from a web page, which
    could send them to other origins without asking.
    """
    if "content-encoding" in request.headers:
        check_not_compressed(request)
    media_type = content_type(request)
    accepted = media_type == "application/json" or media_type.endswith("+json")
    if not accepted and media_type in ("", "application/x-www-form-urlencoded"):
        accepted = "origin" not in request.headers
    if not accepted:
        message = "the body must be JSON, with Content-Type: application/json"
        raise UnsupportedMediaType(message, kind="unsupported_content_type", param="Content-Type")
    return await request.body()


def require_json(request: Request) -> None:
    """Raise UnsupportedMediaType unless the content type is exactly JSON.

    This prevents cross-site requests to a router without keys: a page of another origin cannot send this header without a
    preflight, which the router refuses.
    """
    if content_type(request) != "application/json":
        message = "this path requires the header Content-Type: application/json"
        raise UnsupportedMediaType(message, kind="unsupported_content_type", param="Content-Type")


def check_not_compressed(request: Request) -> None:
    """Raise UnsupportedMediaType for a body in a content coding such as gzip: a few kilobytes of one can be gigabytes."""
    coding = request.headers.get("content-encoding", "identity").strip().lower()
    if coding not in ("identity", ""):
        message = f"the body must not be compressed: leave out Content-Encoding ({quote(coding)})"
        raise UnsupportedMediaType(message, kind="unsupported_content_encoding", param="Content-Encoding")


def content_type(request: Request) -> str:
    """Return the media type of the body in lower case, without parameters."""
    return request.headers.get("content-type", "").split(";")[0].strip().lower()
