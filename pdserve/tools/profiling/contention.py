"""Times steps while the other cores of the machine compute, compared with steps that have the machine alone."""

import signal
import statistics
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

from pdserve.engine.engine import Engine
from pdserve.errors import SetupError
from pdserve.tools.machine import num_cores
from pdserve.tools.profiling.steps import Show, Work, clock_of, dummies

# Multiplies matrices of a small model's prefill, which are larger than a core's own cache, and says when it has begun.
NEIGHBOUR = """
import signal, torch
from pdserve.parent import receive_at_end
receive_at_end(signal.SIGKILL)
torch.set_num_threads(1)
x, w = torch.randn(256, 1024), torch.randn(1024, 4096)
torch.mm(x, w)
print(flush=True)
while True:
    torch.mm(x, w)
"""
TURNS, STEPS = 9, 4  # each turn without neighbours and with them, so that a change of the machine's speed meets both
PAST = 64  # tokens before those of a decode step


def time_contention(engine: Engine, show: Show) -> float:
    """Return how many times as long a step takes while each other core computes: the mean of a prompt's and of decode steps.

    1 on a GPU, and if an instance has all cores.

    Raises:
        SetupError: the processes that compute on the other cores cannot be started.
    """
    import torch

    others = num_cores() - torch.get_num_threads()
    if engine.checkpoint.device.type != "cpu" or others < 1:
        return 1.0
    past = min(PAST, engine.max_model_len - 2)
    works: list[Work] = [[(max(1, min(256, engine.max_model_len - 1)), 0)], [(1, past)]]
    ratios: list[list[float]] = [[] for _ in works]
    with _neighbours(others) as processes:
        for turn in range(TURNS):
            show(f"steps while {others} other cores compute: turn {turn + 1} of {TURNS}")
            for work, of_work in zip(works, ratios, strict=True):
                alone = _seconds(engine, work)
                _send(processes, signal.SIGCONT)
                of_work.append(_seconds(engine, work) / alone)
                _send(processes, signal.SIGSTOP)
    return max(1.0, statistics.mean(map(statistics.median, ratios)))


def _seconds(engine: Engine, work: Work) -> float:
    """Return the median seconds of a step that follows others of its kind."""
    clock, plan, seconds = clock_of(engine), dummies(engine, work), list[float]()
    for _ in range(STEPS + 1):
        started = clock()
        engine.runner.step(plan)
        seconds.append(clock() - started)
    return statistics.median(seconds[1:])


@contextmanager
def _neighbours(count: int) -> Iterator[list[subprocess.Popen[bytes]]]:
    """Start `count` processes that compute, stopped at first, and end them afterwards."""
    processes = list[subprocess.Popen[bytes]]()
    try:
        for _ in range(count):
            command = [sys.executable, "-c", NEIGHBOUR]  # in a session of its own, as Ctrl-C is none of its business
            processes.append(subprocess.Popen(command, stdout=subprocess.PIPE, start_new_session=True))
        for one in processes:
            assert one.stdout is not None
            if not one.stdout.readline():
                raise SetupError("a process that should compute on another core ended; is there enough memory?")
            one.send_signal(signal.SIGSTOP)
        yield processes
    finally:
        for one in processes:
            one.kill()
            one.communicate()


def _send(processes: list[subprocess.Popen[bytes]], number: signal.Signals) -> None:
    for one in processes:
        one.send_signal(number)
