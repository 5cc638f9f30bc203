"""Rules about leases and eviction: how long blocks stay, and what a full store does."""

import time
from collections.abc import Callable, Iterator, Sequence

from pdserve.kv_transfer.connector import Outcome
from pdserve.kv_transfer.header import Row
from pdserve.kv_transfer.rules.context import (
    EVICTS_LEASED,
    AttachedPool,
    Broken,
    MiB,
    NotChecked,
    RuleContext,
    batched_connectors,
    expect,
    format_size,
    new_keys,
    stamp,
    summarize,
)

LEASES_S = (0.6, 2.0, 6.0, 20.0)  # tried in turn: a busy machine may need longer than the first for four small blocks
MAX_FILL_BYTES = 320 * MiB  # a store larger than this counts as unlimited
FILL_TIME_LIMIT_S = 100.0  # for filling a slow store
BATCH = 8
SHORT_LEASE_S = (
    0.3  # replaced by a longer one; a store that takes longer than this finds no lease, and nothing is shown
)
LEASE_S = 600.0
LEASE_GRAIN_S = 2.0  # a store may count whole seconds


def lease(context: RuleContext) -> str:
    """A leased block stays until its lease ends; afterwards it is correct or missing, and can be stored again."""
    pool = context.attach()
    for lease_s in LEASES_S:
        keys = new_keys(4)
        started = time.monotonic()
        pool.must_store(keys, range(4), lease_s)
        context.require_shared_store()
        pool.store(keys[:2], range(2), 0.01)  # must not shorten the existing lease
        pool.connector.release(new_keys(2))
        was_checked = _check_while_leased(pool, keys, started + lease_s)
        time.sleep(max(0.0, started + lease_s + 0.1 - time.monotonic()))
        pool.may_load(keys, range(8, 12), list(pool.rows[:4]))
        pool.must_store(keys, range(4))
        pool.must_load(keys, range(8, 12), pool.rows[:4])
        if was_checked:
            return ""
    raise NotChecked(f"the store needs more than {LEASES_S[-1]} s for four small blocks, so their leases had ended")


def _check_while_leased(pool: AttachedPool, keys: list[bytes], lease_end: float) -> bool:
    """Expect the blocks to match until their leases end. Returns False if there was no time for a single check."""
    was_checked = False
    while True:
        seen = pool.match(keys)
        if time.monotonic() >= lease_end:
            return was_checked
        seen_of = f"{seen} of them before the lease had ended"
        _expect_leased(pool.context, seen, 4, "4 blocks to stay while they are leased", seen_of)
        was_checked = True
        time.sleep(0.02)


def longer_lease(context: RuleContext) -> str:
    """Storing a block that is already there prolongs its lease, if the new one ends later."""
    pool = context.attach()
    renewed = _store_with_two_leases(pool, lambda keys: pool.must_store(keys, range(4), LEASE_S))
    pool.connector.release(new_keys(2))
    seen = pool.match(renewed)
    expected = "blocks to stay for the longer of two leases"
    _expect_leased(context, seen, len(renewed), expected, f"{seen} of {len(renewed)} left")
    pool.must_load(renewed, range(8, 12), pool.rows[:4])
    return ""


def _store_with_two_leases(pool: AttachedPool, renew: Callable[[list[bytes]], None]) -> list[bytes]:
    """Store rows 0 to 3 with a short lease, have that renewed, and wait for the end of the short one."""
    keys = new_keys(4)
    pool.must_store(keys, range(4), SHORT_LEASE_S)
    pool.context.require_shared_store()
    renew(keys)
    time.sleep(SHORT_LEASE_S + 0.1)
    return keys


def release(context: RuleContext) -> str:
    """After `release` a block is correct or missing; to release or prolong unknown or released keys is no error."""
    pool, keys = context.attach(), new_keys(4)
    pool.must_store(keys, range(4))
    for released in (keys[:2], new_keys(3), keys, keys, []):
        pool.connector.release(released)
        if pool.connector.capabilities.prolongs and not context.tickets:
            pool.connector.prolong(released, lease_s=LEASE_S)
    pool.may_load(keys, range(8, 12), list(pool.rows[:4]))
    pool.must_store(keys, range(4))
    pool.must_load(keys, range(8, 12), pool.rows[:4])
    pool.connector.release(keys)
    return ""


