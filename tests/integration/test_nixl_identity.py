"""The gate over nixl://: decode reads prefill's pool, and the tokens are those of generate."""

import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from pdserve.proto import pdserve_pb2 as pb


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


def test_nothing_is_leased_for_a_request_that_no_decode_takes_part_in(
    checkpoint: Callable[..., Path], desk: Callable[..., Any]
) -> None:
    pytest.importorskip("nixl", reason="NIXL is not installed: pip install 'pdserve[nixl]'")
    prefill = desk(model=str(checkpoint("llama")), connector="nixl://", num_blocks=64)
    prefill.submit("one token", list(range(100)), 1, pb.PREFILL)
    prefill.until(lambda outputs: any(output.finish_reason for output in outputs))
    assert prefill.instance.engine.pool.num_held == 0 and prefill.instance.num_jobs == 0
    prefill.submit("two tokens", list(range(100)), 2, pb.PREFILL)
    prefill.until(lambda outputs: any(output.stored.final for output in outputs))
    assert prefill.instance.engine.pool.num_held == 7
