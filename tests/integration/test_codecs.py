"""A deployment with a lossy codec; test_token_identity.py covers lossless ones."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest


@pytest.mark.parametrize("connector_url", ["shm?codec=int8"], indirect=True)
def test_lossy_codec_works_and_each_instance_logs_it(
    connector_url: str,
    checkpoint: Callable[..., Path],
    prompts: list[list[int]],
    deploy: Callable[..., Any],
    complete_all: Callable[..., list[list[int]]],
    metric: Callable[..., float],
    wait_until: Callable[..., None],
) -> None:
    log_lines: list[str] = []
    some = prompts[-4:]
    with deploy(
        model=str(checkpoint("llama")), connector=connector_url, num_blocks=256, log_lines=log_lines
    ) as deployment:
        assert all(len(tokens) == 32 for tokens in complete_all(deployment, some))
        tokens = partial(metric, deployment, "prompt_tokens_by_source_total", role="decode")
        wait_until(lambda: tokens(source="loaded") == sum(map(len, some)))
    assert sum("lossy codec int8" in line for line in log_lines) == 2, log_lines
