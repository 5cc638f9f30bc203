"""CPU cores beside a GPU: an instance runs on those of its GPU's NUMA node, so that host memory is there too.

Pinned memory on another node halves the rate of copies, and every launch crosses the link between the processors.
"""

import ctypes
import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

log = logging.getLogger(__name__)
PCI_DEVICES = Path("/sys/bus/pci/devices")
_before: set[int] = set()  # cores of this process until it was restricted


def run_beside(device: str) -> None:
    """Restrict this process to those of its cores that are beside its GPU, if the system names any. For --device cuda:1."""
    kind, _, number = device.partition(":")
    if kind == "cpu" or not hasattr(os, "sched_setaffinity"):
        return
    allowed = os.sched_getaffinity(0)
    cores = allowed & local_cores(pci_address(int(number or 0)))
    if cores and cores != allowed:
        _before.update(allowed)
        os.sched_setaffinity(0, cores)
        log.info("on %d of %d cores, those beside the GPU", len(cores), len(allowed))


@contextmanager
def on_all_cores() -> Iterator[None]:
    """Let processes that this thread starts use the cores that this one had before `run_beside`."""
    if not _before:
        yield
        return
    restricted = os.sched_getaffinity(0)
    os.sched_setaffinity(0, _before)
    try:
        yield
    finally:
        os.sched_setaffinity(0, restricted)


def local_cores(address: str, devices: Path = PCI_DEVICES) -> set[int]:
    """Return the cores beside the device at a PCI address, such as 0000:17:00.0; none if that is unknown, as in most VMs."""
    file = devices / address.lower() / "local_cpulist"
    if not address or not file.exists():
        return set()
    ranges = (part.partition("-") for part in file.read_text().strip().split(",") if part)
    return {core for first, _, last in ranges for core in range(int(first), int(last or first) + 1)}


def pci_address(number: int) -> str:
    """Return the PCI address of a GPU by its number for CUDA in this process; empty if there is none."""
    try:
        cuda = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return ""
    address, device = ctypes.create_string_buffer(32), ctypes.c_int()
    if cuda.cuInit(0) or cuda.cuDeviceGet(ctypes.byref(device), number):
        return ""
    if cuda.cuDeviceGetPCIBusId(address, len(address), device):
        return ""
    return address.value.decode()
