"""Fused layers for 16-bit types: RMS norms, rotary embeddings and gated MLPs in one pass over their input instead of many.

Candidates are found by trial, not by name: models differ in where they round, in which elements rotate together, in whether
1 is added to a norm's weight, and in activations. What computes the same is replaced.
"""

from collections.abc import Callable
from inspect import signature
from types import FunctionType, MethodType, ModuleType

import torch

from pdserve.engine.cpu_fusion.linear_method import Linear, PackedMethod, replace_children
from pdserve.engine.cpu_fusion.tolerance import FUSED_DTYPES, nearly_equal
from pdserve.kernels import elementwise, linear

ROTARY = "apply_rotary_pos_emb"  # the function of its own module that a model's attention calls
_TEST_ROWS = 16  # of norms
_TEST_TOKENS, _TEST_HEADS, _TEST_KV_HEADS = 16, 3, 2

Rotary = Callable[..., tuple[torch.Tensor, torch.Tensor]]


class FusedNorm(torch.nn.Module):
    """RMS norm: weight · x / √(mean(x²) + eps)."""

    def __init__(self, weight_N: torch.nn.Parameter, eps: float, kernels: ModuleType) -> None:
        super().__init__()
        self.weight = weight_N
        self.eps = eps
        self._rms_norm = kernels.rms_norm

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[..., N] → [..., N]"""
        y: torch.Tensor = self._rms_norm(x, self.weight, self.eps)
        return y


@torch.inference_mode()
def fuse_norms(model: torch.nn.Module, kernels: ModuleType = elementwise) -> int:
    """Replace in place the norms of a model that `FusedNorm` equals.

    Args:
        kernels: the module with `rms_norm` for the device of the model.

    Returns:
        The number of norms replaced.
    """
    return replace_children(model, lambda child: _fused_norm(child, kernels))


def _fused_norm(norm: torch.nn.Module, kernels: ModuleType) -> FusedNorm | None:
    """Return the replacement of a norm, or None if the module is no norm or computes something else."""
    weight_N = getattr(norm, "weight", None)
    eps = getattr(norm, "variance_epsilon", getattr(norm, "eps", None))
    if not isinstance(weight_N, torch.nn.Parameter) or weight_N.dim() != 1 or not isinstance(eps, float):
        return None
    if weight_N.dtype not in FUSED_DTYPES or list(norm.children()):
        return None
    if len(signature(norm.forward).parameters) > 1:  # a gate
        return None
    fused = FusedNorm(weight_N, eps, kernels)
    random = torch.Generator().manual_seed(0)
    scale = torch.logspace(-4, 2, _TEST_ROWS)[:, None]
    x = (torch.randn((_TEST_ROWS, len(weight_N)), generator=random) * scale).to(weight_N)
    return fused if nearly_equal(fused(x), norm(x)) else None


@torch.inference_mode()
def fuse_rotary(model: torch.nn.Module) -> int:
    """Replace in place the rotary embeddings of a model on the CPU that the kernel equals.

    The replacement is local to the model: its attention modules get a forward with the same code over other globals, and
    other models of that architecture in the process are not affected.

    Returns:
        The number of attention modules changed.
    """
    dtype = next(model.parameters()).dtype
    if dtype not in FUSED_DTYPES:
        return 0
    forwards: dict[FunctionType, FunctionType | None] = {}
    count = 0
    for module in model.modules():
        forward = type(module).forward
        if isinstance(forward, FunctionType) and ROTARY in forward.__code__.co_names and ROTARY in forward.__globals__:
            if forward not in forwards:
                forwards[forward] = _fused_rotary(forward, dtype)
            if (fused := forwards[forward]) is not None:
                module.forward = MethodType(fused, module)
                count += 1
    return count


def _fused_rotary(forward: FunctionType, dtype: torch.dtype) -> FunctionType | None:
    """Return a copy of `forward` that calls the kernel, or None if the kernel computes something else."""
    original = forward.__globals__[ROTARY]
    table_dtypes = {table for table in (dtype, torch.float32) if _equals_kernel(original, dtype, table)}
    if not table_dtypes:
        return None

    def rotary(
        q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, unsqueeze_dim: int = 1
    ) -> tuple[torch.Tensor, torch.Tensor]:
        if q.dtype != dtype or cos.dtype not in table_dtypes:
            return original(q, k, cos, sin, unsqueeze_dim=unsqueeze_dim)  # type: ignore[no-any-return]
        return _kernel_rotary(q, k, cos, sin, unsqueeze_dim)

    return with_rotary(forward, rotary)


def with_rotary(forward: FunctionType, rotary: Rotary) -> FunctionType:
    """Return the same code, which calls another rotary function."""
    names = {**forward.__globals__, ROTARY: rotary}
    copy = FunctionType(forward.__code__, names, forward.__name__, forward.__defaults__, forward.__closure__)
    copy.__kwdefaults__ = forward.__kwdefaults__
    return copy


def _kernel_rotary(
    q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, unsqueeze_dim: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Call the kernel. q and k are [1, H, T, D] if `unsqueeze_dim` is 1, [1, T, H, D] if it is 2."""
    if unsqueeze_dim == 2:
        return elementwise.rotary(q, k, cos, sin)
    q, k = elementwise.rotary(q.transpose(1, 2), k.transpose(1, 2), cos, sin)
    return q.transpose(1, 2), k.transpose(1, 2)


