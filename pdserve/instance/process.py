"""Instance process: load the model, attach to the routers, serve until SIGTERM or SIGINT."""

import asyncio
import gc
import logging
import os
import signal
import sys
import threading
import time

import torch
import uvloop

from pdserve import plugins
from pdserve.config import InstanceConfig
from pdserve.control.certificates import client_context
from pdserve.control.registry import Registry
from pdserve.cores import num_cores
from pdserve.engine.parallel.rank_group import RankLost
from pdserve.errors import SetupError
from pdserve.grammars.compiler import START_AFTER_S
from pdserve.instance.affinity import run_beside
from pdserve.instance.gpu_fault import gpu_fault
from pdserve.instance.hello import make_hello
from pdserve.instance.instance import Instance
from pdserve.instance.kv_events_config import KVEventsConfig
from pdserve.instance.metrics_port import check_health, check_readiness, serve_metrics
from pdserve.instance.router_link import DRAIN_POLL_S, RouterLinks
from pdserve.kv_transfer.batched import SWITCH_INTERVAL_S
from pdserve.profile.drift import check_match
from pdserve.profile.profile import EngineFacts, Machine, Profile
from pdserve.proto import pdserve_pb2 as pb

log = logging.getLogger(__name__)

FAILURE_GRACE_S = 0.2  # for the event loop to send the last frame
CLOSE_GRACE_S = 2.0  # for routers to read their queued frames


def serve(role: str, config: InstanceConfig) -> None:
    """Run an instance in this process until SIGTERM or SIGINT; does not return.

    Raises:
        SetupError: the model, memory, connector, port or certificate is unavailable.
    """
    # The engine thread may run Python code for a whole step. Frames must not wait for the GIL for the default 5 ms.
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    if config.threads is not None:
        torch.set_num_threads(config.threads)
    elif (cores := num_cores()) < torch.get_num_threads():  # torch does not know the quota of a container
        torch.set_num_threads(cores)
    if torch.cuda.is_available() and not config.paced:
        run_beside(config.device)
    torch.manual_seed(config.seed)
    uvloop.run(_serve(role, config))
    # Everything is closed. Skip torch's clean-up, which takes a second and releases nothing of pdserve.
    logging.shutdown()
    sys.stdout.flush()
    os._exit(0)


async def _serve(role: str, config: InstanceConfig) -> None:
    token = config.control_token
    registry = None
    if config.registry:
        registry = Registry(
            config.registry, config.name, token, lambda: instance.count_threadsafe("lookups_of_routers_failed")
        )
    links = RouterLinks([] if registry else config.routers, token, registry, client_context(config))
    kv_events = KVEventsConfig.load_setting(config.kv_events_config)
    _import_extensions(config, kv_events)
    started = time.monotonic()
    instance = _create_instance(config, links)
    if config.profile or config.paced:
        instance.reporter.watch(_load_profile(config, instance))
    if kv_events.is_on:
        instance.publish_events(kv_events)
    if config.metrics_port is not None:
        serve_metrics(config.metrics_port, instance, links, config.name if config.vllm_metrics else "")
    if config.grpc_health_port is not None:
        checks = {"liveness": lambda: check_health(instance), "readiness": lambda: check_readiness(links)}
        address = ("0.0.0.0", config.grpc_health_port)
        probes = plugins.extension("instance-grpc")(
            address, {"": checks["readiness"], **checks}, max_message_bytes=64 << 10
        )
        await probes.start()
        log.info("gRPC health checks on port %d", probes.port)
    hello = make_hello(role, config, instance)
    gc.freeze()  # loaded objects stay: a full collection would pause token generation for 0.1 s
    log.info("%s", describe(hello, time.monotonic() - started))
    stop, loop = asyncio.Event(), asyncio.get_running_loop()
    starting = loop.call_later(START_AFTER_S, instance.engine.start_grammars)
    loop.add_signal_handler(signal.SIGINT, stop.set)
    loop.add_signal_handler(signal.SIGTERM, links.drain_requests.put_nowait, "")
    instance.on_adapters_changed = lambda found: loop.call_soon_threadsafe(links.announce_adapters, hello, found)
    thread = threading.Thread(target=_run_engine, args=(instance, links, loop), name="engine")
    thread.start()
    serving = asyncio.create_task(links.run(instance, hello))
    serving.add_done_callback(lambda _: stop.set())
    draining = asyncio.create_task(_drain(links, instance, hello, stop, config.drain_seconds))
    await stop.wait()
    starting.cancel()
    draining.cancel()
    serving.cancel()
    (outcome,) = await asyncio.gather(serving, return_exceptions=True)
    instance.stop()
    await asyncio.to_thread(thread.join)
    if isinstance(outcome, Exception):
        raise RuntimeError("the router links ended unexpectedly") from outcome


