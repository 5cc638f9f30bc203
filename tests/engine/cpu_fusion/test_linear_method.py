"""Deltas of linear layers: the model computes what it would with hooks that add the same, through the whole engine."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from pdserve.config import EngineConfig
from pdserve.engine.checkpoint_loader import load
from pdserve.engine.cpu_fusion.linear_method import Linear, PlainMethod, add_delta, prepack
from pdserve.engine.engine import Engine
from pdserve.request import Request, SamplingParams

LAYERS = ("model.layers.0.self_attn.q_proj", "model.layers.1.mlp.gate_proj", "model.layers.1.mlp.down_proj")


class LowRank:
    """x · Aᵀ · Bᵀ of rank 2, large enough to change the answers."""

    def __init__(self, features: tuple[int, int], seed: int, dtype: torch.dtype) -> None:
        random = torch.Generator().manual_seed(seed)
        self.a, self.b = (
            (torch.randn(shape, generator=random) / 4).to(dtype) for shape in ((2, features[0]), (features[1], 2))
        )

    def add(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        linear = torch.nn.functional.linear
        return y + linear(linear(x, self.a), self.b)


def deltas(model: torch.nn.Module, dtype: torch.dtype) -> dict[str, LowRank]:
    found: dict[str, Any] = {name: model.get_submodule(name) for name in LAYERS}
    return {
        name: LowRank((layer.in_features, layer.out_features), i, dtype)
        for i, (name, layer) in enumerate(found.items())
    }


def run(engine: Engine, prompts: list[list[int]]) -> list[list[int]]:
    sampling = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
    seqs = [engine.new_sequence(str(i), Request(prompt=prompt, sampling=sampling)) for i, prompt in enumerate(prompts)]
    for seq in seqs:
        engine.add(seq)
    while engine.has_work:
        for seq in engine.step().sampled:
            if seq.output.finish_reason():
                engine.remove(seq)
    return [seq.output.tokens[seq.output.num_prompt :].tolist() for seq in seqs]


def engine_with_deltas(path: Path, dtype: str) -> Engine:
    config = EngineConfig(model=str(path), dtype=dtype, num_blocks=400, max_num_batched_tokens=256)
    checkpoint = load(config)
    for name, delta in deltas(checkpoint.model, checkpoint.dtype).items():
        add_delta(checkpoint.model, name, delta)
    return Engine(config, checkpoint)


def test_a_delta_through_the_engine(checkpoint: Callable[..., Path], prompts: list[list[int]], generate: Any) -> None:
    path = checkpoint("llama", dtype="float32")
    model: Any = transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    for name, delta in deltas(model, torch.float32).items():
        model.get_submodule(name).register_forward_hook(lambda _, args, y, delta=delta: delta.add(args[0], y))
    settings: dict[str, Any] = {"max_new_tokens": 24, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    expected = []
    for prompt in prompts:
        ids = torch.tensor([prompt])
        output = model.generate(ids, attention_mask=torch.ones_like(ids), **settings)
        expected.append(output[0, len(prompt) :].tolist())
    assert run(engine_with_deltas(path, "float32"), prompts) == expected
    assert expected != generate(path, prompts, 24), "the deltas change nothing"


def test_rows_of_a_delta_in_16_bits(checkpoint: Callable[..., Path], prompts: list[list[int]]) -> None:
    path = checkpoint("llama", dtype="bfloat16")
    together = run(engine_with_deltas(path, "bfloat16"), prompts)
    alone = engine_with_deltas(path, "bfloat16")
    assert [run(alone, [prompt])[0] for prompt in prompts] == together


def test_layers_and_methods() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(8, 6), torch.nn.Linear(6, 4, bias=False))
    x = torch.randn(3, 8)
    first = LowRank((8, 6), 0, torch.float32)
    expected = model[1](first.add(x, model[0](x)))
    add_delta(model, "0", first)
    assert torch.equal(model(x), expected) and isinstance(model[0], Linear)
    method: Any = model[0].method
    assert isinstance(method, PlainMethod) and method.features == (8, 6) and method.num_bytes == 4 * (48 + 6)
    for name, message in {"0": "has a delta", "2": "has no layer 2", "": "is a Sequential"}.items():
        with pytest.raises(ValueError, match=message):
            add_delta(model, name, first)
    packed = torch.nn.Sequential(torch.nn.Linear(64, 32, dtype=torch.bfloat16))
    assert prepack(packed) == 1
    names = list[str]()
    packed.apply(lambda module: names.append(type(module).__name__))  # torch's own, which visits all modules
    assert names == ["PackedMethod", "Linear", "Sequential"]
    layer: Any = packed[0]
    assert layer.method.features == (64, 32) and layer.method.num_bytes == 2 * (64 * 32 + 32)
