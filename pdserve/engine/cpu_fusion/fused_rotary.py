"""Rotary embeddings in one pass over queries and keys instead of a dozen, for 16-bit types on CPUs.

A model's attention calls a function of its own module, `apply_rotary_pos_emb`. It is replaced only if a trial gives the same
results: models differ in which elements rotate together, and in where they round. The replacement is local to one model: its
attention modules get a forward with the same code over other globals, and other models of that architecture in the process
are not affected.
"""

from collections.abc import Callable
from types import FunctionType, MethodType

import torch

from pdserve.engine.cpu_fusion.tolerance import FUSED_DTYPES, nearly_equal
from pdserve.kernels import elementwise

NAME = "apply_rotary_pos_emb"
_TEST_TOKENS, _TEST_HEADS, _TEST_KV_HEADS = 16, 3, 2

Rotary = Callable[..., tuple[torch.Tensor, torch.Tensor]]


@torch.inference_mode()
def fuse_rotary(model: torch.nn.Module) -> int:
    """Replace in place the rotary embeddings of a model on the CPU that the kernel equals.

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
        if isinstance(forward, FunctionType) and NAME in forward.__code__.co_names and NAME in forward.__globals__:
            if forward not in forwards:
                forwards[forward] = _fused_forward(forward, dtype)
            if (fused := forwards[forward]) is not None:
                module.forward = MethodType(fused, module)
                count += 1
    return count


def _fused_forward(forward: FunctionType, dtype: torch.dtype) -> FunctionType | None:
    """Return a copy of `forward` that calls the kernel, or None if the kernel computes something else."""
    original = forward.__globals__[NAME]
    table_dtypes = {table for table in (dtype, torch.float32) if _equals_kernel(original, dtype, table)}
    if not table_dtypes:
        return None

    def rotary(
        q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, unsqueeze_dim: int = 1
    ) -> tuple[torch.Tensor, torch.Tensor]:
        if q.dtype != dtype or cos.dtype not in table_dtypes:
            return original(q, k, cos, sin, unsqueeze_dim=unsqueeze_dim)  # type: ignore[no-any-return]
        return _kernel_rotary(q, k, cos, sin, unsqueeze_dim)

    new_globals = {**forward.__globals__, NAME: rotary}
    fused = FunctionType(forward.__code__, new_globals, forward.__name__, forward.__defaults__, forward.__closure__)
    fused.__kwdefaults__ = forward.__kwdefaults__
    return fused


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
