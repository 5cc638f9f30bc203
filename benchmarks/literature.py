"""Forecasts beside what DistServe and Splitwise have published: `python benchmarks/literature.py --timings FOLDER`.

The folder holds their timings: `distserve_profile_a100_80g.json` and `splitwise_perf_model.csv`.
A term is a setting or a cost in which the forecast differs from what was published; each is changed alone.
"""

import csv
import json
import random
import tempfile
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any

import numpy as np
import report
from rich.table import Table

from pdserve.bench.requests import Request, Sample
from pdserve.cli.flags import command_from_config
from pdserve.config import InstanceConfig, RouterConfig, flag
from pdserve.profile.imports import import_file
from pdserve.profile.profile import Overheads, Profile, TransferModel
from pdserve.simulator.model import InstanceModel
from pdserve.simulator.simulation import MODEL, Deployment, Simulation

TRACES = Path(__file__).parent / "traces"
FREE = TransferModel(1e-5, 1e12, 1e-5, 1e12, 1e12)  # routers exclude instances that report impossible speeds
SLO_RUNS, SLO_SIMULATOR = (250, 100), (200, 100)  # ms of TTFT and TPOT
TARGET = 0.9
GPUS = (A100, H100) = ("a100-80gb", "h100-80gb")
# LLMServe/DistServe@0bba6065, simdistserve/benchmarks/figure11-abalation/figure: by requests/s per GPU, by scale of the SLO.
FIGURE_RATES, FIGURE_SCALES, FIGURE_RATE = (1, 2, 3, 4, 5), (1.2, 1.0, 0.8, 0.6, 0.4), 2
FIGURE_11A = {
    "dist": (0.983, 0.897, 0.813, 0.653, 0.490),
    "vllm": (0.62, 0.49, 0.39, 0.32, 0.19),
    "vllm++": (0.955, 0.895, 0.81, 0.625, 0.38),
}
FIGURE_11B = {"dist": (0.95, 0.897, 0.847, 0.757, 0.51)}
# The same, simdistserve/estimators/profile_data/profiler-a100-80g.vllm.json.
VLLM = {
    "1": {
        "decoding_large_small_bs_threshold": 95,
        "prefill": [23.62736227, 0.15054561, 8.65348374e-06],
        "decoding_smallbs": [19.562534173678987, 0.0004941120550644942, 0.05060571771697455],
        "decoding_largebs": [16.8386301447433, 0.00043897725301957885, 0.14000261546561776],
    },
    "2": {
        "decoding_large_small_bs_threshold": 95,
        "prefill": [19.600575891293346, 0.06467523343305222, 6.037181652318591e-06],
        "decoding_smallbs": [20.450486868259052, 0.0001870012118669617, 0.072631560578732484],
        "decoding_largebs": [14.956474555927338, 0.00038090428876808935, 0.09315896525582677],
    },
}


@dataclass(frozen=True, kw_only=True)
class Settings(report.Settings):
    timings: str = flag("folder of the published timings", "../shared/traces")
    systems: str = flag(
        "of distserve, coding and conversation; the last two are Splitwise's", "distserve,coding,conversation"
    )
    requests: int = flag("of DistServe's runs, at most", 300, least=1)
    terms: str = flag("of those in the table, separated by semicolons; empty: all", "")
    seconds: int = flag("of Splitwise's traces", 60, least=1)


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
        """Simulate."""
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

    def with_step(self, **changes: Any) -> "Setup":
        """The same with other costs of steps."""
        return replace(self, profile=replace(self.profile, step=replace(self.profile.step, **changes)))

    def scaled(self, phase: str, factor: float) -> "Setup":
        """The same with longer or shorter steps of a phase."""
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


def crossing(xs: Sequence[float], ys: Sequence[float], target: float = TARGET) -> float:
    """Return where a falling curve meets the target, linear between its points as in DistServe's plots; or its nearer end."""
    for (x0, y0), (x1, y1) in pairwise(zip(xs, ys, strict=True)):
        if (y0 < target) != (y1 < target):
            return x0 + (target - y0) * (x1 - x0) / (y1 - y0)
    return xs[0] if ys[0] < target else xs[-1]


