"""Warm-up: steps over dummy tokens in an unused pool, which prime caches and calibrate the cost model."""

from collections.abc import Iterator

from pdserve.engine.engine import Engine
from pdserve.engine.sequence import Sequence
from pdserve.keys import token_array
from pdserve.request import SamplingParams

Work = list[tuple[int, int]]  # (tokens to compute, tokens before them) of each sequence of a step

MIN_PROBES = 4  # two lines cannot be fitted to fewer
LONG_CONTEXT = 4096  # tokens
EXTRA_PROBES_S = 0.3  # time budget of the probes beyond MIN_PROBES; the last one started is completed
_GREEDY = SamplingParams(temperature=0)


def warm_up(engine: Engine) -> Iterator[tuple[Work, float]]:
    """Run probe steps, each twice, and yield the work of each with the seconds that its second run took."""
    clock = engine.runner.clock
    longest = engine.max_model_len - 1
    started = clock()
    probes = _probes(longest, engine.scheduler.max_num_batched_tokens, engine.scheduler.max_num_seqs)
    for i, work in enumerate(probes):
        if i >= MIN_PROBES and clock() - started > EXTRA_PROBES_S:
            return
        for _ in range(2):
            step_started = clock()
            engine.runner.step({dummy_sequence(engine, count, before): count for count, before in work})
            seconds = clock() - step_started
        yield work, seconds


def measure_swaps(engine: Engine) -> Iterator[tuple[int, float]]:
    """Copy 1, 8 and 64 blocks to host memory and yield (blocks, seconds), twice each after a first copy that is not counted.

    Yields nothing without swap space.
    """
    pairs = [(i, i) for i in range(min(engine.pool.num_blocks, engine.runner.num_host_blocks))]
    for size in sorted({1, 8, 64} & set(range(len(pairs) + 1))):
        for i in range(3):
            seconds = engine.runner.swap(pairs[:size], [])
            if i:
                yield size, seconds


def _probes(longest: int, max_tokens: int, max_seqs: int) -> Iterator[Work]:
    """Yield prompts and decode steps in turn, short ones first, but a long context early, within the time budget."""
    largest = max(1, min(longest, max_tokens))
    long_context = min(longest, LONG_CONTEXT)
    short = min(64, largest)
    prompts = [[(min(size, largest), 0)] for size in (16, 128, 512, 2048)]
    decodes = [[(1, min(16, longest - 1))] * min(size, max_seqs, largest) for size in (1, 8, 32, 128)]
    prompts.insert(2, [(short, long_context - short)])
    decodes.insert(2, [(1, long_context - 1)] * min(8, max_seqs, largest))
    for pair in zip(prompts, decodes, strict=True):
        yield from pair


def dummy_sequence(engine: Engine, count: int, before: int, first_block: int = 0) -> Sequence:
    """Return a sequence of `count` tokens to compute behind `before` others, in blocks from `first_block`, which wrap around.

    Dummies may share blocks: what they write there does not matter.
    """
    length = before + count
    blocks = [(first_block + i) % engine.pool.num_blocks for i in range(engine.pool.blocks_for(length))]
    return Sequence(
        "warm-up",
        token_array([0] * length),
        length,
        length,
        _GREEDY,
        b"",
        engine.pool.block_size,
        block_ids=blocks,
        num_computed=before,
    )
