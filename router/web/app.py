"""Builds the router's HTTP application: endpoints, keys and limits."""

import asyncio
from collections.abc import Callable, Iterable, Sequence
from functools import cache

from starlette.requests import Request
from starlette.responses import Response

from pdserve.config import RouterConfig
from pdserve.errors import SetupError
from pdserve.router.api.http_responses import json_response
from pdserve.router.api.openapi import openapi_document
from pdserve.router.backend import Backend
from pdserve.router.limits.key_file import load_api_keys
from pdserve.router.telemetry.timeline import Timeline
from pdserve.router.text.tokenizer import Tokenizer
from pdserve.router.web.admission import AdmissionController
from pdserve.router.web.application import Application, BodyLimit, BrowserGuard, KeySet, presented_key
from pdserve.router.web.dialect import Dialect, Service, load_dialects
from pdserve.router.web.endpoint import Access, Endpoint
from pdserve.router.web.grammar_checker import GrammarChecker
from pdserve.router.web.model_endpoints import ModelEndpoints
from pdserve.router.web.operator_endpoints import OperatorEndpoints
from pdserve.router.web.pages import page_routes


def create_app(
    config: RouterConfig,
    tokenizer: Tokenizer,
    backend: Backend,
    admission: AdmissionController,
    metrics_parts: Callable[..., Iterable[bytes]],
    latest_timelines: Callable[[int], list[Timeline]],
    overview: Callable[..., dict[str, object]],
    grammars: GrammarChecker | None = None,
    dialects: Sequence[type[Dialect]] | None = None,
) -> Application:
    """Build the application. `OperatorEndpoints` explains the three arguments before `grammars`.

    Without `grammars`, grammars are not checked before their requests reach the instances; without `dialects`, those that
    are installed are served.

    Raises:
        SetupError: a dialect cannot be loaded or opened, or two have endpoints of the same path.
    """
    service = Service(config, tokenizer, backend, admission, grammars)
    served = [dialect(service) for dialect in (load_dialects() if dialects is None else dialects)]
    dialect_routes = [route for dialect in served for route in dialect.routes()]
    service.endpoints |= {
        route.path: route for route in dialect_routes if route.has_body and route.access is Access.CLIENT
    }
    clients, operators = KeySet(admission.keys), KeySet(load_api_keys(config.admin_key))

    def shows_keys(request: Request) -> bool:
        """Return whether nothing is to be hidden, or the request is an operator's, by its key or its port."""
        _, port = request.scope.get("server") or ("", None)
        is_own_port = config.own_port is not None and port == config.own_port
        return not clients.keys or is_own_port or operators.identify(presented_key(request.headers)) is not None

    api_routes = [
        *dialect_routes,
        *ModelEndpoints(config, tokenizer, backend, admission).routes(),
        *OperatorEndpoints(
            backend, metrics_parts, shows_keys, latest_timelines, overview, config.max_n, admission.queue.queued
        ).routes(),
    ]
    _check_distinct(api_routes)
    key_names = _key_names(api_routes, clients, operators)
    document = cache(lambda: json_response(openapi_document(api_routes, config.name, key_names)).body)
    building = asyncio.Lock()

    async def openapi() -> Response:
        async with building:  # once, in a thread: it takes 0.2 s, for which all streams would wait
            return Response(await asyncio.to_thread(document), media_type="application/json")

    document_route = Endpoint(openapi, method="GET", path="/openapi.json", access=Access.OPEN)
    unauthorized = admission.metrics.unauthorized
    larger = {path: size for dialect in served for path, size in dialect.larger_bodies.items()}
    return Application(
        [*api_routes, document_route, *page_routes()],
        None if admission.keys else BrowserGuard(config),
        clients,
        operators,
        lambda reason: unauthorized.labels(reason=reason).inc(),
        BodyLimit(config.max_body_bytes, config.client_timeout_seconds, admission.body_budget, larger),
        [origin.strip() for origin in config.cors_origins.split(",") if config.cors_origins],
        dialects=served,
    )


def _check_distinct(routes: Iterable[Endpoint]) -> None:
    """Raise SetupError if two routes answer the same requests."""
    found: dict[tuple[str, str], Endpoint] = {}
    for route in routes:
        other = found.setdefault((route.method, route.path), route)
        if other is not route:
            owners = " and ".join(one.function.__module__ for one in (other, route))
            raise SetupError(f"{owners} both answer {route.method} {route.path}; uninstall one of the two dialects")


def _key_names(routes: Iterable[Endpoint], clients: KeySet, operators: KeySet) -> dict[str, str]:
    """Return the name of the key that each path requires, for /openapi.json."""
    has_clients, has_any = bool(clients.keys), bool(clients.keys or operators.keys)
    required = {Access.OPEN: False, Access.CLIENT: has_clients, Access.OPERATOR: has_any}
    return {
        route.path_format: route.access.value.lower().replace(" ", "_") for route in routes if required[route.access]
    }
