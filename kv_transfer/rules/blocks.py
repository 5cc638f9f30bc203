"""Rules about blocks: a load returns exactly the bytes that were stored, and nothing else."""

import threading
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial

import numpy as np

from pdserve.keys import KEY_BYTES, LAYOUT_VERSION
from pdserve.kv_transfer.connector import Outcome, Result
from pdserve.kv_transfer.header import HEADER_BYTES
from pdserve.kv_transfer.rules.context import (
    AttachedPool,
    Broken,
    KiB,
    MiB,
    NotChecked,
    RuleContext,
    batched_connectors,
    expect,
    expect_count,
    expect_ok,
    expect_outcomes,
    format_size,
    interrupted_threads,
    new_keys,
    noting_refusal,
    summarize,
    wait_until,
)
from pdserve.kv_transfer.rules.tampering import cut_off, tamper

SIZES = (4 * KiB, 4 * KiB + 8, 64 * KiB, 1_835_008, 8 * MiB)  # the fourth is a block of Qwen3-0.6B
# Blocks of zeros and ones, and of what ends or begins answers of protocols; each is repeated.
CONTENTS = (
    *(b"\0", b"\xff", b"\0\xff", b"\n", b"\r\n", b"\r\n\r\n", b"\\x00", b"null"),
    *(b"\r\nEND\r\n", b"$-1\r\n", b"+OK\r\n", b"-ERR \r\n"),
)
AWKWARD_BYTES = b"\0\t\n\r /\\\xff"  # that end a text, separate words or folders, or are no text


def round_trip(context: RuleContext) -> str:
    """Blocks of 4 KiB to 8 MiB are loaded bit for bit as stored, from and to any rows, and no other row changes."""
    notes: list[str] = []
    for size in SIZES:
        with noting_refusal(notes, f"blocks of {format_size(size)}"):
            _round_trip(context, size, notes)
        context.close()
    if len(notes) == len(SIZES):
        raise NotChecked("; ".join(notes))
    return "; ".join(notes)


def _round_trip(context: RuleContext, size: int, notes: list[str]) -> None:
    source_rows, target_rows = [6, 0, 3, 5], [1, 4, 6, 2]
    source, target = context.attach(size, 7), context.attach(size, 7)
    sent, before = source.rows.copy(), target.rows.copy()
    keys = new_keys(4)
    outcomes = source.store(keys, source_rows).outcomes
    if Outcome.FULL in outcomes:
        notes.append(f"blocks of {format_size(size)} not tried: the store has no space for four")
        return
    expect(set(outcomes) == {Outcome.OK}, f"four blocks of {format_size(size)} stored", summarize(outcomes))
    target.must_load(keys, target_rows, sent[source_rows])
    others = [0, 3, 5]
    unchanged = np.array_equal(target.rows[others], before[others])
    expect(unchanged, "only the given rows to change", "changes in other rows")
    expect(np.array_equal(source.rows, sent), "a store to leave the pool unchanged", "rows that changed")


