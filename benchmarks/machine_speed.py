"""Machine speed: how long steps of the demo model take now, beside what a profile says.

A shared machine can become half as fast from one minute to the next, and a profile is of the minutes in which it was made.
"""

import time
from dataclasses import replace
from typing import Any

import torch

from pdserve.config import EngineConfig
from pdserve.engine.engine import Engine
from pdserve.engine.step import StepPlan
from pdserve.engine.warm_up import dummy_sequence
from pdserve.profile.profile import Profile

STEPS, FIRST_STEPS = 200, 20  # to time, and before, until they are recorded
CONTEXT = 200


class MachineSpeed:
    """Times decode steps of one sequence, in a thread of this process."""

    def __init__(self, profile: Profile) -> None:
        torch.set_num_threads(1)
        self._engine = Engine(EngineConfig(model="demo", num_blocks=64))
        self._expected = profile.step.decode_seconds(1, CONTEXT + 1)
        self._time(FIRST_STEPS)

    def slowdown(self) -> float:
        """Return the CPU time of a step now as a multiple of the profile's."""
        return self._time(STEPS) / self._expected

    def _time(self, count: int) -> float:
        sequence = dummy_sequence(self._engine, 1, CONTEXT, 0)
        started = time.thread_time()
        for _ in range(count):
            self._engine.runner.step(StepPlan({sequence: 1}))
        return (time.thread_time() - started) / count


def slowed(profile: Profile, factor: float) -> Profile:
    """Return the profile of a machine on which everything takes `factor` times as long."""
    step, overheads = profile.step, profile.overheads
    knots: dict[str, Any] = {
        name: tuple((amount, factor * seconds) for amount, seconds in getattr(step, name))
        for name in ("decode", "prefill")
    }
    times = {name: factor * getattr(step, name) for name in ("context_s", "pair_s", "cached_s", "prompt_s")}
    mixed = (factor * step.mixed[0], *step.mixed[1:])
    transfers = {}
    for scheme, transfer in profile.transfers.items():
        latencies = {name: factor * getattr(transfer, name) for name in ("latency_s", "store_latency_s")}
        speeds = ("bytes_per_s", "store_bytes_per_s", "link_bytes_per_s")
        transfers[scheme] = replace(
            transfer, **latencies, **{name: getattr(transfer, name) / factor for name in speeds}
        )
    return replace(
        profile,
        step=replace(step, **knots, **times, mixed=mixed),
        transfers=transfers,
        overheads=type(overheads)(*(factor * seconds for seconds in vars(overheads).values())),
    )
