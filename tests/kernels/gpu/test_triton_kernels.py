"""Triton kernels: equal to the reference, on a GPU if there is one, else in Triton's interpreter on the CPU.

Triton reads TRITON_INTERPRET when it is imported, which may have happened in this process, so the cases run in a new one.
Those of flash-attn always run on the CPU, since they are doubles.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch


def run_cases(expression: str, *names: str, interpreted: bool) -> None:
    """Run the cases that pytest's `-m` selects in a new process."""
    pytest.importorskip("triton")
    files = [str(Path(__file__).with_name(f"{name}_cases.py")) for name in names]
    environment = dict(os.environ)
    if interpreted:
        environment |= {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "--import-mode=importlib", "-m", expression]
    completed = subprocess.run(
        [*command, *files], env=environment, capture_output=True, text=True, check=False, timeout=1800
    )
    assert completed.returncode == 0, completed.stdout[-4000:] + completed.stderr[-2000:]


@pytest.mark.until_recorded("kernels/gpu")
@pytest.mark.long
def test_one_case_of_each_feature_equals_the_reference() -> None:
    """Each kernel with and without windows, soft caps, splits and invariance, and at the edges of its tiles."""
    run_cases("not slow", "triton", "elementwise", "flash", interpreted=True)


@pytest.mark.until_recorded("kernels/gpu")
@pytest.mark.long
@pytest.mark.parametrize("name", ["triton", "elementwise", "flash"])
def test_all_cases_equal_the_reference(name: str) -> None:
    """On a GPU; in the interpreter, those that the test above leaves out."""
    interpreted = name == "flash" or not torch.cuda.is_available()
    run_cases("slow" if interpreted else "slow or not slow", name, interpreted=interpreted)
