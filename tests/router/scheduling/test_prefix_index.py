"""The prefix index against a model with one set of keys per instance."""

from collections.abc import Iterator

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from pdserve.keys import group_key
from pdserve.router.scheduling.prefix_index import PrefixIndex
from tests.examples import examples

KEYS = [bytes([number]) * 16 for number in range(12)]
KEY_LISTS = st.lists(st.sampled_from(KEYS), max_size=6)
NAMES = st.sampled_from(["p0", "p1", "d0", "d1", "d2"])


class IndexMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.index = PrefixIndex()
        self.model: dict[str, set[bytes]] = {}

    @rule(name=NAMES, keys=KEY_LISTS)
    def add(self, name: str, keys: list[bytes]) -> None:
        self.index.add(name, keys)
        self.model.setdefault(name, set()).update(keys)

    @rule(name=NAMES, keys=KEY_LISTS)
    def remove(self, name: str, keys: list[bytes]) -> None:
        self.index.remove(name, keys)
        self.model.get(name, set()).difference_update(keys)

    @rule(name=NAMES)
    def forget(self, name: str) -> None:
        self.index.forget(name)
        self.model.pop(name, None)

    @rule(prompt=KEY_LISTS)
    def match(self, prompt: list[bytes]) -> None:
        expected = {}
        for name, keys in self.model.items():
            lacking = [i for i, key in enumerate(prompt) if key not in keys]
            expected[name] = lacking[0] if lacking else len(prompt)
        assert self.index.match(prompt) == {name: length for name, length in expected.items() if length}

    @invariant()
    def no_empty_entries_remain(self) -> None:
        for name in ("p0", "p1", "d0", "d1", "d2"):
            assert self.index.num_blocks(name) == len(self.model.get(name, ()))
        assert self.index._bitmaps.keys() == set().union(*self.model.values())


TestIndex = IndexMachine.TestCase
TestIndex.settings = settings(max_examples=examples(2), stateful_step_count=30, deadline=None)


def test_match_stops_at_the_first_key_without_holders() -> None:
    index = PrefixIndex()
    index.add("p0", KEYS[:2])
    walked = []

    def prompt() -> Iterator[bytes]:
        for key in KEYS:
            walked.append(key)
            yield key

    assert index.match(prompt()) == {"p0": 2}
    assert walked == KEYS[:3]


@pytest.mark.parametrize(
    ("windows", "lost", "usable"),
    [
        ([2], [], 5),
        ([2], [4], 4),
        ([2], [1, 3, 4], 3),
        ([2], [*range(5)], 0),
        ([32], [2], 5),
        ([32], [3], 3),
        ([32], [2, 4], 2),
        ([32, 2], [1, 4], 4),
    ],
)
def test_a_hit_ends_where_all_groups_have_what_the_next_token_needs(
    windows: list[int], lost: list[int], usable: int
) -> None:
    """Of blocks of 16 tokens; a window of 32 needs the last two, a state the last one. A group lacks what is lost."""
    index = PrefixIndex()
    index.add("p", KEYS[:5])
    for at in range(1, len(windows) + 1):
        index.add("p", [group_key(key, at) for i, key in enumerate(KEYS[:5]) if i not in lost])
    assert index.match(KEYS) == {"p": 5} and index.usable("p", KEYS, 5, windows, 16) == usable