def attainment(times: Sequence[tuple[float, float]], slo: tuple[int, int], scale: float = 1.0) -> float:
    """Return the share of (TTFT, TPOT) in ms within the SLO."""
    return sum(ttft <= slo[0] * scale and tpot <= slo[1] * scale for ttft, tpot in times) / len(times)


def times_of(samples: Sequence[Sample]) -> list[tuple[float, float]]:
    return [(one.ttft * 1e3, one.tpot * 1e3) for one in samples]


def row(system: str, figure: str, pair: Iterable[float], unit: str = "") -> dict[str, Any]:
    published, forecast = pair
    return {"system": system, "figure": figure, "published": published, "forecast": forecast, "unit": unit}


class DistServe:
    """OPT-13B on A100: prefill on two GPUs and decode on one, beside vLLM on one or two."""

    def __init__(self, folder: Path, most: int) -> None:
        self.most = most  # requests of a run
        self.data = json.loads((TRACES / "distserve-opt-13b.json").read_text())
        one, two = (_opt(folder / "distserve_profile_a100_80g.json", gpus) for gpus in (1, 2))
        # Each instance computes one phase only, so one model holds the prefill steps of two GPUs and the decode steps of one.
        step = replace(one.step, prefill=two.step.prefill, pair_s=two.step.pair_s, prompt_s=two.step.prompt_s)
        self.split = Setup(replace(one, step=step), 66_144, prefill=1, decode=1, gpus=3)
        with tempfile.TemporaryDirectory() as name:
            file = Path(name) / "vllm.json"
            file.write_text(json.dumps({"facebook/opt-13b": VLLM}))
            pools = {"vllm": (1, 66_144), "vllm++": (2, 163_008)}
            self.vllm = {
                key: Setup(_opt(file, gpus), pool, both=1, gpus=gpus, batch=pool) for key, (gpus, pool) in pools.items()
            }
        self.colocated = Setup(one, 66_144, both=1, batch=66_144)
        large = replace(one.engine, block_bytes=16 * 2 * 40 * 5120 * 2)  # K and V, 40 layers, 5,120 in 16 bits
        network = TransferModel(1e-3, 25e9 / 8, 1e-3, 25e9 / 8, 25e9 / 8)
        self.changes: dict[str, Change] = {
            "pdserve": lambda setup: setup,
            "all waiting prompts in one batch": lambda setup: replace(setup, batch=163_008),
            "no time around steps": lambda setup: _with(setup, overheads=Overheads(0, 0, 0, 0, 0)),
            "KV over 25 Gbit/s": lambda setup: _with(setup, engine=large, transfers={"link": network}),
            "four times the pool": lambda setup: replace(setup, pool=4 * setup.pool),
            "decode steps x 1.25": lambda setup: setup.scaled("decode", 1.25),
            "prefill steps / 1.1": lambda setup: setup.scaled("prefill", 1 / 1.1),
            "prefill steps / 1.1, four times the pool": lambda setup: replace(
                setup.scaled("prefill", 1 / 1.1), pool=4 * setup.pool
            ),
        }
        self.vllm_changes: dict[str, Change] = {
            "pdserve": lambda setup: setup,
            "prefill steps / 1.16": lambda setup: setup.scaled("prefill", 1 / 1.16),
            "prefill steps / 1.16, in which nothing decodes": lambda setup: setup.scaled("prefill", 1 / 1.16).with_step(
                mixed=(0.0, 0.0, 1.0)
            ),
        }

    def requests(self, rate: float, count: int = 300) -> list[Request]:
        """Return the requests of the runs; their times are those at 3 requests/s, scaled."""
        rows = self.data["requests"][: min(count, self.most)]
        return requests_of([(prompt, output) for prompt, output, _ in rows], [at * 3 / rate for *_, at in rows])

    def runs(self, setup: Setup) -> list[dict[str, Any]]:
        """Compare with the runs of the real system."""
        rows, rates = list[dict[str, Any]](), [float(rate) for rate in self.data["distserve"]]
        measured = {float(rate): pairs for rate, pairs in self.data["distserve"].items()}
        forecast = {rate: times_of(setup.play(self.requests(rate))) for rate in rates}
        for rate in rates:
            for name, column in (("TTFT", 0), ("TPOT", 1)):
                for p in (50, 90):
                    values = [
                        float(np.percentile([one[column] for one in both[rate]], p)) for both in (measured, forecast)
                    ]
                    rows.append(row("DistServe, runs", f"{name} p{p} at {rate:g} requests/s", values, "ms"))
        for slo in (SLO_RUNS, SLO_SIMULATOR):
            title = f"TTFT {slo[0]} ms, TPOT {slo[1]} ms"
            for rate in rates:
                shares = [attainment(both[rate], slo) for both in (measured, forecast)]
                rows.append(row("DistServe, runs", f"{title}: attainment at {rate:g} requests/s", shares))
            limits = [crossing(rates, [attainment(both[rate], slo) for rate in rates]) for both in (measured, forecast)]
            rows.append(row("DistServe, runs", f"{title}: rate per GPU at 90 %", [one / setup.gpus for one in limits]))
            scales = [float(one) for one in np.arange(1.6, 0.4, -0.05)]
            for rate in rates:
                limits = [
                    crossing(scales, [attainment(both[rate], slo, s) for s in scales]) for both in (measured, forecast)
                ]
                rows.append(row("DistServe, runs", f"{title}: scale at 90 %, {rate:g} requests/s", limits))
        return rows

    def simulator(self, setup: Setup) -> list[dict[str, Any]]:
        """Compare with DistServe's own simulator."""
        name, slo = "DistServe's simulator", SLO_SIMULATOR
        times = {rate: times_of(setup.play(self.requests(rate * setup.gpus))) for rate in FIGURE_RATES}
        shares = [attainment(times[rate], slo) for rate in FIGURE_RATES]
        published = FIGURE_11A["dist"]
        rows = [
            row(name, f"attainment at {rate} requests/s per GPU", pair)
            for rate, *pair in zip(FIGURE_RATES, published, shares, strict=True)
        ]
        limits = [crossing(FIGURE_RATES, curve) for curve in (published, shares)]
        rows.append(row(name, "rate per GPU at 90 %", limits))
        by_scale = [attainment(times[FIGURE_RATE], slo, scale) for scale in FIGURE_SCALES]
        limits = [crossing(FIGURE_SCALES, curve) for curve in (FIGURE_11B["dist"], by_scale)]
        rows.append(row(name, "scale at 90 %, 2 requests/s per GPU", limits))
        return rows

    def baselines(self, change: Change) -> list[dict[str, Any]]:
        """Compare colocated instances with vLLM, as it ran and as DistServe's simulator has it."""
        rows, ran = list[dict[str, Any]](), self.data["vllm"]["1"]
        for name, setup in (("its own", change(self.vllm["vllm"])), ("DistServe's", change(self.colocated))):
            times = times_of(setup.play(self.requests(1, 100)))
            for slo in (SLO_RUNS, SLO_SIMULATOR):
                shares = [attainment(one, slo) for one in (ran, times)]
                rows.append(row(f"vLLM, run, {name} timings", f"attainment at 1 request/s, TTFT {slo[0]} ms", shares))
        for name, original in self.vllm.items():
            setup = change(original)
            plays = [times_of(setup.play(self.requests(rate * setup.gpus, 100 * setup.gpus))) for rate in FIGURE_RATES]
            curve = [attainment(one, SLO_SIMULATOR) for one in plays]
            for rate, *pair in zip(FIGURE_RATES, FIGURE_11A[name], curve, strict=True):
                rows.append(row(f"{name}, DistServe's simulator", f"attainment at {rate} requests/s per GPU", pair))
        return rows


