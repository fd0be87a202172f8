"""Scores of an indexer that chooses keys for sparse attention: one key for all heads, no softmax, no values."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch

from flashinfer._core.dispatch import Op, Variant
from flashinfer.ops.attention.mqa_logits import config


@dataclass(frozen=True)
class Problem:
    """logits[q, k] = scale_k * sum over heads of w[q, h] * relu(q_h . k), over keys in pages or side by side.

    Attributes
    ----------
    num_heads : int
        Heads of a query.
    head_dim : int
        Elements of a query, and of a key: a multiple of 16, up to 256; of 32 for mxfp4.
    page_size : int
        Keys per page; 0 for keys side by side, where every query has a first and a last key of its own.
    tokens : int
        Queries per request; 1 for keys side by side.
    each : bool
        Whether every query has a length of its own, instead of every request.
    clean : bool
        Whether what a query does not see is written too, as -inf.
    aligned : bool
        Whether pages start on 16 bytes; else on 4.
    qk_format : str
        Of queries and keys. "fp8": e4m3, keys under a float32 scale each; a page holds its keys, then their scales.
        "mxfp4": e2m1 under a ue8m0 factor of 32 elements, in queries too; a page holds its keys, then their factors.
        "bf16", "fp16": without scales.
    out : str
        Of the logits: "fp32", "fp16" or "bf16".
    interleaved : bool
        Of mxfp4: factors of token t of a page are in place 4 (t mod (page_size / 4)) + t div (page_size / 4).
    """

    num_heads: int
    head_dim: int = 128
    page_size: int = 64
    tokens: int = 1
    each: bool = False
    clean: bool = False
    aligned: bool = True
    qk_format: str = "fp8"
    out: str = "fp32"
    interleaved: bool = False


class Beside(NamedTuple):
    """What some problems have beside their operands.

    Attributes
    ----------
    q_scales : uint8 Tensor [batch, tokens, heads, dim / 32], optional
        Factors of mxfp4 queries.
    begins : int32 Tensor [batch], optional
        Keys side by side: where a query's begin.
    origin : int
        Keys side by side: the number of the first.
    """

    q_scales: torch.Tensor | None = None
    begins: torch.Tensor | None = None
    origin: int = 0


def _catalog() -> Iterator[Problem]:
    yield Problem(64)
    yield Problem(32, page_size=1, tokens=2, each=True, clean=True, aligned=False)
    yield Problem(21, head_dim=48, page_size=5, tokens=4, clean=True, out="fp16")
    yield Problem(64, tokens=2, qk_format="mxfp4", out="bf16")
    # A problem whose tiles of queries and of keys differ in shape.
    yield Problem(3, head_dim=96, page_size=8, qk_format="mxfp4", interleaved=True)
    yield Problem(64, page_size=0, each=True, clean=True)
    yield Problem(32, page_size=0, each=True, clean=True, qk_format="bf16")


mqa_logits = Op(
    "mqa_logits",
    Problem,
    (
        Variant("sm90", "flashinfer.ops.attention.mqa_logits.sm90", config.refuses_sm90, config.choose_sm90),
        Variant("portable", "flashinfer.ops.attention.mqa_logits.portable", config.refuses, config.choose),
        Variant("reference", "flashinfer.ops.attention.mqa_logits.reference"),
    ),
    _catalog,
)
