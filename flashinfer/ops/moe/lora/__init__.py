"""LoRA for routed rows: products with the low-rank matrices of adapter and expert, found by tables of addresses."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch

from flashinfer._core.dispatch import Op, portable_only
from flashinfer.ops.moe.lora import config

MOST_TOGETHER = 256


@dataclass(frozen=True)
class Problem:
    """out[r, c] += sum over the pairs p of r of weight[p] * x[row of p] @ w(expert[p], adapter[token[p]])[c].

    Arguments of every variant's `run(problem, config, x, matrices, pairs, out, offset)`: x [., K] and out [rows, .]
    with contiguous rows, Matrices and Pairs, and `offset`, int64 [1] on the device, the first column of out that is
    written; None stands for 0. Columns outside out are not written.

    Sums are float32, over the pairs in order, and rounded once.

    Attributes
    ----------
    dtype, out : str
        Of x and the matrices, and of the result.
    together : int
        Elements of K in one step: K rounded up to a power of two, from 16 to MOST_TOGETHER.
    by_token : bool
        Pair p reads row tokens[p] of x; else row p.
    weighted : bool
        Pairs have weights.
    combined : bool
        A row of out sums the pairs that `order` and `begin` list.
    placed : bool
        `offset` is given.
    adds : bool
        The result is added to out; else stored. The row of a pair that gives nothing is not written.
    """

    dtype: str
    out: str
    together: int
    by_token: bool = False
    weighted: bool = False
    combined: bool = False
    placed: bool = False
    adds: bool = True


class Matrices(NamedTuple):
    """table int64 [experts]: the address of adapter 0's matrix [rows, K] of each expert, contiguous, in the dtype of x.

    The matrix of adapter l begins l * `stride` elements after it.
    """

    table: torch.Tensor
    stride: int
    rows: int


class Pairs(NamedTuple):
    """tokens and experts int64 [pairs], adapters int64 [tokens], weights float32 [pairs] or None: 1.

    A pair whose token or expert does not exist, or whose adapter is negative, gives nothing; nothing else of it is
    read.

    order, begin : int64 [pairs] and [rows + 1]: those of row r are order[begin[r] : begin[r + 1]]. Or None: row r has
    pair r alone.
    """

    tokens: torch.Tensor
    experts: torch.Tensor
    adapters: torch.Tensor
    weights: torch.Tensor | None = None
    order: torch.Tensor | None = None
    begin: torch.Tensor | None = None


def _catalog() -> Iterator[Problem]:
    yield Problem("bf16", "bf16", 256, by_token=True)
    yield Problem("fp16", "fp16", 256)
    yield Problem("bf16", "fp32", 16, weighted=True, combined=True, placed=True)
    yield Problem("fp16", "fp32", 32, adds=False, placed=True)


lora = Op("moe_lora", Problem, portable_only(__name__, config.portable), _catalog)
