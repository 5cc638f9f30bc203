"""The command `pdserve bench tune`."""

import json
import shlex
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import fields
from functools import partial
from pathlib import Path
from typing import Any

from pdserve.config import UpConfig
from pdserve.errors import SetupError
from pdserve.lines.untrusted import read_json
from pdserve.tools import machine
from pdserve.tools.bench.command import prepare, progress, requests_of, warm_up
from pdserve.tools.bench.metrics import summarize
from pdserve.tools.bench.report import check_writable
from pdserve.tools.bench.requests import Sample, counted
from pdserve.tools.bench.slo import METRICS
from pdserve.tools.bench.workers import play
from pdserve.tools.load_config import BenchServeConfig, BenchTuneConfig, FleetConfig, LoadConfig
from pdserve.tools.planner.search import judge
from pdserve.tools.planner.slo_file import check_groups, load_targets
from pdserve.tools.planner.targets import FAILED, Target, compare, thin_sentences
from pdserve.tools.simulator.fleet import (
    PERCENTILES,
    Fleet,
    check_fits,
    draw_requests,
    load_profile,
    mean_rate,
    simulate_all,
)
from pdserve.tools.tuner.candidates import Candidates, grid

Measure = Callable[[Fleet, int], Sequence[Sample]]  # of a repetition, from 0; empty if Ctrl-C ended the run
NOT_PASSED_ON = ("port", "slo", "prefill", "decode", "both")  # of UpConfig's fields: each run has its own
TRIED = ("max_num_seqs", "max_num_batched_tokens", "block_size")
NO_START = 3 * FAILED  # ratio of a fleet that cannot start
FRUITLESS = 2  # first fleets, after which the search ends if none of them can start
SHOWN = 10  # of the fleets that were not measured


def run(config: BenchTuneConfig, measure: Measure | None = None, now: Callable[[], float] = time.monotonic) -> bool:
    """Measure fleets until the budget is spent, and print them. Returns whether the best meets the SLO.

    Args:
        measure: plays the load against a fleet, by default against one that it starts.

    Raises:
        SetupError: a setting is wrong, the first fleets cannot start, or the file of `--state` is of another load.
    """
    targets = load_targets(config.slo, config.slo_file)
    fleets = grid(config.instances, config.try_itl_target_ms, {name: getattr(config, f"try_{name}") for name in TRIED})
    check_writable(config.state)
    tuning = Tuning(config, targets, fleets, now)
    tuning.search(measure or partial(measure_fleet, config))
    if not tuning.has_measured:
        raise SetupError("interrupted before a fleet was measured")
    print("\n".join(tuning.report()))
    return tuning.meets


