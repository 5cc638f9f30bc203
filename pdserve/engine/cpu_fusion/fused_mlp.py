"""Gated MLPs, down(activation(gate(x)) · up(x)), with the activation and the product in one pass; 16-bit types.

Candidates are found by trial: a module with these parts is replaced if it computes this, with an activation that the kernel
implements.
"""

from inspect import signature
from types import ModuleType
from typing import cast

import torch

from pdserve.engine.cpu_fusion.linear_method import Linear
from pdserve.engine.cpu_fusion.prepack import PackedMethod
from pdserve.engine.cpu_fusion.tolerance import FUSED_DTYPES, nearly_equal
from pdserve.kernels import elementwise, linear


class FusedMLP(torch.nn.Module):
    """Gated MLP over three existing linear layers."""

    def __init__(
        self,
        gate_proj: torch.nn.Module,
        up_proj: torch.nn.Module,
        down_proj: torch.nn.Module,
        activation: str,
        kernels: ModuleType,
    ) -> None:
        super().__init__()
        self.gate_proj = gate_proj
        self.up_proj = up_proj
        self.down_proj = down_proj
        self._activation = activation
        self._gate = kernels.gate

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[..., hidden size] → [..., hidden size]"""
        y: torch.Tensor = self.down_proj(self._gated(x))
        return y

    def _gated(self, x: torch.Tensor) -> torch.Tensor:
        gate, up = _packed(self.gate_proj), _packed(self.up_proj)
        if gate is not None and up is not None and linear.has_amx():
            return linear.gated(x, gate, up, self._activation)
        y: torch.Tensor = self.gate_proj(x)
        self._gate(y, self.up_proj(x), self._activation)
        return y


def _packed(layer: torch.nn.Module) -> linear.PackedWeight | None:
    """Return the weight of a layer that the gated kernel computes: packed, in bfloat16, with nothing added."""
    method = layer.method if isinstance(layer, Linear) and layer.delta is None else None
    is_plain = isinstance(method, PackedMethod) and method.bias is None and method.weight.dtype == torch.bfloat16
    return cast(PackedMethod, method).weight if is_plain else None


@torch.inference_mode()
def fuse_mlps(model: torch.nn.Module, kernels: ModuleType = elementwise) -> int:
    """Replace in place the MLPs of a model that `FusedMLP` equals.

    Args:
        kernels: the module with `gate` for the device of the model.

    Returns:
        The number of MLPs replaced.
    """
    dtype = next(model.parameters()).dtype
    if dtype not in FUSED_DTYPES:
        return 0
    count = 0
    for parent in list(model.modules()):
        for name, child in parent.named_children():
            fused = _fused(child, dtype, kernels)
            if fused is not None:
                setattr(parent, name, fused)
                count += 1
    return count


def _fused(mlp: torch.nn.Module, dtype: torch.dtype, kernels: ModuleType) -> FusedMLP | None:
    """Return the replacement of an MLP, or None if the module is no gated MLP or computes something else."""
    names = ("gate_proj", "up_proj", "down_proj", "act_fn")
    parts = [part for name in names if isinstance(part := getattr(mlp, name, None), torch.nn.Module)]
    width = getattr(parts[0], "in_features", None) if len(parts) == len(names) else None
    if width is None or len(signature(mlp.forward).parameters) > 1:  # further arguments would be ignored
        return None
    gate_proj, up_proj, down_proj, act_fn = parts
    device = next(mlp.parameters(), torch.empty(0)).device  # packed weights are no parameters
    x = torch.randn((1, 1, width), generator=torch.Generator().manual_seed(0)).to(device, dtype)
    gate, up = gate_proj(x), up_proj(x)
    if gate.shape != up.shape or not nearly_equal(mlp(x), down_proj(act_fn(gate) * up)):
        return None
    for activation in elementwise.ACTIVATIONS:
        gate = torch.linspace(-8, 8, 257, dtype=dtype).to(device)
        expected = act_fn(gate)
        kernels.gate(gate, torch.ones_like(gate), activation)
        if nearly_equal(gate, expected):
            return FusedMLP(gate_proj, up_proj, down_proj, activation, kernels)
    return None
