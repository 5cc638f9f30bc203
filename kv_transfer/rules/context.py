"""The environment in which a conformance rule runs: fresh connectors with pools of their own, and checked results.

A rule is a function of one `RuleContext`. It returns a note for the report, or raises `Broken` (the connector breaks the
rule) or `NotChecked` (the rule cannot be checked from outside). Nothing here depends on a particular connector.
"""

import contextlib
import os
import random
import threading
import time
import uuid
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from typing import TypeVar

import numpy as np

from pdserve.errors import SetupError
from pdserve.keys import KEY_BYTES, LAYOUT_VERSION, Layout
from pdserve.kv_transfer.batched import BatchedConnector
from pdserve.kv_transfer.codec import CODECS, Codec
from pdserve.kv_transfer.connector import Connector, Outcome, PoolMemory, Result
from pdserve.kv_transfer.header import Row
from pdserve.kv_transfer.registry import connect

KiB, MiB = 1 << 10, 1 << 20
# No rule judges durations, which depend on the machine more than on the connector. These limits are for events that will
# never happen; no machine is slow or busy enough to exceed them.
GRACE_S = 30.0  # for a future, beyond the connector's own timeout
WAIT_LIMIT_S = 30.0  # for everything else
PAUSE_SHARE, PAUSE_S = 1 / 16, 5e-5  # of all calls and returns in a thread; long enough for another one to run

EVICTS_LEASED = "the connector declares that its store evicts leased blocks too (keeps_leases = False)"

T = TypeVar("T")


class Broken(Exception):
    """The connector breaks the rule. The text states what was expected and what was seen."""


class NotChecked(Exception):
    """The rule cannot be checked from outside. The text states the reason."""


class Lost(Broken):
    """Blocks that were stored are missing, and nothing else is wrong. An eviction looks the same (`evictions.py`)."""


def expect(condition: bool, expected: str, seen: object, error: type[Broken] = Broken) -> None:
    """Raise `Broken`, or the given subclass, unless the condition holds."""
    if not condition:
        raise error(f"expected {expected}, saw {seen}")


def expect_ok(outcomes: Sequence[Outcome], expected: str) -> None:
    """Expect all blocks of a load to be OK. Raises `Lost` if some are missing and nothing else is wrong."""
    is_loss = set(outcomes) <= {Outcome.OK, Outcome.MISSING}
    expect(set(outcomes) <= {Outcome.OK}, expected, summarize(outcomes), Lost if is_loss else Broken)


def expect_outcomes(outcomes: Sequence[Outcome], expected: Sequence[Outcome]) -> None:
    """Expect exactly these outcomes. Raises `Lost` if blocks are missing that should be OK, and nothing else is wrong."""
    wrong = {pair for pair in zip(outcomes, expected, strict=True) if pair[0] is not pair[1]}
    error = Lost if wrong == {(Outcome.MISSING, Outcome.OK)} else Broken
    expect(not wrong, ", ".join(expected), ", ".join(outcomes), error)


def expect_count(seen: int, count: int, expected: str) -> None:
    """Expect to see `count` stored blocks. Raises `Lost` if there are fewer."""
    expect(seen == count, expected, seen, Lost if seen < count else Broken)


def new_keys(count: int) -> list[bytes]:
    return [os.urandom(KEY_BYTES) for _ in range(count)]


def make_layout(block_bytes: int, fingerprint: str = "a model", version: int = LAYOUT_VERSION) -> Layout:
    """Return a layout of float32 blocks of `block_bytes`, a multiple of 8."""
    return Layout(
        model_fingerprint=fingerprint,
        num_layers=1,
        num_kv_heads=1,
        head_dim=block_bytes // 8,
        block_size=1,
        dtype="float32",
        itemsize=4,
        version=version,
    )


