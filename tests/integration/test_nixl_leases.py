"""Leases of prefill's blocks over nixl://."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from pdserve.proto import pdserve_pb2 as pb
from tests.outputs import is_stored


def test_no_lease_without_a_decode_instance(checkpoint: Callable[..., Path], make_instance: Callable[..., Any]) -> None:
    pytest.importorskip("nixl", reason="NIXL is not installed: pip install -e '.[nixl]'")
    prefill = make_instance(model=str(checkpoint("llama")), connector="nixl://", num_blocks=64)
    prefill.submit("one token", list(range(100)), 1, pb.PREFILL)
    prefill.run_until(lambda outputs: any(output.finish_reason for output in outputs))
    assert prefill.instance.engine.pool.num_held == 0 and prefill.instance.num_jobs == 0
    prefill.submit("two tokens", list(range(100)), 2, pb.PREFILL)
    prefill.run_until(lambda outputs: any(is_stored(output) for output in outputs))
    assert prefill.instance.engine.pool.num_held == 7
