"""Codecs between router, P and D: lossless ones change no token, lossy ones say that they are there."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest


@pytest.mark.parametrize("connector_url", ["shm?codec=zstd"], indirect=True)
def test_lossless_codecs_change_no_token(
    connector_url: str,
    checkpoint: Callable[..., Path],
    generate: Callable[..., list[list[int]]],
    prompts: list[list[int]],
    deploy: Callable[..., Any],
    complete_all: Callable[..., list[list[int]]],
    metric: Callable[..., float],
    until: Callable[..., None],
) -> None:
    path = checkpoint("llama")
    expected = generate(path, prompts, 32)
    with deploy(model=str(path), connector=connector_url, num_blocks=1024, max_num_batched_tokens=256) as deployment:
        assert complete_all(deployment, prompts) == expected
        assert complete_all(deployment, prompts) == expected, "with warm caches"
        tokens = partial(metric, deployment, "prompt_tokens_by_source_total", role="decode")
        until(lambda: tokens(source="loaded") + tokens(source="local_hit") == 2 * sum(map(len, prompts)))
        assert tokens(source="computed") == 0
        moved = {"role": "decode", "direction": "load"}
        blocks = metric(deployment, "kv_transfer_blocks_total", **moved)
        bytes_each = metric(deployment, "kv_transfer_bytes_total", **moved) / blocks
        assert bytes_each < 3 * 2 * 2 * 16 * 16 * 4, "layers, K and V, heads, tokens, dimensions, bytes"


@pytest.mark.parametrize("connector_url", ["shm?codec=int8"], indirect=True)
def test_a_lossy_codec_is_announced_and_works(
    connector_url: str,
    checkpoint: Callable[..., Path],
    prompts: list[list[int]],
    deploy: Callable[..., Any],
    complete_all: Callable[..., list[list[int]]],
    metric: Callable[..., float],
    until: Callable[..., None],
) -> None:
    said: list[str] = []
    some = prompts[-4:]
    with deploy(model=str(checkpoint("llama")), connector=connector_url, num_blocks=256, said=said) as deployment:
        assert all(len(tokens) == 32 for tokens in complete_all(deployment, some))
        tokens = partial(metric, deployment, "prompt_tokens_by_source_total", role="decode")
        until(lambda: tokens(source="loaded") == sum(map(len, some)))
    assert sum("lossy codec int8" in line for line in said) == 2, said
