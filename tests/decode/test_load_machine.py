"""Loading a prompt's KV on the decode instance: every transition, and random orders of events."""

from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdserve.decode import load_machine
from pdserve.decode.load_machine import TRANSITIONS, Action, Event, Load, LoadMachine, Start, State

BLOCKS = 8
MAX_BLOCKS = 4
FIRST, SECOND = Load(0, 4), Load(4, 8)
FOLLOWED, FOLLOWED_REST = Load(0, 6, follows=True), Load(6, 8, follows=True)


def machine() -> LoadMachine:
    return LoadMachine(BLOCKS, MAX_BLOCKS, split)


def split(first: int, stop: int) -> list[tuple[int, int]]:
    return [(first, 6), (6, stop)] if first < 6 < stop else [(first, stop)]


def report(
    loading: LoadMachine, available: int = 0, coming: int = 0, *, final: bool = False, token: bool = False
) -> list[Action]:
    return loading.reported(available, coming, is_final=final, has_first_token=token)


def load_all_that_is_stored() -> LoadMachine:
    loading = machine()
    assert report(loading, 4) == []  # it has no blocks yet
    assert loading.reserved(0, BLOCKS) == [FIRST]
    assert loading.loaded(FIRST, 4) == []
    assert report(loading, BLOCKS) == [SECOND]
    assert report(loading, BLOCKS, final=True, token=True) == []
    assert loading.loaded(SECOND, 4) == [Start(BLOCKS)]
    assert report(loading, BLOCKS) == []
    return loading


def start_without_final_report() -> LoadMachine:
    loading = machine()
    assert loading.reserved(0, BLOCKS) == []
    assert report(loading, BLOCKS, token=True) == [FIRST, SECOND]
    assert loading.loaded(SECOND, 4) == []
    assert loading.loaded(FIRST, 4) == [Start(BLOCKS)]
    assert not loading.is_final
    return loading


def start_with_what_the_pool_has() -> LoadMachine:
    loading = machine()
    assert report(loading, final=True) == []
    assert loading.reserved(3, BLOCKS) == [Start(3)]
    return loading


def load_only_what_is_needed() -> LoadMachine:
    """Five blocks are void; one of the others is lost. Whether the first ones suffice is for the caller to judge."""
    loading = machine()
    assert loading.reserved(5, BLOCKS) == []
    assert report(loading, 4, token=True) == []
    assert report(loading, 6, BLOCKS) == [Load(5, 6), Load(6, 8, follows=True)]
    assert loading.loaded(Load(6, 8, follows=True), 0, missed=True) == []
    assert loading.loaded(Load(5, 6), 0) == []
    assert report(loading, BLOCKS, final=True) == [Start(5)]
    return loading


def start_without_what_a_lost_prefill_did_not_store() -> LoadMachine:
    loading = machine()
    loading.reserved(5, BLOCKS)
    assert report(loading, 3, final=True) == [Start(5)]
    return loading


def load_nothing_after_a_failure() -> LoadMachine:
    loading = machine()
    loading.reserved(0, BLOCKS)
    assert report(loading, BLOCKS, token=True) == [FIRST, SECOND]
    assert loading.loaded(SECOND, 2) == []
    assert loading.loaded(FIRST, 1) == []  # an earlier block; what is complete waits for the final report
    assert report(loading, BLOCKS) == []
    assert report(loading, BLOCKS, final=True) == [Start(1)]
    return loading


def load_again_what_a_following_load_missed() -> LoadMachine:
    loading = machine()
    loading.reserved(0, BLOCKS)
    assert report(loading, 0, BLOCKS) == [FOLLOWED, FOLLOWED_REST]
    assert loading.loaded(FOLLOWED, 1, missed=True) == []
    assert report(loading, 4) == []  # the other load may still write to the rows of blocks that it would load
    assert loading.loaded(FOLLOWED_REST, 0, missed=True) == [Load(1, 4)]
    assert loading.loaded(Load(1, 4), 3) == []
    assert report(loading, BLOCKS, token=True) == [SECOND]
    assert loading.loaded(SECOND, 4) == [Start(BLOCKS)]
    return loading


def miss_one_part_and_load_another() -> LoadMachine:
    loading = machine()
    loading.reserved(0, BLOCKS)
    report(loading, 0, BLOCKS)
    assert loading.loaded(FOLLOWED, 5, missed=True) == []
    assert loading.loaded(FOLLOWED_REST, 2) == []
    assert report(loading, BLOCKS) == [Load(5, 8)]
    loading.end()
    return loading


