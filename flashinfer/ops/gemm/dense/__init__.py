"""Dense GEMM with float32 accumulation, a bias, and one scale for a whole operand."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch

from flashinfer._core.dispatch import Op, Variant
from flashinfer.ops.gemm.dense import config


@dataclass(frozen=True)
class Problem:
    """out[b] = a[b] @ b[b] * scales + bias, for every entry b of a batch.

    Attributes
    ----------
    a, b, out : str
        Dtypes of the operands and of the result.
    a_major, b_major, out_major : str
        The contiguous dimension, "m", "n" or "k", if 16-byte accesses along it are aligned; "" for other strides.
        b_major may be "blocks": B is [k / 128, n, 128] with rows in the order of `shuffle_matrix_a`.
    rows : int
        M rounded up to 16, 32, 64 or 128; 256 for more.
    columns : int
        Columns of a tile: 32, 64, 128 or 256, by `choose_split`.
    split : bool
        Whether K is split into slices.
    scales : int
        Number of scales of the result, 0 to 2: float32 tensors of one element.
    bias : str
        Dtype of the bias, which is added to each row; "" for none.
    """

    a: str
    b: str
    out: str
    a_major: str
    b_major: str
    out_major: str
    rows: int
    columns: int
    split: bool = False
    scales: int = 0
    bias: str = ""


class Inputs(NamedTuple):
    """a : [batch, m, k]; b : [batch, k, n], or [k / 128, n, 128] with b_major "blocks"; out : [batch, m, n]; any
    strides.

    bias : [n] or None; a_scale, b_scale : float32 tensors of one element, or None; slices : the number of K slices.
    """

    a: torch.Tensor
    b: torch.Tensor
    out: torch.Tensor
    bias: torch.Tensor | None = None
    a_scale: torch.Tensor | None = None
    b_scale: torch.Tensor | None = None
    slices: int = 1


def _catalog() -> Iterator[Problem]:
    yield Problem("bf16", "bf16", "bf16", "k", "k", "n", 256, 256)
    yield Problem("bf16", "bf16", "bf16", "k", "k", "n", 256, 128, scales=1)
    yield Problem("bf16", "bf16", "fp32", "k", "n", "n", 16, 32, split=True, bias="bf16")
    yield Problem("fp8e4nv", "fp8e4nv", "bf16", "k", "k", "n", 256, 128, scales=2)
    yield Problem("fp8e4nv", "fp8e4nv", "bf16", "k", "blocks", "n", 64, 64, scales=1)


dense = Op(
    "dense_gemm",
    Problem,
    (
        Variant("sm90", "flashinfer.ops.gemm.dense.sm90", config.refuses_sm90, config.sm90),
        Variant("portable", "flashinfer.ops.gemm.dense.portable", config=config.portable),
        Variant("reference", "flashinfer.ops.gemm.dense.reference"),
    ),
    _catalog,
)
