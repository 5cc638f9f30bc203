"""Formats of quantized checkpoints: which are supported, and the codes of one layer's tensors.

A format names the tensors of a layer with N outputs and K inputs, of which groups share a scale (G groups), and says what
weight they stand for; the dequantization of each format's own package is the reference:
    gptq                 qweight [K · bits / 32, N], qzeros [G, N · bits / 32], scales [G, N], g_idx [K]
    awq                  qweight [K, N / 8], qzeros [G, N / 8], scales [G, N]
    compressed-tensors   weight_packed [N, K · bits / 32] or weight [N, K] int8, weight_scale [N, G], weight_zero_point

Sources: GPTQ (Frantar et al., 2023) in the format of AutoGPTQ; AWQ (Lin et al., 2024), version "gemm".
"""

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from pdserve.engine.low_bit.packing import AWQ_ORDER, unpack
from pdserve.errors import SetupError
from pdserve.kernels.low_bit import BITS, Codes

log = logging.getLogger(__name__)

LAYOUTS = ("pack-quantized", "int-quantized", "naive-quantized")  # of compressed-tensors
Tensors = Mapping[str, torch.Tensor]
MARKS = {  # a tensor by which a layer is known to be quantized → the method
    "qweight": ("gptq", "awq"),
    "weight_packed": ("compressed-tensors",),
    "weight_scale": ("compressed-tensors",),
}


@dataclass(frozen=True)
class Format:
    """The quantization of a checkpoint: method and number of bits.

    Attributes:
        zero_offset: is added to zeros as they are stored.
    """

    method: str
    bits: int
    zero_offset: int = 0


def read_format(settings: Mapping[str, Any]) -> Format:
    """Return the format of a checkpoint by `quantization_config` of its config.json.

    Raises:
        SetupError: it is not supported.
    """
    match settings["quant_method"]:
        case "gptq":
            bits, offset = settings["bits"], 0 if settings.get("checkpoint_format") == "gptq_v2" else 1
            found = Format("gptq", bits, offset)
        case "awq":
            if (version := str(settings.get("version", "gemm")).lower()) != "gemm":
                raise SetupError(f"AWQ weights in version {version!r} are not supported, only 'gemm'")
            found = Format("awq", settings.get("bits", settings.get("w_bit", 4)))
        case "compressed-tensors":
            found = Format("compressed-tensors", _bits_of_groups(settings))
        case method:
            raise SetupError(f"weights quantized by {method} are not supported")
    if found.bits not in BITS or (found.method == "awq" and found.bits != 4):
        raise SetupError(f"weights of {found.bits} bits by {found.method} are not supported, only of 4 or 8 (AWQ: 4)")
    return found


def _bits_of_groups(settings: Mapping[str, Any]) -> int:
    """Return the bits of all layers, of which compressed-tensors has groups."""
    if (layout := settings.get("format")) not in LAYOUTS:
        raise SetupError(f"compressed-tensors in the format {layout!r} are not supported, only in {', '.join(LAYOUTS)}")
    if settings.get("kv_cache_scheme"):
        log.warning("the checkpoint asks for quantized KV, which is kept in 16 or 32 bits")
    kinds = set()
    for name, group in settings["config_groups"].items():
        weights = group.get("weights") or {}
        if group.get("input_activations") or group.get("output_activations"):
            raise SetupError(f"compressed-tensors: {name} quantizes activations, which is not supported")
        if weights.get("type", "int") != "int" or weights.get("strategy") not in ("group", "channel"):
            what = f"{weights.get('type')} weights by {weights.get('strategy')}"
            raise SetupError(f"compressed-tensors: {name} has {what}; supported are integers by group or channel")
        kinds.add(weights["num_bits"])
    if len(kinds) != 1:
        raise SetupError(f"compressed-tensors: layers of {sorted(kinds)} bits in one checkpoint are not supported")
    return int(kinds.pop())


def read_layer(name: str, tensors: Tensors, found: Format) -> tuple[torch.Tensor, Codes | None]:
    """Return the weight [N, K] that a layer's tensors stand for, and its codes, unless groups are not in the order of K.

    Args:
        tensors: by the last part of their names.

    Raises:
        SetupError: they do not fit together.
    """
    try:
        codes, group_of_K = {"gptq": _gptq, "awq": _awq, "compressed-tensors": _compressed}[found.method](
            tensors, found
        )
        in_order = group_of_K is None or torch.equal(
            group_of_K, torch.arange(len(group_of_K)) // (len(group_of_K) // codes.scales.shape[1])
        )
        if in_order:
            return codes.dequantize(codes.scales.dtype), codes
        assert group_of_K is not None
        columns = group_of_K.long()
        zeros = 1 << (codes.bits - 1) if codes.zeros is None else codes.zeros[:, columns].float()
        return ((codes.codes.float() - zeros) * codes.scales[:, columns].float()).to(codes.scales.dtype), None
    except (KeyError, RuntimeError, IndexError, AssertionError) as error:
        shapes = ", ".join(f"{part} {list(tensor.shape)}" for part, tensor in sorted(tensors.items()))
        raise SetupError(f"{name} is no {found.method} layer of {found.bits} bits: {shapes}") from error


def _gptq(tensors: Tensors, found: Format) -> tuple[Codes, torch.Tensor | None]:
    codes = unpack(tensors["qweight"], found.bits, 0).T.contiguous()
    zeros = unpack(tensors["qzeros"], found.bits, 1).T.to(torch.int16) + found.zero_offset
    assert zeros.max() <= torch.iinfo(torch.uint8).max
    zeros = zeros.to(torch.uint8).contiguous()
    scales = tensors["scales"].T.contiguous()
    return Codes(codes, scales, zeros, found.bits), tensors.get("g_idx")


def _awq(tensors: Tensors, found: Format) -> tuple[Codes, torch.Tensor | None]:
    codes = unpack(tensors["qweight"], found.bits, 1, AWQ_ORDER).T.contiguous()
    zeros = unpack(tensors["qzeros"], found.bits, 1, AWQ_ORDER).T.contiguous()
    return Codes(codes, tensors["scales"].T.contiguous(), zeros, found.bits), None


def _compressed(tensors: Tensors, found: Format) -> tuple[Codes, torch.Tensor | None]:
    zeros, middle = tensors.get("weight_zero_point"), 1 << (found.bits - 1)
    if "weight_packed" in tensors:
        in_features = int(tensors["weight_shape"][1])
        codes = unpack(tensors["weight_packed"], found.bits, 1)[:, :in_features].contiguous()
        if zeros is not None:
            zeros = unpack(zeros, found.bits, 0)[: len(codes)].contiguous()
    else:
        codes = (tensors["weight"].to(torch.int16) + middle).to(torch.uint8)
        if zeros is not None:
            zeros = (zeros.to(torch.int16) + middle).to(torch.uint8)
    return Codes(codes, tensors["weight_scale"], zeros, found.bits), tensors.get("weight_g_idx")
