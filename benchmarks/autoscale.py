"""The controller beside a plan that knows the load, by simulation: `python benchmarks/autoscale.py --traces FOLDER`.

Windows of real traces are played on instances so slow that a simulation takes
minutes: by the controller of `pdserve autoscale`, which begins with --smallest instances and may have --instances; and by the
clairvoyant plan, which has all of them always, and in each period the split that is best for this period's requests alone.
A request is good if its TTFT and 99 % of its gaps are within the targets.
"""

import json
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import report

from pdserve.cli.flags import command_from_config
from pdserve.config import flag
from pdserve.errors import SetupError
from pdserve.profile.profile import EngineFacts, Overheads, Profile, StepModel, TransferModel
from pdserve.tools.autoscaler.change import Change
from pdserve.tools.autoscaler.command import make_controller
from pdserve.tools.autoscaler.forecast import make, rate
from pdserve.tools.autoscaler.rehearsal import rehearse
from pdserve.tools.bench.requests import Request, Sample
from pdserve.tools.load_config import AutoscaleConfig
from pdserve.tools.planner.slo_file import load_targets
from pdserve.tools.simulator.fleet import draw_requests, instance_model, mean_rate
from pdserve.tools.simulator.simulation import Simulation

# That of forecast.py, four times as slow; and each token stands for four.
PROFILE = Profile(
    model="demo",
    model_fingerprint="paced",
    engine=EngineFacts(16, 16384, 375, 256, 48, 1024),
    step=StepModel(
        decode=((1, 0.384), (16, 0.512), (48, 0.864)),
        prefill=((1, 0.096), (32, 0.18), (256, 0.88)),
        mixed=(0.0, 1.0, 0.95),
    ),
    transfers={"shm": TransferModel(8e-3, 3e7, 8e-3, 3e7, 6e7)},
    overheads=Overheads(4e-3, 1e-4, 1e-3, 5e-5, 8e-4),
)
# File, its format, factor of its lengths with which most requests fit, and of its rate with which eight instances do.
TRACES = {
    "conv": ("AzureLLMInferenceTrace_conv_2023.csv", "azure", 0.5 / 4, 1.0),
    "code": ("AzureLLMInferenceTrace_code_2023.csv", "azure", 0.5 / 4, 0.5),
    "mooncake": ("mooncake_fast25_conversation_trace.jsonl", "mooncake", 0.05 / 4, 2.5),
}
REVERSED_S = 60.0


@dataclass(frozen=True, kw_only=True)
class Settings(report.Settings):
    windows: str = flag("traces, each with the number of its first request", "conv:0,conv:8000,code:0,mooncake:0")
    requests: int = flag("of a window", 3000, least=20)
    instances: int = flag("of the plan, and the most of the controller", 8, least=2)
    smallest: int = flag("instances with which the controller begins", 4, least=2)
    splits: str = flag("numbers of prefill instances that the plan may have; empty: all", "")
    slo: str = flag("targets", "ttft.p90=2s,itl.p99=1600ms")
    period: float = flag("seconds for which the plan keeps a split", 240.0, above=0)
    window: float = flag("--window of the controller", 60.0, above=0)
    horizon: float = flag("--horizon", 40.0, above=0)
    cooldown: float = flag("--cooldown", 15.0, least=0)
    interval: float = flag("--interval", 10.0, above=0)
    traces: str = flag("folder of the traces", "")


QUICK = {"requests": 40, "instances": 3, "smallest": 2, "windows": "small:0"}


