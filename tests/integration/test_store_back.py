"""What decode generates is in the store when the next turn of the conversation comes, on whatever instance."""

import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest

from pdserve.proto import pdserve_pb2 as pb

Complete = Callable[..., dict[str, Any]]
Generate = Callable[[Path, list[list[int]], int], list[list[int]]]

PROMPT = [(i * i + 5 * i) % 256 for i in range(150)]  # its last block is partial
TOKENS = 100
SPLIT = {"prefill": 2, "decode": 2}
ALONE = {"prefill": 0, "decode": 0, "both": 2}
FULL = (len(PROMPT) + TOKENS - 1) // 16  # blocks: the last token has no KV yet


def stored(deployment: Any, instance: str) -> int:
    """Blocks that an instance has stored, by its last heartbeat."""
    for line in httpx.get(f"{deployment.url}/metrics").text.splitlines():
        if line.startswith("pdserve_kv_transfer_blocks_total{") and all(
            label in line for label in (f'instance="{instance}"', 'direction="store"')
        ):
            return int(float(line.rsplit(" ", 1)[1]))
    return 0


def wait_until_stored(deployment: Any, instance: str, blocks: int) -> None:
    give_up = time.monotonic() + 600
    while (so_far := stored(deployment, instance)) != blocks:
        assert time.monotonic() < give_up and so_far < blocks, f"{so_far} blocks are stored by {instance}"
        time.sleep(0.05)


def timeline(deployment: Any, request_id: str) -> dict[str, Any]:
    found: dict[str, Any] = httpx.get(f"{deployment.url}/debug/requests/{request_id}").json()
    return found


@pytest.mark.parametrize(
    ("connector_url", "roles", "architecture"),
    [("shm", SPLIT, "llama"), ("redis", ALONE, "mistral")],
    ids=["split", "alone, with a window that blocks leave before many are full"],
    indirect=["connector_url"],
)
def test_the_next_turn_is_loaded_elsewhere(
    roles: dict[str, int],
    architecture: str,
    connector_url: str,
    checkpoint: Callable[..., Path],
    generate: Generate,
    deploy: Callable[..., Any],
    complete: Complete,
) -> None:
    path = checkpoint(architecture)
    settings = {"policy": "round_robin", "store_generated": "on", "num_blocks": 256, "connector": connector_url}
    with deploy(model=str(path), max_num_batched_tokens=64, **settings, **roles) as deployment:
        first = complete(deployment, prompt=PROMPT, max_tokens=TOKENS, ignore_eos=True)
        answer = first["choices"][0]["token_ids"]
        assert answer == generate(path, [PROMPT], TOKENS)[0]
        began = timeline(deployment, first["id"])
        own = FULL if roles is ALONE else FULL - len(PROMPT) // 16
        wait_until_stored(deployment, began["decode_instance"], own)

        turn = [*PROMPT, *answer, 1, 2, 3]
        second = complete(deployment, prompt=turn, max_tokens=20, ignore_eos=True)
        assert second["choices"][0]["token_ids"] == generate(path, [turn], 20)[0]
        went_on = timeline(deployment, second["id"])
        assert went_on["prefill_instance"] != began["prefill_instance"]
        assert went_on["prompt_tokens_by_source"] == {
            "computed": len(turn) - FULL * 16,
            "local_hit": 0,
            "loaded": FULL * 16,
        }


@pytest.mark.parametrize(("mode", "multi_turn", "blocks"), [("auto", False, 9), ("auto", True, FULL), ("off", True, 0)])
def test_what_is_worth_storing(
    mode: str,
    multi_turn: bool,
    blocks: int,
    checkpoint: Callable[..., Path],
    context: Callable[..., Any],
    store_in_hand: Callable[..., Any],
) -> None:
    store = store_in_hand()
    both = context(store, model=str(checkpoint("llama")), num_blocks=64, store_generated=mode)
    both.submit("x", PROMPT, TOKENS, pb.BOTH, multi_turn=multi_turn)
    both.until(lambda outputs: any(o.finish_reason for o in outputs))
    both.until_idle()
    assert len(store.values) == blocks


