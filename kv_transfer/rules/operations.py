"""Rules about the operations of one connector: several at once, of many blocks, and many in a row."""

import random
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager

import numpy as np

from pdserve.kv_transfer.connector import Outcome, Result
from pdserve.kv_transfer.rules.context import (
    AttachedPool,
    Broken,
    KiB,
    Lost,
    NotChecked,
    RuleContext,
    expect,
    expect_count,
    new_keys,
)
from pdserve.kv_transfer.rules.outage import with_parameter

AT_ONCE, BLOCKS, TURNS = 16, 2, 8  # stores and as many loads under way, blocks of each, and how often
THREADS, TIMEOUT_S = 4, 20  # of the connector, if the URL does not set them; no busy machine holds up a load for longer
PAUSE_SHARE, PAUSE_S = 1 / 16, 5e-5  # of all calls and returns in a thread; long enough for another one to run
LARGE = ((128, 64 * KiB), (512, 4 * KiB))  # blocks of an operation, and their length
LOADS, DISTINCT = 5000, 64
LOADS_TIME_LIMIT_S = 100.0  # for all loads from a slow store


def _busy_url(context: RuleContext) -> str:
    return with_parameter(context, "threads", str(THREADS), timeout=str(TIMEOUT_S))


def concurrent_operations(context: RuleContext) -> str:
    """Stores, loads and matches that are under way at once on one connector do not interfere with each other."""
    url, half = _busy_url(context), AT_ONCE * BLOCKS
    with _interrupted_threads():
        pool = context.attach(64 * KiB, 2 * half, url=url)
        contents, previous = pool.rows[:half].copy(), list[list[bytes]]()
        for _ in range(TURNS):
            pool.rows[half:] = 0
            keys = [new_keys(BLOCKS) for _ in range(AT_ONCE)]
            for operation_keys in keys:
                context.register_keys(pool.layout, operation_keys)
            loads = random.sample(previous, len(previous))
            stored, loaded, matched = _submit_at_once(pool, keys, loads)
            for operation_keys, store in zip((keys[0], *keys), stored, strict=True):
                result = pool.wait_transfer(store, "store", BLOCKS)
                pool.must_have_stored(result)
                pool.keep_ticket(operation_keys, result)
            for i, (operation_keys, load) in enumerate(zip(loads, loaded, strict=True)):
                first = previous.index(operation_keys) * BLOCKS
                result = pool.wait_transfer(load, "load", BLOCKS)
                pool.must_have_loaded(result, _rows(half, i), contents[first : first + BLOCKS])
            for match in matched:
                count = pool.wait(match, "match")
                expect_count(count, 0 if context.tickets else BLOCKS, f"{BLOCKS} keys to match")
            previous = keys
    blocks = {"store": TURNS * (AT_ONCE + 1) * BLOCKS, "load": (TURNS - 1) * AT_ONCE * BLOCKS}
    counted = pool.connector.stats().blocks
    expect(counted == blocks, f"{blocks['store']} blocks stored and {blocks['load']} loaded in stats", counted)
    return ""


def _submit_at_once(
    pool: AttachedPool, stores: Sequence[list[bytes]], loads: Sequence[list[bytes]]
) -> tuple[list[Future[Result]], list[Future[Result]], list[Future[int]]]:
    """Start the stores, of which the first one twice, and the loads and matches of these keys, in one of several orders."""
    stored, loaded, matched = list[Future[Result]](), list[Future[Result]](), list[Future[int]]()

    def store() -> None:
        for i, keys in zip((0, *range(AT_ONCE)), (stores[0], *stores), strict=True):
            stored.append(pool.connector.store(keys, _rows(0, i), lease_s=600.0))

    def load() -> None:
        for i, keys in enumerate(loads):
            rows = _rows(len(pool.rows) // 2, i)
            loaded.append(pool.connector.load(keys, rows, tickets=pool.tickets(keys)))

    def match() -> None:
        matched.extend(pool.connector.match(keys) for keys in loads)

    for start in random.sample((store, load, match), 3):
        start()
    return stored, loaded, matched


def _rows(start: int, operation: int) -> range:
    return range(start + operation * BLOCKS, start + (operation + 1) * BLOCKS)


@contextmanager
def _interrupted_threads() -> Iterator[None]:
    """Interrupt the threads that are started in the body at random calls and returns, where others may run then."""

    def pause(*_: object) -> None:
        if random.random() < PAUSE_SHARE:
            time.sleep(PAUSE_S)

    before = threading.getprofile()
    threading.setprofile(pause)
    try:
        yield
    finally:
        threading.setprofile(before)


def large_operations(context: RuleContext) -> str:
    """A store, load or match of 128 or 512 blocks does with each what one of a single block does."""
    for count, block_bytes in LARGE:
        source, target = context.attach(block_bytes, count), context.attach(block_bytes, count)
        source_rows, target_rows = (np.random.permutation(count).tolist() for _ in range(2))
        keys, contents = new_keys(count), source.rows[source_rows]
        source.must_store(keys, source_rows)
        matched = target.match(keys)
        expect_count(matched, 0 if context.tickets else count, f"{count} keys to match")
        target.must_load(keys, target_rows, contents)
        wanted = [key if i % 3 else new_keys(1)[0] for i, key in enumerate(keys)]
        expected = [Outcome.OK if i % 3 else Outcome.MISSING for i in range(count)]
        target.rows[:] = 0
        _expect_outcomes(target.load(wanted, target_rows).outcomes, expected)
        for i in range(count):
            if i % 3:
                target.must_equal(target_rows[i], contents[i])
        context.close()
    return ""


def _expect_outcomes(outcomes: Sequence[Outcome], expected: Sequence[Outcome]) -> None:
    """Expect these outcomes of a large operation. The report names the first wrong one."""
    for i, (seen, right) in enumerate(zip(outcomes, expected, strict=True)):
        error = Lost if (seen, right) == (Outcome.MISSING, Outcome.OK) else Broken
        expect(seen is right, f"block {i} of {len(outcomes)} to be {right}", seen, error)


def random_loads(context: RuleContext) -> str:
    """Of 5,000 loads in random order, several of them under way at once, each loads its block."""
    url = _busy_url(context)
    pool, keys = context.attach(blocks=DISTINCT + AT_ONCE, url=url), new_keys(DISTINCT)
    pool.must_store(keys, range(DISTINCT))
    context.require_shared_store()
    give_up_at = time.monotonic() + max(LOADS_TIME_LIMIT_S, 10 * context.seconds)
    for done in range(0, LOADS, AT_ONCE):
        if time.monotonic() > give_up_at:
            raise NotChecked(f"the store is too slow: {done} loads in {LOADS_TIME_LIMIT_S:g} s")
        _load_at_once(pool, keys, random.choices(range(DISTINCT), k=AT_ONCE))
    return ""


def _load_at_once(pool: AttachedPool, keys: Sequence[bytes], numbers: Sequence[int]) -> None:
    """Load the blocks with these numbers in operations of one block each, all under way at once."""
    pool.rows[DISTINCT:] = 0
    futures = [pool.connector.load([keys[number]], [DISTINCT + i]) for i, number in enumerate(numbers)]
    for row, (number, future) in enumerate(zip(numbers, futures, strict=True), DISTINCT):
        result = pool.wait_transfer(future, "load", 1)
        if result.outcomes == [Outcome.MISSING]:
            again = pool.load([keys[number]], [row]).outcomes
            expect(again != [Outcome.OK], "each load to find its block", "one missing, and there after all")
        pool.must_have_loaded(result, [row], pool.rows[number : number + 1])
