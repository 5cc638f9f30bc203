"""The router process: builds the HTTP server and the control server, and runs both on one event loop until a signal."""

import asyncio
import contextlib
import gc
import logging
import math
import os
import resource
import secrets
import signal
import socket
import ssl
import sys
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Mapping
from contextlib import AsyncExitStack
from dataclasses import replace
from functools import partial
from types import FrameType
from typing import TYPE_CHECKING, Any, cast

import uvicorn
import uvloop

from pdserve import plugins
from pdserve.config import INTERRUPT_GRACE_S, RouterConfig
from pdserve.control.certificates import check_key_pair, server_context
from pdserve.control.registry import Registry
from pdserve.grammars.compiler import START_AFTER_S, GrammarCompiler
from pdserve.keys import root_key
from pdserve.router.dispatch.dispatcher import Dispatcher
from pdserve.router.instances.control_server import ControlServer
from pdserve.router.instances.fleet import Fleet
from pdserve.router.limits.key_file import ApiKey, load_api_keys
from pdserve.router.limits.quota import Quota
from pdserve.router.limits.shared_quota import FileAccounts, RedisAccounts, SharedQuotas
from pdserve.router.parse_server import ParseServer
from pdserve.router.telemetry.events import EventLog
from pdserve.router.telemetry.metrics import Metrics
from pdserve.router.telemetry.timeline import log_finished
from pdserve.router.telemetry.tracing import Tracer
from pdserve.router.text.tokenizer import Tokenizer
from pdserve.router.web.admission import AdmissionController
from pdserve.router.web.app import create_app
from pdserve.router.web.application import Application
from pdserve.router.web.dialect import Dialect, load_dialects
from pdserve.router.web.grammar_checker import GrammarChecker
from pdserve.router.web.http_protocol import Connections, HttpProtocol
from pdserve.router.web.listening import listen
from pdserve.router.web.overview import HISTORY_INTERVAL_S, Overview
from pdserve.router.web.tls_listener import Handshake, TlsListener
from pdserve.router.web.warm_prompts import WarmPrompts, read_warm_prompts

if TYPE_CHECKING:
    from pdserve.interop.grpc_server import GrpcServer
    from pdserve.router.kv_events.subscriber import Subscriber

log = logging.getLogger(__name__)

HEAD_TIMEOUT_S = 10.0  # or less: --client-timeout-seconds
# Far longer than clients keep their idle connections (httpx, and so OpenAI's client, 5 s): a request that a slow client sends
# on a connection that is just being closed is lost.
KEEP_ALIVE_S = 60.0
MAX_CONNECTIONS = 16_384  # by default
UVICORN_TICKS_PER_S = 10
ATTACH_TIMEOUT_S = 5.0  # for which a router that shares its port waits for instances before it accepts connections


def serve(config: RouterConfig) -> None:
    """Run a router in this process until SIGTERM or SIGINT; does not return.

    Raises:
        SetupError: a port is taken; the package of an extra is missing; the tokenizer, a certificate or the key file cannot
            be read.
    """
    config.check_packages()
    _, most_files = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most_files, most_files))  # each instance takes one, and each client
    if config.ssl_certfile:
        check_key_pair("--ssl", config.ssl_certfile, config.ssl_keyfile)
    tls = server_context(config)
    keys = load_api_keys(config.api_key, config.keys_file, share_kv=config.share_kv)
    listening = [listen(config)]
    if config.own_port is not None:
        listening.append(listen(replace(config, port=config.own_port, own_port=None, reuse_port=False)))
    tokenizer = Tokenizer(
        config.model,
        special_tokens_in_messages=config.special_tokens_in_messages,
        trust_request_chat_template=config.trust_request_chat_template,
        tool_call_parser=config.tool_call_parser,
        reasoning_parser=config.reasoning_parser,
    )
    dialects = load_dialects()  # before the parse server is forked, which parses their bodies
    with ParseServer(tokenizer, listening) as parse_server:
        uvloop.run(_serve(config, keys, tls, tokenizer, dialects, parse_server, listening))
    # Everything is closed. Skip the clean-up of imported modules, which takes 0.3 s and releases nothing of pdserve.
    logging.shutdown()
    sys.stdout.flush()
    os._exit(0)