class Exam:
    """One window, and what plays it."""

    def __init__(self, settings: Settings, window: str, folder: Path) -> None:
        self.settings, self.window = settings, window
        names = ("slo", "window", "horizon", "cooldown", "interval")
        most = settings.instances if settings.smallest < settings.instances else 0
        own = {name: getattr(settings, name) for name in names}
        self.config = AutoscaleConfig(**_data_set(settings, window, folder), **own, max_instances=most)
        self.loads = draw_requests(self.config, mean_rate(self.config))
        self.targets = load_targets(settings.slo, "")
        self.controller, self._empty = make_controller(self.config, PROFILE, can_start=most > 0)
        self._model = instance_model(self.config, PROFILE)

    def simulation(self, prefill: int, size: int) -> Simulation:
        return Simulation(replace(self._empty, prefill=prefill, decode=size - prefill), self._model)

    def good(self, samples: Sequence[Sample]) -> float:
        return rate(self.targets, samples).attainment

    def plan(self) -> dict[str, Any]:
        """Play the load on the fleet that has the best split of each period."""
        size, period = self.settings.instances, self.settings.period
        splits = [int(one) for one in self.settings.splits.split(",") if one] or list(range(1, size))
        best = list[int]()
        for part in _periods(self.loads, period):
            shares = {one: self.good(self.simulation(one, size).play(part).samples) for one in splits}
            nearest = best[-1] if best else size // 2
            best.append(max(splits, key=lambda one: (shares[one], -abs(one - nearest))))
        simulation = self.simulation(best[0], size)
        for number, (before, after) in enumerate(pairwise(best), 1):
            if before != after:
                roles = ("decode", "prefill") if after > before else ("prefill", "decode")
                change = Change(*roles, count=abs(after - before))
                simulation.clock.at(number * period, partial(make, simulation, change))
        outcome = simulation.play(self.loads)
        return {"good": self.good(outcome.samples), "seconds": size * outcome.seconds, "splits": best}

    def steered(self) -> dict[str, Any]:
        """Play the load with the controller."""
        size = self.settings.smallest
        run = rehearse(
            self.simulation(size // 2, size),
            self.controller.decide,
            self.loads,
            self.settings.interval,
            self.settings.window,
        )
        undone = [b for a, b in _pairs(run.changes) if b[0] - a[0] < REVERSED_S and b[1].undoes(a[1])]
        changes = [(round(at), str(change)) for at, change in run.changes]
        own = {"good": self.good(run.samples), "seconds": run.instance_seconds}
        return own | {"changes": changes, "reversed": len(undone)}

    def row(self) -> dict[str, Any]:
        controller, plan = self.steered(), self.plan()
        share = {
            "good_ratio": controller["good"] / plan["good"],
            "seconds_ratio": controller["seconds"] / plan["seconds"],
        }
        return {"window": self.window} | share | {"controller": controller, "plan": plan}


def _pairs(changes: Sequence[tuple[float, Change]]) -> list[tuple[tuple[float, Change], tuple[float, Change]]]:
    return [(a, b) for number, a in enumerate(changes) for b in changes[number + 1 :]]


def _periods(loads: Sequence[Request], period: float) -> list[list[Request]]:
    """Return the requests of each period, with their times in it."""
    parts = list[list[Request]]()
    for number in range(int(max(one.at or 0.0 for one in loads) / period) + 1):
        part = [one for one in loads if int((one.at or 0.0) / period) == number]
        moved = [replace(one, at=(one.at or 0.0) - number * period) for one in part]
        parts.append([replace(one, index=index, after=None, continues=False) for index, one in enumerate(moved)])
    return [part for part in parts if part]


def _data_set(settings: Settings, window: str, folder: Path) -> dict[str, Any]:
    """Return the settings of a load: requests of a trace that an instance can take."""
    name, _, first = window.partition(":")
    if name == "small":
        return {"num_prompts": settings.requests, "request_rate": 1.0, "random_input_len": 60, "random_output_len": 8}
    file, kind, scale, speed = TRACES[name]
    try:
        lines = (Path(settings.traces) / file).read_text().removesuffix("\n").split("\n")
    except OSError as error:
        raise SetupError(f"--traces must name a folder with {file}: {error.strerror}") from None
    head, lines = (lines[:1], lines[1:]) if kind == "azure" else ([], lines)
    fitting = [one for one in lines if scale * _tokens(one) < PROFILE.engine.max_model_len]
    path = folder / f"{window}.trace"
    path.write_text("\n".join([*head, *fitting[int(first) : int(first) + settings.requests], ""]))
    return {
        "dataset_name": kind,
        "dataset_path": str(path),
        "num_prompts": settings.requests,
        "trace_speed": speed,
        "trace_length_scale": scale,
    }


def _tokens(line: str) -> int:
    """Return the tokens of a request, by its line in a trace."""
    if line.startswith("{"):
        row = json.loads(line)
        return int(row["input_length"]) + int(row["output_length"])
    return sum(map(int, line.split(",")[-2:]))


def run(settings: Settings) -> None:
    """Play each window, and print the controller beside the plan."""
    settings = settings.sized(QUICK)
    with tempfile.TemporaryDirectory() as name:
        rows = [Exam(settings, window, Path(name)).row() for window in settings.windows.split(",")]
    shown = [
        {
            "window": row["window"],
            "controller": f"{row['controller']['good']:.1%}",
            "plan": f"{row['plan']['good']:.1%}",
            "÷ plan": f"{row['good_ratio']:.2f}",
            "instance-seconds ÷ plan's": f"{row['seconds_ratio']:.2f}",
            "changes": len(row["controller"]["changes"]),
            "reversed within 60 s": row["controller"]["reversed"],
        }
        for row in rows
    ]
    report.show(shown)
    print(report.write("autoscale", replace(settings, traces=""), {"rows": rows}))


if __name__ == "__main__":
    report.main(command_from_config(Settings, run))
