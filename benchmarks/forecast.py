"""Forecasts of `pdserve simulate` against real deployments: `python benchmarks/forecast.py [--fleets …] [--loads …]`.

The deployments are real but for the model: their instances are paced by the same profile (`--paced`), so a fleet may have
more instances than this machine has cores. Each row is one fleet, mix of requests, and rate, as a share of the rate at which
the fleet is saturated by forecast. The client of `pdserve bench serve` sends the same requests, at the same times, as were
simulated.
"""

import json
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from random import Random
from typing import Any

import report

from pdserve.cli.flags import command_from_config
from pdserve.config import flag
from pdserve.profile.profile import EngineFacts, Overheads, Profile, StepModel, TransferModel
from pdserve.tools.bench.metrics import summarize
from pdserve.tools.bench.slo import METRICS
from pdserve.tools.bench.sweep import is_saturated
from pdserve.tools.load_config import BenchTuneConfig
from pdserve.tools.simulator.fleet import PERCENTILES, Fleet, Forecast, parse_fleet, simulate
from pdserve.tools.tuner.command import fleet_config, measure_fleet

GOALS = {"ttft": 0.5, "itl": 0.06}  # seconds, of a request
FIGURES = [f"p{p}_{metric}_ms" for metric in ("ttft", "itl") for p in (50, 90, 99)] + ["good_request_fraction"]
TURNS, TURN_BLOCKS = 4, 3  # of a conversation; blocks of 512 tokens, scaled, by which a turn lengthens its prompt
# Of the folder --traces: file, name of its format, and factor of its lengths, with which most requests fit.
TRACES = {
    "mooncake": ("mooncake_fast25_conversation_trace.jsonl", "mooncake", 0.05),
    "azure-conv": ("AzureLLMInferenceTrace_conv_2023.csv", "azure", 0.5),
    "azure-code": ("AzureLLMInferenceTrace_code_2023.csv", "azure", 0.5),
}
PACED = "profile.json"
BURST = 200  # requests at once, which show the rate of saturation
# As slow as a middling GPU with a large model, so that this machine's own delays are small beside the steps.
PROFILE = Profile(
    model="demo",
    model_fingerprint="paced",
    engine=EngineFacts(16, 16384, 1500, 1024, 48, 4096),
    step=StepModel(
        decode=((1, 0.024), (16, 0.032), (48, 0.054)),
        context_s=1e-7,
        prefill=((1, 0.024), (128, 0.045), (1024, 0.22)),
        pair_s=2e-8,
        mixed=(0.0, 1.0, 0.95),
    ),
    transfers={"shm": TransferModel(2e-3, 5e8, 2e-3, 5e8, 1e9)},
    overheads=Overheads(4e-3, 1e-4, 1e-3, 5e-5, 8e-4),
)


@dataclass(frozen=True, kw_only=True)
class Settings(report.Settings):
    fleets: str = flag("such as 1P+1D,2P+1D,2B", "1P+1D,2B,2P+2D")
    mixes: str = flag("of long, short, chat, mooncake, azure-conv and azure-code", "long,short,chat")
    traces: str = flag("folder of the traces, of which the seed draws a window", "")
    loads: str = flag("shares of the rate of saturation", "0.2,0.5,0.8,0.95")
    requests: int = flag("per row", 150, least=1)
    warmup: int = flag("the first of them, which do not count, as they meet an empty fleet", 0, least=0)
    seed: int = flag("of the requests", 0)


def mix(name: str, settings: Settings, folder: Path) -> BenchTuneConfig:
    """Return the load of a mix, for paced instances; `folder` has the file of `PROFILE`."""
    engine = PROFILE.engine
    config = BenchTuneConfig(
        model="demo",
        paced=str(folder / PACED),
        threads=1,
        num_blocks=engine.num_blocks,
        max_num_seqs=engine.max_num_seqs,
        max_num_batched_tokens=engine.max_num_batched_tokens,
        slo="ttft=1s",
        num_prompts=settings.requests,
        warmup_requests=settings.warmup,
        seed=settings.seed,
        random_range_ratio=0.6,
        block_size=16,
    )
    if name == "long":
        return replace(config, random_input_len=1000, random_output_len=16)
    if name == "short":
        return replace(config, random_input_len=150, random_output_len=100)
    if name in TRACES:
        file, dataset, scale = TRACES[name]
        path = folder / f"{settings.seed}-{settings.requests}-{file}"
        path.write_text("".join(window(Path(settings.traces, file), scale, settings)))
        return replace(config, dataset_name=dataset, dataset_path=str(path), trace_length_scale=scale)
    path = folder / f"chat-{settings.seed}-{settings.requests}.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in conversations(settings)))
    trace: dict[str, Any] = {"dataset_name": "mooncake", "dataset_path": str(path), "trace_length_scale": 0.125}
    return replace(config, multi_turn=True, **trace)


