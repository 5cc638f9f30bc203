"""The gate over nixl://: decode reads prefill's pool, and the tokens are those of generate."""

import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest


def test_greedy_equals_generate_with_blocks_read_in_place(
    checkpoint: Callable[..., Path],
    generate: Callable[..., list[list[int]]],
    prompts: list[list[int]],
    deploy: Callable[..., Any],
    complete: Callable[..., dict[str, Any]],
    blocks_held: Callable[[Any], dict[str, float]],
) -> None:
    pytest.importorskip("nixl", reason="NIXL is not installed: pip install 'pdserve[nixl]'")
    path, some = checkpoint("llama"), prompts[:10]
    expected = generate(path, some, 16)
    with deploy(
        model=str(path), connector="nixl://?timeout=20", num_blocks=1024, max_num_batched_tokens=256
    ) as deployment:
        with ThreadPoolExecutor(len(some)) as threads:
            replies = list(
                threads.map(lambda prompt: complete(deployment, prompt=prompt, max_tokens=16, ignore_eos=True), some)
            )
        assert [reply["choices"][0]["token_ids"] for reply in replies] == expected
        give_up = time.monotonic() + 40  # a lease is 60 seconds
        while blocks_held(deployment)["pdserve_kv_cache_blocks_held"]:
            assert time.monotonic() < give_up, "decode has read them, but prefill still holds blocks"
            time.sleep(0.1)
