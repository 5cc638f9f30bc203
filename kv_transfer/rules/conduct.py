"""Rules about conduct: what a connector does to its caller and to its process, whatever its store does."""

import os
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from typing import TypeVar

from pdserve.kv_transfer.connector import Outcome, Result
from pdserve.kv_transfer.header import Row
from pdserve.kv_transfer.rules.blocks import at_once
from pdserve.kv_transfer.rules.outage import Outage, outage_of
from pdserve.kv_transfer.rules.trial import (
    PATIENCE_S,
    Instance,
    KiB,
    MiB,
    Trial,
    expect,
    mark,
    new_keys,
    summary,
    until,
)

TIMEOUT_S = 0.5  # asked for in the URL where the connector knows `timeout`
TURNS = 3  # of all four calls while the store hangs, so that more wait for it than there are workers

T = TypeVar("T")


def caller_never_waits(trial: Trial) -> str:
    """A call of store, load, match or release returns while the store hangs: it leaves waiting to other threads.

    No time is measured. The store goes on when all calls have returned, and if one of them does not, when the kit's patience
    is at its end. A connector that knows `timeout` gets one that is longer than that. Another one may give up by itself
    before: then, its calls return with futures that say so already.
    """
    with outage_of(trial, 2 * PATIENCE_S, always=True) as outage:
        one, keys = outage.instance, new_keys(2 + TURNS)
        one.must_store(keys[:2], [0, 1])
        trial.remember(one.layout, keys)
        outage.caller = threading.current_thread()
        stores: list[Future[Result]] = []
        loads: list[Future[Result]] = []
        matches: list[Future[int]] = []
        vain: list[bool] = []
        outage.flowing.clear()
        try:
            for turn, key in enumerate(keys[2:]):
                store = partial(one.connector.store, [key], [2 + turn], lease_s=60.0)
                load = partial(one.connector.load, keys[:1], [8 + turn], tickets=one.tickets(keys[:1]))
                stores.append(_returns(outage, "store", store))
                loads.append(_returns(outage, "load", load))
                vain.append(_gave_up(stores[-1]) or _gave_up(loads[-1]))
                matches.append(_returns(outage, "match", partial(one.connector.match, keys[:1])))
                _returns(outage, "release", partial(one.connector.release, keys[1:2]))
        finally:
            outage.caller = None
            outage.flowing.set()
        seen = "futures that said unavailable when each call returned"
        expect(not all(vain), "store and load to return before they give up on a store that hangs", seen)
        for what, futures in (("store", stores), ("load", loads)):
            for future in futures:
                one.result(future, what, 1)
        for match in matches:
            one.end(match, "match")
        return outage.how


def _returns(outage: Outage, what: str, call: Callable[[], T]) -> T:
    """Calls, and sees that the call returns while the store hangs."""
    limit = PATIENCE_S
    patient = threading.Timer(limit, outage.flowing.set)
    patient.daemon = True
    patient.start()
    try:
        given = call()
    finally:
        patient.cancel()
        patient.join()
    ran = ", ".join(outage.in_caller)
    expect(not ran, f"{what} to leave its work to another thread", f"{ran} called in the caller's")
    waited = f"it wait for the store until that went on after {limit:g} s"
    expect(not outage.flowing.is_set(), f"{what} to return while the store hangs", waited)
    return given


def _gave_up(future: "Future[Result]") -> bool:
    return future.done() and future.exception() is None and Outcome.UNAVAILABLE in future.result().outcomes


def cancelled(trial: Trial) -> str:
    """A future cannot be cancelled, or its rows are left alone once it is."""
    one, keys = trial.instance(MiB, 16), new_keys(8)
    one.must_store(keys, range(8))
    future = one.connector.load(keys, range(8, 16), tickets=one.tickets(keys))
    if not future.cancel():
        one.end(future, "load")
        return ""
    one.rows[8:] = 7
    trial.end(one)
    expect(bool((one.rows[8:] == 7).all()), "the rows of a cancelled load to be left alone", "bytes written to them")
    return "futures can be cancelled"


def deadline(trial: Trial) -> str:
    """A store that hangs or is gone costs no more than the time-out, and touches no row afterwards; then it works again.

    The store hangs until the answers are there, so answers that come show that nothing waits for it. How long they take is
    a note for the reader.
    """
    with outage_of(trial, TIMEOUT_S) as outage:
        one = outage.instance
        keys = new_keys(2)
        _works(one, keys, "the store to be used")
        first = one.rows[10:12].copy()
        hanging_s = _hangs(trial, outage, keys)
        _works(one, new_keys(2), "the store to be used again when it hangs no more")
        outage.gone.set()
        gone_s = _answers(one, keys, [8, 9], new_keys(2), "is gone")
        outage.gone.clear()
        _works(one, new_keys(2), "the store to be used again when it is back")
        seen = _outlived(one, keys, list(first))
        trial.end(one)
        expect(
            bool((one.rows[4:8] == 7).all()), "rows to be left alone after the deadline", "a late load write to them"
        )
        took = f"with a time-out of {one.timeout:g} s, answers after {hanging_s:.1f} and {gone_s:.1f} s"
        return f"{outage.how}; {took}; {seen} of 2 blocks outlived it"


def _hangs(trial: Trial, outage: Outage, keys: list[bytes]) -> float:
    one, late = outage.instance, new_keys(2)
    content = one.rows[2:4].copy()
    outage.flowing.clear()
    try:
        took = _answers(one, keys, [4, 5], late, "hangs")
        one.rows[2:8] = 7  # the blocks are somebody else's now
    finally:
        outage.flowing.set()
    trial.remember(one.layout, late)
    for row, key in enumerate(late):
        if one.load([key], [8]).outcomes == [Outcome.OK]:
            one.must_equal(8, content[row])
    return took