def conversations(settings: Settings) -> Iterator[dict[str, Any]]:
    """Yield a trace of conversations that overlap, in the form of Mooncake's."""
    random = Random(settings.seed)
    for number in range(settings.requests):
        talk, turn = number % (settings.requests // TURNS + 1), number // (settings.requests // TURNS + 1)
        blocks = TURN_BLOCKS * (turn + 1)
        yield {
            "timestamp": int(1000 * (number + random.random())),
            "input_length": 512 * blocks,
            "output_length": 8 * random.randrange(20, 60),
            "hash_ids": [1000 * talk + block for block in range(blocks)],
        }


def window(path: Path, scale: float, settings: Settings) -> list[str]:
    """Return so many successive lines of a trace that the model can serve, from a place that the seed draws."""
    lines = [f"{line}\n" for line in path.read_text().removesuffix("\n").split("\n")]
    head, rows = (lines[:1], lines[1:]) if path.suffix == ".csv" else ([], lines)
    rows = [row for row in rows if scale * num_tokens(row) < PROFILE.engine.max_model_len]
    first = Random(settings.seed).randrange(len(rows) - settings.requests)
    return head + rows[first : first + settings.requests]


def num_tokens(row: str) -> int:
    """Return the tokens of prompt and answer of a line of a trace."""
    if row.startswith("{"):
        fields = json.loads(row)
        return int(fields["input_length"] + fields["output_length"])
    return sum(map(int, row.split(",")[1:]))


def measure(config: BenchTuneConfig, fleet: Fleet, rate: float) -> dict[str, Any]:
    """Play the load against a deployment, and return its figures."""
    samples = measure_fleet(replace(config, request_rate=rate), fleet, 0)
    return summarize(samples, GOALS, METRICS, PERCENTILES, []) | {"saturated": is_saturated(samples)}


def saturation(config: BenchTuneConfig, fleet: Fleet) -> float:
    """Return the requests per second of a fleet that is never idle."""
    burst = replace(fleet_config(config), num_prompts=max(BURST, config.num_prompts))
    rate: float = simulate(burst, PROFILE, GOALS, fleet, 1e3).figures["request_throughput"]
    return rate


def run(settings: Settings) -> None:
    """Compare forecasts with measurements."""
    settings = settings.sized({"fleets": "1P+1D", "mixes": "short", "loads": "0.5", "requests": 12})
    rows = list[dict[str, Any]]()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        PROFILE.save(folder / PACED)
        for fleet in map(parse_fleet, settings.fleets.split(",")):
            for kind, mixed in enumerate(settings.mixes.split(",")):
                config = mix(mixed, settings, folder)
                highest = saturation(config, fleet)
                for number, load in enumerate(map(float, settings.loads.split(","))):
                    # Random prompts that are in no cache yet.
                    one = replace(config, seed=settings.seed + 100 * number + 1000 * kind)
                    rate = load * highest
                    measured = measure(one, fleet, rate)
                    predicted: Forecast = simulate(fleet_config(one), PROFILE, GOALS, fleet, rate)
                    row: dict[str, Any] = {"fleet": str(fleet), "mix": mixed, "load": load, "rate": rate}
                    row |= {"predicted_saturated": predicted.saturated, "measured_saturated": measured["saturated"]}
                    row |= {"bottleneck": measured["client_bottleneck"]}
                    for key in (*FIGURES, "request_throughput"):
                        row |= {f"predicted_{key}": predicted.figures[key], f"measured_{key}": measured[key]}
                    rows.append(row)
                    print(json.dumps(row), flush=True)
    report.show(fleet_rows(rows))
    settings = replace(settings, traces=Path(settings.traces).name)
    loads = sorted({row["load"] for row in rows})
    by_load = {load: errors([row for row in rows if row["load"] == load]) for load in loads}
    report.show(load_rows(by_load), "median error, bias")
    print(report.write("forecast", settings, {"rows": rows, "errors": errors(rows), "errors_by_load": by_load}))


def errors(rows: list[dict[str, Any]]) -> dict[str, dict[str, float]]:
    """Return, for each figure, the median and the mean of its relative errors; of shares of good requests, differences."""
    summary = {}
    for key in FIGURES:
        pairs = [(row[f"predicted_{key}"], row[f"measured_{key}"]) for row in rows]
        off = [p - m if key == "good_request_fraction" else p / m - 1 for p, m in pairs]
        absolute = sorted(map(abs, off))
        summary[key] = {"median_error": absolute[len(absolute) // 2], "bias": sum(off) / len(off)}
    return summary


def load_rows(by_load: dict[float, dict[str, dict[str, float]]]) -> list[dict[str, str]]:
    return [
        {"load": f"{load:.0%}"}
        | {_column(key): f"{figures[key]['median_error']:.1%}, {figures[key]['bias']:+.1%}" for key in FIGURES}
        for load, figures in by_load.items()
    ]


def fleet_rows(rows: list[dict[str, Any]]) -> list[dict[str, str]]:
    shown = [
        {"fleet": row["fleet"], "mix": row["mix"], "load": f"{row['rate']:.3g} req/s, {row['load']:.0%}"}
        | {_column(key): f"{row[f'predicted_{key}']:.3g} / {row[f'measured_{key}']:.3g}" for key in FIGURES}
        for row in rows
    ]
    for key, what in (("median_error", "median error"), ("bias", "bias")):
        shown.append({"mix": what} | {_column(name): f"{one[key]:+.1%}" for name, one in errors(rows).items()})
    return shown


def _column(figure: str) -> str:
    return figure.removesuffix("_ms")


if __name__ == "__main__":
    report.main(command_from_config(Settings, run))
