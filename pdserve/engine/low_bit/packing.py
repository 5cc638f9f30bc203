"""Integers of 4 and 8 bits in words of 32, as checkpoints pack them."""

import torch

AWQ_ORDER = (0, 4, 1, 5, 2, 6, 3, 7)  # the place in a word of each of 8 columns


def unpack(words: torch.Tensor, bits: int, dim: int, order: tuple[int, ...] = ()) -> torch.Tensor:
    """Return the integers, uint8, of words along a dimension, which becomes 32 / bits times as long.

    Args:
        words: int32.
        order: the place of each integer in its word; default: the first in the lowest bits.
    """
    places = torch.tensor(order or range(32 // bits), dtype=torch.int32)
    shifted = words.movedim(dim, -1)[..., None] >> (places * bits)
    return (shifted & ((1 << bits) - 1)).to(torch.uint8).flatten(-2).movedim(-1, dim)
