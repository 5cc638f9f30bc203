"""What prefill leases over nixl://, and for whom."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from pdserve.proto import pdserve_pb2 as pb


def test_nothing_is_leased_for_a_request_that_no_decode_takes_part_in(
    checkpoint: Callable[..., Path], context: Callable[..., Any]
) -> None:
    pytest.importorskip("nixl", reason="NIXL is not installed: pip install 'pdserve[nixl]'")
    prefill = context(model=str(checkpoint("llama")), connector="nixl://", num_blocks=64)
    prefill.submit("one token", list(range(100)), 1, pb.PREFILL)
    prefill.until(lambda outputs: any(output.finish_reason for output in outputs))
    assert prefill.instance.engine.pool.num_held == 0 and prefill.instance.num_jobs == 0
    prefill.submit("two tokens", list(range(100)), 2, pb.PREFILL)
    prefill.until(lambda outputs: any(output.stored.final for output in outputs))
    assert prefill.instance.engine.pool.num_held == 7
