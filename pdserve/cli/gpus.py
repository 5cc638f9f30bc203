"""GPUs of this machine, by the ids that CUDA_VISIBLE_DEVICES takes: of whole GPUs, and of MIG slices.

torch is not asked: its import takes seconds, and CUDA in the supervising process would take memory of each GPU.
"""

import os
import re
import shutil
import subprocess
from pathlib import Path

from pdserve.errors import SetupError

VISIBLE = "CUDA_VISIBLE_DEVICES"
NVIDIA_SMI_TIMEOUT_S = 30.0
UNNAMED = ""  # id of a GPU that only the instance can find: without nvidia-smi there is no list
_LINE = re.compile(r"(GPU |\s+MIG ).*\(UUID: ([\w-]+)\)")  # of nvidia-smi -L


def gpus_for(device: str) -> list[str]:
    """Return the ids of the GPUs for instances with this --device; none for CPUs.

    Those that the user's CUDA_VISIBLE_DEVICES names, else all, in the order of nvidia-smi; of a GPU with MIG its slices.

    Raises:
        SetupError: --device names a GPU that does not exist.
    """
    if device == "cpu":
        return []
    names = _named_by_user(os.environ[VISIBLE]) if VISIBLE in os.environ else _installed()
    if device == "auto":
        return names
    if not names:
        return [UNNAMED]  # the instance finds it, or says that there is none
    number = int(device.partition(":")[2] or -1)
    if number >= len(names):
        raise SetupError(f"--device {device}: there are {len(names)} GPUs here ({', '.join(names)}), counted from 0")
    return names if number < 0 else [names[number]]


def parse_list(listing: str) -> list[str]:
    """Return the ids in the output of `nvidia-smi -L`: a GPU's, or those of its MIG slices in its place."""
    ids: list[str] = []
    whole = ""
    for kind, uuid in (match.groups() for line in listing.splitlines() if (match := _LINE.match(line))):
        if kind == "GPU ":
            whole = uuid
        elif whole in ids:
            ids.remove(whole)
        ids.append(uuid)
    return ids


def _named_by_user(value: str) -> list[str]:
    """Return the ids in a value of CUDA_VISIBLE_DEVICES: as for CUDA, a negative number ends the list."""
    names = [name.strip() for name in value.split(",")]
    end = next((i for i, name in enumerate(names) if not name or name.startswith("-")), len(names))
    return names[:end]


def nvidia_smi(*arguments: str) -> str:
    """Return the output of nvidia-smi; empty if there is none, or it hangs as it does with a GPU that fell off the bus."""
    if (command := shutil.which("nvidia-smi")) is None:
        return ""
    try:
        return subprocess.run(
            [command, *arguments], capture_output=True, text=True, check=False, timeout=NVIDIA_SMI_TIMEOUT_S
        ).stdout
    except (OSError, subprocess.TimeoutExpired):
        return ""


def _installed() -> list[str]:
    if ids := parse_list(nvidia_smi("-L")):
        return ids
    return [str(i) for i in range(len(list(Path("/dev").glob("nvidia[0-9]*"))))]
