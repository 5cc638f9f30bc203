"""Noise of the sampler: a counter-based generator, so that a token's noise is a function of its seed and position alone.

The generator is SplitMix64 (Steele, Lea, Flood 2014) with the token's id as its counter. Its products are meant to wrap
around. Shape legend: S sequences, V vocabulary, K candidates.
"""

import torch

# Constants of SplitMix64, as signed 64-bit integers.
GOLDEN = 0x9E3779B97F4A7C15 - (1 << 64)
MIX_1 = 0xBF58476D1CE4E5B9 - (1 << 64)
MIX_2 = 0x94D049BB133111EB - (1 << 64)


def random_bits(counters_S: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """Return 53 random bits, int64 [S, V]; entry (s, v) is a function of counters_S[s] and the id, [V] or [S, V]."""
    return _logical_shift_right(mixed(counters_S[:, None] + (ids + 1) * GOLDEN), 11)


def mixed(z: torch.Tensor) -> torch.Tensor:
    """Return 64-bit integers mixed, elementwise."""
    z = (z ^ _logical_shift_right(z, 30)) * MIX_1
    z = (z ^ _logical_shift_right(z, 27)) * MIX_2
    return z ^ _logical_shift_right(z, 31)


def gumbel(bits: torch.Tensor) -> torch.Tensor:
    """Return Gumbel noise in float64, elementwise."""
    uniform = (bits.double() + 0.5) * 2.0**-53
    uniform.clamp_(max=1 - 2.0**-53)  # the largest would round to 1, whose noise is infinite
    return -torch.log(-torch.log(uniform))


def fast_gumbel(bits: torch.Tensor) -> torch.Tensor:
    """Return `gumbel` in float32, to 1e-5: near 1, the logarithm of a uniform number is that of its distance from 1."""
    uniform = (bits.float() + 0.5) * 2.0**-53
    distance = ((1 << 53) - bits).float() * 2.0**-53
    return -torch.log(torch.where(uniform < 0.5, -torch.log(uniform), -torch.log1p(-distance)))


def _logical_shift_right(bits: torch.Tensor, by: int) -> torch.Tensor:
    """Shift right and fill with zeros; torch's own operator keeps the sign."""
    return (bits >> by) & ((1 << (64 - by)) - 1)
