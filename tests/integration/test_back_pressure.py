"""A store that is slower than prefill: bytes in flight stay bounded, decoding goes on, every request ends right."""

import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from pdserve.proto import pdserve_pb2 as pb

Generate = Callable[[Path, list[list[int]], int], list[list[int]]]

PROMPTS = [[(i * i + k * i) % 256 for i in range(500)] for k in range(1, 7)]
BLOCK_BYTES = 3 * 2 * 2 * 16 * 16 * 4  # of the test models
LIMIT = 12  # blocks


def test_a_slow_store_slows_prefill_and_nothing_else(
    checkpoint: Callable[..., Path], generate: Generate, context: Callable[..., Any], store_in_hand: Callable[..., Any]
) -> None:
    path, held_back = checkpoint("llama"), threading.Event()

    def put() -> None:
        held_back.wait(600)  # however slow prefill is here, the store is slower to begin with
        time.sleep(0.004)

    prefill = context(
        store_in_hand(before_put=put),
        model=str(path),
        num_blocks=512,
        max_num_batched_tokens=64,
        max_inflight_bytes=str(LIMIT * BLOCK_BYTES),
    )
    transfers = prefill.instance.transfers
    for i, prompt in enumerate(PROMPTS):
        prefill.submit(str(i), prompt, 5, pb.PREFILL)
    most, waited = 0, 0

    def done(outputs: list[pb.Output]) -> bool:
        nonlocal most, waited
        most, waited = max(most, transfers.in_flight), max(waited, transfers.waiting)
        if transfers.has_waiting_stores:
            held_back.set()
        return sum(output.stored.final for output in outputs) == len(PROMPTS)

    prefill.until(done)
    prefill.until_idle()
    assert 0 < most <= LIMIT
    assert 0 < waited <= 64 // 16 + 1, "one step's blocks"
    for i, prompt in enumerate(PROMPTS):
        assert prefill.tokens(str(i)) == generate(path, [prompt], 1)[0]
    stored = {o.request_id: o.stored.num_blocks for o in prefill.outputs if o.HasField("stored")}
    assert set(stored.values()) == {32}, "all of every prompt, although the store took seconds"
    counters = prefill.instance.heartbeat.counters
    assert counters["prefill_steps_held_back"] > 0
    assert counters["kv_transfer_bytes_in_flight"] == counters["kv_transfer_bytes_waiting"] == 0


def test_decoding_goes_on_while_prefill_is_held_back(
    checkpoint: Callable[..., Path], generate: Generate, context: Callable[..., Any], store_in_hand: Callable[..., Any]
) -> None:
    path, go_on = checkpoint("llama"), threading.Event()
    both = context(
        store_in_hand(before_put=lambda: go_on.wait(600)),
        model=str(path),
        num_blocks=512,
        max_num_batched_tokens=64,
        max_inflight_bytes=str(LIMIT * BLOCK_BYTES),
        store_generated="on",
    )
    both.submit("own", PROMPTS[0][:100], 150, pb.BOTH)
    both.until(lambda outputs: len(both.tokens("own")) > 3)
    for i, prompt in enumerate(PROMPTS[1:4]):
        both.submit(str(i), prompt, 5, pb.PREFILL)
    both.until(lambda outputs: any(o.finish_reason for o in outputs))
    assert both.tokens("own") == generate(path, [PROMPTS[0][:100]], 150)[0]
    instance = both.instance
    assert instance.transfers.has_waiting_stores and not any(both.tokens(str(i)) for i in range(3))
    assert instance.transfers.in_flight <= LIMIT
    instance._update_heartbeat()
    assert instance.heartbeat.counters["kv_transfer_bytes_waiting"] > 0
    assert instance.heartbeat.counters["store_back_skipped_blocks"] > 0
    go_on.set()
    both.until(lambda outputs: sum(output.stored.final for output in outputs) == 3)
    both.until_idle()
    assert instance.engine.pool.num_held == 0


def test_a_store_that_hangs_for_ever_ends_nothing_but_itself(
    checkpoint: Callable[..., Path], generate: Generate, context: Callable[..., Any], store_in_hand: Callable[..., Any]
) -> None:
    """Stores end at their deadline, what waits behind the gap is dropped, and decode is told what there is: nothing."""
    path, closing = checkpoint("llama"), threading.Event()
    store = store_in_hand(before_put=lambda: closing.wait(600))
    prefill = context(
        store,
        model=str(path),
        num_blocks=512,
        max_num_batched_tokens=64,
        max_inflight_bytes=str(LIMIT * BLOCK_BYTES),
    )
    for i, prompt in enumerate(PROMPTS[:3]):
        prefill.submit(str(i), prompt, 5, pb.PREFILL)
    prefill.submit("gone", PROMPTS[4], 5, pb.PREFILL)
    prefill.until(lambda outputs: prefill.instance.transfers.has_waiting_stores)
    prefill.instance.cancel("router", "gone")
    store.timeout = 0.0
    for _, _, operation in list(store._watchdog._operations):
        operation.complete()  # as the watchdog does at the deadline
    prefill.until(lambda outputs: sum(output.stored.final for output in outputs) == 3)
    prefill.until_idle()
    for i, prompt in enumerate(PROMPTS[:3]):
        assert prefill.tokens(str(i)) == generate(path, [prompt], 1)[0]
    assert not any(output.stored.num_blocks for output in prefill.outputs)
    assert prefill.instance.engine.pool.num_held == 0
    failed = prefill.instance.connector.stats().failures
    assert {outcome.value for _, outcome in failed} <= {"unavailable", "cancelled"}
    assert sum(failed.values()) <= 3 * LIMIT, "what would have come after the gap was not even tried"
    closing.set()
