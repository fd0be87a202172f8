"""The short causal convolution of recurrent layers: each channel by itself, over the last 2 to 4 tokens.

out[t] = silu(bias + sum over j of weight[j] x[t - width + 1 + j])
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch

from flashinfer._core.dispatch import Op, portable_only
from flashinfer.ops.recurrent.conv import config


@dataclass(frozen=True)
class Problem:
    """A convolution of the tokens of sequences, which begin with what a state has of the tokens before.

    Attributes
    ----------
    width : int
        2 to 4.
    dtype, weight_dtype, bias_dtype, state_dtype, out_dtype : str
        "" where there is no bias or state.
    silu : bool
        Whether SiLU follows.
    long : bool
        Tokens are computed side by side, and the state follows in a launch of its own; else one after another.
    rolling : bool
        The state is a window that is longer than width - 1, and drafts stay in it; else it is the last inputs.
    index : str
        Type of slots and offsets.
    packed, read, accepted, fresh : bool
        Which of the tables of Call there are.
    dense : bool
        The channels of a state are contiguous.
    aligned : bool
        Channels are contiguous, and rows can be read 16 bytes at a time.
    """

    width: int
    dtype: str
    weight_dtype: str
    out_dtype: str
    bias_dtype: str = ""
    state_dtype: str = ""
    silu: bool = True
    long: bool = False
    rolling: bool = False
    index: str = "i32"
    packed: bool = False
    read: bool = True
    accepted: bool = False
    fresh: bool = False
    dense: bool = True
    aligned: bool = True


class Call(NamedTuple):
    """The tensors of a convolution.

    x, out : [rows, tokens, channels], any strides; with offsets there is one row.
    weight : [parts, width, channels / parts], any strides. bias : [channels].
    state : [slots, channels, length], any strides: the last width - 1 inputs of each sequence, from column 0 on, or
        from column accepted - 1. A rolling one keeps all of them but the first, and behind those the new inputs.
    slots : [sequences], the state of each; up to `null` it is padding: nothing is read or written, and the output is 0.
    accepted : [sequences].
    fresh : [sequences], whether the state is read; else it is zeros.
    offsets : [sequences + 1].
    """

    x: torch.Tensor
    weight: torch.Tensor
    bias: torch.Tensor | None
    state: torch.Tensor | None
    out: torch.Tensor
    slots: torch.Tensor | None = None
    accepted: torch.Tensor | None = None
    fresh: torch.Tensor | None = None
    offsets: torch.Tensor | None = None
    null: int = -1

    @property
    def sequences(self) -> int:
        return self.x.shape[0] if self.offsets is None else self.offsets.shape[0] - 1


def _catalog() -> Iterator[Problem]:
    yield Problem(4, "bf16", "bf16", "bf16", "bf16", "bf16")
    yield Problem(4, "bf16", "fp32", "bf16", "", "bf16", packed=True, accepted=True, rolling=True, dense=False)
    yield Problem(4, "bf16", "bf16", "bf16", "", "bf16", packed=True, long=True, fresh=True, index="i64")
    yield Problem(2, "fp32", "fp32", "fp32", "fp32", "fp32", silu=False, aligned=False, read=False)
    yield Problem(3, "fp16", "fp16", "fp16", "", "", long=True, read=False)


causal_conv1d = Op("causal_conv1d", Problem, portable_only(__name__, config.portable), _catalog)
