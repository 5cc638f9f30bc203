"""Kernel selection: the fastest available kernel, and logged fallbacks to the reference."""

import logging
import sys

import pytest
import torch

from pdserve.kernels import cpu, gpu, reference
from pdserve.kernels.attention import KernelUnavailable, select_kernel

CPU = torch.device("cpu")
CUDA = torch.device("cuda")


@pytest.mark.usefixtures("cpu_kernel")
def test_auto_selects_the_compiled_kernel() -> None:
    assert select_kernel("auto", CPU) is cpu
    assert select_kernel("reference", CPU) is reference


@pytest.mark.usefixtures("unbuilt_library")
def test_auto_falls_back_without_a_compiler(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setenv("PATH", "")
    assert select_kernel("auto", CPU) is reference
    assert [record.levelno for record in caplog.records] == [logging.WARNING]
    assert "no C++ compiler on the path" in caplog.text
    with pytest.raises(KernelUnavailable, match="no C"):
        select_kernel("cpu", CPU)


def test_auto_falls_back_without_triton(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setitem(sys.modules, "triton", None)
    monkeypatch.delitem(sys.modules, "pdserve.kernels.gpu.triton_kernels", raising=False)
    monkeypatch.delattr(gpu, "triton_kernels", raising=False)
    assert select_kernel("auto", CUDA) is reference
    assert "needs triton" in caplog.text
    with pytest.raises(KernelUnavailable, match="needs triton"):
        select_kernel("triton", CUDA)
    with pytest.raises(KernelUnavailable, match="needs triton"):
        select_kernel("auto", CUDA, batch_invariant="on")
    with pytest.raises(KernelUnavailable, match="on the CPU"):
        select_kernel("cpu", CUDA)


def test_batch_invariance_selects_a_variant_of_the_kernel() -> None:
    pytest.importorskip("triton")
    names = {setting: select_kernel("auto", CUDA, setting).NAME for setting in ("auto", "on", "off")}
    assert names == {"auto": "triton", "on": "triton-invariant", "off": "triton"}
    assert select_kernel("reference", CPU, "auto") is reference
    with pytest.raises(KernelUnavailable, match="--batch-invariant on: not with the reference kernel"):
        select_kernel("reference", CPU, "on")
