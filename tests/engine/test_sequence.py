"""Sequence: block keys, progress and finish reasons."""

from typing import Any

import pytest

from pdserve.engine.sequence import Sequence
from pdserve.request import SamplingParams

BLOCK = 4


def sequence(prompt: int, output: int = 0, initial: int | None = None, **sampling: Any) -> Sequence:
    tokens = list(range(prompt + output))
    params = SamplingParams(**{"max_tokens": 3, **sampling})
    return Sequence("r", tokens, prompt, initial or prompt, params, b"root", BLOCK, stop_token_ids=frozenset({9}))


def test_keys_cover_full_blocks_and_grow_with_the_tokens() -> None:
    seq = sequence(10)
    first = list(seq.full_keys())
    assert len(first) == 2
    seq.tokens += [10, 11]
    assert seq.full_keys()[:2] == first and len(seq.full_keys()) == 3


def test_initial_keys_include_the_partial_block_but_no_later_output() -> None:
    seq = sequence(6, output=4, initial=7)
    assert seq.initial_keys() == [seq.full_keys()[0], *seq.prefix_keys([7])]
    assert sequence(8).initial_keys() == sequence(8).full_keys()


def test_dropped_blocks_are_not_held() -> None:
    seq = sequence(12)
    seq.block_ids, seq.num_dropped = [5, 6, 7], 1
    assert seq.held_blocks == seq.blocks(1, 3) == [6, 7]
    with pytest.raises(AssertionError, match="was dropped"):
        seq.blocks(0, 2)


@pytest.mark.parametrize(
    ("seq", "reason"),
    [
        (sequence(10), None),
        (sequence(8, output=1), None),
        (sequence(8, output=2), "stop"),
        (sequence(8, output=2, min_tokens=3), None),
        (sequence(4, output=3), "length"),
    ],
    ids=["prompt that ends with a stop token", "running", "stop token", "before min_tokens", "max_tokens"],
)
def test_finish_reason(seq: Sequence, reason: str | None) -> None:
    assert seq.finish_reason() == reason
