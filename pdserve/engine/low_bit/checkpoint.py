"""Quantized checkpoints as models: codes for the kernels, and dense weights where these compute nothing.

Tensors stay in the files, which are mapped, until a layer is packed: one layer at a time, so that no dense copy of the model
is ever in memory. Experts, which transformers stacks as it loads them, are dense until they are packed.
"""

import copy
import logging
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from pdserve.engine.low_bit import formats
from pdserve.errors import SetupError
from pdserve.kernels import int8
from pdserve.kernels.linear import PackedWeight
from pdserve.kernels.low_bit import Codes

log = logging.getLogger(__name__)

Layers = Mapping[str, formats.Tensors]
DENSE = ("kv_b_proj",)  # read by latent attention, which packs it otherwise
EXPERT_PARTS = {  # of a stacked weight of experts, the layers of one that are its rows, as checkpoints name them
    "gate_up_proj": (("gate_proj", "up_proj"), ("w1", "w3")),
    "down_proj": (("down_proj",), ("w2",)),
}


@dataclass(frozen=True)
class StoredCodes:
    """The codes of one weight in a checkpoint's files, in place of `Codes`, which is read when it is packed.

    Attributes:
        names: of the layers whose rows are the weight's, of each expert.
        shape: of the weight, [N, K] or [experts, N, K].
    """

    layers: Layers
    found: formats.Format
    names: tuple[tuple[str, ...], ...]
    shape: tuple[int, ...]

    def read(self) -> Codes:
        """Return the codes.

        Raises:
            SetupError: tensors do not fit together or to the model, or those of experts are not in the order of K.
        """
        codes, name = self._stack(), self.names[0][0]
        if codes.codes.shape != self.shape:
            raise SetupError(f"{name} is {list(codes.codes.shape)}, and the model's weight is {list(self.shape)}")
        return codes

    def _stack(self) -> Codes:
        rows = [[formats.read_layer(name, self.layers[name], self.found) for name in each] for each in self.names]
        if len(self.shape) == 2:
            return rows[0][0]
        if any(one.order is not None for each in rows for one in each):
            raise SetupError(f"{self.names[0][0]}: experts whose groups are out of order are not supported")

        def stack(part: str) -> Any:
            parts = [[getattr(one, part) for one in each] for each in rows]
            return None if parts[0][0] is None else torch.stack([torch.cat(each) for each in parts])

        return replace(rows[0][0], codes=stack("codes"), scales=stack("scales"), zeros=stack("zeros"))

    def pack(self, dtype: torch.dtype, *, transposed: bool = False) -> PackedWeight:
        """See `Codes.pack`.

        Raises:
            SetupError: see `read`, or the kernels do not support their groups.
            ValueError: the weight is not transposed as the codes say.
        """
        codes = self.read()
        try:
            if self.found.rounds_rows and not transposed:
                return int8.pack(codes, dtype)
            return codes.pack(dtype, transposed=transposed)
        except ValueError as error:
            if transposed:
                raise
            raise SetupError(f"{self.names[0][0]}: {error}") from error


def load(
    model_class: Any, path: Path, hf_config: Any, settings: dict[str, Any], *, packs: bool, **options: Any
) -> torch.nn.Module:
    """Load a quantized checkpoint. Parameters that the kernels of CPUs may pack have `codes`.

    Args:
        settings: `quantization_config` of its config.json.
        packs: weights of linear layers will be packed, and have no values: each number is NaN.
        options: of transformers' `from_pretrained`, with `dtype`.

    Raises:
        SetupError: the format is not supported, or a tensor is missing, truncated or of another shape.
    """
    found = formats.read_format(settings)
    layers, others = _read(path)
    dense_config = copy.deepcopy(hf_config)
    del dense_config.quantization_config
    with torch.device("meta"):
        shapes = {
            name: module.weight.shape
            for name, module in model_class(dense_config).named_modules()
            if type(module) is torch.nn.Linear and name in layers and not name.endswith(DENSE)
        }
    if found.rounds_rows and (not packs or len(shapes) < len(layers)):
        raise SetupError(
            "weights and activations of 8 bits are supported for linear layers only, on CPUs with --kernel auto and in "
            "bfloat16 or float16"
        )
    unread = torch.full((1, 1), torch.nan, dtype=options["dtype"])
    for name, tensors in layers.items():
        is_packed = packs and name in shapes
        others[f"{name}.weight"] = (
            unread.expand(shapes[name])
            if is_packed
            else (codes := formats.read_layer(name, tensors, found)).dequantize(codes.scales.dtype)
        )
        if "bias" in tensors:
            others[f"{name}.bias"] = tensors["bias"]
    model: torch.nn.Module = model_class.from_pretrained(None, config=dense_config, state_dict=others, **options)
    num_coded = sum(len(each) for each in _attach(model, layers, found, set(shapes)))
    log.info("%d layers in %d bits by %s", num_coded, found.bits, found.method)
    if num_coded < len(layers):
        log.warning("%d of %d quantized layers take as much memory as in 16 bits", len(layers) - num_coded, len(layers))
    return model


def _attach(model: torch.nn.Module, layers: Layers, found: formats.Format, linear: set[str]) -> list[tuple[str, ...]]:
    """Give parameters their codes. Returns the names of the layers of each that has got some."""
    attached = []
    for name, parameter in model.named_parameters():
        owner, _, part = name.rpartition(".")
        if owner in linear and part == "weight":
            stored = StoredCodes(layers, found, ((owner,),), parameter.shape)
        elif parameter.dim() == 3 and (names := _experts(owner, part, len(parameter), layers)):
            stored, ends = StoredCodes(layers, found, names, parameter.shape), parameter.data[[0, -1]]
            first_and_last = replace(stored, names=(names[0], names[-1]), shape=ends.shape)
            if not torch.equal(first_and_last.read().dequantize(parameter.dtype), ends):
                continue
        else:
            continue
        parameter.codes = stored  # type: ignore[attr-defined]
        attached.append(tuple(name for each in stored.names for name in each))
    return attached


def _experts(owner: str, part: str, count: int, layers: Layers) -> tuple[tuple[str, ...], ...]:
    """Return the layers of each expert whose rows a stacked weight has; none if the checkpoint has other ones."""
    for parts in EXPERT_PARTS.get(part, ()):
        names = tuple(tuple(f"{owner}.{expert}.{one}" for one in parts) for expert in range(count))
        if all(name in layers for each in names for name in each):
            return names
    return ()


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
