"""Circuit breakers, with the time as an argument."""

from hypothesis import given
from hypothesis import strategies as st

from pdserve.router.scheduling.breaker import (
    BASE_PAUSE_S,
    FAULT_THRESHOLD,
    FORGET_AFTER_S,
    INCIDENT_WINDOW_S,
    MAX_PAUSE_S,
    BreakerState,
    CircuitBreakers,
)

CLOSED, HALF_OPEN, OPEN = BreakerState.CLOSED, BreakerState.HALF_OPEN, BreakerState.OPEN


def test_third_consecutive_fault_opens_and_a_token_closes() -> None:
    breakers = CircuitBreakers()
    assert [breakers.record_fault("p0", now) for now in (10, 20, 30)] == [False, False, True]
    assert breakers.state("p0", 30) is OPEN and not breakers.allows("p0", 0, 34.9)
    assert breakers.state("p1", 30) is CLOSED and breakers.allows("p1", 99, 30)
    assert breakers.state("p0", 30 + BASE_PAUSE_S) is HALF_OPEN
    assert breakers.allows("p0", 0, 36) and not breakers.allows("p0", 1, 36), "one request as a probe"
    assert breakers.record_fault("p0", 40)
    assert breakers.state("p0", 40 + 2 * BASE_PAUSE_S - 0.1) is OPEN, "twice as long"
    assert breakers.state("p0", 40 + 2 * BASE_PAUSE_S) is HALF_OPEN
    breakers.record_success("p0")
    assert breakers.allows("p0", 99, 40)
    assert not breakers.record_fault("p0", 60), "the count starts again"


def test_simultaneous_faults_count_once() -> None:
    breakers = CircuitBreakers()
    assert not any(breakers.record_fault("p0", 10 + i * INCIDENT_WINDOW_S / 50) for i in range(50))
    assert breakers.state("p0", 11) is CLOSED


@given(st.lists(st.floats(INCIDENT_WINDOW_S * 1.01, 300), min_size=FAULT_THRESHOLD, max_size=40))
def test_pauses_are_bounded_and_old_faults_forgotten(gaps: list[float]) -> None:
    breakers, now = CircuitBreakers(), 0.0
    for gap in gaps:
        now += gap
        breakers.record_fault("p0", now)
    assert breakers.state("p0", now) is OPEN
    assert breakers.allows("p0", 0, now + MAX_PAUSE_S + 0.1)
    breakers.record_fault("p1", now + FORGET_AFTER_S + 1)
    assert breakers.allows("p0", 99, now + FORGET_AFTER_S + 1)
