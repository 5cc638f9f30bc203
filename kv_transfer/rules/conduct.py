"""Rules about conduct: what a connector does to its caller and to its process, whatever its store does."""

import os
import statistics
import threading
import time
from functools import partial

import numpy as np

from pdserve.kv_transfer.connector import Outcome
from pdserve.kv_transfer.rules.blocks import at_once
from pdserve.kv_transfer.rules.outage import Outage, outage_of
from pdserve.kv_transfer.rules.trial import (
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

MEDIAN_S = 0.001
LONGEST_S = 0.5
TIMEOUT_S = 0.5  # asked for in the URL where the connector knows `timeout`
LATE_S = 2.0  # by which an answer may miss its deadline: a busy machine wakes threads late


def caller_never_waits(trial: Trial) -> str:
    """A call of store, load, match or release takes at most 1 ms at the median.

    The longest call is only held to half a second. Whether one call of hundreds takes 10 ms says more about the machine
    than about the connector: the interpreter hands its lock on every 5 ms, and the scheduler gives the core to others.
    A connector that waits for its store waits in nearly all calls, and the median tells.
    """
    one, times = trial.instance(64 * KiB, 64), []
    for _ in range(50):
        keys = new_keys(32)
        trial.remember(one.layout, keys)
        marks = [time.perf_counter()]
        stored = one.connector.store(keys, range(32), lease_s=60.0)
        marks.append(time.perf_counter())
        loaded = one.connector.load(keys, range(32, 64), tickets=one.tickets(keys))
        marks.append(time.perf_counter())
        matched = one.connector.match(keys)
        marks.append(time.perf_counter())
        one.end(matched, "match")
        one.end(loaded, "load")
        one.end(stored, "store")
        begun = time.perf_counter()
        one.connector.release(keys)
        times += [*np.diff(marks).tolist(), time.perf_counter() - begun]
    median, longest = statistics.median(times), max(times)
    slowest = max(statistics.median(times[kind::4]) for kind in range(4))
    seen = f"{slowest * 1000:.2f} ms for one of the four calls"
    expect(slowest <= MEDIAN_S, f"calls to take at most {MEDIAN_S * 1000:g} ms at the median", seen)
    expect(longest <= LONGEST_S, f"no call to take more than {LONGEST_S} s", f"one of {longest:.2f} s")
    return f"median {median * 1e6:.0f} µs, longest {longest * 1000:.1f} ms"


def cancelled(trial: Trial) -> str:
    """A future cannot be cancelled, or its rows are left alone once it is."""
    one, keys = trial.instance(MiB, 16), new_keys(8)
    one.must_store(keys, range(8))
    future = one.connector.load(keys, range(8, 16), tickets=one.tickets(keys))
    if not future.cancel():
        one.end(future, "load")
        return ""
    one.rows[8:] = 7
    one.match(keys)
    time.sleep(0.2)
    expect(bool((one.rows[8:] == 7).all()), "the rows of a cancelled load to be left alone", "bytes written to them")
    return "futures can be cancelled"


def deadline(trial: Trial) -> str:
    """A store that hangs or is gone costs no more than the time-out, and touches no row afterwards; then it works again."""
    with outage_of(trial, TIMEOUT_S) as outage:
        one = outage.instance
        keys = new_keys(2)
        one.must_store(keys, [0, 1])
        first = one.rows[:2].copy()
        _hangs(trial, outage, keys)
        _comes_back(one)
        outage.gone.set()
        _answers_in_time(one, keys, new_keys(2), "is gone")
        outage.gone.clear()
        _comes_back(one)
        seen = one.may_load(keys, [4, 5], list(first))
        return f"{outage.how}; {seen} of 2 blocks outlived it"


def _hangs(trial: Trial, outage: Outage, keys: list[bytes]) -> None:
    one, late = outage.instance, new_keys(2)
    content = one.rows[2:4].copy()
    outage.flowing.clear()
    try:
        _answers_in_time(one, keys, late, "hangs")
        one.rows[2:8] = 7  # the blocks are somebody else's now
    finally:
        outage.flowing.set()
    time.sleep(0.2)  # for the threads that were held up
    expect(bool((one.rows[4:8] == 7).all()), "rows to be left alone after the deadline", "a late load write to them")
    trial.remember(one.layout, late)
    for row, key in enumerate(late):
        if one.load([key], [8]).outcomes == [Outcome.OK]:
            one.must_equal(8, content[row])


def _answers_in_time(one: Instance, there: list[bytes], new: list[bytes], what: str) -> None:
    began = time.monotonic()
    futures = [
        one.connector.load(there, [4, 5], tickets=one.tickets(there)),
        one.connector.store(new, [2, 3], lease_s=60.0),
    ]
    match = one.connector.match(there)
    for name, future in zip(("load", "store"), futures, strict=True):
        seen = one.result(future, name, 2).outcomes
        expect(Outcome.OK not in seen, f"no block of a {name} to be ok while the store {what}", summary(seen))
    one.end(match, "match")
    took, limit = time.monotonic() - began, one.timeout
    expect(took <= limit + LATE_S, f"answers within {limit:g} s while the store {what}", f"{took:.1f} s")


def _comes_back(one: Instance) -> None:
    """It has a few tries: the first may still find a connection that was cut."""
    keys = new_keys(2)
    one.trial.remember(one.layout, keys)
    fine = [Outcome.OK] * 2

    def works() -> bool:
        return one.store(keys, [10, 11]).outcomes == fine and one.load(keys, [12, 13]).outcomes == fine

    expect(until(works, one.timeout + LATE_S), "the store to be used again when it is back", "no more answers")
    one.must_equal(12, one.rows[10])


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
    until(lambda: not (_new_threads(threads)) and _open_files() <= files, 3.0)
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