async def _serve(
    config: RouterConfig,
    keys: list[ApiKey],
    tls: ssl.SSLContext | None,
    tokenizer: Tokenizer,
    dialects: list[type[Dialect]],
    parse_server: ParseServer,
    listening: list[socket.socket],
) -> None:
    """Build all parts of the router, serve until a signal, and shut down in reverse order."""
    fleet = Fleet(f"router-{secrets.token_hex(4)}", config.name, config.instance_timeout_seconds, time.monotonic)
    metrics = Metrics(fleet, config.name if config.vllm_metrics else "")
    seed = secrets.randbits(32)  # random, so that routers that start together do not rotate in step
    dispatcher = Dispatcher(config, fleet, metrics, seed)
    events = EventLog()
    logging.getLogger("pdserve").addHandler(events)
    overview = Overview(dispatcher, metrics, events)
    admission = AdmissionController(keys, config, metrics, fleet.now, parse_server)
    fleet.on_reset = lambda: admission.begin_epoch(fleet.cache_epoch)
    bodies = read_warm_prompts(config.warm_prompts, keys) if config.warm_prompts else []
    async with AsyncExitStack() as stack:
        _report_finished(config, dispatcher, stack)
        control = ControlServer(fleet, config.control_token)
        stack.push_async_callback(control.close)
        control_port = await control.listen(config.control_host, config.control_port, tls)
        grammars = _grammar_checker(config.model, metrics)
        stack.callback(grammars.close)
        app = create_app(
            config,
            tokenizer,
            dispatcher,
            admission,
            metrics.parts,
            dispatcher.timelines.latest,
            overview.snapshot,
            grammars,
            dialects,
        )
        stack.push_async_callback(app.close)
        app.start()
        ports = f"clients on port {listening[0].getsockname()[1]}, instances on port {control_port}"
        rpc = None
        if config.grpc_port is not None:
            rpc = plugins.extension("router-grpc")(config, config.grpc_port, tokenizer, dispatcher, admission, grammars)
            stack.push_async_callback(rpc.close)
            ports += f", gRPC on port {rpc.port}"
        server = _DrainingServer(app, config, metrics, fleet, ports, rpc)
        for number in (signal.SIGINT, signal.SIGTERM):
            asyncio.get_running_loop().add_signal_handler(number, server.handle_exit, number, None)
        subscribers = _kv_event_subscribers(config, fleet, dispatcher, metrics)
        quota_loops = _quota_loops(config, metrics, fleet.router_id, admission.queue.quotas, control_port, stack)
        loops = [  # last, since a coroutine that an error keeps from running is warned about
            _repeat(fleet.expire_leases, fleet.lease_check_interval_s),
            _repeat(dispatcher.check_progress, dispatcher.check_interval_s),
            _repeat(overview.record, HISTORY_INTERVAL_S),
            *(subscriber.run() for subscriber in subscribers),
            *quota_loops,
            _start_grammars(grammars, dispatcher),
            *([WarmPrompts(bodies, tokenizer, dispatcher, admission).run()] if bodies else ()),
        ]
        # Without the loops there are no timeouts and no leases, so the router stops if one of them ends.
        await stack.enter_async_context(_running(loops, on_end=lambda: server.handle_exit(signal.SIGINT, None)))
        if config.reuse_port:
            await _wait_for_instances(dispatcher, server)
        await server.serve(sockets=listening)


@contextlib.asynccontextmanager
async def _running(loops: list[Coroutine[Any, Any, None]], on_end: Callable[[], None]) -> AsyncIterator[None]:
    """Run coroutines as tasks until the context ends, and call `on_end` if one of them ends earlier.

    Raises:
        Exception: at the end of the context, what one of them raised.
    """
    tasks = [asyncio.create_task(loop) for loop in loops]
    for task in tasks:
        task.add_done_callback(lambda _: on_end())
    try:
        yield
    finally:
        for task in tasks:
            task.cancel()
        results = await asyncio.gather(*tasks, return_exceptions=True)
    for result in results:
        if isinstance(result, Exception):
            raise result


def _report_finished(config: RouterConfig, dispatcher: Dispatcher, stack: AsyncExitStack) -> None:
    """Export and log finished requests as configured, until the stack is closed."""
    if config.otlp_endpoint:
        tracer = Tracer(config.otlp_endpoint, config.name)
        stack.push_async_callback(asyncio.to_thread, tracer.close)
        dispatcher.finish_listeners.append(tracer.export)
    if config.log_requests:
        dispatcher.finish_listeners.append(log_finished)


def _quota_loops(
    config: RouterConfig,
    metrics: Metrics,
    router_id: str,
    quotas: Mapping[str, Quota],
    control_port: int,
    stack: AsyncExitStack,
) -> list[Coroutine[Any, Any, None]]:
    """Return what announces this router and shares its quotas with others, or keeps them in a file."""
    if config.registry:
        registry = Registry(config.registry, config.name, config.control_token, metrics.registry_failures.inc)
        stack.push_async_callback(registry.close)
        announcing = registry.announce(config.announce_host or config.control_host, control_port)
        return [announcing, SharedQuotas(RedisAccounts(registry), router_id, quotas).run()]
    return [SharedQuotas(FileAccounts(config.quota_file), router_id, quotas).run()] if config.quota_file else []


def _kv_event_subscribers(
    config: RouterConfig, fleet: Fleet, dispatcher: Dispatcher, metrics: Metrics
) -> "list[Subscriber]":
    if not config.kv_events_subscribe:
        return []

    def root() -> bytes | None:
        info = dispatcher.model
        return None if info is None else root_key(model_digest=info.model_digest)

    subscribers: list[Subscriber] = plugins.extension("router-kv-events")(
        config.kv_events_subscribe, fleet.stored, root, metrics.count_kv_event_batches
    )
    return subscribers


def _grammar_checker(model: str, metrics: Metrics) -> GrammarChecker:
    checker = GrammarChecker(
        lambda info: GrammarCompiler(model, info.vocab_size, info.eos_token_ids),
        lambda result: metrics.grammars.labels(result=result).inc(),
    )
    metrics.grammars_waiting.set_function(lambda: checker.num_waiting)
    return checker