def _equals_kernel(original: Rotary, dtype: torch.dtype, table_dtype: torch.dtype) -> bool:
    """Return whether the kernel is within one unit in the last place of `original`, with cos and sin of `table_dtype`."""
    random = torch.Generator().manual_seed(0)
    for size, rotated in ((64, 64), (20, 20), (64, 24)):
        q, k = (
            torch.randn((1, heads, _TEST_TOKENS, size), generator=random).to(dtype)
            for heads in (_TEST_HEADS, _TEST_KV_HEADS)
        )
        cos, sin = (torch.randn((1, _TEST_TOKENS, rotated), generator=random).to(table_dtype) for _ in range(2))
        for unsqueeze_dim in (1, 2):
            try:
                expected = original(q, k, cos, sin, unsqueeze_dim=unsqueeze_dim)
            except Exception:  # noqa: BLE001 - a function with another signature may raise anything
                if rotated < size:
                    continue  # it does not support partial rotation, so no model calls it so
                return False
            got = _kernel_rotary(q, k, cos, sin, unsqueeze_dim)
            if not all(nearly_equal(x, y) for x, y in zip(expected, got, strict=True)):
                return False
            q, k = q.transpose(1, 2), k.transpose(1, 2)
    return True


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
        gate, up = _packed(self.gate_proj), _packed(self.up_proj)
        if gate is not None and up is not None and linear.has_amx():
            gated = linear.gated(x, gate, up, self._activation)
        else:
            gated = self.gate_proj(x)
            self._gate(gated, self.up_proj(x), self._activation)
        y: torch.Tensor = self.down_proj(gated)
        return y


def _packed(layer: torch.nn.Module) -> linear.PackedWeight | None:
    """Return the weight of a layer that the gated kernel computes: packed, in bfloat16, with nothing added."""
    method = layer.method if isinstance(layer, Linear) and layer.delta is None else None
    if not isinstance(method, PackedMethod) or method.bias is not None:
        return None
    is_plain = type(method.weight) is linear.PackedWeight and method.weight.dtype == torch.bfloat16
    return method.weight if is_plain else None


@torch.inference_mode()
def fuse_mlps(model: torch.nn.Module, kernels: ModuleType = elementwise) -> int:
    """Replace in place the MLPs of a model that `FusedMLP` equals.

    Args:
        kernels: the module with `gate` for the device of the model.

    Returns:
        The number of MLPs replaced.
    """
    dtype = next(model.parameters()).dtype
    return replace_children(model, lambda child: _fused_mlp(child, dtype, kernels)) if dtype in FUSED_DTYPES else 0


def _fused_mlp(mlp: torch.nn.Module, dtype: torch.dtype, kernels: ModuleType) -> FusedMLP | None:
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
