"""Warm-up: steps over dummy tokens in an unused pool, which compile kernels, prime caches and calibrate the cost model."""

import logging
from collections.abc import Iterator

from pdserve.engine.engine import Engine
from pdserve.engine.memory.sequence_kv import block_table
from pdserve.engine.sequence import Sequence
from pdserve.engine.step import StepPlan
from pdserve.keys import token_array
from pdserve.plugins import extension
from pdserve.request import SamplingParams

log = logging.getLogger(__name__)

Work = list[tuple[int, int]]  # (tokens to compute, tokens before them) of each sequence of a step

MIN_PROBES = 4  # two lines cannot be fitted to fewer
LONG_CONTEXT = 4096  # tokens
# Time budget of the probes beyond MIN_PROBES, in seconds by kind of device; the last one started is completed. On a GPU short
# steps take as long as their launch, so that the long ones count.
EXTRA_PROBES_S = {"cpu": 0.3, "cuda": 5.0}
_GREEDY = SamplingParams(temperature=0)


def warm_up(engine: Engine) -> Iterator[tuple[Work, float]]:
    """Run probe steps, each twice, and yield the work of each with the seconds that its second run took.

    On a GPU, all kernels are compiled before.
    """
    device = engine.checkpoint.device.type
    if device == "cuda":
        compile_kernels(engine)
    clock = engine.runner.clock
    started = clock()
    for i, work in enumerate(_probes(*_limits(engine))):
        if i >= MIN_PROBES and clock() - started > EXTRA_PROBES_S[device]:
            return
        for _ in range(2):
            step_started = clock()
            _run(engine, work)
            seconds = clock() - step_started
        yield work, seconds


def compile_kernels(engine: Engine) -> None:
    """Run every variant of every kernel of the engine once, and record every graph, so that no request waits for that.

    Variants differ by phase, by whether the KV of a sequence is split, and by the layers' windows and soft caps; not by
    lengths or numbers of sequences. Graphs of decode steps differ by both.
    """
    from pdserve.engine.model_runner import ModelRunner  # imports transformers, which a paced runner does not need

    assert isinstance(engine.runner, ModelRunner)
    longest, max_tokens, max_seqs = _limits(engine)
    works = list(_probes(longest, max_tokens, max_seqs))
    works.append([(1, longest - 1)])  # alone, its KV is split over all processors
    # Behind powers of two, an attention window reaches over the end of a split of a fixed length.
    works += [[(1, 1 << bits)] for bits in range(4, longest.bit_length()) if 1 << bits < longest]
    if max_seqs > 1 and max_tokens > 1:
        works.append([(1, longest - 1), (min(2, longest, max_tokens - 1), 0)])  # both phases in one step
    sizes: list[tuple[int, int]] = extension("gpu").sizes_to_record(engine.runner, min(max_seqs, max_tokens))
    works += [[(1, min(limit, longest) - 1)] * min(rows, max_seqs, max_tokens) for rows, limit in sizes]
    for work in works:
        _run(engine, work)
    extension("gpu").end_recording(engine.runner)
    sampled = dummy_sequence(engine, 1, 0, sampling=SamplingParams(temperature=1))  # which has a kernel of its own
    engine.runner.step(StepPlan({sampled: 1}))
    engine.runner.kv.compile_copies()


def measure_swaps(engine: Engine) -> Iterator[tuple[int, float]]:
    """Copy 1, 8 and 64 blocks to host memory and yield (blocks, seconds), twice each after a first copy that is not counted.

    Yields nothing without swap space.
    """
    pairs = [(i, i) for i in range(min(engine.pool.num_blocks, engine.runner.kv.num_host_blocks))]
    for size in sorted({1, 8, 64} & set(range(len(pairs) + 1))):
        for i in range(3):
            seconds = engine.runner.kv.swap(pairs[:size], [])
            if i:
                yield size, seconds


def _limits(engine: Engine) -> tuple[int, int, int]:
    """Return the tokens of the longest sequence, and the most tokens and sequences of a step."""
    scheduler = engine.scheduler
    return engine.max_model_len - 1, scheduler.max_num_batched_tokens, scheduler.max_num_seqs


def _run(engine: Engine, work: Work) -> None:
    engine.runner.step(StepPlan({dummy_sequence(engine, count, before): count for count, before in work}))


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


def dummy_sequence(
    engine: Engine, count: int, before: int, first_block: int = 0, sampling: SamplingParams = _GREEDY
) -> Sequence:
    """Return a sequence of `count` tokens to compute behind `before` others, in blocks from `first_block`, which wrap around.

    Dummies may share blocks: what they write there does not matter.
    """
    length = before + count
    blocks = [(first_block + i) % engine.pool.num_blocks for i in range(engine.pool.blocks_for(length))]
    return Sequence.new(
        "warm-up",
        token_array([0] * length),
        length,
        length,
        sampling,
        b"",
        engine.pool.block_size,
        block_ids=block_table(blocks),
        num_computed=before,
    )
