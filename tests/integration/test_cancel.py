"""A request that is cancelled ends at once: in the middle of its prompt, of a transfer, of its output. Nothing is held."""

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from pdserve.kv_transfer.connectors.shm import count_leases
from pdserve.lifetime import RELEASED
from pdserve.proto import pdserve_pb2 as pb

PROMPT = [(i * i + i) % 256 for i in range(320)]
BLOCKS = len(PROMPT) // 16


class AdmissionController:
    """Lets those who come wait until it is opened."""

    def __init__(self) -> None:
        self.come, self._somebody, self._open = 0, threading.Event(), threading.Event()

    def __call__(self) -> None:
        self.come += 1
        self._somebody.set()
        assert self._open.wait(600)

    def await_somebody(self) -> None:
        assert self._somebody.wait(600)

    def open(self) -> None:
        self._open.set()


def cancel(context: Any) -> None:
    context.instance.cancel("router", "r")
    context.instance.run_once(wait=False)


def assert_nothing_is_left(context: Any) -> None:
    context.until_idle()
    assert (
        context.instance.engine.pool.num_held == context.instance.num_jobs == context.instance.transfers.in_flight == 0
    )
    assert [stamp.stage for output in context.outputs for stamp in output.stamps].count(RELEASED) == 1


@pytest.mark.parametrize("phase", [pb.PREFILL, pb.BOTH])
def test_while_it_is_computed(
    phase: "pb.Phase", checkpoint: Callable[..., Path], context: Callable[..., Any], shm_url: str
) -> None:
    one = context(model=str(checkpoint("llama")), connector=shm_url, num_blocks=64, max_num_batched_tokens=32)
    one.submit("r", PROMPT, 5, phase)

    def steps() -> float:
        return float(one.instance._counts.get("engine_steps", 0))

    one.until(lambda _: steps() == 3)
    cancel(one)
    assert_nothing_is_left(one)
    assert steps() == 3 and not one.tokens("r")
    one.instance.connector.close()  # and with it waits for what it has asked the store for
    assert count_leases(shm_url) == 0


def test_while_it_is_decoded(checkpoint: Callable[..., Path], context: Callable[..., Any], shm_url: str) -> None:
    one = context(model=str(checkpoint("llama")), connector=shm_url, num_blocks=64)
    one.submit("r", PROMPT, 200, pb.BOTH)
    one.until(lambda _: len(one.tokens("r")) == 3)
    cancel(one)
    assert_nothing_is_left(one)
    assert len(one.tokens("r")) == 3


def test_in_the_middle_of_a_store(
    checkpoint: Callable[..., Path], context: Callable[..., Any], store_in_hand: Callable[..., Any]
) -> None:
    admission = AdmissionController()
    prefill = context(store_in_hand(before_put=admission), model=str(checkpoint("llama")), num_blocks=64)
    prefill.submit("r", PROMPT, 5, pb.PREFILL)
    prefill.until(lambda _: prefill.tokens("r") != [])
    admission.await_somebody()
    cancel(prefill)
    assert prefill.instance.engine.pool.num_held > 0, "what is being read cannot be given to others yet"
    admission.open()
    assert_nothing_is_left(prefill)
    assert admission.come == 1, "it ended with the block that was being stored"


def test_in_the_middle_of_a_load(
    checkpoint: Callable[..., Path], context: Callable[..., Any], store_in_hand: Callable[..., Any]
) -> None:
    path, values, admission = str(checkpoint("llama")), dict[str, bytes](), AdmissionController()
    prefill = context(store_in_hand(values=values), model=path, num_blocks=64)
    prefill.submit("r", PROMPT, 5, pb.PREFILL)
    prefill.until(lambda outputs: any(output.stored.final for output in outputs))
    assert len(values) == BLOCKS
    decode = context(store_in_hand(values=values, before_get=admission), model=path, num_blocks=64)
    decode.submit("r", PROMPT, 5, pb.DECODE)
    first = prefill.tokens("r")[0]
    decode.instance.hand_over("router", pb.HandOver(request_id="r", num_blocks=BLOCKS, final=True, first_token=first))
    decode.instance.run_once(wait=False)
    admission.await_somebody()
    cancel(decode)
    assert decode.instance.engine.pool.num_held > 0, "what is being written cannot be given to others yet"
    admission.open()
    assert_nothing_is_left(decode)
    assert admission.come == 1, "it ended with the block that was being loaded"
    assert "unavailable" not in {outcome.value for _, outcome in decode.instance.connector.stats().failures}


def test_leases_end_too(checkpoint: Callable[..., Path], context: Callable[..., Any], shm_url: str) -> None:
    """Decode ends them, as prefill was done when it was cancelled."""
    prefill, decode = (context(model=str(checkpoint("llama")), connector=shm_url, num_blocks=64) for _ in range(2))
    decode.submit("r", PROMPT, 5, pb.DECODE)
    decode.instance.run_once(wait=False)
    prefill.submit("r", PROMPT, 5, pb.PREFILL)
    prefill.until(lambda outputs: any(output.stored.final for output in outputs))
    assert count_leases(shm_url) == BLOCKS
    decode.instance.hand_over("router", pb.HandOver(request_id="r", num_blocks=BLOCKS, final=True))
    cancel(decode)
    assert_nothing_is_left(decode)
    decode.instance.connector.close()
    assert count_leases(shm_url) == 0
