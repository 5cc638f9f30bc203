"""Simulations side by side: in processes that are forked, and neither import again nor wait for threads of torch."""

import os
import signal
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path
from typing import Any

import pytest
import torch

from pdserve.profile.profile import Profile
from pdserve.tools.load_config import FleetConfig
from pdserve.tools.simulator import fleet as module
from pdserve.tools.simulator.fleet import Fleet, simulate_all

RUNS = [(Fleet(both=1), 20.0), (Fleet(1, 1), 20.0), (Fleet(both=2), 40.0)]


def config(**settings: Any) -> FleetConfig:
    return FleetConfig(num_prompts=5, random_input_len=50, random_output_len=5, **settings)


def test_processes_have_the_same_figures_as_one(tiny_profile: Path) -> None:
    """Also where pools are so large that torch fills them by threads, which a forked process does not have."""
    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        assert int(torch.zeros(1_000_000, dtype=torch.uint8).sum()) == 0  # in threads
        found = [
            [
                one.figures
                for one in simulate_all(config(jobs=jobs, num_blocks=200_000), Profile.load(tiny_profile), {}, RUNS)
            ]
            for jobs in (1, 2)
        ]
    finally:
        torch.set_num_threads(threads)
    assert found[0] == found[1] and len(found[0]) == 3


def test_processes_begin_with_what_this_one_has_imported(tiny_profile: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "simulate", lambda *_: (os.getpid(), torch.get_num_threads()))
    found: list[Any] = list(simulate_all(config(jobs=2), Profile.load(tiny_profile), {}, RUNS))
    assert {pid for pid, _ in found}.isdisjoint({os.getpid()}) and {threads for _, threads in found} == {1}


def test_ctrl_c_ends_the_processes_without_a_traceback(
    tiny_profile: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """A terminal sends it to all of them."""
    monkeypatch.setattr(module, "simulate", lambda *_: signal.raise_signal(signal.SIGINT))
    with pytest.raises(BrokenProcessPool):
        list(simulate_all(config(jobs=2), Profile.load(tiny_profile), {}, RUNS))
    assert "Traceback" not in capfd.readouterr().err
