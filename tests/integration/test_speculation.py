"""Speculation over HTTP: answers of every kind are the same with it and without, on instances of every role."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

SCHEMA = {"type": "object", "properties": {"a": {"type": "boolean"}, "b": {"enum": ["x", "y"]}}, "required": ["a", "b"]}
KINDS: list[dict[str, Any]] = [
    {"temperature": 0, "ignore_eos": True},
    {"temperature": 0.8, "seed": 5, "n": 3, "logprobs": 2},
    {"temperature": 0.3, "seed": 6, "top_p": 0.7, "frequency_penalty": 0.2},
    {"temperature": 0, "response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": SCHEMA}}},
    {"temperature": 0, "ignore_eos": True, "stop": ["aa", "\n", "e"]},
    {"temperature": 0, "ignore_eos": True, "logit_bias": {"97": 3, "98": 3}, "logprobs": 1},
    {"beam_width": 2, "use_beam_search": True, "n": 2, "temperature": 0},
]
PROMPTS = [[97, 98, 99, 100] * 12, [97] * 40, [10, 20, 30, 10, 20, 30, 10, 20], list(range(60)) * 3]


@pytest.mark.parametrize(
    ("roles", "flags"),
    [
        ({"prefill": 1, "decode": 1}, ["--speculate", "suffix", "--speculative-tokens", "4"]),
        ({"prefill": 0, "decode": 0, "both": 1}, ["--speculate", "auto"]),
    ],
    ids=["split", "both"],
)
def test_answers_over_http(
    roles: dict[str, int],
    flags: list[str],
    checkpoint: Callable[..., Path],
    deploy: Callable[..., Any],
    complete: Callable[..., dict[str, Any]],
    metric: Callable[..., float],
    wait_until: Callable[..., None],
) -> None:
    bodies = [{"prompt": prompt, "max_tokens": 40, **kind} for prompt in PROMPTS for kind in KINDS]
    found = []
    role = "both" if "both" in roles else "decode"
    for extra in ([], flags):
        with deploy(model=str(checkpoint("llama", dtype="bfloat16")), flags={role: extra}, **roles) as deployment:
            with ThreadPoolExecutor(8) as threads:
                replies = [*threads.map(lambda body: complete(deployment, **body), bodies)]
            found.append([(reply["choices"], reply["usage"]["completion_tokens"]) for reply in replies])
            wait_until(lambda: metric(deployment, "kv_cache_blocks_held", role=role) == 0, "no block is held")
            accepted = metric(deployment, "spec_decode_num_accepted_tokens_total", role=role)
            assert (accepted > 0) == bool(extra)
            assert metric(deployment, "kv_transfer_failures_total") == 0
            assert metric(deployment, "spec_decode_num_accepted_tokens_per_pos_total", role=role) == accepted
    for body, one, other in zip(bodies, *found, strict=True):
        assert one == other, body