def random_rows(blocks: int, block_bytes: int, seed: int | None = None) -> Row:
    """Return rows that resemble KV to a codec: numbers around 0, the last quarter 0 as in a partial block."""
    rows = np.random.default_rng(seed).standard_normal((blocks, block_bytes // 4), np.float32)
    rows[:, -(block_bytes // 16) :] = 0
    return rows.view(np.uint8)


def stamp(rows: Row, number: int) -> None:
    """Make rows unique by writing `number` into them. Survives a lossy codec, which keeps the largest number of a row."""
    rows[..., :4] = np.float32(number + 16).reshape(1).view(np.uint8)


class AttachedPool:
    """A pool of random numbers with its own connector. Calls wait for the result and check that it is valid.

    Attributes:
        rows: the pool, uint8 [blocks, block_bytes].
        stored_row: the row from which each key was stored last.
        codec: of the stored blocks.
    """

    def __init__(self, context: "RuleContext", url: str, layout: Layout, blocks: int, *, empty: bool = False) -> None:
        """If it is `empty`, it is one of zeros, of which only rows that are written to take memory."""
        self.context = context
        self.layout = layout
        size = layout.block_bytes
        self.rows: Row = np.zeros((blocks, size), np.uint8) if empty else random_rows(blocks, size)
        self.stored_row: dict[bytes, int] = {}
        self.closed = False
        self.connector: Connector = connect(url)
        self.codec: Codec = CODECS[self.connector.capabilities.codec](layout)
        context.call = "attach"
        try:
            self.connector.attach(PoolMemory(self.rows, layout))
        except BaseException:
            self.close()
            raise

    @property
    def timeout(self) -> float:
        return self.connector.capabilities.timeout_s

    @property
    def limit_s(self) -> float:
        """Seconds after which what was to end by the timeout never will."""
        return self.timeout + GRACE_S

    def store(self, keys: Sequence[bytes], ids: Sequence[int], lease_s: float = 600.0) -> Result:
        self.context.register_keys(self.layout, keys)
        result = self.wait_transfer(self.connector.store(keys, ids, lease_s=lease_s), "store", len(keys))
        self.keep_ticket(keys, result)
        self.stored_row.update(zip(keys, ids, strict=True))
        return result

    def load(self, keys: Sequence[bytes], ids: Sequence[int]) -> Result:
        return self.wait_transfer(self.start_load(keys, ids), "load", len(keys))

    def start_load(self, keys: Sequence[bytes], ids: Sequence[int]) -> Future[Result]:
        return self.connector.load(keys, ids, tickets=self.tickets(keys))

    def keep_ticket(self, keys: Sequence[bytes], result: Result) -> None:
        """Keep the ticket of a store for later loads of its keys."""
        if result.ticket:
            self.context.tickets.update({(self.layout.namespace, key): result.ticket for key in keys})

    def tickets(self, keys: Sequence[bytes]) -> list[bytes]:
        """Return the tickets that a hand-over of these blocks would carry: of each one's last store in this namespace."""
        names = [(self.layout.namespace, key) for key in keys]
        return list(dict.fromkeys(self.context.tickets[name] for name in names if name in self.context.tickets))

    def match(self, keys: Sequence[bytes]) -> int:
        return self.wait(self.connector.match(keys), "match")

    def must_store(
        self, keys: Sequence[bytes], ids: Sequence[int], lease_s: float = 600.0, *, must_fit: bool = False
    ) -> None:
        """Store, and expect all blocks to be OK.

        If the store is full, the rule is not checked; if the blocks `must_fit`, it is broken.
        """
        self.must_have_stored(self.store(keys, ids, lease_s), must_fit=must_fit)

    def must_have_stored(self, result: Result, *, must_fit: bool = False) -> None:
        """Expect all blocks of a store to be OK, as `must_store` does."""
        seen = result.outcomes
        if set(seen) - {Outcome.OK} == {Outcome.FULL} and not must_fit:
            raise NotChecked(f"no space for {len(seen)} more blocks of {format_size(self.layout.block_bytes)}")
        expect(set(seen) <= {Outcome.OK}, f"all {len(seen)} blocks stored", summarize(seen))

    def must_load(self, keys: Sequence[bytes], ids: Sequence[int], contents: Row) -> None:
        """Load, and expect all blocks to be OK with these contents."""
        self.must_have_loaded(self.load(keys, ids), ids, contents)

    def must_have_loaded(self, result: Result, ids: Sequence[int], contents: Row) -> None:
        """Expect all blocks of a load to be OK with these contents."""
        expect_ok(result.outcomes, f"all {len(ids)} blocks loaded")
        for row, content in zip(ids, contents, strict=True):
            self.must_equal(row, content)

    def may_load(self, keys: Sequence[bytes], ids: Sequence[int], contents: Sequence[Row], leased: bool = False) -> int:
        """Load, and expect each block to be OK with its content, or missing, or unavailable with a ticket of a dead peer.

        Returns:
            The number of blocks that are OK. A block that matched before must be among them if it is `leased`; otherwise it
            may have been evicted meanwhile.
        """
        allowed = (Outcome.OK, Outcome.MISSING, *([Outcome.UNAVAILABLE] if self.tickets(keys) else []))
        matched = [self.match([key]) for key in keys]
        seen = self.load(keys, ids).outcomes
        for row, content, outcome, match in zip(ids, contents, seen, matched, strict=True):
            expect(outcome in allowed, "each block to be OK or missing", f"a load that returned {outcome}")
            expect(
                match == 0 or outcome is Outcome.OK or not leased, "a block that matched to load", f"{outcome}", Lost
            )
            if outcome is Outcome.OK:
                self.must_equal(row, content)
        return sum(outcome is Outcome.OK for outcome in seen)

    def payload_bytes(self, row: int) -> int:
        return len(self.codec.encode(self.rows[row]))

    def must_equal(self, row: int, content: Row) -> None:
        """Expect a row to have this content, after a lossy codec what the codec makes of it."""
        if self.codec.lossy:
            content = self.codec.decode(self.codec.encode(content).tobytes())
        wrong = int(np.count_nonzero(self.rows[row] != content))
        expect(wrong == 0, "the bytes that were stored", f"{wrong} wrong bytes in a block that was reported as loaded")

    def wait_transfer(self, future: "Future[Result]", call: str, blocks: int) -> Result:
        """Wait for a store or load, and expect one outcome per block."""
        result = self.wait(future, call)
        expect(isinstance(result, Result), f"{call} to return a Result", type(result).__name__)
        expect(len(result.outcomes) == blocks, f"{blocks} outcomes of {call}", len(result.outcomes))
        return result

    def wait(self, future: "Future[T]", call: str) -> T:
        """Return the future's result, and expect it within the timeout and without an exception."""
        limit = self.limit_s
        self.context.call = call
        try:
            return future.result(limit)
        except TimeoutError as error:
            if not future.done():
                expected = f"the future of {call} to be done within the timeout of {self.timeout:g} s"
                raise Broken(f"expected {expected}, saw it not done after {limit:g} s") from error
            raise Broken(f"expected {call} to report faults as outcomes, saw its future raise TimeoutError") from error
        except Exception as error:
            if isinstance(
                error.__context__, KeyboardInterrupt
            ):  # Ctrl-C amid `Condition.wait`, which then lacks its lock
                raise KeyboardInterrupt from error
            seen = f"its future raise {type(error).__name__}: {error}"
            raise Broken(f"expected {call} to report faults as outcomes, saw {seen}") from error

    def close(self) -> None:
        if not self.closed:
            self.closed = True
            self.context.call = "close"
            self.connector.close()


class RuleContext:
    """The environment of one rule: a namespace, attached pools, and the keys stored, which are deleted at the end.

    Attributes:
        seconds: how long randomized rules run.
        tickets: of stored blocks, by namespace and key.
        call: the call that was made last, or is being waited for. Read by other threads, to show progress.
        stored_blocks: number of keys registered so far, by block length.
        keeps_leases: what the connectors attached so far declare.
    """

    def __init__(self, url: str, seconds: float) -> None:
        self.url = url
        self.seconds = seconds
        self.fingerprint = f"conformance {uuid.uuid4().hex}"
        self.tickets: dict[tuple[bytes, bytes], bytes] = {}
        self.call = ""
        self.stored_blocks: Counter[int] = Counter()
        self.keeps_leases = True
        self._attached: set[tuple[str, int]] = set()  # URL and block length of all pools so far
        self._pools: list[AttachedPool] = []
        self._keys: dict[bytes, set[bytes]] = {}

    def attach(
        self,
        block_bytes: int = 4 * KiB,
        blocks: int = 16,
        *,
        tenant: str = "",
        version: int = LAYOUT_VERSION,
        url: str = "",
        empty: bool = False,
    ) -> AttachedPool:
        """Attach a new pool. `tenant` and `version` change the namespace; `url` replaces the context's.

        Raises:
            SetupError: the store cannot be used with blocks of this length.
        """
        layout = make_layout(block_bytes, self.fingerprint + tenant, version)
        return self._attach(url or self.url, layout, blocks, empty=empty)

    def detach(self, pool: AttachedPool) -> None:
        """Close a pool, which waits for its operations. Another pool is attached, to delete its blocks in the end."""
        pool.close()
        self._attach(self.url, pool.layout, 1)

    def _attach(self, url: str, layout: Layout, blocks: int, *, empty: bool = False) -> AttachedPool:
        """Attach a pool. A refusal after a pool of such blocks was attached is a fault of the connector."""
        try:
            pool = AttachedPool(self, url, layout, blocks, empty=empty)
        except SetupError as error:
            if (url, layout.block_bytes) not in self._attached:
                raise
            expected = "another connector of this URL to attach in the same process"
            raise Broken(f"expected {expected}, saw {type(error).__name__}: {error}") from error
        self._attached.add((url, layout.block_bytes))
        self.keeps_leases &= pool.connector.capabilities.keeps_leases
        self._pools.append(pool)
        return pool

    def register_keys(self, layout: Layout, keys: Collection[bytes]) -> None:
        """Record keys to be deleted from the store when the context closes, where the connector can delete."""
        known = self._keys.setdefault(layout.namespace, set())
        self.stored_blocks[layout.block_bytes] += len(set(keys) - known)
        known.update(keys)

    def require_shared_store(self) -> None:
        """Raise `NotChecked` if blocks stay in the storing pool. Called after the first store of a rule."""
        if self.tickets:
            raise NotChecked("blocks stay with the instance that stored them (its results carry tickets)")

    def close(self) -> None:
        """Close all pools, after deleting their blocks. New ones can be attached afterwards."""
        pools, self._pools = self._pools, []
        for pool in pools:
            if not pool.closed:
                self.delete_blocks(pool)
            pool.close()

    def last_warnings(self) -> list[str]:
        """Return the latest warning of each connector, such as the fault because of which its blocks are unavailable."""
        connectors = [one for pool in self._pools for one in batched_connectors(pool.connector)]
        return list(dict.fromkeys(one.last_warning for one in connectors if one.last_warning))

    def delete_blocks(self, pool: AttachedPool) -> bool:
        """Delete the blocks stored in this pool's namespace. Returns False if the connector cannot delete.

        Where it cannot, their leases end: those of one rule would keep a small store full for the next, and for ten minutes.
        """
        keys = list(self._keys.pop(pool.layout.namespace, set()))
        connectors = batched_connectors(pool.connector)
        for connector in connectors:
            with contextlib.suppress(Exception):
                connector.delete_many(keys)
        if keys and not connectors:
            with contextlib.suppress(Exception):
                pool.connector.release(keys, tickets=pool.tickets(keys))
        return bool(connectors)


@contextmanager
def interrupted_threads(pause_s: float = PAUSE_S) -> Iterator[None]:
    """Interrupt the threads that are started in the body at random calls and returns, where others may run then."""

    def pause(*_: object) -> None:
        if random.random() < PAUSE_SHARE:
            time.sleep(pause_s)

    before = threading.getprofile()
    threading.setprofile(pause)
    try:
        yield
    finally:
        threading.setprofile(before)


def count_open_files() -> int:
    """Return the number of open files of this process; 0 where there is no /proc."""
    try:
        return len(os.listdir("/proc/self/fd"))
    except FileNotFoundError:
        return 0


def summarize(outcomes: Sequence[Outcome]) -> str:
    """Return the outcomes with their numbers, such as "3 ok, 1 missing"."""
    counts = (f"{outcomes.count(outcome)} {outcome}" for outcome in Outcome if outcome in outcomes)
    return ", ".join(counts) or "nothing"


def format_size(size: int) -> str:
    return f"{size // MiB} MiB" if size >= MiB else f"{size // KiB} KiB"


def batched_connectors(connector: Connector) -> list[BatchedConnector]:
    """Return the connectors whose hooks reach the stores."""
    return [part for part in connector.parts() if isinstance(part, BatchedConnector)]


@contextmanager
def noting_refusal(notes: list[str], subject: str) -> Iterator[None]:
    """Record a `SetupError` as a note: a store may refuse what is too large for it."""
    try:
        yield
    except SetupError as error:
        notes.append(f"{subject} refused: {error}")


def wait_until(condition: Callable[[], bool], seconds: float | None = None) -> bool:
    """Poll a condition for at most `seconds`, by default `WAIT_LIMIT_S`. Returns its last value."""
    give_up_at = time.monotonic() + (WAIT_LIMIT_S if seconds is None else seconds)
    while not (holds := condition()) and time.monotonic() < give_up_at:
        time.sleep(0.01)
    return holds
