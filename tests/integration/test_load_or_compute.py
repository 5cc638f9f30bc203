"""Prefill loads what a store has as long as that is the faster way, and is right either way."""

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from pdserve.costs import Costs
from pdserve.proto import pdserve_pb2 as pb
from pdserve.roles import break_even

PROMPTS = [[(i * i + k * i) % 256 for i in range(800)] for k in range(1, 4)]
A_MILLISECOND_A_TOKEN = Costs(prefill=(0, 0.001, 0))
NEW = [[(i * 7 + 3) % 256 for i in range(800)]]


def test_a_slow_store_is_not_loaded_from_for_long(
    monkeypatch: pytest.MonkeyPatch,
    checkpoint: Callable[..., Path],
    generate: Callable[..., list[list[int]]],
    context: Callable[..., Any],
    store_in_hand: Callable[..., Any],
) -> None:
    """What computing takes is given, and loading takes longer on any machine."""
    monkeypatch.setattr(break_even, "PROBE_S", (3600.0, 3600.0))  # a second load is due once this test is over
    path = checkpoint("llama")
    settings = {"model": str(path), "num_blocks": 512}
    other = store_in_hand()
    slow = store_in_hand(values=other.values, before_get=lambda: time.sleep(0.05))
    first, second = context(other, **settings), context(slow, **settings)
    second.instance.engine.scheduler.costs = A_MILLISECOND_A_TOKEN
    second.instance.meter.costs = lambda now: A_MILLISECOND_A_TOKEN
    for one, prompts in ((first, PROMPTS), (second, [PROMPTS[0], *NEW, *PROMPTS[1:]])):
        for i, prompt in enumerate(prompts):
            one.submit(str(i), prompt, 1, pb.PREFILL)
            one.until(lambda outputs: bool(outputs) and outputs[-1].finish_reason == "length")
            assert one.tokens(str(i)) == generate(path, [prompt], 1)[0]
            one.until_idle()
            one.outputs.clear()
    counts = second.instance.heartbeat.counters
    decisions = {name: count for name, count in counts.items() if name.startswith("store_hits")}
    # Loading 49 blocks took 2.5 s or more, and computing them 0.8 s.
    assert decisions == {'store_hits{decision="unmeasured"}': 1, 'store_hits{decision="dearer"}': 2}
    assert counts['prompt_tokens_by_source{source="loaded"}'] == 49 * 16


def test_hits_are_loaded_while_others_wait(
    checkpoint: Callable[..., Path],
    generate: Callable[..., list[list[int]]],
    context: Callable[..., Any],
    store_in_hand: Callable[..., Any],
) -> None:
    """A busy prefill instance is the one that gains most from not computing."""
    path = checkpoint("llama")
    settings = {"model": str(path), "num_blocks": 512, "max_num_seqs": 1, "max_num_batched_tokens": 64}
    known, new = PROMPTS[0], [PROMPTS[1], PROMPTS[2], *NEW]
    store = store_in_hand()
    first, busy = context(store, **settings), context(store_in_hand(values=store.values), **settings)
    first.submit("known", known, 1, pb.PREFILL)
    first.until(lambda outputs: bool(outputs) and outputs[-1].finish_reason == "length")
    first.until_idle()
    for i, prompt in enumerate(new):
        busy.submit(str(i), prompt, 1, pb.PREFILL)
    busy.until(lambda _: len(busy.instance.engine.scheduler.waiting) == 2)
    busy.submit("known", known, 1, pb.PREFILL)
    busy.until(lambda outputs: sum(output.finish_reason == "length" for output in outputs) == 4)
    busy.until_idle()
    ended = [output.request_id for output in busy.outputs if output.finish_reason]
    assert ended == ["0", "1", "2", "known"], "who came first has not lost by it"
    for name, prompt in (("0", new[0]), ("known", known)):
        assert busy.tokens(name) == generate(path, [prompt], 1)[0]
    assert busy.instance.heartbeat.counters['prompt_tokens_by_source{source="loaded"}'] == 49 * 16
