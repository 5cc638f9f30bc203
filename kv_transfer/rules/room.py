"""Rules about room: leases, release, and a store that is full."""

import time
from collections.abc import Iterator

from pdserve.kv_transfer.connector import Outcome
from pdserve.kv_transfer.header import Row
from pdserve.kv_transfer.rules.trial import (
    Broken,
    Instance,
    MiB,
    NotChecked,
    Trial,
    expect,
    mark,
    new_keys,
    size_text,
    summary,
)

LEASES_S = (0.6, 2.0, 6.0, 20.0)  # a busy machine may need longer than the first of them for four small blocks
FILL_BYTES = 320 * MiB  # a limit beyond this is not looked for
PATIENCE_S = 100.0  # with a store that is slow to fill
BATCH = 8


def lease(trial: Trial) -> str:
    """A block stays for as long as it is leased; after that it is right or missing, and can be stored again."""
    one = trial.instance()
    for lease_s in LEASES_S:
        keys = new_keys(4)
        started = time.monotonic()
        one.must_store(keys, range(4), lease_s)
        trial.needs_store()
        one.store(keys[:2], range(2), 0.01)  # a shorter lease does not shorten the one that is there
        one.connector.release(new_keys(2))
        looked = _looks_while_leased(one, keys, started + lease_s)
        time.sleep(max(0.0, started + lease_s + 0.1 - time.monotonic()))
        one.may_load(keys, range(8, 12), list(one.rows[:4]))
        one.must_store(keys, range(4))
        one.must_load(keys, range(8, 12), one.rows[:4])
        if looked:
            return ""
    raise NotChecked(f"the store needs more than {LEASES_S[-1]} s for four small blocks, so their leases had ended")


def _looks_while_leased(one: Instance, keys: list[bytes], end: float) -> bool:
    """Looks for the blocks until their leases end; false if there was no time for one look with an answer before that."""
    looked = False
    while True:
        seen = one.match(keys)
        if time.monotonic() >= end:
            return looked
        expect(seen == 4, "4 blocks to stay while they are leased", f"{seen} of them before the lease had ended")
        looked = True
        time.sleep(0.02)


def release(trial: Trial) -> str:
    """After `release` a block is right or missing; keys that are unknown, or released before, are no mistake."""
    one, keys = trial.instance(), new_keys(4)
    one.must_store(keys, range(4))
    for released in (keys[:2], new_keys(3), keys, keys, []):
        one.connector.release(released)
    one.may_load(keys, range(8, 12), list(one.rows[:4]))
    one.must_store(keys, range(4))
    one.must_load(keys, range(8, 12), one.rows[:4])
    one.connector.release(keys)
    return ""


def leases_under_pressure(trial: Trial) -> str:
    """A full store refuses new blocks rather than give up leased ones."""
    fill = _Fill(trial, lease_s=600.0)
    fill.until_full()
    kept = fill.load_all()
    everything = len(fill.stored)
    if kept < everything and not getattr(fill.one.connector, "keeps_leases", True):
        says = "the connector says that its store evicts leased blocks too (keeps_leases = False)"
        raise NotChecked(f"{says}; {everything - kept} of {everything} were")
    expect(kept == everything, f"all {everything} leased blocks to stay in a full store", f"{kept} left")
    fill.one.connector.release(fill.stored)
    return f"full at {size_text(len(fill.stored) * MiB)}"


def capacity(trial: Trial) -> str:
    """A full store evicts or refuses; what it says it has is right."""
    fill = _Fill(trial, lease_s=0.0)
    fill.until_full()
    for _ in fill.batches(len(fill.stored) // 2 * MiB):
        pass
    there = fill.load_all()
    expect(there > 0, "some blocks to be left in a full store", "none")
    return f"full at about {size_text(there * MiB)}"


class _Fill:
    """Stores blocks of 1 MiB, each with its number in it, until the store refuses or has forgotten one."""

    def __init__(self, trial: Trial, lease_s: float) -> None:
        self.one: Instance = trial.instance(MiB, 2 * BATCH)
        self.stored: list[bytes] = []
        self._lease_s = lease_s
        self._give_up = time.monotonic() + max(PATIENCE_S, 10 * trial.seconds)
        self._base = self.one.rows[:BATCH].copy()
        self._numbers: dict[bytes, int] = {}
        self._bytes = 0

    def until_full(self) -> None:
        for outcomes in self.batches(FILL_BYTES):
            if Outcome.FULL in outcomes or self.one.match(self.stored) < len(self.stored):
                return
        self.load_all()  # a store that mixes blocks up when it is full may never seem to be
        raise NotChecked(f"no limit was reached with {size_text(self._bytes)}; try a URL of a smaller store")

    def batches(self, limit: int) -> Iterator[list[Outcome]]:
        stop = self._bytes + limit
        while self._bytes < stop and time.monotonic() < self._give_up:
            keys = new_keys(BATCH)
            for row, key in enumerate(keys):
                self._numbers[key] = len(self._numbers)
                self.one.rows[row] = self._content(key)
            outcomes = self.one.store(keys, range(BATCH), self._lease_s).outcomes
            self.one.trial.needs_store()
            fine = (Outcome.OK, Outcome.FULL)
            expect(all(one in fine for one in outcomes), "each block stored or refused as full", summary(outcomes))
            self.stored += [key for key, outcome in zip(keys, outcomes, strict=True) if outcome is Outcome.OK]
            self._bytes += BATCH * MiB
            yield outcomes

    def load_all(self) -> int:
        """Every block is right or missing. How many are there."""
        there = 0
        for start in range(0, len(self.stored), BATCH):
            keys = self.stored[start : start + BATCH]
            seen = self.one.load(keys, range(BATCH, BATCH + len(keys))).outcomes
            for row, (key, outcome) in enumerate(zip(keys, seen, strict=True), BATCH):
                if outcome is Outcome.OK:
                    self.one.must_equal(row, self._content(key))
                    there += 1
                elif outcome is not Outcome.MISSING:
                    raise Broken(f"expected each block of a full store to be right or missing, saw {outcome}")
        return there

    def _content(self, key: bytes) -> Row:
        number = self._numbers[key]
        row: Row = self._base[number % BATCH].copy()
        mark(row, number)
        return row
