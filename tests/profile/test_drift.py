"""A live instance notices that its steps no longer take as long as its profile says, and that they do again."""

import pytest

from pdserve.costs import CostMeter, Work
from pdserve.profile.drift import STREAK, WINDOW, ProfileWatch
from pdserve.profile.profile import StepModel

MODEL = StepModel()
DECODE: Work = [(1, 100), (1, 30)]
PREFILL: Work = [(300, 0)]


def feed(watch: ProfileWatch, work: Work, ratio: float, windows: int) -> list[str]:
    """Let the watch see windows of steps of which every eighth is delayed. Returns what it says."""
    steps = [
        watch.observe([work], MODEL.seconds(work) * ratio * (9 if i % 8 == 0 else 1)) for i in range(windows * WINDOW)
    ]
    return [sentence for sentence in steps if sentence]


@pytest.mark.parametrize(("work", "phase"), [(DECODE, "decode"), (PREFILL, "prefill")])
def test_drift_is_said_once_and_its_end_too(work: Work, phase: str) -> None:
    watch = ProfileWatch(MODEL)
    assert feed(watch, work, 1.1, 5) == [] and watch.ratios == {phase: pytest.approx(1.1)}
    assert feed(watch, work, 1.6, STREAK - 1) == [] and watch.ratios == {phase: pytest.approx(1.6)}
    assert feed(watch, work, 1.6, 4) == [
        f"the profile no longer holds: {phase} steps take 1.60 times as long as it says"
    ]
    assert feed(watch, work, 0.9, 4) == [f"the profile holds again: {phase} steps take 0.90 times as long as it says"]
    assert feed(watch, work, 0.7, 4) == [
        f"the profile no longer holds: {phase} steps take 0.70 times as long as it says"
    ]


def test_short_disturbances_are_no_drift() -> None:
    watch = ProfileWatch(MODEL)
    for _ in range(5):
        assert feed(watch, DECODE, 2.0, STREAK - 1) + feed(watch, DECODE, 1.0, 1) == []


def test_steps_that_are_measured_together_are_compared_together() -> None:
    """On a GPU, chunks that sample nothing are only launched: the last one waits for all of them."""
    watch, meter, said = ProfileWatch(MODEL), CostMeter(), list[str]()
    meter.on_steps = lambda steps, seconds: said.append(watch.observe(steps, seconds))
    seconds = 2 * MODEL.seconds(PREFILL)
    for step in range(2 * WINDOW):
        meter.record_step(PREFILL, step % 2 == 1, seconds if step % 2 else 0.0, float(step))
    meter.record_step([*DECODE, *PREFILL], True, 99.0, 999.0)  # mixed steps are not compared
    assert watch.ratios == {"prefill": pytest.approx(1.0)} and len(said) == WINDOW
