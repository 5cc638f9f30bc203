"""Scheduling policies fcfs and priority, in each role."""

import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from pdserve.proto import pdserve_pb2 as pb

PRIORITIES = {"a": 1, "b": 2, "c": 0, "d": 1}


def finish_order(driver: Any, count: int) -> list[str]:
    """Return the request ids in the order in which the requests finish."""
    driver.run_until(lambda outputs: sum(bool(output.finish_reason) for output in outputs) == count)
    return [output.request_id for output in driver.outputs if output.finish_reason]


@pytest.mark.parametrize("phase", [pb.BOTH, pb.PREFILL])
@pytest.mark.parametrize(("policy", "order"), [("fcfs", "abcd"), ("priority", "cadb")])
def test_requests_run_in_the_order_of_the_policy(
    phase: "pb.Phase", policy: str, order: str, checkpoint: Callable[..., Path], make_instance: Callable[..., Any]
) -> None:
    settings = {
        "num_blocks": 16,
        "max_num_seqs": 1,
        "scheduling_policy": policy,
        "connector": f"memory://{uuid.uuid4().hex}?timeout=600",
    }
    driver = make_instance(model=str(checkpoint("llama")), **settings)
    for i, (name, priority) in enumerate(PRIORITIES.items()):
        driver.submit(name, [i] * 9, 1, phase, priority=priority)
    assert "".join(finish_order(driver, 4)) == order


@pytest.mark.parametrize(("policy", "order"), [("fcfs", "abcd"), ("priority", "cadb")])
def test_decode_reserves_blocks_in_the_order_of_the_policy(
    policy: str, order: str, checkpoint: Callable[..., Path], make_instance: Callable[..., Any]
) -> None:
    driver = make_instance(
        model=str(checkpoint("llama")),
        num_blocks=5,
        scheduling_policy=policy,
        connector=f"memory://{uuid.uuid4().hex}?timeout=600",
    )
    driver.submit("first", [9] * 40, 2, pb.DECODE)
    for i, (name, priority) in enumerate(PRIORITIES.items()):
        driver.submit(name, [i] * 40, 2, pb.DECODE, priority=priority)
    for name in ["first", *PRIORITIES]:
        driver.instance.hand_over("router", pb.HandOver(request_id=name, final=True, first_token=3))
    assert "".join(finish_order(driver, 5)) == f"first{order}"