def fail_after_a_miss() -> LoadMachine:
    loading = machine()
    loading.reserved(0, BLOCKS)
    report(loading, 0, BLOCKS)
    loading.loaded(FOLLOWED, 1, missed=True)
    assert loading.loaded(FOLLOWED_REST, 0) == []
    assert report(loading, BLOCKS, final=True) == [Start(1)]  # blocks from 1 on were missed, before the one that failed
    return loading


def miss_after_a_failure() -> LoadMachine:
    loading = machine()
    loading.reserved(0, BLOCKS)
    report(loading, 0, BLOCKS)
    loading.loaded(FOLLOWED_REST, 1)
    assert loading.loaded(FOLLOWED, 2, missed=True) == []
    assert report(loading, BLOCKS, final=True) == [Start(2)]
    return loading


def load_good_blocks_after_a_failure() -> LoadMachine:
    loading = machine()
    loading.reserved(0, BLOCKS)
    report(loading, BLOCKS, final=True)
    loading.loaded(FIRST, 2)
    assert loading.loaded(SECOND, 4) == [Start(2)]
    return loading


def load_no_more_than_there_is_room_for() -> LoadMachine:
    loading = machine()
    assert report(loading, 3, 7) == [] and loading.wanted == 7
    assert loading.reserved(0, 5) == [Load(0, 3), Load(3, 5, follows=True)] and loading.lacks_room
    assert loading.loaded(Load(0, 3), 3) == report(loading, 4, 7) == []
    assert loading.grown(6) == [Load(5, 6, follows=True)] and loading.lacks_room
    assert loading.loaded(Load(3, 5, follows=True), 1, missed=True) == []
    assert loading.grown(7) == [] and not loading.lacks_room  # the other load may still write to its row
    assert loading.loaded(Load(5, 6, follows=True), 1) == []
    assert report(loading, BLOCKS, final=True, token=True) == [Load(4, 7)]
    assert loading.loaded(Load(4, 7), 3) == [] and loading.lacks_room, "all is stored, and more can be loaded"
    assert loading.grown(BLOCKS) == [Load(7, 8)]
    assert loading.loaded(Load(7, 8), 1) == [Start(BLOCKS)]
    return loading


def need_no_room_after_a_failure() -> LoadMachine:
    loading = machine()
    report(loading, 6)
    assert loading.reserved(0, 2) == [Load(0, 2)]
    assert loading.loaded(Load(0, 2), 1) == [] and not loading.lacks_room
    assert report(loading, BLOCKS, final=True) == [Start(1)]
    return loading


def end_before_the_loads() -> LoadMachine:
    loading = machine()
    loading.reserved(0, BLOCKS)
    report(loading, 4, BLOCKS)
    loading.end()
    assert loading.loaded(FIRST, 4) == loading.loaded(Load(4, 6, follows=True), 0, missed=True) == []
    assert loading.loaded(Load(6, 8, follows=True), 0) == report(loading, BLOCKS, final=True) == []
    assert not loading.has_started
    return loading


def end_while_blocks_are_missed() -> LoadMachine:
    loading = machine()
    loading.reserved(0, BLOCKS)
    report(loading, 0, BLOCKS)
    loading.loaded(FOLLOWED, 1, missed=True)
    loading.end()
    assert loading.loaded(FOLLOWED_REST, 2) == []
    return loading


def end_after_a_failure() -> LoadMachine:
    loading = machine()
    loading.reserved(0, BLOCKS)
    report(loading, 4)
    loading.loaded(FIRST, 0)
    loading.end()
    return loading


def compute_the_prompt_here() -> LoadMachine:
    loading = machine()
    loading.skip()
    assert report(loading, BLOCKS, BLOCKS) == [] and loading.coming == 0
    return loading


def end_at_once() -> LoadMachine:
    loading = machine()
    loading.end()
    return loading


