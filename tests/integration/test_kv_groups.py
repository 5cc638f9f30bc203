"""A model with two KV groups of different row sizes, and layers that read the KV of others: Gemma 4."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

# Layers 0, 1 and 3 slide over 2 heads of 16 numbers, layer 2 attends to all with 1 head of 32; layers 4 and 5 read others.
FULL, SLIDING = 1 * 2 * 1 * 32, 3 * 2 * 2 * 16  # numbers of a token: layers, K and V, heads, head size
WINDOW = 48
Generate = Callable[[Path, list[list[int]], int], list[list[int]]]


@pytest.mark.parametrize(
    ("block_size", "flags"), [(16, []), (32, ["--convert-kv"])], ids=["same-blocks", "converted-blocks"]
)
@pytest.mark.parametrize("connector_url", ["shm", "file"], indirect=True)
def test_two_groups_cross_from_prefill_to_decode(
    connector_url: str,
    block_size: int,
    flags: list[str],
    checkpoint: Callable[..., Path],
    generate: Generate,
    prompts: list[list[int]],
    deploy: Callable[..., Any],
    complete_all: Callable[..., list[list[int]]],
    metric: Callable[..., float],
    wait_until: Callable[..., None],
) -> None:
    path, some = checkpoint("gemma4", dtype="float32"), prompts[:12]
    decode = ["--block-size", str(block_size), *flags]
    settings = {"model": str(path), "connector": connector_url, "num_blocks": 1024, "max_num_batched_tokens": 256}
    with deploy(**settings, flags={"decode": decode}) as deployment:
        expected = generate(path, some, 32)
        assert complete_all(deployment, some) == expected
        loaded = partial(metric, deployment, role="decode", direction="load")
        full = sum(-(-len(prompt) // 16) for prompt in some)
        sliding = sum(-(-len(prompt) // 16) - max(0, len(prompt) - WINDOW) // 16 for prompt in some)
        blocks = full + sliding
        wait_until(lambda: loaded("kv_transfer_blocks_total") >= blocks)
        assert loaded("kv_transfer_blocks_total") == blocks
        assert loaded("kv_transfer_bytes_total") == (full * FULL + sliding * SLIDING) * 16 * 4
        assert complete_all(deployment, some) == expected, "with warm caches"
        assert metric(deployment, "prompt_tokens_by_source_total", role="decode", source="computed") == 0
        assert metric(deployment, "handover_fallbacks_total") == 0 == metric(deployment, "kv_transfer_failures_total")
