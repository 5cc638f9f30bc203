"""How many cores there are, with and without a quota."""

import os
from pathlib import Path

import pytest

from pdserve.cores import num_cores


@pytest.mark.parametrize(
    ("own", "files", "cores"),
    [
        ("0::/", {}, 8),
        ("0::/", {"cpu.max": "max 100000"}, 8),
        ("0::/", {"cpu.max": "250000 100000"}, 3),
        ("0::/", {"cpu.max": "50000 100000"}, 1),
        ("0::/", {"cpu.max": "6400000 100000"}, 8),
        ("0::/a/b", {"a/b/cpu.max": "max 100000", "a/cpu.max": "200000 100000"}, 2),
        ("0::/docker/id", {"cpu.max": "400000 100000"}, 4),
        ("2:cpu:/", {"cpu/cpu.cfs_quota_us": "-1", "cpu/cpu.cfs_period_us": "100000"}, 8),
        ("2:cpu:/pod", {"cpu/pod/cpu.cfs_quota_us": "600000", "cpu/pod/cpu.cfs_period_us": "100000"}, 6),
        ("4:cpu,cpuacct:/", {"cpu,cpuacct/cpu.cfs_quota_us": "9000", "cpu,cpuacct/cpu.cfs_period_us": "10000"}, 1),
        ("nonsense", {"cpu.max": ""}, 8),
    ],
)
def test_a_quota_limits_the_cores(
    own: str, files: dict[str, str], cores: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)))
    groups, file = tmp_path / "groups", tmp_path / "own"
    file.write_text(f"{own}\n")
    for name, text in files.items():
        (groups / name).parent.mkdir(parents=True, exist_ok=True)
        (groups / name).write_text(f"{text}\n")
    assert num_cores(groups, file) == cores


def test_there_is_at_least_one_here() -> None:
    assert 1 <= num_cores() <= len(os.sched_getaffinity(0))
