"""Sliding windows: prompts in a pool that holds hardly more than one of them, while a slow store keeps dropped blocks."""

from collections.abc import Callable
from typing import Any

import pytest

from pdserve.proto import pdserve_pb2 as pb

PROMPTS = [[(i * i + k * i) % 250 for i in range(330)] for k in (3, 4)]  # 21 blocks; the window needs 4
TOKENS = 20  # with a prompt, 22 blocks
Instance = Callable[..., Any]
Expected = Callable[[list[int], int], list[int]]


@pytest.mark.parametrize("architecture", ["mistral"], indirect=True)
@pytest.mark.parametrize("ended", [0, -1], ids=["the oldest store ends first", "the newest one"])
@pytest.mark.parametrize("num_blocks", [22, 40])
@pytest.mark.parametrize("phase", [pb.PREFILL, pb.BOTH], ids=["prefill", "both"])
def test_two_prompts_that_do_not_fit_together_do_not_block_each_other(
    instance: Instance, expected: Expected, phase: "pb.Phase", num_blocks: int, ended: int
) -> None:
    both = instance(num_blocks=num_blocks, store_generated="on")
    jobs = [both.submit(phase, prompt, TOKENS) for prompt in PROMPTS]
    waited = False
    both.run()
    while both.store.active:
        waited |= any(not job.seq.kv.block_ids for job in jobs if job not in both.context.closed)
        both.end(ended)
        both.run()
    count = 1 if phase == pb.PREFILL else TOKENS
    assert waited and [job.seq.output.tokens[330:].tolist() for job in jobs] == [
        expected(prompt, TOKENS)[:count] for prompt in PROMPTS
    ]
    both.check_nothing_is_held()
