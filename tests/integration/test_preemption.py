"""Preemption in pools that are too small: no token changes, whether KV is swapped, reloaded or recomputed."""

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from pdserve.costs import Costs
from pdserve.output import Output
from pdserve.proto import pdserve_pb2 as pb
from tests.outputs import is_stored

Generate = Callable[[Path, list[list[int]], int], list[list[int]]]

PROMPTS = [[(i * i + k * i) % 256 for i in range(60 + 4 * k)] for k in range(1, 9)]
TOKENS = 40
SETTINGS = {"max_num_batched_tokens": 64, "store_generated": "on"}


FREE_SWAPPING = Costs(prefill=(1, 1, 0), swap=(0, 0))


@pytest.mark.parametrize("swap_space", [0, 0.01])
@pytest.mark.parametrize("phase", [pb.BOTH, pb.DECODE])
@pytest.mark.parametrize("architecture", ["llama", "mistral"])
def test_preemption_changes_no_token(
    architecture: str,
    phase: "pb.Phase",
    swap_space: float,
    checkpoint: Callable[..., Path],
    generate: Generate,
    make_instance: Callable[..., Any],
    controlled_store: Callable[..., Any],
) -> None:
    """Without swap space, preempted sequences reload their KV from the store. Cold and warm caches.

    With a sliding window, a sequence takes more blocks only until it has filled the window: these prompts are shorter.
    """
    path, store = checkpoint(architecture), controlled_store()
    prompts, num_blocks = (PROMPTS, 24) if architecture == "llama" else ([prompt[:46] for prompt in PROMPTS], 9)
    settings = {"model": str(path), "swap_space": swap_space, **SETTINGS}
    settings["async_scheduling"] = "on" if phase == pb.DECODE else "off"
    tight = make_instance(store, num_blocks=num_blocks, **settings)
    tight.instance.engine.scheduler.costs = FREE_SWAPPING
    tight.instance.reporter.meter.costs = lambda now: FREE_SWAPPING
    expected = generate(path, prompts, TOKENS)
    prefill = make_instance(controlled_store(values=store.values), num_blocks=200, **settings)
    for i, prompt in enumerate(prompts if phase == pb.DECODE else []):
        prefill.submit(f"{i}", prompt, TOKENS, pb.PREFILL)
    prefill.run_until(lambda outputs: sum(is_stored(o) for o in outputs) == (len(prompts) if phase == pb.DECODE else 0))
    for mark in ("cold ", "warm "):
        for i, prompt in enumerate(prompts):
            tight.submit(f"{mark}{i}", prompt, TOKENS, phase)
            if phase == pb.DECODE:
                blocks, first = -(-len(prompt) // 16), prefill.tokens(f"{i}")[0]
                assert first == expected[i][0]
                message = pb.HandOver(request_id=f"{mark}{i}", num_blocks=blocks, final=True, first_token=first)
                tight.instance.hand_over("router", message)
        before = tight.instance.engine.scheduler.num_preemptions
        tight.run_until(lambda outputs: sum(bool(output.finish_reason) for output in outputs) == len(prompts))
        tight.run_until_idle()
        for i, tokens in enumerate(expected):
            assert tight.tokens(f"{mark}{i}") == (tokens if phase == pb.BOTH else tokens[1:])
        tight.outputs.clear()
        assert tight.instance.engine.scheduler.num_preemptions > before
        tight.instance.run_once(wait=False)  # publishes the counters
        counters = tight.instance.reporter.heartbeat.counters
        assert (counters.get('swapped_blocks{direction="out"}', 0) > 0) == (swap_space > 0)
        assert (counters.get("swap_seconds", 0) > 0) == (swap_space > 0)
        assert swap_space or counters["recomputed_tokens"] > 0
        if phase == pb.DECODE:  # otherwise arriving prompts are looked up as well
            assert any(name.startswith("store_hits") for name in counters) == (swap_space == 0)


def test_decode_admits_one_request_at_a_time_once_its_kv_is_there(
    checkpoint: Callable[..., Path],
    generate: Generate,
    make_instance: Callable[..., Any],
    controlled_store: Callable[..., Any],
) -> None:
    """All prompts are in the store, and decode has blocks for one request: loading another must preempt no sequence."""
    path, store, prompts = checkpoint("llama"), controlled_store(), PROMPTS[:4]
    settings = {"model": str(path), **SETTINGS, "store_generated": "off"}
    decode, prefill = (
        make_instance(store, num_blocks=9, **settings),
        make_instance(controlled_store(values=store.values), **settings),
    )
    for i, prompt in enumerate(prompts):
        prefill.submit(f"{i}", prompt, TOKENS, pb.PREFILL)
    prefill.run_until(lambda outputs: sum(is_stored(output) for output in outputs) == len(prompts))
    for i, prompt in enumerate(prompts):
        decode.submit(f"{i}", prompt, TOKENS, pb.DECODE)
    for i, prompt in reversed(list(enumerate(prompts))):  # KV arrives in reverse order
        first = prefill.tokens(f"{i}")[0]
        message = pb.HandOver(request_id=f"{i}", num_blocks=-(-len(prompt) // 16), final=True, first_token=first)
        decode.instance.hand_over("router", message)
    finished: list[str] = []

    def done(outputs: list[Output]) -> bool:
        finished[:] = [output.request_id for output in outputs if output.finish_reason]
        running = {output.request_id for output in outputs if output.token_ids} - set(finished)
        assert len(running) <= 1 and decode.instance.engine.scheduler.num_preemptions == 0
        return len(finished) == len(prompts)

    decode.run_until(done)
    decode.run_until_idle()
    assert finished == ["3", "0", "1", "2"], "the first one with KV, the others in order of arrival"
    expected = generate(path, prompts, TOKENS)
    assert [decode.tokens(f"{i}") for i in range(len(prompts))] == [tokens[1:] for tokens in expected]


@pytest.mark.parametrize(
    "settings",
    [{"prefill": 1, "decode": 1, "async_scheduling": "on"}, {"prefill": 0, "decode": 0, "both": 1, "swap_space": 0.01}],
)
def test_deployment_with_small_pools_preempts_and_changes_no_token(
    settings: dict[str, Any],
    checkpoint: Callable[..., Path],
    generate: Generate,
    deploy: Callable[..., Any],
    complete: Callable[..., dict[str, Any]],
    metric: Callable[..., float],
    wait_until: Callable[..., None],
) -> None:
    """One request with eight choices, of which fewer than three fit into the pool at full length; cold and warm caches."""
    path, prompts, tokens = checkpoint("llama"), [[k + i % 50 for i in range(70)] for k in range(8)], 100
    expected = generate(path, prompts, tokens)
    with deploy(model=str(path), num_blocks=24, max_num_batched_tokens=64, **settings) as deployment:
        before = 0.0
        for rounds in (1, 2):
            choices = complete(deployment, prompt=prompts, max_tokens=tokens, ignore_eos=True)["choices"]
            assert [choice["token_ids"] for choice in choices] == expected
            # All counters arrive in the same heartbeat.
            wait_until(lambda total=rounds * 800: metric(deployment, "generation_tokens_total") == total)
            preemptions = metric(deployment, "num_preemptions_total")
            assert preemptions > before, "no sequence was preempted"
            before = preemptions


def test_cancel_during_the_store_lookup_of_a_preempted_sequence_leaks_nothing(
    checkpoint: Callable[..., Path], make_instance: Callable[..., Any], controlled_store: Any
) -> None:
    started, cancelled = threading.Event(), threading.Event()

    class CancellingStore(controlled_store):  # type: ignore[misc]  # the class comes from a fixture
        def contains(self, name: str) -> bool:
            if started.is_set() and not cancelled.is_set():
                for request in "ab":
                    driver.instance.cancel("router", request)
                driver.instance.post(cancelled.set)
                assert cancelled.wait(600)
            return bool(super().contains(name))

    driver = make_instance(CancellingStore(), model=str(checkpoint("llama")), num_blocks=12, **SETTINGS)
    for name in "ab":
        driver.submit(name, [ord(name)] * 64, 60, pb.BOTH)
    driver.run_until(lambda _: all(driver.tokens(name) for name in "ab"))
    started.set()
    driver.run_until_idle()
    assert cancelled.is_set() and driver.instance.engine.scheduler.num_preemptions > 0
    driver.instance.engine.pool.check_integrity()
    assert driver.instance.engine.pool.num_held == 0 and not driver.instance.engine.has_work