async def _start_grammars(grammars: GrammarChecker, dispatcher: Dispatcher) -> None:
    """Have grammars ready to be checked, once there is an instance to tell the vocabulary."""
    while (info := dispatcher.model) is None:
        await asyncio.sleep(0.05)
    await asyncio.sleep(START_AFTER_S)
    grammars.start(info)
    await asyncio.Event().wait()


async def _repeat(action: Callable[[], None], interval_s: float) -> None:
    """Call the action at this interval until cancelled."""
    while True:
        await asyncio.sleep(interval_s)
        action()


async def _wait_for_instances(dispatcher: Dispatcher, server: uvicorn.Server) -> None:
    """Wait until the router is ready, while other routers accept the connections to the shared port.

    The wait is limited to `ATTACH_TIMEOUT_S`, because all routers may be waiting.
    """
    deadline = time.monotonic() + ATTACH_TIMEOUT_S
    while not dispatcher.ready()[0] and not server.should_exit and time.monotonic() < deadline:
        await asyncio.sleep(0.05)


class HttpServer(uvicorn.Server):
    """uvicorn's server with our protocol and its limits: serves an application to HTTP clients, over TLS if so configured.

    Time-outs count ticks of about a second, between which the event loop has read all sockets, so a stall of the router cuts
    no client off.
    """

    def __init__(self, app: Any, config: RouterConfig, metrics: Metrics) -> None:
        settings = uvicorn.Config(
            app,
            http=HttpProtocol,
            ws="none",
            log_config=None,  # uvicorn logs through the root logger, whose format escapes what clients send
            log_level="warning",
            access_log=False,
            lifespan="off",
            proxy_headers=False,
        )
        super().__init__(settings)
        self.tls: ssl.SSLContext | None = None
        if config.ssl_certfile:
            self.tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
            self.tls.load_cert_chain(config.ssl_certfile, config.ssl_keyfile)
        self.server_state = self.open = Connections(
            config.max_connections or default_max_connections(),
            round(max(1, min(HEAD_TIMEOUT_S, config.client_timeout_seconds))),
            round(KEEP_ALIVE_S),
            max(1, round(config.client_timeout_seconds)),
            lambda kind: metrics.refused_connections.labels(reason=kind).inc(),
        )
        metrics.connections.set_function(lambda: len(self.open.connections))

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Accept connections on the given sockets, which are bound."""
        if self.tls is None:
            await super().startup(sockets)
            return
        assert sockets is not None
        make_protocol = partial(HttpProtocol, self.config, self.open, {})
        for listener in sockets:
            listener.listen(self.config.backlog)
        listeners = [TlsListener(listener, self.tls, self.open, make_protocol) for listener in sockets]
        self.servers = cast(list[asyncio.Server], listeners)
        self.started = True

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self.open.is_shutting_down = True
        await super().shutdown(sockets)

    async def on_tick(self, counter: int) -> bool:
        if counter % UVICORN_TICKS_PER_S == 0:
            for connection in list(self.open.connections):
                cast(HttpProtocol | Handshake, connection).on_tick()
        return await super().on_tick(counter)


def default_max_connections() -> int:
    """Return three quarters of the file descriptors that the process may open; the rest is for instances and files."""
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return MAX_CONNECTIONS if limit == resource.RLIM_INFINITY else max(1, min(MAX_CONNECTIONS, limit * 3 // 4))


class _DrainingServer(HttpServer):
    """HTTP server with a graceful shutdown: SIGTERM drains the requests; Ctrl-C or a second signal exits soon.

    uvicorn's own signal handlers raise the signal again at the end, which would cut off the rest of our shutdown.
    """

    def __init__(
        self,
        app: Application,
        config: RouterConfig,
        metrics: Metrics,
        fleet: Fleet,
        ports: str,
        rpc: "GrpcServer | None",
    ) -> None:
        super().__init__(app, config, metrics)
        self._fleet = fleet
        self._ports = ports
        self._rpc = rpc
        self._drain_seconds = math.ceil(config.drain_seconds)

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        if self._rpc is not None:
            await self._rpc.start()
        gc.freeze()  # exempt what is loaded from collection: a scan takes 0.1 s and stalls all streams
        gc.set_threshold(20_000)  # young objects per collection; the default is 700
        log.info("router: %s", self._ports)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Begin the shutdown; a second call forces the exit."""
        grace = self._drain_seconds if sig == signal.SIGTERM else min(INTERRUPT_GRACE_S, self._drain_seconds)
        self.config.timeout_graceful_shutdown = grace
        if not self.should_exit:
            log.info("shutting down: running requests may take %d s", grace)
        self.force_exit, self.should_exit = self.should_exit, True
        self._fleet.is_closing = True
        if self._rpc is not None:
            self._rpc.begin_stop(0 if self.force_exit else grace)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        await super().shutdown(sockets)
        if self._rpc is not None:
            await self._rpc.close()

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Replace uvicorn's signal handlers by none; see the class."""
        yield
