"""Pools that are too small: sequences lose their blocks, and no token changes, however they get their KV back."""

import threading
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest

from pdserve.costs import Costs
from pdserve.proto import pdserve_pb2 as pb

Generate = Callable[[Path, list[list[int]], int], list[list[int]]]

PROMPTS = [[(i * i + k * i) % 256 for i in range(60 + 4 * k)] for k in range(1, 9)]
TOKENS = 40
SETTINGS = {"max_num_batched_tokens": 64, "store_generated": "on"}


SWAPPING_COSTS_NOTHING = Costs(prefill=(1, 1, 0), swap=(0, 0))


@pytest.mark.parametrize("swap_space", [0, 0.01])
@pytest.mark.parametrize("phase", [pb.BOTH, pb.DECODE])
@pytest.mark.parametrize("architecture", ["llama", "mistral"])
def test_tokens_are_the_same(
    architecture: str,
    phase: "pb.Phase",
    swap_space: float,
    checkpoint: Callable[..., Path],
    generate: Generate,
    context: Callable[..., Any],
    store_in_hand: Callable[..., Any],
) -> None:
    """Where nothing is swapped, the store has what sequences lose. Cold and warm."""
    path, store = checkpoint(architecture), store_in_hand()
    settings = {"model": str(path), "swap_space": swap_space, **SETTINGS}
    tight = context(store, num_blocks=24 if architecture == "llama" else 12, **settings)  # a window needs less
    tight.instance.engine.scheduler.costs = SWAPPING_COSTS_NOTHING
    tight.instance.meter.costs = lambda now: SWAPPING_COSTS_NOTHING
    expected = generate(path, PROMPTS, TOKENS)
    prefill = context(store_in_hand(values=store.values), num_blocks=200, **settings)
    for i, prompt in enumerate(PROMPTS if phase == pb.DECODE else []):
        prefill.submit(f"{i}", prompt, TOKENS, pb.PREFILL)
    prefill.until(lambda outputs: sum(o.stored.final for o in outputs) == (len(PROMPTS) if phase == pb.DECODE else 0))
    for mark in ("cold ", "warm "):
        for i, prompt in enumerate(PROMPTS):
            tight.submit(f"{mark}{i}", prompt, TOKENS, phase)
            if phase == pb.DECODE:
                blocks, first = -(-len(prompt) // 16), prefill.tokens(f"{i}")[0]
                assert first == expected[i][0]
                message = pb.HandOver(request_id=f"{mark}{i}", num_blocks=blocks, final=True, first_token=first)
                tight.instance.hand_over("router", message)
        before = tight.instance.engine.scheduler.num_preemptions
        tight.until(lambda outputs: sum(bool(output.finish_reason) for output in outputs) == len(PROMPTS))
        tight.until_idle()
        for i, tokens in enumerate(expected):
            assert tight.tokens(f"{mark}{i}") == (tokens if phase == pb.BOTH else tokens[1:])
        tight.outputs.clear()
        assert tight.instance.engine.scheduler.num_preemptions > before
        tight.instance.run_once(wait=False)  # tells its counts
        counters = tight.instance.heartbeat.counters
        assert (counters.get('swapped_blocks{direction="out"}', 0) > 0) == (swap_space > 0)
        if phase == pb.DECODE:  # else prompts are looked up when they come, too
            assert any(name.startswith("store_hits") for name in counters) == (swap_space == 0)


def test_prefill_that_runs_ahead_takes_no_blocks_of_decode(
    checkpoint: Callable[..., Path], generate: Generate, context: Callable[..., Any], store_in_hand: Callable[..., Any]
) -> None:
    """All prompts are in the store at once, and decode has room for one request: nobody loses blocks to another's KV."""
    path, store, prompts = checkpoint("llama"), store_in_hand(), PROMPTS[:4]
    settings = {"model": str(path), **SETTINGS, "store_generated": "off"}
    decode, prefill = context(store, num_blocks=9, **settings), context(store_in_hand(values=store.values), **settings)
    for i, prompt in enumerate(prompts):
        prefill.submit(f"{i}", prompt, TOKENS, pb.PREFILL)
    prefill.until(lambda outputs: sum(output.stored.final for output in outputs) == len(prompts))
    for i, prompt in enumerate(prompts):
        decode.submit(f"{i}", prompt, TOKENS, pb.DECODE)
    for i, prompt in reversed(list(enumerate(prompts))):  # whose KV comes first is not who came first
        first = prefill.tokens(f"{i}")[0]
        message = pb.HandOver(request_id=f"{i}", num_blocks=-(-len(prompt) // 16), final=True, first_token=first)
        decode.instance.hand_over("router", message)
    over: list[str] = []

    def done(outputs: list[pb.Output]) -> bool:
        over[:] = [output.request_id for output in outputs if output.finish_reason]
        begun = {output.request_id for output in outputs if output.token_ids} - set(over)
        assert len(begun) <= 1 and decode.instance.engine.scheduler.num_preemptions == 0
        return len(over) == len(prompts)

    decode.until(done)
    decode.until_idle()
    assert over == ["0", "1", "2", "3"], "in order of arrival"
    expected = generate(path, prompts, TOKENS)
    assert [decode.tokens(f"{i}") for i in range(len(prompts))] == [tokens[1:] for tokens in expected]


@pytest.mark.parametrize(
    "settings", [{"prefill": 1, "decode": 1}, {"prefill": 0, "decode": 0, "both": 1, "swap_space": 0.01}]
)
def test_processes_with_small_pools(
    settings: dict[str, Any],
    checkpoint: Callable[..., Path],
    generate: Generate,
    deploy: Callable[..., Any],
    complete: Callable[..., dict[str, Any]],
    metric: Callable[..., float],
    until: Callable[..., None],
) -> None:
    """Eight answers to one request, which grow beyond what three of them may have; cold and warm."""
    path, prompts, tokens = checkpoint("llama"), [[k + i % 50 for i in range(70)] for k in range(8)], 100
    expected = generate(path, prompts, tokens)
    with deploy(model=str(path), num_blocks=24, max_num_batched_tokens=64, **settings) as deployment:
        before = 0.0
        for rounds in (1, 2):
            choices = complete(deployment, prompt=prompts, max_tokens=tokens, ignore_eos=True)["choices"]
            assert [choice["token_ids"] for choice in choices] == expected
            # Counts come together, in a heartbeat.
            until(lambda told=rounds * 800: metric(deployment, "generation_tokens_total") == told)
            preemptions = metric(deployment, "num_preemptions_total")
            assert preemptions > before, "nobody was preempted"
            before = preemptions


def test_one_that_is_cancelled_while_the_store_is_asked_for_its_kv_leaves_nothing(
    checkpoint: Callable[..., Path], context: Callable[..., Any], store_in_hand: Any
) -> None:
    begun, cancelled = threading.Event(), threading.Event()

    class Asked(store_in_hand):  # type: ignore[misc]  # a class that came as a fixture
        def contains(self, name: str) -> bool:
            if begun.is_set() and not cancelled.is_set():
                for request in "ab":
                    one.instance.cancel("router", request)
                now: Future[None] = Future()
                now.set_result(None)
                one.instance.add_done_callback(now, lambda _: cancelled.set())
                assert cancelled.wait(600)
            return bool(super().contains(name))

    one = context(Asked(), model=str(checkpoint("llama")), num_blocks=12, **SETTINGS)
    for name in "ab":
        one.submit(name, [ord(name)] * 64, 60, pb.BOTH)
    one.until(lambda _: all(one.tokens(name) for name in "ab"))
    begun.set()
    one.until_idle()
    assert cancelled.is_set() and one.instance.engine.scheduler.num_preemptions > 0
    one.instance.engine.pool.check_integrity()
    assert one.instance.engine.pool.num_held == 0 and not one.instance.engine.has_work
