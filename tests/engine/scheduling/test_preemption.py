"""Preemption: who loses its blocks, what becomes of their content, and that such a step admits nothing."""

import pytest

from pdserve.costs import Costs
from pdserve.engine.memory.blocks import BlockPool
from pdserve.engine.memory.groups import ONE_GROUP, Group
from pdserve.engine.scheduling.preemption import Preemption
from pdserve.engine.scheduling.scheduler import Scheduler
from pdserve.engine.sequence import Sequence
from pdserve.engine.step import SchedulerOutput
from pdserve.keys import token_array
from pdserve.request import ARRIVALS_PER_PRIORITY, NO_TENANT, SamplingParams, Tenant
from tests.engine.scheduling.steps import BLOCK, run_step, scheduler, sequence


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
    """Blocks that it frees may have to be copied to host memory first."""
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


@pytest.mark.parametrize(
    ("ranks", "last"), [((0, 1), 1), ((ARRIVALS_PER_PRIORITY, 1), 0)], ids=["the latest arrival", "the lowest priority"]
)
def test_highest_rank_is_preempted_and_finishes_later(ranks: tuple[int, int], last: int) -> None:
    sched = scheduler(4)
    two = sequence("first", [1] * 7, 6), sequence("second", [2] * 7, 6)
    for seq, rank in zip(two, ranks, strict=True):
        seq.rank = rank
        sched.add(seq)
    preempted, order = [], []
    for _ in range(60):
        output, finished = run_step(sched)
        preempted += output.preempted
        order += finished
    assert preempted and set(preempted) == {two[last]}
    assert order == [two[1 - last], two[last]]


@pytest.mark.parametrize("swap_seconds", [0.1, 10.0])
def test_swap_is_chosen_by_cost_and_room(swap_seconds: float) -> None:
    """Computing 8 tokens takes 1 s, as does swapping their 2 blocks out and in at 0.25 s per block."""
    for host_blocks, fits in ((2, True), (1, False)):
        host = BlockPool(host_blocks, BLOCK)
        sched = scheduler(4, host_pool=host)
        sched.costs = Costs(prefill=(0.0, 1 / 8, 0.0), swap=(0.0, swap_seconds))
        first, second = sequence("first", [1] * 8, 6), sequence("second", [2] * 8, 6)
        sched.add(first)
        sched.add(second)
        run_step(sched)
        output, _ = run_step(sched)
        assert output.preempted == [second]
        assert len(output.swap_out) == host.num_held == (2 if fits and swap_seconds < 0.25 else 0)
        assert sched.pool.num_held == 3
        sched.remove(second)
        assert host.num_held == 0


def test_resumed_sequence_is_returned_to_its_owner_and_continues_once_added() -> None:
    sched = scheduler(4)
    sched.refetch_preempted = True
    first, second = sequence("first", [1] * 8, 3), sequence("second", [2] * 8, 3)
    sched.add(first)
    sched.add(second)
    resumed: list[Sequence] = []
    while not resumed:
        output, _ = run_step(sched)
        assert output.plan.counts or output.resumed, "a step did nothing"
        resumed += output.resumed
    assert resumed == [second] and len(second.kv.held_blocks) == 3 and not list(sched.sequences())
    sched.add(second)
    output, _ = run_step(sched)
    assert output.plan.counts == {second: 5} and not output.resumed, "its first block is in the prefix cache"


def test_time_for_a_swapped_prompt_is_that_behind_what_the_pool_has() -> None:
    """Another sequence may have computed more of it than was swapped: a token behind that takes longer."""
    sched = scheduler(64, max_num_seqs=2, host_pool=BlockPool(8, BLOCK))
    short, swapped = sequence("short", [1, 2, 3], 30), sequence("swapped", [*range(32), 6, 7])
    sched.add(short)
    run_step(sched)
    sched.itl_target = 0.008  # time for 8 prompt tokens
    sched.costs = Costs(prefill=(0.0, 0.001, 0.0), decode=(0.0, 0.0, 0.0), swap=(0.0, 1e-6))
    sched.add(swapped)
    run_step(sched)
    assert swapped.kv.num_computed == 8
    Preemption(sched, SchedulerOutput()).preempt(swapped)
    other = sequence("other", [*range(32), 5], 1)
    other.rank = -1
    sched.add(other)
    sched.itl_target = None
    while other not in run_step(sched)[1]:
        assert swapped.kv.swapped is not None and swapped.kv.swapped.num_tokens == 8
    sched.max_num_seqs = 8
    sched.costs = Costs(prefill=(0.0, 0.001, 0.0001), decode=(0.01, 0.0, 0.0))
    sched.itl_target = 0.0195  # 9.5 ms for prompts, of which the first takes 6.25; a token behind 32 takes 4.2
    first = sequence("first", [8] * 5, 30)
    first.rank = -1
    sched.add(first)
    assert run_step(sched)[0].plan.counts == {short: 1, first: 5} and swapped in sched.waiting
    assert run_step(sched)[0].plan.counts == {short: 1, first: 1, swapped: 2}


@pytest.mark.parametrize(
    ("num_pages", "window", "groups", "length"),
    [(16, 8, ONE_GROUP, 48), (40, None, (Group(), Group(8, first_id=40)), 40)],
    ids=["every layer", "most layers"],
)
def test_a_swapped_sequence_claims_what_its_windows_reach(
    num_pages: int, window: int | None, groups: tuple[Group, ...], length: int
) -> None:
    """42 tokens are 11 blocks, the last 3 of which a window of 8 tokens reaches."""
    pool, host = BlockPool(num_pages, BLOCK, groups), BlockPool(num_pages, BLOCK, groups)
    sched = Scheduler(pool, max_num_seqs=8, max_num_batched_tokens=16, window=window, host_pool=host)
    sched.costs = Costs(prefill=(0.0, 1.0, 0.0))
    swapped, newcomer = sequence("swapped", [1] * 40), sequence("newcomer", [2] * length)
    newcomer.rank = 1
    sched.add(swapped)
    while swapped.kv.num_computed < 41:
        run_step(sched)
    Preemption(sched, SchedulerOutput()).preempt(swapped)
    assert swapped.kv.swapped is not None
    needed = num_pages - (3 if window else 14)
    taken = pool.allocate(needed - pool.pages_for(length // BLOCK))  # all but what both need
    assert sched.reserve(newcomer, 0, length, respect_queue=True)
    assert swapped in run_step(sched)[0].plan.counts and taken
