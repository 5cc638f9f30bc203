"""A run as text in the lines of `vllm bench serve`, as JSON, and as CSV with a row per request."""

import csv
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pdserve.bench.requests import Sample
from pdserve.bench.slo import is_good
from pdserve.errors import SetupError

HEADINGS = {
    "ttft": ("TTFT", "Time to First Token"),
    "tpot": ("TPOT", "Time per Output Token (excl. 1st token)"),
    "itl": ("ITL", "Inter-token Latency"),
    "e2el": ("E2EL", "End-to-end Latency"),
}


def as_text(figures: dict[str, Any], metrics: Sequence[str], percentiles: Sequence[float]) -> str:
    """Return the report of a run."""
    lines = [f"{' Serving Benchmark Result ':=^50}"]

    def line(label: str, value: Any) -> None:
        lines.append(f"{label:<40} {value:<10.2f}" if isinstance(value, float) else f"{label:<40} {value:<10}")

    line("Successful requests:", figures["completed"])
    line("Failed requests:", figures["failed"])
    line("  of these, rejected (429):", figures["rejected"])
    if figures.get("interrupted"):
        line("Interrupted, not counted:", figures["interrupted"])
    if figures.get("max_concurrency") is not None:
        line("Maximum request concurrency:", figures["max_concurrency"])
    if isinstance(figures.get("request_rate"), float):
        line("Request rate configured (RPS):", figures["request_rate"])
    line("Benchmark duration (s):", figures["duration"])
    line("Total input tokens:", figures["total_input_tokens"])
    line("Total generated tokens:", figures["total_output_tokens"])
    line("Request throughput (req/s):", figures["request_throughput"])
    if figures["request_goodput"] is not None:
        line("Request goodput (req/s):", figures["request_goodput"])
        line("Good requests (%):", 100 * figures["good_request_fraction"])
    line("Output token throughput (tok/s):", figures["output_throughput"])
    line("Peak output token throughput (tok/s):", figures["max_output_tokens_per_s"])
    line("Peak concurrent requests:", figures["max_concurrent_requests"])
    line("Total token throughput (tok/s):", figures["total_token_throughput"])
    for metric in metrics:
        name, heading = HEADINGS[metric]
        lines.append(f"{heading:-^50}")
        line(f"Mean {name} (ms):", figures[f"mean_{metric}_ms"])
        line(f"Median {name} (ms):", figures[f"median_{metric}_ms"])
        for p in percentiles:
            line(f"P{p:g} {name} (ms):", figures[f"p{p:g}_{metric}_ms"])
    if parts := figures.get("ttft_breakdown"):
        lines.append(f"{' TTFT by part, and the hand-over after it ':-^50}")
        for name in ("outside_router", "queue", "prefill", "hand_over"):
            if f"mean_{name}_ms" in parts:
                line(f"Mean {name.replace('_', ' ')} (ms):", parts[f"mean_{name}_ms"])
    lines.append(f"{' The client itself ':-^50}")
    line("P50 lag (ms):", figures["p50_client_lag_ms"])
    line("P99 lag (ms):", figures["p99_client_lag_ms"])
    line("Busiest process (% of a core):", 100 * figures["client_cpu_share"])
    lines.append("=" * 50)
    lines += [f"WARNING: {text}" for text in (*figures.get("warnings", []), figures["client_bottleneck"]) if text]
    return "\n".join(lines)


def details(samples: Sequence[Sample]) -> dict[str, Any]:
    """Return the lists by request of vLLM's `--save-detailed`."""
    return {
        "input_lens": [sample.input_tokens for sample in samples],
        "output_lens": [sample.output_tokens for sample in samples],
        "ttfts": [sample.ttft for sample in samples],
        "itls": [sample.itls for sample in samples],
        "latencies": [sample.latency for sample in samples],
        "start_times": [sample.sent for sample in samples],
        "queue_times": [sample.queued for sample in samples],
        "lags": [sample.lag for sample in samples],
        "generated_texts": [sample.text for sample in samples],
        "errors": [sample.error for sample in samples],
    }


def write_csv(file: str, samples: Sequence[Sample], objectives: dict[str, float]) -> None:
    """Write one row per request; times in seconds."""
    names = ("index", "scheduled", "lag", "queued", "sent", "ttft", "tpot", "latency", "input_tokens", "output_tokens")
    try:
        with open(file, "w", newline="") as out:
            rows = csv.writer(out)
            rows.writerow([*names, "max_itl", "status", "good", "error"])
            for one in samples:
                values = [getattr(one, name) for name in names]
                good = is_good(one, objectives) if objectives else ""
                rows.writerow([*values, max(one.itls, default=0.0), one.status, good, one.error])
    except OSError as error:
        raise SetupError(f"{file} cannot be written: {error}") from None


def write_file(file: Path, text: str) -> None:
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    except OSError as error:
        raise SetupError(f"{file} cannot be written: {error}") from None


def write_json(file: Path, content: dict[str, Any]) -> None:
    write_file(file, json.dumps(content) + "\n")
