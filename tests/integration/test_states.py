"""Models with recurrent layers over real stores: one state crosses with the KV of the other layers."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

Generate = Callable[[Path, list[list[int]], int], list[list[int]]]
# Numbers of a token in the layers with KV, and of a state, padded to blocks of these: of the architectures in conftest.py.
SIZES = {"qwen3_next": (1 * 2 * 2 * 16, 9 * 1024), "lfm2": (1 * 2 * 2 * 16, 1024)}


@pytest.mark.parametrize("architecture", SIZES)
@pytest.mark.parametrize("connector_url", ["shm", "file"], indirect=True)
def test_one_state_crosses_from_prefill_to_decode(
    connector_url: str,
    architecture: str,
    checkpoint: Callable[..., Path],
    generate: Generate,
    prompts: list[list[int]],
    deploy: Callable[..., Any],
    complete_all: Callable[..., list[list[int]]],
    metric: Callable[..., float],
    wait_until: Callable[..., None],
) -> None:
    path, some = checkpoint(architecture, dtype="float32"), prompts[:12]
    settings = {"model": str(path), "connector": connector_url, "num_blocks": 1024, "max_num_batched_tokens": 256}
    with deploy(**settings) as deployment:
        expected = generate(path, some, 32)
        assert complete_all(deployment, some) == expected
        loaded, (token, state) = partial(metric, deployment, role="decode", direction="load"), SIZES[architecture]
        blocks = sum(-(-len(prompt) // 16) for prompt in some)
        wait_until(lambda: loaded("kv_transfer_blocks_total") >= blocks + len(some))
        assert loaded("kv_transfer_blocks_total") == blocks + len(some)
        assert loaded("kv_transfer_bytes_total") == (blocks * 16 * token + len(some) * state) * 4
        assert complete_all(deployment, some) == expected, "with warm caches"
        assert metric(deployment, "prompt_tokens_by_source_total", role="decode", source="computed") == 0
        assert metric(deployment, "handover_fallbacks_total") == 0 == metric(deployment, "kv_transfer_failures_total")
