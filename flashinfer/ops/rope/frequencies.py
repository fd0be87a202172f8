"""How fast each pair of a head turns with the position."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from math import pi

import torch


@dataclass(frozen=True)
class Frequencies:
    """The frequencies of RoPE (Su et al., RoFormer, https://arxiv.org/abs/2104.09864), scaled for longer contexts.

    Pair i of rotary_dim / 2 turns by theta ** (-2 i / rotary_dim) radians a position. All are divided by `scale`
    (position interpolation, Chen et al., https://arxiv.org/abs/2306.15595); or, as in Llama 3.1, those that turn
    fewer than low_freq_factor times within old_context_len, none of those that turn more than high_freq_factor times,
    and between the two a mixture that is linear in the number of turns.

    Attributes
    ----------
    rotary_dim : int
    scale, theta : float
    low_freq_factor, high_freq_factor, old_context_len : float
        As in Llama 3.1 if old_context_len is not 0.
    """

    rotary_dim: int
    scale: float
    theta: float
    low_freq_factor: float = 0
    high_freq_factor: float = 0
    old_context_len: float = 0

    def per_position(self) -> torch.Tensor:
        """Radians per position, float64 [rotary_dim / 2], on the CPU."""
        pair = torch.arange(0, self.rotary_dim, 2, dtype=torch.float64, device="cpu")
        frequency = self.theta ** (-pair / self.rotary_dim)
        if not self.old_context_len:
            return frequency / self.scale
        turns = frequency * self.old_context_len / (2 * pi)
        kept = (turns - self.low_freq_factor) / (self.high_freq_factor - self.low_freq_factor)
        kept = kept.clamp(0, 1)
        return frequency * kept + frequency / self.scale * (1 - kept)


@dataclass(frozen=True)
class Axes:
    """A head whose channels are shared out to the axes of a space, the first ones to the first; each axis has its own
    frequencies.

    YaRN (Peng et al., https://arxiv.org/abs/2309.00071): those of pairs from `high` of an axis on are divided by
    `factor`, those of pairs up to `low` are not, and between the two it is a mixture that is linear in the pair.

    Attributes
    ----------
    channels : tuple of int
        Of each axis; even.
    theta : float
    factor, low, high : float
        Of YaRN; there is none if factor is 1.
    """

    channels: tuple[int, ...]
    theta: float
    factor: float = 1.0
    low: float = 0.0
    high: float = 0.0

    def per_position(self) -> torch.Tensor:
        """Radians per position of the pair's axis, float64 [sum of channels / 2], on the CPU."""
        return torch.cat([self._of_axis(count) for count in self.channels])

    def _of_axis(self, channels: int) -> torch.Tensor:
        frequency = Frequencies(channels, 1, self.theta).per_position()
        # Bounds that are equal are a step, which upstream has as a steep ramp.
        ramp = self.high - self.low if abs(self.high - self.low) > 1e-6 else 1e-3
        divided = ((torch.arange(len(frequency), dtype=torch.float64, device="cpu") - self.low) / ramp).clamp(0, 1)
        return frequency * (1 - divided) + frequency / self.factor * divided


@lru_cache(maxsize=256)
def radians(frequencies: Frequencies | Axes, device: torch.device) -> torch.Tensor:
    """Radians per position, float64 [rotary_dim / 2]."""
    return frequencies.per_position().to(device)


@lru_cache(maxsize=256)
def turns(frequencies: Frequencies | Axes, device: torch.device) -> torch.Tensor:
    """Turns per position in units of 2 ** -64, int64 [rotary_dim / 2].

    Whole turns drop out of them, and drop out of their product with a position in 64-bit arithmetic, so that the angle
    of position 10 million is as exact as that of position 1.
    """
    units = [int(turn * 2.0**64) % 2**64 for turn in (frequencies.per_position() / (2 * pi)).tolist()]
    return torch.tensor([unit - 2**64 if unit >= 2**63 else unit for unit in units], dtype=torch.int64, device=device)
