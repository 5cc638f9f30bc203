"""Loads that shift, and instances so slow that two cores bear sixteen of them, their clients and the forecasts."""

import math
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from random import Random
from typing import Any

from forecast import num_tokens

from pdserve.profile.profile import EngineFacts, Overheads, Profile, StepModel, TransferModel

# That of forecast.py, four times as slow; and each token stands for four.
PROFILE = Profile(
    model="demo",
    model_fingerprint="paced",
    engine=EngineFacts(16, 16384, 375, 256, 48, 1024),
    step=StepModel(
        decode=((1, 0.384), (16, 0.512), (48, 0.864)),
        prefill=((1, 0.096), (32, 0.18), (256, 0.88)),
        mixed=(0.0, 1.0, 0.95),
    ),
    transfers={"shm": TransferModel(8e-3, 3e7, 8e-3, 3e7, 6e7)},
    overheads=Overheads(4e-3, 1e-4, 1e-3, 5e-5, 8e-4),
)
WAVE = (200, 25)  # of ai-dynamo/dynamo#10528: 8,000 and 1,000, a tenth, and a fourth of that
# Of the folder of traces: file, name of its format, and factor of its lengths, with which most requests fit.
TRACES = {
    "mooncake": ("mooncake_fast25_conversation_trace.jsonl", "mooncake", 0.05 / 4),
    "azure-conv": ("AzureLLMInferenceTrace_conv_2023.csv", "azure", 0.5 / 4),
    "azure-code": ("AzureLLMInferenceTrace_code_2023.csv", "azure", 0.5 / 4),
}
LOADS = ("shift", "wave", *TRACES)


Lengths = list[tuple[int, ...]]  # tokens of prompts and answers, before and after a shift


def parse_lengths(text: str) -> Lengths:
    """Parse lengths such as `250/10,25/50`."""
    return [tuple(map(int, part.split("/"))) for part in text.split(",")]


def shifting(load: str, rate: float, period: float, periods: int, lengths: Lengths, seed: int) -> Iterator[str]:
    """Yield the lines of a trace in Azure's format: `shift`, of the lengths every period, or `wave`, of the rate within it.

    Args:
        rate: requests per second in the mean; the wave's goes from 1 to 24 parts.
        period: seconds.
    """
    random, at = Random(seed), 0.0
    yield "TIMESTAMP,ContextTokens,GeneratedTokens"
    while True:
        height = 0.92 * math.sin(2 * math.pi * at / period) if load == "wave" else 0.0
        at += random.expovariate(rate * (1 + height))
        if at >= period * periods:
            return
        mean = WAVE if load == "wave" else lengths[int(at / period) % 2]
        prompt, answer = mean if load == "wave" else (round(one * random.uniform(0.7, 1.3)) for one in mean)
        yield f"{datetime.fromtimestamp(at, UTC).isoformat(sep=' ').removesuffix('+00:00')},{prompt},{answer}"


def data_set(load: str, folder: Path, traces: Path, speed: float, part: slice, lines: Iterator[str]) -> dict[str, Any]:
    """Return the settings of a load; one that is not of the folder of traces consists of `lines`, which are written.

    Args:
        speed, part: factor of a trace's rate, and which of its requests are played.
    """
    if load in TRACES:
        file, kind, scale = TRACES[load]
        path = folder / file
        rows = (traces / file).read_text().removesuffix("\n").split("\n")
        head, rows = (rows[:1], rows[1:]) if kind == "azure" else ([], rows)
        # Requests that are longer than an instance takes are left out.
        fitting = [row for row in rows if scale * num_tokens(row) < PROFILE.engine.max_model_len]
        path.write_text("\n".join([*head, *fitting[part], ""]))
        more = {"trace_speed": speed, "trace_length_scale": scale}
        return {"dataset_name": kind, "dataset_path": str(path), "num_prompts": part.stop - part.start} | more
    path = folder / "trace.csv"
    path.write_text("\n".join([*lines, ""]))
    return {"dataset_name": "azure", "dataset_path": str(path), "num_prompts": 1_000_000}
