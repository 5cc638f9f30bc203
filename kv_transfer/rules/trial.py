"""What a rule works with: fresh connectors with pools of their own, results that must come in time.

A rule is a function of one `Trial`. It returns a note for the table, or raises `Broken` (the rule does not hold) or
`NotChecked` (it cannot be told from outside). Nothing here knows any particular connector.
"""

import contextlib
import os
import time
import uuid
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from typing import TypeVar

import numpy as np

from pdserve.errors import SetupError
from pdserve.keys import KEY_BYTES, LAYOUT_VERSION, Layout
from pdserve.kv_transfer.codec import Codec, Plain
from pdserve.kv_transfer.connector import Connector, Outcome, PoolMemory, Result
from pdserve.kv_transfer.header import Row
from pdserve.kv_transfer.registry import connect
from pdserve.kv_transfer.threaded import BatchedConnector

KiB, MiB = 1 << 10, 1 << 20
# No rule judges how long something takes, which says more about the machine than about the connector. These are for what
# will never come: no machine is so slow or so busy.
GRACE_S = 30.0  # of a future, beyond the connector's own time-out
PATIENCE_S = 30.0  # of everything else
DEFAULT_TIMEOUT_S = 5.0  # of a connector without an attribute `timeout`

T = TypeVar("T")


class Broken(Exception):
    """The rule does not hold. The text says what was expected and what was seen."""


class NotChecked(Exception):
    """The rule cannot be checked from outside. The text says why."""


def expect(holds: bool, expected: str, seen: object) -> None:
    if not holds:
        raise Broken(f"expected {expected}, saw {seen}")


def new_keys(count: int) -> list[bytes]:
    return [os.urandom(KEY_BYTES) for _ in range(count)]


