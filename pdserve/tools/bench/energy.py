"""Energy that this machine uses: by the counters of its processors (RAPL, as Linux shows them) and of its GPUs (NVML).

Counters are of whole packages and devices: what idles and other programs count, too.
"""

import ctypes
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

POWERCAP = Path("/sys/class/powercap")
NVML = "libnvidia-ml.so.1"


@dataclass
class _Counter:
    """A counter in joules, which begins again at `range`; 0: it does not."""

    kind: str
    read: Callable[[], float]
    range: float = 0.0
    last: float = 0.0
    used: float = 0.0

    def update(self) -> None:
        now = self.read()
        self.used += now - self.last + (self.range if now < self.last else 0.0)
        self.last = now


class EnergyMeter:
    """Sums the joules since it was made. `update` must be called more often than counters begin again, every few minutes.

    Args:
        powercap: folder of the processors' counters.
        nvml: name of NVIDIA's library.
    """

    def __init__(self, powercap: Path = POWERCAP, nvml: str = NVML) -> None:
        self._counters = [*_packages(powercap), *_gpus(nvml)]
        for one in self._counters:
            one.last = one.read()

    def update(self) -> None:
        for one in self._counters:
            one.update()

    def joules(self) -> dict[str, float]:
        """Return what was used, by `cpu` and `gpu`, without those that have no counter that this user may read."""
        self.update()
        kinds = dict.fromkeys(one.kind for one in self._counters)
        return {kind: sum(one.used for one in self._counters if one.kind == kind) for kind in kinds}


def _packages(powercap: Path) -> list[_Counter]:
    """Return the counters of the processors' packages; their parts, such as `intel-rapl:0:1`, are in them."""
    found = []
    for zone in sorted(powercap.glob("*-rapl:*")):
        with suppress(OSError, ValueError):  # only root may read them, unless that was changed
            if zone.name.count(":") == 1:
                path, most = zone / "energy_uj", int((zone / "max_energy_range_uj").read_text()) / 1e6
                int(path.read_text())
                found.append(_Counter("cpu", lambda path=path: int(path.read_text()) / 1e6, most))  # type: ignore[misc]
    return found


def _gpus(nvml: str) -> list[_Counter]:
    """Return the counters of the GPUs, which count from the driver's start."""
    try:
        library = ctypes.CDLL(nvml)
    except OSError:
        return []
    count = ctypes.c_uint()
    if library.nvmlInit_v2() or library.nvmlDeviceGetCount_v2(ctypes.byref(count)):
        return []
    found = []
    for index in range(count.value):
        device, energy = ctypes.c_void_p(), ctypes.c_ulonglong()

        def read(device: ctypes.c_void_p = device, energy: ctypes.c_ulonglong = energy) -> float:
            library.nvmlDeviceGetTotalEnergyConsumption(device, ctypes.byref(energy))
            return energy.value / 1e3

        if not library.nvmlDeviceGetHandleByIndex_v2(index, ctypes.byref(device)) and read():
            found.append(_Counter("gpu", read))
    return found
