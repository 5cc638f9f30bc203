"""Cancellation during prefill, store, load and decode: the request ends at once and releases its blocks and leases."""

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from pdserve.kv_transfer.connectors.shm.connector import count_leases
from pdserve.lifetime import RELEASED
from pdserve.proto import pdserve_pb2 as pb
from tests.outputs import is_stored

PROMPT = [(i * i + i) % 256 for i in range(320)]
BLOCKS = len(PROMPT) // 16


class Gate:
    """Hook for a store that blocks its callers until the gate is opened."""

    def __init__(self) -> None:
        self.num_calls, self._called, self._open = 0, threading.Event(), threading.Event()

    def __call__(self) -> None:
        self.num_calls += 1
        self._called.set()
        assert self._open.wait(600)

    def wait_for_call(self) -> None:
        assert self._called.wait(600)

    def open(self) -> None:
        self._open.set()


def cancel(driver: Any) -> None:
    driver.instance.cancel("router", "r")
    driver.instance.run_once(wait=False)


def assert_all_released(driver: Any) -> None:
    driver.run_until_idle()
    assert driver.instance.engine.pool.num_held == driver.instance.num_jobs == driver.instance.transfers.in_flight == 0
    assert [stage for output in driver.outputs for stage in output.stamps].count(RELEASED) == 1


@pytest.mark.parametrize("phase", [pb.PREFILL, pb.BOTH])
def test_cancel_during_prefill(
    phase: "pb.Phase", checkpoint: Callable[..., Path], make_instance: Callable[..., Any], shm_url: str
) -> None:
    driver = make_instance(model=str(checkpoint("llama")), connector=shm_url, num_blocks=64, max_num_batched_tokens=32)
    driver.submit("r", PROMPT, 5, phase)

    def steps() -> float:
        return float(driver.instance.reporter.counts.get("engine_steps", 0))

    driver.run_until(lambda _: steps() == 3)
    cancel(driver)
    assert_all_released(driver)
    assert steps() == 3 and not driver.tokens("r")
    driver.instance.connector.close()  # waits for the outstanding operations
    assert count_leases(shm_url) == 0


def test_cancel_during_decode(checkpoint: Callable[..., Path], make_instance: Callable[..., Any], shm_url: str) -> None:
    driver = make_instance(model=str(checkpoint("llama")), connector=shm_url, num_blocks=64)
    driver.submit("r", PROMPT, 200, pb.BOTH)
    driver.run_until(lambda _: len(driver.tokens("r")) == 3)
    cancel(driver)
    assert_all_released(driver)
    assert len(driver.tokens("r")) == 3


def test_cancel_during_a_store(
    checkpoint: Callable[..., Path], make_instance: Callable[..., Any], controlled_store: Callable[..., Any]
) -> None:
    gate = Gate()
    prefill = make_instance(controlled_store(before_put=gate), model=str(checkpoint("llama")), num_blocks=64)
    prefill.submit("r", PROMPT, 5, pb.PREFILL)
    prefill.run_until(lambda _: prefill.tokens("r") != [])
    gate.wait_for_call()
    cancel(prefill)
    assert prefill.instance.engine.pool.num_held > 0, "a block that is being read must not be reused"
    gate.open()
    assert_all_released(prefill)
    assert gate.num_calls == 1, "the operation ended with the block that was being stored"


def test_cancel_during_a_load(
    checkpoint: Callable[..., Path], make_instance: Callable[..., Any], controlled_store: Callable[..., Any]
) -> None:
    path, values, gate = str(checkpoint("llama")), dict[str, bytes](), Gate()
    prefill = make_instance(controlled_store(values=values), model=path, num_blocks=64)
    prefill.submit("r", PROMPT, 5, pb.PREFILL)
    prefill.run_until(lambda outputs: any(is_stored(output) for output in outputs))
    assert len(values) == BLOCKS
    decode = make_instance(controlled_store(values=values, before_get=gate), model=path, num_blocks=64)
    decode.submit("r", PROMPT, 5, pb.DECODE)
    first = prefill.tokens("r")[0]
    decode.instance.hand_over("router", pb.HandOver(request_id="r", num_blocks=BLOCKS, final=True, first_token=first))
    decode.instance.run_once(wait=False)
    gate.wait_for_call()
    cancel(decode)
    assert decode.instance.engine.pool.num_held > 0, "a block that is being written must not be reused"
    gate.open()
    assert_all_released(decode)
    assert gate.num_calls == 1, "the operation ended with the block that was being loaded"
    assert "unavailable" not in {outcome.value for _, outcome in decode.instance.connector.stats().failures}


def test_cancel_on_decode_releases_the_leases(
    checkpoint: Callable[..., Path], make_instance: Callable[..., Any], shm_url: str
) -> None:
    """Prefill has finished when the request is cancelled, so decode must release the leases."""
    prefill, decode = (
        make_instance(model=str(checkpoint("llama")), connector=shm_url, num_blocks=64) for _ in range(2)
    )
    decode.submit("r", PROMPT, 5, pb.DECODE)
    decode.instance.run_once(wait=False)
    prefill.submit("r", PROMPT, 5, pb.PREFILL)
    prefill.run_until(lambda outputs: any(is_stored(output) for output in outputs))
    assert count_leases(shm_url) == BLOCKS
    decode.instance.hand_over("router", pb.HandOver(request_id="r", num_blocks=BLOCKS, final=True))
    cancel(decode)
    assert_all_released(decode)
    decode.instance.connector.close()
    assert count_leases(shm_url) == 0
