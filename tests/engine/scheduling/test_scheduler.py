"""Scheduler: budgets are kept, no sequence starves, and no block leaks, for any arrivals and departures."""

import cProfile
from collections.abc import Sequence as SequenceABC
from typing import Any
from zlib import crc32

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pdserve.costs import Costs
from pdserve.engine.memory.blocks import BlockPool
from pdserve.engine.scheduling.scheduler import Scheduler
from pdserve.engine.sequence import Sequence
from pdserve.engine.step import SchedulerOutput, StepOutcome, StepPlan
from pdserve.engine.step_pipeline import StepPipeline
from pdserve.keys import token_array
from pdserve.request import ARRIVALS_PER_PRIORITY, SamplingParams, Tenant

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


def loaded_and_waiting(sched: Scheduler, loaded_tokens: int, waiting_tokens: int) -> tuple[Sequence, Sequence]:
    """Queue a sequence that arrived later and has its blocks, and one that arrived first and has none."""
    loaded, waiting = sequence("loaded", [1] * loaded_tokens), sequence("waiting", [2] * waiting_tokens)
    loaded.rank = 1
    sched.add(waiting)
    assert sched.reserve(loaded, 0, loaded_tokens)
    sched.add(loaded)
    return loaded, waiting


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


def test_warm_prefix_is_reused_except_for_the_last_token() -> None:
    sched = scheduler(32)
    for _ in range(2):
        seq = sequence("a", list(range(8)), 1)
        sched.add(seq)
        output, _ = run_step(sched)
    assert output.plan.counts[seq] == 4, "the last full block is computed, for the logits of its last token"
    assert sched.prefix_hits == 4 and sched.prefix_queries == 16


def load(sched: Scheduler, seq: Sequence, memory: dict[int, list[int | None]], kv: str) -> None:
    """Load the prompt of a sequence, as the decode role does: only the blocks that the window of its last token reaches."""
    first = sched.num_out_of_window(seq.kv.num_initial - 1)
    if not sched.reserve(
        seq, seq.kv.num_initial // BLOCK, seq.kv.num_initial + 1, first_block=first, respect_queue=True
    ):
        return
    assert len(seq.kv.held_blocks) == sched.pool.blocks_for(seq.kv.num_initial + 1) - first
    for i in range(seq.kv.num_registered, sched.pool.blocks_for(seq.kv.num_initial)):
        block = seq.output.tokens[i * BLOCK : (i + 1) * BLOCK]
        memory[seq.kv.block_ids[i]][: len(block)] = block
    if kv == "lost":
        seq.kv.give_up_blocks(sched.pool)
        seq.kv.mark_loaded(0)
        return
    seq.kv.mark_loaded(seq.kv.num_initial)
    if kv == "loaded" and seq.sampling.max_tokens > 1:
        seq.output.append(7)
    else:
        seq.kv.reopen_prompt()
    seq.kv.register_full_blocks(sched.pool)


