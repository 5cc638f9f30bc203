"""The controller against fixed fleets under a load that shifts: `python benchmarks/autoscale.py [--load …] [--live]`.

Simulated, all on the same requests:

- every fixed split of --instances,
- the plan that knows the load: in each period the split that is best for this period's requests alone,
- the static peak: the split that is best for the period with the most tokens, always,
- the controller of `pdserve autoscale`. It begins with half of the instances for each role, and with --smallest below
  --instances it starts and ends instances, too.

With --live, the best fixed split and the controller (`pdserve autoscale --apply`) play the same requests with real routers,
connectors and instances, which are paced, or compute if there is a --profile. --html draws the attainment over time.
"""

import json
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import report
from forecast import deployed
from rich.table import Table
from shifting_load import LOADS, PROFILE, data_set, parse_lengths, shifting

from pdserve.autoscaler.change import Change
from pdserve.autoscaler.command import make_controller
from pdserve.autoscaler.forecast import make, rate
from pdserve.autoscaler.rehearsal import Decide, rehearse
from pdserve.bench.page import chart, load_plotly, page
from pdserve.bench.requests import Request, Sample
from pdserve.cli.flags import command_from_config
from pdserve.config import flag
from pdserve.lines.json_lines import json_lines
from pdserve.load_config import AutoscaleConfig
from pdserve.planner.slo_file import load_targets
from pdserve.planner.targets import Target
from pdserve.profile.profile import Profile
from pdserve.simulator.fleet import Fleet, draw_requests, instance_model, mean_rate
from pdserve.simulator.simulation import Simulation

BIN_S = 20.0  # of the attainment over time
COLOURS = {"controller": "#2c7bb6"}
OTHER = "#d7191c"


@dataclass(frozen=True, kw_only=True)
class Settings(report.Settings):
    live: bool = flag("also with real processes", False)
    load: str = flag(
        "shift: of lengths, every --period; wave: of the rate, within it; or a trace", "shift", choices=LOADS
    )
    instances: int = flag("of fixed fleets, and the budget of controllers", 8, least=2)
    smallest: int = flag("instances with which the controller begins; 0: as many as --instances", 0, least=0)
    splits: str = flag("numbers of prefill instances of the fixed fleets, such as 3,4,5; empty: all", "")
    request_rate: float = flag("requests per second in the mean, of shift and wave", 4.5, above=0)
    period: float = flag("seconds", 240.0, above=0)
    periods: int = flag("number of them, of shift and wave", 4, least=1)
    traces: str = flag("folder of the traces", "")
    speed: float = flag("factor of a trace's rate", 1.0, above=0)
    requests: int = flag("of a trace, which are played", 2000, least=1)
    first: int = flag("of these, by its place in the trace", 0, least=0)
    alone: bool = flag("only the controller, without what it is compared with", False)
    slo: str = flag("targets", "ttft.p90=2s,itl.p99=1600ms")
    window: float = flag("--window of the controller", 60.0, above=0)
    horizon: float = flag("--horizon of the controller", 40.0, above=0)
    cooldown: float = flag("--cooldown of the controllers", 15.0, least=0)
    interval: float = flag("--interval of the controllers", 10.0, above=0)
    lengths: str = flag("tokens of prompts/answers before and after a shift, such as 250/10,25/50", "250/10,25/50")
    profile: str = flag("of the demo model with one thread: live instances compute; empty: they are paced", "")
    seed: int = flag("of the load", 18)
    html: str = flag("file with a plot of the attainment over time; empty: none", "")


