"""Who goes first, by role: the order of arrival, or that of the requests' priorities."""

import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from pdserve.proto import pdserve_pb2 as pb

PRIORITIES = {"a": 1, "b": 2, "c": 0, "d": 1}


def ends(context: Any, count: int) -> list[str]:
    """Requests in the order in which they end."""
    context.until(lambda outputs: sum(bool(output.finish_reason) for output in outputs) == count)
    return [output.request_id for output in context.outputs if output.finish_reason]


@pytest.mark.parametrize("phase", [pb.BOTH, pb.PREFILL])
@pytest.mark.parametrize(("policy", "order"), [("fcfs", "abcd"), ("priority", "cadb")])
def test_one_after_the_other(
    phase: "pb.Phase", policy: str, order: str, checkpoint: Callable[..., Path], context: Callable[..., Any]
) -> None:
    settings = {
        "num_blocks": 16,
        "max_num_seqs": 1,
        "scheduling_policy": policy,
        "connector": f"memory://{uuid.uuid4().hex}?timeout=600",
    }
    one = context(model=str(checkpoint("llama")), **settings)
    for i, (name, priority) in enumerate(PRIORITIES.items()):
        one.submit(name, [i] * 9, 1, phase, priority=priority)
    assert "".join(ends(one, 4)) == order


@pytest.mark.parametrize(("policy", "order"), [("fcfs", "abcd"), ("priority", "cadb")])
def test_decode_reserves_in_this_order(
    policy: str, order: str, checkpoint: Callable[..., Path], context: Callable[..., Any]
) -> None:
    one = context(
        model=str(checkpoint("llama")),
        num_blocks=5,
        scheduling_policy=policy,
        connector=f"memory://{uuid.uuid4().hex}?timeout=600",
    )
    one.submit("first", [9] * 40, 2, pb.DECODE)
    for i, (name, priority) in enumerate(PRIORITIES.items()):
        one.submit(name, [i] * 40, 2, pb.DECODE, priority=priority)
    for name in ["first", *PRIORITIES]:
        one.instance.hand_over("router", pb.HandOver(request_id=name, final=True, first_token=3))
    assert "".join(ends(one, 5)) == f"first{order}"
