"""The controller against fixed fleets under a load that shifts: `python benchmarks/autoscale.py [--live] [--load …]`.

Simulated: every fixed split of --instances, and the controller, which begins with half of each role. With --live, the
controller (`pdserve autoscale --apply`) and the split that was best in the simulation of the whole load play the same
requests with real routers, connectors and paced instances.
"""

import json
import math
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from random import Random
from typing import Any

import report
from forecast import PROFILE, deployed
from machine_speed import slowed
from rich.table import Table

from pdserve.autoscaler.command import make_controller
from pdserve.autoscaler.forecast import rate
from pdserve.autoscaler.rehearsal import rehearse
from pdserve.bench.requests import Request, Sample
from pdserve.cli.flags import command_from_config
from pdserve.config import flag
from pdserve.load_config import AutoscaleConfig
from pdserve.planner.slo_file import load_targets
from pdserve.simulator.fleet import Fleet, draw_requests, instance_model, mean_rate
from pdserve.simulator.simulation import Simulation

SLOWDOWN = 4.0  # of the profile, so that two cores bear many instances, their clients and forecasts
LONG, SHORT = (1000, 40), (100, 200)  # tokens of prompts and answers, before and after a shift


@dataclass(frozen=True, kw_only=True)
class Settings(report.Settings):
    live: bool = flag("also with real processes and paced instances", False)
    load: str = flag("shift: of lengths, every --period; wave: of the rate, within --period", "shift")
    instances: int = flag("of each fleet", 8, least=2)
    request_rate: float = flag("requests per second in the mean", 4.5, above=0)
    period: float = flag("seconds", 180.0, above=0)
    periods: int = flag("number of them", 4, least=1)
    slo: str = flag("targets", "ttft.p90=2s,itl.p99=400ms")
    window: float = flag("--window of the controller", 60.0, above=0)
    horizon: float = flag("--horizon of the controller", 40.0, above=0)
    cooldown: float = flag("--cooldown of the controller", 15.0, least=0)
    interval: float = flag("--interval of the controller", 10.0, above=0)
    seed: int = flag("of the load", 18)


def requests(settings: Settings) -> list[str]:
    """Return the lines of a trace in Azure's format."""
    random, at, lines = Random(settings.seed), 0.0, list[str]()
    end = settings.period * settings.periods
    while True:
        wave = 1 + 0.92 * math.sin(2 * math.pi * at / settings.period) if settings.load == "wave" else 1.0
        at += random.expovariate(settings.request_rate * wave)
        if at >= end:
            return lines
        is_long = settings.load == "wave" or int(at / settings.period) % 2 == 0
        prompt, answer = (round(tokens * random.uniform(0.7, 1.3)) for tokens in (LONG if is_long else SHORT))
        time = datetime.fromtimestamp(at, UTC).isoformat(sep=" ").removesuffix("+00:00")
        lines.append(f"{time},{prompt},{answer}")


def summary(settings: Settings, name: str, samples: Sequence[Sample], **more: Any) -> dict[str, Any]:
    """Return a row of the report, with the attainment in each period."""
    targets = load_targets(settings.slo, "")
    parts = [[one for one in samples if int(one.scheduled / settings.period) == n] for n in range(settings.periods)]
    total = rate(targets, samples)
    by_period = [round(rate(targets, part).attainment, 3) for part in parts if part]
    row = {"fleet": name, "attainment": total.attainment, "by_period": by_period, "targets_s": total.values} | more
    print(json.dumps(row), flush=True)
    return row


def config_of(settings: Settings, trace: Path) -> AutoscaleConfig:
    return AutoscaleConfig(
        slo=settings.slo,
        dataset_name="azure",
        dataset_path=str(trace),
        num_prompts=1_000_000,
        window=settings.window,
        horizon=settings.horizon,
        cooldown=settings.cooldown,
        interval=settings.interval,
    )


