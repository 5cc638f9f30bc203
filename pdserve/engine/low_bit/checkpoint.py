"""Quantized checkpoints as models: dense weights for transformers, and the codes for the kernels."""

import copy
import logging
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from pdserve.engine.low_bit import formats
from pdserve.errors import SetupError
from pdserve.kernels.low_bit import Codes

log = logging.getLogger(__name__)


def load(model_class: Any, path: Path, hf_config: Any, settings: dict[str, Any], **options: Any) -> torch.nn.Module:
    """Load a quantized checkpoint. The parameters have the weights, and `codes` where the kernels of CPUs may pack them.

    Args:
        settings: `quantization_config` of its config.json.
        options: of transformers' `from_pretrained`, with `dtype`.

    Raises:
        SetupError: the format is not supported, or a tensor is missing, truncated or of another shape.
    """
    found = formats.read_format(settings)
    layers, others = _read(path)
    all_codes = dict[str, Codes]()
    for name, tensors in layers.items():
        others[f"{name}.weight"], codes = formats.read_layer(name, tensors, found)
        if "bias" in tensors:
            others[f"{name}.bias"] = tensors["bias"]
        if codes is not None:
            all_codes[f"{name}.weight"] = codes
    dense_config = copy.deepcopy(hf_config)
    del dense_config.quantization_config
    model: torch.nn.Module = model_class.from_pretrained(None, config=dense_config, state_dict=others, **options)
    num_coded = attach(model, all_codes)
    log.info("%d layers in %d bits by %s", num_coded, found.bits, found.method)
    if num_coded < len(layers):
        log.warning(
            "%d of %d quantized layers take as much memory as in 16 bits: experts, or groups out of order",
            *(len(layers) - num_coded, len(layers)),
        )
    return model


def attach(model: torch.nn.Module, all_codes: dict[str, Codes]) -> int:
    """Give parameters their codes, by name. Returns to how many."""
    count = 0
    for name, parameter in model.named_parameters():
        if (codes := all_codes.get(name)) is not None and codes.codes.shape == parameter.shape:
            parameter.codes = codes  # type: ignore[attr-defined]
            count += 1
    return count


def _read(path: Path) -> tuple[dict[str, dict[str, torch.Tensor]], dict[str, torch.Tensor]]:
    """Return the tensors of quantized layers, by layer and last part of the name, and all others by name."""
    tensors = dict[str, torch.Tensor]()
    for file in sorted(path.glob("*.safetensors")):
        try:
            with safe_open(file, "pt") as handle:
                tensors |= {name: handle.get_tensor(name) for name in handle.keys()}  # noqa: SIM118 - it is no dict
        except SafetensorError as error:
            raise SetupError(f"{file} cannot be read: {error}") from error
    marked = {name.rpartition(".")[0] for name in tensors if name.rpartition(".")[2] in formats.MARKS}
    layers: dict[str, dict[str, torch.Tensor]] = {name: {} for name in marked}
    others = dict[str, torch.Tensor]()
    for name, tensor in tensors.items():
        layer, _, part = name.rpartition(".")
        if layer in layers:
            layers[layer][part] = tensor
        else:
            others[name] = tensor
    return layers, others
