"""Do forecasts for this machine hold, with real compute? `python benchmarks/forecast_here.py`, half an hour when it is idle.

As a new tuner would: `pdserve profile`, then for each fleet and mix a forecast with this machine's cores, at half of the rate
that saturates the fleet by forecast, and a measurement with the client of `pdserve bench serve`. Seeds of the loads are in
this file, and were before the first measurement. Random prompts are answered with loops, of which most drafts would be right,
so nothing speculates. TTFT and ITL should be within 15 % at p50 and within 30 % at p99. Where a fleet needs more cores than
are free, it is forecast with shared ones, and the row has both numbers.
"""

import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import report
from forecast import PROFILE

from pdserve.cli.flags import command_from_config
from pdserve.config import flag
from pdserve.profile.profile import Profile
from pdserve.tools import machine
from pdserve.tools.bench.metrics import summarize
from pdserve.tools.bench.slo import METRICS
from pdserve.tools.load_config import BenchTuneConfig
from pdserve.tools.simulator.cores import cores_needed
from pdserve.tools.simulator.fleet import PERCENTILES, parse_fleet, simulate
from pdserve.tools.tuner.command import fleet_config, measure_fleet

MIXES: dict[str, dict[str, Any]] = {
    "long prompts": {"seed": 4901, "random_input_len": 900, "random_output_len": 20},
    "balanced": {"seed": 4902, "random_input_len": 300, "random_output_len": 60},
    "long answers": {"seed": 4903, "random_input_len": 100, "random_output_len": 120},
}
MOST = {50: 0.15, 99: 0.30}  # error by percentile
SATURATING = 1000.0  # requests per second
LOAD = 0.5


@dataclass(frozen=True, kw_only=True)
class Settings(report.Settings):
    model: str = flag("model directory, hub id or `demo`", "demo")
    fleets: str = flag("such as 1P+1D,2B", "1P+1D,2B,2P+1D")
    mixes: str = flag("of them, separated by commas", ",".join(MIXES))
    requests: int = flag("of a run", 200, least=9)
    profile: str = flag("profile of this machine; empty: it is measured first, in two minutes", "")


QUICK = {"fleets": "2B", "mixes": "balanced", "requests": 9}


def measure_profile(settings: Settings, path: Path) -> Profile:
    """Run `pdserve profile` as its documentation says; with --quick, take that of paced instances."""
    if settings.quick:
        PROFILE.save(path)
        return PROFILE
    flags = ["--model", settings.model, "--threads", "1", "--output", str(path)]
    subprocess.run([sys.executable, "-m", "pdserve", "profile", *flags], check=True)
    return Profile.load(str(path))


def rows(settings: Settings, profile: Profile, path: str) -> Iterator[dict[str, Any]]:
    """Yield forecast and measurement of each fleet and mix."""
    cores, threads = machine.num_cores(), max(1, profile.machine.threads)
    for name in settings.mixes.split(","):
        config = BenchTuneConfig(
            model=settings.model,
            profile=path,
            threads=threads,
            num_prompts=settings.requests,
            random_range_ratio=0.5,
            speculate="off",
            slo="ttft=1s",
            **MIXES[name],
        )
        for fleet in map(parse_fleet, settings.fleets.split(",")):
            busy = machine.busy_threads()
            forecasts = replace(fleet_config(config), busy_threads=busy)
            most = simulate(forecasts, profile, {}, fleet, SATURATING).figures["request_throughput"]
            rate = report.rounded(LOAD * most, 2)
            forecast = simulate(forecasts, profile, {}, fleet, rate).figures
            samples = measure_fleet(replace(config, request_rate=rate), fleet, 0)
            measured = summarize(samples, {}, METRICS, PERCENTILES, [])
            needed = cores_needed(fleet.size, threads, 1)
            yield {
                "fleet": fleet.shape,
                "mix": name,
                "requests/s": rate,
                "cores": {"needed": needed, "there": cores, "busy": round(busy, 1)},
                "figures": {
                    f"{metric} p{p}": (forecast[f"p{p}_{metric}_ms"], measured[f"p{p}_{metric}_ms"])
                    for metric in ("ttft", "itl")
                    for p in MOST
                },
                "tokens_together_fraction": measured["tokens_together_fraction"],
            }


def run(settings: Settings) -> None:
    """Profile, forecast, measure, and say which forecasts hold."""
    settings = settings.sized(QUICK)
    with tempfile.TemporaryDirectory() as folder:
        path = settings.profile or str(Path(folder) / "profile.json")
        profile = Profile.load(path) if settings.profile else measure_profile(settings, Path(path))
        found = list(rows(settings, profile, path))
    held = total = 0
    shown = []
    for row in found:
        cells = {}
        for name, (forecast, measured) in row["figures"].items():
            error = forecast / measured - 1 if measured else float("nan")
            holds = abs(error) <= MOST[int(name.rpartition("p")[2])]
            held, total = held + holds, total + 1
            cells[name] = f"{forecast:.3g} / {measured:.3g} ({error:+.0%}){'' if holds else ' !'}"
        cores = "{needed} of {there}, {busy} busy".format(**row["cores"])
        shown.append({name: row[name] for name in ("mix", "fleet", "requests/s")} | cells | {"cores needed": cores})
    report.show(shown, "forecast / measured, ms")
    print(f"{held} of {total} figures are within {MOST[50]:.0%} at p50 and {MOST[99]:.0%} at p99.")
    print(report.write("forecast-here", replace(settings, profile=""), {"held": held, "of": total, "rows": found}))


if __name__ == "__main__":
    report.main(command_from_config(Settings, run))
