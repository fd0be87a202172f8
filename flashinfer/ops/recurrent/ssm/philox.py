"""Philox-4x32 in torch: the random words that kernels use for stochastic rounding.

Salmon et al., Parallel Random Numbers: As Easy as 1, 2, 3, 2011.
"""

from __future__ import annotations

import torch

_MASK = (1 << 32) - 1
_MULTIPLIERS, _KEYS = (0xD2511F53, 0xCD9E8D57), (0x9E3779B9, 0xBB67AE85)


def words(seed: int, counters: tuple, rounds: int) -> torch.Tensor:
    """The first of four 32-bit words, int64, of each counter (c0, c1, c2, c3): tensors or numbers below 2^32."""
    c0, c1, c2, c3 = (torch.as_tensor(c, dtype=torch.int64, device=counters[0].device) for c in counters)
    k0, k1 = seed & _MASK, seed >> 32 & _MASK
    for _ in range(rounds):
        high0, low0 = _product(c0, _MULTIPLIERS[0])
        high1, low1 = _product(c2, _MULTIPLIERS[1])
        c0, c1, c2, c3 = high1 ^ c1 ^ k0, low1, high0 ^ c3 ^ k1, low0
        k0, k1 = k0 + _KEYS[0] & _MASK, k1 + _KEYS[1] & _MASK
    return c0


def _product(x: torch.Tensor, factor: int) -> tuple[torch.Tensor, torch.Tensor]:
    """High and low 32 bits of a product of 32-bit numbers, which int64 does not hold."""
    low, high = (x & 0xFFFF) * factor, (x >> 16) * factor
    total = (low >> 16) + high
    return total >> 16, (total & 0xFFFF) << 16 | low & 0xFFFF
