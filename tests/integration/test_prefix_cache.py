"""Switching the prefix cache off, resetting it, and keeping prompts warm, in deployments of real processes."""

import json
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

Complete = Callable[..., dict[str, Any]]
Generate = Callable[[Path, list[list[int]], int], list[list[int]]]
Metric = Callable[..., float]

PROMPT = [(i * i + 5 * i) % 256 for i in range(150)]
FULL = len(PROMPT) // 16 * 16  # its tokens in full blocks
SPLIT = {"prefill": 1, "decode": 1}
ALONE = {"prefill": 0, "decode": 0, "both": 2}


def cached(answer: dict[str, Any]) -> int:
    return int(answer["usage"]["prompt_tokens_details"]["cached_tokens"])


def reset(url: str, path: str = "/admin/prefix_cache/reset") -> dict[str, Any]:
    reply = httpx.post(url + path, headers={"Content-Type": "application/json"})
    assert reply.status_code == 200, reply.text
    answer: dict[str, Any] = reply.json()
    return answer


@pytest.mark.parametrize("roles", [SPLIT, ALONE], ids=["split", "both"])
def test_off_means_that_no_request_finds_the_kv_of_another(
    roles: dict[str, int],
    checkpoint: Callable[..., Path],
    deploy: Callable[..., Any],
    generate: Generate,
    complete: Complete,
    metric: Metric,
    wait_until: Callable[..., None],
) -> None:
    path = checkpoint("llama")
    expected = generate(path, [PROMPT], 8)[0]
    settings = {"policy": "round_robin", "store_generated": "on", "prefix_caching": "off", **roles}
    with deploy(model=str(path), num_blocks=256, **settings) as deployment:
        for prompts in ([PROMPT], [PROMPT], [PROMPT, PROMPT], [PROMPT]):
            answer = complete(deployment, prompt=prompts, max_tokens=8, n=2, ignore_eos=True)
            assert [choice["token_ids"] for choice in answer["choices"]] == [expected] * 2 * len(prompts)
            assert cached(answer) == 0
        if roles is SPLIT:  # the hand-over works
            wait_until(lambda: metric(deployment, "kv_transfer_blocks_total", direction="load") >= FULL // 16)
        assert metric(deployment, "prefix_cache_hits_total") == 0


@pytest.mark.parametrize(
    ("connector_url", "roles"), [("shm", SPLIT), ("file", ALONE)], ids=["split", "both"], indirect=["connector_url"]
)
def test_a_reset_forgets_pools_and_store_and_breaks_no_request(
    roles: dict[str, int],
    connector_url: str,
    checkpoint: Callable[..., Path],
    deploy: Callable[..., Any],
    generate: Generate,
    complete: Complete,
    wait_until: Callable[..., None],
) -> None:
    path = checkpoint("llama")
    long = generate(path, [PROMPT], 300)[0]
    settings = {"policy": "round_robin", "connector": connector_url, **roles}

    def cached_now(max_tokens: int = 1) -> int:
        answer = complete(deployment, prompt=PROMPT, max_tokens=max_tokens, ignore_eos=True)
        assert answer["choices"][0]["token_ids"] == long[:max_tokens]
        return cached(answer)

    with deploy(model=str(path), num_blocks=256, **settings) as deployment, ThreadPoolExecutor(1) as threads:
        assert cached_now() == 0
        wait_until(lambda: cached_now() == FULL, "it is in the pool or in the store")
        running = threads.submit(cached_now, 300)
        instances = f"{deployment.url}/debug/instances"

        def is_busy() -> bool:
            return any(one["requests"] for one in httpx.get(instances).json()["instances"])

        wait_until(lambda: is_busy() or running.done(), "it runs")
        pools = sorted(one["instance_id"] for one in httpx.get(instances).json()["instances"])
        assert reset(deployment.url) == {"pools": pools, "stores": [connector_url.partition(":")[0]]}
        assert cached_now(4) == 0
        wait_until(lambda: cached_now(4) == FULL, "what is computed from then on is found")
        running.result()
        assert len(reset(deployment.url, "/reset_prefix_cache")["pools"]) == 2
        assert cached_now() == 0


def test_all_routers_follow_a_reset(
    checkpoint: Callable[..., Path], deploy: Callable[..., Any], complete: Complete, wait_until: Callable[..., None]
) -> None:
    path = checkpoint("llama")
    with deploy(model=str(path), workers=2, num_blocks=256, **SPLIT) as deployment:
        body = {"model": str(path), "prompt": PROMPT, "max_tokens": 1}

        def cached_by(router: int) -> int:
            return cached(httpx.post(f"{deployment.routers[router]}/v1/completions", json=body).json())

        wait_until(lambda: cached_by(0) == FULL and cached_by(1) == FULL, "both routers find it")
        reset(deployment.routers[0])
        assert cached_by(0) == 0
        wait_until(lambda: cached_by(0) == FULL, "it was computed again")
        wait_until(lambda: cached_by(1) == FULL, "the other router uses the same keys")


def test_warm_prompts_are_never_evicted(
    tmp_path: Path,
    checkpoint: Callable[..., Path],
    deploy: Callable[..., Any],
    generate: Generate,
    complete: Complete,
    complete_all: Callable[..., list[list[int]]],
    metric: Metric,
    wait_until: Callable[..., None],
) -> None:
    path, lines, log_lines = checkpoint("llama"), tmp_path / "warm.jsonl", list[str]()
    bodies = [{"prompt": PROMPT, "max_tokens": 9}, "x", {"prompt": [999_999]}]
    lines.write_text("\n".join(map(json.dumps, bodies)))
    others = [[(i * i + k * i) % 256 for i in range(300)] for k in range(7, 17)]
    # A quarter of the pool is 12 blocks; `others` take 19 each.
    settings = {"num_blocks": 48, "max_model_len": 400, "warm_prompts": str(lines), "log_lines": log_lines, **SPLIT}
    with deploy(model=str(path), **settings) as deployment:
        for round_number in range(2):

            def is_warm(times: int = round_number + 1) -> bool:
                """Return whether both instances have pinned both of the valid prompts so many times."""
                return sum("blocks are pinned" in line for line in log_lines) == 4 * times

            wait_until(is_warm, "both instances have computed the prompts")
            assert complete_all(deployment, others, max_tokens=2) == generate(path, others, 2)
            answer = complete(deployment, prompt=[*PROMPT, 7], max_tokens=8, ignore_eos=True)
            assert answer["choices"][0]["token_ids"] == generate(path, [[*PROMPT, 7]], 8)[0]
            assert cached(answer) == FULL
            for role in SPLIT:
                wait_until(lambda role=role: metric(deployment, "kv_cache_blocks_pinned", role=role) == FULL // 16)
            reset(deployment.url)
        assert [line for line in log_lines if "--warm-prompts, line 3" in line], "it says which line is wrong"