class Exam:
    """One load and what plays it."""

    def __init__(self, settings: Settings, folder: Path) -> None:
        self._settings = settings
        self.profile = profile = Profile.load(settings.profile) if settings.profile else PROFILE
        lengths = parse_lengths(settings.lengths)
        lines = shifting(
            settings.load, settings.request_rate, settings.period, settings.periods, lengths, settings.seed
        )
        part = slice(settings.first, settings.first + settings.requests)
        source = data_set(settings.load, folder, Path(settings.traces), settings.speed, part, lines)
        names = ("slo", "window", "horizon", "cooldown", "interval")
        most = settings.instances if self._is_elastic else 0
        self.config = AutoscaleConfig(**source, **{name: getattr(settings, name) for name in names}, max_instances=most)
        self.loads = draw_requests(self.config, mean_rate(self.config))
        self.controller, self._empty = make_controller(self.config, profile, can_start=self._is_elastic)
        self.targets = load_targets(settings.slo, "")
        self._model = instance_model(self.config, profile)

    @property
    def _is_elastic(self) -> bool:
        return 0 < self._settings.smallest < self._settings.instances

    @property
    def splits(self) -> list[int]:
        named = [int(one) for one in self._settings.splits.split(",") if one]
        return named or list(range(1, self._settings.instances))

    def simulation(self, prefill: int, size: int = 0) -> Simulation:
        size = size or self._settings.instances
        return Simulation(replace(self._empty, prefill=prefill, decode=size - prefill), self._model)

    def fixed(self, prefill: int) -> dict[str, Any]:
        """Play the load on a split."""
        outcome, size = self.simulation(prefill).play(self.loads), self._settings.instances
        return self.row(str(Fleet(prefill, size - prefill)), outcome.samples, seconds=size * outcome.seconds)

    @cached_property
    def best_splits(self) -> list[int]:
        """Numbers of prefill instances that are best for the requests of each period alone.

        Between splits that are equally good, the one that is nearest to the period's before is taken.
        """
        best = list[int]()
        for part in self._periods:
            ratings = {one: rate(self.targets, self.simulation(one).play(part).samples) for one in self.splits}
            before = best[-1] if best else self._settings.instances // 2
            best.append(max(self.splits, key=lambda one: (ratings[one].attainment, -abs(one - before))))
        return best

    @property
    def split_at_peak(self) -> int:
        """That of the period with the most tokens."""
        tokens = [sum(one.input_tokens + one.output_tokens for one in part) for part in self._periods]
        return self.best_splits[tokens.index(max(tokens))]

    def known(self) -> dict[str, Any]:
        """Play the load on the fleet that, in each period, has the split that is best for this period's requests alone."""
        best = self.best_splits
        simulation = self.simulation(best[0])
        for number, (before, after) in enumerate(pairwise(best), 1):
            if before != after:
                roles = ("decode", "prefill") if after > before else ("prefill", "decode")
                change = Change(*roles, count=abs(after - before))
                simulation.clock.at(number * self._settings.period, partial(make, simulation, change))
        outcome = simulation.play(self.loads)
        seconds = self._settings.instances * outcome.seconds
        return self.row("plan that knows the load", outcome.samples, seconds=seconds, prefill_by_period=best)

    @cached_property
    def _periods(self) -> list[list[Request]]:
        """The requests of each period, with their times in it."""
        period, parts = self._settings.period, list[list[Request]]()
        last = int(max(one.at or 0.0 for one in self.loads) / period)
        for number in range(last + 1):
            part = [one for one in self.loads if int((one.at or 0.0) / period) == number]
            moved = [replace(one, at=(one.at or 0.0) - number * period) for one in part]
            parts.append([replace(one, index=index, after=None, continues=False) for index, one in enumerate(moved)])
        return parts

    def steered(self, name: str, decide: Callable[[Simulation], Decide]) -> dict[str, Any]:
        """Play the load with a controller."""
        size = self._settings.smallest or self._settings.instances
        simulation = self.simulation(size // 2, size)
        interval, window = self._settings.interval, self._settings.window
        run = rehearse(
            simulation,
            decide(simulation),
            self.loads,
            interval,
            window,
            lambda one: print(round(one.at), one, flush=True),
        )
        changes = [(round(at), str(change)) for at, change in run.changes]
        made = [(one, one.change) for one in run.decisions if one.change is not None and one.change.is_flip]
        cooldown = self._settings.cooldown
        undone = num_undone(
            [(one.at, change.before, change.after, one.horizon + cooldown) for one, change in made],
        )
        more: dict[str, Any] = {"seconds": run.instance_seconds, "changes": changes, "undone": undone}
        return self.row(name, run.samples, **more)

    def row(self, name: str, samples: Sequence[Sample], *, way: str = "simulated", **more: Any) -> dict[str, Any]:
        """Return a row of the report, with the attainment in each period and over time."""
        total = rate(self.targets, samples)
        row = {"fleet": name, "way": way, "attainment": total.attainment, "targets_s": total.values} | more
        row["by_period"] = [share for _, share in over_time(self.targets, samples, self._settings.period)]
        print(json.dumps(row), flush=True)
        return row | {"over_time": over_time(self.targets, samples, BIN_S)}


def over_time(targets: Sequence[Target], samples: Sequence[Sample], width: float) -> list[tuple[float, float]]:
    """Return the attainment of the requests of each `width` seconds, with the end of these."""
    parts: dict[int, list[Sample]] = {}
    for one in samples:
        parts.setdefault(int(one.scheduled / width), []).append(one)
    return [((n + 1) * width, round(rate(targets, parts[n]).attainment, 3)) for n in sorted(parts)]


def num_undone(flips: Sequence[tuple[float, str, str, float]]) -> int:
    """Return how many flips were undone within the time that their forecast covered.

    Args:
        flips: time, role before, role after, and seconds that the forecast and the cooldown covered.
    """
    pairs = ((a, b) for number, a in enumerate(flips) for b in flips[number + 1 :])
    return sum(b[0] < a[0] + a[3] and (b[1], b[2]) == (a[2], a[1]) for a, b in pairs)


def live(exam: Exam, settings: Settings, fleet: Fleet, folder: Path, *, is_steered: bool) -> dict[str, Any]:
    """Play the load on a real deployment, with the controller or without."""
    profile, controller = folder / "profile.json", None
    exam.profile.save(profile)
    decisions = folder / "decisions.jsonl"
    with deployed(fleet, exam.profile, "" if settings.profile else str(profile)) as deployment:
        if is_steered:
            names = ("slo", "window", "horizon", "cooldown", "interval")
            flags = [word for name in names for word in (f"--{name}", str(getattr(settings, name)))]
            flags += ["--router", deployment.url, "--profile", str(profile), "--decisions", str(decisions), "--apply"]
            controller = subprocess.Popen([sys.executable, "-m", "pdserve", "autoscale", *flags])
        command = [sys.executable, "-m", "pdserve", "bench", "serve", "--base-url", deployment.url, "--ignore-eos"]
        for name in ("dataset_name", "dataset_path", "num_prompts", "trace_speed", "trace_length_scale"):
            command += [f"--{name.replace('_', '-')}", str(getattr(exam.config, name))]
        command += ["--save-result", "--save-detailed", "--result-dir", str(folder), "--result-filename", "live.json"]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        if controller is not None:
            controller.terminate()
            controller.wait()
    figures = json.loads((folder / "live.json").read_text())
    more = {"lag": figures["client_bottleneck"], "seconds": fleet.size * figures["duration"]}
    if is_steered:
        rows = [json.loads(line) for _, line in json_lines(decisions.read_text())]
        made = [(row, row["change"].split()) for row in rows if row["made"]]
        more["changes"] = [(round(row["at"] - rows[0]["at"]), row["change"]) for row, _ in made]
        more["undone"] = num_undone(
            [(row["at"], before, after, row["horizon"] + settings.cooldown) for row, (_, before, _, after) in made]
        )
    return exam.row("controller" if is_steered else str(fleet), samples_of(figures), way="live", **more)


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


def simulated(exam: Exam, *, alone: bool) -> list[dict[str, Any]]:
    """Play the load in all ways that are simulated, or with the controller only."""
    steered = exam.steered("controller", lambda _: exam.controller.decide)
    if alone:
        return [steered]
    fixed = {prefill: exam.fixed(prefill) for prefill in exam.splits}
    peak = fixed[exam.split_at_peak] | {"fleet": "static peak"}
    return [steered, exam.known(), peak, *fixed.values()]


def run(settings: Settings) -> None:
    """Compare the controller with fixed fleets."""
    settings = settings.sized({"instances": 3, "period": 20.0, "periods": 2, "request_rate": 1.0, "window": 30.0})
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        exam = Exam(settings, folder)
        rows = simulated(exam, alone=settings.alone)
        if settings.live:
            fixed = [] if settings.alone else [(int(best_fixed(rows)["fleet"].partition("P")[0]), False)]
            for first, is_steered in (*fixed, (settings.instances // 2, True)):
                fleet = Fleet(first, settings.instances - first)
                rows.append(live(exam, settings, fleet, folder, is_steered=is_steered))
    report.show(as_table(rows))
    if settings.html:
        Path(settings.html).write_text(plot(settings, rows))
    names: dict[str, Any] = {name: Path(getattr(settings, name)).name for name in ("traces", "html", "profile")}
    settings = replace(settings, **names)
    print(report.write("autoscale", settings, {"requests": len(exam.loads), "rows": rows}))


def best_fixed(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return the row of the fixed split with the most good requests."""
    return max((row for row in rows if "P+" in row["fleet"]), key=lambda row: row["attainment"])


def as_table(rows: Sequence[dict[str, Any]]) -> Table:
    table = Table("way", "fleet", "attainment", "by period", "instance-seconds", "changes", "undone")
    for row in rows:
        parts = " ".join(f"{share:.0%}" for share in row["by_period"])
        counts = [str(len(row.get("changes", []))), str(row.get("undone", ""))]
        table.add_row(row["way"], row["fleet"], f"{row['attainment']:.1%}", parts, f"{row['seconds']:.0f}", *counts)
    return table


def plot(settings: Settings, rows: Sequence[dict[str, Any]]) -> str:
    """Return a page with the attainment over time of the controller and the best fixed split; live ones, if there are."""
    way = "live" if settings.live else "simulated"
    steered = next(row for row in rows if (row["way"], row["fleet"]) == (way, "controller"))
    fixed = best_fixed([row for row in rows if row["way"] == way])
    lines = [
        {
            "x": [at for at, _ in row["over_time"]],
            "y": [share for _, share in row["over_time"]],
            "name": f"{row['fleet']}, {row['attainment']:.0%} in all",
            "line": {"color": COLOURS.get(row["fleet"], OTHER)},
        }
        for row in (fixed, steered)
    ]
    title = f"Share of good requests over seconds: {settings.instances} instances, lengths shift every {settings.period:g} s"
    one = chart(title, lines, tickformat=".0%", range=[0, 1.05])
    return page("pdserve autoscale", "", [], [one], load_plotly())


if __name__ == "__main__":
    report.main(command_from_config(Settings, run))
