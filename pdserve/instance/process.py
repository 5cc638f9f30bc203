"""The process of one instance: load, attach to the routers, serve until told to stop."""

import asyncio
import gc
import importlib.util
import logging
import os
import signal
import socket
import sys
import threading
import time
from dataclasses import asdict

import torch
import uvloop
from prometheus_client import REGISTRY, start_http_server
from prometheus_client.core import Metric
from prometheus_client.registry import Collector

from pdserve.config import InstanceConfig
from pdserve.control.certificates import client_context
from pdserve.control.registry import Registry
from pdserve.control.wire import PROTOCOL_VERSION
from pdserve.counters import families
from pdserve.errors import SetupError
from pdserve.instance.engine_loop import Instance
from pdserve.instance.router_link import Links
from pdserve.kv_transfer.threaded import SWITCH_INTERVAL_S
from pdserve.proto import pdserve_pb2 as pb

log = logging.getLogger(__name__)

DRAIN_POLL_S = 0.2
CLOSE_S = 2.0  # for routers to read what was queued for them


def serve(role: str, config: InstanceConfig) -> None:
    """Runs an instance in this process until SIGTERM or SIGINT.

    Raises:
        SetupError: the model, the memory, the connector, a port or a certificate is not there.
    """
    # The engine thread may run Python for a whole step; frames that arrive or leave must not wait for it as long as the
    # default of 5 ms.
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    if config.threads is not None:
        torch.set_num_threads(config.threads)
    torch.manual_seed(config.seed)
    uvloop.run(_serve(role, config))
    # Everything is closed. What is left is torch's own clean-up, which takes a second and cleans nothing of ours.
    logging.shutdown()
    sys.stdout.flush()
    os._exit(0)


async def _serve(role: str, config: InstanceConfig) -> None:
    token = config.control_token or os.environ.get("PDSERVE_CONTROL_TOKEN", "")
    registry = None
    if config.registry:
        registry = Registry(config.registry, config.name, token, lambda: instance.note("lookups_of_routers_failed"))
    links = Links([] if registry else config.routers, token, registry, client_context(config))
    started = time.monotonic()
    instance = Instance(config, links.send)
    if config.metrics_port is not None:
        _serve_metrics(config.metrics_port, instance)
    hello = _hello(role, config, instance)
    gc.freeze()  # what is loaded stays: walking through it takes 0.1 s, in which no token is made
    log.info("%s", describe(hello, time.monotonic() - started))
    stop, loop = asyncio.Event(), asyncio.get_running_loop()
    loop.add_signal_handler(signal.SIGINT, stop.set)
    loop.add_signal_handler(signal.SIGTERM, links.drains.put_nowait, "")
    thread = threading.Thread(target=_run_engine, args=(instance,), name="engine")
    thread.start()
    serving = asyncio.create_task(links.run(instance, hello))
    serving.add_done_callback(lambda _: stop.set())
    draining = asyncio.create_task(_drain(links, instance, hello, stop, config.drain_seconds))
    await stop.wait()
    draining.cancel()
    serving.cancel()
    (ended,) = await asyncio.gather(serving, return_exceptions=True)
    instance.stop()
    await asyncio.to_thread(thread.join)
    if isinstance(ended, Exception):
        raise RuntimeError("the links to the routers ended by themselves") from ended


async def _drain(links: Links, instance: Instance, hello: pb.Hello, stop: asyncio.Event, seconds: float) -> None:
    """For each drain that is asked for: routers move or await what runs here, then it serves in another role, or ends."""
    while True:
        role = await links.drains.get()
        if not role:
            asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stop.set)  # a second one ends it at once
        log.info("draining: %d requests are here", instance.num_jobs)
        links.drain()
        deadline = time.monotonic() + seconds
        await asyncio.sleep(DRAIN_POLL_S)  # what routers sent before they knew is still on its way
        await asyncio.wait([asyncio.wrap_future(instance.caught_up())], timeout=seconds)
        # To end is more urgent than to change the role.
        while instance.num_jobs and time.monotonic() < deadline and not (role and links.drains.qsize()):
            await asyncio.sleep(DRAIN_POLL_S)
        if not role:
            break
        # What is still here goes on: roles only tell routers what to ask for.
        hello.role = role
        links.serve_as(hello)
        log.info("%s serves as %s now", hello.instance_id, role)
    if instance.num_jobs:
        log.warning("not drained within %g s: %d requests are cut off", seconds, instance.num_jobs)
    links.close()
    await asyncio.sleep(CLOSE_S)
    stop.set()


def _run_engine(instance: Instance) -> None:
    """A defect in the engine must not leave a process that looks alive: routers learn of its death at once."""
    try:
        instance.run()
    except BaseException:
        log.exception("the engine stopped on an error; the instance ends")
        logging.shutdown()
        os._exit(70)


def _hello(role: str, config: InstanceConfig, instance: Instance) -> pb.Hello:
    engine = instance.engine
    return pb.Hello(
        instance_id=config.instance_id or f"{role}-{socket.gethostname()}-{os.getpid()}",
        role=role,
        model=config.name,
        namespace=engine.layout.namespace,
        epoch=time.time_ns(),
        block_size=engine.layout.block_size,
        num_blocks=engine.pool.num_blocks,
        block_bytes=engine.layout.block_bytes,
        max_model_len=engine.max_model_len,
        vocab_size=engine.checkpoint.vocab_size,
        connector=instance.connector.scheme,
        device=str(engine.checkpoint.device),
        dtype=engine.layout.dtype,
        kernel=engine.runner.kernel.NAME,
        eos_token_ids=sorted(engine.checkpoint.eos_token_ids),
        protocol_version=PROTOCOL_VERSION,
        layout=pb.Layout(**asdict(engine.layout)),
        convert_kv=config.convert_kv,
        scheduling_policy=config.scheduling_policy,
        grammars=importlib.util.find_spec("xgrammar") is not None,
    )


def describe(hello: pb.Hello, seconds: float) -> str:
    """One line for people: what this instance is."""
    gib = hello.num_blocks * hello.block_bytes / 2**30
    return (
        f"{hello.instance_id}: {hello.model} in {hello.dtype} on {hello.device}, {hello.kernel} kernel, "
        f"{hello.num_blocks} blocks of {hello.block_size} tokens ({gib:.2f} GiB), over {hello.connector}://, "
        f"ready in {seconds:.1f} s"
    )


def _serve_metrics(port: int, instance: Instance) -> None:
    class Counts(Collector):
        def collect(self) -> list[Metric]:
            return families([({}, dict(instance.load.counters))])

    REGISTRY.register(Counts())
    try:
        start_http_server(port)
    except OSError as error:
        raise SetupError(f"--metrics-port {port}: {error.strerror}") from error
