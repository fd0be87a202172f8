"""Gated activations: the first half of a row through SiLU or GELU, times the second half; in rows or in NVFP4."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch

from flashinfer._core.dispatch import Op, Variant
from flashinfer.ops.activation import config

KINDS = ("silu", "gelu", "gelu_tanh")


@dataclass(frozen=True)
class Problem:
    """act(x[:, :hidden]) * x[:, hidden:].

    Attributes
    ----------
    kind : str
        One of KINDS.
    dtype : str
        Of the input and the result.
    block : int
        hidden rounded up to a power of two, at most 1024. hidden itself is a run-time argument.
    aligned : bool
        Both halves of a row, and the result's rows, can be read 16 bytes at a time.
    form : str
        Of the result: "" rows in their dtype; or "nvfp4", of the first rows of each matrix of a batch, as many as a
        tensor says, with scale factors in 128x4 tiles.
    score : str
        As NVFP4's quantising leaf has it: "", "mae" or "mse".
    pdl : bool
        The launch may be dependent, where the chip has that.
    """

    kind: str
    dtype: str
    block: int = 1024
    aligned: bool = True
    form: str = ""
    score: str = ""
    pdl: bool = True


class Experts(NamedTuple):
    """What the NVFP4 form takes and gives beside x [batch, rows, 2 * hidden] and codes [batch, rows, hidden / 2].

    global_scale : float32 [1] or [batch]. counts : int32 [batch]. factors : receives bytes [batch, padded rows x padded
    blocks].
    """

    global_scale: torch.Tensor
    counts: torch.Tensor
    factors: torch.Tensor


def _catalog() -> Iterator[Problem]:
    for kind in KINDS:
        for dtype in ("bf16", "fp16"):
            yield Problem(kind, dtype)
    yield Problem("silu", "fp32", aligned=False)
    yield Problem("gelu_tanh", "bf16", block=64)
    yield Problem("silu", "bf16", form="nvfp4")
    yield Problem("silu", "fp16", form="nvfp4", score="mse", aligned=False)


act_and_mul = Op(
    "act_and_mul",
    Problem,
    (
        Variant("portable", "flashinfer.ops.activation.portable", config=config.portable),
        Variant("reference", "flashinfer.ops.activation.reference"),
    ),
    _catalog,
)