def _answers(one: Instance, there: list[bytes], rows: list[int], new: list[bytes], what: str) -> float:
    """Sees that the store has not answered, and measures how long it took to hear so."""
    began = time.monotonic()
    futures = [
        one.connector.load(there, rows, tickets=one.tickets(there)),
        one.connector.store(new, [2, 3], lease_s=60.0),
    ]
    match = one.connector.match(there)
    for name, future in zip(("load", "store"), futures, strict=True):
        seen = one.result(future, name, 2).outcomes
        expect(Outcome.OK not in seen, f"no block of a {name} to be ok while the store {what}", summary(seen))
    one.end(match, "match")
    return time.monotonic() - began


def _works(one: Instance, keys: list[bytes], expected: str) -> None:
    """Sees that the store is used, in one of many tries: the first may still find a connection that was cut, and on a busy
    machine the time-out that was asked for is short."""
    fine = [Outcome.OK] * 2

    def works() -> bool:
        return one.store(keys, [10, 11]).outcomes == fine and one.load(keys, [12, 13]).outcomes == fine

    expect(until(works), expected, "no more answers")
    one.must_equal(12, one.rows[10])


def _outlived(one: Instance, keys: list[bytes], right: list[Row]) -> int:
    """Counts the blocks that are still there, which have to be right. Those of a peer that is gone may stay away."""
    outcomes: list[Outcome] = []

    def told() -> bool:
        outcomes[:] = one.load(keys, [14, 15]).outcomes
        return bool(one.tickets(keys)) or Outcome.UNAVAILABLE not in outcomes

    expect(until(told), "blocks to be loaded or missing when the store is back", "no more answers")
    for row, outcome, content in zip((14, 15), outcomes, right, strict=True):
        may_be = (Outcome.OK, Outcome.MISSING, Outcome.UNAVAILABLE)
        expect(outcome in may_be, "each block whole or missing", f"a load that said {outcome}")
        if outcome is Outcome.OK:
            one.must_equal(row, content)
    return outcomes.count(Outcome.OK)


def many_threads(trial: Trial) -> str:
    """Eight connectors in eight threads, each storing and loading, do not disturb each other."""
    instances = [trial.instance(32 * KiB, 8) for _ in range(8)]

    def work(own: Instance) -> None:
        previous, before = new_keys(4), own.rows[:4].copy()
        own.must_store(previous, range(4))
        trial.needs_store()
        for turn in range(12):
            keys = new_keys(4)
            mark(own.rows[:4], turn)
            own.must_store(keys, range(4))
            own.must_load(previous, range(4, 8), before)
            previous, before = keys, own.rows[:4].copy()

    at_once([partial(work, one) for one in instances])
    return ""


def counts(trial: Trial) -> str:
    """`stats` counts blocks, bytes and failures since `attach`, and gives a snapshot."""
    one, keys = trial.instance(), new_keys(5)
    one.must_store(keys[:3], range(3))
    one.load(keys, range(4, 9))
    stats, size = one.connector.stats(), sum(map(one.payload_bytes, range(3)))
    expect(stats.blocks == {"store": 3, "load": 3}, "3 blocks stored and 3 loaded", stats.blocks)
    # Where results carry tickets, a store moves nothing.
    right = ({"store": moved, "load": size} for moved in ((0, size) if trial.tickets else (size,)))
    expect(stats.bytes in right, f"{size} bytes each way", stats.bytes)
    expect(stats.failures == {("load", Outcome.MISSING): 2}, "2 missing in load", stats.failures)
    stats.blocks["store"] = 99
    expect(one.connector.stats().blocks["store"] == 3, "a snapshot", "counts that the caller can change")
    return ""


def content_stays(trial: Trial) -> str:
    """`close` waits for what is under way, and what was stored stays for others."""
    source, keys = trial.instance(64 * KiB, 16), new_keys(16)
    trial.remember(source.layout, keys)
    futures = [source.connector.store([key], [row], lease_s=600.0) for row, key in enumerate(keys)]
    source.close()
    undone = sum(not future.done() for future in futures)
    expect(undone == 0, "every future to be done when close returns", f"{undone} that were not")
    for future in futures:
        result = source.result(future, "store", 1)
        expect(result.leading == 1, "close to wait for the stores under way", summary(result.outcomes))
        source.take_ticket(keys, result)
    trial.needs_store()
    target = trial.instance(64 * KiB, 16)
    target.must_load(keys, range(16), source.rows)
    source.close()
    return ""


def clean_close(trial: Trial) -> str:
    """`close` leaves no thread and no open file behind, and can be called twice."""
    _one_life(trial)  # what libraries open once stays for the process
    threads, files = set(threading.enumerate()), _open_files()
    for _ in range(3):
        _one_life(trial)
    until(lambda: not _new_threads(threads) and _open_files() <= files)
    left = _new_threads(threads)
    expect(not left, "no thread to be left after close", ", ".join(sorted(left)))
    expect(_open_files() <= files, f"{files} open files as before", f"{_open_files()} after three more lives")
    return "" if files else "open files not checked: no /proc here"


def _one_life(trial: Trial) -> None:
    one, keys = trial.instance(), new_keys(4)
    one.must_store(keys, range(4))
    one.must_load(keys, range(8, 12), one.rows[:4])
    one.connector.release(keys)
    trial.tidy(one)
    one.close()
    one.connector.close()


def _new_threads(before: set[threading.Thread]) -> set[str]:
    return {thread.name for thread in set(threading.enumerate()) - before}


def _open_files() -> int:
    try:
        return len(os.listdir("/proc/self/fd"))
    except FileNotFoundError:
        return 0
