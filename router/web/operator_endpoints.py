"""The endpoints for operators, probes and debugging: /health, /ready, /metrics, /version, /debug and /admin."""

import asyncio
import logging
import math
import time
from collections.abc import Callable, Iterable
from functools import partial
from typing import Annotated

from starlette.requests import Request
from starlette.responses import Response

from pdserve import __version__
from pdserve.errors import InvalidParameter, NotFound, Unavailable
from pdserve.router.api import answers, schemas
from pdserve.router.api.parsing import JsonBody, parse_body
from pdserve.router.backend import Backend
from pdserve.router.instances.controller_lease import ControllerLease
from pdserve.router.telemetry.timeline import Timeline
from pdserve.router.telemetry.traffic import TIME_HEADER, traffic_lines
from pdserve.router.web.endpoint import Access, Endpoints, endpoint, example

METRICS_TYPE = "text/plain; version=0.0.4; charset=utf-8"
log = logging.getLogger(__name__)

LINES_TYPE = "application/x-ndjson"
NUM_LATEST = 50  # requests listed at /debug/requests
MAX_TRAFFIC = 100_000  # requests at /debug/traffic, if --timelines keeps as many
METRICS_PERIOD_S = 0.1  # between two renderings, which take some 10 ms each: /metrics is open to everyone


class _SharedBody:
    """A body that is rendered once per period at most, for all who have asked for it by then.

    Args:
        parts: of the body. Others are served between two of them.
    """

    def __init__(self, parts: Callable[[], Iterable[bytes]]) -> None:
        self._parts = parts
        self._next: asyncio.Task[bytes] | None = None
        self._last_at = -math.inf

    async def get(self) -> bytes:
        """Return the body as it is after this call, or up to a period later."""
        if self._next is None:
            self._next = asyncio.create_task(self._render())
        return await asyncio.shield(self._next)

    async def _render(self) -> bytes:
        await asyncio.sleep(max(0.0, self._last_at + METRICS_PERIOD_S - time.monotonic()))
        self._next, self._last_at = None, time.monotonic()
        parts = []
        for part in self._parts():
            parts.append(part)
            await asyncio.sleep(0)
        return b"".join(parts)