class Tuning:
    """The runs of one or several calls, and what they spent.

    Args:
        fleets: to choose from.
    """

    def __init__(
        self, config: BenchTuneConfig, targets: Sequence[Target], fleets: Sequence[Fleet], now: Callable[[], float]
    ) -> None:
        self._config, self._targets, self._now = config, targets, now
        self._state = Path(config.state)
        self._spent, self._longest = 0.0, 0.0
        self._texts: dict[Fleet, str] = {}
        self._thin: list[str] = []  # of the newest run: what its percentiles rest on
        rows = list(self._earlier_rows())
        forecasts = {str(fleet): ratio for row in rows for fleet, ratio in row.get("forecasts", {}).items()}
        if not all(str(one) in forecasts for one in fleets):
            began = now()
            forecasts = {str(one): ratio for one, ratio in self._forecast(fleets)}
            self._append({"forecasts": forecasts, "seconds": now() - began})
        self._candidates = Candidates({one: forecasts[str(one)] for one in fleets})
        by_name = {str(one): one for one in fleets}
        for row in rows:
            self._spent += row.get("seconds", 0.0)
            if fleet := by_name.get(row.get("fleet", "")):
                self._add(fleet, row)

    @property
    def best(self) -> Fleet:
        """The measured fleet with the most margin."""
        return self._candidates.ranked()[0]

    @property
    def has_measured(self) -> bool:
        return bool(self._candidates.measured)

    @property
    def meets(self) -> bool:
        return self._candidates.ratio(self.best) <= 1

    def search(self, measure: Measure) -> None:
        """Measure what is most promising, as long as another run fits into the budget; at least one fleet.

        A fleet that cannot start counts as one that fails. It is not tried again, so that others have their turn.

        Raises:
            SetupError: the first fleets cannot start.
        """
        budget = self._config.budget
        while fleet := self._candidates.next(self._spent / budget):
            if self._candidates.measured and self._spent + self._longest > budget:
                return
            began = self._now()
            try:
                if not (samples := measure(fleet, self._candidates.num_runs(fleet))):
                    return
                ratio, text = self._rate(samples)
            except SetupError as error:
                ratio, text = NO_START, f"cannot start: {error}"
            row = {"fleet": str(fleet), "ratio": ratio, "text": text, "seconds": self._now() - began}
            self._append(row)
            self._add(fleet, row)
            print(f"{self._spent:5.0f} s: {fleet}: {text}", file=sys.stderr, flush=True)
            few = min(FRUITLESS, len(self._candidates.forecasts))
            if len(self._candidates.measured) >= few and self._candidates.ratio(self.best) == NO_START:
                raise SetupError(f"none of the first {few} fleets can start; the newest: {text}")

    def _rate(self, samples: Sequence[Sample]) -> tuple[float, str]:
        """Return the ratio of the worst figure to its target, and all figures beside their targets."""
        figures = summarize(samples, {}, METRICS, PERCENTILES, [])
        values, _, ratio = compare(self._targets, figures, samples)
        if failed := figures["failed"]:
            ratio = max(ratio, FAILED * (1 + failed / len(samples)))
        self._thin = thin_sentences({one: one.count(samples) for one in self._targets})
        return ratio, ", ".join(target.beside(seconds) for target, seconds in values.items())

    def report(self) -> list[str]:
        """Return what was tried, and the best fleet with the command that starts it."""
        candidates = self._candidates
        ranked = candidates.ranked()
        best, total = self.best, len(candidates.forecasts)
        verdict = "meets the SLO" if self.meets else "does not meet the SLO, but is the nearest"
        shape = f"--prefill {best.prefill} --decode {best.decode} --both {best.both}"
        tried = {one.partition(" ")[0] for one in best.flags}
        common = [one for one in up_flags(self._config) if one.partition(" ")[0] not in tried]
        lines = [
            f"Of {len(ranked)} measured of {total} fleets, {best} {verdict}: {self._texts[best]}.",
            f"pdserve up {' '.join([shape, *common, *best.flags])}",
            "",
            f"{'fleet':70} {'runs':>4} {'worst ÷ target':>14} {'forecast':>8}",
        ]
        for one in ranked:
            ratio, forecast = candidates.ratio(one), candidates.forecasts[one]
            lines.append(f"{one!s:70} {len(candidates.measured[one]):4} {ratio:14.2f} {forecast:8.2f}")
        left = sorted((one for one in candidates.forecasts if one not in candidates.measured), key=candidates.expected)
        if left:
            lines += [
                "",
                f"Not measured, with the ratio that is expected from forecasts and runs ({len(left)} in all):",
            ]
            lines += [f"{one!s:70} {candidates.expected(one):19.2f}" for one in left[:SHOWN]]
        spent = f"{self._spent:.0f} of {self._config.budget:.0f} s were spent; a larger --budget goes on."
        return [*lines, "", *self._thin, spent]

    def _forecast(self, fleets: Sequence[Fleet]) -> Iterator[tuple[Fleet, float]]:
        config = fleet_config(self._config)
        profile, rate = load_profile(config), mean_rate(config)
        check_fits(config, profile)
        check_groups(self._targets, draw_requests(config, rate))
        for forecast in simulate_all(config, profile, {}, [(fleet, rate) for fleet in fleets]):
            yield forecast.fleet, judge(self._targets, forecast).ratio

    def _add(self, fleet: Fleet, row: dict[str, Any]) -> None:
        self._candidates.add(fleet, row["ratio"])
        self._texts[fleet] = row["text"]
        self._longest = max(self._longest, row["seconds"])

    def _append(self, row: dict[str, Any]) -> None:
        self._spent += row["seconds"]
        try:
            with self._state.open("a") as file:
                file.write(json.dumps(row) + "\n")
        except OSError as error:
            raise SetupError(f"--state {self._state} cannot be written: {error.strerror}") from None

    def _earlier_rows(self) -> Iterator[dict[str, Any]]:
        """Yield what earlier calls appended, whose load and settings must have been the same; begin the file if there is
        none."""
        load = {one.name: str(getattr(self._config, one.name)) for one in fields(LoadConfig)}
        head: dict[str, Any] = {"load": load | {"targets": [f"{one} {one.seconds:g}" for one in self._targets]}}
        head |= {"settings": own_settings(self._config), "seconds": 0.0}
        if not self._state.exists():
            self._append(head)
            return
        try:
            lines = self._state.read_text().split("\n")
            rows = [read_json(line) for line in lines[:-1]]  # the last is empty, or was interrupted
        except OSError as error:
            raise SetupError(f"--state {self._state} cannot be read: {error.strerror}") from None
        except ValueError:
            rows = [{}]
        if not rows or not isinstance(rows[0], dict) or {"settings": {}} | rows[0] != head:
            raise SetupError(
                f"--state {self._state} is of another load or SLO, or of other settings: name another file, or remove it"
            )
        if lines[-1]:
            self._state.write_text("\n".join([*lines[:-1], ""]))
        yield from rows[1:]