def _import_extensions(config: InstanceConfig, kv_events: KVEventsConfig) -> None:
    """Import the extensions that settings ask for: what is missing shall be said before a model is loaded for minutes."""
    if kv_events.is_on:
        plugins.extension("instance-kv-events")
    if config.grpc_health_port is not None:
        plugins.extension("instance-grpc")


def _create_instance(config: InstanceConfig, links: RouterLinks) -> Instance:
    """Return the instance, with its kernels compiled and its steps measured.

    Raises:
        SetupError: also for a GPU that cannot run the model, which a restart would not change.
    """
    try:
        return Instance.start(config, links.send)
    except Exception as error:
        if (fault := gpu_fault(error)) is None:
            raise
        raise SetupError(fault) from error


def _load_profile(config: InstanceConfig, instance: Instance) -> Profile:
    """Return the profile with which steps are compared. That of `--paced` is of another machine, and may be."""
    if not config.profile:
        return Profile.load_setting("--paced", config.paced)
    profile = Profile.load_setting("--profile", config.profile)
    if not config.paced:
        engine = instance.engine
        machine = Machine(device=str(engine.checkpoint.device), numerics=engine.layout.numerics)
        live = Profile(model=config.name, machine=machine, engine=EngineFacts(dtype=engine.layout.dtype))
        if reason := check_match(profile, live, force=config.force):
            log.warning("%s", reason)
    return profile


async def _drain(links: RouterLinks, instance: Instance, hello: pb.Hello, stop: asyncio.Event, seconds: float) -> None:
    """Handle drain requests: wait until routers have migrated or finished all requests, then change the role or exit."""
    while True:
        role = await links.drain_requests.get()
        if not role:
            asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stop.set)  # a second SIGTERM exits at once
        log.info("draining %d requests", instance.num_jobs)
        links.drain()
        deadline = time.monotonic() + seconds
        await asyncio.sleep(DRAIN_POLL_S)  # requests sent before the Draining frame arrived are still on their way
        await asyncio.wait([asyncio.wrap_future(instance.drain_inbox())], timeout=seconds)
        # A request to exit interrupts a change of role.
        while instance.num_jobs and time.monotonic() < deadline and not (role and links.drain_requests.qsize()):
            await asyncio.sleep(DRAIN_POLL_S)
        if not role:
            break
        # Unfinished requests continue: the role only tells routers which requests to send.
        hello.role = role
        links.serve_as(hello)
        log.info("%s now serves as %s", hello.instance_id, role)
    if instance.num_jobs:
        log.warning("not drained within %g s: %d requests are aborted", seconds, instance.num_jobs)
    links.close()
    await asyncio.sleep(CLOSE_GRACE_S)
    stop.set()


def _run_engine(instance: Instance, links: RouterLinks, loop: asyncio.AbstractEventLoop) -> None:
    """Run the engine thread. An exception ends the process, so that routers notice the failure at once.

    After most failures of a GPU, such as an Xid, only a new process can use it again.
    """
    try:
        instance.run()
    except RankLost as error:
        log.error("%s; the instance exits", error)
        logging.shutdown()
        os._exit(70)
    except BaseException as error:
        if (fault := gpu_fault(error)) is None:
            log.exception("the engine failed; the instance exits")
        else:
            log.critical("%s; the instance exits, and its streams move", fault)
        instance.announce_failure()
        loop.call_soon_threadsafe(links.close)  # so that none is dialled again meanwhile
        time.sleep(FAILURE_GRACE_S)
        logging.shutdown()
        os._exit(70)


def describe(hello: pb.Hello, seconds: float) -> str:
    """Return a one-line summary of the instance for the log."""
    ranks = hello.layout.ranks
    gib = hello.num_blocks * hello.block_bytes * ranks / 2**30
    devices = hello.device + (f" and {ranks - 1} more" if ranks > 1 else "")
    return (
        f"{hello.instance_id}: {hello.model} in {hello.dtype} on {devices}, {hello.kernel} kernel, "
        f"{hello.num_blocks} blocks of {hello.block_size} tokens ({gib:.2f} GiB), over {hello.connector}://, "
        f"speculation {hello.speculate}, "
        f"ready in {seconds:.1f} s"
    )