SCENARIOS: list[Callable[[], LoadMachine]] = [
    load_all_that_is_stored,
    start_without_final_report,
    start_with_what_the_pool_has,
    load_only_what_is_needed,
    start_without_what_a_lost_prefill_did_not_store,
    load_nothing_after_a_failure,
    load_again_what_a_following_load_missed,
    miss_one_part_and_load_another,
    fail_after_a_miss,
    miss_after_a_failure,
    load_good_blocks_after_a_failure,
    load_no_more_than_there_is_room_for,
    need_no_room_after_a_failure,
    end_before_the_loads,
    end_while_blocks_are_missed,
    end_after_a_failure,
    compute_the_prompt_here,
    end_at_once,
]


@pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda scenario: scenario.__name__)
def test_scenario(scenario: Callable[[], LoadMachine]) -> None:
    loading = scenario()
    started = loading.has_started
    loading.end()
    loading.end()
    assert loading.state is State.ENDED and loading.has_started == started


def test_scenarios_take_every_transition(monkeypatch: pytest.MonkeyPatch) -> None:
    class Recorder(dict[tuple[State, Event], State]):
        def __getitem__(self, transition: tuple[State, Event]) -> State:
            seen.add(transition)
            return super().__getitem__(transition)

    seen: set[tuple[State, Event]] = set()
    monkeypatch.setattr(load_machine, "TRANSITIONS", Recorder(TRANSITIONS))
    for scenario in SCENARIOS:
        test_scenario(scenario)
    assert seen == TRANSITIONS.keys()


@pytest.mark.parametrize("act", [lambda one: one.skip(), lambda one: one.reserved(0, BLOCKS)], ids=["skip", "reserved"])
def test_event_in_a_wrong_state_is_refused(act: Callable[[LoadMachine], object]) -> None:
    loading = machine()
    loading.reserved(0, BLOCKS)
    with pytest.raises(AssertionError, match="in state loading"):
        act(loading)


def test_reports_beyond_the_prompt_are_cut() -> None:
    loading = machine()
    loading.reserved(0, BLOCKS)
    assert report(loading, BLOCKS + 5, BLOCKS + 9, token=True) == [FIRST, SECOND]


def intact_blocks(loads: list[tuple[Load, int]]) -> set[int]:
    """Return the blocks of which every load succeeded, since a load that fails leaves undefined bytes."""
    good: set[int] = set()
    for load, leading in loads:
        good |= set(range(load.first, load.first + leading))
        good -= set(range(load.first + leading, load.stop))
    return good


@given(first=st.integers(0, BLOCKS), data=st.data())
def test_starts_once_with_intact_blocks_only(first: int, data: st.DataObject) -> None:
    """Prefill reports in random steps; loads end in random order, miss blocks and fail.

    Blocks before `first` need no load: they are in the pool or outside of every window. Room for the others comes bit by bit.
    """
    loading, stored = machine(), 0
    pending: list[Load] = []
    ended: list[tuple[Load, int]] = []
    starts: list[Start] = []

    def take(actions: list[Action]) -> None:
        for action in actions:
            if isinstance(action, Start):
                starts.append(action)
                assert not pending
            else:
                assert first <= action.first < action.stop <= BLOCKS, "a block that needs no load"
                assert action.stop <= loading.room, "there is no room for it"
                for other in pending:
                    assert action.stop <= other.first or other.stop <= action.first, "two loads write to one row"
                pending.append(action)

    take(loading.reserved(first, data.draw(st.integers(first, BLOCKS))))
    for _ in range(data.draw(st.integers(0, 20))):
        is_load: bool = data.draw(st.booleans())
        if pending and is_load:
            load = pending.pop(data.draw(st.integers(0, len(pending) - 1)))
            leading = data.draw(st.integers(0, load.stop - load.first))
            ended.append((load, leading))
            take(loading.loaded(load, leading, missed=data.draw(st.booleans())))
        elif loading.lacks_room and data.draw(st.booleans()):
            take(loading.grown(data.draw(st.integers(loading.room, BLOCKS))))
        else:
            stored = data.draw(st.integers(stored, BLOCKS))
            coming = data.draw(st.integers(stored, BLOCKS))
            take(report(loading, stored, coming, token=data.draw(st.booleans())))
    take(report(loading, stored, stored, final=True, token=True))
    while pending or loading.lacks_room:
        if loading.lacks_room:
            take(loading.grown(loading.room + 1))
            continue
        load = pending.pop()
        ended.append((load, load.stop - load.first))
        take(loading.loaded(load, load.stop - load.first))
    (start,) = starts
    assert start.num_blocks >= first and set(range(first, start.num_blocks)) <= intact_blocks(ended)
