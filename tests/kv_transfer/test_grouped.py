"""One connector for all groups of a pool: which blocks it moves of each, and which prefixes it finds."""

from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import replace
from typing import Any

import pytest
import torch

from pdserve.keys import STATE_WINDOW, Layout, Section
from pdserve.kv_transfer.connector import Connector, Outcome, PoolMemory, Result, Stats
from pdserve.kv_transfer.grouped import GroupedConnector, attach_groups

FORMAT: dict[str, Any] = {"model_fingerprint": "m", "num_kv_heads": 1, "head_dim": 4, "dtype": "uint8", "itemsize": 1}
LAYOUT = Layout(
    num_layers=1, block_size=16, more=(Section(num_layers=2, num_kv_heads=1, head_dim=4, window=48),), **FORMAT
)
KEYS = [bytes([i]) * 16 for i in range(10)]
OK, MISSING, CORRUPT = Outcome.OK, Outcome.MISSING, Outcome.CORRUPT


class Part(Connector):
    """Has some keys, and ends every operation at once."""

    scheme = "part"

    def __init__(self, found: Sequence[bytes] = KEYS) -> None:
        self.found = set(found)
        self.calls: list[tuple[Any, ...]] = []
        self.memory: PoolMemory | None = None
        self.asked = 0
        self.counters = Stats(blocks={"store": 1, "load": 2})

    def attach(self, memory: PoolMemory) -> None:
        self.memory = memory

    def store(self, keys: Sequence[bytes], block_ids: Sequence[int], *, lease_s: float) -> Future[Result]:
        self.calls.append(("store", [*keys], [*block_ids], lease_s))
        return self._done(Result([OK] * len(keys), 1.0, b"ticket of %d" % len(keys)))

    def load(self, keys: Sequence[bytes], block_ids: Sequence[int], *, tickets: Sequence[bytes] = ()) -> Future[Result]:
        self.calls.append(("load", [*keys], [*block_ids], [*tickets]))
        return self._done(Result([OK if key in self.found else MISSING for key in keys], 2.0))

    def match(self, keys: Sequence[bytes]) -> Future[int]:
        self.asked += 1
        return self._done(next((i for i, key in enumerate(keys) if key not in self.found), len(keys)))

    def release(self, keys: Sequence[bytes], *, tickets: Sequence[bytes] = ()) -> None:
        self.calls.append(("release", [*keys], [*tickets]))

    def stats(self) -> Stats:
        return self.counters

    def prolong(self, keys: Sequence[bytes], *, lease_s: float, tickets: Sequence[bytes] = ()) -> None:
        self.calls.append(("prolong", [*keys], lease_s, [*tickets]))

    def close(self) -> None:
        self.calls.append(("close",))

    def _done(self, result: Any) -> Future[Any]:
        future: Future[Any] = Future()
        future.set_result(result)
        return future


def test_each_group_has_a_connector_with_its_own_layout() -> None:
    class Views:
        views = (torch.zeros((4, 128), dtype=torch.uint8), torch.zeros((2, 256), dtype=torch.uint8))
        copies = None

    parts = [Part(), Part()]
    attach_groups(parts[0], lambda: parts[1], Views(), LAYOUT)
    for part, layout, rows in zip(parts, LAYOUT.groups, Views.views, strict=True):
        assert part.memory is not None and part.memory.layout == layout
        assert part.memory.rows.shape == tuple(rows.shape) == (len(rows), layout.block_bytes)


def test_blocks_go_to_their_groups_and_outcomes_come_back_in_order() -> None:
    full, window = Part(KEYS[:2]), Part(KEYS[1:])
    grouped = GroupedConnector([full, window], LAYOUT, [100, 50])
    keys, blocks = [*KEYS[:3], *KEYS[:2]], [7, 8, 9, 100, 149]
    stored = grouped.store(keys, blocks, lease_s=5.0).result()
    assert stored.outcomes == [OK] * 5
    assert full.calls == [("store", KEYS[:3], [7, 8, 9], 5.0)] and window.calls == [("store", KEYS[:2], [0, 49], 5.0)]
    loaded = grouped.load(keys, blocks, tickets=[stored.ticket]).result()
    assert loaded.outcomes == [OK, OK, MISSING, MISSING, OK]
    assert full.calls[1][3] == [b"ticket of 3"] and window.calls[1][3] == [b"ticket of 2"]
    only_full = grouped.store(KEYS[:1], [0], lease_s=0.0).result()
    assert len(window.calls) == 2
    grouped.release(KEYS[:1], tickets=[only_full.ticket])
    assert full.calls[-1] == ("release", KEYS[:1], [b"ticket of 1"]) and window.calls[-1][0] == "load"
    grouped.release_blocks([*KEYS[:2], KEYS[1]], [0, 99, 100], tickets=[stored.ticket])
    assert full.calls[-1] == ("release", KEYS[:2], [b"ticket of 3"])
    assert window.calls[-1] == ("release", KEYS[1:2], [b"ticket of 2"])
    assert grouped.stats().blocks == {"store": 2, "load": 4}
    both = grouped.store([*KEYS[:2], KEYS[0]], [0, 1, 100], lease_s=0.0).result()
    grouped.prolong(KEYS[:2], lease_s=7.0, tickets=[both.ticket])
    prolonged = [part.calls.pop() for part in (full, window)]
    assert prolonged == [("prolong", KEYS[:2], 7.0, [b"ticket of 2"]), ("prolong", KEYS[:2], 7.0, [b"ticket of 1"])]


