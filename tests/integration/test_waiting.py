"""A prefilled prompt that waits for room on decode: its KV stays in the store for longer than its first lease."""

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from pdserve.counters import series
from pdserve.proto import pdserve_pb2 as pb
from tests.outputs import is_stored

Generate = Callable[[Path, list[list[int]], int], list[list[int]]]

PROMPT = [(i * i + 3 * i) % 250 for i in range(100)]  # 7 blocks, the last one partial
TOKENS = 6
LEASE_S = 2.0
OTHERS = [[(i * i + k * i) % 250 for i in range(700)] for k in range(5, 13)]  # more than the stores hold


def run_together(instances: list[Any], done: Callable[[], bool]) -> None:
    while not done():
        for one in instances:
            one.instance.run_once(wait=False)


def waits_on(decode: Any, seconds: float) -> None:
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        decode.instance.run_once(wait=True)


def prefilled(prefill: Any) -> pb.HandOver:
    """Have a prompt prefilled, and return what decode is told of it."""
    prefill.submit("waits", PROMPT, TOKENS, pb.PREFILL)
    prefill.run_until(lambda outputs: any(map(is_stored, outputs)))
    stored = [output.stored for output in prefill.outputs if output.stored is not None]
    tickets = [ticket for each in stored for ticket in each.tickets]
    (token,) = prefill.tokens("waits")
    blocks = stored[-1].num_blocks
    return pb.HandOver(request_id="waits", num_blocks=blocks, first_token=token, final=True, tickets=tickets)


def ended(instance: Any, request_id: str) -> bool:
    return any(output.request_id == request_id and output.finish_reason for output in instance.outputs)


@pytest.mark.parametrize(
    "connector_url", ["shm?size=1MiB", "file?max_bytes=1MiB", "redis?ttl=2", "nixl"], indirect=True
)
def test_a_prompt_that_waits_longer_than_its_lease_is_loaded(
    connector_url: str, checkpoint: Callable[..., Path], generate: Generate, make_instance: Callable[..., Any]
) -> None:
    path = checkpoint("llama")
    settings = {"model": str(path), "connector": connector_url, "num_blocks": 64, "max_num_batched_tokens": 128}
    prefill, decode = (make_instance(**settings, lease_seconds=LEASE_S) for _ in range(2))
    hand_over = prefilled(prefill)
    taken = decode.instance.engine.pool.allocate(60)
    decode.submit("waits", PROMPT, TOKENS, pb.DECODE)
    decode.instance.hand_over("router", hand_over)
    waits_on(decode, 1.5 * LEASE_S)
    for number, prompt in enumerate(OTHERS):  # fill the store, or for nixl:// prefill's pool
        prefill.submit(f"other {number}", prompt, 1, pb.PREFILL)
    run_together([prefill, decode], lambda: all(ended(prefill, f"other {k}") for k in range(len(OTHERS))))
    assert not decode.outputs and decode.instance.reporter.counts["kv_leases_prolonged"] >= 7
    decode.instance.engine.pool.release(taken)
    run_together([prefill, decode], lambda: ended(decode, "waits"))
    assert hand_over.first_token == generate(path, [PROMPT], TOKENS)[0][0]
    assert decode.tokens("waits") == generate(path, [PROMPT], TOKENS)[0][1:]
    counts = decode.instance.reporter.counts
    tokens = {source: counts[series("prompt_tokens_by_source", source=source)] for source in ("loaded", "computed")}
    assert tokens == {"loaded": len(PROMPT), "computed": 0}


def test_a_lease_that_cannot_be_prolonged_is_counted_and_what_is_lost_computed(
    controlled_store: Any, checkpoint: Callable[..., Path], generate: Generate, make_instance: Callable[..., Any]
) -> None:
    path, values = checkpoint("llama"), dict[str, bytes]()
    settings = {"model": str(path), "num_blocks": 64, "lease_seconds": LEASE_S}
    prefill, decode = (make_instance(controlled_store(values=values), **settings) for _ in range(2))
    hand_over = prefilled(prefill)
    taken = decode.instance.engine.pool.allocate(60)
    decode.submit("waits", PROMPT, TOKENS, pb.DECODE)
    decode.instance.hand_over("router", hand_over)
    decode.instance.run_once(wait=True)
    assert "kv_lease_overruns" not in decode.instance.reporter.counts
    waits_on(decode, 3 * LEASE_S)
    while "kv_lease_overruns" not in decode.instance.reporter.counts:  # if this process got no core for a part of them
        decode.instance.run_once(wait=True)
    assert decode.instance.reporter.counts["kv_lease_overruns"] == 1
    values.clear()
    decode.instance.engine.pool.release(taken)
    decode.run_until(lambda _: ended(decode, "waits"))
    assert decode.tokens("waits") == generate(path, [PROMPT], TOKENS)[0][1:]
