"""One part of `scripts/gpu` (scripts/gpu_session.py): where it runs, how it times, and the JSON that it leaves.

A script calls `main` with its parts by name; it is run as `SCRIPT PART,… FOLDER`.
"""

import json
import os
import statistics
import sys
import time
import traceback
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch

DRY = os.environ.get("PDSERVE_GPU_DRY_RUN") == "1"  # tiny shapes on the CPU
DEVICE = torch.device("cpu" if DRY else "cuda")

Result = dict[str, Any]
Part = Callable[[], Result]


class Skip(Exception):
    """This machine lacks what the part needs; the message says what."""


def main(parts: Mapping[str, Part]) -> None:
    """Run the parts of the command line, print their rows, and write what came out of each into FOLDER/PART.json."""
    folder, wrong = Path(sys.argv[2]), False
    torch.backends.cuda.matmul.allow_tf32 = False
    for name in sys.argv[1].split(","):
        print(f"-- {name}", flush=True)
        started = time.perf_counter()
        outcome: Result = {"status": "passed"}
        try:
            outcome["result"] = result = parts[name]()
            for row in result.get("rows", [result]):
                print("  ".join(f"{key} {value}" for key, value in row.items()))
            if result.get("failed"):
                outcome |= {"status": "failed", "reason": f"{result['failed']} of the rows are wrong"}
        except Skip as skip:
            outcome = {"status": "skipped", "reason": str(skip)}
        except Exception as error:  # noqa: BLE001 - whatever a GPU did is a result, and the other parts go on
            traceback.print_exc()
            outcome = {"status": "failed", "reason": f"{type(error).__name__}: {error}"[:500]}
        wrong |= outcome["status"] == "failed"
        outcome["seconds"] = round(time.perf_counter() - started, 1)
        (folder / f"{name}.json").write_text(json.dumps(outcome))
    raise SystemExit(int(wrong))


def now() -> float:
    """Return the time after the device has finished all queued work."""
    if DEVICE.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter()


def seconds(work: Callable[[], object], *, least: float = 0.2, warm_ups: int = 3) -> float:
    """Return the median time of a call, of those within `least` seconds, on the device's clock if it is a GPU."""
    if DRY:
        least, warm_ups = 0.0, 1
    for _ in range(warm_ups):
        work()
    samples: list[float] = []
    stop = now() + least
    while not samples or time.perf_counter() < stop:
        if DEVICE.type == "cuda":
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            work()
            end.record()
            end.synchronize()
            samples.append(begin.elapsed_time(end) / 1e3)
        else:
            started = now()
            work()
            samples.append(now() - started)
    return statistics.median(samples)


def rates() -> dict[str, float]:
    """Return the roofline of this run: bytes/s of a copy (read and written), operations/s of a bfloat16 matrix product."""
    side, nbytes = (64, 1 << 16) if DRY else (8192, 4 << 30)
    source = torch.randn(nbytes // 2, device=DEVICE, dtype=torch.bfloat16)
    target = torch.empty_like(source)
    copy = seconds(partial(target.copy_, source))
    del source, target
    left, right = (torch.randn(side, side, device=DEVICE, dtype=torch.bfloat16) for _ in range(2))
    return {"copy": 2 * nbytes / copy, "flops": 2 * side**3 / seconds(lambda: left @ right)}
