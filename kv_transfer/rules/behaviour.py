"""Rules about the connector's effects on its caller and process: blocking, timeouts, cancellation, counters, clean-up."""

import logging
import os
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from functools import partial
from typing import Any, TypeVar

from pdserve.kv_transfer.connector import OperationFuture, Outcome, Result, request_cancel
from pdserve.kv_transfer.header import Row
from pdserve.kv_transfer.rules.blocks import run_concurrently
from pdserve.kv_transfer.rules.context import (
    WAIT_LIMIT_S,
    AttachedPool,
    KiB,
    MiB,
    RuleContext,
    count_open_files,
    expect,
    expect_outcomes,
    new_keys,
    stamp,
    summarize,
    wait_until,
)
from pdserve.kv_transfer.rules.outage import Outage, simulated_outage

TIMEOUT_S = 0.5  # set in the URL if the connector supports `timeout`
TURNS = 3  # of all four calls while the store hangs, so that more operations are pending than there are workers

T = TypeVar("T")


def caller_never_waits(context: RuleContext) -> str:
    """Calls return while the store hangs, those of release and prolong, too, and do their work on other threads.

    No durations are measured. The store resumes when all calls have returned, or after the kit's wait limit if one of them
    has not. A connector that supports `timeout` gets one longer than that limit. Any other connector may give up earlier by
    itself; its calls then return futures that are unavailable already.
    """
    with simulated_outage(context, 2 * WAIT_LIMIT_S, override=True) as outage:
        pool, keys = outage.pool, new_keys(2 + TURNS)
        pool.must_store(keys[:2], [0, 1])
        context.register_keys(pool.layout, keys)
        outage.calling_thread = threading.current_thread()
        stores: list[Future[Result]] = []
        loads: list[Future[Result]] = []
        matches: list[Future[int]] = []
        gave_up: list[bool] = []
        with outage.hanging():
            for turn, key in enumerate(keys[2:]):
                store = partial(pool.connector.store, [key], [2 + turn], lease_s=60.0)
                load = partial(pool.start_load, keys[:1], [8 + turn])
                stores.append(_call_while_hanging(outage, "store", store))
                loads.append(_call_while_hanging(outage, "load", load))
                gave_up.append(_has_given_up(stores[-1]) or _has_given_up(loads[-1]))
                matches.append(_call_while_hanging(outage, "match", partial(pool.connector.match, keys[:1])))
                _call_while_hanging(outage, "release", partial(pool.connector.release, keys[1:2]))
            if pool.connector.capabilities.prolongs:
                prolong = partial(pool.connector.prolong, keys[:1], lease_s=60.0, tickets=pool.tickets(keys[:1]))
                _call_while_hanging(outage, "prolong", prolong)
        outage.calling_thread = None
        seen = "futures that were unavailable already when each call returned"
        expect(not all(gave_up), "store and load to return before they give up on a store that hangs", seen)
        for call, futures in (("store", stores), ("load", loads)):
            for future in futures:
                pool.wait_transfer(future, call, 1)
        for match in matches:
            pool.wait(match, "match")
        return outage.method


def _call_while_hanging(outage: Outage, name: str, call: Callable[[], T]) -> T:
    """Call, and expect the call to return while the store hangs, without running hooks in the calling thread."""
    limit = WAIT_LIMIT_S
    resume = threading.Timer(limit, outage.responsive.set)
    resume.daemon = True
    resume.start()
    try:
        returned = call()
    finally:
        resume.cancel()
        resume.join()
    hooks = ", ".join(outage.hooks_in_caller)
    expect(not hooks, f"{name} to leave its work to another thread", f"{hooks} called in the caller's")
    seen = f"it wait for the store until that resumed after {limit:g} s"
    expect(not outage.responsive.is_set(), f"{name} to return while the store hangs", seen)
    return returned


def _has_given_up(future: "Future[Result]") -> bool:
    return future.done() and future.exception() is None and Outcome.UNAVAILABLE in future.result().outcomes


def cancelled(context: RuleContext) -> str:
    """A future either cannot be cancelled, or its rows are not written to after it was."""
    pool, keys = context.attach(MiB, 16), new_keys(8)
    pool.must_store(keys, range(8))
    future = pool.start_load(keys, range(8, 16))
    if not future.cancel():
        pool.wait(future, "load")
        return ""
    pool.rows[8:] = 7
    context.detach(pool)
    expect(bool((pool.rows[8:] == 7).all()), "the rows of a cancelled load to be left alone", "bytes written to them")
    return "futures can be cancelled"


