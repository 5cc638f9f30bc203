"""`pdserve bench tune` against an exhaustive search: `python benchmarks/tune.py`.

Sixty fleets and settings of two instances, paced by the profile of `forecast.py`. First each is measured once; then the tuner
gets a fifth of that time, once with the right profile, and once with one whose prompts take `--wrong` of their time. The
best of each are measured again, in turns.
"""

import tempfile
import time
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median

import report
from forecast import PROFILE

from pdserve.cli.flags import command_from_config
from pdserve.config import flag
from pdserve.tools.bench.metrics import summarize
from pdserve.tools.bench.slo import METRICS
from pdserve.tools.load_config import BenchTuneConfig
from pdserve.tools.planner.slo_file import load_targets
from pdserve.tools.planner.targets import compare
from pdserve.tools.simulator.fleet import PERCENTILES, Fleet
from pdserve.tools.tuner.candidates import grid
from pdserve.tools.tuner.command import TRIED, Tuning, measure_fleet

SHARE = 0.2  # of the exhaustive search's time, for the tuner


@dataclass(frozen=True, kw_only=True)
class Settings(report.Settings):
    requests: int = flag("of a run", 60, least=9)
    rate: float = flag("requests per second", 3.0, above=0)
    slo: str = flag("targets", "ttft.p90=500ms,itl.p99=180ms")
    batched_tokens: str = flag("values of --max-num-batched-tokens", "64,128,256,512,1024")
    itl_targets: str = flag("values of --itl-target-ms", "off,40,60")
    max_num_seqs: str = flag("values of --max-num-seqs", "4,48")
    wrong: float = flag("factor of the wrong profile's prefill times", 0.5, above=0)
    rounds: int = flag("in which the winners are measured again", 5, least=1)


QUICK = {"requests": 9, "batched_tokens": "256", "itl_targets": "off", "rounds": 1}


def tune_config(settings: Settings, folder: Path) -> BenchTuneConfig:
    """Return the settings of the tuner, with a budget to be replaced."""
    PROFILE.save(folder / "paced.json")
    return BenchTuneConfig(
        model="demo",
        paced=str(folder / "paced.json"),
        num_blocks=PROFILE.engine.num_blocks,
        threads=1,
        request_rate=settings.rate,
        num_prompts=settings.requests,
        random_input_len=800,
        random_output_len=32,
        random_range_ratio=0.6,
        slo=settings.slo,
        try_itl_target_ms=settings.itl_targets,
        try_max_num_batched_tokens=settings.batched_tokens,
        try_max_num_seqs=settings.max_num_seqs,
    )


def run(settings: Settings) -> None:
    """Search exhaustively, tune, and compare the winners."""
    settings = settings.sized(QUICK)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        config = tune_config(settings, folder)
        targets = load_targets(config.slo, "")
        fleets = grid(config.instances, config.try_itl_target_ms, {one: getattr(config, f"try_{one}") for one in TRIED})

        def ratio(fleet: Fleet) -> float:
            samples = measure_fleet(config, fleet)
            return compare(targets, summarize(samples, {}, METRICS, PERCENTILES, []), samples)[2]

        began = time.monotonic()
        exhaustive = {fleet: ratio(fleet) for fleet in fleets}
        seconds = time.monotonic() - began
        winners = {"exhaustive": min(exhaustive, key=lambda fleet: exhaustive[fleet])}
        tunings = {}
        for kind, factor in (("right profile", 1.0), ("wrong profile", settings.wrong)):
            prefill = tuple((tokens, factor * one) for tokens, one in PROFILE.step.prefill)
            replace(PROFILE, step=replace(PROFILE.step, prefill=prefill)).save(folder / f"{factor}.json")
            own = replace(
                config, profile=str(folder / f"{factor}.json"), state=str(folder / kind), budget=SHARE * seconds
            )
            began = time.monotonic()
            tuning = Tuning(own, targets, fleets, time.monotonic)
            tuning.search(lambda fleet: measure_fleet(config, fleet))
            tunings[kind] = {"seconds": time.monotonic() - began, "report": tuning.report()}
            winners[kind] = tuning.best
        again: dict[str, list[float]] = {str(fleet): [] for fleet in winners.values()}
        for _ in range(settings.rounds):
            for fleet in dict.fromkeys(winners.values()):
                again[str(fleet)].append(ratio(fleet))
    reference = median(again[str(winners["exhaustive"])])
    rows = [
        {"search": kind, "fleet": str(fleet), "seconds": tunings.get(kind, {"seconds": seconds})["seconds"]}
        | {"worst_ratio": median(again[str(fleet)]), "beside_exhaustive": median(again[str(fleet)]) / reference}
        for kind, fleet in winners.items()
    ]
    report.show([{key: f"{one:.3g}" if isinstance(one, float) else one for key, one in row.items()} for row in rows])
    measured = {str(fleet): one for fleet, one in exhaustive.items()}
    content = {"rows": rows, "again": again, "exhaustive": measured, "tunings": tunings}
    print(report.write("tune", settings, content))


if __name__ == "__main__":
    report.main(command_from_config(Settings, run))