def test_a_transfer_of_nothing_ends() -> None:
    grouped = GroupedConnector([Part(), Part()], LAYOUT, [100, 50])
    for transfer in (grouped.store([], [], lease_s=0.0), grouped.load([], [])):
        assert transfer.result(60) == Result([], 0.0)


def test_a_store_is_out_if_it_is_out_for_one_group() -> None:
    """Each group has a connection of its own; of tiers, heartbeats name those that are out."""
    full, window = Part(), Part()
    grouped = GroupedConnector([full, window], LAYOUT, [100, 50])
    full.counters.parts = {"fast": Stats(blocks={"store": 1, "load": 0}), "slow": Stats()}
    window.counters.parts = {"fast": Stats(blocks={"store": 4, "load": 0}), "slow": Stats(is_out=True)}
    stats = grouped.stats()
    assert stats.parts["fast"].blocks == {"store": 5, "load": 0} and not stats.parts["fast"].is_out
    assert stats.parts["slow"].is_out and not stats.is_out and stats.any_out
    window.counters.is_out = True
    assert grouped.stats().is_out


@pytest.mark.parametrize(
    ("full", "missing", "expected"),
    [
        (10, [], 10),
        (10, [*range(7)], 10),  # token 160 reaches token 113, in block 7
        (10, [7], 7),
        (10, [*range(8)], 0),
        (10, [8, 9], 8),
        (6, [], 6),
        (0, [], 0),
        (1, [0], 0),
    ],
)
def test_a_prefix_is_found_if_the_window_behind_it_is_there(full: int, missing: list[int], expected: int) -> None:
    window = Part([key for i, key in enumerate(KEYS) if i not in missing])
    grouped = GroupedConnector([Part(KEYS[:full]), window], LAYOUT, [100, 50])
    assert grouped.match(KEYS).result() == expected


@pytest.mark.parametrize(("window", "missing", "expected"), [(49, 6, 10), (50, 6, 6), (49, 7, 7), (33, 7, 10)])
def test_a_window_reaches_back_to_its_first_token(window: int, missing: int, expected: int) -> None:
    """Token 160 reaches token 112, the first of block 7, with a window of 49 tokens."""
    layout = replace(LAYOUT, more=(replace(LAYOUT.more[0], window=window),))
    parts = [Part(), Part([key for i, key in enumerate(KEYS) if i != missing])]
    assert GroupedConnector(parts, layout, [100, 50]).match(KEYS).result() == expected


def test_a_store_is_asked_a_bounded_number_of_times() -> None:
    keys = [i.to_bytes(16, "big") for i in range(1000)]
    window = Part([key for i, key in enumerate(keys) if i % 3])
    grouped = GroupedConnector([Part(keys), window], LAYOUT, [100, 50])
    assert grouped.match(keys).result() == 0 and window.asked < 20


@pytest.mark.parametrize(
    ("states", "rounds", "expected"),
    [
        ([199], 1, 200),
        ([20, 198, 5], 2, 199),
        ([192, 150], 2, 193),
        ([3, 193], 3, 194),  # the window is asked again, and then the state
        ([3, 136, 140], 3, 141),
        ([135], 3, 0),
        ([], 3, 0),
    ],
)
def test_states_are_asked_for_a_few_times_one_after_another(states: list[int], rounds: int, expected: int) -> None:
    """A prefix of n keys is found if there is a state behind its last token. A store may take long to answer."""

    class Slow(Part):
        def __init__(self, found: Sequence[bytes]) -> None:
            super().__init__(found)
            self.unanswered: list[tuple[Future[int], int]] = []

        def match(self, keys: Sequence[bytes]) -> Future[int]:
            future: Future[int] = Future()
            self.unanswered.append((future, super().match(keys).result()))
            return future

    keys = [i.to_bytes(16, "big") for i in range(200)]
    slow, has_window = Slow([keys[i] for i in states]), expected % 2 == 0
    state = replace(LAYOUT.more[0], window=STATE_WINDOW)
    more = (LAYOUT.more[0], state) if has_window else (state,)
    parts = [Part(keys), *([Part(keys)] if has_window else []), slow]
    matched = GroupedConnector(parts, replace(LAYOUT, more=more), [100] * len(parts)).match(keys)
    for _ in range(rounds):
        assert not matched.done()
        answers, slow.unanswered = slow.unanswered, []
        for future, count in answers:
            future.set_result(count)
    assert matched.result(0) == expected and slow.asked <= 64
