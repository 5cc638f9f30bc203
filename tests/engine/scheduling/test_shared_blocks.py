"""Blocks of sequences: each reads its own tokens, whatever is shared, swapped, loaded or preempted, and no block leaks."""

from collections.abc import Sequence as SequenceABC
from typing import Any
from zlib import crc32

from hypothesis import example, given, settings
from hypothesis import strategies as st

from pdserve.costs import Costs
from pdserve.engine.memory.blocks import BlockPool
from pdserve.engine.memory.groups import Group
from pdserve.engine.scheduling.scheduler import Scheduler
from pdserve.engine.sequence import Sequence
from pdserve.engine.step import StepOutcome, StepPlan
from pdserve.engine.step_pipeline import StepPipeline
from pdserve.request import ARRIVALS_PER_PRIORITY, Tenant
from tests.engine.scheduling.steps import BLOCK, run_step, scheduler, sequence
from tests.examples import examples


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


@example(  # one is admitted whose promised blocks those behind it take, which hold blocks
    num_blocks=8,
    max_num_seqs=4,
    budget=10,
    arrivals=[
        *[(0, 1, 1, 0, 0, "computed")] * 6,
        (2, 11, 7, 2, 0, "loaded without a first token"),
        (6, 1, 1, 0, 0, "computed"),
        (3, 13, 1, 0, 0, "computed"),
        (2, 14, 4, 1, 0, "loaded"),
        *[(0, 1, 1, 0, 0, "computed")] * 2,
    ],
    forks=[(6, 0), (6, 2)],
    aborts=[],
    host_blocks=0,
    window=None,
    itl=None,
    attention_seconds=0.0,
    row_seconds=1e-4,
    weights=[0.1],
    pipelined=False,
)
@settings(max_examples=examples(3), deadline=None)
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
        for source, target in output.block_copies:
            memory[target] = list(memory[source])
        for block, host_block in output.swap_in:
            memory[block] = swapped.pop(host_block)
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


def test_hits_that_leave_too_few_pages_are_not_taken_over() -> None:
    """A page holds two blocks of a group with a window. Hits of two sequences hold a page each, half of which is unused."""
    pool = BlockPool(12, BLOCK, [Group(None, 1, 0), Group(2 * BLOCK, 2, 12)])
    sched = Scheduler(pool, max_num_seqs=2, max_num_batched_tokens=64)
    for length in (5, 9):
        sched.add(sequence(str(length), [*range(length)], 1))
        run_step(sched)
    assert not [*sched.sequences()]
    longest = sequence("longest", [*range(29)], 4)  # 8 blocks of each group, so all 12 pages
    sched.add(longest)
    for _ in range(4):
        assert run_step(sched)[0].plan.counts, "it waits for pages that nobody has"
    assert longest.output.finish_reason() and pool.num_held == pool.num_promised == 0


def test_hits_are_taken_over_once_pages_that_others_hold_are_free() -> None:
    pool = BlockPool(13, BLOCK, [Group(None, 1, 0), Group(2 * BLOCK, 2, 13)])
    sched = Scheduler(pool, max_num_seqs=2, max_num_batched_tokens=64)
    for length in (5, 9):
        sched.add(sequence(str(length), [*range(length)], 1))
        run_step(sched)
    held = pool.allocate(1)
    longest = sequence("longest", [*range(29)], 4)
    sched.add(longest)
    assert not run_step(sched)[0].plan.counts
    pool.release(held)
    assert run_step(sched)[0].plan.counts == {longest: 29 - 2 * BLOCK}
