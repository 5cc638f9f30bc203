"""Codecs between router, P and D: lossless ones change no token, lossy ones say that they are there."""

import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from pdserve.config import UpConfig
from pdserve.deployment import Deployment, free_port


def generate_all(complete: Callable[..., dict[str, Any]], deployment: Any, prompts: list[list[int]]) -> list[list[int]]:
    with ThreadPoolExecutor(len(prompts)) as threads:
        replies = threads.map(
            lambda prompt: complete(deployment, prompt=prompt, max_tokens=32, ignore_eos=True), prompts
        )
        return [reply["choices"][0]["token_ids"] for reply in replies]


def until(condition: Callable[[], bool], seconds: float = 20.0) -> bool:
    """Counts come with heartbeats."""
    give_up = time.monotonic() + seconds
    while not (held := condition()) and time.monotonic() < give_up:
        time.sleep(0.05)
    return held


def total(deployment: Any, metric: str, *labels: str) -> float:
    """The sum over all instances of the series with these labels."""
    lines = httpx.get(f"{deployment.url}/metrics").text.splitlines()
    found = [line for line in lines if line.startswith(f"{metric}{{") and all(label in line for label in labels)]
    return sum(float(line.rsplit(" ", 1)[1]) for line in found)


def decode_tokens(deployment: Any, source: str) -> float:
    return total(deployment, "pdserve_prompt_tokens_by_source_total", 'role="decode"', f'source="{source}"')


@pytest.mark.parametrize("connector_url", ["shm?codec=zstd"], indirect=True)
def test_lossless_codecs_change_no_token(
    connector_url: str,
    checkpoint: Callable[..., Path],
    generate: Callable[..., list[list[int]]],
    prompts: list[list[int]],
    deploy: Callable[..., Any],
    complete: Callable[..., dict[str, Any]],
) -> None:
    path = checkpoint("llama")
    expected = generate(path, prompts, 32)
    with deploy(model=str(path), connector=connector_url, num_blocks=1024, max_num_batched_tokens=256) as deployment:
        assert generate_all(complete, deployment, prompts) == expected
        assert generate_all(complete, deployment, prompts) == expected, "with warm caches"
        given = 2 * sum(map(len, prompts))
        assert until(lambda: sum(decode_tokens(deployment, source) for source in ("loaded", "local_hit")) == given)
        assert decode_tokens(deployment, "computed") == 0
        decode, load = 'role="decode"', 'direction="load"'
        blocks = total(deployment, "pdserve_kv_transfer_blocks_total", decode, load)
        bytes_each = total(deployment, "pdserve_kv_transfer_bytes_total", decode, load) / blocks
        assert bytes_each < 3 * 2 * 2 * 16 * 16 * 4, "layers, K and V, heads, tokens, dimensions, bytes"


@pytest.mark.parametrize("connector_url", ["shm?codec=int8"], indirect=True)
def test_a_lossy_codec_is_announced_and_works(
    connector_url: str,
    checkpoint: Callable[..., Path],
    prompts: list[list[int]],
    complete: Callable[..., dict[str, Any]],
) -> None:
    said: list[str] = []
    config = UpConfig(
        model=str(checkpoint("llama")),
        connector=connector_url,
        num_blocks=256,
        port=free_port(),
        threads=1,
        local_prefill_tokens=0,
    )
    with Deployment(config, say=said.append) as deployment:
        deployment.wait_ready(120)
        assert all(len(tokens) == 32 for tokens in generate_all(complete, deployment, prompts[-4:]))
        assert until(lambda: decode_tokens(deployment, "loaded") == sum(map(len, prompts[-4:])))
    assert sum("lossy codec int8" in line for line in said) == 2, said
