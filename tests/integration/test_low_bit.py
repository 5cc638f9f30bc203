"""Low-bit weights and KV through a router, a prefill and a decode instance: KV crosses between instances of one rounding."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from pdserve.config import EngineConfig
from pdserve.engine.engine import Engine
from pdserve.request import Request, SamplingParams


@pytest.mark.parametrize(("flag", "value"), [("quantization", "int4"), ("kv_cache_dtype", "int8")])
def test_split_answers_have_the_bits_of_one_engine(
    flag: str,
    value: str,
    checkpoint: Callable[..., Path],
    prompts: list[list[int]],
    deploy: Callable[..., Any],
    complete_all: Callable[..., list[list[int]]],
    metric: Callable[..., float],
    wait_until: Callable[..., None],
) -> None:
    path = checkpoint("llama", dtype="bfloat16")

    def alone(**settings: Any) -> list[list[int]]:
        engine = Engine(EngineConfig(model=str(path), num_blocks=1024, **settings))
        greedy = SamplingParams(max_tokens=32, temperature=0, ignore_eos=True)
        seqs = [
            engine.new_sequence(str(i), Request(prompt=prompt, sampling=greedy)) for i, prompt in enumerate(prompts)
        ]
        for seq in seqs:
            engine.add(seq)
        while any(seq.output.num_generated < 32 for seq in seqs):
            engine.step()
        return [seq.output.tokens[len(prompt) :].tolist() for seq, prompt in zip(seqs, prompts, strict=True)]

    expected = alone(**{flag: value})
    assert expected != alone()
    flags = {role: [f"--{flag.replace('_', '-')}", value, "--num-blocks", "1024"] for role in ("prefill", "decode")}
    with deploy(model=str(path), flags=flags, kv_cache_memory=None) as deployment:
        assert complete_all(deployment, prompts) == expected
        tokens = len(prompts) * 31
        wait_until(lambda: metric(deployment, "generation_tokens_total", role="decode") == tokens, "the last heartbeat")
        assert metric(deployment, "kv_transfer_blocks_total", role="decode", direction="load") > 0
        assert metric(deployment, "kv_transfer_failures_total") == 0
