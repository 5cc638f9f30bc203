"""GGUF files as checkpoints: the bits of transformers' dequantized model, in the file's own size."""

import json
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer
from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

from pdserve.cli import gguf
from pdserve.cli.gguf import convert
from pdserve.errors import SetupError
from pdserve.model_path import DEMO, resolve_model
from tests.cli.gguf_files import write_gguf
from tests.engine.low_bit.test_checkpoint import PROMPT, answer

LAYERS = (
    "attn_q",
    "attn_k",
    "attn_v",
    "attn_output",
    *(f"ffn_{part}{of}" for part in ("gate", "up", "down") for of in ("", "_exps")),
)


def of_layers(kind: str, **others: str) -> dict[str, str]:
    return dict.fromkeys(LAYERS, kind) | others


def dequantized(source: Path, checkpoint: Path, to: Path) -> Path:
    """Write transformers' model of a GGUF file, with the configuration of the converted one."""
    config = AutoConfig.from_pretrained(checkpoint)
    config.__dict__.pop("quantization_config", None)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    read = load_gguf_checkpoint(str(source), return_tensors=True, model_to_load=model)["tensors"]
    missing = model.load_state_dict(read, strict=False)
    assert not missing.unexpected_keys and set(missing.missing_keys) <= {"lm_head.weight"}
    model.save_pretrained(to)
    return to


