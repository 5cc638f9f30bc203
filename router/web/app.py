"""Builds the router's HTTP application: endpoints, middleware and error handlers.

A request has one id: the `id` field of the response, its `X-Request-Id` header (the client's own, if it sent one) and the id
at /debug/requests/{id} are the same. If it asks for several choices, choice i is `{id}-{i}`.
"""

from collections.abc import Callable, Iterable, Sequence
from functools import cache

from fastapi import FastAPI
from fastapi.telemetry import TelemetryConfig
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import ASGIApp

from pdserve.config import RouterConfig, parse_size
from pdserve.errors import BadRequest, NotFound, RequestError
from pdserve.router.api.http_responses import CLIENT_GONE, InternalError, error_response, json_response
from pdserve.router.api.openapi import openapi_document
from pdserve.router.backend import Backend
from pdserve.router.limits.key_file import load_api_keys
from pdserve.router.limits.quota import RATE_HEADERS
from pdserve.router.storage.response_store import ResponseStore
from pdserve.router.telemetry.timeline import Timeline
from pdserve.router.text.tokenizer import Tokenizer
from pdserve.router.web.admission import AdmissionController
from pdserve.router.web.auth import Access, Authentication, KeySet, PathAccess, presented_key
from pdserve.router.web.browser_guard import BrowserGuard
from pdserve.router.web.endpoint import Endpoint, Endpoints, Handler
from pdserve.router.web.generation_endpoints import EmbeddingEndpoints, GenerationEndpoints
from pdserve.router.web.grammar_checker import GrammarChecker
from pdserve.router.web.middleware import BodyLimit, Check, Middleware, RequestIds
from pdserve.router.web.model_endpoints import ModelEndpoints
from pdserve.router.web.operator_endpoints import OperatorEndpoints
from pdserve.router.web.pages import PageFile, page_routes

# The router has traces and metrics of its own; FastAPI's would be a second set, at a cost per request.
NO_TELEMETRY: TelemetryConfig = {"tracing": False, "metrics": False, "logs": False, "auto_configure": False}


class MethodNotAllowed(BadRequest):
    """The path exists, but not for this method."""

    status = 405


def create_app(
    config: RouterConfig,
    tokenizer: Tokenizer,
    backend: Backend,
    admission: AdmissionController,
    metrics_parts: Callable[..., Iterable[bytes]],
    latest_timelines: Callable[[int], list[Timeline]],
    overview: Callable[..., dict[str, object]],
    grammars: GrammarChecker | None = None,
    response_store: ResponseStore | None = None,
    further: Sequence[Endpoints] = (),
) -> FastAPI:
    """Build the application. `OperatorEndpoints` explains the three arguments before the last one.

    Without `grammars`, grammars are not checked before their requests reach the instances; without `response_store`,
    responses are not kept. `further` are groups of endpoints besides the router's own.
    """
    generation_routes = GenerationEndpoints(config, tokenizer, backend, admission, grammars, response_store).routes()
    clients, operators = KeySet(admission.keys), KeySet(load_api_keys(config.admin_key))

    def shows_keys(request: Request) -> bool:
        """Return whether nothing is to be hidden, or the request is an operator's, by its key or its port."""
        _, port = request.scope.get("server") or ("", None)
        is_own_port = config.own_port is not None and port == config.own_port
        return not clients or is_own_port or operators.identify(presented_key(request.headers)) is not None

    api_routes = [
        *generation_routes,
        *EmbeddingEndpoints(tokenizer, backend, admission).routes(),
        *ModelEndpoints(config, tokenizer, backend, admission.parse_queue).routes(),
        *OperatorEndpoints(backend, metrics_parts, shows_keys, latest_timelines, overview, config.max_n).routes(),
        *(route for group in further for route in group.routes()),
    ]
    key_names = _key_names(api_routes, clients, operators)
    document = cache(lambda: json_response(openapi_document(api_routes, config.name, key_names)).body)

    async def openapi() -> Response:
        return Response(document(), media_type="application/json")

    document_route = Endpoint(openapi, method="GET", path="/openapi.json", access=Access.OPEN)
    routes: list[Endpoint | PageFile] = [*api_routes, document_route, *page_routes()]
    app = FastAPI(routes=[*routes], openapi_url=None, redirect_slashes=False, telemetry=NO_TELEMETRY)
    _add_error_handlers(app, routes)
    app.state.generation_handlers = _handlers(generation_routes)
    app.state.openapi_document = document
    checks: list[Check] = [RequestIds({route.path: route.id_prefix for route in generation_routes}).check]
    if not admission.keys:
        checks.append(BrowserGuard(config).check)
    unauthorized = admission.metrics.unauthorized
    authentication = Authentication(
        PathAccess(routes), clients, operators, lambda reason: unauthorized.labels(reason=reason).inc()
    )
    checks.append(authentication.check)
    uploads = {"/v1/files": parse_size(config.max_batch_bytes)} if config.batch_folder else {}
    body_limit = BodyLimit(config.max_body_bytes, config.client_timeout_seconds, admission.body_budget, uploads)
    # Around FastAPI's own layers instead of inside of them, because most requests are answered before they get there.
    stack: ASGIApp = Middleware(app.build_middleware_stack(), app.state.generation_handlers, checks, body_limit)
    if config.cors_origins:
        stack = CORSMiddleware(
            stack,
            allow_origins=[origin.strip() for origin in config.cors_origins.split(",")],
            allow_methods=["GET", "POST", "DELETE"],
            allow_headers=["*"],
            expose_headers=["X-Request-Id", "Retry-After", *RATE_HEADERS],
        )
    app.middleware_stack = stack
    return app


