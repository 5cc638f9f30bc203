"""Machine that a command runs on: its processor, how many cores there are, and how many threads compute on them already."""

import time
from pathlib import Path

from pdserve.cores import num_cores

__all__ = ["busy_threads", "num_cores", "processor"]

SAMPLES, SAMPLE_S = 20, 0.025


def processor() -> str:
    """Return the processor's name, as Linux says it."""
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().split("\n") if cpuinfo.exists() else []
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "unknown")


def busy_threads() -> float:
    """Return how many other threads compute, in the mean over half a second; 0 where Linux does not say it."""
    path = Path("/proc/stat")
    if not path.exists():
        return 0.0
    total = 0
    for _ in range(SAMPLES):
        time.sleep(SAMPLE_S)
        running = next(line for line in path.read_text().split("\n") if line.startswith("procs_running"))
        total += int(running.split()[1]) - 1  # without this one
    return total / SAMPLES