@pytest.mark.parametrize(
    ("architecture", "kinds", "layers", "bits"),
    [
        ("llama", of_layers("Q8_0"), 21, 8),
        ("llama", of_layers("Q4_0", token_embd="Q8_0"), 21, 4),
        ("llama", of_layers("Q4_0", output="Q8_0"), 21, 4),  # the head is dense then
        ("qwen3", of_layers("Q8_0", ffn_down="Q4_0", output="Q8_0"), 22, 8),
        ("qwen3", of_layers("Q4_0", ffn_down="Q5_1"), 18, 4),
        ("qwen3_moe", of_layers("Q4_0"), 3 * (4 + 4 * 3), 4),
        ("qwen3_moe", of_layers("Q8_0"), 3 * (4 + 4 * 3), 8),
    ],
)
def test_a_file_has_the_bits_of_its_dequantized_model(
    architecture: str,
    kinds: dict[str, str],
    layers: int,
    bits: int,
    checkpoint: Callable[..., Path],
    generate: Callable[..., list[list[int]]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(gguf, "SHARD_BYTES", 50_000)
    source = write_gguf(checkpoint(architecture), tmp_path / "model.gguf", kinds)
    said = convert(source, tmp_path / "converted")
    assert f"{layers} linear layers in {bits} bits" in said and ("Q5_1" in said) == ("Q5_1" in kinds.values())
    assert len([*(tmp_path / "converted").glob("*.safetensors")]) > 2
    dense = dequantized(source, tmp_path / "converted", tmp_path / "dense")
    tokens, logprobs, weights = answer(tmp_path / "converted", dtype="bfloat16")
    assert (tokens, logprobs) == answer(dense, dtype="bfloat16")[:2]
    assert {weight.bits for weight in weights} == {bits} and weights[0].group == 32
    assert answer(checkpoint(architecture), dtype="bfloat16")[1] != logprobs, "rounding changes the model"
    if "Q5_1" in kinds.values():
        stored = [load_file(file) for file in (tmp_path / "converted").glob("*.safetensors")]
        [weight] = [one[name] for one in stored for name in one if name == "model.layers.0.mlp.down_proj.weight"]
        assert weight.dtype == torch.bfloat16, "types without codes would take four bytes a weight"
    else:
        assert [answer(tmp_path / "converted", dtype="float32")[0]] == generate(dense, [PROMPT], 24)


def test_a_file_brings_its_tokenizer(tmp_path: Path) -> None:
    source = write_gguf(DEMO, tmp_path / "demo.gguf", of_layers("Q8_0"))
    convert(source, tmp_path / "converted")
    converted, original = (AutoTokenizer.from_pretrained(path) for path in (tmp_path / "converted", DEMO))
    text = "Hello <|im_end|> naïve 漢字\n"
    assert converted.encode(text) == original.encode(text) and converted.decode(converted.encode(text)) == text
    chat: Any = [{"role": "user", "content": "hi"}]
    asked, expected = (one.apply_chat_template(chat, tokenize=False) for one in (converted, original))
    assert asked == expected
    assert '"eos_token_id": [\n    0,\n    2\n  ]' in (tmp_path / "converted" / "generation_config.json").read_text()
    (tmp_path / "tokenizer.json").write_text("beside")
    convert(source, tmp_path / "other")
    assert (tmp_path / "other" / "tokenizer.json").read_text() == "beside"


def test_faults_are_sentences(tmp_path: Path, pdserve: Callable[..., subprocess.CompletedProcess[str]]) -> None:
    source = write_gguf(DEMO, tmp_path / "demo.gguf", {})
    broken = tmp_path / "broken.gguf"
    for content, reason in (
        (b"", "cannot be converted"),
        (b"no GGUF at all, but long enough to be read", "cannot be converted"),
        (source.read_bytes()[:3000], "cannot be converted"),
        (source.read_bytes()[:-3000], "cannot be converted"),
    ):
        broken.write_bytes(content)
        with pytest.raises(SetupError, match=reason):
            convert(broken, tmp_path / "new")
    with pytest.raises(SetupError, match=r"missing\.gguf cannot be read: No such file"):
        convert(tmp_path / "missing.gguf", tmp_path / "new")
    with pytest.raises(SetupError, match=r"/proc/new cannot be written: "):
        convert(source, Path("/proc/new"))
    with pytest.raises(SetupError, match="is there already; name a new directory"):
        convert(source, tmp_path)
    with pytest.raises(SetupError, match=r"is a GGUF file: write it as a checkpoint by `pdserve convert-gguf"):
        resolve_model(str(source))
    assert not (tmp_path / "new").exists()
    ended = pdserve("convert-gguf", str(broken), str(tmp_path / "new"))
    assert ended.returncode == 2 and "Traceback" not in ended.stderr and "cannot be converted" in ended.stderr


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"split__count": 3}, "it is one of 3 parts; put them together"),
        ({"llama__rope__scaling__type": "yarn"}, "scales rotary positions in its own way"),
        ({"llama__attention__key_length": 32}, r"attn_k\.weight is \(32, 64\), and in LlamaForCausalLM \(64, 64\)"),
    ],
)
def test_files_that_would_become_other_models(
    fields: dict[str, Any], message: str, checkpoint: Callable[..., Path], tmp_path: Path
) -> None:
    source = write_gguf(checkpoint("llama"), tmp_path / "model.gguf", {}, **fields)
    with pytest.raises(SetupError, match=message):
        convert(source, tmp_path / "converted")


def test_what_a_file_does_not_say_is_taken_from_beside_it(checkpoint: Callable[..., Path], tmp_path: Path) -> None:
    source = write_gguf(checkpoint("llama"), tmp_path / "model.gguf", of_layers("Q8_0"), rope_factors=8)
    with pytest.raises(SetupError, match=r"put the original model's config\.json beside it"):
        convert(source, tmp_path / "converted")
    shutil.copy(checkpoint("llama") / "config.json", tmp_path)
    convert(source, tmp_path / "converted")
    settings, original = (json.loads((path / "config.json").read_text()) for path in (tmp_path / "converted", tmp_path))
    assert settings["rms_norm_eps"] == original["rms_norm_eps"] and settings["quantization_config"]
    original["num_hidden_layers"] = 2
    (tmp_path / "config.json").write_text(json.dumps(original))
    with pytest.raises(SetupError, match=r"LlamaForCausalLM has no blk\.2\.attn_k\.weight"):
        convert(source, tmp_path / "other")
    original["num_hidden_layers"] = 4
    (tmp_path / "config.json").write_text(json.dumps(original))
    with pytest.raises(SetupError, match=r"model\.layers\.3\.input_layernorm\.weight of LlamaForCausalLM is missing"):
        convert(source, tmp_path / "other")
