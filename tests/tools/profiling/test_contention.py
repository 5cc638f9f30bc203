"""Processes that compute on the other cores while `pdserve profile` times steps: they start, and end."""

import os
import signal

import pytest

from pdserve.errors import SetupError
from pdserve.tools.profiling import contention


def test_neighbours_end_with_what_they_are_for() -> None:
    with pytest.raises(RuntimeError), contention._neighbours(2) as processes:
        pids = [one.pid for one in processes]
        for pid in pids:
            os.kill(pid, signal.SIGCONT)
        raise RuntimeError
    assert len(set(pids)) == 2 and all(one.returncode == -signal.SIGKILL for one in processes)


def test_a_neighbour_that_cannot_compute_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(contention, "NEIGHBOUR", "raise SystemExit(1)")
    with pytest.raises(SetupError, match="another core ended"), contention._neighbours(1):
        pass
