"""Schedulers whose steps compute nothing, and sequences for them."""

from typing import Any

from pdserve.engine.memory.blocks import BlockPool
from pdserve.engine.scheduling.scheduler import Scheduler
from pdserve.engine.sequence import Sequence
from pdserve.engine.step import SchedulerOutput
from pdserve.keys import token_array
from pdserve.request import SamplingParams

BLOCK = 4


def sequence(name: str, prompt: list[int], max_tokens: int = 4, family: int = 0) -> Sequence:
    sampling = SamplingParams(max_tokens=max_tokens, frequency_penalty=1.0 if family == 2 else 0.0)
    stops = frozenset(range(0, 1000, 5)) if family == 1 else frozenset()
    return Sequence.new(
        name, token_array(prompt), len(prompt), len(prompt), sampling, b"root", BLOCK, stop_token_ids=stops
    )


def scheduler(num_blocks: int, max_num_seqs: int = 8, budget: int = 16, **settings: Any) -> Scheduler:
    pool = BlockPool(num_blocks, BLOCK)
    return Scheduler(pool, max_num_seqs=max_num_seqs, max_num_batched_tokens=budget, **settings)


def run_step(sched: Scheduler) -> tuple[SchedulerOutput, list[Sequence]]:
    """Run one step as the engine does, without a model: every new token is 7."""
    output = sched.schedule()
    finished = []
    for seq, count in output.plan.counts.items():
        seq.kv.mark_computed(count)
        seq.kv.register_full_blocks(sched.pool)
        if seq.kv.num_uncomputed == 0:
            seq.output.tokens.append(7)
            if seq.output.finish_reason():
                finished.append(seq)
    for seq in finished:
        sched.remove(seq)
    return output, finished


def arrive(sched: Scheduler, name: str, length: int, rank: int) -> Sequence:
    """Queue a prompt that shares no block with another one, and whose answer is one token."""
    seq = sequence(name, [rank + 1000] * length, 1)
    seq.rank = rank
    sched.add(seq)
    return seq