class MemoryRunner:
    """A runner whose KV is the token itself: checks that every computed token attends to its own predecessors."""

    def __init__(self, pool: BlockPool, memory: dict[int, list[int | None]], window: int | None) -> None:
        self._pool, self._memory, self._window = pool, memory, window

    def step(self, plan: StepPlan) -> StepOutcome:
        work = {seq: seq.output.tokens[: seq.kv.num_computed + count].tolist() for seq, count in plan.counts.items()}
        self._compute(work)
        return plan.outcome([(seq, next_token(seq, work[seq]), None) for seq in plan.rows().sampled])

    def launch(self, seqs: list[Sequence], last: Any, rows: SequenceABC[int]) -> "LaunchedTokens":
        work = {seq: seq.output.tokens.tolist() for seq in seqs}
        for seq, row in zip(seqs, rows, strict=False):
            work[seq].append(last.tokens[row])
        self._compute(work)
        return LaunchedTokens([next_token(seq, tokens) for seq, tokens in work.items()])

    def _compute(self, work: dict[Sequence, list[int]]) -> None:
        first = {seq: seq.kv.num_computed + (len(tokens) > len(seq)) for seq, tokens in work.items()}
        for seq, tokens in work.items():
            for at in range(first[seq], len(tokens)):
                assert self._pool.refs[seq.kv.block_ids[at // BLOCK]] == 1, "a write to a shared block"
                self._memory[seq.kv.block_ids[at // BLOCK]][at % BLOCK] = tokens[at]
        for seq, tokens in work.items():
            seen = range(0 if self._window is None else max(0, len(tokens) - self._window), len(tokens))
            read = [self._memory[seq.kv.blocks(at // BLOCK, at // BLOCK + 1)[0]][at % BLOCK] for at in seen]
            assert read == [tokens[at] for at in seen]


class LaunchedTokens:
    """Tokens that `MemoryRunner` has sampled, in the order of the rows."""

    def __init__(self, tokens: list[int]) -> None:
        self.tokens = tokens
        self.undecided: list[int] = []

    def read(self) -> list[int]:
        return self.tokens


def next_token(seq: Sequence, tokens: list[int]) -> int:
    return crc32(f"{seq.request_id} {len(tokens)}".encode()) % 1000


@settings(max_examples=300, deadline=None)
@given(
    num_blocks=st.integers(6, 30),
    max_num_seqs=st.integers(1, 6),
    budget=st.integers(1, 24),
    arrivals=st.lists(
        st.tuples(
            st.integers(0, 12),
            st.integers(1, 14),
            st.integers(1, 9),
            st.integers(0, 2),
            st.integers(-1, 1),
            st.sampled_from(["computed", "loaded", "loaded without a first token", "lost"]),
        ),
        min_size=1,
        max_size=12,
    ),
    forks=st.lists(st.tuples(st.integers(1, 25), st.integers(0, 7)), max_size=8),
    aborts=st.lists(st.tuples(st.integers(1, 30), st.integers(0, 7)), max_size=3),
    host_blocks=st.integers(0, 12),
    window=st.none() | st.integers(1, 15),
    itl=st.sampled_from([None, 1e-6, 0.0105]),
    attention_seconds=st.sampled_from([0.0, 1e-4]),
    row_seconds=st.sampled_from([1e-4, 0.01]),
    weights=st.lists(st.sampled_from([0.1, 1.0, 3.0]), min_size=1, max_size=3),
    pipelined=st.booleans(),
)
def test_sequences_read_their_own_tokens_despite_shared_blocks(
    num_blocks: int,
    max_num_seqs: int,
    budget: int,
    arrivals: list[tuple[int, int, int, int, int, str]],
    forks: list[tuple[int, int]],
    aborts: list[tuple[int, int]],
    host_blocks: int,
    window: int | None,
    itl: float | None,
    attention_seconds: float,
    row_seconds: float,
    weights: list[float],
    pipelined: bool,
) -> None:
    """Simulate the pool's memory: each slot holds the token that was written to it. Steps may be launched ahead.

    arrivals: (step, prompt length, output length, prefix family, priority, what happens to its KV in a store); forks and
    aborts: (step, index of a sequence). A prompt without room at its arrival is computed, not loaded. Preempted sequences
    are swapped while the host pool has room. Tenants take turns. Family 1
    may stop early, and family 2 samples by more than its logits.
    """
    host = BlockPool(host_blocks, BLOCK) if host_blocks else None
    sched = scheduler(num_blocks, max_num_seqs, budget, window=window, host_pool=host, grows_ahead=pipelined)
    sched.costs = Costs(prefill=(0.01, 1e-4, attention_seconds), decode=(0.01, row_seconds, 0.0), swap=(0, 0))
    sched.itl_target = itl  # a step that only decodes takes 0.0101 s
    memory: dict[int, list[int | None]] = {block: [None] * BLOCK for block in range(num_blocks)}
    swapped: dict[int, list[int | None]] = {}
    runner = MemoryRunner(sched.pool, memory, window)
    pipeline = StepPipeline(runner)
    live: list[Sequence] = []
    paused_at: dict[Sequence, int] = {}
    for step in range(2000):
        for i, (at, prompt_len, output_len, family, priority, kv) in enumerate(arrivals):
            if at == step:
                live.append(sequence(str(i), [family] * prompt_len, output_len, family))
                live[-1].rank = i + ARRIVALS_PER_PRIORITY * priority
                live[-1].tenant = Tenant(i % len(weights), weights[i % len(weights)])
                if kv != "computed":
                    load(sched, live[-1], memory, kv)
                sched.add(live[-1])
        for i, (at, which) in enumerate(forks):
            if at == step and live:
                seq = live[which % len(live)]
                if seq in sched.running:
                    live.append(sched.fork(seq, f"fork {i} of {seq.request_id}", seq.sampling))
        for at, which in aborts:
            if at == step and live:
                sched.remove(live.pop(which % len(live)))
        before = set(sched.running)
        output = sched.schedule()
        counts = output.plan.counts.values()
        assert sum(counts) <= budget and all(count > 0 for count in counts)
        assert len(sched.running) <= max_num_seqs
        assert before | set(output.plan.counts) >= set(sched.running), "admitted without a token"
        assert not (output.swap_out and output.swap_in)
        for seq in output.paused:
            assert {other.tenant for other in set(sched.running) - before} - {seq.tenant}, "nobody else waited"
            assert len(seq) >= paused_at.get(seq, -32) + 32, "it has had few tokens since it last gave way"
            paused_at[seq] = len(seq)
        for block, host_block in output.swap_out:
            swapped[host_block] = list(memory[block])
        for block, host_block in output.swap_in:
            memory[block] = swapped.pop(host_block)
        for source, target in output.block_copies:
            memory[target] = list(memory[source])
        outcome = (pipeline if pipelined else runner).step(output.plan)
        assert bool(outcome) == bool(output.plan.counts)
        for seq, accepted in outcome.items():
            seq.kv.mark_computed(accepted.computed)
            seq.kv.register_full_blocks(sched.pool)
            assert len(accepted.tokens) == (seq.kv.num_uncomputed == 0)
        for seq, token in [(seq, token) for seq, accepted in outcome.items() for token in accepted.tokens]:
            assert token == next_token(seq, seq.output.tokens.tolist())
            seq.output.tokens.append(token)
            if seq.output.finish_reason():
                sched.remove(seq)
                live.remove(seq)
        sched.pool.check_integrity()
        assert {seq.request_id for seq in sched.sequences()} == {seq.request_id for seq in live}
        assert sched.pool.num_held == len({block for seq in live for block in seq.kv.held_blocks})
        if host is not None:
            host.check_integrity()
            assert host.num_held == sum(len(seq.kv.swapped.host_blocks) for seq in live if seq.kv.swapped)
        if not live and step > 10:
            break
    assert not live, "a sequence starved"
    assert sched.pool.num_held == 0


def test_fork_copies_only_the_block_that_it_writes_to() -> None:
    sched = scheduler(16)
    seq = sequence("parent", [1] * 9, 20)
    sched.add(seq)
    run_step(sched)
    run_step(sched)
    fork = sched.fork(seq, "fork", seq.sampling)
    assert fork.kv.block_ids == seq.kv.block_ids and sched.pool.num_held == 3
    output, _ = run_step(sched)
    assert len(output.block_copies) == 1 and output.plan.counts == {seq: 1, fork: 1}
    assert fork.kv.block_ids[:2] == seq.kv.block_ids[:2] and fork.kv.block_ids[2] != seq.kv.block_ids[2]
    assert sched.pool.num_held == 4
    assert not run_step(sched)[0].block_copies
    sched.remove(seq)
    sched.remove(fork)
    assert sched.pool.num_held == 0


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
