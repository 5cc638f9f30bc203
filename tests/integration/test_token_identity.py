"""The gate: greedy float32 output through router, P and D equals transformers' generate, token for token."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

ARCHITECTURES = ["llama", "qwen2", "qwen3", "mistral", "gemma2", "gemma3", "olmo2", "qwen3_moe"]


def generate_all(
    complete: Callable[..., dict[str, Any]], deployment: Any, prompts: list[list[int]], **body: Any
) -> list[list[int]]:
    with ThreadPoolExecutor(len(prompts)) as threads:
        replies = threads.map(
            lambda prompt: complete(deployment, prompt=prompt, max_tokens=32, ignore_eos=True, **body), prompts
        )
        return [reply["choices"][0]["token_ids"] for reply in replies]


@pytest.mark.parametrize(
    ("architecture", "connector_url"),
    [
        *((architecture, scheme) for architecture in ARCHITECTURES for scheme in ("shm", "file", "redis")),
        *(("llama", scheme) for scheme in ("redis+cluster", "tiered")),
    ],
    indirect=["connector_url"],
)
def test_greedy_equals_generate(
    architecture: str,
    connector_url: str,
    checkpoint: Callable[..., Path],
    generate: Callable[..., list[list[int]]],
    prompts: list[list[int]],
    deploy: Callable[..., Any],
    complete: Callable[..., dict[str, Any]],
) -> None:
    path = checkpoint(architecture)
    expected = generate(path, prompts, 32)
    with deploy(model=str(path), connector=connector_url, num_blocks=1024, max_num_batched_tokens=256) as deployment:
        assert generate_all(complete, deployment, prompts) == expected
        assert generate_all(complete, deployment, prompts) == expected, "with warm caches"


def test_a_both_instance_with_a_prefill_instance_beside_it(
    checkpoint: Callable[..., Path],
    generate: Callable[..., list[list[int]]],
    prompts: list[list[int]],
    deploy: Callable[..., Any],
    complete: Callable[..., dict[str, Any]],
) -> None:
    """It computes some of the prompts itself, and gets the KV of others, in one batch."""
    path = checkpoint("llama")
    expected = generate(path, prompts, 32)
    roles = {"prefill": 1, "decode": 0, "both": 1}
    with deploy(model=str(path), num_blocks=1024, max_num_batched_tokens=256, **roles) as deployment:
        assert generate_all(complete, deployment, prompts) == expected
        log = httpx.get(f"{deployment.url}/debug/requests").json()["requests"]
        assert {one["prefill_instance"] for one in log} == {"prefill-0", "both-0"}
        assert {one["decode_instance"] for one in log} == {"both-0"}
