"""Rules about the operations of one connector: several at once, of many blocks, and many in a row."""

import random
import threading
import time
from collections.abc import Sequence
from concurrent.futures import Future

import numpy as np

from pdserve.kv_transfer.connector import Outcome, Result
from pdserve.kv_transfer.rules.context import (
    AttachedPool,
    Broken,
    KiB,
    Lost,
    NotChecked,
    RuleContext,
    batched_connectors,
    count_open_files,
    expect,
    expect_count,
    interrupted_threads,
    new_keys,
)
from pdserve.kv_transfer.rules.outage import with_parameter

AT_ONCE, BLOCKS, TURNS = 16, 2, 8  # stores and as many loads under way, blocks of each, and how often
THREADS, TIMEOUT_S = 4, 20  # of the connector, if the URL does not set them; no busy machine holds up a load for longer
LARGE = ((128, 64 * KiB), (512, 4 * KiB))  # blocks of an operation, and their length
LONG_MATCH = 1100  # keys: pages of listings have 1,000
LARGE_TIMEOUT_S = 100  # unless the URL sets one: a store may take 50 ms for each call, of which a block needs two
LOADS, DISTINCT = 5000, 64
LOADS_TIME_LIMIT_S = 100.0  # for all loads from a slow store
WARM_LOADS = LOADS // 10  # after which a connector has all the threads and files that it needs
MAX_MORE = 64  # threads or files in the loads after these, which other code of this process may need
DELETED, DELETE_TURNS = 8, 12
FAR_ROWS = (1, 1 << 15, (1 << 15) + 1, 1 << 16, (1 << 16) + 1)  # beyond numbers of 15 and 16 bits, offsets of 31 and 32


def _busy_url(context: RuleContext) -> str:
    return with_parameter(context, "threads", str(THREADS), timeout=str(TIMEOUT_S))


def concurrent_operations(context: RuleContext) -> str:
    """Stores, loads and matches that are under way at once on one connector do not interfere with each other."""
    url, half = _busy_url(context), AT_ONCE * BLOCKS
    with interrupted_threads():
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


def large_operations(context: RuleContext) -> str:
    """A store, load or match of 128 or 512 blocks, or a match of 1,100, does with each what one of a single block does."""
    url = with_parameter(context, "timeout", str(LARGE_TIMEOUT_S))
    for count, block_bytes in LARGE:
        source, target = (context.attach(block_bytes, count, url=url) for _ in range(2))
        source_rows, target_rows = (np.random.permutation(count).tolist() for _ in range(2))
        keys, contents = new_keys(count), source.rows[source_rows]
        source.must_store(keys, source_rows)
        matched = target.match(keys)
        expect_count(matched, 0 if context.tickets else count, f"{count} keys to match")
        target.must_load(keys, target_rows, contents)
        gap = count * 3 // 4 + 1
        matched = target.match([*keys[:gap], *new_keys(1), *keys[gap + 1 :]])
        expect_count(
            matched, 0 if context.tickets else gap, f"{gap} leading keys of {count}, the next one being missing"
        )
        wanted = [key if i % 3 else new_keys(1)[0] for i, key in enumerate(keys)]
        expected = [Outcome.OK if i % 3 else Outcome.MISSING for i in range(count)]
        target.rows[:] = 0
        _expect_outcomes(target.load(wanted, target_rows).outcomes, expected)
        for i in range(count):
            if i % 3:
                target.must_equal(target_rows[i], contents[i])
        context.close()
    return _match_beyond_a_page(context, url)


