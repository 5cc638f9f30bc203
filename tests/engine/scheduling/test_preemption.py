"""A step that preempts admits nothing: blocks that it frees may have to be copied to host memory first."""

import pytest

from pdserve.engine.memory.blocks import BlockPool
from pdserve.engine.scheduling.scheduler import Scheduler
from pdserve.engine.sequence import Sequence
from pdserve.keys import token_array
from pdserve.request import NO_TENANT, SamplingParams, Tenant


def arrive(sched: Scheduler, length: int, rank: int, tenant: Tenant = NO_TENANT) -> Sequence:
    tokens, sampling = token_array([rank + 1000] * length), SamplingParams(max_tokens=40)
    seq = Sequence.new(str(rank), tokens, length, length, sampling, b"root", 4, rank=rank, tenant=tenant)
    sched.add(seq)
    return seq


def step(sched: Scheduler) -> list[Sequence]:
    """Run a step, and return what it has preempted."""
    output = sched.schedule()
    for seq, count in output.plan.counts.items():
        seq.kv.mark_computed(count)
        if not seq.kv.num_uncomputed:
            seq.output.append(7)
    return output.preempted


@pytest.mark.parametrize(
    ("length", "tenant"),
    [
        pytest.param(0, NO_TENANT, id="beside streams"),
        pytest.param(20, NO_TENANT, id="beside a long prompt"),
        pytest.param(20, Tenant(1, 1.0), id="of another tenant"),
    ],
)
def test_nothing_is_admitted_in_a_step_that_preempts(length: int, tenant: Tenant) -> None:
    due = 1 << 20
    for _ in range(2):  # without a short prompt to find the step, then with one
        sched, preempted = Scheduler(BlockPool(10, 4), max_num_seqs=8, max_num_batched_tokens=4), list[Sequence]()
        streams, short, steps = [arrive(sched, 4, rank) for rank in (0, 9)], None, 0
        while not preempted:
            if steps == 2 and length:
                arrive(sched, length, 1)
            if steps == due:
                short = arrive(sched, 3, 2, tenant)
            preempted, steps = step(sched), steps + 1
        due = steps - 1
    assert preempted == streams[1:] and short is not None
    assert short in sched.waiting
    step(sched)
    assert short in sched.running
