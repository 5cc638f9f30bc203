"""Storing generated KV: the next turn of a conversation loads it from the store on any instance."""

import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest

from pdserve.output import Output
from pdserve.proto import pdserve_pb2 as pb
from tests.waiting import wait_until

Complete = Callable[..., dict[str, Any]]
Generate = Callable[[Path, list[list[int]], int], list[list[int]]]

PROMPT = [(i * i + 5 * i) % 256 for i in range(150)]  # its last block is partial
TOKENS = 100
SPLIT = {"prefill": 2, "decode": 2}
ALONE = {"prefill": 0, "decode": 0, "both": 2}
FULL = (len(PROMPT) + TOKENS - 1) // 16  # blocks: the last token has no KV yet


def stored_blocks(deployment: Any, instance: str) -> int:
    """Return the number of blocks that an instance has stored, as of its last heartbeat."""
    for line in httpx.get(f"{deployment.url}/metrics").text.splitlines():
        if line.startswith("pdserve_kv_transfer_blocks_total{") and all(
            label in line for label in (f'instance="{instance}"', 'direction="store"')
        ):
            return int(float(line.rsplit(" ", 1)[1]))
    return 0


def wait_until_stored(deployment: Any, instance: str, blocks: int) -> None:
    deadline = time.monotonic() + 600
    while (stored := stored_blocks(deployment, instance)) != blocks:
        assert time.monotonic() < deadline and stored < blocks, f"{stored} blocks are stored by {instance}"
        time.sleep(0.05)


def timeline(deployment: Any, request_id: str) -> dict[str, Any]:
    found: dict[str, Any] = httpx.get(f"{deployment.url}/debug/requests/{request_id}").json()
    return found


@pytest.mark.parametrize(
    ("connector_url", "roles", "architecture"),
    [("shm", SPLIT, "llama"), ("redis", ALONE, "mistral")],
    ids=["split", "both, with a sliding window that blocks leave early"],
    indirect=["connector_url"],
)
def test_next_turn_loads_generated_blocks_on_another_instance(
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
        first_timeline = timeline(deployment, first["id"])
        blocks = FULL if roles is ALONE else FULL - len(PROMPT) // 16  # a decode instance does not store the prompt
        wait_until_stored(deployment, first_timeline["decode_instance"], blocks)

        turn = [*PROMPT, *answer, 1, 2, 3]
        second = complete(deployment, prompt=turn, max_tokens=20, ignore_eos=True)
        assert second["choices"][0]["token_ids"] == generate(path, [turn], 20)[0]
        second_timeline = timeline(deployment, second["id"])
        assert second_timeline["prefill_instance"] != first_timeline["prefill_instance"]
        assert second_timeline["prompt_tokens_by_source"] == {
            "computed": len(turn) - FULL * 16,
            "local_hit": 0,
            "loaded": FULL * 16,
        }


@pytest.mark.parametrize(("mode", "multi_turn", "blocks"), [("auto", False, 9), ("auto", True, FULL), ("off", True, 0)])
def test_number_of_blocks_stored_per_mode(
    mode: str,
    multi_turn: bool,
    blocks: int,
    checkpoint: Callable[..., Path],
    make_instance: Callable[..., Any],
    controlled_store: Callable[..., Any],
) -> None:
    store = controlled_store()
    both = make_instance(store, model=str(checkpoint("llama")), num_blocks=64, store_generated=mode)
    both.submit("x", PROMPT, TOKENS, pb.BOTH, multi_turn=multi_turn)
    both.run_until(lambda outputs: any(o.finish_reason for o in outputs))
    both.run_until_idle()
    assert len(store.values) == blocks


def test_chats_are_stored_by_default(deploy: Callable[..., Any]) -> None:
    def chat(messages: list[dict[str, str]]) -> dict[str, Any]:
        body = {"model": "demo", "messages": messages, "temperature": 0, "max_tokens": 120}
        reply: dict[str, Any] = httpx.post(f"{deployment.url}/v1/chat/completions", json=body).json()
        return reply

    question = {"role": "user", "content": "Tell me a story about a fox."}
    with deploy(model="demo", policy="round_robin", num_blocks=256, **ALONE) as deployment:
        first = chat([question])
        first_timeline = timeline(deployment, first["id"])
        full = (first_timeline["prompt_tokens"] + first_timeline["output_tokens"] - 1) // 16
        wait_until_stored(deployment, first_timeline["decode_instance"], full)
        second = chat([question, first["choices"][0]["message"], {"role": "user", "content": "And then?"}])
        second_timeline = timeline(deployment, second["id"])
        assert second_timeline["prefill_instance"] != first_timeline["prefill_instance"]
        assert second_timeline["prompt_tokens_by_source"]["loaded"] > first_timeline["prompt_tokens"] + 32


def test_hanging_store_delays_no_token(
    checkpoint: Callable[..., Path],
    generate: Generate,
    make_instance: Callable[..., Any],
    controlled_store: Callable[..., Any],
) -> None:
    path, resume = checkpoint("llama"), threading.Event()
    store = controlled_store(before_put=lambda: resume.wait(600))
    both = make_instance(store, model=str(path), num_blocks=64, store_generated="on")
    both.submit("x", PROMPT, TOKENS, pb.BOTH)
    both.run_until(lambda outputs: any(o.finish_reason for o in outputs))
    assert both.tokens("x") == generate(path, [PROMPT], TOKENS)[0]
    wait_until(lambda: store.puts > 0, "on a busy machine the store's thread may not have run yet")
    assert store.puts == 1 and not store.values, "the store hangs in the first block"
    assert both.instance.num_jobs and both.instance.engine.pool.num_held == FULL
    resume.set()
    both.run_until_idle()
    assert len(store.values) == FULL and both.instance.engine.pool.num_held == 0


def test_no_block_is_stored_behind_a_failed_one(
    checkpoint: Callable[..., Path], make_instance: Callable[..., Any], controlled_store: Callable[..., Any]
) -> None:
    def refuse() -> None:
        raise OSError("no")

    store = controlled_store(before_put=refuse)
    both = make_instance(store, model=str(checkpoint("llama")), num_blocks=64, store_generated="on")
    both.submit("x", PROMPT, 600, pb.BOTH)

    def done(outputs: list[Output]) -> bool:
        while not store._queue.empty():
            time.sleep(0.001)  # on a busy machine the store's thread may not have run yet
        return any(output.finish_reason for output in outputs)

    both.run_until(done)
    both.run_until_idle()
    assert 1 <= store.puts < FULL, "a few may be in flight when the first fails"


def test_request_id_may_be_reused_while_its_stores_are_running(
    checkpoint: Callable[..., Path],
    generate: Generate,
    make_instance: Callable[..., Any],
    controlled_store: Callable[..., Any],
) -> None:
    path, resume = checkpoint("llama"), threading.Event()
    prefill = make_instance(controlled_store(before_put=lambda: resume.wait(600)), model=str(path), num_blocks=64)
    for prompt in (PROMPT, PROMPT[:70]):
        prefill.outputs.clear()
        prefill.submit("x", prompt, 1, pb.PREFILL)
        if prompt is not PROMPT:
            # Its store lookup queues behind the stores of the first request.
            threading.Timer(0.2, resume.set).start()
        prefill.run_until(lambda outputs: any(o.finish_reason for o in outputs))
        assert prefill.tokens("x") == generate(path, [prompt], 1)[0]
    prefill.run_until_idle()
    assert prefill.instance.engine.pool.num_held == 0