def make_layout(block_bytes: int, fingerprint: str = "a model", version: int = LAYOUT_VERSION) -> Layout:
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
    """Such as KV, for codecs: numbers around 0, the last quarter of each row 0 as in a block that is not full."""
    rows = np.random.default_rng(seed).standard_normal((blocks, block_bytes // 4), np.float32)
    rows[:, -(block_bytes // 16) :] = 0
    return rows.view(np.uint8)


def mark(rows: Row, number: int) -> None:
    """Makes them unlike others, also behind a lossy codec: it keeps the largest number of a row."""
    rows[..., :4] = np.float32(number + 16).reshape(1).view(np.uint8)


class Instance:
    """A pool of random numbers with a connector attached. Its calls wait for the result, which must come in time."""

    def __init__(self, trial: "Trial", url: str, layout: Layout, blocks: int) -> None:
        self.trial = trial
        self.layout = layout
        self.rows = random_rows(blocks, layout.block_bytes)
        self.row_of: dict[bytes, int] = {}  # from which a key was stored last
        self.closed = False
        self.connector: Connector = connect(url)
        try:
            self.connector.attach(PoolMemory(self.rows, layout))
        except BaseException:
            self.close()
            raise

    @property
    def timeout(self) -> float:
        return float(getattr(self.connector, "timeout", DEFAULT_TIMEOUT_S))

    def store(self, keys: Sequence[bytes], ids: Sequence[int], lease_s: float = 600.0) -> Result:
        self.trial.remember(self.layout, keys)
        result = self.result(self.connector.store(keys, ids, lease_s=lease_s), "store", len(keys))
        self.take_ticket(keys, result)
        self.row_of.update(zip(keys, ids, strict=True))
        return result

    def load(self, keys: Sequence[bytes], ids: Sequence[int]) -> Result:
        future = self.connector.load(keys, ids, tickets=self.tickets(keys))
        return self.result(future, "load", len(keys))

    def take_ticket(self, keys: Sequence[bytes], result: Result) -> None:
        if result.ticket:
            self.trial.tickets.update({(self.layout.namespace, key): result.ticket for key in keys})

    def tickets(self, keys: Sequence[bytes]) -> list[bytes]:
        """What the hand-over of these blocks would carry: the ticket of each one's last store, in this namespace."""
        names = [(self.layout.namespace, key) for key in keys]
        return list(dict.fromkeys(self.trial.tickets[name] for name in names if name in self.trial.tickets))

    def match(self, keys: Sequence[bytes]) -> int:
        return self.end(self.connector.match(keys), "match")

    def must_store(
        self, keys: Sequence[bytes], ids: Sequence[int], lease_s: float = 600.0, *, room: bool = False
    ) -> None:
        """All blocks are stored. If the store is too small for them, nothing follows, unless there has to be `room`."""
        seen = self.store(keys, ids, lease_s).outcomes
        if set(seen) - {Outcome.OK} == {Outcome.FULL} and not room:
            raise NotChecked(f"no room for {len(keys)} more blocks of {size_text(self.layout.block_bytes)}")
        expect(all(one is Outcome.OK for one in seen), f"all {len(keys)} blocks stored", summary(seen))

    def must_load(self, keys: Sequence[bytes], ids: Sequence[int], right: Row) -> None:
        """All blocks are there, with the right bytes."""
        seen = self.load(keys, ids).outcomes
        expect(all(one is Outcome.OK for one in seen), f"all {len(keys)} blocks loaded", summary(seen))
        for row, content in zip(ids, right, strict=True):
            self.must_equal(row, content)

    def may_load(self, keys: Sequence[bytes], ids: Sequence[int], right: Sequence[Row], leased: bool = False) -> int:
        """Each block is there with the right bytes, or missing, or stays with a peer that is gone. How many were there.

        One that had matched must be there if it is `leased`; otherwise it may have gone meanwhile.
        """
        may_be = (Outcome.OK, Outcome.MISSING, *([Outcome.UNAVAILABLE] if self.tickets(keys) else []))
        matched = [self.match([key]) for key in keys]
        seen = self.load(keys, ids).outcomes
        for row, content, outcome, match in zip(ids, right, seen, matched, strict=True):
            expect(outcome in may_be, "each block whole or missing", f"a load that said {outcome}")
            expect(match == 0 or outcome is Outcome.OK or not leased, "a block that matched to load", f"{outcome}")
            if outcome is Outcome.OK:
                self.must_equal(row, content)
        return sum(one is Outcome.OK for one in seen)

    @property
    def codec(self) -> Codec:
        """What `?codec=` names, where the connector has that from us."""
        codec = getattr(self.connector, "codec", None)
        return codec if isinstance(codec, Codec) else Plain(self.layout)

    def payload_bytes(self, row: int) -> int:
        return len(self.codec.encode(self.rows[row]))

    def must_equal(self, row: int, content: Row) -> None:
        if self.codec.lossy:
            content = self.codec.decode(self.codec.encode(content).tobytes())
        wrong = int(np.count_nonzero(self.rows[row] != content))
        expect(wrong == 0, "the bytes that were stored", f"{wrong} wrong bytes in a block that was reported as loaded")

    def result(self, future: "Future[Result]", what: str, blocks: int) -> Result:
        result = self.end(future, what)
        expect(isinstance(result, Result), f"{what} to give a Result", type(result).__name__)
        expect(len(result.outcomes) == blocks, f"{blocks} outcomes of {what}", len(result.outcomes))
        return result

    def end(self, future: "Future[T]", what: str) -> T:
        """The future's result, which comes within the time-out and is no exception."""
        limit = self.timeout + GRACE_S
        try:
            return future.result(limit)
        except TimeoutError as late:
            if not future.done():
                expected = f"the future of {what} to be done within the time-out of {self.timeout:g} s"
                raise Broken(f"expected {expected}, saw it not done after {limit:g} s") from late
            raise Broken(f"expected {what} to report faults as outcomes, saw its future raise TimeoutError") from late
        except Exception as error:
            seen = f"its future raise {type(error).__name__}: {error}"
            raise Broken(f"expected {what} to report faults as outcomes, saw {seen}") from error

    def close(self) -> None:
        if not self.closed:
            self.closed = True
            self.connector.close()


class Trial:
    """One rule's own world: namespace, instances, keys."""

    def __init__(self, url: str, seconds: float) -> None:
        self.url = url
        self.seconds = seconds  # how long rules that try at random go on
        self.fingerprint = f"conformance {uuid.uuid4().hex}"
        self.tickets: dict[tuple[bytes, bytes], bytes] = {}  # of namespace and key
        self._instances: list[Instance] = []
        self._keys: dict[bytes, set[bytes]] = {}

    def instance(
        self,
        block_bytes: int = 4 * KiB,
        blocks: int = 16,
        *,
        tenant: str = "",
        version: int = LAYOUT_VERSION,
        url: str = "",
    ) -> Instance:
        layout = make_layout(block_bytes, self.fingerprint + tenant, version)
        self._instances.append(Instance(self, url or self.url, layout, blocks))
        return self._instances[-1]

    def end(self, instance: Instance) -> None:
        """Closes it, which waits for what is under way. Another one will remove what it has stored."""
        instance.close()
        self._instances.append(Instance(self, self.url, instance.layout, 1))

    def remember(self, layout: Layout, keys: Iterable[bytes]) -> None:
        """These keys are the kit's own, and go when the trial ends, where the connector has a way to remove them."""
        self._keys.setdefault(layout.namespace, set()).update(keys)

    def needs_store(self) -> None:
        """Call after the first store of a rule that presupposes a store of its own between the pools."""
        if self.tickets:
            raise NotChecked("blocks stay with the instance that stored them (its results carry tickets)")

    def close(self) -> None:
        """Closes all instances. A trial can go on with new ones."""
        instances, self._instances = self._instances, []
        for instance in instances:
            if not instance.closed:
                self.tidy(instance)
            instance.close()

    def tidy(self, instance: Instance) -> bool:
        """Removes what this namespace's instances have stored. Whether there is a way to."""
        keys = self._keys.pop(instance.layout.namespace, set())
        stores = stores_of(instance.connector)
        for store in stores:
            with contextlib.suppress(Exception):
                store.delete_many(list(keys))
        return bool(stores)


def summary(outcomes: Sequence[Outcome]) -> str:
    """Such as "3 ok, 1 missing"."""
    return ", ".join(f"{outcomes.count(one)} {one}" for one in Outcome if one in outcomes) or "nothing"


def size_text(size: int) -> str:
    return f"{size // MiB} MiB" if size >= MiB else f"{size // KiB} KiB"


def stores_of(connector: Connector) -> list[BatchedConnector]:
    """Those whose hooks reach the stores: itself, or the `connectors` behind it, once they have `settle`d."""
    if isinstance(connector, BatchedConnector):
        return [connector]
    getattr(connector, "settle", lambda: None)()
    return [one for one in getattr(connector, "connectors", ()) if isinstance(one, BatchedConnector)]


@contextmanager
def refused_as_note(notes: list[str], what: str) -> Iterator[None]:
    """A store may refuse what is too large for it, with a sentence; the rule then holds for the rest."""
    try:
        yield
    except SetupError as error:
        notes.append(f"{what} refused: {error}")


def until(condition: Callable[[], bool], seconds: float | None = None) -> bool:
    """Waits until it holds, or for so long; for all of the kit's patience unless told otherwise."""
    give_up = time.monotonic() + (PATIENCE_S if seconds is None else seconds)
    while not (held := condition()) and time.monotonic() < give_up:
        time.sleep(0.01)
    return held
