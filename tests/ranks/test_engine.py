"""Engine on several ranks: greedy float32 output equals transformers' generate, token for token."""

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers

from pdserve.config import EngineConfig
from pdserve.costs import Costs
from pdserve.engine.engine import Engine
from pdserve.engine.features import Embedding
from pdserve.engine.memory.kv_memory import section_views
from pdserve.engine.parallel.rank_group import RankGroup
from pdserve.engine.parallel.shard import Shard
from pdserve.engine.sequence import Sequence
from pdserve.errors import SetupError
from pdserve.request import Request, SamplingParams

Generate = Callable[[Path, list[list[int]], int], list[list[int]]]
MakeEngine = Callable[..., Engine]


def run(engine: Engine, prompts: list[list[int]], num_tokens: int) -> list[list[int]]:
    sampling = SamplingParams(max_tokens=num_tokens, temperature=0, ignore_eos=True)
    seqs = [engine.new_sequence(str(i), Request(prompt=prompt, sampling=sampling)) for i, prompt in enumerate(prompts)]
    for seq in seqs:
        engine.add(seq)
    while engine.has_work:
        for seq in engine.step().sampled:
            if seq.output.finish_reason():
                engine.remove(seq)
    assert engine.pool.num_held == 0
    return [seq.output.tokens[seq.output.num_prompt :].tolist() for seq in seqs]


@pytest.mark.parametrize(
    "architecture",
    [
        *("llama", "qwen3_moe", "deepseek_v3"),
        *(
            pytest.param(name, marks=pytest.mark.slow)
            for name in ("qwen2", "qwen3", "mistral", "gemma2", "gemma3", "olmo2", "deepseek_v2")
        ),
    ],
)
def test_equals_generate(
    architecture: str,
    checkpoint: Callable[..., Path],
    generate: Generate,
    prompts: list[list[int]],
    ranked_engine: MakeEngine,
) -> None:
    path, some = checkpoint(architecture), prompts[:10]
    engine = ranked_engine(path, num_blocks=200, max_num_batched_tokens=256)
    assert section_views(engine.runner.kv.pool_NX, engine.layout)[0].shape[3] == 1, "each rank has one of two KV heads"
    for _ in ("cold", "with a warm prefix cache"):
        assert run(engine, some, 16) == generate(path, some, 16)
    assert engine.scheduler.prefix_hits > 500


def test_fused_projections(checkpoint: Callable[..., Path], generate: Generate, ranked_engine: MakeEngine) -> None:
    """Phi-3 has q, k and v in one weight, and gate and up in another."""
    path, prompts = checkpoint("phi3"), [list(range(length)) for length in (1, 10, 31, 48)]
    assert run(ranked_engine(path, num_blocks=100, max_num_batched_tokens=16), prompts, 16) == generate(
        path, prompts, 16
    )


@pytest.mark.parametrize("architecture", ["qwen3", "olmo2"])
def test_ranks_share_kv_heads(
    architecture: str,
    checkpoint: Callable[..., Path],
    generate: Generate,
    prompts: list[list[int]],
    ranked_engine: MakeEngine,
) -> None:
    """Four ranks and two KV heads, each of which two ranks have."""
    path, some = checkpoint(architecture), prompts[:9]
    assert run(ranked_engine(path, 4, num_blocks=100), some, 8) == generate(path, some, 8)


@pytest.mark.parametrize("dtype", ["bfloat16", pytest.param("float16", marks=pytest.mark.slow)])
def test_16_bits_are_exact_within_a_degree(
    dtype: str, checkpoint: Callable[..., Path], prompts: list[list[int]], ranked_engine: MakeEngine
) -> None:
    """Tokens depend neither on the batch nor on chunks, and the number of ranks is part of the numerics class."""
    path, some = checkpoint("qwen3", dtype=dtype), prompts[:10]
    engine = ranked_engine(path, num_blocks=200, max_num_batched_tokens=32)
    together = run(engine, some, 16)
    assert "-2ranks-" in engine.layout.numerics
    engine = ranked_engine(path, num_blocks=200, max_num_batched_tokens=1024)
    assert [run(engine, [prompt], 16)[0] for prompt in some] == together


def test_pool_is_a_slice(checkpoint: Callable[..., Path], prompts: list[list[int]], ranked_engine: MakeEngine) -> None:
    """Rank 0's pool has the first head of the pool of an instance with one rank."""
    path, prompt = checkpoint("llama"), prompts[8]
    whole, part = Engine(EngineConfig(model=str(path), num_blocks=20)), ranked_engine(path, num_blocks=20)
    for engine in (whole, part):
        run(engine, [prompt], 1)
    blocks = len(prompt) // 16
    of_whole, of_part = (section_views(each.runner.kv.pool_NX, each.layout)[0][:blocks] for each in (whole, part))
    assert torch.allclose(of_part[:, :, :, 0], of_whole[:, :, :, 0], atol=1e-5)
    assert part.layout.block_bytes * 2 == whole.layout.block_bytes


