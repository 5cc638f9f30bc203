"""The cores beside a GPU, by a made-up /sys. No machine with several NUMA nodes has run this."""

import os
import subprocess
from pathlib import Path

import pytest

from pdserve.instance import affinity
from pdserve.ranks import followers


@pytest.fixture
def devices(tmp_path: Path) -> Path:
    folder = tmp_path / "0000:17:00.0"
    folder.mkdir()
    (folder / "local_cpulist").write_text("0-3,64-65,70\n")
    return tmp_path


def test_cores_of_a_list_of_ranges(devices: Path) -> None:
    assert affinity.local_cores("0000:17:00.0", devices) == {0, 1, 2, 3, 64, 65, 70}
    assert affinity.local_cores("0000:99:00.0", devices) == affinity.local_cores("", devices) == set()
    (devices / "0000:17:00.0" / "local_cpulist").write_text("\n")
    assert affinity.local_cores("0000:17:00.0", devices) == set()


@pytest.mark.parametrize(
    ("allowed", "expected"),
    [({1, 2, 9, 64}, {1, 2, 64}), ({0, 1}, None), ({8, 9}, None)],
    ids=["some", "all are beside it", "none is, so that the user wants others"],
)
def test_a_process_keeps_to_the_cores_that_it_may_use(
    allowed: set[int], expected: set[int] | None, devices: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    chosen = list[set[int]]()
    monkeypatch.setattr(affinity, "pci_address", {1: "0000:17:00.0"}.__getitem__)
    monkeypatch.setattr(affinity.local_cores, "__defaults__", (devices,))
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: allowed)
    monkeypatch.setattr(os, "sched_setaffinity", lambda pid, cores: chosen.append(cores))
    affinity.run_beside("cuda:1")
    assert chosen == ([] if expected is None else [expected])


def test_processes_of_other_ranks_start_on_all_cores(devices: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """They inherit the cores of this one, whose GPU may be beside another processor than theirs."""
    now, seen = {0, 1, 8, 9}, list[set[int]]()

    def restrict(pid: int, cores: set[int]) -> None:
        nonlocal now
        now = {*cores}

    monkeypatch.setattr(affinity, "pci_address", {1: "0000:17:00.0"}.__getitem__)
    monkeypatch.setattr(affinity.local_cores, "__defaults__", (devices,))
    monkeypatch.setattr(affinity, "_before", set())
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: now)
    monkeypatch.setattr(os, "sched_setaffinity", restrict)
    affinity.run_beside("cuda:1")
    monkeypatch.setattr(subprocess, "Popen", lambda *args, **kwargs: seen.append(now))
    followers.start_process(3, 1, 0)
    assert seen == [{0, 1, 8, 9}] and now == {0, 1}


def test_without_a_gpu_nothing_changes() -> None:
    before = os.sched_getaffinity(0)
    affinity.run_beside("cpu")
    if not affinity.pci_address(0):
        affinity.run_beside("auto")
    assert os.sched_getaffinity(0) == before
