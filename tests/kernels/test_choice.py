"""Which kernel runs, and what is said when another one had to take over."""

import logging
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from pdserve.kernels import cpu, reference
from pdserve.kernels.attention import KernelUnavailable, choose

CPU = torch.device("cpu")
CUDA = torch.device("cuda")


@pytest.fixture
def not_built_yet(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A process that has loaded no library, with an empty cache folder."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(cpu, "library", cpu.library.__wrapped__)
    return tmp_path


@pytest.mark.usefixtures("cpu_kernel")
def test_auto_is_the_compiled_kernel() -> None:
    assert choose("auto", CPU) is cpu
    assert choose("reference", CPU) is reference


@pytest.mark.usefixtures("not_built_yet")
def test_without_a_compiler(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setenv("PATH", "")
    assert choose("auto", CPU) is reference
    assert [record.levelno for record in caplog.records] == [logging.WARNING]
    assert "no C++ compiler on the path" in caplog.text
    with pytest.raises(KernelUnavailable, match="no C"):
        choose("cpu", CPU)


def test_with_a_compiler_that_fails(
    not_built_yet: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    fake = not_built_yet / "c++"
    fake.write_text('#!/bin/sh\n[ "$1" = --version ] && exit\necho "error: unknown target" >&2\nexit 1\n')
    fake.chmod(0o755)
    monkeypatch.setenv("PATH", str(not_built_yet))
    assert choose("auto", CPU) is reference
    assert "c++ failed: error: unknown target" in caplog.text
    assert not [path for path in (not_built_yet / "pdserve" / "kernels").iterdir()], "nothing is left behind"


def test_without_a_place_to_write(
    not_built_yet: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    (not_built_yet / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(not_built_yet / "file"))
    assert choose("auto", CPU) is reference
    assert len(caplog.records) == 1 and "file" in caplog.text


@pytest.mark.usefixtures("cpu_kernel")
def test_several_instances_build_at_once(not_built_yet: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fast = (*cpu.FLAGS, "-O0")  # how good the code is does not matter
    monkeypatch.setattr(cpu, "FLAGS", fast)
    code = f"from pdserve.kernels import cpu; cpu.FLAGS = {fast}; cpu.library()"
    environment = os.environ | {"XDG_CACHE_HOME": str(not_built_yet)}
    both = [subprocess.Popen([sys.executable, "-c", code], env=environment) for _ in range(2)]
    assert [process.wait() for process in both] == [0, 0]
    assert len(list((not_built_yet / "pdserve" / "kernels").iterdir())) == 1
    before = os.stat(next((not_built_yet / "pdserve" / "kernels").iterdir()))
    cpu.library()
    after = os.stat(next((not_built_yet / "pdserve" / "kernels").iterdir()))
    assert before.st_ino == after.st_ino, "built again"


@pytest.mark.usefixtures("cpu_kernel")
def test_one_openmp_runtime() -> None:
    """In a fresh process: other tests may have loaded anything."""
    code = (
        "from pdserve.kernels import cpu; cpu.library(); import pathlib\n"
        "lines = pathlib.Path('/proc/self/maps').read_text().splitlines()\n"
        "print(*{line.split('/')[-1] for line in lines if 'libgomp' in line or 'libiomp' in line or 'libomp' in line})"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert len(done.stdout.split()) == 1


@pytest.mark.usefixtures("cpu_kernel")
@pytest.mark.skipif("amx_bf16" not in cpu._cpu(), reason="this processor has no matrix instructions")
def test_without_matrix_instructions() -> None:
    """The system lets no process use them that has a signal stack too small for their registers."""
    code = """
import ctypes, logging
class Stack(ctypes.Structure):
    _fields_ = [("address", ctypes.c_void_p), ("flags", ctypes.c_int), ("size", ctypes.c_size_t)]
memory = ctypes.create_string_buffer(8192)
assert ctypes.CDLL(None).sigaltstack(ctypes.byref(Stack(ctypes.addressof(memory), 0, len(memory))), None) == 0
logging.basicConfig(format="%(message)s")
import torch
from pdserve.kernels import cpu
from pdserve.kernels.batch import PagedBatch
pool = torch.ones((1, 1, 2, 1, 8, 32), dtype=torch.bfloat16)
one = torch.tensor([[0]])
batch = PagedBatch(pool, one[0], one, [5], [5], torch.tensor([5]), cpu)
print(cpu.attend(torch.ones((5, 2, 32), dtype=torch.bfloat16), batch.layer(0), batch, 1.0, None, None).unique().tolist())
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[1.0]\n"
    assert "do not let it use AMX" in done.stderr


def test_on_a_gpu_without_triton(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setitem(sys.modules, "triton", None)
    monkeypatch.delitem(sys.modules, "pdserve.kernels.gpu.triton_kernels", raising=False)
    assert choose("auto", CUDA) is reference
    assert "needs triton" in caplog.text
    with pytest.raises(KernelUnavailable, match="needs triton"):
        choose("triton", CUDA)
    with pytest.raises(KernelUnavailable, match="on the CPU"):
        choose("cpu", CUDA)
