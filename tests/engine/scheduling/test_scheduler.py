"""Scheduler: room for hand-overs and prompts is given in order, and no sequence starves."""

from pdserve.request import ARRIVALS_PER_PRIORITY
from tests.engine.scheduling.steps import run_step, scheduler, sequence


def test_a_hand_over_that_lacks_blocks_is_overtaken_a_limited_number_of_times() -> None:
    """It waits outside of the queues, behind prompts that come for ever, of which some are always here."""
    sched = scheduler(24, budget=32)  # blocks of 4 tokens
    waiting = sequence("handed over", [1] * 80)
    for step in range(400):
        short = sequence(str(step), [1000 + step] * 8, 8)
        short.rank = 1 + step
        sched.add(short)
        run_step(sched)
        sched.unreserved = waiting
        if step > 8 and sched.reserve(waiting, 0, 81, respect_queue=True):
            assert waiting.overtaken == 64
            return
    raise AssertionError("it gets no room")


def test_low_priority_does_not_starve() -> None:
    """A request of higher priority arrives in every step and takes the only place for two steps."""
    sched, low = scheduler(8, max_num_seqs=1), sequence("low", [1] * 5, 2)
    low.rank = ARRIVALS_PER_PRIORITY
    sched.add(low)
    for step in range(1, 3 * ARRIVALS_PER_PRIORITY):
        late = sequence(str(step), [2] * 5, 2)
        late.rank = step
        sched.add(late)
        _, finished = run_step(sched)
        if finished == [low]:
            break
    else:
        raise AssertionError("starved")
    assert step == 2 * ARRIVALS_PER_PRIORITY, "exactly the arrivals within a level went first"


def test_reserve_leaves_the_blocks_that_waiting_sequences_need() -> None:
    sched = scheduler(16)
    sched.add(sequence("waiting", [2] * 40))
    small, large = sequence("small", [1] * 24), sequence("large", [1] * 25)
    assert not sched.reserve(large, 0, 25, respect_queue=True) and sched.pool.num_held == 0
    assert sched.reserve(small, 0, 24, respect_queue=True) and sched.pool.num_held == 6


def test_reserve_leaves_blocks_and_watermark_of_a_preempted_sequence() -> None:
    """A preempted sequence needs its blocks and one more for each running sequence to be readmitted."""
    sched = scheduler(16)
    first, second, newcomer = (
        sequence("first", [1] * 20, 20),
        sequence("second", [2] * 20, 20),
        sequence("new", [3] * 12),
    )
    newcomer.rank = 1
    for seq in (first, second):
        sched.add(seq)
    while first.kv.num_uncomputed > 1 or second.kv.num_uncomputed > 1:
        run_step(sched)
    sched.remove(second)
    sched.pool.release(sched.pool.allocate(sched.pool.num_free))  # evicts all
    taken = sched.pool.allocate(16 - sched.pool.num_held - 8)
    second.kv.num_preemptions = 1
    sched.add(second)
    need = sched.pool.blocks_for(len(second))
    assert sched.pool.num_free == need + 2 == 8
    assert not sched.reserve(newcomer, 0, 8, respect_queue=True)
    assert sched.reserve(newcomer, 0, 4, respect_queue=True)
    run_step(sched)
    assert second in sched.running and taken


def test_warm_prefix_is_reused_except_for_the_last_token() -> None:
    sched = scheduler(32)
    for _ in range(2):
        seq = sequence("a", list(range(8)), 1)
        sched.add(seq)
        output, _ = run_step(sched)
    assert output.plan.counts[seq] == 4, "the last full block is computed, for the logits of its last token"
    assert sched.prefix_hits == 4 and sched.prefix_queries == 16
