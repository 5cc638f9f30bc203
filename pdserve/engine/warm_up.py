"""Steps over made-up tokens in a pool that nobody uses yet: they warm the machine up and show what steps take."""

import time
from collections.abc import Iterator

from pdserve.engine.engine import Engine
from pdserve.engine.sequence import Sequence
from pdserve.request import SamplingParams

Work = list[tuple[int, int]]  # (tokens to compute, tokens before them) of each sequence of a step

ALWAYS = 4  # probes: two lines cannot be told from less
FAR = 4096  # tokens of context
BUDGET_S = 0.3  # for those beyond; the last one begun is finished
_GREEDY = SamplingParams(temperature=0)


def warm_up(engine: Engine) -> Iterator[tuple[Work, float]]:
    """Yields what was computed in a step and how many seconds it took. Each has been run once before, to get ready.

    On CPUs that is the time for which this thread had a core: the instances of a machine often start together, and none of
    them should believe for ever that it is slow.
    """
    clock = time.thread_time if engine.checkpoint.device.type == "cpu" else time.monotonic
    longest = engine.max_model_len - 1
    started = time.monotonic()
    for i, work in enumerate(_probes(longest, engine.scheduler.max_num_batched_tokens, engine.scheduler.max_num_seqs)):
        if i >= ALWAYS and time.monotonic() - started > BUDGET_S:
            return
        for _ in range(2):
            begun = clock()
            engine.runner.step({_sequence(engine, count, before): count for count, before in work})
            seconds = clock() - begun
        yield work, seconds


def time_swaps(engine: Engine) -> Iterator[tuple[int, float]]:
    """Yields how many blocks were copied to host memory and how many seconds it took, twice each; nothing if there is no
    room for swapping. What the first copy of each size takes is not told."""
    pairs = [(i, i) for i in range(min(engine.pool.num_blocks, engine.runner.num_places))]
    for size in sorted({1, 8, 64} & set(range(len(pairs) + 1))):
        for i in range(3):
            seconds = engine.runner.swap(pairs[:size], [])
            if i:
                yield size, seconds


def _probes(longest: int, max_tokens: int, max_seqs: int) -> Iterator[Work]:
    """From short to long: one prompt, then a step of decoding, by turns; a long context early on, if there is time at all."""
    largest = max(1, min(longest, max_tokens))
    far = min(longest, FAR)
    short = min(64, largest)
    prompts = [[(min(size, largest), 0)] for size in (16, 128, 512, 2048)]
    batches = [[(1, min(16, longest - 1))] * min(size, max_seqs, largest) for size in (1, 8, 32, 128)]
    prompts.insert(2, [(short, far - short)])
    batches.insert(2, [(1, far - 1)] * min(8, max_seqs, largest))
    for pair in zip(prompts, batches, strict=True):
        yield from pair


def _sequence(engine: Engine, count: int, before: int) -> Sequence:
    """All sequences write to the same blocks, which hold nothing."""
    length = before + count
    blocks = list(range(engine.pool.blocks_for(length)))
    return Sequence(
        "warm-up",
        [0] * length,
        length,
        length,
        _GREEDY,
        b"",
        engine.pool.block_size,
        block_ids=blocks,
        num_computed=before,
    )
