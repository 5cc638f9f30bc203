"""The hand-over state machine: every path ends, and releases all blocks."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pdserve.router.dispatch.handover import (
    FINAL_STATES,
    OWNER,
    Action,
    Event,
    HandOverMachine,
    IllegalTransition,
    State,
)

ALL_CANCELS = {Action.CANCEL_PREFILL, Action.CANCEL_DECODE}


def walk(*events: Event, split: bool = True) -> tuple[HandOverMachine, list[Action]]:
    machine = HandOverMachine(last_progress_at=0.0, state_timeout_s=10.0, is_split=split)
    actions: list[Action] = []
    for i, event in enumerate(events):
        actions += machine.handle(event, float(i))
    return machine, actions


def test_split_request_without_faults() -> None:
    machine, actions = walk(Event.FIRST_TOKEN, Event.STORED, Event.DECODED, Event.DECODED, Event.FINISHED)
    assert machine.state is State.FINISHED
    assert set(actions) == ALL_CANCELS


@pytest.mark.parametrize("before", [(), (Event.FIRST_TOKEN,)])
@pytest.mark.parametrize("failure", [Event.PREFILL_FAILED, Event.TIMED_OUT])
def test_failed_prefill_falls_back_to_decode(before: tuple[Event, ...], failure: Event) -> None:
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
def test_failed_decode_migrates(before: tuple[Event, ...]) -> None:
    machine, actions = walk(*before, Event.DECODE_FAILED)
    assert machine.state is State.PREFILLING
    assert actions[-1] is Action.MIGRATE and set(actions) == {Action.MIGRATE} | ALL_CANCELS


@DECODE_STATES
def test_unplaced_request_fails(before: tuple[Event, ...]) -> None:
    machine, actions = walk(*before, Event.DECODE_FAILED, Event.REJECTED)
    assert machine.state is State.FAILED
    assert Action.FAIL in actions


def test_migrations_are_limited() -> None:
    machine, actions = walk(*[Event.DECODE_FAILED] * 4)
    assert machine.state is State.FAILED
    assert actions.count(Action.MIGRATE) == 3 and actions.count(Action.FAIL) == 1


def test_a_request_that_advances_may_migrate_again() -> None:
    """Then the instances do not fail over it. Prefill's tokens do not count: it may be decode that it breaks."""
    after_tokens = [Event.DECODE_FAILED, Event.FIRST_TOKEN, Event.STORED, Event.DECODED]
    machine, actions = walk(*after_tokens * 10)
    assert machine.state is State.DECODING and actions.count(Action.MIGRATE) == 10
    machine, actions = walk(*[Event.DECODE_FAILED, Event.FIRST_TOKEN, Event.STORED] * 4)
    assert machine.state is State.FAILED and actions.count(Action.MIGRATE) == 3


@pytest.mark.parametrize(
    ("events", "is_suspect"),
    [
        ([Event.DECODE_FAILED], False),
        ([Event.DECODE_FAILED, Event.DECODE_FAILED], True),
        ([Event.DECODE_FAILED, Event.FIRST_TOKEN, Event.STORED, Event.DECODE_FAILED], True),
        ([Event.DECODE_FAILED, Event.FIRST_TOKEN, Event.STORED, Event.DECODED, Event.DECODE_FAILED], False),
        ([Event.DRAINED, Event.DRAINED, Event.DECODE_FAILED], False),
        ([Event.PREFILL_FAILED, Event.DECODE_FAILED], False),
    ],
)
def test_a_request_is_suspect_from_its_second_fault_in_a_row(events: list[Event], is_suspect: bool) -> None:
    assert walk(*events)[0].is_suspect is is_suspect


def test_timed_out_decode_counts_as_failed() -> None:
    machine, _ = walk(Event.FIRST_TOKEN, Event.STORED)
    assert not machine.is_timed_out(11.0) and machine.is_timed_out(11.1)
    assert Action.MIGRATE in machine.handle(Event.TIMED_OUT, 11.1)
    assert not machine.is_timed_out(11.2)


def test_progress_of_the_owner_restarts_the_timeout() -> None:
    machine, _ = walk(Event.FIRST_TOKEN, Event.STORED)
    machine.record_progress(30.0, 35.0)
    assert not machine.is_timed_out(45.0) and machine.is_timed_out(45.1)


def test_engine_steps_alone_prolong_a_state_by_a_limited_time() -> None:
    machine, _ = walk(Event.FIRST_TOKEN, Event.STORED)  # the last event at 1.0
    for step_at in range(2, 200):
        machine.record_progress(0.0, float(step_at))
    assert not machine.is_timed_out(101.0) and machine.is_timed_out(101.1)


def test_tokens_of_earlier_requests_prolong_a_state_without_this_limit() -> None:
    machine, _ = walk(Event.FIRST_TOKEN, Event.STORED)
    machine.record_progress(500.0, 505.0)
    assert not machine.is_timed_out(515.0) and machine.is_timed_out(515.1)


def test_a_request_is_overdue_after_a_time_that_grows_with_its_tokens() -> None:
    machine = HandOverMachine(last_progress_at=5.0, state_timeout_s=10.0, max_tokens=50)
    machine.handle(Event.FIRST_TOKEN, 1000.0)
    assert not machine.is_overdue(1055.0) and machine.is_overdue(1055.1)
    machine.handle(Event.CANCELLED, 1055.1)
    assert not machine.is_overdue(2000.0)


def test_unsplit_request_has_no_prefill_failure() -> None:
    machine, actions = walk(Event.TIMED_OUT, split=False)
    assert machine.state is State.PREFILLING and Action.MIGRATE in actions and Action.FINALIZE not in actions


def test_decoded_before_the_first_token_is_illegal() -> None:
    with pytest.raises(IllegalTransition, match="decoded in state prefilling"):
        walk(Event.DECODED)


def test_states_are_final_or_have_an_owner() -> None:
    assert set(State) == set(OWNER) | FINAL_STATES | {State.WAITING}


@settings(max_examples=500)
@given(st.lists(st.sampled_from([*Event, "wait", "restart"]), max_size=12))
def test_any_sequence_of_events_keeps_the_invariants(events: list[Event | str]) -> None:
    machine = HandOverMachine(last_progress_at=0.0, state_timeout_s=10.0)
    fails = 0
    for event in events:
        was = machine.state
        if event == "wait" and not machine.is_over:
            machine.wait()
            assert not machine.is_timed_out(1e9)
        if event == "restart" and not machine.is_over:
            machine.restart(is_split=True, now=0.0)
        if not isinstance(event, Event):
            continue
        try:
            actions = machine.handle(event, 0.0)
        except IllegalTransition:
            assert machine.state is was
            continue
        fails += actions.count(Action.FAIL)
        if was in FINAL_STATES:
            assert machine.state is was and not actions, "final states are never left"
        elif machine.is_over and was is not State.WAITING:
            assert set(actions) >= ALL_CANCELS, "an exit without all cancels"
    assert fails == (machine.state is State.FAILED)
    machine.handle(Event.CANCELLED, 0.0)
    assert machine.is_over
