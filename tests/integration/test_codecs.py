"""A lossy codec between router, P and D. Lossless ones are in test_token_identity.py."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest


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
