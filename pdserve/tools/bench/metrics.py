"""The figures of a run, under the names of `vllm bench serve`, and those that it lacks."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from pdserve.tools.bench.requests import Sample
from pdserve.tools.bench.slo import METRICS, is_good

LAG_MS = 10.0  # p99 of the client's lag from which its own figures are in doubt
LAG_OF_TTFT = 0.1  # or this share of the median TTFT
CPU_SHARE = 0.8  # of a core, from which a client process is late in reading the clock
IDLE_SHARE = 0.4  # of a core, below which a late client has waited for one
TOGETHER_S = 1e-4  # between two tokens that came together


def summarize(
    samples: Sequence[Sample],
    objectives: dict[str, float],
    metrics: Sequence[str],
    percentiles: Sequence[float],
    cpu_shares: Sequence[float],
) -> dict[str, Any]:
    """Return the figures of one run; times in milliseconds where the name says so, else in seconds."""
    done = [sample for sample in samples if sample.ok]
    duration = max((sample.ended for sample in samples), default=0.0) - min((s.scheduled for s in samples), default=0.0)
    per_second = 1 / duration if duration > 0 else 0.0
    inputs, outputs = sum(one.input_tokens for one in done), sum(one.output_tokens for one in done)
    good = sum(is_good(sample, objectives) for sample in samples) if objectives else None
    figures: dict[str, Any] = {
        "duration": duration,
        "completed": len(done),
        "failed": len(samples) - len(done),
        "rejected": sum(sample.rejected for sample in samples),
        "total_input_tokens": inputs,
        "total_output_tokens": outputs,
        "request_throughput": len(done) * per_second,
        "request_goodput": None if good is None else good * per_second,
        "good_request_fraction": None if good is None or not samples else good / len(samples),
        "output_throughput": outputs * per_second,
        "total_token_throughput": (inputs + outputs) * per_second,
        "max_output_tokens_per_s": _peak_tokens(done),
        "max_concurrent_requests": _peak_requests(done),
    }
    values = {name: [value for sample in done for value in sample.values(name)] for name in METRICS}
    for name in metrics:
        figures |= _distribution(f"{name}_ms", values[name], percentiles)
    gaps = np.array(values["itl"] or [1.0])
    figures["tokens_together_fraction"] = float(np.mean(gaps < TOGETHER_S))
    normalized = [one.latency / one.output_tokens for one in done if one.output_tokens]
    figures |= _distribution("normalized_latency_ms", normalized, percentiles)
    figures |= _distribution("client_queue_time_ms", [sample.queued for sample in done], percentiles)
    figures |= _distribution("client_lag_ms", [sample.lag for sample in samples], (50, 99, 100))
    figures["client_cpu_share"] = max(cpu_shares, default=0.0)
    figures["client_bottleneck"] = _bottleneck(figures, float(np.median(values["ttft"] or 0)) * 1e3)
    return figures


def _distribution(name: str, values: Sequence[float], percentiles: Sequence[float]) -> dict[str, float]:
    array = np.array(values or [0.0]) * 1e3
    figures = {f"mean_{name}": array.mean(), f"median_{name}": np.median(array), f"std_{name}": array.std()}
    figures |= {f"p{p:g}_{name}": np.percentile(array, p) for p in percentiles}
    return {key: float(value) for key, value in figures.items()}


def _bottleneck(figures: dict[str, Any], ttft_ms: float) -> str:
    """Say in what the client was too slow to be trusted; empty if it was not."""
    lag, share = figures["p99_client_lag_ms"], figures["client_cpu_share"]
    reasons = []
    if lag > LAG_MS or (ttft_ms and lag > LAG_OF_TTFT * ttft_ms):
        reasons.append(f"it sent 1 % of the requests {lag:.1f} ms late or more")
    if share > CPU_SHARE:
        reasons.append(f"a process of it used {share:.0%} of a core")
    if reasons and share < IDLE_SHARE:
        return f"the machine was busy: the client {reasons[0].removeprefix('it ')}, at {share:.0%} of a core; free some cores"
    advice = "try more --client-processes or a machine with free cores"
    return f"the client was the bottleneck: {' and '.join(reasons)}; {advice}" if reasons else ""


def _peak_tokens(done: Sequence[Sample]) -> float:
    seconds = [int(at) for sample in done for at in sample.token_times]
    return float(np.bincount(np.array(seconds) - min(seconds)).max()) if seconds else 0.0


def _peak_requests(done: Sequence[Sample]) -> int:
    changes = sorted([(sample.sent, 1) for sample in done] + [(sample.ended, -1) for sample in done])
    return int(np.cumsum([change for _, change in changes]).max()) if changes else 0
