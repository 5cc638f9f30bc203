"""CPU cores that this process may use: those of its affinity, and no more than the quota of its container."""

import math
import os
from collections.abc import Iterator
from pathlib import Path

GROUPS, OWN_GROUPS = Path("/sys/fs/cgroup"), Path("/proc/self/cgroup")


def num_cores(groups: Path = GROUPS, own: Path = OWN_GROUPS) -> int:
    """Return the number of cores. Docker's `--cpus` and Kubernetes' limits are quotas, which the affinity does not tell.

    Args:
        groups: where the control groups are mounted.
        own: file with those of this process.
    """
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, min([cores, *map(math.ceil, _quotas(groups, own))]))


def _quotas(groups: Path, own: Path) -> Iterator[float]:
    """Yield the quotas, in cores, of the groups that this process is in. A container may show its own group as the root."""
    lines = own.read_text().split("\n") if own.exists() else []
    paths = dict(line.split(":", 2)[1:] for line in lines if line.count(":") >= 2)
    for controllers, path in {"": "/", "cpu,cpuacct": "/", "cpu": "/"}.items() | paths.items():
        root = groups / controllers
        folder = root / path.lstrip("/")
        for group in (folder, *folder.parents):
            if group.is_relative_to(root) and (quota := _quota(group)) is not None:
                yield quota


def _quota(group: Path) -> float | None:
    """Return the quota of one group in cores, of either version of control groups; None if it has none."""
    try:
        if (file := group / "cpu.max").exists():
            quota, period = file.read_text().split()
        else:
            quota, period = ((group / f"cpu.cfs_{name}_us").read_text().strip() for name in ("quota", "period"))
        return int(quota) / int(period) if int(quota) > 0 else None
    except (OSError, ValueError):  # there is none: "max", -1, or no such file
        return None
