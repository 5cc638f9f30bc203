"""The gate: greedy float32 output through router, P and D equals transformers' generate, token for token."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

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