def requested_cancel(context: RuleContext) -> str:
    """Where `capabilities.cancels`, an operation ends early as cancelled when asked to, and then leaves its rows alone."""
    pool = context.attach()
    if not pool.connector.capabilities.cancels:
        return "cancellation is not claimed"
    key = new_keys(1)
    context.register_keys(pool.layout, key)
    for call, future in (
        ("store", pool.connector.store(key, [0], lease_s=60.0)),
        ("load", pool.connector.load(key, [8])),
    ):
        expect(isinstance(future, OperationFuture), f"{call} to return an OperationFuture", type(future).__name__)
        pool.wait_transfer(future, call, 1)
    with simulated_outage(context, WAIT_LIMIT_S) as outage:
        pool, keys = outage.pool, new_keys(2)
        pool.must_store(keys, [0, 1])
        with outage.hanging():
            future = pool.start_load(keys, [8, 9])
            request_cancel(future)
        seen = pool.wait_transfer(future, "load", 2).outcomes
        expect(set(seen) == {Outcome.CANCELLED}, "2 cancelled", summarize(seen))
        pool.rows[8:10] = 7
        context.detach(pool)
        expect(
            bool((pool.rows[8:10] == 7).all()), "the rows of a cancelled load to be left alone", "a late write to them"
        )
        return outage.method


def deadline(context: RuleContext) -> str:
    """If the store hangs or is gone, calls end within the timeout and touch no row later; when back, it is used again.

    The store hangs until all results are there, so results that come prove that nothing waits for it. Their durations are
    only noted in the report.
    """
    with simulated_outage(context, TIMEOUT_S) as outage:
        pool = outage.pool
        keys = new_keys(2)
        outage.require_usable(keys)
        first_rows = pool.rows[10:12].copy()
        hanging_s = _expect_unavailable_while_hanging(context, outage, keys)
        outage.gone.set()
        gone_s = _expect_unavailable(pool, keys, [8, 9], new_keys(2), "is gone")
        outage.gone.clear()
        outage.expect_usable(new_keys(2), "the store to be used again when it is back")
        kept = _count_kept(pool, keys, list(first_rows))
        context.detach(pool)
        unchanged = bool((pool.rows[4:8] == 7).all())
        expect(unchanged, "rows to be left alone after the deadline", "a late load write to them")
        durations = f"with a timeout of {pool.timeout:g} s, results after {hanging_s:.1f} and {gone_s:.1f} s"
        return f"{outage.method}; {durations}; {kept} of 2 blocks still stored"


def _expect_unavailable_while_hanging(context: RuleContext, outage: Outage, keys: list[bytes]) -> float:
    """Expect no OK outcomes while the store hangs, and correct blocks from late stores. Returns the duration in seconds."""
    pool, late_keys = outage.pool, new_keys(2)
    contents = pool.rows[2:4].copy()
    with outage.hanging():
        duration = _expect_unavailable(pool, keys, [4, 5], late_keys, "hangs")
        pool.rows[2:8] = 7  # the caller reuses the rows
    context.register_keys(pool.layout, late_keys)
    for row, key in enumerate(late_keys):
        if pool.load([key], [8]).outcomes == [Outcome.OK]:
            pool.must_equal(8, contents[row])
    return duration


def _expect_unavailable(
    pool: AttachedPool, stored_keys: list[bytes], rows: list[int], unstored_keys: list[bytes], state: str
) -> float:
    """Expect a load, a store and a match to end without an OK outcome. Returns the duration in seconds."""
    started = time.monotonic()
    futures = [pool.start_load(stored_keys, rows), pool.connector.store(unstored_keys, [2, 3], lease_s=60.0)]
    match = pool.connector.match(stored_keys)
    for name, future in zip(("load", "store"), futures, strict=True):
        seen = pool.wait_transfer(future, name, 2).outcomes
        expect(Outcome.OK not in seen, f"no block of a {name} to be ok while the store {state}", summarize(seen))
    pool.wait(match, "match")
    return time.monotonic() - started


