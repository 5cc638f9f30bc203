"""Schedule: budgets are kept, and which sequences go first in a step."""

import cProfile

from hypothesis import given, settings
from hypothesis import strategies as st

from pdserve.costs import Costs
from pdserve.engine.scheduling.scheduler import Scheduler
from pdserve.engine.sequence import Sequence
from pdserve.request import ARRIVALS_PER_PRIORITY
from tests.engine.scheduling.steps import BLOCK, arrive, run_step, scheduler, sequence


@settings(max_examples=100, deadline=None)
@given(
    longs=st.lists(st.tuples(st.integers(0, 6), st.integers(2, 25)), min_size=1, max_size=5),
    at=st.integers(0, 8),
    length=st.integers(2, 15),
)
def test_a_short_prompt_is_computed_in_the_first_step_whatever_long_ones_run(
    longs: list[tuple[int, int]], at: int, length: int
) -> None:
    """`longs` are (step, length in half steps). What a step has left behind two long prompts is at least an eighth of it."""
    sched = scheduler(600, max_num_seqs=16, budget=32)
    for step in range(at + 1):
        for i, (arrives, size) in enumerate(longs):
            if arrives == step:
                arrive(sched, f"long {i}", 16 * size, i)
        short = arrive(sched, "short", length, len(longs)) if step == at else None
        output, _ = run_step(sched)
    assert short is not None and output.plan.counts.get(short, 0) >= min(length, 4)


def test_a_stream_of_short_prompts_and_a_long_one_hardly_delay_each_other() -> None:
    """Half of what steps have is asked for by short prompts, or twice as much; a long one takes 100 steps alone."""
    for rate, most in ((4, 1), (16, None)):
        sched = scheduler(2000, max_num_seqs=64, budget=32)
        long, ended, arrived = arrive(sched, "long", 3200, 0), dict[Sequence, int](), dict[Sequence, int]()
        for step in range(1, 300):
            for i in range(rate):
                arrived[arrive(sched, f"{step} {i}", 4, step * 16 + i)] = step
            ended |= dict.fromkeys(run_step(sched)[1], step)
            if long in ended:
                break
        assert ended[long] <= 200
        if most is not None:
            assert max(ended[seq] - begun for seq, begun in arrived.items() if seq in ended) < most


def test_a_step_does_not_look_at_every_prompt_that_waits() -> None:
    """Nor at every shorter one, once no further one can run."""
    calls = []
    for waiting in (100, 3000):
        sched, profile = scheduler(100_000, max_num_seqs=4, budget=32), cProfile.Profile()
        arrive(sched, "long", 400, 0)
        for rank in range(1, waiting + 1):
            arrive(sched, str(rank), 4 + rank % 50, rank)
        run_step(sched)
        profile.runcall(run_step, sched)
        calls.append(sum(entry.callcount for entry in profile.getstats()))
    assert calls[1] < 2 * calls[0]


def test_prompts_of_one_length_go_one_by_one() -> None:
    """Sharing steps among them would only make the first one wait."""
    sched = scheduler(600, budget=32)
    first, second = arrive(sched, "first", 100, 0), arrive(sched, "second", 90, 1)
    counts = [run_step(sched)[0].plan.counts for _ in range(4)]
    assert counts == [{first: 32}, {first: 32}, {first: 32}, {first: 4, second: 28}]


def test_a_prompt_that_fits_into_the_step_shares_it_with_one_that_does_not() -> None:
    """Also if it is more than half as long; but not with one that ends in the step."""
    sched = scheduler(600, budget=32)
    first, second = arrive(sched, "first", 50, 0), arrive(sched, "second", 30, 1)
    assert run_step(sched)[0].plan.counts == {second: 16, first: 16}
    sched = scheduler(600, budget=32)
    first, second = arrive(sched, "first", 32, 0), arrive(sched, "second", 20, 1)
    assert run_step(sched)[0].plan.counts == {first: 32}


def test_the_shortest_goes_first_whether_it_runs_or_waits() -> None:
    sched = scheduler(600, budget=32)
    long, last = arrive(sched, "long", 400, 0), arrive(sched, "last", 390, 1)
    run_step(sched)
    middle = arrive(sched, "middle", 60, 2)
    assert run_step(sched)[0].plan.counts == {middle: 16, long: 16}
    short = arrive(sched, "short", 4, 3)
    assert run_step(sched)[0].plan.counts == {short: 4, middle: 12, long: 16}
    assert last.overtaken == 0, "it lacks no blocks"


def test_no_prompt_overtakes_one_of_higher_priority() -> None:
    sched = scheduler(600, budget=32)
    first = arrive(sched, "first", 100, 0)
    arrive(sched, "short", 4, ARRIVALS_PER_PRIORITY)
    assert run_step(sched)[0].plan.counts == {first: 32}


def test_a_prompt_that_lacks_blocks_is_overtaken_a_limited_number_of_times() -> None:
    sched = scheduler(100, budget=32)  # blocks of 4 tokens: the second long one has room when the first has ended
    first, second = arrive(sched, "first", 300, 0), arrive(sched, "second", 200, 1)
    running: list[bool] = []
    while not (running and running[-1]):
        assert len(running) < 40
        for i in range(16):
            arrive(sched, f"{len(running)} {i}", 2, 2 + 16 * len(running) + i)
        run_step(sched)
        running.append(second in sched.running)
    assert second.overtaken == 64 and first not in sched.running


def test_long_prompt_is_chunked_beside_decoding_sequences() -> None:
    sched = scheduler(64, budget=8)
    short, long = sequence("short", [1, 2, 3]), sequence("long", list(range(20)))
    sched.add(short)
    run_step(sched)
    sched.add(long)
    output, _ = run_step(sched)
    assert output.plan.counts == {short: 1, long: 7}
    output, _ = run_step(sched)
    assert output.plan.counts == {short: 1, long: 7}


