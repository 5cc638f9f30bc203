"""The clock of leases: the process' own stalls count at most one interval."""

from hypothesis import given
from hypothesis import strategies as st

from pdserve.control.awake_clock import AwakeClock


def test_ticks_on_time_count_in_full() -> None:
    clock = AwakeClock(0.25, now=100.0)
    assert [clock.tick(100.0 + i * 0.25) for i in range(1, 4)] == [0.25, 0.5, 0.75]


def test_a_stall_counts_one_interval() -> None:
    clock = AwakeClock(0.25, now=100.0)
    clock.tick(100.25)
    assert clock.read(100.375) == 0.375
    assert clock.read(160.0) == clock.tick(160.0) == 0.5
    assert clock.tick(160.125) == 0.625


@given(st.lists(st.floats(0, 1e6), max_size=50))
def test_it_never_runs_faster_than_real_time(steps: list[float]) -> None:
    clock, now = AwakeClock(0.25, now=0.0), 0.0
    for step in steps:
        now += step
        before = clock.time
        assert 0 <= clock.tick(now) - before <= 0.25 + 1e-6
        assert clock.time <= now + 1e-6
