"""Linear layers whose weights are packed once in the order that the kernel reads, instead of being reordered in every step.

For 16-bit weights on CPUs: float32 keeps the arithmetic of `torch.nn.functional.linear`, bit for bit. Bfloat16 uses our own
kernel on processors with AMX, which reads memory faster than oneDNN's; everything else uses oneDNN.
"""

import torch

from pdserve.engine.cpu_fusion.row_products import pad_rows, round_up
from pdserve.kernels import linear, memory

# oneDNN chooses the order for a number of rows. This one is best for 1 to 128 rows, and as good as any for more.
_PACKED_FOR_ROWS = 128


class PackedLinear(torch.nn.Module):
    """Replacement of a `torch.nn.Linear` on oneDNN. The original weight can be freed.

    Attributes:
        min_rows: inputs of fewer rows are padded; 2 gives a row the same bits in any batch (row_products.py).
    """

    def __init__(self, linear: torch.nn.Linear, min_rows: int = 2) -> None:
        super().__init__()
        self.min_rows = min_rows
        self.in_features = linear.in_features
        self.out_features = linear.out_features
        self.bias = linear.bias
        # An opaque tensor that only the operator below can read; not a parameter, so that nothing else tries to.
        self._packed = torch.ops.mkldnn._reorder_linear_weight(linear.weight.data, _PACKED_FOR_ROWS)

    def use_huge_pages(self) -> None:
        """Move the weight into huge pages. oneDNN allocates it unaligned and without them."""
        nbytes = torch.ops.mkldnn._nbytes(self._packed)
        memory.huge_pages_at(torch.ops.mkldnn.data_ptr(self._packed), nbytes, written=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[..., in_features] → [..., out_features]"""
        rows = x.numel() // self.in_features
        padded = round_up(max(rows, self.min_rows))
        y: torch.Tensor = torch.ops.mkldnn._linear_pointwise(
            pad_rows(x, padded) if padded > rows else x, self._packed, self.bias, "none", [], ""
        )
        return y[:rows].view(*x.shape[:-1], self.out_features) if padded > rows else y


class TiledLinear(torch.nn.Module):
    """Replacement of a bfloat16 `torch.nn.Linear` on our AMX kernel."""

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
        """Move the parts of the weight that are not in huge pages yet."""
        memory.huge_pages(self.tiles.data, written=True)


def prepack(model: torch.nn.Module, *, tiled: bool, min_rows: int = 2) -> int:
    """Replace in place the linear layers of a model on the CPU for whose dtype this processor has kernels.

    A weight shared with the embedding is kept twice.

    Args:
        tiled: allow our own kernel, not only oneDNN's.
        min_rows: of oneDNN's kernels, see PackedLinear.

    Returns:
        The number of layers replaced.
    """
    packed: list[PackedLinear | TiledLinear] = []
    for parent in list(model.modules()):
        for name, child in parent.named_children():
            if type(child) is not torch.nn.Linear or child.weight.device.type != "cpu":
                continue
            if tiled and child.weight.dtype == torch.bfloat16 and linear.is_available():
                packed.append(TiledLinear(child))
            elif _has_onednn_kernel(child.weight.dtype):
                packed.append(PackedLinear(child, min_rows))
            else:
                continue
            setattr(parent, name, packed[-1])
    for layer in packed:  # after all are allocated: neighbours share pages
        layer.use_huge_pages()
    return len(packed)


def largest_min_rows(model: torch.nn.Module) -> int:
    """Return the number of rows below which layers of a model pad their inputs."""
    return max((module.min_rows for module in model.modules() if isinstance(module, PackedLinear)), default=1)


def _has_onednn_kernel(dtype: torch.dtype) -> bool:
    if not torch.backends.mkldnn.is_available():
        return False
    if dtype == torch.bfloat16:
        return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    return dtype == torch.float16 and bool(torch.ops.mkldnn._is_mkldnn_fp16_supported())
