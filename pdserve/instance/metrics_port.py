"""HTTP port of an instance: `/metrics` for Prometheus, `/health` and `/ready` for probes. Threads of its own serve it."""

import asyncio
import json
import threading
from collections.abc import Callable, Iterable
from http import HTTPStatus
from socketserver import ThreadingMixIn
from typing import Any
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer, make_server

from prometheus_client import (
    CollectorRegistry,
    GCCollector,
    PlatformCollector,
    ProcessCollector,
    make_wsgi_app,
)
from prometheus_client.core import Metric
from prometheus_client.registry import Collector

from pdserve import plugins
from pdserve.counters import metric_families
from pdserve.errors import SetupError, Unavailable
from pdserve.instance.instance import Instance
from pdserve.instance.router_link import RouterLinks

MAX_TURN_S = 60.0  # of the engine thread; a router, too, gives up on an instance that makes no progress for so long
LOOP_TIMEOUT_S = 5.0  # for the event loop to answer, which takes milliseconds
CLIENT_TIMEOUT_S = 10.0  # without a byte from a client
Check = Callable[[], dict[str, object]]
WsgiApp = Callable[[dict[str, Any], Any], Iterable[bytes]]


def serve_metrics(port: int, instance: Instance, links: RouterLinks, vllm_model: str = "") -> None:
    """Listen on all addresses, until the process ends. To be called on the event loop.

    Args:
        vllm_model: export metrics by vLLM's names too, with this name of the model; empty: do not.

    Raises:
        SetupError: the port is in use.
    """
    checks = {"/health": lambda: check_health(instance), "/ready": lambda: check_readiness(links)}
    application = _application(checks, _registry(instance, vllm_model), asyncio.get_running_loop())
    try:
        server = make_server("", port, application, _Server, _RequestHandler)
    except OSError as error:
        raise SetupError(f"--metrics-port {port}: {error.strerror}") from error
    threading.Thread(target=server.serve_forever, name="metrics", daemon=True).start()


def check_health(instance: Instance) -> dict[str, object]:
    """Return the answer of /health.

    Raises:
        Unavailable: the engine thread hangs.
    """
    seconds = instance.seconds_in_turn
    if seconds > MAX_TURN_S:
        raise Unavailable(f"the engine thread has been busy with one step for {seconds:.0f} s", kind="not_alive")
    return {"status": "alive"}


def check_readiness(links: RouterLinks) -> dict[str, object]:
    """Return the answer of /ready.

    Raises:
        Unavailable: the instance drains, or no router has accepted it.
    """
    if links.is_draining:
        raise Unavailable("not ready: the instance drains", kind="not_ready", retry_after_s=1)
    if not links.num_attached:
        raise Unavailable("not ready: it is registered with no router", kind="not_ready", retry_after_s=1)
    return {"status": "ready", "routers": links.num_attached}


def _registry(instance: Instance, vllm_model: str) -> CollectorRegistry:
    """Return the metrics of the instance and of its process."""
    registry = CollectorRegistry()
    registry.register(_InstanceCollector(instance, vllm_model))
    for collector in (ProcessCollector, PlatformCollector, GCCollector):
        collector(registry=registry)
    return registry


def _application(checks: dict[str, Check], registry: CollectorRegistry, loop: asyncio.AbstractEventLoop) -> WsgiApp:
    """Return a WSGI application whose checks run on the event loop, so that they pass only if it responds as well."""
    metrics: WsgiApp = make_wsgi_app(registry)

    def application(environ: dict[str, Any], start_response: Any) -> Iterable[bytes]:
        check = checks.get(environ["PATH_INFO"])
        if check is None:
            return metrics(environ, start_response)
        try:
            body, status = _call_on(loop, check), HTTPStatus.OK
        except Unavailable as error:
            body, status = error.body(), HTTPStatus.SERVICE_UNAVAILABLE
        start_response(f"{status.value} {status.phrase}", [("Content-Type", "application/json")])
        return [json.dumps(body).encode()]

    return application


def _call_on(loop: asyncio.AbstractEventLoop, check: Check) -> dict[str, object]:
    async def call() -> dict[str, object]:
        return check()

    try:
        return asyncio.run_coroutine_threadsafe(call(), loop).result(LOOP_TIMEOUT_S)
    except TimeoutError:
        raise Unavailable(f"the event loop has not answered for {LOOP_TIMEOUT_S:g} s", kind="not_alive") from None


class _InstanceCollector(Collector):
    def __init__(self, instance: Instance, vllm_model: str) -> None:
        self._instance = instance
        self._vllm_model = vllm_model

    def collect(self) -> Iterable[Metric]:
        families = [*metric_families([({}, dict(self._instance.reporter.heartbeat.counters))])]
        yield from families
        if self._vllm_model:
            yield from plugins.extension("instance-vllm-metrics")(families, self._vllm_model)


class _Server(ThreadingMixIn, WSGIServer):
    daemon_threads = True


class _RequestHandler(WSGIRequestHandler):
    timeout = CLIENT_TIMEOUT_S

    def log_message(self, format: str, *args: Any) -> None:
        """Log nothing: a probe every few seconds would fill the log."""
