"""Client processes: each plays a share of the requests, so that neither drawing progress nor the other shares delay it."""

import asyncio
import gc
import multiprocessing
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection, wait

import uvloop

from pdserve.errors import SetupError
from pdserve.tools.bench.load import Load, Target
from pdserve.tools.bench.requests import Request, Sample

FLUSH_S = 0.2  # between two reports of a process
HEAD_START_S = 0.1  # from the command to begin until time 0


@dataclass
class Run:
    """Results of all client processes of a run."""

    samples: list[Sample] = field(default_factory=list)
    interrupted: int = 0  # requests in flight when the run was stopped
    stopped: bool = False
    cpu_shares: list[float] = field(default_factory=list)  # CPU seconds per second of each process


@dataclass(frozen=True)
class _Ended:
    interrupted: int
    cpu_share: float


def play(requests: Sequence[Request], target: Target, processes: int, on_samples: Callable[[Run], None]) -> Run:
    """Play the requests from client processes. Ctrl-C ends the run; what was measured until then counts.

    Raises:
        SetupError: a client process ended by itself.
    """
    shares = _split(requests, processes)
    context, run = multiprocessing.get_context("spawn"), Run()
    connections: list[Connection] = []
    children = []
    try:
        for number, share in enumerate(shares):
            ours, theirs = context.Pipe()
            own = replace(target, max_concurrency=_part(target.max_concurrency, len(shares), number))
            child = context.Process(target=work, args=(theirs, share, own), daemon=True)
            with _blocked_interrupts():
                child.start()
            theirs.close()
            connections.append(ours)
            children.append(child)
        for connection in connections:
            connection.recv()
        begin = time.perf_counter() + HEAD_START_S  # one clock for all processes of a machine
        for connection in connections:
            connection.send(begin)
        with _stop_on_interrupt(connections, run):
            _collect(connections, run, on_samples)
    except EOFError:
        raise SetupError("a client process ended unexpectedly; its error is above") from None
    finally:
        for child in children:
            child.join(5)
            child.kill()
    run.samples.sort(key=lambda sample: sample.index)
    return run


@contextmanager
def _blocked_interrupts() -> Iterator[None]:
    """Within this context, block SIGINT, as a process that is started inherits: it shall not end while it imports."""
    resource_tracker.ensure_running()  # which would unblock it, when the first process is started
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _collect(connections: Sequence[Connection], run: Run, on_samples: Callable[[Run], None]) -> None:
    left = list(connections)
    while left:
        for ready in wait(left, 1.0):
            assert isinstance(ready, Connection)
            message = ready.recv()
            if isinstance(message, _Ended):
                run.interrupted += message.interrupted
                run.cpu_shares.append(message.cpu_share)
                left.remove(ready)
            else:
                run.samples += message
        on_samples(run)


@contextmanager
def _stop_on_interrupt(connections: Sequence[Connection], run: Run) -> Iterator[None]:
    """On Ctrl-C, tell the processes to stop; on the second, end. An exception would tear the message being received."""

    def stop(*_: object) -> None:
        if run.stopped:
            raise KeyboardInterrupt
        run.stopped = True
        for connection in connections:
            with suppress(OSError):  # it has ended
                connection.send("stop")

    previous = signal.signal(signal.SIGINT, stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, previous)


def _split(requests: Sequence[Request], processes: int) -> list[list[Request]]:
    """Deal conversations to the processes in turn; the turns of one stay together."""
    home: dict[int, int] = {}
    shares: list[list[Request]] = [[] for _ in range(processes)]
    dealt = 0
    for one in requests:
        if one.after is None:
            home[one.index], dealt = dealt % processes, dealt + 1
        else:
            home[one.index] = home[one.after]
        shares[home[one.index]].append(one)
    return [share for share in shares if share]


def _part(whole: int | None, parts: int, number: int) -> int | None:
    return None if whole is None else max(1, whole // parts + (number < whole % parts))


# ---- in a client process


def work(parent: Connection, requests: list[Request], target: Target) -> None:
    """Play a share of the requests when told to begin, and report samples as they come."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent says when to stop
    uvloop.run(_work(parent, requests, target))


async def _work(parent: Connection, requests: list[Request], target: Target) -> None:
    parent.send("ready")
    begin: float = parent.recv()
    gc.freeze()
    samples: list[Sample] = []
    stop, loop = asyncio.Event(), asyncio.get_running_loop()
    loop.add_reader(parent.fileno(), stop.set)  # it says "stop", or is gone

    async def report() -> None:
        while True:
            await asyncio.sleep(FLUSH_S)
            flush()

    def flush() -> None:
        if samples:
            parent.send(samples[:])
            samples.clear()

    reporting = asyncio.create_task(report())
    cpu = time.process_time()
    interrupted = await Load(target, begin, samples.append).play(requests, stop)
    share = (time.process_time() - cpu) / max(time.perf_counter() - begin, 1e-9)
    reporting.cancel()
    loop.remove_reader(parent.fileno())
    flush()
    parent.send(_Ended(interrupted, share))