def _count_kept(pool: AttachedPool, keys: list[bytes], contents: list[Row]) -> int:
    """Count the blocks that are still stored, which must be correct. Those of a dead peer may stay unavailable."""
    outcomes: list[Outcome] = []

    def is_answered() -> bool:
        outcomes[:] = pool.load(keys, [14, 15]).outcomes
        return bool(pool.tickets(keys)) or Outcome.UNAVAILABLE not in outcomes

    expect(wait_until(is_answered), "blocks to be loaded or missing when the store is back", "no other outcome")
    for row, outcome, content in zip((14, 15), outcomes, contents, strict=True):
        allowed = (Outcome.OK, Outcome.MISSING, Outcome.UNAVAILABLE)
        expect(outcome in allowed, "each block to be OK or missing", f"a load that returned {outcome}")
        if outcome is Outcome.OK:
            pool.must_equal(row, content)
    return outcomes.count(Outcome.OK)


def two_connectors(context: RuleContext) -> str:
    """Several connectors of one URL work in one process, and closing one of them does not affect the others."""
    first, second, keys = context.attach(), context.attach(), new_keys(4)
    first.must_store(keys[:2], [0, 1])
    second.must_load(keys[:2], [8, 9], first.rows[:2])
    first.close()
    second.must_store(keys[2:], [2, 3])
    third = context.attach()
    for pool in (second, third):
        pool.must_load(keys[2:], [10, 11], second.rows[2:4])
    return ""


def many_threads(context: RuleContext) -> str:
    """Eight connectors that store and load in eight threads do not interfere with each other."""
    pools = [context.attach(32 * KiB, 8) for _ in range(8)]

    def store_and_load(pool: AttachedPool) -> None:
        previous, before = new_keys(4), pool.rows[:4].copy()
        pool.must_store(previous, range(4))
        context.require_shared_store()
        for turn in range(12):
            keys = new_keys(4)
            stamp(pool.rows[:4], turn)
            pool.must_store(keys, range(4))
            pool.must_load(previous, range(4, 8), before)
            previous, before = keys, pool.rows[:4].copy()

    run_concurrently([partial(store_and_load, pool) for pool in pools])
    return ""


def counts(context: RuleContext) -> str:
    """`stats` returns a snapshot of the blocks, bytes and failures counted since `attach`."""
    pool, keys = context.attach(), new_keys(5)
    started = time.perf_counter()
    stored, loaded = pool.store(keys[:3], range(3)), pool.load(keys, range(4, 9))
    elapsed = time.perf_counter() - started
    pool.must_have_stored(stored)
    expect_outcomes(loaded.outcomes, [Outcome.OK] * 3 + [Outcome.MISSING] * 2)
    seconds = stored.seconds + loaded.seconds
    expect(0 <= seconds <= elapsed, f"results of at most the {elapsed:g} s that have passed", f"{seconds:g} s")
    stats, size = pool.connector.stats(), sum(map(pool.payload_bytes, range(3)))
    expect(stats.blocks == {"store": 3, "load": 3}, "3 blocks stored and 3 loaded", stats.blocks)
    # With tickets, a store may move no bytes.
    allowed = ({"store": moved, "load": size} for moved in ((0, size) if context.tickets else (size,)))
    expect(stats.bytes in allowed, f"{size} bytes each way", stats.bytes)
    expect(stats.failures == {("load", Outcome.MISSING): 2}, "2 missing in load", stats.failures)
    expect(min(stats.seconds.values()) > 0, "the seconds of stores and loads to be counted", stats.seconds)
    counted = 0.0 if stats.parts else sum(stats.seconds.values())
    expect(counted <= elapsed, f"at most the {elapsed:g} s that have passed to be counted", f"{counted:g} s")
    stats.blocks["store"] = 99
    expect(pool.connector.stats().blocks["store"] == 3, "a snapshot", "counters that the caller can change")
    return ""


def content_stays(context: RuleContext) -> str:
    """`close` waits for operations in flight, and stored blocks stay available to other connectors."""
    source, keys = context.attach(64 * KiB, 16), new_keys(16)
    context.register_keys(source.layout, keys)
    futures = [source.connector.store([key], [row], lease_s=600.0) for row, key in enumerate(keys)]
    source.close()
    undone = sum(not future.done() for future in futures)
    expect(undone == 0, "every future to be done when close returns", f"{undone} that were not")
    for future in futures:
        result = source.wait_transfer(future, "store", 1)
        expect(result.leading == 1, "close to wait for the stores in flight", summarize(result.outcomes))
        source.keep_ticket(keys, result)
    context.require_shared_store()
    target = context.attach(64 * KiB, 16)
    target.must_load(keys, range(16), source.rows)
    source.close()
    return ""