class OperatorEndpoints(Endpoints):
    """Reports the state of the router, and drains instances or changes their roles.

    Args:
        metrics_parts: returns the body of /metrics in parts, without the series of API keys if called with `with_keys=False`.
            Others are served between two parts.
        shows_keys: returns whether a request may see the series of API keys.
        latest_timelines: returns the timelines of the latest requests, at most as many as its argument.
        overview: returns the body of /debug/overview, with or without history.
        max_n: the most choices that one request may have.
        queued: returns when each request of the admission queue came, and its prompt tokens.
    """

    tag = "operation"

    def __init__(
        self,
        backend: Backend,
        metrics_parts: Callable[..., Iterable[bytes]],
        shows_keys: Callable[[Request], bool],
        latest_timelines: Callable[[int], list[Timeline]],
        overview: Callable[..., dict[str, object]],
        max_n: int,
        queued: Callable[[], Iterable[tuple[float, int]]] = tuple,
    ) -> None:
        self._backend = backend
        self._metrics = {
            with_keys: _SharedBody(partial(metrics_parts, with_keys=with_keys)) for with_keys in (False, True)
        }
        self._shows_keys = shows_keys
        self._latest_timelines = latest_timelines
        self._overview = overview
        self._max_n = max_n
        self._queued = queued
        self._lease = ControllerLease()
        self._made_changes: list[schemas.MadeChange] = []  # by controllers of late

    @endpoint("GET", "/health", Access.OPEN)
    async def health(self) -> answers.Health:
        """200 while the router runs."""
        return answers.Health(status="alive")

    @endpoint("GET", "/ready", Access.OPEN)
    async def ready(self) -> answers.Readiness:
        """200 if both roles can be served."""
        ready, reason = self._backend.ready()
        if not ready:
            raise Unavailable(f"not ready: {reason}", kind="not_ready", retry_after_s=1)
        return answers.Readiness(status="ready", instances=self._backend.num_instances)

    @endpoint(
        "GET",
        "/metrics",
        Access.OPEN,
        response_class=Response,
        responses={200: {"content": {"text/plain": {"schema": {"type": "string"}}}}},
    )
    async def metrics(self, request: Request) -> Response:
        """Metrics in Prometheus' format; those of API keys only with the admin key, or on --own-port."""
        return Response(await self._metrics[self._shows_keys(request)].get(), media_type=METRICS_TYPE)

    @endpoint("GET", "/version", Access.OPEN)
    async def version(self) -> answers.Version:
        """The version of pdserve."""
        return answers.Version(version=__version__)

    @endpoint("GET", "/debug/overview", Access.OPERATOR)
    async def debug_overview(self, response: Response, history: bool = False) -> dict[str, object]:
        """Snapshot for the live page; with `history`, also a snapshot of each 15 s of the last 15 minutes.

        The connection closes: the next one may reach another of the routers that share the address.
        """
        response.headers["Cache-Control"], response.headers["Connection"] = "no-store", "close"
        return self._overview(with_history=history)

    @endpoint("GET", "/debug/requests", Access.OPERATOR)
    async def debug_requests(self) -> answers.Timelines:
        """Timelines of the latest requests."""
        return answers.Timelines(requests=[timeline.as_dict() for timeline in self._latest_timelines(NUM_LATEST)])

    @endpoint("GET", "/debug/requests/{request_id}", Access.OPERATOR, errors=[404])
    async def debug_request(self, request_id: str) -> answers.TimelineOfRequest:
        """The timeline of one request, or of each of its choices."""
        timeline = self._backend.timeline(request_id)
        if timeline is not None:
            return answers.TimelineOfRequest.model_validate(timeline.as_dict())
        timelines = [self._backend.timeline(f"{request_id}-{i}") for i in range(self._max_n)]
        choices = [timeline.as_dict() for timeline in timelines if timeline is not None]
        if not choices:
            message = "no recent request of this router has this id; other routers have their own"
            raise NotFound(message, kind="request_not_found", param="request_id")
        return answers.TimelineOfRequest.model_validate({"request_id": request_id, "choices": choices})

    @endpoint(
        "GET",
        "/debug/traffic",
        Access.OPERATOR,
        response_class=Response,
        responses={200: {"content": {LINES_TYPE: {"schema": {"type": "string"}}}}},
    )
    async def debug_traffic(self, request: Request) -> Response:
        """The latest requests as a Mooncake trace, with the latencies that clients saw; of the last ?seconds=, if given."""
        text = request.query_params.get("seconds", "inf")
        try:
            seconds = float(text)
        except ValueError:
            seconds = math.nan
        if not seconds >= 0:
            raise InvalidParameter("seconds", f"seconds={text!r} is not a number of seconds, such as 60")
        now, epoch_offset = time.monotonic(), time.time() - time.monotonic()
        lines = traffic_lines(self._latest_timelines(MAX_TRAFFIC), epoch_offset, now - seconds, self._queued())
        headers = {"Cache-Control": "no-store", TIME_HEADER: f"{(now + epoch_offset) * 1e3:.1f}"}
        return Response(lines, media_type=LINES_TYPE, headers=headers)

    @endpoint("GET", "/debug/instances", Access.OPERATOR)
    async def debug_instances(self) -> answers.Instances:
        """The attached instances and their load."""
        return answers.Instances(instances=self._backend.instances())

    @endpoint(
        "POST",
        "/admin/instances/{instance_id}/drain",
        Access.OPERATOR,
        errors=[404, 409],
        json_only=True,
        status_code=202,
    )
    async def drain(self, instance_id: str) -> answers.DrainStarted:
        """Let an instance hand over or finish its requests, and end."""
        return self._start_drain(instance_id)

    @endpoint(
        "POST",
        "/admin/instances/{instance_id}/role",
        Access.OPERATOR,
        errors=[404, 409],
        json_only=True,
        status_code=202,
    )
    async def change_role(
        self, _: Request, body: Annotated[JsonBody[schemas.RoleBody], example(role="decode")], instance_id: str
    ) -> answers.DrainStarted:
        """Drain an instance, which then serves in another role."""
        fields = await asyncio.to_thread(parse_body, schemas.RoleBody, body)
        return self._start_drain(instance_id, fields.role)

    @endpoint("POST", "/admin/prefix_cache/reset", Access.OPERATOR, json_only=True)
    async def reset_prefix_cache(self) -> answers.CacheReset:
        """Let later requests find no KV of earlier ones, neither in pools nor in stores. Running requests go on."""
        pools, stores = self._backend.reset_prefix_cache(time.time_ns() // 1_000_000)
        return answers.CacheReset(pools=pools, stores=stores)

    @endpoint("POST", "/reset_prefix_cache", Access.OPERATOR)
    async def reset_prefix_cache_as_vllm(self) -> answers.CacheReset:
        """The same, by its path in vLLM."""
        return await self.reset_prefix_cache()

    @endpoint("POST", "/admin/autoscaler", Access.OPERATOR, errors=[409], json_only=True)
    async def hold_lease(
        self,
        _: Request,
        body: Annotated[
            JsonBody[schemas.LeaseBody], example(holder="host-1", lease_seconds=30, decision="nothing to do")
        ],
    ) -> answers.LeaseHeld:
        """Renew the lease of the one controller that may change the fleet, and show its decision on the live page."""
        lease = await asyncio.to_thread(parse_body, schemas.LeaseBody, body)
        self._lease.renew(lease.holder, lease.lease_seconds, time.monotonic())
        self._made_changes = lease.changes or self._made_changes
        if lease.decision:
            log.info("autoscaler: %s", lease.decision, extra={"event": "autoscaler"})
        return answers.LeaseHeld(holder=lease.holder, changes=self._made_changes)

    def _start_drain(self, instance_id: str, role: str = "") -> answers.DrainStarted:
        self._backend.drain(instance_id, role)
        return answers.DrainStarted(instance_id=instance_id, role=role or None)
