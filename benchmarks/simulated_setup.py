"""Simulated setup: a few instances with published timings, which play requests with published lengths."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from pdserve.bench.requests import Request, Sample
from pdserve.config import InstanceConfig, RouterConfig
from pdserve.profile.profile import Profile, TransferModel
from pdserve.simulator.model import InstanceModel
from pdserve.simulator.simulation import MODEL, Deployment, Simulation

TRACES = Path(__file__).parent / "traces"
FREE = TransferModel(1e-5, 1e12, 1e-5, 1e12, 1e12)


@dataclass(frozen=True)
class Setup:
    """Instances and what they cost.

    Attributes:
        pool: tokens of KV per instance.
        batch: tokens per step, at most.
        gpus: of all instances.
        block: tokens per KV block; larger ones are simulated faster.
    """

    profile: Profile
    pool: int
    prefill: int = 0
    decode: int = 0
    both: int = 0
    batch: int = 2048
    sequences: int = 256
    gpus: int = 1
    block: int = 16

    def play(self, requests: Sequence[Request]) -> list[Sample]:
        """Return the samples of a simulation in which all instances work and all requests are answered."""
        deployment = Deployment(
            self.prefill,
            self.decode,
            self.both,
            instance=InstanceConfig(model=MODEL, max_num_seqs=self.sequences, max_num_batched_tokens=self.batch),
            router=RouterConfig(model=MODEL, local_prefill_tokens=0),
        )
        model = InstanceModel.from_profile(
            self.profile, "link", num_blocks=self.pool // self.block, block_size=self.block
        )
        outcome = Simulation(deployment, model).play(requests)
        assert all(outcome.busy.values()), f"an instance was not used: {outcome.busy}"
        assert all(sample.ok for sample in outcome.samples)
        return outcome.samples

    def with_profile(self, **changes: Any) -> "Setup":
        """Return the same with other parts of the profile."""
        return replace(self, profile=replace(self.profile, **changes))

    def with_step(self, **changes: Any) -> "Setup":
        """Return the same with other costs of steps."""
        return self.with_profile(step=replace(self.profile.step, **changes))

    def scaled(self, phase: str, factor: float) -> "Setup":
        """Return the same with longer or shorter steps of a phase."""
        step, names = self.profile.step, {"prefill": ("pair_s", "prompt_s"), "decode": ("context_s",)}
        changes: dict[str, Any] = {name: getattr(step, name) * factor for name in names[phase]}
        return self.with_step(**changes | {phase: tuple((x, y * factor) for x, y in getattr(step, phase))})


Change = Callable[[Setup], Setup]


def requests_of(lengths: Sequence[tuple[int, int]], times: Sequence[float]) -> list[Request]:
    """Return requests without shared prefixes."""
    return [
        Request(i, output, ((f"r{i}", prompt),), input_tokens=prompt, at=at)
        for i, ((prompt, output), at) in enumerate(zip(lengths, times, strict=True))
    ]


def row(system: str, figure: str, pair: Iterable[float], unit: str = "") -> dict[str, Any]:
    published, forecast = pair
    return {"system": system, "figure": figure, "published": published, "forecast": forecast, "unit": unit}
