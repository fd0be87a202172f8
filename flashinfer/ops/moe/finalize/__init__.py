"""Finalize: the weighted sum of what a token's experts gave, from the rows of a `flashinfer.ops.moe.token_map`."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from flashinfer._core.dispatch import Op, portable_only
from flashinfer.ops.moe.finalize import config

# Rows whose loads are on the way at once: more need more registers than a thread has for them on sm_80 (ptxas: spills).
MOST_TOGETHER = 8


@dataclass(frozen=True)
class Problem:
    """out[token] = sum over choices of weight[token, choice] * y[pair_row[token, choice]].

    Summed in float32, in the order of the choices, and rounded once. A choice whose row is negative gives nothing, and
    neither its weight nor any row of y is looked at; a token without a row has zeros.

    Attributes
    ----------
    dtype, out : str
        Of the rows, and of the result.
    weights : str
        Dtype of the weights, or "" where there are none: 1.
    together : int
        Choices that are asked for at once: those of a token, rounded up to a power of two, at most MOST_TOGETHER.
    aligned : bool
        Rows of y and out can be accessed 16 bytes at a time, and end at a multiple of them.
    """

    dtype: str
    out: str
    weights: str
    together: int
    aligned: bool = True


def _catalog() -> Iterator[Problem]:
    yield Problem("bf16", "bf16", "fp32", 8)
    yield Problem("fp32", "bf16", "", 2)
    yield Problem("fp16", "fp16", "bf16", 8, aligned=False)


finalize = Op("moe_finalize", Problem, portable_only(__name__, config.portable), _catalog)
