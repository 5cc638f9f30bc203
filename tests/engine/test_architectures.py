"""Further architectures: tokens of transformers' `generate` in float32, or one sentence that says why not."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from transformers.models.lfm2.modeling_lfm2 import Lfm2MLP

from pdserve.config import EngineConfig
from pdserve.engine.engine import Engine
from pdserve.errors import SetupError
from pdserve.request import Request, SamplingParams

NEW_TOKENS = 12
LENGTHS = [1, 16, 17, 33, 33, 100, 100]

Generate = Callable[[Path, list[list[int]], int], list[list[int]]]


def prompts() -> list[list[int]]:
    """Pairs of prompts of one length differ in their first token only."""
    return [[(7 * length + i) % 7, *(i * i * 31 % 251 for i in range(1, length))] for i, length in enumerate(LENGTHS)]


def run(engine: Engine, texts: list[list[int]]) -> list[list[int]]:
    greedy = SamplingParams(max_tokens=NEW_TOKENS, temperature=0, ignore_eos=True)
    seqs = [engine.new_sequence(str(i), Request(prompt=text, sampling=greedy)) for i, text in enumerate(texts)]
    for seq in seqs:
        engine.add(seq)
    while engine.has_work:
        for seq in engine.step().sampled:
            if seq.output.finish_reason():
                engine.remove(seq)
    return [seq.output.tokens[seq.output.num_prompt :].tolist() for seq in seqs]


PLAIN = ["opt", "gpt2", "gpt_neox", "mixtral", "glm4", "llama4", "gemma4", "gpt_oss"]
HYBRIDS = ["lfm2", "qwen3_next", "bamba", "falcon_h1", "nemotron_h", "jamba", "kimi_linear"]
ALIKE = [pytest.param(name, marks=pytest.mark.slow) for name in ("qwen3_5", "qwen3_5_moe", "granite_hybrid")]


@pytest.mark.parametrize("architecture", [*PLAIN, *HYBRIDS, *ALIKE])
def test_equals_generate(architecture: str, checkpoint: Callable[..., Path], generate: Generate) -> None:
    path = checkpoint(architecture, dtype="float32")
    expected = generate(path, prompts(), NEW_TOKENS)
    decides = (expected[3] != expected[4], expected[5] != expected[6])
    assert all(decides[: 1 if architecture == "qwen3_5" else 2]), "the first token decides, or the test is none"
    # Larger steps than Llama 4's queries have their positions' scale for, and then smaller ones.
    for size in (512, 24):
        engine = Engine(EngineConfig(model=str(path), num_blocks=64, max_num_batched_tokens=size))
        assert run(engine, prompts()) == expected
        assert run(engine, prompts()) == expected, "with a warm prefix cache"


@pytest.mark.parametrize("architecture", ["jamba"])
def test_chunks_change_no_bit_of_16(architecture: str, checkpoint: Callable[..., Path]) -> None:
    """Its mixers multiply a layer's weight themselves."""
    path, found = str(checkpoint(architecture, dtype="bfloat16")), []
    for size in (512, 24):
        found.append(run(Engine(EngineConfig(model=path, num_blocks=64, max_num_batched_tokens=size)), prompts()))
    assert found[0] == found[1]


def test_states_that_no_adapter_knows_are_refused(
    checkpoint: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """An MLP that reads the token before."""
    monkeypatch.setattr(Lfm2MLP, "forward", lambda _, x: x + torch.nn.functional.pad(x, (0, 0, 1, 0))[:, :-1])
    with pytest.raises(SetupError, match="Lfm2ForCausalLM is not supported: some of its layers keep states"):
        Engine(EngineConfig(model=str(checkpoint("lfm2", dtype="float32")), num_blocks=64))


def test_states_are_refused_where_they_are_not_computed(checkpoint: Callable[..., Path]) -> None:
    path = str(checkpoint("lfm2", dtype="float32"))
    for config, reason in (
        (EngineConfig(model=path, num_blocks=64, kernel="reference"), "the kernel reference: it computes no states"),
        (EngineConfig(model=path, num_blocks=64, async_scheduling="on"), "--async-scheduling on: not with recurrent"),
    ):
        with pytest.raises(SetupError, match=reason):
            Engine(config)


def quantize(path: Path, **settings: Any) -> None:
    """Replace the experts' weights of a gpt-oss checkpoint by random ones in MXFP4: pairs of 4 bits, an exponent for 32."""
    tensors, random = load_file(path / "model.safetensors"), torch.Generator().manual_seed(0)
    for name in [name for name in tensors if name.endswith(("gate_up_proj", "down_proj"))]:
        experts, inputs, outputs = tensors.pop(name).shape
        shape = (experts, outputs, inputs // 32)
        tensors[f"{name}_blocks"] = torch.randint(0, 256, (*shape, 16), generator=random, dtype=torch.uint8)
        tensors[f"{name}_scales"] = torch.randint(120, 124, shape, generator=random, dtype=torch.uint8)
    save_file(tensors, path / "model.safetensors", {"format": "pt"})
    config = json.loads((path / "config.json").read_text())
    kept = ["model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head"]
    config["quantization_config"] = {"quant_method": "mxfp4", "modules_to_not_convert": kept, **settings}
    (path / "config.json").write_text(json.dumps(config))


def test_weights_in_mxfp4(checkpoint: Callable[..., Path], generate: Generate, tmp_path: Path) -> None:
    plain = checkpoint("gpt_oss", dtype="float32")
    path, reference = (shutil.copytree(plain, tmp_path / name) for name in ("model", "reference"))
    quantize(path)
    quantize(reference, dequantize=True)  # without it, transformers asks for accelerate
    expected = generate(reference, prompts(), NEW_TOKENS)
    assert expected != generate(plain, prompts(), NEW_TOKENS)
    assert run(Engine(EngineConfig(model=str(path), num_blocks=64)), prompts()) == expected


def test_context_ends_with_the_first_chunk(checkpoint: Callable[..., Path], caplog: pytest.LogCaptureFixture) -> None:
    engine = Engine(EngineConfig(model=str(checkpoint("llama4")), num_blocks=64))
    assert engine.max_model_len == 199
    assert "the context is 199 of the model's 1024: chunked attention beyond it is not supported" in caplog.text


@pytest.mark.parametrize(
    ("config_name", "sizes", "name"),
    [
        ("BloomConfig", {}, "BloomForCausalLM"),
        ("FalconConfig", {"alibi": True}, "FalconForCausalLM"),
        ("FalconConfig", {}, "FalconForCausalLM"),
        ("MptConfig", {"d_model": 64, "n_heads": 4, "n_layers": 1}, "MptForCausalLM"),
        ("GPTJConfig", {"rotary_dim": 8}, "GPTJForCausalLM"),
        ("StableLmConfig", {}, "StableLmForCausalLM"),
    ],
)
def test_other_attention_is_refused_in_one_sentence(
    config_name: str, sizes: dict[str, Any], name: str, tmp_path: Path
) -> None:
    shape = {"hidden_size": 64, "num_hidden_layers": 1, "num_attention_heads": 4, "vocab_size": 260}
    config = getattr(transformers, config_name)(**shape | sizes)
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    with pytest.raises(SetupError) as refused:
        Engine(EngineConfig(model=str(tmp_path), num_blocks=8))
    reason = "its attention does not go through transformers' attention interface"
    assert str(refused.value) == f"architecture {name} is not supported: {reason}"
