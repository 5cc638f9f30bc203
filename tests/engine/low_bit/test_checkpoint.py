"""Quantized checkpoints compute what the same weights in 16 bits do, bit for bit, in a fraction of the memory."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, LlamaForCausalLM

from pdserve.config import EngineConfig
from pdserve.engine.checkpoint_loader import load
from pdserve.engine.engine import Engine
from pdserve.engine.low_bit import checkpoint as low_bit_checkpoint
from pdserve.errors import SetupError
from pdserve.kernels.low_bit import LowBitWeight
from pdserve.request import Request, SamplingParams
from tests.engine.low_bit.written import SETTINGS, write

PROMPT = [(i * i + 3 * i) % 250 for i in range(70)]


def answer(path: Path, **settings: Any) -> tuple[list[int], list[float], list[LowBitWeight]]:
    """Return tokens, their log probabilities and the low-bit weights of an engine."""
    engine = Engine(EngineConfig(model=str(path), num_blocks=16, max_num_batched_tokens=32, device="cpu", **settings))
    seq = engine.new_sequence(
        "", Request(prompt=PROMPT, sampling=SamplingParams(max_tokens=24, temperature=0, ignore_eos=True, logprobs=0))
    )
    engine.add(seq)
    logprobs = []
    while seq.output.num_generated < 24:
        logprobs += [one.logprob for accepted in engine.step().outcome.values() for one in accepted.logprobs]
    weights = [
        value
        for module in engine.checkpoint.model.modules()
        for value in vars(module).values()
        if isinstance(value, LowBitWeight)
    ]
    return seq.output.tokens[len(PROMPT) :].tolist(), logprobs, weights


@pytest.mark.parametrize("name", sorted(SETTINGS.keys() - {"gptq-act-order", "w8a8"}))
def test_formats_have_the_bits_of_the_dense_weights(name: str, checkpoint: Callable[..., Path], tmp_path: Path) -> None:
    quantized, dense = write(checkpoint("llama"), tmp_path, name)
    tokens, logprobs, weights = answer(quantized, dtype="bfloat16")
    plain_tokens, plain_logprobs, plain = answer(dense, dtype="bfloat16")
    assert (tokens, logprobs) == (plain_tokens, plain_logprobs) and not plain
    assert len(weights) == 3 * 7
    assert answer(checkpoint("llama"), dtype="bfloat16")[1] != logprobs, "rounding changes the model"


def test_groups_out_of_order_are_low_in_bits_too(
    checkpoint: Callable[..., Path], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    quantized, dense = write(checkpoint("llama"), tmp_path, "gptq-act-order")
    tokens, logprobs, weights = answer(quantized, dtype="bfloat16")
    plain_tokens, plain_logprobs, _ = answer(dense, dtype="bfloat16")
    assert len(weights) == 3 * 7 and not caplog.records
    assert tokens == plain_tokens and logprobs == pytest.approx(plain_logprobs, abs=0.05)  # sums are in another order


@pytest.mark.parametrize("name", ["awq", "compressed-8", "fp8"])
def test_experts_have_the_bits_of_the_dense_ones(
    name: str, checkpoint: Callable[..., Path], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    quantized, dense = write(checkpoint("qwen3_moe"), tmp_path, name)
    tokens, logprobs, weights = answer(quantized, dtype="bfloat16")
    assert (tokens, logprobs) == answer(dense, dtype="bfloat16")[:2] and not caplog.records
    assert (
        sum(len(weight.shape) == 3 for weight in weights) == 2 * sum(len(weight.shape) == 2 for weight in weights) / 4
    )


def test_rows_rounded_as_well_are_near_the_dense_model(checkpoint: Callable[..., Path], tmp_path: Path) -> None:
    quantized, dense = write(checkpoint("llama"), tmp_path, "w8a8")
    tokens, logprobs, _ = answer(quantized, dtype="bfloat16")
    engine_chunks = answer(quantized, dtype="bfloat16", block_size=32)
    assert engine_chunks[:2] == (tokens, logprobs)
    _, plain_logprobs, _ = answer(dense, dtype="bfloat16")
    assert logprobs[0] == pytest.approx(plain_logprobs[0], abs=0.2) and logprobs != plain_logprobs
    with pytest.raises(SetupError, match="activations of 8 bits are supported for linear layers only"):
        load(EngineConfig(model=str(quantized), device="cpu", dtype="float32"))


def test_linear_layers_are_never_dense(checkpoint: Callable[..., Path], tmp_path: Path) -> None:
    quantized, _ = write(checkpoint("llama"), tmp_path, "gptq")
    config = AutoConfig.from_pretrained(quantized)
    model = low_bit_checkpoint.load(
        LlamaForCausalLM, quantized, config, SETTINGS["gptq"], packs=True, dtype=torch.bfloat16
    )
    weights = [module.weight for module in model.modules() if type(module) is torch.nn.Linear][:-1]
    assert len(weights) == 3 * 7 and all(hasattr(weight, "codes") for weight in weights)
    assert sum(weight.untyped_storage().nbytes() for weight in weights) < 0.01 * sum(
        weight.nbytes for weight in weights
    )


@pytest.mark.parametrize("name", ["awq", "gptq-act-order", "fp8"])
def test_float32_equals_generate_of_the_dense_model(
    name: str, checkpoint: Callable[..., Path], generate: Callable[..., list[list[int]]], tmp_path: Path
) -> None:
    quantized, dense = write(checkpoint("qwen3", dtype="float32"), tmp_path, name)
    assert [answer(quantized, dtype="float32")[0]] == generate(dense, [PROMPT], 24)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"quant_method": "awq", "version": "gemv"}, "AWQ weights in version 'gemv' are not supported"),
        ({"quant_method": "gptq", "bits": 3}, "weights of 3 bits by gptq are not supported"),
        ({"quant_method": "compressed-tensors", "format": "marlin-24"}, "in the format 'marlin-24' are not supported"),
        ({"quant_method": "awq", "bits": 4}, r"is no awq layer of 4 bits: .*qweight \["),
    ],
)
def test_what_is_not_supported_is_said(
    change: dict[str, Any], reason: str, checkpoint: Callable[..., Path], tmp_path: Path
) -> None:
    quantized, _ = write(checkpoint("llama"), tmp_path, "gptq")
    config = json.loads((quantized / "config.json").read_text())
    (quantized / "config.json").write_text(json.dumps({**config, "quantization_config": change}))
    with pytest.raises(SetupError, match=reason):
        load(EngineConfig(model=str(quantized), device="cpu"))


def test_activations_and_bad_tensors_are_refused(checkpoint: Callable[..., Path], tmp_path: Path) -> None:
    quantized, _ = write(checkpoint("llama"), tmp_path, "compressed")
    config = json.loads((quantized / "config.json").read_text())
    settings: Any = json.loads(json.dumps(SETTINGS["compressed"]))
    settings["config_groups"]["group_0"]["input_activations"] = {"num_bits": 8, "dynamic": False}
    (quantized / "config.json").write_text(json.dumps({**config, "quantization_config": settings}))
    with pytest.raises(SetupError, match="group_0 rounds activations; supported are inputs in symmetric"):
        load(EngineConfig(model=str(quantized), device="cpu"))
    (quantized / "config.json").write_text(json.dumps({**config, "quantization_config": SETTINGS["compressed"]}))
    file = quantized / "model.safetensors"
    tensors = load_file(file)
    name = next(name for name in tensors if name.endswith("weight_scale"))
    save_file({**tensors, name: tensors[name][:, :-1].contiguous()}, file, {"format": "pt"})
    with pytest.raises(SetupError, match="is no compressed-tensors layer of 4 bits"):
        load(EngineConfig(model=str(quantized), device="cpu"))
    file.write_bytes(file.read_bytes()[:-100])
    with pytest.raises(SetupError, match=r"model.safetensors cannot be read"):
        load(EngineConfig(model=str(quantized), device="cpu"))
    with pytest.raises(SetupError, match="the weights are quantized already"):
        load(EngineConfig(model=str(quantized), device="cpu", quantization="int8"))
