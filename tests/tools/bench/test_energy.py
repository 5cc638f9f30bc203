"""Energy by made-up counters of processors, and by a made-up library of NVIDIA's."""

import subprocess
from pathlib import Path

import pytest

from pdserve.tools.bench.energy import EnergyMeter

LIBRARY = """
static unsigned long long millijoules = 5000;
int nvmlInit_v2(void) { return 0; }
int nvmlDeviceGetCount_v2(unsigned *count) { *count = 2; return 0; }
int nvmlDeviceGetHandleByIndex_v2(unsigned index, void **device) { *device = &millijoules; return index; }
int nvmlDeviceGetTotalEnergyConsumption(void *device, unsigned long long *energy) { *energy = millijoules += 250; return 0; }
"""


def zone(folder: Path, name: str, microjoules: int) -> Path:
    (folder / name).mkdir(parents=True, exist_ok=True)
    (folder / name / "max_energy_range_uj").write_text("10000000\n")
    (folder / name / "energy_uj").write_text(f"{microjoules}\n")
    return folder / name / "energy_uj"


def test_packages_are_summed_over_the_end_of_their_range_and_parts_do_not_count(tmp_path: Path) -> None:
    first, second = zone(tmp_path, "intel-rapl:0", 9_000_000), zone(tmp_path, "intel-rapl:1", 0)
    part = zone(tmp_path, "intel-rapl:0:0", 0)
    meter = EnergyMeter(tmp_path, "none.so")
    first.write_text("1000000")
    part.write_text("700000")
    meter.update()
    first.write_text("1500000")
    second.write_text("250000")
    assert meter.joules() == {"cpu": pytest.approx(2.0 + 0.5 + 0.25)}


def test_without_counters_nothing_is_said(tmp_path: Path) -> None:
    (tmp_path / "intel-rapl:0").mkdir()
    assert EnergyMeter(tmp_path, "none.so").joules() == {} == EnergyMeter(tmp_path / "none", "none.so").joules()


def test_gpus_count_by_their_driver(tmp_path: Path) -> None:
    (tmp_path / "nvml.c").write_text(LIBRARY)
    library = tmp_path / "libnvml.so"
    subprocess.run(["g++", "-x", "c", "-shared", "-fPIC", "-o", library, tmp_path / "nvml.c"], check=True)
    meter = EnergyMeter(tmp_path, str(library))
    assert meter.joules() == {"gpu": pytest.approx(0.25)} and meter.joules() == {"gpu": pytest.approx(0.5)}
