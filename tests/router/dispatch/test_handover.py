"""The hand-over state machine: every way through it ends, and lets go of everything."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pdserve.router.dispatch.handover import ENDED, OWNER, Action, Event, HandOver, IllegalTransition, State

ALL_CANCELS = {Action.CANCEL_PREFILL, Action.CANCEL_DECODE}


def walk(*events: Event, split: bool = True) -> tuple[HandOver, list[Action]]:
    machine = HandOver(since=0.0, state_timeout_s=10.0, split=split)
    actions: list[Action] = []
    for i, event in enumerate(events):
        actions += machine.handle(event, float(i))
    return machine, actions


def test_the_good_way() -> None:
    machine, actions = walk(Event.FIRST_TOKEN, Event.STORED, Event.DECODED, Event.DECODED, Event.FINISHED)
    assert machine.state is State.FINISHED
    assert set(actions) == ALL_CANCELS


@pytest.mark.parametrize("before", [(), (Event.FIRST_TOKEN,)])
@pytest.mark.parametrize("failure", [Event.PREFILL_FAILED, Event.LATE])
def test_a_failed_prefill_is_completed_by_decode(before: tuple[Event, ...], failure: Event) -> None:
    machine, actions = walk(*before, failure)
    assert machine.state is State.LOADING
    assert Action.FINALIZE in actions and Action.FAIL not in actions


DECODE_STATES = pytest.mark.parametrize(
    "before",
    [
        (),
        (Event.FIRST_TOKEN,),
        (Event.FIRST_TOKEN, Event.STORED),
        (Event.FIRST_TOKEN, Event.STORED, Event.DECODED),
    ],
)


@DECODE_STATES
def test_a_failed_decode_is_taken_over(before: tuple[Event, ...]) -> None:
    machine, actions = walk(*before, Event.DECODE_FAILED)
    assert machine.state is State.PREFILLING
    assert actions[-1] is Action.RESUME and set(actions) == {Action.RESUME} | ALL_CANCELS


@DECODE_STATES
def test_it_ends_in_an_error_when_nobody_can(before: tuple[Event, ...]) -> None:
    machine, actions = walk(*before, Event.DECODE_FAILED, Event.UNPLACED)
    assert machine.state is State.FAILED
    assert Action.FAIL in actions


def test_it_moves_a_few_times_only() -> None:
    machine, actions = walk(*[Event.DECODE_FAILED] * 4)
    assert machine.state is State.FAILED
    assert actions.count(Action.RESUME) == 3 and actions.count(Action.FAIL) == 1


def test_a_late_decode_has_failed() -> None:
    machine, _ = walk(Event.FIRST_TOKEN, Event.STORED)
    assert not machine.late(11.0) and machine.late(11.1)
    assert Action.RESUME in machine.handle(Event.LATE, 11.1)
    assert not machine.late(11.2)


def test_an_owner_at_work_is_not_late() -> None:
    machine, _ = walk(Event.FIRST_TOKEN, Event.STORED)
    machine.progressed(30.0)
    assert not machine.late(40.0) and machine.late(40.1)


def test_alone_there_is_no_prefill_to_fail() -> None:
    machine, actions = walk(Event.LATE, split=False)
    assert machine.state is State.PREFILLING and Action.RESUME in actions and Action.FINALIZE not in actions


def test_decode_cannot_speak_before_prefill_has() -> None:
    with pytest.raises(IllegalTransition, match="decoded in state prefilling"):
        walk(Event.DECODED)


def test_every_state_with_an_owner_is_one_that_goes_on() -> None:
    assert set(State) == set(OWNER) | ENDED


@settings(max_examples=500)
@given(st.lists(st.sampled_from(list(Event)), max_size=12))
def test_any_order_of_events(events: list[Event]) -> None:
    machine = HandOver(since=0.0, state_timeout_s=10.0)
    fails = 0
    for event in events:
        was = machine.state
        try:
            actions = machine.handle(event, 0.0)
        except IllegalTransition:
            assert machine.state is was
            continue
        fails += actions.count(Action.FAIL)
        if was in ENDED:
            assert machine.state is was and not actions, "an ended hand-over stays ended"
        elif machine.ended:
            assert set(actions) >= ALL_CANCELS, "an exit that lets something live on"
    assert fails == (machine.state is State.FAILED)
    machine.handle(Event.CANCELLED, 0.0)
    assert machine.ended