def simulated(settings: Settings, trace: Path, loads: list[Request]) -> list[dict[str, Any]]:
    """Play the load on every fixed split, and with the controller."""
    config, profile = config_of(settings, trace), slowed(PROFILE, SLOWDOWN)
    controller, empty = make_controller(config, profile, can_start=False)
    model, half = instance_model(config, profile), settings.instances // 2
    rows = []
    for prefill in range(1, settings.instances):
        fleet = Fleet(prefill, settings.instances - prefill)
        simulation = Simulation(replace(empty, prefill=prefill, decode=fleet.decode), model)
        rows.append(summary(settings, str(fleet), simulation.play(loads).samples, way="simulated"))
    simulation = Simulation(replace(empty, prefill=half, decode=settings.instances - half), model)
    one = rehearse(simulation, controller, loads, settings.interval, settings.window)
    changes = [(round(at), str(change)) for at, change in one.changes]
    rows.append(summary(settings, "controller", one.samples, way="simulated", changes=changes))
    return rows


def live(settings: Settings, trace: Path, fleet: Fleet, folder: Path, *, is_steered: bool) -> dict[str, Any]:
    """Play the load on a real deployment of paced instances, with the controller or without."""
    profile, controller = folder / "profile.json", None
    slowed(PROFILE, SLOWDOWN).save(profile)
    with deployed(fleet, PROFILE, str(profile)) as deployment:
        if is_steered:
            decisions, names = folder / "decisions.jsonl", ("slo", "window", "horizon", "cooldown", "interval")
            flags = [word for name in names for word in (f"--{name}", str(getattr(settings, name)))]
            flags += ["--router", deployment.url, "--profile", str(profile), "--decisions", str(decisions), "--apply"]
            controller = subprocess.Popen([sys.executable, "-m", "pdserve", "autoscale", *flags])
        command = [sys.executable, "-m", "pdserve", "bench", "serve", "--base-url", deployment.url, "--ignore-eos"]
        command += ["--dataset-name", "azure", "--dataset-path", str(trace), "--num-prompts", "1000000"]
        command += ["--save-result", "--save-detailed", "--result-dir", str(folder), "--result-filename", "live.json"]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        if controller is not None:
            controller.terminate()
            controller.wait()
    figures = json.loads((folder / "live.json").read_text())
    changes = list[tuple[int, str]]()
    if is_steered:
        rows = [json.loads(line) for line in (folder / "decisions.jsonl").read_text().splitlines()]
        changes = [(round(row["at"] - rows[0]["at"]), row["change"]) for row in rows if row["made"]]
    name = "controller" if is_steered else str(fleet)
    return summary(settings, name, samples_of(figures), way="live", changes=changes, lag=figures["client_bottleneck"])


def samples_of(figures: dict[str, Any]) -> list[Sample]:
    """Return the samples of a detailed result of `pdserve bench serve`."""
    samples = []
    for index, start in enumerate(figures["start_times"]):
        times = [start + figures["ttfts"][index]]
        for gap in figures["itls"][index]:
            times.append(times[-1] + gap)
        failed = figures["errors"][index]
        samples.append(Sample(index, start, sent=start, ended=times[-1], token_times=times, status=200, error=failed))
    return samples


def run(settings: Settings) -> None:
    """Compare the controller with fixed fleets."""
    settings = settings.sized({"instances": 3, "period": 20.0, "periods": 2, "request_rate": 1.0, "window": 30.0})
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        trace = folder / "trace.csv"
        trace.write_text("\n".join(["TIMESTAMP,ContextTokens,GeneratedTokens", *requests(settings), ""]))
        config = config_of(settings, trace)
        loads = draw_requests(config, mean_rate(config))
        rows = simulated(settings, trace, loads)
        if settings.live:
            best = max(rows[:-1], key=lambda row: row["attainment"])
            prefill = int(best["fleet"].partition("P")[0])
            half = settings.instances // 2
            fleets = [
                (Fleet(prefill, settings.instances - prefill), False),
                (Fleet(half, settings.instances - half), True),
            ]
            rows += [live(settings, trace, fleet, folder, is_steered=steered) for fleet, steered in fleets]
    table = Table("way", "fleet", "attainment", "by period", "changes")
    for row in rows:
        parts = " ".join(f"{share:.0%}" for share in row["by_period"])
        table.add_row(row["way"], row["fleet"], f"{row['attainment']:.1%}", parts, str(len(row.get("changes", []))))
    report.show(table)
    print(report.write("autoscale", settings, {"requests": len(loads), "rows": rows}))


if __name__ == "__main__":
    report.main(command_from_config(Settings, run))
