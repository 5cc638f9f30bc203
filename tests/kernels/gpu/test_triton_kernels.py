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


@pytest.mark.long
@pytest.mark.parametrize(
    ("name", "marked"),
    [
        ("triton", "not slow"),
        ("elementwise", "not slow"),
        ("flash", "not slow"),
        pytest.param("triton", "slow", marks=pytest.mark.slow),
        pytest.param("elementwise", "slow", marks=pytest.mark.slow),
    ],
)
def test_equal_to_the_reference(name: str, marked: str) -> None:
    pytest.importorskip("triton")
    cases = Path(__file__).with_name(f"{name}_cases.py")
    environment = dict(os.environ)
    if not torch.cuda.is_available() or name == "flash":
        environment |= {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    completed = subprocess.run(
        [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "--import-mode=importlib", "-m", marked, str(cases)],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
        timeout=1200,
    )
    assert completed.returncode == 0, completed.stdout[-4000:] + completed.stderr[-2000:]
