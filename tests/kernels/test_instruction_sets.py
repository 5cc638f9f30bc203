"""The kernels' tests on other instruction sets than this processor's best one, each in a process of its own.

AMX is emulated (amx_emulation.h): its rounding and the code around it are tested, its speed is not.
"""

import os
import platform
import subprocess
import sys
from pathlib import Path

import pytest

from pdserve.kernels import native

FOLDER = Path(__file__).parent
EMULATE_AMX = f"-DPDSERVE_EMULATE_AMX -I{FOLDER}"
X86 = platform.machine() == "x86_64"
NEEDS_AVX512 = pytest.mark.skipif("avx512_bf16" not in native.cpu_features(), reason="no AVX-512 with bfloat16")


def run_tests(flags: str, *arguments: str, **variables: str) -> str:
    """Run pytest with kernels that are compiled with further flags. Returns the last line of its output."""
    environment = {**os.environ, "PDSERVE_KERNEL_FLAGS": flags, **variables}
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-v", "-x", *arguments]
    completed = subprocess.run(command, cwd=FOLDER.parent.parent, env=environment, capture_output=True, text=True)
    assert completed.returncode == 0, completed.stdout + completed.stderr
    return completed.stdout.splitlines()[-1]


@pytest.mark.slow
@pytest.mark.skipif(not X86, reason="these are instruction sets of x86-64")
@pytest.mark.parametrize("march", ["x86-64-v2", "x86-64-v3", pytest.param("skylake-avx512", marks=NEEDS_AVX512)])
@pytest.mark.usefixtures("cpu_kernel")
def test_vector_widths(march: str) -> None:
    """Vectors of 4, 8 and 16 elements, without products of pairs, which this processor may have."""
    selected = "own_history or head_sizes or large_scores"
    summary = run_tests(f"-march={march}", "-k", selected, str(FOLDER / "test_cpu.py"))
    assert "passed" in summary and "skipped" not in summary


@pytest.mark.slow
@NEEDS_AVX512
@pytest.mark.usefixtures("cpu_kernel")
def test_amx() -> None:
    selected = "bfloat16 or dtype0 or dtype1 or product or leading or gated"
    files = [str(FOLDER / name) for name in ("test_cpu.py", "test_linear.py")]
    summary = run_tests(EMULATE_AMX, "-k", selected, *files)
    assert "passed" in summary and "skipped" not in summary


@pytest.mark.slow
@pytest.mark.parametrize(
    ("flags", "onednn", "aten", "mkl"),
    [
        ("-march=x86-64-v3", "AVX2", "avx2", "AVX2"),
        ("-march=skylake-avx512", "AVX512_CORE", "avx512", "AVX512"),
        (EMULATE_AMX, "AVX512_CORE_BF16", "avx512", "AVX512"),
        ("", "ALL", "default", "SSE4_2"),
    ],
)
@NEEDS_AVX512
@pytest.mark.usefixtures("cpu_kernel")
def test_rows(flags: str, onednn: str, aten: str, mkl: str) -> None:
    """A row does not depend on the batch, on whichever instructions libraries and kernels agree or do not."""
    engine = FOLDER.parent / "engine"
    selected = "(batch or history or few_rows or class) and not gemma and not mistral and not phi3 and not olmo2"
    files = [FOLDER / "test_linear.py", engine / "test_rows.py", engine / "cpu_fusion" / "test_experts.py"]
    variables = {"ONEDNN_MAX_CPU_ISA": onednn, "ATEN_CPU_CAPABILITY": aten, "MKL_ENABLE_INSTRUCTIONS": mkl}
    summary = run_tests(flags, "-k", selected, *map(str, files), **variables)
    assert "passed" in summary and "skipped" not in summary