def test_a_chat_is_stored_back_without_being_asked_to(deploy: Callable[..., Any]) -> None:
    def say(messages: list[dict[str, str]]) -> dict[str, Any]:
        body = {"model": "demo", "messages": messages, "temperature": 0, "max_tokens": 120}
        reply: dict[str, Any] = httpx.post(f"{deployment.url}/v1/chat/completions", json=body).json()
        return reply

    question = {"role": "user", "content": "Tell me a story about a fox."}
    with deploy(model="demo", policy="round_robin", num_blocks=256, **ALONE) as deployment:
        first = say([question])
        began = timeline(deployment, first["id"])
        full = (began["prompt_tokens"] + began["output_tokens"] - 1) // 16
        wait_until_stored(deployment, began["decode_instance"], full)
        second = say([question, first["choices"][0]["message"], {"role": "user", "content": "And then?"}])
        went_on = timeline(deployment, second["id"])
        assert went_on["prefill_instance"] != began["prefill_instance"]
        assert went_on["prompt_tokens_by_source"]["loaded"] > began["prompt_tokens"] + 32


def test_a_store_that_hangs_delays_no_token(
    checkpoint: Callable[..., Path],
    generate: Generate,
    context: Callable[..., Any],
    store_in_hand: Callable[..., Any],
) -> None:
    path, go_on = checkpoint("llama"), threading.Event()
    store = store_in_hand(before_put=lambda: go_on.wait(600))
    both = context(store, model=str(path), num_blocks=64, store_generated="on")
    both.submit("x", PROMPT, TOKENS, pb.BOTH)
    both.until(lambda outputs: any(o.finish_reason for o in outputs))
    assert both.tokens("x") == generate(path, [PROMPT], TOKENS)[0]
    assert store.puts == 1 and not store.values, "it still hangs in the first block"
    assert both.instance.num_jobs and both.instance.engine.pool.num_held == FULL
    go_on.set()
    both.until_idle()
    assert len(store.values) == FULL and both.instance.engine.pool.num_held == 0


def test_nothing_is_stored_behind_a_gap(
    checkpoint: Callable[..., Path], context: Callable[..., Any], store_in_hand: Callable[..., Any]
) -> None:
    def refuse() -> None:
        raise OSError("no")

    store = store_in_hand(before_put=refuse)
    both = context(store, model=str(checkpoint("llama")), num_blocks=64, store_generated="on")
    both.submit("x", PROMPT, 600, pb.BOTH)

    def done(outputs: list[pb.Output]) -> bool:
        while not store._queue.empty():
            time.sleep(0.001)  # a store that gets no time on a busy machine has not failed yet
        return any(output.finish_reason for output in outputs)

    both.until(done)
    both.until_idle()
    assert 1 <= store.puts < FULL, "a few may be on their way before the first has failed"


def test_an_id_may_be_used_again_while_its_stores_go_on(
    checkpoint: Callable[..., Path],
    generate: Generate,
    context: Callable[..., Any],
    store_in_hand: Callable[..., Any],
) -> None:
    path, go_on = checkpoint("llama"), threading.Event()
    prefill = context(store_in_hand(before_put=lambda: go_on.wait(600)), model=str(path), num_blocks=64)
    for prompt in (PROMPT, PROMPT[:70]):
        prefill.outputs.clear()
        prefill.submit("x", prompt, 1, pb.PREFILL)
        if prompt is not PROMPT:
            # Its first question to the store waits behind the stores of the other.
            threading.Timer(0.2, go_on.set).start()
        prefill.until(lambda outputs: any(o.finish_reason for o in outputs))
        assert prefill.tokens("x") == generate(path, [prompt], 1)[0]
    prefill.until_idle()
    assert prefill.instance.engine.pool.num_held == 0
