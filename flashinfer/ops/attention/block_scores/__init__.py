"""Scores by which a query chooses blocks of 128 keys: the largest product with any key of a block, no softmax."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from flashinfer._core.dispatch import Op, portable_only
from flashinfer.ops.attention.block_scores import config

# Keys of a block, and of a page.
BLOCK = 128


@dataclass(frozen=True)
class Problem:
    """scores[h, block, q] = the maximum of q_h . k over the keys of the block that the query sees; -inf without one.

    Attributes
    ----------
    num_heads, num_kv_heads : int
        Heads of a query, and of the keys that they share out.
    head_dim : int
        A multiple of 16, up to 256.
    q_dtype, kv_dtype : str
        "bf16", "fp16" or "fp8e4nv"; keys are queries' type, or fp8.
    paged : bool
        Whether keys are in pages of 128; else side by side.
    reduce : bool
        Whether there is one score for all heads, the largest.
    """

    num_heads: int
    num_kv_heads: int
    head_dim: int = 128
    q_dtype: str = "bf16"
    kv_dtype: str = "bf16"
    paged: bool = True
    reduce: bool = False


def _catalog() -> Iterator[Problem]:
    yield Problem(4, 4)
    yield Problem(4, 1, reduce=True, kv_dtype="fp8e4nv")
    yield Problem(12, 2, 64, "fp16", "fp16", paged=False)
    yield Problem(4, 1, q_dtype="fp8e4nv", kv_dtype="fp8e4nv")


block_scores = Op("block_scores", Problem, portable_only(__name__, config.choose, refuses=config.refuses), _catalog)