def prolonged_lease(context: RuleContext) -> str:
    """With the capability `prolongs`, a full store does not evict blocks whose leases were prolonged."""
    filler = _Filler(context, lease_s=0.0)
    connector = filler.pool.connector
    if not connector.capabilities.prolongs:
        raise NotChecked("the connector does not declare `prolongs`")

    def prolong(keys: list[bytes]) -> None:
        connector.prolong(keys, lease_s=LEASE_S)
        for _ in range(3):  # of which the last surely follows the other, whatever thread of the connector takes them
            time.sleep(SHORT_LEASE_S / 6)
            connector.prolong(keys[2:], lease_s=SHORT_LEASE_S)  # must not shorten the other
        filler.pool.match(keys)  # waits until they have been taken

    filler.store_with_two_leases(prolong)
    prolonged = filler.stored[:]
    filler.fill()
    for _ in filler.store_batches(len(filler.stored) // 2 * MiB):
        pass
    kept = filler.pool.match(prolonged)
    expected = f"all {len(prolonged)} blocks with prolonged leases to stay in a full store"
    _expect_leased(context, kept, len(prolonged), expected, f"{kept} left")
    connector.release(prolonged)
    return ""


def leases_under_pressure(context: RuleContext) -> str:
    """A full store refuses new blocks instead of evicting leased ones, also those whose first or last lease was shorter."""
    filler = _Filler(context, lease_s=LEASE_S)

    def store_again(keys: list[bytes]) -> None:
        filler.pool.must_store(keys, range(4), LEASE_S)
        filler.pool.must_store(keys[2:], range(2, 4), SHORT_LEASE_S)

    filler.store_with_two_leases(store_again)
    filler.fill()
    filler.require_space()
    filler.load_all(filler.refused)
    kept = filler.load_all()
    total = len(filler.stored)
    _expect_leased(context, kept, total, f"all {total} leased blocks to stay in a full store", f"{kept} left")
    filler.expect_space_after_deletion()
    filler.pool.connector.release(filler.stored)
    return f"full at {format_size(len(filler.stored) * MiB)}"


def capacity(context: RuleContext) -> str:
    """A full store evicts blocks or refuses new ones, and keeps correct ones; deleted ones, and ended leases, make room."""
    filler = _Filler(context, lease_s=0.0)
    filler.fill()
    for _ in filler.store_batches(len(filler.stored) // 2 * MiB):
        pass
    kept = filler.load_all()
    filler.require_space()
    expect(kept > 0, "some blocks to be left in a full store", "none")
    filler.expect_space_after_deletion()
    if not filler.refused:
        _expect_space_after_leases(context)
    return f"full at about {format_size(kept * MiB)}"


def _expect_space_after_leases(context: RuleContext) -> None:
    """Fill a store that evicts with leased blocks, and expect it to take others once all leases have ended."""
    filler = _Filler(context, lease_s=SHORT_LEASE_S)
    filler.fill()
    time.sleep(SHORT_LEASE_S + LEASE_GRAIN_S)
    for outcomes in filler.store_batches(BATCH * MiB):
        expected = f"{BATCH} blocks to be stored in a full store in which no lease runs any more"
        expect(Outcome.FULL not in outcomes, expected, summarize(outcomes))


def _expect_leased(context: RuleContext, seen: int, count: int, expected: str, saw: str) -> None:
    """Expect `count` leased blocks to be there, unless the store may evict them."""
    if seen < count and not context.keeps_leases:
        raise NotChecked(f"{EVICTS_LEASED}; {count - seen} of {count} blocks were evicted")
    expect(seen == count, expected, saw)


class _Filler:
    """Stores distinct blocks of 1 MiB until the store refuses or has evicted one.

    Attributes:
        stored, refused: keys of blocks by the outcome of their store.
    """

    def __init__(self, context: RuleContext, lease_s: float) -> None:
        self.pool: AttachedPool = context.attach(MiB, 2 * BATCH)
        self.stored: list[bytes] = []
        self.refused: list[bytes] = []
        self._lease_s = lease_s
        self._give_up_at = time.monotonic() + max(FILL_TIME_LIMIT_S, 10 * context.seconds)
        self._base_rows = self.pool.rows[:BATCH].copy()
        self._numbers: dict[bytes, int] = {}
        self._stored_bytes = 0

    def store_with_two_leases(self, renew: Callable[[list[bytes]], None]) -> None:
        """Store the first blocks with a short lease, have that renewed, and wait for the end of the short one."""
        for row in range(4):
            self.pool.rows[row] = self._base_rows[row]
            stamp(self.pool.rows[row], row)
        self.stored = _store_with_two_leases(self.pool, renew)
        self._numbers = {key: row for row, key in enumerate(self.stored)}
        self._stored_bytes = len(self.stored) * MiB

    def fill(self) -> None:
        """Store blocks until the store is full. Raises `NotChecked` if it does not get full."""
        for outcomes in self.store_batches(MAX_FILL_BYTES):
            if Outcome.FULL in outcomes or self.pool.match(self.stored) < len(self.stored):
                return
        self.load_all()  # a store that mixes up blocks when full may never appear to be full
        raise NotChecked(f"no limit was reached with {format_size(self._stored_bytes)}; use the URL of a smaller store")

    def require_space(self) -> None:
        """Raise `NotChecked` if the store has taken no block at all."""
        if not self.stored:
            raise NotChecked(f"no space for a single block of {format_size(MiB)}")

    def store_batches(self, limit_bytes: int) -> Iterator[list[Outcome]]:
        """Store `limit_bytes` in batches, and yield the outcomes of each."""
        stop = self._stored_bytes + limit_bytes
        while self._stored_bytes < stop and time.monotonic() < self._give_up_at:
            keys = new_keys(BATCH)
            for row, key in enumerate(keys):
                self._numbers[key] = len(self._numbers)
                self.pool.rows[row] = self._content(key)
            outcomes = self.pool.store(keys, range(BATCH), self._lease_s).outcomes
            self.pool.context.require_shared_store()
            allowed = (Outcome.OK, Outcome.FULL)
            valid = all(outcome in allowed for outcome in outcomes)
            expect(valid, "each block stored or refused as full", summarize(outcomes))
            for key, outcome in zip(keys, outcomes, strict=True):
                (self.stored if outcome is Outcome.OK else self.refused).append(key)
            self._stored_bytes += BATCH * MiB
            yield outcomes

    def expect_space_after_deletion(self) -> None:
        """Delete what was stored, where the connector can delete, and expect some blocks to be stored again."""
        self.pool.connector.parts()  # waits for blocks that are still being copied
        connectors = batched_connectors(self.pool.context.attach(MiB, 1).connector)
        for connector in connectors:
            connector.delete_many(self.stored)
        count = min(BATCH, len(self.stored)) if connectors else 0
        seen = self.pool.store(new_keys(count), range(count), self._lease_s).outcomes
        expected = f"{count} blocks to be stored after {len(self.stored)} were deleted from a full store"
        expect(seen == [Outcome.OK] * count, expected, summarize(seen))

    def load_all(self, keys: Sequence[bytes] | None = None) -> int:
        """Load all stored blocks, or these, and expect each to be correct or missing. Returns the number of correct ones."""
        kept, all_keys = 0, self.stored if keys is None else keys
        for start in range(0, len(all_keys), BATCH):
            keys = all_keys[start : start + BATCH]
            seen = self.pool.load(keys, range(BATCH, BATCH + len(keys))).outcomes
            for row, (key, outcome) in enumerate(zip(keys, seen, strict=True), BATCH):
                if outcome is Outcome.OK:
                    self.pool.must_equal(row, self._content(key))
                    kept += 1
                elif outcome is not Outcome.MISSING:
                    raise Broken(f"expected each block of a full store to be correct or missing, saw {outcome}")
        return kept

    def _content(self, key: bytes) -> Row:
        number = self._numbers[key]
        row: Row = self._base_rows[number % BATCH].copy()
        stamp(row, number)
        return row