def any_content(context: RuleContext) -> str:
    """Blocks of any bytes are loaded as stored: of zeros, of what ends an answer, and those that differ in one byte."""
    count = len(CONTENTS) + 4
    pool = context.attach(blocks=2 * count)
    if pool.codec.lossy:
        raise NotChecked(f"the lossy codec {pool.codec.name} changes them")
    size = pool.layout.block_bytes
    for row, content in enumerate(CONTENTS):
        pool.rows[row] = np.frombuffer((content * size)[:size], np.uint8)
    for row, changed in enumerate((0, size // 2, size - 1), start=len(CONTENTS)):
        pool.rows[row] = pool.rows[count - 1]
        pool.rows[row, changed] ^= 1
    keys = new_keys(count)
    pool.must_store(keys, range(count))
    pool.must_load(keys, range(count, 2 * count), pool.rows[:count])
    return ""


def results(context: RuleContext) -> str:
    """Each call returns one outcome per block, in order, also for no blocks and for the same key twice."""
    pool, (key, *keys) = context.attach(), new_keys(4)
    expect(pool.store([], []).outcomes == [], "no outcome of a store of no blocks", "some")
    expect(pool.load([], []).outcomes == [], "no outcome of a load of no blocks", "some")
    expect(pool.match([]) == 0, "a match of no keys to return 0", pool.match([]))
    pool.rows[1] = pool.rows[0]
    pool.must_store([key, key], [0, 1])
    pool.must_load([key, key], [8, 9], pool.rows[[0, 0]])
    pool.must_store(keys, [2, 3, 4], lease_s=float("inf"))
    pool.must_store(keys, [2, 3, 4], lease_s=1.0)
    pool.must_load(keys, [10, 11, 12], pool.rows[2:5])
    return ""


def leading_match(context: RuleContext) -> str:
    """`match` counts leading keys: a key after the first missing one does not count."""
    pool, keys = context.attach(), new_keys(6)
    expect(pool.match(keys) == 0, "0 of 6 unknown keys to match", pool.match(keys))
    pool.must_store(keys[:3] + keys[4:], [0, 1, 2, 4, 5])
    context.require_shared_store()
    expect_count(pool.match(keys), 3, "3 leading keys, the fourth being missing")
    expect(pool.match(keys[3:]) == 0, "0 leading keys, the first being missing", pool.match(keys[3:]))
    pool.must_store([keys[3]], [3])
    expect_count(pool.match(keys), 6, "6 leading keys, all being stored")
    return ""


def missing(context: RuleContext) -> str:
    """A load reports each missing block as missing, and loads the others."""
    pool, keys = context.attach(), new_keys(5)
    pool.must_store([keys[0], keys[2]], [0, 2])
    expected = [Outcome.OK, Outcome.MISSING, Outcome.OK, Outcome.MISSING, Outcome.MISSING]
    expect_outcomes(pool.load(keys, [8, 9, 10, 11, 12]).outcomes, expected)
    pool.must_equal(8, pool.rows[0])
    pool.must_equal(10, pool.rows[2])
    return ""


def similar_keys(context: RuleContext) -> str:
    """Keys of any bytes that differ in one byte, wherever it is, are those of different blocks, also when one is deleted."""
    (key,) = new_keys(1)
    keys = [key, *(key[:i] + bytes([key[i] ^ 1]) + key[i + 1 :] for i in range(KEY_BYTES))]
    for byte in AWKWARD_BYTES:
        equal = bytes([byte]) * (KEY_BYTES - 1)
        keys += [equal + b"k", equal + b"l", b"k" + equal, b"l" + equal]
    pool = context.attach(blocks=2 * len(keys))
    pool.must_store(keys, range(len(keys)))
    pool.must_load(keys, range(len(keys), len(pool.rows)), pool.rows[: len(keys)])
    if not context.tickets:
        for connector in batched_connectors(pool.connector):
            connector.delete_many(keys[:1])
        pool.must_load(keys[1:], range(len(keys) + 1, len(pool.rows)), pool.rows[1 : len(keys)])
    return ""


def stored_again(context: RuleContext) -> str:
    """A block that the store has lost is stored again by the next store, whatever the connector remembers of the first."""
    pool, other, keys = context.attach(), context.attach(), new_keys(4)
    connectors = batched_connectors(other.connector)
    if not connectors:
        raise NotChecked("the connector has no hooks through which another one could delete a block")
    pool.must_store(keys, range(4))
    context.require_shared_store()
    pool.must_load(keys, range(8, 12), pool.rows[:4])
    expect_count(pool.match(keys), 4, "4 stored keys to match")
    for lost, lease_s in ((range(3), 600.0), (range(1, 4), 0.0)):
        pool.connector.parts()  # waits for blocks that are still being copied
        lost_keys, target_rows = [keys[i] for i in lost], range(8, 11)
        for connector in connectors:
            connector.delete_many(lost_keys)
        found = sum(other.match([key]) for key in lost_keys)
        if found:
            raise NotChecked(f"{found} of 3 blocks are still there after another connector of this URL deleted them")
        loaded = pool.may_load(lost_keys, target_rows, [pool.rows[i] for i in lost])
        matched = pool.match(lost_keys)
        expect(loaded > 0 or matched == 0, "lost blocks, which no load finds, not to match", f"{matched} that do")
        pool.must_store(keys, range(4), lease_s)
        other.must_load(keys, range(8, 12), pool.rows[:4])
    return ""


def following(context: RuleContext) -> str:
    """`follow`, where supported, loads blocks that are stored while it waits, and reports late ones as missing."""
    source, target, keys = context.attach(), context.attach(), new_keys(6)
    if not target.connector.follows:
        return "follow is not supported"
    source.must_store(keys[:1], [0])
    before = target.rows[8].copy()
    future = target.connector.follow(keys[:4], range(8, 12), patience_s=target.timeout)
    # The first block may be loaded at once. If the call ends then, it did not wait for the others.
    wait_until(lambda: future.done() or not np.array_equal(target.rows[8], before), target.timeout / 4)
    for row, key in enumerate(keys[1:4], start=1):
        source.must_store([key], [row])
    _expect_outcomes(target, future, [Outcome.OK] * 4)
    for row in range(4):
        target.must_equal(8 + row, source.rows[row])
    future = target.connector.follow(keys[3:], range(11, 14), patience_s=0.1)
    _expect_outcomes(target, future, [Outcome.OK, Outcome.MISSING, Outcome.MISSING])
    return ""


def _expect_outcomes(pool: AttachedPool, future: "Future[Result]", expected: list[Outcome]) -> None:
    expect_outcomes(pool.wait_transfer(future, "follow", len(expected)).outcomes, expected)


def concurrent_stores(context: RuleContext) -> str:
    """Several connectors can store the same keys at the same time: all succeed, and the blocks are correct."""
    writers = [context.attach(64 * KiB, 16) for _ in range(4)]
    for writer in writers[1:]:
        writer.rows[:8] = writers[0].rows[:8]
    for _ in range(5):
        keys = new_keys(8)
        run_concurrently([partial(writer.must_store, keys, range(8)) for writer in writers])
        for writer in writers:
            writer.must_load(keys, range(8, 16), writers[0].rows[:8])
    return ""


def whole_blocks(context: RuleContext) -> str:
    """A block that is being stored is either complete or missing to other connectors."""
    with interrupted_threads(0.001):
        source = context.attach(256 * KiB, 32)
    target = context.attach(256 * KiB, 32)
    keys, done, loaded = new_keys(32), threading.Event(), 0

    def write() -> None:
        try:
            for row, key in enumerate(keys):
                source.must_store([key], [row])
        finally:
            done.set()

    def read() -> None:
        nonlocal loaded
        while loaded < 32 and not done.is_set():
            next_ones = range(loaded, min(loaded + 2, 32))  # one of them is being stored
            loaded += target.may_load(
                [keys[i] for i in next_ones], next_ones, [source.rows[i] for i in next_ones], leased=True
            )
        loaded = target.may_load(keys, range(32), list(source.rows), leased=True)

    run_concurrently([write, read])
    expect_count(loaded, 32, "all 32 blocks to load at the end")
    return ""


def flipped_bytes(context: RuleContext) -> str:
    """A block that changed in the store, or is cut off, is reported, and only that one; storing it again repairs it."""
    pool = context.attach()
    payload_bytes = pool.payload_bytes(1)
    for offset in (0, payload_bytes // 2, payload_bytes - 1):
        keys = new_keys(3)
        pool.must_store(keys, [0, 1, 2])
        tamper(pool, keys[1], offset)
        first, changed, last = pool.load(keys, [8, 9, 10]).outcomes
        expect(changed is not Outcome.OK, f"a block with byte {offset} changed to be reported", "ok")
        expect_ok([first, last], "the neighbouring blocks to be loaded")
        pool.must_store(keys, [0, 1, 2])
        pool.must_load(keys, [8, 9, 10], pool.rows[:3])
    for length in (0, payload_bytes // 2):
        keys = new_keys(3)
        pool.must_store(keys, [0, 1, 2])
        if not cut_off(pool, keys[1], length):
            return "values that are cut off were not tried: there are no hooks"
        pool.rows[9] = 0
        first, cut, last = pool.load(keys, [8, 9, 10]).outcomes
        if cut is Outcome.OK:  # the rest of it is still where it was
            pool.must_equal(9, pool.rows[1])
        expect_ok([first, last], "the neighbouring blocks of one that is cut off to be loaded")
        pool.must_store(keys, [0, 1, 2])
        pool.must_load(keys, [8, 9, 10], pool.rows[:3])
    return ""


def foreign_namespace(context: RuleContext) -> str:
    """Pools of different models never load each other's blocks, even under equal keys."""
    pool, foreign = context.attach(), context.attach(tenant="another model")
    _expect_isolation(pool, foreign)
    return _check_header_fields(pool, {"namespace": 16, "key": 32, "magic": 0})


def older_layout(context: RuleContext) -> str:
    """Blocks of another layout version are never loaded as blocks of this one."""
    pool, foreign = context.attach(), context.attach(version=LAYOUT_VERSION + 1)
    _expect_isolation(pool, foreign)
    return _check_header_fields(pool, {"header version": 8, "layout version": 12, "length": 48})


def _expect_isolation(pool: AttachedPool, foreign: AttachedPool) -> None:
    """Expect two pools not to load each other's blocks under the same keys."""
    keys = new_keys(2)
    foreign.must_store(keys, [0, 1])
    expect(pool.match(keys) == 0, "0 foreign blocks to match", pool.match(keys))
    future = pool.connector.load(keys, [4, 5], tickets=foreign.tickets(keys))
    seen = pool.wait_transfer(future, "load", 2).outcomes
    expect(Outcome.OK not in seen, "no foreign block to load", summarize(seen))
    pool.must_store(keys, [0, 1])
    pool.must_load(keys, [4, 5], pool.rows[:2])
    foreign.must_load(keys, [4, 5], foreign.rows[:2])


def _check_header_fields(pool: AttachedPool, fields: dict[str, int]) -> str:
    """Expect a block to be rejected if one of these header fields, given by offset, differs."""
    for name, offset in fields.items():
        (key,) = new_keys(1)
        pool.must_store([key], [0])
        try:
            tamper(pool, key, offset - HEADER_BYTES)
        except NotChecked as reason:
            return f"headers not checked: {reason}"
        outcome = pool.load([key], [8]).outcomes[0]
        expect(outcome is not Outcome.OK, f"a block with another {name} in its header to be rejected", outcome)
    return ""


def run_concurrently(calls: list[Callable[[], None]]) -> None:
    """Run the calls in threads that start together. Raises the first error, of type `Broken` if there is one."""
    barrier = threading.Barrier(len(calls))
    errors: list[Exception] = []

    def run(call: Callable[[], None]) -> None:
        barrier.wait()
        try:
            call()
        except Exception as error:  # noqa: BLE001 - raised below, in the rule's own thread
            errors.append(error)

    threads = [threading.Thread(target=run, args=(call,), daemon=True) for call in calls]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    broken = [error for error in errors if isinstance(error, Broken)]
    for error in broken + errors:
        raise error