def own_settings(config: BenchTuneConfig) -> dict[str, str]:
    """Return the settings that all fleets of a search have, such as the model, as far as they are not the defaults."""
    values = {one: getattr(config, one.name) for one in fields(UpConfig) if one.repr and one.name not in NOT_PASSED_ON}
    return {one.name: str(value) for one, value in values.items() if value != one.default}


def up_flags(config: BenchTuneConfig) -> list[str]:
    """Return these settings as flags of `pdserve up`, each quoted for a shell. Secrets are left out."""
    flags = []
    for name, value in own_settings(config).items():
        flag = f"--{name.replace('_', '-')}"
        is_switch = isinstance(getattr(config, name), bool)
        flags.append(flag if is_switch else f"{flag} {shlex.quote(value)}")
    return flags


def fleet_config(config: BenchTuneConfig) -> FleetConfig:
    """Return the settings of forecasts, for a fleet on this machine; paced instances have cores of their own."""
    known = {one.name for one in fields(FleetConfig)} - {"connector", "model", "tensor_parallel_size", "speculate"}
    settings = {one.name: getattr(config, one.name) for one in fields(config) if one.name in known}
    settings["profile"] = config.profile or config.paced or FleetConfig.profile
    return FleetConfig(**settings, cores=None if config.paced else machine.num_cores())


def measure_fleet(config: BenchTuneConfig, fleet: Fleet, repetition: int) -> Sequence[Sample]:
    """Start a fleet, play the load against it, and return the requests that count; none if Ctrl-C ended the run.

    Each repetition has other requests and arrivals, the same for all fleets.
    """
    from pdserve.cli.deployment import free_port
    from pdserve.offline.llm import Fleet as Started

    settings = {one.name: getattr(config, one.name) for one in fields(UpConfig) if one.name not in NOT_PASSED_ON}
    settings |= {"itl_target_ms": fleet.itl_target_ms} | dict(fleet.settings)
    settings |= {"prefill": fleet.prefill, "decode": fleet.decode, "both": fleet.both, "port": free_port()}
    started = Started(UpConfig(**settings))
    try:
        load = {one.name: getattr(config, one.name) for one in fields(LoadConfig)}
        benchmark = prepare(BenchServeConfig(**load, base_url=started.url, api_key=started.api_key, ignore_eos=True))
        warm_up(benchmark)
        requests = requests_of(benchmark, config.request_rate, config.seed + repetition)
        with progress(str(fleet), len(requests)) as show:
            played = play(requests, benchmark.target, 1, show)
        return [] if played.stopped else counted(played.samples, config.warmup_requests)
    finally:
        started.close()
