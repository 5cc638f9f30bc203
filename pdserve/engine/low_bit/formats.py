"""Formats of quantized checkpoints: which are supported, and the codes of one layer's tensors.

A format names the tensors of a layer with N outputs and K inputs, of which groups share a scale (G groups), and says what
weight they stand for; the dequantization of each format's own package is the reference:
    gptq                 qweight [K · bits / 32, N], qzeros [G, N · bits / 32], scales [G, N], g_idx [K]
    awq                  qweight [K, N / 8], qzeros [G, N / 8], scales [G, N]
    compressed-tensors   weight_packed [N, K · bits / 32] or weight [N, K] int8, weight_scale [N, G], weight_zero_point;
                         or weight [N, K] float8, weight_scale [N, 1], [1] or of blocks
    fp8                  weight [N, K] float8, weight_scale_inv of blocks [N / rows, K / columns], which multiplies too

Activations stay in 16 bits with weights in float8, though formats may round them.

Sources: GPTQ (Frantar et al., 2023) in the format of AutoGPTQ; AWQ (Lin et al., 2024), version "gemm".
"""

import logging
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch

from pdserve.engine.low_bit.packing import AWQ_ORDER, unpack
from pdserve.errors import SetupError
from pdserve.kernels.low_bit import BITS, Codes

log = logging.getLogger(__name__)

LAYOUTS = ("pack-quantized", "int-quantized", "naive-quantized", "float-quantized")  # of compressed-tensors
STRATEGIES = {"int": ("group", "channel"), "float": ("channel", "tensor", "block")}  # by which its weights share scales
Tensors = Mapping[str, torch.Tensor]
MARKS = {  # a tensor by which a layer is known to be quantized → the method
    "qweight": ("gptq", "awq"),
    "weight_packed": ("compressed-tensors",),
    "weight_scale": ("compressed-tensors",),
    "weight_scale_inv": ("fp8",),
}


@dataclass(frozen=True)
class Format:
    """The quantization of a checkpoint: method and number of bits.

    Attributes:
        zero_offset: is added to zeros as they are stored.
        rounds_rows: the rows that weights multiply are rounded to 8 bits, each by its largest value.
        block: rows and columns that share a scale, of which the last rows may be fewer; None: whole rows, or the tensor.
    """

    method: str
    bits: int
    zero_offset: int = 0
    rounds_rows: bool = False
    block: tuple[int, int] | None = None


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
            found = _compressed_format(settings)
        case "fp8":
            found = Format("fp8", 8, block=_block(settings.get("weight_block_size")))
        case method:
            raise SetupError(f"weights quantized by {method} are not supported")
    if found.bits not in BITS or (found.method == "awq" and found.bits != 4):
        raise SetupError(f"weights of {found.bits} bits by {found.method} are not supported, only of 4 or 8 (AWQ: 4)")
    return found


def _compressed_format(settings: Mapping[str, Any]) -> Format:
    """Return the format of all layers, of which compressed-tensors has groups."""
    if (layout := settings.get("format")) not in LAYOUTS:
        raise SetupError(f"compressed-tensors in the format {layout!r} are not supported, only in {', '.join(LAYOUTS)}")
    if settings.get("kv_cache_scheme"):
        log.warning("the checkpoint asks for quantized KV, which is kept as --kv-cache-dtype says")
    kinds = set()
    for name, group in settings["config_groups"].items():
        weights = group.get("weights") or {}
        kind, strategy, bits = weights.get("type", "int"), weights.get("strategy"), weights["num_bits"]
        if strategy not in STRATEGIES.get(kind, ()) or (kind == "float" and bits != 8):
            raise SetupError(
                f"compressed-tensors: {name} has {bits}-bit {kind} weights by {strategy}; supported are integers by group "
                "or channel, and floats of 8 bits by channel, tensor or block"
            )
        block = _block(weights.get("block_structure") if strategy == "block" else None)
        if strategy == "block" and block is None:
            raise SetupError(f"compressed-tensors: {name} has weights by block, and does not say how large blocks are")
        kinds.add((bits, kind, _rounds_rows(name, group, kind), block))
    if len(kinds) != 1:
        raise SetupError(f"compressed-tensors: layers of {len(kinds)} kinds in one checkpoint are not supported")
    bits, _, rounds_rows, block = kinds.pop()
    return Format("compressed-tensors", bits, rounds_rows=rounds_rows, block=block)


def _block(sizes: Any) -> tuple[int, int] | None:
    return None if sizes is None else (int(sizes[0]), int(sizes[1]))


def _rounds_rows(name: str, group: Mapping[str, Any], kind: str) -> bool:
    """Return whether a group's inputs are rounded to integers; float8 is left to 16 bits."""
    inputs = group.get("input_activations") or {}
    if not inputs and not group.get("output_activations"):
        return False
    if kind == "float" and inputs.get("type") == "float":
        log.info("%s: activations are computed in 16 bits, not in float8", name)
        return False
    dynamic = [inputs.get(key) for key in ("num_bits", "type", "strategy", "dynamic", "symmetric")]
    if (
        dynamic != [8, "int", "token", True, True]
        or group["weights"]["num_bits"] != 8
        or group.get("output_activations")
    ):
        raise SetupError(
            f"compressed-tensors: {name} rounds activations; supported are inputs in symmetric integers of 8 bits, "
            "dynamic by token, with weights of 8 bits"
        )
    return True


def read_layer(name: str, tensors: Tensors, found: Format) -> Codes:
    """Return the codes of a layer.

    Args:
        tensors: by the last part of their names.

    Raises:
        SetupError: they do not fit together.
    """
    try:
        codes, group_of_K = {"gptq": _gptq, "awq": _awq, "compressed-tensors": _compressed, "fp8": _fp8}[found.method](
            tensors, found
        )
        in_order = torch.arange(codes.codes.shape[1]) // codes.group
        if group_of_K is None or torch.equal(group_of_K, in_order):
            return codes
        order = group_of_K.argsort(stable=True)
        assert torch.equal(group_of_K[order], in_order), "groups of one size"
        return replace(codes, codes=codes.codes[:, order].contiguous(), order=order)
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
    elif tensors["weight"].dtype == torch.float8_e4m3fn:
        return _floats(tensors["weight"], tensors["weight_scale"], found), None
    else:
        codes = (tensors["weight"].to(torch.int16) + middle).to(torch.uint8)
        if zeros is not None:
            zeros = (zeros.to(torch.int16) + middle).to(torch.uint8)
    return Codes(codes, tensors["weight_scale"], zeros, found.bits), tensors.get("weight_g_idx")


def _fp8(tensors: Tensors, found: Format) -> tuple[Codes, torch.Tensor | None]:
    return _floats(tensors["weight"], tensors["weight_scale_inv"].float(), found), None  # products are rounded once


def _floats(weight: torch.Tensor, scales: torch.Tensor, found: Format) -> Codes:
    """Return codes [N, K] in float8 with the scales of each row, of those of blocks, channels or the whole tensor."""
    scales = scales.view(-1, 1) if scales.dim() < 2 else scales
    rows, columns = weight.shape
    size, width = found.block or (rows if len(scales) == 1 else 1, columns)
    assert scales.shape == (-(-rows // size), columns // width) and columns % width == 0
    return Codes(weight, scales.repeat_interleave(size, 0)[:rows], None, found.bits)