def _match_beyond_a_page(context: RuleContext, url: str) -> str:
    """Match more keys than a page of a listing has; returns why, if the store is too slow for that."""
    pool, keys = context.attach(blocks=LARGE[0][0], url=url), new_keys(LONG_MATCH)
    if context.tickets:
        return ""
    for first in range(0, LONG_MATCH, len(pool.rows)):
        some = keys[first : first + len(pool.rows)]
        pool.must_store(some, range(len(some)))
    started = time.monotonic()
    expect_count(pool.match(keys[: LONG_MATCH // 4]), LONG_MATCH // 4, f"{LONG_MATCH // 4} keys to match")
    if 8 * (time.monotonic() - started) > pool.timeout:
        return f"a match of {LONG_MATCH} keys was not tried: the store is slow"
    expect_count(pool.match(keys), LONG_MATCH, f"{LONG_MATCH} keys to match")
    return ""


def large_pools(context: RuleContext) -> str:
    """Rows far back in a pool of 4 GiB, of which almost nothing takes memory, are those of their numbers."""
    blocks, block_bytes, count = FAR_ROWS[-1] + 1, 64 * KiB, len(FAR_ROWS)
    small = context.attach(block_bytes, count)
    if small.connector.in_place:
        raise NotChecked("the connector reads pools in place, and so may take all of their memory")
    try:
        pool = context.attach(block_bytes, blocks, empty=True)
    except MemoryError:
        raise NotChecked(f"there is no address space for {blocks} blocks of {block_bytes} bytes") from None
    keys, contents = new_keys(count), small.rows.copy()
    pool.rows[list(FAR_ROWS)] = contents
    pool.must_store(keys, FAR_ROWS)
    small.rows[:] = 0
    context.require_shared_store()
    small.must_load(keys, range(count), contents)
    pool.rows[list(FAR_ROWS)] = 0
    target_rows = FAR_ROWS[::-1]
    pool.must_load(keys, target_rows, contents)
    return ""


def _expect_outcomes(outcomes: Sequence[Outcome], expected: Sequence[Outcome]) -> None:
    """Expect these outcomes of a large operation. The report names the first wrong one."""
    for i, (seen, right) in enumerate(zip(outcomes, expected, strict=True)):
        error = Lost if (seen, right) == (Outcome.MISSING, Outcome.OK) else Broken
        expect(seen is right, f"block {i} of {len(outcomes)} to be {right}", seen, error)


def deleted_blocks(context: RuleContext) -> str:
    """A block that another connector deletes while it is loaded is complete or missing."""
    url = _busy_url(context)
    with interrupted_threads():
        pool, other = context.attach(64 * KiB, 3 * DELETED, url=url), context.attach(64 * KiB, 1, url=url)
        connectors = batched_connectors(other.connector)
        if not connectors:
            raise NotChecked("the connector has no hooks through which another one could delete a block")
        for turn in range(DELETE_TURNS):
            keys = new_keys(DELETED)
            pool.must_store(keys, range(DELETED))
            context.require_shared_store()
            pool.rows[DELETED:] = 0
            loads = [pool.connector.load(keys, range(DELETED, 2 * DELETED))]
            loads += [pool.connector.load([key], [2 * DELETED + i]) for i, key in enumerate(keys)]
            for key in keys[:: 1 if turn % 2 else -1]:
                for connector in connectors:
                    connector.delete_many([key])
            seen = [outcome for load in loads for outcome in pool.wait(load, "load").outcomes]
            for row, outcome in enumerate(seen, DELETED):
                allowed = (Outcome.OK, Outcome.MISSING)
                expect(outcome in allowed, "a block that is deleted meanwhile to be complete or missing", outcome)
                if outcome is Outcome.OK:
                    pool.must_equal(row, pool.rows[row % DELETED])
    return ""


def random_loads(context: RuleContext) -> str:
    """Of 5,000 loads in random order, several of them under way at once, each loads its block."""
    url = _busy_url(context)
    pool, keys = context.attach(blocks=DISTINCT + AT_ONCE, url=url), new_keys(DISTINCT)
    pool.must_store(keys, range(DISTINCT))
    context.require_shared_store()
    in_use = (0, 0)
    give_up_at = time.monotonic() + max(LOADS_TIME_LIMIT_S, 10 * context.seconds)
    for done in range(0, LOADS, AT_ONCE):
        if time.monotonic() > give_up_at:
            raise NotChecked(f"the store is too slow: {done} loads in {LOADS_TIME_LIMIT_S:g} s")
        if done <= WARM_LOADS:
            in_use = threading.active_count(), count_open_files()
        _load_at_once(pool, keys, random.choices(range(DISTINCT), k=AT_ONCE))
    now_in_use = threading.active_count(), count_open_files()
    for what, before, now in zip(("threads", "open files"), in_use, now_in_use, strict=True):
        expect(
            now <= before + MAX_MORE, f"the {before} {what} after {WARM_LOADS} loads to be enough", f"{now} at the end"
        )
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
