"""Prefill loads stored blocks only while loading is faster than computing, and the tokens are the same either way."""

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from pdserve.costs import Costs
from pdserve.proto import pdserve_pb2 as pb
from pdserve.roles import break_even

PROMPTS = [[(i * i + k * i) % 256 for i in range(800)] for k in range(1, 4)]
ONE_MS_PER_TOKEN = Costs(prefill=(0, 0.001, 0))
NEW = [[(i * 7 + 3) % 256 for i in range(800)]]


def test_prefill_stops_loading_from_a_slow_store(
    monkeypatch: pytest.MonkeyPatch,
    checkpoint: Callable[..., Path],
    generate: Callable[..., list[list[int]]],
    make_instance: Callable[..., Any],
    controlled_store: Callable[..., Any],
) -> None:
    """The compute cost is fixed at 1 ms per token; the store's delay makes loading slower on any machine."""
    monkeypatch.setattr(break_even, "PROBE_S", (3600.0, 3600.0))  # no second probe during this test
    path = checkpoint("llama")
    settings = {"model": str(path), "num_blocks": 512}
    other = controlled_store()
    slow = controlled_store(values=other.values, before_get=lambda: time.sleep(0.05))
    first, second = make_instance(other, **settings), make_instance(slow, **settings)
    second.instance.engine.scheduler.costs = ONE_MS_PER_TOKEN
    second.instance.reporter.meter.costs = lambda now: ONE_MS_PER_TOKEN
    for driver, prompts in ((first, PROMPTS), (second, [PROMPTS[0], *NEW, *PROMPTS[1:]])):
        for i, prompt in enumerate(prompts):
            driver.submit(str(i), prompt, 1, pb.PREFILL)
            driver.run_until(lambda outputs: bool(outputs) and outputs[-1].finish_reason == "length")
            assert driver.tokens(str(i)) == generate(path, [prompt], 1)[0]
            driver.run_until_idle()
            driver.outputs.clear()
    counts = second.instance.reporter.heartbeat.counters
    decisions = {name: count for name, count in counts.items() if name.startswith("store_hits")}
    # Loading 49 blocks takes 2.5 s or more, computing them 0.8 s.
    assert decisions == {'store_hits{decision="unmeasured"}': 1, 'store_hits{decision="dearer"}': 2}
    assert counts['prompt_tokens_by_source{source="loaded"}'] == 49 * 16


def test_store_hits_are_loaded_while_other_requests_wait(
    checkpoint: Callable[..., Path],
    generate: Callable[..., list[list[int]]],
    make_instance: Callable[..., Any],
    controlled_store: Callable[..., Any],
) -> None:
    """A busy prefill instance gains most from loading instead of computing."""
    path = checkpoint("llama")
    settings = {"model": str(path), "num_blocks": 512, "max_num_seqs": 1, "max_num_batched_tokens": 64}
    stored, new = PROMPTS[0], [PROMPTS[1], PROMPTS[2], *NEW]
    store = controlled_store()
    first, busy = make_instance(store, **settings), make_instance(controlled_store(values=store.values), **settings)
    first.submit("stored", stored, 1, pb.PREFILL)
    first.run_until(lambda outputs: bool(outputs) and outputs[-1].finish_reason == "length")
    first.run_until_idle()
    for i, prompt in enumerate(new):
        busy.submit(str(i), prompt, 1, pb.PREFILL)
    busy.run_until(lambda _: len(busy.instance.engine.scheduler.waiting) == 2)
    busy.submit("stored", stored, 1, pb.PREFILL)
    busy.run_until(lambda outputs: sum(output.finish_reason == "length" for output in outputs) == 4)
    busy.run_until_idle()
    finished = [output.request_id for output in busy.outputs if output.finish_reason]
    assert finished == ["0", "1", "2", "stored"], "a hit does not overtake earlier requests"
    for name, prompt in (("0", new[0]), ("stored", stored)):
        assert busy.tokens(name) == generate(path, [prompt], 1)[0]
    assert busy.instance.reporter.heartbeat.counters['prompt_tokens_by_source{source="loaded"}'] == 49 * 16
