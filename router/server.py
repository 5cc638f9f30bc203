"""The process of one router: the HTTP server and the control server on one event loop, from start to end."""

import asyncio
import contextlib
import gc
import logging
import math
import os
import secrets
import signal
import socket
import ssl
import time
from collections.abc import Iterator
from dataclasses import replace
from types import FrameType
from typing import Any

import uvicorn
import uvloop
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from pdserve.config import RouterConfig
from pdserve.control.certificates import check_pair, server_context
from pdserve.control.corked import Corked
from pdserve.control.registry import Registry
from pdserve.errors import SetupError
from pdserve.router.dispatch.dispatcher import Dispatcher
from pdserve.router.instances.control import Control
from pdserve.router.instances.fleet import Fleet
from pdserve.router.limits.key_file import Key, declared
from pdserve.router.limits.shared_quota import SharedQuotas
from pdserve.router.scheduling.policy import POLICIES
from pdserve.router.telemetry.events import Events
from pdserve.router.telemetry.metrics import Metrics
from pdserve.router.telemetry.timeline import log_ended
from pdserve.router.telemetry.tracing import Tracer
from pdserve.router.text.tokenizer import Tokenizer
from pdserve.router.web.admission import AdmissionController
from pdserve.router.web.app import create_app
from pdserve.router.web.listening import listen
from pdserve.router.web.overview import Overview

log = logging.getLogger(__name__)

INTERRUPTED_S = 5  # for requests to end after Ctrl-C
ATTACH_S = 5.0  # a router that shares its port waits so long for instances before it takes connections


def serve(config: RouterConfig) -> None:
    """Runs a router in this process until SIGTERM or SIGINT.

    Raises:
        SetupError: a port is taken, the tokenizer, a certificate or the file of keys cannot be read, the policy is unknown.
    """
    config = replace(
        config,
        api_key=config.api_key or os.environ.get("PDSERVE_API_KEY", ""),
        control_token=config.control_token or os.environ.get("PDSERVE_CONTROL_TOKEN", ""),
        admin_key=config.admin_key or os.environ.get("PDSERVE_ADMIN_KEY", ""),
    )
    for flag in ("policy", "prefill_policy", "decode_policy"):
        name = getattr(config, flag) or config.policy
        if name not in POLICIES:
            known = ", ".join(POLICIES)
            raise SetupError(f"--{flag.replace('_', '-')} {name} is unknown; there are {known}")
    if config.ssl_certfile:
        check_pair("--ssl", config.ssl_certfile, config.ssl_keyfile)
    tls = server_context(config)
    keys = declared(config.api_key, config.keys_file)
    listening = [listen(config)]
    if config.own_port is not None:
        listening.append(listen(replace(config, port=config.own_port, own_port=None, reuse_port=False)))
    tokenizer = Tokenizer(config.model)
    uvloop.run(_serve(config, keys, tls, tokenizer, listening))


async def _serve(
    config: RouterConfig,
    keys: list[Key],
    tls: ssl.SSLContext | None,
    tokenizer: Tokenizer,
    listening: list[socket.socket],
) -> None:
    fleet = Fleet(f"router-{secrets.token_hex(4)}", config.name, config.lease_seconds)
    metrics = Metrics(fleet)
    registry = None
    if config.registry:
        registry = Registry(config.registry, config.name, config.control_token, metrics.registry_failures.inc)
    dispatcher = Dispatcher(config, fleet, metrics)
    tracer = Tracer(config.otlp_endpoint) if config.otlp_endpoint else None
    if tracer is not None:
        dispatcher.watchers.append(tracer.finished)
    if config.log_requests:
        dispatcher.watchers.append(log_ended)
    events = Events()
    logging.getLogger("pdserve").addHandler(events)
    overview = Overview(dispatcher, metrics, events)
    admission = AdmissionController(keys, config, metrics)
    app = create_app(config, tokenizer, dispatcher, admission, metrics.text, dispatcher.timelines.latest, overview.now)
    control = Control(fleet, config.control_token)
    control_port = await control.listen(config.control_host, config.control_port, tls)
    https: dict[str, Any] = (
        {"ssl_certfile": config.ssl_certfile, "ssl_keyfile": config.ssl_keyfile} if config.ssl_certfile else {}
    )
    settings = uvicorn.Config(
        app,
        http=CorkedHttp,
        ws="none",
        log_level="warning",
        access_log=False,
        lifespan="off",
        proxy_headers=False,
        **https,
    )
    ports = f"clients on port {listening[0].getsockname()[1]}, instances on port {control_port}"
    server = _Server(settings, config.drain_seconds, ports)
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, server.handle_exit, number, None)
    watching = [fleet.watch(), dispatcher.watch()]
    if registry is not None:
        watching.append(registry.announce(config.announce_host or config.control_host, control_port))
        watching.append(SharedQuotas(registry, fleet.router_id, admission.quotas).run())
    watches = [asyncio.create_task(watch) for watch in watching]
    for watch in watches:  # without one of them nothing would ever be late, and no instance lost
        watch.add_done_callback(lambda _: server.handle_exit(signal.SIGINT, None))
    try:
        if config.reuse_port:
            await _attached(dispatcher, server)
        await server.serve(sockets=listening)
    finally:
        for watch in watches:
            watch.cancel()
        ended = await asyncio.gather(*watches, return_exceptions=True)
        if registry is not None:
            await registry.close()
        await control.close()
        if tracer is not None:
            await asyncio.to_thread(tracer.close)
        for defect in ended:
            if isinstance(defect, Exception):
                raise defect


async def _attached(dispatcher: Dispatcher, server: uvicorn.Server) -> None:
    """Until instances are there: others take the connections meanwhile. Not for long, as they may be waiting too."""
    give_up = time.monotonic() + ATTACH_S
    while not dispatcher.ready()[0] and not server.should_exit and time.monotonic() < give_up:
        await asyncio.sleep(0.05)


class CorkedHttp(HttpToolsProtocol):
    """uvicorn's, which writes the head and the body of an answer apart."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(Corked(transport))  # type: ignore[arg-type]  # all that is used of a transport


class _Server(uvicorn.Server):
    """Ends at SIGTERM once its requests have ended, at another or at Ctrl-C soon.

    uvicorn's own handlers raise the signal once more when it has ended, and what is closed after that would be cut off.
    """

    def __init__(self, config: uvicorn.Config, drain_seconds: float, ports: str) -> None:
        super().__init__(config)
        self._ports = ports
        self._drain_seconds = math.ceil(drain_seconds)

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        gc.freeze()  # what is loaded stays: walking through it takes 0.1 s, in which no stream moves
        gc.set_threshold(20_000)  # young objects, instead of 700
        log.info("router: %s", self._ports)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        patience = self._drain_seconds if sig == signal.SIGTERM else min(INTERRUPTED_S, self._drain_seconds)
        self.config.timeout_graceful_shutdown = patience
        if not self.should_exit:
            log.info("ending: what is under way may take %d s", patience)
        self.force_exit, self.should_exit = self.should_exit, True

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield
