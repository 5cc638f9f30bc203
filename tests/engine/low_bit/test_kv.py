"""KV in 8 bits: half the bytes, and the same bits for any division of a prompt into chunks."""

from collections.abc import Callable
from pathlib import Path

import pytest

from pdserve.config import EngineConfig
from pdserve.engine.checkpoint_loader import load
from pdserve.engine.engine import Engine
from pdserve.errors import SetupError
from pdserve.request import Request, SamplingParams
from tests.engine.low_bit.test_checkpoint import PROMPT


def answers(path: Path, **settings: object) -> list[tuple[list[int], list[float]]]:
    """Return tokens and their log probabilities of prompts that share a prefix, computed together."""
    options = {"num_blocks": 64, "dtype": "bfloat16", "device": "cpu", "kv_cache_dtype": "int8", **settings}
    engine = Engine(EngineConfig(model=str(path), **options))  # type: ignore[arg-type]
    greedy = SamplingParams(max_tokens=20, temperature=0, ignore_eos=True, logprobs=0)
    seqs = [engine.new_sequence(str(i), Request(prompt=[*PROMPT[: 40 + 15 * i], i], sampling=greedy)) for i in range(3)]
    for seq in seqs:
        engine.add(seq)
    logprobs: dict[str, list[float]] = {seq.request_id: [] for seq in seqs}
    while engine.has_work:
        for seq, accepted in engine.step().outcome.items():
            logprobs[seq.request_id] += [one.logprob for one in accepted.logprobs]
            if seq.output.finish_reason():
                engine.remove(seq)
    return [(seq.output.tokens[seq.output.num_prompt :].tolist(), logprobs[seq.request_id]) for seq in seqs]


@pytest.mark.parametrize("architecture", ["llama", "gemma3", "gpt_oss", "qwen3_5"])  # windows, sinks, states
def test_chunks_change_no_bit(architecture: str, checkpoint: Callable[..., Path]) -> None:
    path = checkpoint(architecture)
    expected = answers(path)
    for settings in ({"max_num_batched_tokens": 7}, {"block_size": 32}, {"num_blocks": 9, "swap_space": 0.01}):
        assert answers(path, **settings) == expected
    assert answers(path, kv_cache_dtype="auto") != expected, "rounding changes the model"


def test_a_token_takes_half_the_bytes(checkpoint: Callable[..., Path]) -> None:
    plain, rounded = (
        load(EngineConfig(model=str(checkpoint("llama")), dtype="bfloat16", device="cpu", kv_cache_dtype=kv)).layout
        for kv in ("auto", "int8")
    )
    assert rounded.block_bytes / plain.block_bytes == (plain.head_dim + 2) / (2 * plain.head_dim)  # 0.51 at 128 numbers
    assert not rounded.is_convertible_to(plain) and not plain.is_convertible_to(rounded)


@pytest.mark.parametrize(
    ("architecture", "settings", "reason"),
    [
        ("llama", {"dtype": "float32"}, "--kv-cache-dtype int8 needs --dtype bfloat16 or float16"),
        ("deepseek_v3", {"dtype": "bfloat16"}, "not for models with latent KV"),
    ],
)
def test_what_is_not_supported_is_said(
    architecture: str, settings: dict[str, str], reason: str, checkpoint: Callable[..., Path]
) -> None:
    with pytest.raises(SetupError, match=reason):
        load(EngineConfig(model=str(checkpoint(architecture)), device="cpu", kv_cache_dtype="int8", **settings))  # type: ignore[arg-type]
