"""The kernels' tests on other instruction sets than this processor's best one, each in a process of its own.

AMX is emulated (kernels/amx_emulation.h): its rounding and the code around it are tested, its speed is not.
"""

import os
import platform
import subprocess
import sys
from pathlib import Path

import pytest

from pdserve.kernels import native

FOLDER = Path(__file__).parent
X86 = platform.machine() == "x86_64"


def run_tests(flags: str, *arguments: str) -> str:
    """Run pytest with kernels that are compiled with further flags. Returns the last line of its output."""
    environment = {**os.environ, "PDSERVE_KERNEL_FLAGS": flags}
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-v", "-x", *arguments]
    completed = subprocess.run(command, cwd=FOLDER.parent.parent, env=environment, capture_output=True, text=True)
    assert completed.returncode == 0, completed.stdout + completed.stderr
    return completed.stdout.splitlines()[-1]


@pytest.mark.slow
@pytest.mark.skipif(not X86, reason="these are instruction sets of x86-64")
@pytest.mark.parametrize("march", ["x86-64-v2", "x86-64-v3"])
@pytest.mark.usefixtures("cpu_kernel")
def test_vector_widths(march: str) -> None:
    """Vectors of 4 and of 8 elements; this processor may have 16."""
    selected = "own_history or head_sizes or large_scores"
    summary = run_tests(f"-march={march}", "-k", selected, str(FOLDER / "test_cpu.py"))
    assert "passed" in summary and "skipped" not in summary


@pytest.mark.slow
@pytest.mark.skipif("avx512_bf16" not in native.cpu_features(), reason="this processor has no AVX-512 with bfloat16")
@pytest.mark.usefixtures("cpu_kernel")
def test_amx() -> None:
    selected = "bfloat16 or dtype1 or product or batch or leading or gated"
    files = [str(FOLDER / name) for name in ("test_cpu.py", "test_linear.py")]
    summary = run_tests("-DPDSERVE_EMULATE_AMX", "-k", selected, *files)
    assert "passed" in summary and "skipped" not in summary
