"""Scores of an indexer that chooses keys for sparse attention: one key for all heads, no softmax, no values."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from flashinfer._core.dispatch import Op, Variant
from flashinfer.ops.attention.mqa_logits import config


@dataclass(frozen=True)
class Problem:
    """logits[q, k] = scale_k * sum over heads of w[q, h] * relu(q_h . k), over FP8 keys in pages.

    Attributes
    ----------
    num_heads : int
        Heads of a query.
    head_dim : int
        Elements of a query, and of a key: a multiple of 16, up to 256.
    page_size : int
        Keys per page. A page holds all its keys, then their float32 scales.
    tokens : int
        Queries per request.
    each : bool
        Whether every query has a length of its own, instead of every request.
    clean : bool
        Whether what a query does not see is written too, as -inf.
    aligned : bool
        Whether pages start on 16 bytes; else on 4.
    """

    num_heads: int
    head_dim: int = 128
    page_size: int = 64
    tokens: int = 1
    each: bool = False
    clean: bool = False
    aligned: bool = True


def _catalog() -> Iterator[Problem]:
    yield Problem(64)
    yield Problem(32, page_size=1, tokens=2, each=True, clean=True, aligned=False)
    yield Problem(21, head_dim=48, page_size=5, tokens=4, clean=True)


mqa_logits = Op(
    "mqa_logits",
    Problem,
    (
        Variant("portable", "flashinfer.ops.attention.mqa_logits.portable", config.refuses, config.choose),
        Variant("reference", "flashinfer.ops.attention.mqa_logits.reference"),
    ),
    _catalog,
)
