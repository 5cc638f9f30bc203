"""Checkpoint loading: fingerprints, layouts and errors."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from pdserve.config import EngineConfig
from pdserve.engine import checkpoint_loader
from pdserve.engine.checkpoint_loader import fingerprint, load
from pdserve.errors import SetupError


def test_layout_describes_the_model(checkpoint: Callable[..., Path]) -> None:
    loaded = load(EngineConfig(model=str(checkpoint("llama")), block_size=8, device="cpu"))
    layout = loaded.layout
    assert (layout.num_layers, layout.num_kv_heads, layout.head_dim, layout.block_size) == (3, 2, 16, 8)
    assert (layout.dtype, layout.itemsize, loaded.dtype) == ("float32", 4, torch.float32)
    assert (loaded.context_length, loaded.vocab_size, loaded.eos_token_ids) == (1024, 260, frozenset({256}))


def test_products_in_float32_are_not_rounded_to_tf32(checkpoint: Callable[..., Path]) -> None:
    """As an environment variable of NVIDIA's images has it."""
    torch.set_float32_matmul_precision("high")
    load(EngineConfig(model=str(checkpoint("llama")), device="cpu"))
    assert torch.get_float32_matmul_precision() == "highest" and not torch.backends.cuda.matmul.allow_tf32


def test_fingerprint_depends_on_weights_and_config(checkpoint: Callable[..., Path], tmp_path: Path) -> None:
    path = checkpoint("llama")
    copied = Path(shutil.copytree(path, tmp_path / "copy"))
    assert fingerprint(copied) == fingerprint(path) != fingerprint(checkpoint("llama", seed=1))
    (copied / "config.json").write_text((copied / "config.json").read_text() + " ")
    assert fingerprint(copied) != fingerprint(path)


def test_ends_of_messages_are_found_in_either_file_of_a_tokenizer(
    checkpoint: Callable[..., Path], tmp_path: Path
) -> None:
    """transformers writes only tokenizer.json since version 5; its ids need not be in the vocabulary."""
    path = tmp_path / "model"
    shutil.copytree(checkpoint("llama"), path)
    config = EngineConfig(model=str(path), device="cpu")
    expected = frozenset({256})  # <|end|>
    assert load(config).message_ends == expected
    (path / "tokenizer.json").unlink()
    assert load(config).message_ends == frozenset()
    settings = {"added_tokens_decoder": {"256": {"content": "<|end|>"}, "257": {"content": "<|pad|>"}}}
    (path / "tokenizer_config.json").write_text(json.dumps(settings))
    assert load(config).message_ends == expected


def test_incomplete_checkpoints_are_setup_errors(checkpoint: Callable[..., Path], tmp_path: Path) -> None:
    with pytest.raises(SetupError, match=r"config.json is missing"):
        load(EngineConfig(model=str(tmp_path)))
    shutil.copy(checkpoint("llama") / "config.json", tmp_path)
    with pytest.raises(SetupError, match=r"has no \*\.safetensors"):
        load(EngineConfig(model=str(tmp_path)))


@pytest.mark.parametrize(
    ("method", "device", "capability", "invariant", "reason"),
    [
        ("hqq", "cuda", (9, 0), False, "weights quantized by hqq are not supported"),
        ("fp8", "cuda", (8, 6), False, "FP8 weights need a GPU of compute capability 8.9, and this one has 8.6"),
        ("fp8", "cuda", (9, 0), True, "--batch-invariant on: not with FP8 weights"),
    ],
)
def test_quantized_weights_that_cannot_be_used_are_setup_errors(
    method: str,
    device: str,
    capability: tuple[int, int],
    invariant: bool,
    reason: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    config = SimpleNamespace(quantization_config={"quant_method": method})
    with pytest.raises(SetupError, match=reason):
        checkpoint_loader._kept_quantized(config, "none", torch.device(device), invariant)


def test_fp8_weights_are_left_to_transformers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr("importlib.util.find_spec", lambda name: object())
    config = SimpleNamespace(quantization_config={"quant_method": "fp8"})
    assert checkpoint_loader._kept_quantized(config, "none", torch.device("cuda"), False) == "fp8"
    assert checkpoint_loader._kept_quantized(SimpleNamespace(), "none", torch.device("cpu"), False) == "dense"
    with pytest.raises(SetupError, match="--quantization int4: the weights are quantized already"):
        checkpoint_loader._kept_quantized(config, "int4", torch.device("cuda"), False)
