"""Rules about blocks: what was stored comes back, bit for bit, and nothing else does."""

import threading
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial

import numpy as np

from pdserve.keys import LAYOUT_VERSION
from pdserve.kv_transfer.connector import Outcome, Result
from pdserve.kv_transfer.header import HEADER_BYTES
from pdserve.kv_transfer.rules.hands import tamper
from pdserve.kv_transfer.rules.trial import (
    Broken,
    Instance,
    KiB,
    MiB,
    NotChecked,
    Trial,
    expect,
    new_keys,
    refused_as_note,
    size_text,
    summary,
    until,
)

SIZES = (4 * KiB, 64 * KiB, 1_835_008, 8 * MiB)  # the third is Qwen3-0.6B's


def round_trip(trial: Trial) -> str:
    """Blocks of 4 KiB to 8 MiB come back bit for bit, from and to scattered rows, and no other row changes."""
    notes: list[str] = []
    for size in SIZES:
        with refused_as_note(notes, f"blocks of {size_text(size)}"):
            _round_trip(trial, size, notes)
        trial.close()
    if len(notes) == len(SIZES):
        raise NotChecked("; ".join(notes))
    return "; ".join(notes)


def _round_trip(trial: Trial, size: int, notes: list[str]) -> None:
    out, into = [6, 0, 3, 5], [1, 4, 6, 2]
    source, target = trial.instance(size, 7), trial.instance(size, 7)
    sent, before = source.rows.copy(), target.rows.copy()
    keys = new_keys(4)
    outcomes = source.store(keys, out).outcomes
    if Outcome.FULL in outcomes:
        notes.append(f"blocks of {size_text(size)} not tried: the store has no room for four")
        return
    expect(set(outcomes) == {Outcome.OK}, f"four blocks of {size_text(size)} stored", summary(outcomes))
    target.must_load(keys, into, sent[out])
    others = [0, 3, 5]
    expect(np.array_equal(target.rows[others], before[others]), "only the given rows to change", "others changed too")
    expect(np.array_equal(source.rows, sent), "a store to leave the pool alone", "rows that changed")


def results(trial: Trial) -> str:
    """Each call gives one outcome per block, in order, also for no block at all and for one key twice."""
    one, (key, *keys) = trial.instance(), new_keys(4)
    expect(one.store([], []).outcomes == [], "no outcome of a store of nothing", "some")
    expect(one.load([], []).outcomes == [], "no outcome of a load of nothing", "some")
    expect(one.match([]) == 0, "a match of nothing to give 0", one.match([]))
    one.rows[1] = one.rows[0]
    one.must_store([key, key], [0, 1])
    one.must_load([key, key], [8, 9], one.rows[[0, 0]])
    one.must_store(keys, [2, 3, 4], lease_s=float("inf"))
    one.must_store(keys, [2, 3, 4], lease_s=1.0)
    one.must_load(keys, [10, 11, 12], one.rows[2:5])
    return ""


def leading_match(trial: Trial) -> str:
    """`match` counts leading keys: a key after the first missing one does not count."""
    one, keys = trial.instance(), new_keys(6)
    expect(one.match(keys) == 0, "0 of 6 unknown keys to match", one.match(keys))
    one.must_store(keys[:3] + keys[4:], [0, 1, 2, 4, 5])
    trial.needs_store()
    expect(one.match(keys) == 3, "3 leading keys, the fourth being missing", one.match(keys))
    expect(one.match(keys[3:]) == 0, "0 leading keys, the first being missing", one.match(keys[3:]))
    one.must_store([keys[3]], [3])
    expect(one.match(keys) == 6, "6 leading keys, all being there", one.match(keys))
    return ""


def missing(trial: Trial) -> str:
    """A load reports each missing block as missing, and loads the others."""
    one, keys = trial.instance(), new_keys(5)
    one.must_store([keys[0], keys[2]], [0, 2])
    result = one.load(keys, [8, 9, 10, 11, 12])
    gone = Outcome.MISSING
    right = [Outcome.OK, gone, Outcome.OK, gone, gone]
    expect(result.outcomes == right, ", ".join(right), ", ".join(result.outcomes))
    one.must_equal(8, one.rows[0])
    one.must_equal(10, one.rows[2])
    return ""


