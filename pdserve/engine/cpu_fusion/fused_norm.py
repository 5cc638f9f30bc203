"""RMS norms in one pass over their input, instead of the seven that transformers' modules take; CPU, 16-bit types.

Which modules can be replaced is found out by trying, not by their names: models differ in where they round, and whether
their weight is meant to be added to 1.
"""

import torch

from pdserve.engine.cpu_fusion.trial import DTYPES, close
from pdserve.kernels import elementwise

_TRIALS = 16  # rows


class FusedNorm(torch.nn.Module):
    """Takes the place of a norm that computes weight · x / √(mean(x²) + eps)."""

    def __init__(self, weight_N: torch.nn.Parameter, eps: float) -> None:
        super().__init__()
        self.weight = weight_N
        self.eps = eps

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[..., N] → [..., N]"""
        return elementwise.rms_norm(x, self.weight, self.eps)


@torch.inference_mode()
def fuse_norms(model: torch.nn.Module) -> int:
    """Replaces the norms of a model on the CPU that `FusedNorm` equals.

    Returns:
        How many were replaced.
    """
    count = 0
    for parent in list(model.modules()):
        for name, child in parent.named_children():
            fused = _fused(child)
            if fused is not None:
                setattr(parent, name, fused)
                count += 1
    return count


def _fused(norm: torch.nn.Module) -> FusedNorm | None:
    weight = getattr(norm, "weight", None)
    eps = getattr(norm, "variance_epsilon", getattr(norm, "eps", None))
    if not isinstance(weight, torch.nn.Parameter) or weight.dim() != 1 or not isinstance(eps, float):
        return None
    if weight.device.type != "cpu" or weight.dtype not in DTYPES or list(norm.children()):
        return None
    fused = FusedNorm(weight, eps)
    random = torch.Generator().manual_seed(0)
    x = (torch.randn((_TRIALS, len(weight)), generator=random) * torch.logspace(-4, 2, _TRIALS)[:, None]).to(
        weight.dtype
    )
    return fused if close(fused(x), norm(x)) else None
