"""The Triton kernels: on a GPU where there is one, else in Triton's interpreter, which computes the same on the CPU.

Triton reads TRITON_INTERPRET when it is imported, and something in this process may have imported it before: so the cases
run in a process of their own, all together.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch


def test_equal_to_the_reference() -> None:
    pytest.importorskip("triton")
    cases = Path(__file__).with_name("triton_cases.py")
    environment = dict(os.environ)
    if not torch.cuda.is_available():
        environment |= {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "--import-mode=importlib", str(cases)],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
        timeout=1200,
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
