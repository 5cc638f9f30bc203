"""CPU time of work, compared with that of less work (for tests marked slow: it depends on what else runs)."""

import gc
import time
from collections.abc import Callable


def cpu_seconds(work: Callable[[], object], rounds: int = 3) -> float:
    """Return the CPU seconds of the shortest of several rounds, without collections of garbage, which read the whole heap."""
    shortest = float("inf")
    for _ in range(rounds):
        gc.collect()
        gc.disable()
        try:
            began = time.process_time()
            work()
            shortest = min(shortest, time.process_time() - began)
        finally:
            gc.enable()
    return shortest
