"""Times what adapters (LoRA) add to the steps of an engine, and how long it takes until one is in a slot."""

import statistics
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import accumulate

from pdserve.config import EngineConfig
from pdserve.engine.adapters import Adapter, Adapters
from pdserve.engine.engine import Engine
from pdserve.engine.step import StepPlan
from pdserve.engine.warm_up import dummy_sequence
from pdserve.profile.profile import AdapterModel
from pdserve.tools.profiling.steps import Work, clock_of

BATCHES, CHUNK, PAST = (
    (1, 4, 16, 48),
    256,
    64,
)  # sequences that decode, tokens of a prompt, tokens before those that decode
RUNS = 6  # of a step, one after the other; the first does not count


def time_adapters(engine: Engine, config: EngineConfig, repeat: int, show: Callable[[str], None]) -> AdapterModel:
    """Return what the adapters of an engine with these settings add to its steps; it has at least one."""
    adapters = engine.adapters
    assert adapters is not None
    found = [adapters.find(one.digest) for one in adapters.listing()]
    timer = _Timer(engine, adapters, repeat)
    works: list[Work] = [
        [(1, min(PAST, engine.max_model_len - 1))] * batch for batch in BATCHES if batch <= config.max_num_seqs
    ]
    largest = works[-1]
    if (chunk := min(CHUNK, config.max_num_batched_tokens, engine.max_model_len - 1)) > len(largest):
        works.append([(chunk, 0)])
    more = []
    for work in works:
        show(f"steps with adapters: {len(work)} sequences")
        more.append(max(0.0, timer.seconds(work, found[:1]) - timer.seconds(work, [])))
    rows = [sum(count for count, _ in work) for work in works]
    several = found[: min(config.max_loras, len(largest))]
    each = 0.0
    if len(several) > 1:
        further = timer.seconds(largest, several) - timer.seconds(largest, several[:1])
        each = max(0.0, further / (len(several) - 1))
    return AdapterModel(tuple(zip(rows, accumulate(more, max), strict=True)), each, timer.load_s)


class _Timer:
    """Runs steps whose sequences have adapters.

    Attributes:
        load_s: of the slowest start of a use of an adapter so far.
    """

    def __init__(self, engine: Engine, adapters: Adapters, repeat: int) -> None:
        self._engine, self._adapters, self._repeat = engine, adapters, repeat
        self._clock = clock_of(engine)
        self.load_s = 0.0

    def seconds(self, work: Work, chosen: Sequence[Adapter]) -> float:
        """Return the median seconds of a step whose sequences have these adapters in turn."""
        engine, plan, block = self._engine, StepPlan(), 0
        for number, (count, before) in enumerate(work):
            one = dummy_sequence(engine, count, before, block)
            block += len(one.kv.block_ids)
            plan.counts[replace(one, adapter=chosen[number % len(chosen)] if chosen else None)] = count
        for one in plan.counts if chosen else ():
            started = self._clock()
            assert self._adapters.acquire(one)
            self.load_s = max(self.load_s, self._clock() - started)
        medians = []
        for _ in range(self._repeat):
            runs = [self._run(plan) for _ in range(RUNS)]
            medians.append(statistics.median(runs[1:]))
        for one in plan.counts:
            self._adapters.release(one)
        self._adapters.begin_step(StepPlan())
        return statistics.median(medians)

    def _run(self, plan: StepPlan) -> float:
        started = self._clock()
        self._adapters.begin_step(plan)
        self._engine.runner.step(plan)
        return self._clock() - started
