"""The endpoints for operators, probes and debugging: /health, /ready, /metrics, /version, /debug and /admin."""

from collections.abc import Callable

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from pdserve import __version__
from pdserve.errors import NotFound, Unavailable
from pdserve.router.api import parsing, schemas
from pdserve.router.api.http_responses import json_response
from pdserve.router.backend import Backend
from pdserve.router.telemetry.timeline import Timeline
from pdserve.router.web.endpoint import UnsupportedMediaType, content_type, route

METRICS_TYPE = "text/plain; version=0.0.4; charset=utf-8"
NUM_LATEST = 50  # requests listed at /debug/requests


class OperatorEndpoints:
    """Reports the state of the router, and drains instances or changes their roles.

    Args:
        metrics_text: returns the body of /metrics.
        latest_timelines: returns the timelines of the latest requests, at most as many as its argument.
        overview: returns the body of /debug/overview.
        max_n: the most choices that one request may have.
    """

    def __init__(
        self,
        backend: Backend,
        metrics_text: Callable[[], bytes],
        latest_timelines: Callable[[int], list[Timeline]],
        overview: Callable[[], dict[str, object]],
        max_n: int,
    ) -> None:
        self._backend = backend
        self._metrics_text = metrics_text
        self._latest_timelines = latest_timelines
        self._overview = overview
        self._max_n = max_n

    def routes(self) -> list[Route]:
        return [
            route("GET", "/health", self._health),
            route("GET", "/ready", self._ready),
            route("GET", "/metrics", self._metrics),
            route("GET", "/version", self._version),
            route("GET", "/debug/overview", self._debug_overview),
            route("GET", "/debug/requests", self._debug_requests),
            route("GET", "/debug/requests/{request_id}", self._debug_request),
            route("GET", "/debug/instances", self._debug_instances),
            route("POST", "/admin/instances/{instance_id}/drain", self._drain),
            route("POST", "/admin/instances/{instance_id}/role", self._change_role),
        ]

    async def _health(self, _: Request) -> Response:
        return json_response({"status": "alive"})

    async def _ready(self, _: Request) -> Response:
        ready, reason = self._backend.ready()
        if not ready:
            raise Unavailable(f"not ready: {reason}", kind="not_ready", retry_after_s=1)
        return json_response({"status": "ready", "instances": len(self._backend.instances())})

    async def _metrics(self, _: Request) -> Response:
        return Response(self._metrics_text(), media_type=METRICS_TYPE)

    async def _version(self, _: Request) -> Response:
        return json_response({"version": __version__})

    async def _debug_overview(self, _: Request) -> Response:
        return json_response(self._overview(), headers={"Cache-Control": "no-store"})

    async def _debug_requests(self, _: Request) -> Response:
        return json_response({"requests": [timeline.as_dict() for timeline in self._latest_timelines(NUM_LATEST)]})

    async def _debug_request(self, request: Request) -> Response:
        request_id = request.path_params["request_id"]
        timeline = self._backend.timeline(request_id)
        if timeline is not None:
            return json_response(timeline.as_dict())
        timelines = [self._backend.timeline(f"{request_id}-{i}") for i in range(self._max_n)]
        choices = [timeline.as_dict() for timeline in timelines if timeline is not None]
        if not choices:
            message = "no recent request of this router has this id; other routers have their own"
            raise NotFound(message, kind="request_not_found", param="request_id")
        return json_response({"request_id": request_id, "choices": choices})

    async def _debug_instances(self, _: Request) -> Response:
        return json_response({"instances": self._backend.instances()})

    async def _drain(self, request: Request) -> Response:
        _require_json(request)
        return self._start_drain(request)

    async def _change_role(self, request: Request) -> Response:
        _require_json(request)
        body = parsing.validate(schemas.RoleBody, parsing.parse_json(await request.body()))
        return self._start_drain(request, body.role)

    def _start_drain(self, request: Request, role: str = "") -> Response:
        instance_id = request.path_params["instance_id"]
        self._backend.drain(instance_id, role)
        return json_response({"instance_id": instance_id, "role": role or None}, status=202)


def _require_json(request: Request) -> None:
    """Raise UnsupportedMediaType unless the content type is JSON.

    This prevents cross-site requests to a router without keys: a page of another origin cannot send this header without a
    preflight, which the router refuses.
    """
    if content_type(request) != "application/json":
        message = "this path requires the header Content-Type: application/json"
        raise UnsupportedMediaType(message, kind="unsupported_content_type", param="Content-Type")
