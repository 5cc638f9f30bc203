"""Speed of the simulator: `python benchmarks/simulation.py [--trace conversation_trace.jsonl]`.

One process simulates a fleet of 64 instances, the size of an 70B model's on large GPUs, under a trace in Mooncake's form, or
under as many synthetic requests of 12,000 tokens. The figure is simulated seconds per second of CPU time.
"""

import math
import resource
import time
from dataclasses import dataclass, replace
from pathlib import Path

import report

from pdserve.cli.flags import command_from_config
from pdserve.config import flag
from pdserve.profile.profile import EngineFacts, Profile, StepModel, TransferModel
from pdserve.tools.load_config import FleetConfig
from pdserve.tools.simulator.fleet import Fleet, simulate

TOKEN_BYTES = 320 * 1024
PROFILE = Profile(
    model="70B",
    engine=EngineFacts(16, 16 * TOKEN_BYTES, 37_500, 8192, 64, 131_072),
    step=StepModel(decode=((1, 0.015), (64, 0.028)), context_s=4e-8, prefill=((1, 0.015), (8192, 0.83)), pair_s=1e-9),
    transfers={"rdma": TransferModel(1e-3, 2e10, 1e-3, 2e10, 4e11)},
)
RATE = 3.4  # requests per second, as in the trace


@dataclass(frozen=True, kw_only=True)
class Settings(report.Settings):
    trace: str = flag("JSON lines of Mooncake's form; empty: synthetic requests", "")
    requests: int = flag("of the trace, at most", 1000, least=1)
    instances: int = flag("half of them prefill, half decode", 64, least=2)
    speed: float = flag("requests come this much faster than in the trace, or than 3.4 a second", 1.0, above=0)


def run(settings: Settings) -> None:
    """Simulate once, and report the speed."""
    settings = settings.sized({"requests": 30, "instances": 4})
    config = FleetConfig(
        dataset_name="mooncake" if settings.trace else "random",
        dataset_path=settings.trace,
        block_size=None if settings.trace else 512,
        random_input_len=12_000,
        random_output_len=340,
        random_range_ratio=0.9,
        num_prompts=settings.requests,
        trace_speed=settings.speed,
        store_size="16TiB",
        jobs=1,
    )
    half = settings.instances // 2
    started = time.process_time()
    rate = math.inf if settings.trace else RATE * settings.speed
    forecast = simulate(config, PROFILE, {}, Fleet(half, settings.instances - half), rate)
    cpu_s = time.process_time() - started
    figures = forecast.figures
    row = {
        "requests": figures["completed"] + figures["failed"],
        "output_tokens": figures["total_output_tokens"],
        "simulated_s": figures["duration"],
        "cpu_s": cpu_s,
        "simulated_per_cpu": figures["duration"] / cpu_s,
        "memory_mib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
    }
    report.show([{name: f"{value:,.0f}" for name, value in row.items()}])
    print(report.write("simulation", replace(settings, trace=Path(settings.trace).name), {"rows": [row]}))


if __name__ == "__main__":
    report.main(command_from_config(Settings, run))