def clean_close(context: RuleContext) -> str:
    """`close` leaves nothing behind, no thread, file or setting of the process, and can be called twice."""
    _expect_settings_of_others_to_stay(context)  # libraries open some files once per process
    threads, files = set(threading.enumerate()), count_open_files()
    for _ in range(3):
        _use_and_close(context)
    wait_until(lambda: not _new_threads(threads) and count_open_files() <= files)
    left = _new_threads(threads)
    expect(not left, "no thread to be left after close", ", ".join(sorted(left)))
    expect(count_open_files() <= files, f"{files} open files as before", f"{count_open_files()} after three more uses")
    return "" if files else "open files not checked: there is no /proc"


ALL = slice(None)
# Settings of a process, with what returns and what sets each.
SETTINGS: dict[str, tuple[Callable[[], Any], Callable[[Any], object]]] = {
    "socket.setdefaulttimeout": (socket.getdefaulttimeout, socket.setdefaulttimeout),
    "os.chdir": (os.getcwd, os.chdir),
    "logging.root.setLevel": (lambda: logging.root.level, logging.root.setLevel),
    "logging.root.handlers": (
        lambda: [*logging.root.handlers],
        lambda some: logging.root.handlers.__setitem__(ALL, some),
    ),
    "logging.disable": (lambda: logging.root.manager.disable, logging.disable),
    "sys.setswitchinterval": (sys.getswitchinterval, sys.setswitchinterval),
    "sys.setrecursionlimit": (sys.getrecursionlimit, sys.setrecursionlimit),
}


def _expect_settings_of_others_to_stay(context: RuleContext) -> None:
    """Use a connector, and expect it not to change a setting of the process, such as the time-out of every new socket."""
    before = {name: get() for name, (get, _) in SETTINGS.items()}
    socket.setdefaulttimeout(None)
    logging.root.handlers[:] = []  # as in a process that has not set up logging yet
    try:
        expected = {name: get() for name, (get, _) in SETTINGS.items()}
        with _environment_of_others_to_stay():
            _use_and_close(context)
        for name, (get, _) in SETTINGS.items():
            expect(get() == expected[name], f"{name}({expected[name]!r}) to stay as it was", f"{name}({get()!r})")
    finally:
        for name, (_, restore) in SETTINGS.items():
            restore(before[name])


@contextmanager
def _environment_of_others_to_stay() -> Iterator[None]:
    """Expect the environment to stay, which child processes and other libraries read.

    Earlier uses may have set a variable; one that is set again counts, which `os.environ.setdefault` does not do.
    """
    before, put, unset = {**os.environ}, os.putenv, os.unsetenv
    written, removed, changed = set[str](), set[str](), set[str]()

    def record_put(name: bytes, value: bytes) -> None:
        written.add(os.fsdecode(name))
        put(name, value)

    def record_unset(name: bytes) -> None:
        removed.add(os.fsdecode(name))
        unset(name)

    os.putenv, os.unsetenv = record_put, record_unset  # type: ignore[assignment]  # which `os.environ` calls
    try:
        yield
        changed |= {name for name in before.keys() | written if before.get(name) != os.environ.get(name)}
        changed |= written - removed
        expect(
            not changed, "the environment variables to stay as they were", f"changes of {', '.join(sorted(changed))}"
        )
    finally:
        os.putenv, os.unsetenv = put, unset
        for name in changed:
            os.environ.pop(name, None)
        os.environ.update({name: before[name] for name in changed & before.keys()})


def _use_and_close(context: RuleContext) -> None:
    pool, keys = context.attach(), new_keys(4)
    pool.must_store(keys, range(4))
    pool.must_load(keys, range(8, 12), pool.rows[:4])
    pool.connector.release(keys)
    context.delete_blocks(pool)
    pool.close()
    pool.connector.close()


def _new_threads(before: set[threading.Thread]) -> set[str]:
    return {thread.name for thread in set(threading.enumerate()) - before}