class Splitwise:
    """BLOOM-176B on machines of eight GPUs, A100 or H100, at a fraction of the published numbers of machines and rates."""

    def __init__(self, folder: Path, seconds: int) -> None:
        self.seconds = seconds
        file = folder / "splitwise_perf_model.csv"
        self.curves = {
            (gpu, column): _curve(file, gpu, column) for gpu in GPUS for column in ("prompt_time", "token_time")
        }
        self.setups = {gpu: self._setup(file, gpu) for gpu in GPUS}
        self.changes: dict[str, Callable[[str, Setup], Setup]] = {
            "pdserve": lambda gpu, setup: setup,
            "four times the pool": lambda gpu, setup: replace(setup, pool=4 * setup.pool),
            "its decode and mixed steps": lambda gpu, setup: setup.with_step(
                decode=self._decode(gpu), context_s=0.0, mixed=(0.0, 0.0, 1.1)
            ),
        }

    def _setup(self, file: Path, gpu: str) -> Setup:
        profile = import_file("splitwise", str(file), f"bloom-176b,{gpu},8")
        # 8 × 80 GB less 329 GB of weights; K and V of 70 layers with 14,336 values in 16 bits.
        pool = int((640e9 - 329e9) / (2 * 70 * 14336 * 2))
        return Setup(replace(profile, transfers={"link": FREE}), pool, sequences=512, block=128)

    def _decode(self, gpu: str) -> tuple[tuple[int, float], ...]:
        """Return decode times as its simulator has them: looked up by batch × prompt tokens, asked for with the batch."""
        xs, ys = self.curves[gpu, "token_time"]
        return tuple((count, _extrapolated(count, xs, ys)) for count in (1, 128, 256, 512))

    def requests(self, trace: str, rate: float) -> list[Request]:
        """Return requests whose lengths are drawn independently from the trace's, as its simulator's traces are."""
        with (TRACES / f"azure-{trace}-2023.csv").open(newline="") as file:
            prompts, outputs = zip(
                *((int(one[0]), int(one[1])) for one in csv.reader(file) if one[0].isdigit()), strict=True
            )
        draw, count = random.Random(0), round(rate * self.seconds)
        times = list(accumulate(draw.expovariate(rate) for _ in range(count)))
        return requests_of([(draw.choice(prompts), draw.choice(outputs)) for _ in range(count)], times)

    def worst(self, setup: Setup, trace: str, rate: float) -> float:
        """Return the largest ratio of a slowdown to its SLO."""
        requests = self.requests(trace, rate)
        slowdowns: dict[str, list[float]] = {"ttft": [], "tbt": [], "e2e": []}
        for sample in setup.play(requests):
            one = requests[sample.index]
            ttft, tbt = (
                _extrapolated(one.input_tokens, *self.curves[A100, f"{kind}_time"]) for kind in ("prompt", "token")
            )
            slowdowns["ttft"].append(sample.ttft / ttft)
            slowdowns["e2e"].append(sample.latency / (ttft + tbt * (one.output_tokens - 1)))
            if one.output_tokens > 1:
                slowdowns["tbt"].append(sample.tpot / tbt)
        limits = {"ttft": (2, 3, 6), "tbt": (1.25, 1.5, 5), "e2e": (1.25, 1.5, 5)}
        return max(
            float(np.percentile(values, p)) / limit
            for kind, values in slowdowns.items()
            for p, limit in zip((50, 90, 99), limits[kind], strict=True)
        )

    def highest_rate(self, setup: Setup, start: float) -> float:
        """Return the highest rate that meets all SLOs with the conversation trace, to 10 %."""
        met, missed, rate = 0.0, 0.0, start
        while not met or not missed or missed / met > 1.1:
            if self.worst(setup, "conv", rate) <= 1:
                met = rate
            else:
                missed = rate
            rate = (met * missed) ** 0.5 if met and missed else rate * 1.4 if met else rate / 1.4
        return met

    def cheapest(self, setup: Setup, rate: float) -> tuple[int, int]:
        """Return the smallest numbers of prompt and token machines that meet all SLOs with the coding trace."""
        for size in range(8, 14):
            for token in (1, 2):
                if self.worst(replace(setup, prefill=size - token, decode=token), "code", rate) <= 1:
                    return size - token, token
        return 0, 0

    def coding(self, term: str) -> list[dict[str, Any]]:
        """Compare the cheapest design for the coding trace, at a third of its size."""
        h100, name = self.changes[term](H100, self.setups[H100]), "Splitwise-HH, coding, 70 requests/s"
        prompt, token = self.cheapest(h100, 70 / 3)
        return [
            row(name, "a third of the machines for prompts", (9, prompt)),
            row(name, "a third of the machines for tokens", (1, token)),
        ]

    def conversation(self, term: str) -> list[dict[str, Any]]:
        """Compare designs of the same power, at a fifth of their size."""
        a100 = self.changes[term](A100, self.setups[A100])
        mixed = self.highest_rate(replace(a100, both=14), 8.0)
        split = self.highest_rate(replace(a100, prefill=9, decode=5), 11.0)
        rates = {"70 A100": 5 * mixed, "AA (45P, 25T)": 5 * split}
        return [row("Splitwise, conversation", "AA (45P, 25T) / 70 A100", (2.15, split / mixed)) | {"rates": rates}]


