"""`pdserve doctor` on machines with and without GPUs, which are faked: drivers, torch's list, and what kernels would do."""

import re
import tomllib
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from pdserve.cli import doctor


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A machine with one GPU."""
    properties = SimpleNamespace(name="NVIDIA L40S", major=8, minor=9, total_memory=45 << 30)
    monkeypatch.setattr(torch.version, "cuda", "12.8")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda number: properties)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(doctor, "NVIDIA_MODULE", tmp_path / "version")
    (tmp_path / "version").write_text(
        "NVRM version: NVIDIA UNIX x86_64 Kernel Module  570.86.15  Thu Jan 23\nGCC 13.2\n"
    )


def report() -> dict[str, tuple[bool, str]]:
    return {finding.component: (finding.found, finding.detail) for finding in doctor.collect_findings()}


def test_without_a_gpu() -> None:
    found = report()
    assert not found["GPU"][0] and ("without CUDA" in found["GPU"][1] or "finds none" in found["GPU"][1])
    assert found["attention: cpu"] == (True, "prefill and decode on cpu, the default")
    is_there, reason = found["attention: triton"]
    assert not is_there and reason.startswith(("the triton kernel needs triton", "on the CPU the triton kernel"))
    assert found["attention: reference"] == (True, "prefill and decode on cpu")
    groups = "layers with windows, attention sinks, latent rows, 8 bits, states of recurrent layers"
    assert found["KV groups"] == (True, groups)
    is_there, detail = found["torch.distributed"]
    assert (
        is_there
        and detail.startswith("gloo")
        and detail.endswith("0 GPUs, on CPUs any number of ranks; no step graphs")
    )


@pytest.mark.usefixtures("gpu")
def test_with_a_gpu(tmp_path: Path) -> None:
    pytest.importorskip("triton")
    found = report()
    assert found["NVIDIA driver"] == (True, "570.86.15")
    assert found["cuda:0"] == (True, "NVIDIA L40S, compute capability 8.9, 45 GiB, CUDA 12.8")
    assert found["attention: triton"] == (True, "prefill and decode on cuda:0, the default")
    assert found["attention: cpu"] == (False, "the cpu kernel needs its pool on the CPU, not on cuda:0")
    is_used, flash = found["attention: flash"]
    assert not is_used and flash.startswith("prefill by triton, decode by triton; flash-attn-3 is not installed; ")
    command = tmp_path / "nvidia-smi"
    command.write_text("#!/bin/sh\necho 999.1\n")
    command.chmod(0o755)
    assert report()["NVIDIA driver"] == (True, "999.1"), "as on WSL, where there is no module"


@pytest.mark.usefixtures("gpu")
def test_back_ends_are_named_by_phase(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("triton")
    from pdserve.kernels.gpu import flash

    monkeypatch.setattr(flash, "installed", lambda: frozenset(("flash-attn-2", "flash-attn-3")))
    is_used, detail = report()["attention: flash"]
    assert is_used and detail.startswith("prefill by flash-attn-2, decode by triton, the default in 16 bits; ")
    assert "flash-attn-3 does not support compute capability 8.9" in detail
    assert "flash-attn-2 decodes over blocks of multiples of 256 tokens only, not of 16" in detail


def test_every_extra_of_the_package_has_a_row() -> None:
    """By the packages that the extras name, but those of tests and documents."""
    settings = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())
    extras = settings["project"]["optional-dependencies"]
    named = {
        re.split("[>=;<[ ]", one)[0]
        for extra, ones in extras.items()
        if extra not in ("dev", "browser", "docs")
        for one in ones
    }
    assert named - {"opentelemetry-exporter-otlp-proto-http"} <= set(report())


@pytest.mark.parametrize(
    ("missing", "sentence"),
    [
        ((), "All is well for pdserve demo"),
        (("/dev/shm",), "another --connector"),
        (("attention: cpu",), "install a C"),
    ],
)
def test_verdict(missing: tuple[str, ...], sentence: str) -> None:
    names = ("/dev/shm", "attention: cpu", "attention: reference")
    assert sentence in doctor.verdict([doctor.Finding(name, name not in missing, "", "") for name in names])


def test_a_report_in_a_file_is_not_cut(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    package = doctor.Finding("mooncake-transfer-engine-non-cuda", True, "0.3.13", "mooncake://, with libibverbs1")
    monkeypatch.setattr(doctor, "collect_findings", lambda: [package])
    doctor.doctor()
    assert "✓ │ mooncake-transfer-engine-non-cuda │ 0.3.13 │ mooncake://, with libibverbs1" in capsys.readouterr().out


@pytest.mark.parametrize(("free", "is_enough", "detail"), [(64 << 20, True, "64 MiB"), (1 << 20, False, "1 MiB")])
def test_the_demo_fits_into_the_shared_memory_of_a_container(
    free: int, is_enough: bool, detail: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("shutil.disk_usage", lambda path: SimpleNamespace(free=free))
    assert report()["/dev/shm"] == (is_enough, f"{detail} free")
