"""Checkpoints in quantized formats, written from the formats' texts, and the same weights dense."""

import json
import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from pdserve.kernels.low_bit import Codes, quantize

BY_CHANNEL = ("compressed-8", "w8a8")
AWQ_COLUMNS = (0, 2, 4, 6, 1, 3, 5, 7)  # which of 8 columns is at each place of a word
SETTINGS: dict[str, dict[str, Any]] = {
    "gptq": {"quant_method": "gptq", "bits": 4, "group_size": 32, "desc_act": False, "sym": False},
    "gptq-8": {"quant_method": "gptq", "bits": 8, "group_size": 32, "sym": True, "checkpoint_format": "gptq_v2"},
    "gptq-act-order": {"quant_method": "gptq", "bits": 4, "group_size": 32, "desc_act": True, "sym": True},
    "awq": {"quant_method": "awq", "bits": 4, "group_size": 32, "zero_point": True, "version": "gemm"},
    "compressed": {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized",
        "config_groups": {
            "group_0": {
                "targets": ["Linear"],
                "weights": {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": 32},
                "input_activations": None,
            }
        },
        "ignore": ["lm_head"],
    },
    "compressed-8": {
        "quant_method": "compressed-tensors",
        "format": "naive-quantized",
        "config_groups": {
            "group_0": {
                "targets": ["Linear"],
                "weights": {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "channel"},
            }
        },
    },
}
SETTINGS["fp8"] = {"quant_method": "fp8", "weight_block_size": [32, 32], "activation_scheme": "dynamic"}
SETTINGS["compressed-fp8"] = {
    "quant_method": "compressed-tensors",
    "format": "float-quantized",
    "config_groups": {
        "group_0": {
            "targets": ["Linear"],
            "weights": {"num_bits": 8, "type": "float", "symmetric": True, "strategy": "channel"},
            "input_activations": {"num_bits": 8, "type": "float", "dynamic": True, "strategy": "token"},
        }
    },
}
SETTINGS["w8a8"] = {
    "quant_method": "compressed-tensors",
    "format": "int-quantized",
    "config_groups": {
        "group_0": {
            "targets": ["Linear"],
            "weights": {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "channel"},
            "input_activations": {
                "num_bits": 8,
                "type": "int",
                "symmetric": True,
                "dynamic": True,
                "strategy": "token",
            },
        }
    },
}


def write(source: Path, to: Path, name: str) -> tuple[Path, Path]:
    """Write the layers of a dense checkpoint in a format, and dense with the values that they stand for.

    Returns:
        the directories of the quantized and of the dense checkpoint.
    """
    quantized, dense = to / "quantized", to / "dense"
    for path in (quantized, dense):
        shutil.copytree(source, path)
    tensors = load_file(source / "model.safetensors")
    coded, plain = dict(tensors), dict(tensors)
    torch.manual_seed(0)
    for key, weight in tensors.items():
        layer, _, part = key.rpartition(".")
        if weight.dim() != 2 or part != "weight" or layer.endswith(("embed_tokens", "lm_head", "mlp.gate")):
            continue
        del coded[key]
        written, values = _layer(name, weight)
        coded |= {f"{layer}.{part}": tensor.contiguous() for part, tensor in written.items()}
        plain[key] = values.to(weight.dtype).contiguous()
    save_file(coded, quantized / "model.safetensors", {"format": "pt"})
    save_file(plain, dense / "model.safetensors", {"format": "pt"})
    config = json.loads((source / "config.json").read_text())
    (quantized / "config.json").write_text(json.dumps({**config, "quantization_config": SETTINGS[name]}))
    return quantized, dense


def _layer(name: str, weight: torch.Tensor) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    """Return the tensors of a layer [N, K] and the values that they stand for."""
    if name.endswith("fp8"):
        return _float8(name, weight)
    bits = 8 if name.endswith("8") else 4
    group = weight.shape[1] if name in BY_CHANNEL else 32
    codes = quantize(weight.half() if name.startswith(("gptq", "awq")) else weight.bfloat16(), bits, group)
    if name in ("gptq", "awq"):
        zeros = torch.randint(5, 11, codes.scales.shape, dtype=torch.uint8)
        codes = Codes(codes.codes, codes.scales, zeros, bits)
    middle = torch.full(codes.scales.shape, 1 << (bits - 1), dtype=torch.uint8)
    zeros = middle if codes.zeros is None else codes.zeros
    if name.startswith("gptq"):
        in_order = torch.arange(weight.shape[1]) // group
        order = torch.randperm(weight.shape[1]) if name == "gptq-act-order" else torch.arange(weight.shape[1])
        ordered = codes.codes[:, order]
        return {
            "qweight": _words(ordered.T, bits, 0),
            "qzeros": _words(zeros.T.int() - (0 if name == "gptq-8" else 1), bits, 1),
            "scales": codes.scales.T,
            "g_idx": in_order[order].int(),
        }, codes.dequantize(torch.float32)[:, order]
    if name == "awq":
        columns = torch.arange(len(weight)).view(-1, 8)[:, AWQ_COLUMNS].flatten()
        return {
            "qweight": _words(codes.codes.T[:, columns], bits, 1),
            "qzeros": _words(zeros.T[:, columns], bits, 1),
            "scales": codes.scales.T,
        }, codes.dequantize(torch.float32)
    if name in BY_CHANNEL:
        stored = {"weight": (codes.codes.int() - 128).to(torch.int8), "weight_scale": codes.scales}
        return stored, codes.dequantize(torch.float32)
    shape = torch.tensor(weight.shape)
    stored = {"weight_packed": _words(codes.codes, bits, 1), "weight_scale": codes.scales, "weight_shape": shape}
    return stored, codes.dequantize(torch.float32)


def _float8(name: str, weight: torch.Tensor) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    """Return the tensors of a layer in float8, by channel or in blocks of 32 × 32, and the values that they stand for."""
    rows, columns = (1, weight.shape[1]) if name == "compressed-fp8" else (32, 32)
    blocks = (
        weight.float().unflatten(0, (-1, rows)).unflatten(2, (-1, columns))
    )  # [N / rows, rows, K / columns, columns]
    scales = blocks.abs().amax((1, 3)) / torch.finfo(torch.float8_e4m3fn).max
    if name == "compressed-fp8":
        scales = scales.bfloat16()
    spread = scales.float()[:, None, :, None]
    codes = (blocks / spread).to(torch.float8_e4m3fn)
    values = (codes.float() * spread).to(scales.dtype).flatten(2).flatten(0, 1)
    return {"weight": codes.flatten(2).flatten(0, 1), "weight_scale" + ("" if rows == 1 else "_inv"): scales}, values


def _words(codes: torch.Tensor, bits: int, dim: int) -> torch.Tensor:
    """Pack integers along a dimension, the first in the lowest bits."""
    split = codes.long().movedim(dim, -1).unflatten(-1, (-1, 32 // bits))
    words = sum(split[..., place] << (bits * place) for place in range(32 // bits))
    assert isinstance(words, torch.Tensor)
    return words.to(torch.int32).movedim(-1, dim)