@pytest.mark.parametrize("swap_space", [0, 0.01])
def test_equals_generate_while_preempting(
    swap_space: float,
    checkpoint: Callable[..., Path],
    generate: Generate,
    prompts: list[list[int]],
    ranked_engine: MakeEngine,
) -> None:
    """By recomputing, and by swapping at no cost."""
    path, small = checkpoint("llama"), [p for p in prompts if 30 < len(p) <= 100]
    settings: dict[str, Any] = {"num_blocks": 24, "max_num_batched_tokens": 64, "max_model_len": 200}
    tight = ranked_engine(path, swap_space=swap_space, **settings)
    tight.scheduler.costs = Costs(prefill=(1, 1, 0), swap=(0, 0))
    for _ in range(2):
        before = tight.scheduler.num_preemptions
        assert run(tight, small, 32) == generate(path, small, 32)
        assert tight.scheduler.num_preemptions > before
    assert tight.scheduler.swap_space.num_swaps == (tight.scheduler.num_preemptions if swap_space else 0)


@pytest.mark.slow
def test_kernels_of_gpus() -> None:
    """Triton reads its setting when it is imported, so the cases run in a new process."""
    pytest.importorskip("triton")
    cases = Path(__file__).with_name("triton_cases.py")
    environment = {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "--import-mode=importlib", str(cases)]
    completed = subprocess.run(command, env=os.environ | environment, capture_output=True, text=True, timeout=1200)
    assert completed.returncode == 0, completed.stdout[-4000:] + completed.stderr[-2000:]


def llama_with_plan(**plan: str) -> Any:
    config: Any = transformers.LlamaConfig()
    config.base_model_tp_plan = plan
    return config


def shard(config: Any, ranks: int) -> Shard:
    return Shard(Path("nowhere"), config, RankGroup(0, ranks, torch.device("cpu"), 0))


@pytest.mark.parametrize(
    ("config", "ranks", "reason"),
    [
        (transformers.LlamaConfig(), 3, "neither divides 3 its 32 KV heads"),
        (transformers.LlamaConfig(num_attention_heads=4, num_key_value_heads=1), 8, "num_attention_heads of 4"),
        (transformers.LlamaConfig(intermediate_size=129), 2, "its intermediate_size of 129 is no multiple of 2"),
        (transformers.BloomConfig(), 2, "transformers has no plan for it"),
        (llama_with_plan(up_proj="colwise"), 2, "its plan does not slice attention"),
        (transformers.Gemma3Config(), 2, "its text model is part of another one"),
        (transformers.Gemma4TextConfig(), 2, "its layers differ in shape"),
    ],
)
def test_models_that_cannot_be_divided_are_refused(config: Any, ranks: int, reason: str) -> None:
    with pytest.raises(SetupError, match=f"is not supported with --tensor-parallel-size {ranks}: .*{reason}"):
        shard(config, ranks)


@pytest.mark.parametrize("mode", ["mean", "last", "cls"])
def test_embeddings_are_those_of_one_rank(
    mode: str, checkpoint: Callable[..., Path], prompts: list[list[int]], ranked_engine: MakeEngine
) -> None:
    """Steps without logits, in chunks, and beside ones with: all ranks take part in the same collectives."""
    path, some = checkpoint("llama"), [prompt for prompt in prompts if prompt][:4]
    settings: dict[str, Any] = {"num_blocks": 200, "max_num_batched_tokens": 16, "pooling": mode}
    vectors = list[list[bytes]]()
    for engine in (Engine(EngineConfig(model=str(path), device="cpu", **settings)), ranked_engine(path, **settings)):
        embed, greedy = (SamplingParams(max_tokens=3, temperature=0, embed=flag) for flag in (True, False))
        seqs = [engine.new_sequence(str(i), Request(prompt=prompt, sampling=embed)) for i, prompt in enumerate(some)]
        waiting = [*seqs, engine.new_sequence("text", Request(prompt=some[0], sampling=greedy))]
        for seq in waiting:
            engine.add(seq)
        while waiting:
            engine.step()
            for seq in [seq for seq in waiting if vector_of(seq) or seq.output.finish_reason()]:
                waiting.remove(seq)
                engine.remove(seq)
        vectors.append([*map(vector_of, seqs)])
    for one, of_ranks in zip(*vectors, strict=True):
        assert one and np.allclose(np.frombuffer(one, "<f4"), np.frombuffer(of_ranks, "<f4"), atol=1e-5)


def vector_of(seq: Sequence) -> bytes:
    return next((feature.vector for feature in seq.features if isinstance(feature, Embedding)), b"")
