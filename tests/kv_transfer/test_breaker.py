"""The state machine of a store's circuit breaker."""

from dataclasses import dataclass, field
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdserve.kv_transfer.breaker import StoreBreaker
from pdserve.kv_transfer.connector import Outcome, Result

TIMEOUT = 4.0
LATE, EARLY = 3.2, 2.0  # seconds


@pytest.mark.parametrize(
    ("ends", "opened"),
    [
        ([], False),
        ([(False, LATE)], False),
        ([(False, LATE), (False, LATE)], True),
        ([(False, LATE), (True, LATE), (False, LATE)], False),  # slow, and it answers
        ([(False, EARLY), (False, EARLY), (False, EARLY)], False),  # refused at once
        ([(False, LATE), (False, EARLY), (False, LATE)], True),  # a cancelled operation in between says nothing
        ([(False, LATE), (False, LATE), (False, EARLY)], True),
        ([(False, LATE), (False, LATE), (True, EARLY)], False),
    ],
)
def test_two_timeouts_in_a_row_open_it_and_an_answer_closes_it(ends: list[tuple[bool, float]], opened: bool) -> None:
    breaker = StoreBreaker(TIMEOUT)
    for answered, seconds in ends:
        breaker.record(answered, seconds, 0.0)
    assert breaker.is_open == opened


OK, FULL = [Outcome.OK, Outcome.UNAVAILABLE], [Outcome.FULL] * 2
REFUSED, CANCELLED = [Outcome.UNAVAILABLE] * 2, [Outcome.CANCELLED] * 2


@pytest.mark.parametrize(
    ("transfers", "is_out"),
    [
        ([REFUSED], False),
        ([REFUSED, REFUSED], True),
        ([REFUSED, OK, REFUSED], False),
        ([REFUSED, REFUSED, FULL], False),
        ([REFUSED, CANCELLED, REFUSED], True),
        ([CANCELLED, CANCELLED], False),
        ([REFUSED, 0, REFUSED, 0], True),  # the matches were refused as well, or there was nothing
        ([REFUSED, REFUSED, 1], False),
    ],
)
def test_a_store_that_refuses_is_out_and_opens_nothing(transfers: list[list[Outcome] | int], is_out: bool) -> None:
    breaker = StoreBreaker(TIMEOUT)
    for ended in transfers:
        if isinstance(ended, int):
            breaker.record_match(ended, EARLY, 0.0)
        else:
            breaker.record_transfer(Result(ended, 0.0), EARLY, 0.0)
    assert breaker.is_out == is_out and not breaker.is_open


def test_a_store_that_hangs_is_out_until_it_answers() -> None:
    breaker = StoreBreaker(TIMEOUT)
    for _ in range(2):
        breaker.record_transfer(Result(REFUSED, 0.0), LATE, 0.0)
    assert breaker.is_out and breaker.is_open
    breaker.record_match(0, EARLY, 0.0)
    assert not breaker.is_out


def test_probes_follow_a_pause_one_at_a_time() -> None:
    breaker = StoreBreaker(TIMEOUT, threshold=1, pause=10.0)
    assert breaker.allows(0.0) and breaker.allows(0.0)
    breaker.record(False, TIMEOUT, 4.0)
    assert not breaker.allows(13.9)
    assert breaker.allows(14.0) and not breaker.allows(14.0)
    breaker.record(False, TIMEOUT, 18.0)
    assert not breaker.allows(27.9)
    assert breaker.allows(28.0)
    breaker.record(True, 0.1, 28.1)
    assert breaker.allows(28.1) and breaker.allows(28.1)


def test_a_probe_that_is_never_recorded_does_not_block_the_next_one() -> None:
    breaker = StoreBreaker(TIMEOUT, threshold=1, pause=10.0)
    breaker.record(False, TIMEOUT, 0.0)
    assert breaker.allows(10.0) and not breaker.allows(23.9) and breaker.allows(24.0)


@dataclass
class Store:
    """A store that hangs in some periods."""

    hangs: list[tuple[float, float]] = field(default_factory=list)

    def answers(self, now: float) -> bool:
        return not any(start <= now < stop for start, stop in self.hangs)


@given(
    st.lists(st.tuples(st.floats(0, 100), st.floats(0, 60)), max_size=4),
    st.lists(st.floats(0.01, 5), max_size=60),
    st.integers(1, 4),
    st.floats(0, 10),
)
def test_few_operations_wait_and_a_store_that_answers_is_used_again(
    hangs: list[tuple[float, float]], gaps: list[float], threshold: int, pause: float
) -> None:
    """One operation at a time: within a period of hanging, `threshold` of them wait, and then one per pause."""
    store = Store([(start, start + length) for start, length in hangs])
    breaker, now = StoreBreaker(TIMEOUT, threshold, pause), 0.0
    waited: list[float] = []
    for gap in gaps:
        now += gap
        if not breaker.allows(now):
            assert breaker.is_open
            continue
        if store.answers(now):
            breaker.record(True, 0.0, now)
            assert not breaker.is_open
            waited.clear()
        else:
            waited.append(now)
            now += TIMEOUT
            breaker.record(False, TIMEOUT, now)
            assert breaker.is_open == (len(waited) >= threshold)
    probes = waited[threshold - 1 :]
    assert all(after - before >= TIMEOUT + pause - 1e-6 for before, after in pairwise(probes))
    if breaker.is_open:
        later = now + TIMEOUT + 2 * pause
        assert breaker.allows(later)
        breaker.record(True, 0.0, later)
    assert not breaker.is_open


def test_a_timeout_and_a_refusal_are_a_store_that_is_out() -> None:
    breaker = StoreBreaker(TIMEOUT)
    for seconds in (LATE, EARLY):
        breaker.record_transfer(Result(REFUSED, 0.0), seconds, 0.0)
    assert breaker.is_out and not breaker.is_open
