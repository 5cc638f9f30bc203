"""Times steps of an engine over a grid of prompts, batches and mixtures of both, and what its thread does around them."""

import random
import statistics
import time
from collections.abc import Callable, Iterator

from pdserve.engine.engine import Engine
from pdserve.engine.step import StepOutcome, StepPlan
from pdserve.engine.warm_up import dummy_sequence
from pdserve.instance.instance import Instance
from pdserve.profile.fit import Timing, kind_of, least_squares
from pdserve.proto import pdserve_pb2 as pb
from pdserve.request import Request, SamplingParams

Work = list[tuple[int, int]]
Show = Callable[[str], None]
GRAPH_STEPS = 8  # decode steps of a batch size until it is replayed, see engine/step_graph.py
DECODE_RUNS = 6  # of a decode step, one after the other
TIMED_STEPS = 16  # of a batch, for the time around them


def clock_of(engine: Engine) -> Callable[[], float]:
    """Return the clock of steps. One CPU thread is timed by its own CPU time, which other processes do not prolong."""
    import torch

    alone = engine.checkpoint.device.type == "cpu" and torch.get_num_threads() == 1
    return time.thread_time if alone else time.perf_counter


def grid(longest: int, max_tokens: int, max_seqs: int, quick: bool) -> list[Work]:
    """Return the steps to time, each (tokens computed, tokens before them) by sequence."""
    longest = max(2, longest)
    chunks = _sizes(
        (4, 16, 64, 256, 1024) if quick else (4, 16, 32, 64, 128, 256, 512, 1024, 2048), min(longest, max_tokens)
    )
    pasts = _sizes((64, longest - 1) if quick else (16, longest // 8, longest // 3, longest - 1), longest - 1)
    batches = _sizes((1, 4, 16, 64) if quick else (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 256), max_seqs)
    chunk_pasts = [0, longest // 2] if quick else [0, longest // 8, longest // 3, longest * 2 // 3]
    works: list[Work] = [[(chunk, past)] for chunk in chunks for past in chunk_pasts if chunk + past <= longest]
    works += [[(chunk // n, 0)] * n for chunk in chunks for n in (2, 4) if chunk // n > 1]
    works += [[(1, past)] * batch for batch in batches for past in pasts]
    for chunk in chunks[:: 2 if quick else 1]:
        for batch in _sizes((4,) if quick else (1, 4, 16, 48), max_seqs - 1):
            for past in (pasts[0], pasts[-1]):
                works.append([(chunk, longest // 2 if chunk + longest // 2 <= longest else 0), *[(1, past)] * batch])
    return [work for work in works if sum(count for count, _ in work) <= max_tokens]


def random_steps(longest: int, max_tokens: int, max_seqs: int, count: int, seed: int) -> list[Work]:
    """Return mixed, prefill and decode steps in turn, which the model is not fitted to."""
    chosen, works = random.Random(seed), []
    for i in range(count):
        batch = 0 if i % 3 == 1 else min(max_seqs - 1, int(2 ** chosen.uniform(0, 6)))
        work = [(1, chosen.randrange(1, longest)) for _ in range(min(batch, max_tokens // 2))]
        if i % 3 < 2 or not work:
            tokens = max(2, min(longest, max_tokens - len(work), int(2 ** chosen.uniform(2, 11))))
            work.append((tokens, chosen.randrange(longest - tokens + 1)))
        works.append(work)
    return works


def time_steps(engine: Engine, works: list[Work], repeat: int, show: Show) -> Iterator[Timing]:
    """Run all steps in `repeat` rounds, each in another order, and yield each with the median of its seconds.

    Steps follow each other in an instance, decode steps in long rows. So the first run of a step does not count.
    """
    clock = clock_of(engine)
    for size in sorted({len(work) for work in works if all(count == 1 for count, _ in work)}):
        for _ in range(GRAPH_STEPS):
            engine.runner.step(dummies(engine, [(1, 1)] * size))
    measured: list[list[float]] = [[] for _ in works]
    for turn in range(repeat):
        for done, i in enumerate(random.Random(turn).sample(range(len(works)), len(works))):
            show(f"steps: round {turn + 1} of {repeat}, {done} of {len(works)}")
            plan, seconds = dummies(engine, works[i]), list[float]()
            for _ in range(DECODE_RUNS if kind_of(works[i]) == "decode" else 2):
                started = clock()
                engine.runner.step(plan)
                seconds.append(clock() - started)
            measured[i].append(statistics.median(seconds[1:]))
    for work, medians in zip(works, measured, strict=True):
        yield work, statistics.median(medians)


def time_around_steps(instance: Instance, max_seqs: int, show: Show) -> tuple[float, float]:
    """Return the seconds of the engine thread outside of forward passes: for each decode step, and each sequence in it."""
    runner, outside = instance.engine.runner, [0.0]
    forward, rows, seconds = runner.step, list[list[float]](), list[float]()

    def timed(plan: StepPlan) -> StepOutcome:
        started = time.thread_time()
        outcome = forward(plan)
        outside[0] -= time.thread_time() - started
        return outcome

    runner.step = timed  # type: ignore[method-assign]
    try:
        for size in _sizes((1, 4, 16, 48), max_seqs):
            show(f"the engine thread around steps of {size} sequences")
            for i in range(size):
                sampling = SamplingParams(temperature=0, max_tokens=TIMED_STEPS + 8, ignore_eos=True)
                request = Request(prompt=[i, size], sampling=sampling).pack()
                instance.submit("", pb.Submit(request_id=f"{size}-{i}", phase=pb.BOTH, request=request))
            for turn in range(TIMED_STEPS + 4):
                started, outside[0] = time.thread_time(), 0.0
                instance.run_once(wait=False)
                if turn >= 4:
                    rows.append([1.0, size])
                    seconds.append(time.thread_time() - started + outside[0])
            while instance.num_jobs:
                instance.run_once(wait=not instance.engine.has_work)
    finally:
        del runner.step
    step_s, sequence_s = least_squares(rows, seconds, {0, 1})
    return step_s, sequence_s


def _sizes(sizes: tuple[int, ...], most: int) -> list[int]:
    """Return the sizes up to `most`, and `most` itself if it cuts any off."""
    kept = sorted({size for size in sizes if 0 < size <= most})
    return kept if most >= max(sizes) else sorted({*kept, max(1, most)})


def dummies(engine: Engine, work: Work) -> StepPlan:
    """Return a step over sequences in blocks of their own, if the pool has room: shared blocks would stay in the cache."""
    plan, block = StepPlan(), 0
    for count, before in work:
        sequence = dummy_sequence(engine, count, before, block)
        block += len(sequence.kv.block_ids)
        plan.counts[sequence] = count
    return plan