def test_itl_target_limits_the_prompt_tokens_of_a_step() -> None:
    sched = scheduler(64)
    sched.costs = Costs(prefill=(0.0, 0.001, 0.0), decode=(0.01, 0.0, 0.0))
    sched.itl_target = 0.0165  # time for 6 prompt tokens; the token budget is 16
    short, long, late = sequence("short", [1, 2, 3], 30), sequence("long", list(range(40))), sequence("late", [4] * 9)
    sched.add(short)
    run_step(sched)
    sched.add(long)
    sched.add(late)
    for _ in range(3):
        assert run_step(sched)[0].plan.counts == {short: 1, late: 3, long: 3}
    for _ in range(5):
        assert run_step(sched)[0].plan.counts == {short: 1, late: 1, long: 6} or late not in sched.running
    sched.itl_target = 0.005
    assert run_step(sched)[0].plan.counts == {short: 1, long: 1}
    sched.add(sequence("another", [5] * 30))
    for _ in range(3):
        assert list(run_step(sched)[0].plan.counts.values())[-1] == BLOCK, "a minimal chunk, for progress"


def test_prompt_without_time_for_a_token_is_not_admitted() -> None:
    """A token behind many cached ones may take longer than one of a new prompt, which waits too then."""
    sched = scheduler(64)
    short = sequence("short", [1, 2, 3], 30)
    for seq in (short, sequence("fills the cache", [*range(32), 5], 1)):
        sched.add(seq)
    while len(sched.running) != 1 or short.kv.num_uncomputed != 1:
        run_step(sched)
    sched.costs = Costs(prefill=(0.0, 0.001, 0.0001), decode=(0.01, 0.0, 0.0))
    sched.itl_target = 0.0195  # 9.5 ms for prompts, of which the first takes 6.25; a token behind 32 takes 4.2
    queued = sequence("first", [8] * 5, 30), sequence("cached", [*range(32), 6, 7]), sequence("new", [9] * 9)
    for rank, seq in enumerate(queued):
        seq.rank = rank
        sched.add(seq)
    first, cached, new = queued
    assert run_step(sched)[0].plan.counts == {short: 1, first: 5}
    assert sched.waiting == [cached, new] and not cached.kv.block_ids
    assert run_step(sched)[0].plan.counts == {short: 1, first: 1, cached: 2}


def test_running_prefill_does_not_delay_decoding() -> None:
    sched = scheduler(64, budget=8)
    long, short = sequence("long", list(range(30))), sequence("short", [1, 2, 3], 9)
    sched.add(long)
    run_step(sched)
    sched.running.append(short)  # as if its KV had been loaded
    assert sched.reserve(short, 0, 4)
    short.kv.mark_loaded(2)
    output, _ = run_step(sched)
    assert output.plan.counts == {short: 1, long: 7}


def loaded_and_waiting(sched: Scheduler, loaded_tokens: int, waiting_tokens: int) -> tuple[Sequence, Sequence]:
    """Queue a sequence that arrived later and has its blocks, and one that arrived first and has none."""
    loaded, waiting = sequence("loaded", [1] * loaded_tokens), sequence("waiting", [2] * waiting_tokens)
    loaded.rank = 1
    sched.add(waiting)
    assert sched.reserve(loaded, 0, loaded_tokens)
    sched.add(loaded)
    return loaded, waiting


def test_waiting_sequence_of_lower_rank_precedes_a_loaded_one() -> None:
    sched = scheduler(16, max_num_seqs=1)
    _, waiting = loaded_and_waiting(sched, 8, 8)
    assert list(sched.schedule().plan.counts) == [waiting]


def test_decoding_sequence_precedes_prompts_of_lower_rank() -> None:
    sched = scheduler(16, max_num_seqs=1)
    loaded, _ = loaded_and_waiting(sched, 8, 8)
    loaded.kv.mark_loaded(7)
    assert sched.schedule().plan.counts == {loaded: 1}


def test_sequence_without_enough_blocks_does_not_hold_up_others() -> None:
    sched = scheduler(16, max_num_seqs=1)
    loaded, waiting = loaded_and_waiting(sched, 40, 30)
    for _ in range(3):
        output, _ = run_step(sched)
        assert list(output.plan.counts) == [loaded], "waiting needs 8 blocks, and 6 are left"
    sched.remove(loaded)
    assert list(sched.schedule().plan.counts) == [waiting]


def test_sequences_that_are_stored_can_be_left_out_and_nothing_else() -> None:
    sched = scheduler(64)
    running, decoding, loaded, waiting = (sequence(name, [i] * 20) for i, name in enumerate("abcd"))
    for seq in (running, decoding, loaded):
        assert sched.reserve(seq, 0, 24)
        sched.add(seq)
    sched.add(waiting)
    for seq in (running, loaded, waiting):
        seq.mark_for_storing()
    decoding.kv.mark_loaded(19)  # its KV was loaded; it ranks behind a paused one
    output = sched.schedule(pause_storing=True)
    assert output.plan.counts == {decoding: 1} and output.storing_paused
    output = sched.schedule()
    assert output.plan.counts == {decoding: 1, running: 15} and not output.storing_paused
    output = sched.schedule(pause_storing=True)
    assert output.plan.counts == {decoding: 1}, "running sequences are paused as well"
    for seq in (running, loaded, waiting):
        sched.remove(seq)
    assert not sched.schedule(pause_storing=True).storing_paused
    long, short = arrive(sched, "long", 40, 10), arrive(sched, "short", 4, 11)
    short.mark_for_storing()
    assert sched.schedule(pause_storing=True).plan.counts == {decoding: 1, long: 15}, "nor do they go before a long one"
