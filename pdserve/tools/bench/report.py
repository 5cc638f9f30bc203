"""A run as text in the lines of `vllm bench serve`, as JSON, and as CSV with a row per request."""

import csv
import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from pdserve.errors import SetupError, reason
from pdserve.tools.bench.requests import Sample
from pdserve.tools.bench.slo import is_good

SHOWN = 0.01  # share of tokens that came together, from which the report says so
DRAFTS = {
    "Acceptance rate (%):": "acceptance_rate",
    "Acceptance length:": "acceptance_length",
    "Drafts:": "num_drafts",
    "Draft tokens:": "draft_tokens",
    "Accepted tokens:": "accepted_tokens",
}
ENERGY = {"cpu_joules": "Energy of this machine's processors", "gpu_joules": "Energy of its GPUs"}
HEADINGS = {
    "ttft": ("TTFT", "Time to First Token"),
    "tpot": ("TPOT", "Time per Output Token (excl. 1st token)"),
    "itl": ("ITL", "Inter-token Latency"),
    "e2el": ("E2EL", "End-to-end Latency"),
}


def as_text(figures: dict[str, Any], metrics: Sequence[str], percentiles: Sequence[float]) -> str:
    """Return the report of a run."""
    lines = [f"{' Serving Benchmark Result ':=^50}", *_lines(totals(figures))]
    for metric in metrics:
        name, heading = HEADINGS[metric]
        keys = {"Mean": "mean", "Median": "median", **{f"P{p:g}": f"p{p:g}" for p in percentiles}}
        rows = [(f"{label} {name} (ms):", figures[f"{key}_{metric}_ms"]) for label, key in keys.items()]
        if metric == "itl" and (together := figures["tokens_together_fraction"]) >= SHOWN:
            rows.append(("Gaps of 0, as tokens came together (%):", 100 * together))
        lines += [f"{heading:-^50}", *_lines(rows)]
    if parts := figures.get("ttft_breakdown"):
        names = ("outside_router", "queue", "prefill", "hand_over")
        rows = [(f"Mean {name.replace('_', ' ')} (ms):", parts.get(f"mean_{name}_ms")) for name in names]
        lines += [f"{' TTFT by part, and the hand-over after it ':-^50}", *_lines(rows)]
    if "spec_decode_num_drafts" in figures:
        rows = [(label, figures[f"spec_decode_{name}"]) for label, name in DRAFTS.items()]
        lines += [f"{'Speculative Decoding':-^50}", *_lines(rows)]
    client = [
        ("P50 lag (ms):", figures["p50_client_lag_ms"]),
        ("P99 lag (ms):", figures["p99_client_lag_ms"]),
        ("Busiest process (% of a core):", 100 * figures["client_cpu_share"]),
    ]
    lines += [f"{' The client itself ':-^50}", *_lines(client), "=" * 50]
    lines += [f"WARNING: {text}" for text in (*figures.get("warnings", []), figures["client_bottleneck"]) if text]
    return "\n".join(lines)


def together_sentence(figures: Mapping[str, Any]) -> str:
    """Say how many tokens came together with the one before, if these make ITL percentiles look short; otherwise empty."""
    share = figures.get("tokens_together_fraction") or 0.0
    if share < SHOWN:
        return ""
    return f"{share:.0%} of tokens came together with the one before: ITL counts them as gaps of 0, TPOT does not."


def totals(figures: dict[str, Any]) -> list[tuple[str, Any]]:
    """Return the rows about the whole run, some with None."""
    rate, good, outputs = figures.get("request_rate"), figures["good_request_fraction"], figures["total_output_tokens"]
    return [
        ("Successful requests:", figures["completed"]),
        ("Failed requests:", figures["failed"]),
        ("  of these, rejected (429):", figures["rejected"]),
        ("Interrupted, not counted:", figures.get("interrupted") or None),
        ("Maximum request concurrency:", figures.get("max_concurrency")),
        ("Request rate configured (RPS):", rate if isinstance(rate, float) else None),
        ("Benchmark duration (s):", figures["duration"]),
        ("Total input tokens:", figures["total_input_tokens"]),
        ("Total generated tokens:", figures["total_output_tokens"]),
        ("Request throughput (req/s):", figures["request_throughput"]),
        ("Request goodput (req/s):", figures["request_goodput"]),
        ("Good requests (%):", None if good is None else 100 * good),
        ("Output token throughput (tok/s):", figures["output_throughput"]),
        ("Peak output token throughput (tok/s):", figures["max_output_tokens_per_s"]),
        ("Peak concurrent requests:", figures["max_concurrent_requests"]),
        ("Total token throughput (tok/s):", figures["total_token_throughput"]),
        ("Normalized latency (ms per output token):", figures["mean_normalized_latency_ms"]),
        *(
            (f"{ENERGY[kind]} (J per output token):", figures[kind] / outputs)
            for kind in ENERGY
            if kind in figures and outputs
        ),
    ]


def _lines(rows: Iterable[tuple[str, Any]]) -> list[str]:
    return [f"{label:<40} {text:<10}" for label, text in as_texts(rows)]


def as_texts(rows: Iterable[tuple[str, Any]]) -> list[tuple[str, str]]:
    """Return the rows that have a value, with it as text."""
    return [
        (label, f"{value:{'.2f' if isinstance(value, float) else ''}}") for label, value in rows if value is not None
    ]


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
        raise SetupError(f"{file} cannot be written: {reason(error)}") from None


def check_files(*names: str) -> None:
    """Raise SetupError unless the named files can be written: what they will hold may take hours. Empty names are none."""
    for file in map(Path, filter(None, names)):
        is_new = not file.exists()
        try:
            file.parent.mkdir(parents=True, exist_ok=True)
            file.open("a").close()
            if is_new:
                file.unlink()
        except OSError as error:
            raise SetupError(f"{file} cannot be written: {reason(error)}") from None


def write_file(file: Path, text: str) -> None:
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    except OSError as error:
        raise SetupError(f"{file} cannot be written: {reason(error)}") from None


def write_json(file: Path, content: dict[str, Any]) -> None:
    write_file(file, json.dumps(content) + "\n")