def _curve(file: Path, gpu: str, column: str) -> tuple[list[int], list[float]]:
    """Return median seconds by batch × prompt tokens, as splitwise-sim@37808801, performance_model.py, has them."""
    by_tokens: dict[int, list[float]] = {}
    with file.open(newline="") as rows:
        for one in csv.DictReader(rows):
            if (one["model"], one["hardware"], one["tensor_parallel"]) == ("bloom-176b", gpu, "8"):
                tokens = int(one["prompt_size"]) * int(one["batch_size"])
                by_tokens.setdefault(tokens, []).append(float(one[column]) / 1e3)
    xs = sorted(by_tokens)
    return xs, [float(np.median(by_tokens[x])) for x in xs]


def _extrapolated(x: float, xs: Sequence[int], ys: Sequence[float]) -> float:
    if x >= xs[0]:
        return float(np.interp(x, xs, ys))
    return ys[0] + (x - xs[0]) * (ys[1] - ys[0]) / (xs[1] - xs[0])


def _opt(file: Path, gpus: int) -> Profile:
    profile = import_file("distserve", str(file), f"facebook/opt-13b,{gpus}")
    return replace(profile, transfers={"link": FREE})


def _with(setup: Setup, **changes: Any) -> Setup:
    return replace(setup, profile=replace(setup.profile, **changes))


