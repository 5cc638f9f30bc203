"""DistServe's published runs and curves beside forecasts: OPT-13B on A100."""

import json
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
from simulated_setup import FREE, TRACES, Change, Setup, requests_of, row

from pdserve.bench.requests import Request, Sample
from pdserve.profile.imports import import_file
from pdserve.profile.profile import Overheads, Profile, TransferModel

SLO_RUNS, SLO_SIMULATOR = (250, 100), (200, 100)  # ms of TTFT and TPOT
TARGET = 0.9
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
            "no time around steps": lambda setup: setup.with_profile(overheads=Overheads(0, 0, 0, 0, 0)),
            "KV over 25 Gbit/s": lambda setup: setup.with_profile(engine=large, transfers={"link": network}),
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


def _opt(file: Path, gpus: int) -> Profile:
    profile = import_file("distserve", str(file), f"facebook/opt-13b,{gpus}")
    return replace(profile, transfers={"link": FREE})
