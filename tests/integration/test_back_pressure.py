"""Back-pressure of a store slower than prefill: bytes in flight stay bounded, decoding continues, all tokens are correct."""

import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from pdserve.output import Output
from pdserve.proto import pdserve_pb2 as pb
from tests.outputs import is_stored, num_stored

Generate = Callable[[Path, list[list[int]], int], list[list[int]]]

PROMPTS = [[(i * i + k * i) % 256 for i in range(500)] for k in range(1, 7)]
BLOCK_BYTES = 3 * 2 * 2 * 16 * 16 * 4  # of the test models: layers, K and V, heads, tokens, dimensions, float32
LIMIT = 12  # blocks


def test_slow_store_slows_only_prefill(
    checkpoint: Callable[..., Path],
    generate: Generate,
    make_instance: Callable[..., Any],
    controlled_store: Callable[..., Any],
) -> None:
    path, stores_queued = checkpoint("llama", dtype="float32"), threading.Event()

    def put() -> None:
        stores_queued.wait(600)  # the store starts only after prefill was held back by its limit, on any machine
        time.sleep(0.004)

    prefill = make_instance(
        controlled_store(before_put=put),
        model=str(path),
        num_blocks=512,
        max_num_batched_tokens=64,
        max_inflight_bytes=str(LIMIT * BLOCK_BYTES),
    )
    transfers = prefill.instance.transfers
    for i, prompt in enumerate(PROMPTS):
        prefill.submit(str(i), prompt, 5, pb.PREFILL)
    max_in_flight, max_waiting = 0, 0

    def done(outputs: list[Output]) -> bool:
        nonlocal max_in_flight, max_waiting
        max_in_flight, max_waiting = max(max_in_flight, transfers.in_flight), max(max_waiting, transfers.waiting)
        if prefill.instance.reporter.counts.get("prefill_steps_held_back"):
            stores_queued.set()
        return sum(is_stored(output) for output in outputs) == len(PROMPTS)

    prefill.run_until(done)
    prefill.run_until_idle()
    assert 0 < max_in_flight <= LIMIT
    assert 0 < max_waiting <= 64 // 16 + 1, "the blocks of one step"
    for i, prompt in enumerate(PROMPTS):
        assert prefill.tokens(str(i)) == generate(path, [prompt], 1)[0]
    stored = {o.request_id: o.stored.num_blocks for o in prefill.outputs if o.stored is not None}
    assert set(stored.values()) == {32}, "every block of every prompt is stored"
    counters = prefill.instance.reporter.heartbeat.counters
    assert counters["prefill_steps_held_back"] > 0
    assert counters["kv_transfer_bytes_in_flight"] == counters["kv_transfer_bytes_waiting"] == 0


def test_decoding_continues_while_prefill_is_throttled(
    checkpoint: Callable[..., Path],
    generate: Generate,
    make_instance: Callable[..., Any],
    controlled_store: Callable[..., Any],
) -> None:
    path, resume = checkpoint("llama", dtype="float32"), threading.Event()
    both = make_instance(
        controlled_store(before_put=lambda: resume.wait(600)),
        model=str(path),
        num_blocks=512,
        max_num_batched_tokens=64,
        max_inflight_bytes=str(LIMIT * BLOCK_BYTES),
        store_generated="on",
    )
    both.submit("own", PROMPTS[0][:100], 150, pb.BOTH)
    both.run_until(lambda outputs: len(both.tokens("own")) > 3)
    for i, prompt in enumerate(PROMPTS[1:4]):
        both.submit(str(i), prompt, 5, pb.PREFILL)
    both.run_until(lambda outputs: any(o.finish_reason for o in outputs))
    assert both.tokens("own") == generate(path, [PROMPTS[0][:100]], 150)[0]
    instance = both.instance
    assert instance.transfers.has_waiting_stores and not any(both.tokens(str(i)) for i in range(3))
    assert instance.transfers.in_flight <= LIMIT
    assert instance.run_once(wait=False), "nothing can be done, so the heartbeat is updated"
    assert instance.reporter.heartbeat.counters["kv_transfer_bytes_waiting"] > 0
    assert instance.reporter.heartbeat.counters["store_back_skipped_blocks"] > 0
    resume.set()
    both.run_until(lambda outputs: sum(is_stored(output) for output in outputs) == 3)
    both.run_until_idle()
    assert instance.engine.pool.num_held == 0


def test_hanging_store_fails_only_its_own_operations(
    checkpoint: Callable[..., Path],
    generate: Generate,
    make_instance: Callable[..., Any],
    controlled_store: Callable[..., Any],
) -> None:
    """Stores time out, the stores queued behind them are dropped, and the hand-over reports 0 stored blocks."""
    path, closing = checkpoint("llama", dtype="float32"), threading.Event()
    store = controlled_store(before_put=lambda: closing.wait(600))
    prefill = make_instance(
        store,
        model=str(path),
        num_blocks=512,
        max_num_batched_tokens=64,
        max_inflight_bytes=str(LIMIT * BLOCK_BYTES),
    )
    for i, prompt in enumerate(PROMPTS[:3]):
        prefill.submit(str(i), prompt, 5, pb.PREFILL)
    prefill.submit("cancelled", PROMPTS[4], 5, pb.PREFILL)
    prefill.run_until(lambda outputs: prefill.instance.transfers.has_waiting_stores)
    prefill.instance.cancel("router", "cancelled")
    store.timeout = 0.0
    for _, _, operation in list(store._watchdog._operations):
        operation.complete()  # as the watchdog does at the deadline
    prefill.run_until(lambda outputs: sum(is_stored(output) for output in outputs) == 3)
    prefill.run_until_idle()
    for i, prompt in enumerate(PROMPTS[:3]):
        assert prefill.tokens(str(i)) == generate(path, [prompt], 1)[0]
    assert not any(map(num_stored, prefill.outputs))
    assert prefill.instance.engine.pool.num_held == 0
    failed = prefill.instance.connector.stats().failures
    assert {outcome.value for _, outcome in failed} <= {"unavailable", "cancelled"}
    assert sum(failed.values()) <= 3 * LIMIT, "blocks behind a failed one are not tried"
    closing.set()
