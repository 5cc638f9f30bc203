"""Linear layers whose weights lie as a kernel reads them, instead of being put in that order anew in every step.

For CPUs, and for 16-bit weights only: float32 keeps the arithmetic of `torch.nn.functional.linear`, to the last bit. Bfloat16
has a kernel of ours where the processor has matrix instructions; it reads memory faster than oneDNN's, which is for the rest.
"""

import torch

from pdserve.kernels import cpu, linear

# The order is chosen for a number of rows. This one serves 1 to 128 rows best, and larger ones as well as any.
_ROWS = 128


class PackedLinear(torch.nn.Module):
    """Takes the place of a `torch.nn.Linear`, whose weight can be freed then."""

    def __init__(self, linear: torch.nn.Linear) -> None:
        super().__init__()
        self.in_features = linear.in_features
        self.out_features = linear.out_features
        self.bias = linear.bias
        # An opaque tensor, which nothing but the operator below can read; no parameter, so that nothing tries to.
        self._packed = torch.ops.mkldnn._reorder_linear_weight(linear.weight.data, _ROWS)

    def use_huge_pages(self) -> None:
        """Moves the weight: its memory is oneDNN's own, which starts anywhere and knows nothing of large pages."""
        nbytes = torch.ops.mkldnn._nbytes(self._packed)
        cpu.huge_pages_at(torch.ops.mkldnn.data_ptr(self._packed), nbytes, written=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[..., in_features] → [..., out_features]"""
        y: torch.Tensor = torch.ops.mkldnn._linear_pointwise(x, self._packed, self.bias, "none", [], "")
        return y


class TiledLinear(torch.nn.Module):
    """The same on a kernel of ours, for bfloat16."""

    def __init__(self, layer: torch.nn.Linear) -> None:
        super().__init__()
        self.in_features = layer.in_features
        self.out_features = layer.out_features
        self.bias = layer.bias
        self.tiles = torch.nn.Parameter(linear.pack(layer.weight.data), requires_grad=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[..., in_features] → [..., out_features]"""
        return linear.linear(x, self.tiles, self.out_features, self.bias)

    def use_huge_pages(self) -> None:
        """Moves the weight as far as it does not begin in one."""
        cpu.huge_pages(self.tiles.data, written=True)


def prepack(model: torch.nn.Module, *, tiled: bool) -> int:
    """Replaces the linear layers of a model on the CPU, where this processor has kernels for their dtype.

    A matrix that is the embedding as well is kept twice. `tiled` lets kernels of ours take part.

    Returns:
        How many were replaced.
    """
    packed: list[PackedLinear | TiledLinear] = []
    for parent in list(model.modules()):
        for name, child in parent.named_children():
            if type(child) is not torch.nn.Linear or child.weight.device.type != "cpu":
                continue
            if tiled and child.weight.dtype == torch.bfloat16 and linear.available():
                packed.append(TiledLinear(child))
            elif _has_kernel(child.weight.dtype):
                packed.append(PackedLinear(child))
            else:
                continue
            setattr(parent, name, packed[-1])
    for layer in packed:  # when all lie where they will stay: pages are shared by neighbours
        layer.use_huge_pages()
    return len(packed)


def _has_kernel(dtype: torch.dtype) -> bool:
    if not torch.backends.mkldnn.is_available():
        return False
    if dtype == torch.bfloat16:
        return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    return dtype == torch.float16 and bool(torch.ops.mkldnn._is_mkldnn_fp16_supported())
