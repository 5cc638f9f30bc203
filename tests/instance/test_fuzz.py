"""Two instances under random requests and faults give the right answers, and hold nothing in the end.

The seeds are the same in every run; `scripts/fuzz` draws new ones, and many more.
"""

import os
import random

import pytest

from tests.instance.fuzzing import run

EXAMPLES = int(os.environ.get("PDSERVE_FUZZ_EXAMPLES", "0"))


def test_answers_are_right_whatever_fails() -> None:
    first = random.randrange(2**31) if EXAMPLES else 0
    counts = run(range(first, first + (EXAMPLES or 24)))
    faults = {"failures", "migrations", "fallbacks", "cancelled", "resets", "preemptions", "swaps"}
    everything = {"answers", "drafts", "model_drafts", "launched"} | faults
    assert counts.keys() == everything, counts


def test_all_ends_though_nobody_gives_up() -> None:
    run([*range(102, 112), 5_000_042, 5_001_079], meddles=False)  # the last two: beams with hits in many pages


@pytest.mark.slow
def test_answers_are_right_at_length() -> None:
    run(range(1000, 1600))
    run(range(1600, 1900), meddles=False)