def run(settings: Settings) -> None:
    """Compare forecasts with what was published."""
    settings = settings.sized({"systems": "distserve", "terms": "pdserve", "requests": 6})
    folder, rows = Path(settings.timings), list[dict[str, Any]]()
    wanted = [term.strip() for term in settings.terms.split(";")] if settings.terms else None

    def is_wanted(term: str) -> bool:
        return wanted is None or term in wanted

    if "distserve" in settings.systems:
        system = DistServe(folder, settings.requests)
        for term, change in filter(lambda pair: is_wanted(pair[0]), system.changes.items()):
            setup = change(system.split)
            rows += [one | {"term": term} for one in [*system.runs(setup), *system.simulator(setup)]]
        for term, change in filter(lambda pair: is_wanted(pair[0]), system.vllm_changes.items()):
            rows += [one | {"term": term} for one in system.baselines(change)]
    for trace in ("coding", "conversation"):
        if trace in settings.systems:
            splitwise = Splitwise(folder, settings.seconds)
            for term in filter(is_wanted, splitwise.changes):
                rows += [one | {"term": term} for one in getattr(splitwise, trace)(term)]
    report.show(as_table(rows))
    print(report.write("literature", replace(settings, timings=folder.name), {"rows": rows}))


def as_table(rows: Sequence[dict[str, Any]]) -> Table:
    table = Table("system", "figure", "term", "published", "forecast", "ratio")
    for one in rows:
        ratio = one["forecast"] / one["published"] if one["published"] else float("nan")
        cells = [f"{one[key]:.3g} {one['unit']}" for key in ("published", "forecast")]
        table.add_row(one["system"], one["figure"], one["term"], *cells, f"{ratio:.2f}")
    return table


if __name__ == "__main__":
    report.main(command_from_config(Settings, run))
