"""The main gate: greedy float32 output through router, P and D equals transformers' generate, token for token.

In 16 bits, where transformers rounds otherwise, it equals that of an engine of our own that computes one prompt at a time.
"""

import itertools
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import pytest

ARCHITECTURES = ["llama", "qwen2", "qwen3", "mistral", "gemma2", "gemma3", "olmo2", "qwen3_moe", "gpt_oss"]
CONNECTORS = [
    "shm",
    "shm?codec=lz4",
    "file",
    "redis",
    pytest.param("redis?codec=zstd", marks=pytest.mark.slow),
    pytest.param("redis+unix", marks=pytest.mark.slow),
    "redis+cluster",
    "tiered",
    "nixl",
    "mooncake",
    "fsspec",
]


OVER_PROCESSES = ("llama", "gemma2", "gpt_oss")  # the others in one process: tests/engine/test_engine.py
PAIRS = [*zip(ARCHITECTURES, itertools.cycle(("shm", "file", "redis")), strict=False)]
CASES = [
    pytest.param(*pair, dtype, marks=[pytest.mark.slow] * (dtype != "float32" or pair[0] not in OVER_PROCESSES))
    for pair in PAIRS
    for dtype in ("float32", "bfloat16", "float16")
]


@pytest.mark.parametrize(
    ("architecture", "connector_url", "dtype"),
    [
        *CASES,
        ("deepseek_v3", "shm", "float32"),
        ("gemma2", "file", "bfloat16"),
        pytest.param("deepseek_v2", "file", "float32", marks=pytest.mark.slow),
        pytest.param("deepseek_v3", "redis", "float32", marks=pytest.mark.slow),
    ],
    indirect=["connector_url"],
)
def test_tokens_equal_transformers_for_every_architecture(
    dtype: str,
    architecture: str,
    connector_url: str,
    checkpoint: Callable[..., Path],
    generate: Callable[..., list[list[int]]],
    prompts: list[list[int]],
    deploy: Callable[..., Any],
    complete_all: Callable[..., list[list[int]]],
) -> None:
    path = checkpoint(architecture, dtype=dtype)
    expected = generate(path, prompts, 32)
    with deploy(model=str(path), connector=connector_url, num_blocks=1024, max_num_batched_tokens=256) as deployment:
        assert complete_all(deployment, prompts) == expected
        assert complete_all(deployment, prompts) == expected, "with warm caches"


def test_both_instance_beside_a_prefill_instance(
    checkpoint: Callable[..., Path],
    generate: Callable[..., list[list[int]]],
    prompts: list[list[int]],
    deploy: Callable[..., Any],
    complete_all: Callable[..., list[list[int]]],
) -> None:
    """The `both` instance computes some prompts itself and loads the KV of others, in the same batches."""
    path = checkpoint("llama")
    expected = generate(path, prompts, 32)
    settings = {"prefill": 1, "decode": 0, "both": 1, "policy": "round_robin"}
    with deploy(model=str(path), num_blocks=1024, max_num_batched_tokens=256, **settings) as deployment:
        assert complete_all(deployment, prompts) == expected
        log = httpx.get(f"{deployment.url}/debug/requests").json()["requests"]
        assert {request["prefill_instance"] for request in log} == {"prefill-0", "both-0"}
        assert {request["decode_instance"] for request in log} == {"both-0"}


@pytest.mark.parametrize("connector_url", CONNECTORS, indirect=True)
def test_tokens_equal_transformers_over_every_connector(
    connector_url: str,
    checkpoint: Callable[..., Path],
    generate: Callable[..., list[list[int]]],
    prompts: list[list[int]],
    deploy: Callable[..., Any],
    complete_all: Callable[..., list[list[int]]],
    metric: Callable[..., float],
    wait_until: Callable[..., None],
) -> None:
    path, some = checkpoint("llama"), prompts[:12]
    expected = generate(path, some, 32)
    settings = {
        "num_blocks": 1024,
        "max_num_batched_tokens": 64,
        "policy": "round_robin",  # every instance serves requests
    }
    with deploy(model=str(path), connector=connector_url, **settings) as deployment:
        assert complete_all(deployment, some) == expected
        double(deployment)
        assert complete_all(deployment, some) == expected, "two instances per role, the new ones with empty caches"
        again = complete_all(deployment, some, cache_salt="a new namespace")
        assert again == expected
        tokens = partial(metric, deployment, "prompt_tokens_by_source_total", role="decode")
        wait_until(lambda: tokens() == 3 * sum(map(len, some)) and metric(deployment, "kv_cache_blocks_held") == 0)
        assert tokens(source="computed") == 0
        # Tiers count blocks that they lack, although another tier may have them.
        tiers = {"connector": "tiered"} if connector_url.startswith("tiered") else {}
        assert metric(deployment, "kv_transfer_failures_total", **tiers) == 0
        loaded = partial(metric, deployment, "kv_transfer_blocks_total", direction="load")
        wait_until(lambda: loaded(instance="decode-0") > 0 and loaded(instance="decode-1") > 0)
        if "codec" in connector_url:
            bytes_each = metric(deployment, "kv_transfer_bytes_total", direction="load") / loaded()
            assert bytes_each < 3 * 2 * 2 * 16 * 16 * 4, "layers, K and V, heads, tokens, dimensions, bytes"


def double(deployment: Any) -> None:
    """Start another prefill and another decode instance."""
    for name in ("prefill-0", "decode-0"):
        first = deployment.child(name)
        second = name.replace("0", "1")
        arguments = [second if argument == name else argument for argument in first.arguments]
        deployment.children.append(type(first)(second, arguments, first.environment))
        deployment._start(deployment.children[-1])
    deployment.wait_ready()