def prepare(app: FastAPI) -> None:
    """Build what the first request to an open path would otherwise wait for on the event loop: /openapi.json."""
    app.state.openapi_document()


def generation_handlers(app: FastAPI) -> dict[str, Handler]:
    """Return the handlers of the endpoints that generate, by path."""
    handlers: dict[str, Handler] = app.state.generation_handlers
    return handlers


def _handlers(routes: Iterable[Endpoint]) -> dict[str, Handler]:
    return {route.path: route.get_route_handler() for route in routes if route.methods == {"POST"}}


def _key_names(routes: Iterable[Endpoint], clients: KeySet, operators: KeySet) -> dict[str, str]:
    """Return the name of the key that each path requires, for /openapi.json."""
    required = {Access.OPEN: False, Access.CLIENT: bool(clients), Access.OPERATOR: bool(clients or operators)}
    return {
        route.path_format: route.access.value.lower().replace(" ", "_") for route in routes if required[route.access]
    }


def _add_error_handlers(app: FastAPI, routes: Sequence[Endpoint | PageFile]) -> None:
    async def request_error(_: Request, error: Exception) -> Response:
        assert isinstance(error, RequestError)
        return error_response(error)

    async def http_exception(request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        if error.status_code != 405:
            return error_response(_from_http_exception(request, error))
        allowed = {"Allow": _allowed_methods(routes, request.scope["path"])}
        if request.method == "OPTIONS":
            return Response(status_code=204, headers=allowed)
        response = error_response(_from_http_exception(request, error))
        response.headers.update(allowed)
        return response

    async def client_disconnect(_: Request, error: Exception) -> Response:
        return Response(status_code=CLIENT_GONE)

    async def unexpected(_: Request, error: Exception) -> Response:
        return error_response(InternalError())  # Starlette re-raises the exception, which logs its traceback

    app.add_exception_handler(RequestError, request_error)
    app.add_exception_handler(HTTPException, http_exception)
    app.add_exception_handler(ClientDisconnect, client_disconnect)
    app.add_exception_handler(Exception, unexpected)


def _allowed_methods(routes: Iterable[Endpoint | PageFile], path: str) -> str:
    methods = {method for route in routes if route.path_regex.match(path) for method in route.methods or ()}
    return ", ".join(sorted({*methods, "OPTIONS", *({"HEAD"} if "GET" in methods else ())}))


def _from_http_exception(request: Request, error: HTTPException) -> RequestError:
    """Convert Starlette's errors of routing to ours."""
    if error.status_code == 405:
        return MethodNotAllowed(f"this path does not support {request.method}", kind="method_not_allowed")
    assert error.status_code == 404, error
    return NotFound("there is no such path; try /v1/models or /v1/completions", kind="not_found")
