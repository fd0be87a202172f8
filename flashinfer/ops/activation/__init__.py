"""Gated activations: the first half of a row through SiLU or GELU, times the second half; in rows or in NVFP4."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch

from flashinfer._core.dispatch import Op, portable_only
from flashinfer.ops.activation import config

KINDS = ("silu", "gelu", "gelu_tanh")


@dataclass(frozen=True)
class Problem:
    """act(x[:, :hidden]) * x[:, hidden:].

    Attributes
    ----------
    kind : str
        "silu", "gelu" or "gelu_tanh".
    dtype : str
        Of the input and the result.
    block : int
        hidden rounded up to a power of two, at most 1024. hidden itself is a run-time argument.
    aligned : bool
        Both halves of a row, and the result's rows, can be read 16 bytes at a time.
    format : str
        Of the result of a batch of matrices: "" rows in their dtype; "nvfp4" or "mxfp8".
    layout : str
        Of a format's scale factors: "128x4", "8x4" or "linear".
    counted : bool
        Only the first rows of each matrix count, as many as a tensor has.
    across : bool
        "mxfp8" of the transpose [batch, hidden, rows], with blocks down the columns: whole blocks, and no padding.
    score : str
        As NVFP4's quantising leaf has it: "", "mae" or "mse".
    pdl : bool
        The launch may be dependent, where the chip has that.
    """

    kind: str
    dtype: str
    block: int = 1024
    aligned: bool = True
    format: str = ""
    layout: str = "128x4"
    counted: bool = False
    across: bool = False
    score: str = ""
    pdl: bool = True


class Quantised(NamedTuple):
    """What a format takes and gives beside x [batch, rows, 2 * hidden] and codes, bytes [batch, rows, .].

    factors : receives bytes [batch, padded rows x padded blocks]. global_scale : float32 [1] or [batch], of NVFP4.
    counts : int32 [batch].
    """

    factors: torch.Tensor
    global_scale: torch.Tensor | None = None
    counts: torch.Tensor | None = None


def _catalog() -> Iterator[Problem]:
    for kind in KINDS:
        for dtype in ("bf16", "fp16"):
            yield Problem(kind, dtype)
    yield Problem("silu", "fp32", aligned=False)
    yield Problem("gelu_tanh", "bf16", block=64)
    yield Problem("silu", "bf16", format="nvfp4", counted=True)
    yield Problem("silu", "fp16", format="nvfp4", score="mse", aligned=False)
    yield Problem("silu", "bf16", format="nvfp4", layout="8x4")
    yield Problem("silu", "bf16", format="mxfp8")
    yield Problem("silu", "bf16", format="mxfp8", layout="linear", counted=True)
    yield Problem("silu", "bf16", block=64, format="mxfp8", across=True)


act_and_mul = Op("act_and_mul", Problem, portable_only(__name__, config.portable), _catalog)
