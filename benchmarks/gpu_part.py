"""One part of `scripts/gpu` (scripts/gpu_session.py): where it runs, how it times, and the JSON that it leaves.

A script calls `main` with its parts by name; it is run as `SCRIPT PART,… FOLDER`.
"""

import json
import os
import signal
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


_kept: list[Result] = []  # rows of the part that runs


class Skip(Exception):
    """This machine lacks what the part needs; the message says what."""


class _Stopped(BaseException):
    """SIGTERM has come: the time of the part is over."""


def main(parts: Mapping[str, Part]) -> None:
    """Run the parts of the command line, print their rows, and write what came out of each into FOLDER/PART.json."""
    folder, wrong = Path(sys.argv[2]), False
    torch.backends.cuda.matmul.allow_tf32 = False
    signal.signal(signal.SIGTERM, _stop)
    for name in sys.argv[1].split(","):
        print(f"-- {name}", flush=True)
        started = time.perf_counter()
        outcome = _run(parts[name])
        wrong |= outcome["status"] in ("failed", "stopped")
        outcome["seconds"] = round(time.perf_counter() - started, 1)
        (folder / f"{name}.json").write_text(json.dumps(outcome))
        if outcome["status"] == "stopped":
            break
    raise SystemExit(int(wrong))


def keep(row: Result) -> Result:
    """Print a row and return it. Rows that were kept are in the JSON even if the part fails later, or is stopped."""
    _kept.append(row)
    _print(row)
    return row


def _run(part: Part) -> Result:
    """Return what came out of a part."""
    _kept.clear()
    try:
        result = part()
        if not _kept:
            for row in result.get("rows", [result]):
                _print(row)
        if result.get("failed"):
            return {"status": "failed", "reason": f"{result['failed']} of the rows are wrong", "result": result}
        return {"status": "passed", "result": result}
    except Skip as skip:
        return {"status": "skipped", "reason": str(skip)}
    except _Stopped:
        traceback.print_exc()
        return {"status": "stopped", "reason": "took too long", "result": {"rows": _kept}}
    except Exception as error:  # noqa: BLE001 - whatever a GPU did is a result, and the other parts go on
        traceback.print_exc()
        return {"status": "failed", "reason": f"{type(error).__name__}: {error}"[:500], "result": {"rows": _kept}}


def _stop(number: int, frame: object) -> None:
    raise _Stopped


def _print(row: Result) -> None:
    print("  ".join(f"{key} {value}" for key, value in row.items()), flush=True)


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