def following(trial: Trial) -> str:
    """Where there is `follow`, it brings blocks that are stored while it waits; what does not come in time is missing."""
    source, target, keys = trial.instance(), trial.instance(), new_keys(6)
    if not target.connector.follows:
        return "it does not follow"
    source.must_store(keys[:1], [0])
    before = target.rows[8].copy()
    future = target.connector.follow(keys[:4], range(8, 12), patience_s=target.timeout)
    # It may bring the first block now. One that has ended did not wait for the others.
    until(lambda: future.done() or not np.array_equal(target.rows[8], before), target.timeout / 4)
    for row, key in enumerate(keys[1:4], start=1):
        source.must_store([key], [row])
    _follows(target, future, [Outcome.OK] * 4)
    for row in range(4):
        target.must_equal(8 + row, source.rows[row])
    future = target.connector.follow(keys[3:], range(11, 14), patience_s=0.1)
    _follows(target, future, [Outcome.OK, Outcome.MISSING, Outcome.MISSING])
    return ""


def _follows(one: Instance, future: "Future[Result]", right: list[Outcome]) -> None:
    outcomes = one.result(future, "follow", len(right)).outcomes
    expect(outcomes == right, ", ".join(right), ", ".join(outcomes))


def concurrent_stores(trial: Trial) -> str:
    """Several connectors store the same keys at the same moment: all succeed, and the blocks are right."""
    writers = [trial.instance(64 * KiB, 16) for _ in range(4)]
    for writer in writers[1:]:
        writer.rows[:8] = writers[0].rows[:8]
    for _ in range(5):
        keys = new_keys(8)
        at_once([partial(writer.must_store, keys, range(8)) for writer in writers])
        for writer in writers:
            writer.must_load(keys, range(8, 16), writers[0].rows[:8])
    return ""


def whole_blocks(trial: Trial) -> str:
    """While a block is being stored, others find it whole or not at all."""
    source, target = trial.instance(256 * KiB, 32), trial.instance(256 * KiB, 32)
    keys, done, seen = new_keys(32), threading.Event(), 0

    def write() -> None:
        try:
            for row, key in enumerate(keys):
                source.must_store([key], [row])
        finally:
            done.set()

    def read() -> None:
        nonlocal seen
        last = False
        while not last:
            last = done.is_set()
            seen = target.may_load(keys, range(32), list(source.rows), leased=True)

    at_once([write, read])
    expect(seen == 32, "32 blocks to be there at the end", seen)
    return ""


def flipped_bytes(trial: Trial) -> str:
    """A block whose bytes changed in the store is reported, alone; the next store of it puts it right."""
    one = trial.instance()
    stored = one.payload_bytes(1)
    for offset in (0, stored // 2, stored - 1):
        keys = new_keys(3)
        one.must_store(keys, [0, 1, 2])
        tamper(one, keys[1], offset)
        first, changed, last = one.load(keys, [8, 9, 10]).outcomes
        expect(changed is not Outcome.OK, f"a block with byte {offset} changed to be reported", "ok")
        expect(first is last is Outcome.OK, "the blocks beside it to be loaded", f"{first}, {last}")
        one.must_store(keys, [0, 1, 2])
        one.must_load(keys, [8, 9, 10], one.rows[:3])
    return ""


def foreign_namespace(trial: Trial) -> str:
    """Pools of different models never find each other's blocks, even under equal keys."""
    ours, theirs = trial.instance(), trial.instance(tenant="another model")
    _strangers(ours, theirs)
    return _changed_headers(ours, {"namespace": 16, "key": 32, "magic": 0})


def older_layout(trial: Trial) -> str:
    """Blocks of another layout version are never read as if they were of this one."""
    ours, theirs = trial.instance(), trial.instance(version=LAYOUT_VERSION + 1)
    _strangers(ours, theirs)
    return _changed_headers(ours, {"header version": 8, "layout version": 12, "length": 48})


def _strangers(ours: Instance, theirs: Instance) -> None:
    keys = new_keys(2)
    theirs.must_store(keys, [0, 1])
    expect(ours.match(keys) == 0, "0 foreign blocks to match", ours.match(keys))
    future = ours.connector.load(keys, [4, 5], tickets=theirs.tickets(keys))
    seen = ours.result(future, "load", 2).outcomes
    expect(Outcome.OK not in seen, "no foreign block to load", summary(seen))
    ours.must_store(keys, [0, 1])
    ours.must_load(keys, [4, 5], ours.rows[:2])
    theirs.must_load(keys, [4, 5], theirs.rows[:2])


def _changed_headers(one: Instance, fields: dict[str, int]) -> str:
    for name, at in fields.items():
        (key,) = new_keys(1)
        one.must_store([key], [0])
        try:
            tamper(one, key, at - HEADER_BYTES)
        except NotChecked as why:
            return f"headers not checked: {why}"
        outcome = one.load([key], [8]).outcomes[0]
        expect(outcome is not Outcome.OK, f"a block with another {name} in its header to be refused", outcome)
    return ""


def at_once(calls: list[Callable[[], None]]) -> None:
    """Runs the calls in threads that start together; raises the first thing that went wrong."""
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
