"""`pdserve bench tune` against an exhaustive search: `python benchmarks/tune.py [--simulated]`.

Sixty fleets and settings of two instances, paced by the profile of `forecast.py` at twice its speed, which takes some twenty
minutes. First each is measured once; then the tuner gets a fifth of that time, once for each of `--profiles`, factors of the
times of prompts in the profile from which it starts: 1 is right. The best of each are measured again, in turns, with other
requests. With `--simulated`, fleets are simulated in place of measured, and take as long as the run and a start would.
"""

import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median

import forecast
import report

from pdserve.cli.flags import command_from_config
from pdserve.config import flag
from pdserve.tools.bench.metrics import summarize
from pdserve.tools.bench.requests import Sample
from pdserve.tools.bench.slo import METRICS
from pdserve.tools.load_config import BenchTuneConfig
from pdserve.tools.planner.slo_file import load_targets
from pdserve.tools.planner.targets import compare
from pdserve.tools.simulator.fleet import PERCENTILES, Fleet, simulate
from pdserve.tools.tuner.candidates import REPETITIONS, grid
from pdserve.tools.tuner.command import TRIED, Tuning, fleet_config, measure_fleet

PROFILE = forecast.PROFILE.scaled(0.5, 0.5)
START_S = 5.0  # of a simulated fleet
SHARE = 0.2  # of the exhaustive search's time, for the tuner


@dataclass(frozen=True, kw_only=True)
class Settings(report.Settings):
    requests: int = flag("of a run", 60, least=9)
    rate: float = flag("requests per second", 6.0, above=0)
    slo: str = flag("targets", "ttft.p90=250ms,itl.p99=90ms")
    seed: int = flag("of the requests", 0)
    batched_tokens: str = flag("values of --max-num-batched-tokens", "64,128,256,512,1024")
    itl_targets: str = flag("values of --itl-target-ms", "off,20,30")
    max_num_seqs: str = flag("values of --max-num-seqs", "4,48")
    profiles: str = flag("factors of the times of prompts in the profile", "1,0.5")
    simulated: bool = flag("simulate fleets in place of measuring them", False)
    rounds: int = flag("in which the winners are measured again", 5, least=1)


QUICK = {"requests": 9, "batched_tokens": "256", "itl_targets": "off", "rounds": 1, "simulated": True}


def tune_config(settings: Settings, folder: Path) -> BenchTuneConfig:
    """Return the settings of the tuner, with a budget to be replaced."""
    PROFILE.save(folder / "paced.json")
    return BenchTuneConfig(
        model="demo",
        paced=str(folder / "paced.json"),
        num_blocks=PROFILE.engine.num_blocks,
        threads=1,
        request_rate=settings.rate,
        seed=settings.seed,
        num_prompts=settings.requests,
        random_input_len=800,
        random_output_len=32,
        random_range_ratio=0.6,
        slo=settings.slo,
        try_itl_target_ms=settings.itl_targets,
        try_max_num_batched_tokens=settings.batched_tokens,
        try_max_num_seqs=settings.max_num_seqs,
    )


@dataclass
class Fleets:
    """Runs fleets, real or simulated ones, and knows the time.

    Attributes:
        virtual_s: of simulated runs.
    """

    config: BenchTuneConfig
    simulated: bool
    virtual_s: float = 0.0

    def now(self) -> float:
        """Return the seconds since some time; with simulated fleets, only those of their runs count."""
        return self.virtual_s if self.simulated else time.monotonic()

    def measure(self, fleet: Fleet, repetition: int) -> Sequence[Sample]:
        if not self.simulated:
            return measure_fleet(self.config, fleet, repetition)
        seed = self.config.seed + repetition
        config = replace(fleet_config(self.config), seed=seed, profile=self.config.paced)
        forecast = simulate(config, PROFILE, {}, fleet, self.config.request_rate)
        self.virtual_s += START_S + forecast.figures["duration"]
        return forecast.samples

    def ratio(self, fleet: Fleet, repetition: int) -> float:
        samples = self.measure(fleet, repetition)
        targets = load_targets(self.config.slo, "")
        return compare(targets, summarize(samples, {}, METRICS, PERCENTILES, []), samples)[2]


def run(settings: Settings) -> None:
    """Search exhaustively, tune, and compare the winners."""
    settings = settings.sized(QUICK)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        config = tune_config(settings, folder)
        fleets = Fleets(config, settings.simulated)
        settings_tried = {one: getattr(config, f"try_{one}") for one in TRIED}
        candidates = grid(config.instances, config.try_itl_target_ms, settings_tried)
        began = fleets.now()
        exhaustive = {fleet: fleets.ratio(fleet, 0) for fleet in candidates}
        seconds = {"exhaustive": fleets.now() - began}
        winners = {"exhaustive": min(exhaustive, key=lambda fleet: exhaustive[fleet])}
        reports = {}
        for factor in settings.profiles.split(","):
            prefill = tuple((tokens, float(factor) * one) for tokens, one in PROFILE.step.prefill)
            file = folder / f"{factor}.json"
            replace(PROFILE, step=replace(PROFILE.step, prefill=prefill)).save(file)
            own = replace(config, profile=str(file), state=f"{file}l", budget=SHARE * seconds["exhaustive"])
            began = fleets.now()
            tuning = Tuning(own, load_targets(config.slo, ""), candidates, fleets.now)
            tuning.search(fleets.measure)
            kind = f"tune, prompts x {factor}"
            seconds[kind], reports[kind], winners[kind] = fleets.now() - began, tuning.report(), tuning.best
        again: dict[str, list[float]] = {str(fleet): [] for fleet in winners.values()}
        for number in range(REPETITIONS, REPETITIONS + settings.rounds):
            for fleet in dict.fromkeys(winners.values()):
                again[str(fleet)].append(fleets.ratio(fleet, number))
    medians = {fleet: median(ratios) for fleet, ratios in again.items()}
    reference = medians[str(winners["exhaustive"])]
    rows = [
        {
            "search": kind,
            "fleet": str(fleet),
            "seconds": round(seconds[kind]),
            "worst_ratio": round(medians[str(fleet)], 3),
        }
        | {"beside_exhaustive": round(medians[str(fleet)] / reference, 3)}
        for kind, fleet in winners.items()
    ]
    report.show(rows)
    measured = {str(fleet): one for fleet, one in exhaustive.items()}
    content = {"rows": rows, "again": again, "exhaustive": measured, "reports": reports}
    print(report.write("tune", settings, content))


if __name__ == "__main__":
    report.main(command_from_config(Settings, run))
