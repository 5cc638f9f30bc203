"""Cases of test_engine.py, run in a new process with Triton's interpreter: two ranks with the kernels and fusions of GPUs."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from pdserve.config import EngineConfig
from pdserve.engine.engine import Engine
from pdserve.request import Request, SamplingParams


@pytest.mark.parametrize(("architecture", "is_fused"), [("llama", True), ("qwen3", True), ("olmo2", False)])
def test_two_ranks_say_what_one_says(
    architecture: str, is_fused: bool, checkpoint: Callable[..., Path], ranked_engine: Callable[..., Engine]
) -> None:
    """Layers are found by trials, in which all ranks sum. In float16, which the interpreter rounds as a GPU does."""
    path = checkpoint(architecture, dtype="float16")
    settings: dict[str, Any] = {"kernel": "triton", "num_blocks": 8, "max_num_batched_tokens": 16}
    tokens = []
    for engine in (ranked_engine(path, **settings), Engine(EngineConfig(model=str(path), **settings))):
        assert engine.runner.kernel.NAME == "triton-invariant"
        layer = engine.checkpoint.model.get_submodule("model.layers.0")
        assert ("forward" in vars(layer)) == is_fused, "OLMo 2 has its norms behind attention and MLP"
        sampling = SamplingParams(max_tokens=6, temperature=0, ignore_eos=True)
        seq = engine.new_sequence("r", Request(prompt=list(range(3, 40)), sampling=sampling))
        engine.add(seq)
        while seq.output.finish_reason() is None:
            engine.step()
        tokens.append(seq.output.tokens.tolist())
    assert tokens[0] == tokens[1]
