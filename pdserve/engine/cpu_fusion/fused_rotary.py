"""Rotary embeddings in one pass over queries and keys, instead of the dozen that transformers' take; CPU, 16-bit types.

A model's attention calls a function of its own module for them. Whether that one can be replaced is found out by trying:
models differ in which numbers turn together, and in where they round. Only this model sees the replacement: its attention
gets a forward of the same code over other globals, and other models of its kind in the process keep theirs.
"""

from collections.abc import Callable
from types import FunctionType, MethodType

import torch

from pdserve.engine.cpu_fusion.trial import DTYPES, close
from pdserve.kernels import elementwise

NAME = "apply_rotary_pos_emb"
_TOKENS, _HEADS, _KV_HEADS = 16, 3, 2  # of a trial

Rotary = Callable[..., tuple[torch.Tensor, torch.Tensor]]


@torch.inference_mode()
def fuse_rotary(model: torch.nn.Module) -> int:
    """Replaces the rotary embeddings of a model on the CPU that the kernel equals.

    Returns:
        In how many modules.
    """
    dtype = next(model.parameters()).dtype
    if dtype not in DTYPES:
        return 0
    forwards: dict[FunctionType, FunctionType | None] = {}
    count = 0
    for module in model.modules():
        forward = type(module).forward
        if isinstance(forward, FunctionType) and NAME in forward.__code__.co_names and NAME in forward.__globals__:
            if forward not in forwards:
                forwards[forward] = _with_fused(forward, dtype)
            if (fused := forwards[forward]) is not None:
                module.forward = MethodType(fused, module)
                count += 1
    return count


def _with_fused(forward: FunctionType, dtype: torch.dtype) -> FunctionType | None:
    original = forward.__globals__[NAME]
    tables = {table for table in (dtype, torch.float32) if _equal(original, dtype, table)}
    if not tables:
        return None

    def rotary(
        q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, unsqueeze_dim: int = 1
    ) -> tuple[torch.Tensor, torch.Tensor]:
        if q.dtype != dtype or cos.dtype not in tables:
            return original(q, k, cos, sin, unsqueeze_dim=unsqueeze_dim)  # type: ignore[no-any-return]
        return _rotary(q, k, cos, sin, unsqueeze_dim)

    names = {**forward.__globals__, NAME: rotary}
    fused = FunctionType(forward.__code__, names, forward.__name__, forward.__defaults__, forward.__closure__)
    fused.__kwdefaults__ = forward.__kwdefaults__
    return fused


def _rotary(
    q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, unsqueeze_dim: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """q and k are [1, H, T, D] if heads are dimension `unsqueeze_dim` = 1, [1, T, H, D] if they are dimension 2."""
    if unsqueeze_dim == 2:
        return elementwise.rotary(q, k, cos, sin)
    q, k = elementwise.rotary(q.transpose(1, 2), k.transpose(1, 2), cos, sin)
    return q.transpose(1, 2), k.transpose(1, 2)


def _equal(original: Rotary, dtype: torch.dtype, table: torch.dtype) -> bool:
    """The kernel's results are within one unit in the last place of this function's, with cos and sin of that dtype."""
    random = torch.Generator().manual_seed(0)
    for size, turning in ((64, 64), (20, 20), (64, 24)):
        q, k = (torch.randn((1, heads, _TOKENS, size), generator=random).to(dtype) for heads in (_HEADS, _KV_HEADS))
        cos, sin = (torch.randn((1, _TOKENS, turning), generator=random).to(table) for _ in range(2))
        for unsqueeze_dim in (1, 2):
            try:
                expected = original(q, k, cos, sin, unsqueeze_dim=unsqueeze_dim)
            except Exception:  # noqa: BLE001 - whatever a function trips over that takes something else
                if turning < size:
                    continue  # it does not turn parts of heads, so that nobody can ask it to
                return False
            got = _rotary(q, k, cos, sin, unsqueeze_dim)
            if not all(close(x, y) for x, y in zip(expected, got, strict=True)):
                return False
            q, k = q.transpose(1, 2), k.transpose(1, 2)
    return True
