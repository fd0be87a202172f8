"""Rotary position embedding of queries and keys."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from flashinfer._core.dispatch import Op, Variant
from flashinfer.ops.rope import config


@dataclass(frozen=True)
class Problem:
    """Rotate pairs of elements of each head by angles that grow with the token's position.

    Attributes
    ----------
    dtype : str
        Of queries and keys.
    head_dim, rotary_dim : int
        Elements of a head, and how many of them, from the first on, are rotated.
    interleave : bool
        Whether a pair is two neighbours (2i, 2i + 1), or an element and the one half of rotary_dim after it.
    ragged : bool
        Whether positions come as indptr and offsets of a ragged batch, or one for each token.
    position_dtype : str
        Of positions, "i32" or "i64"; "i32" where they are ragged.
    cached : bool
        Whether cosines and sines come from a table by position, or are computed from frequencies.
    inplace : bool
        Whether the result replaces the input. If not, the elements that are not rotated are copied.
    aligned : bool
        Heads, and the rows of a table of cosines and sines, can be read 16 bytes at a time.
    """

    dtype: str
    head_dim: int
    rotary_dim: int
    interleave: bool
    ragged: bool
    position_dtype: str
    cached: bool
    inplace: bool
    aligned: bool = True


def _catalog() -> Iterator[Problem]:
    for dtype in ("bf16", "fp16"):
        for head_dim in (64, 128):
            for inplace in (False, True):
                yield Problem(dtype, head_dim, head_dim, False, False, "i32", False, inplace)
                yield Problem(dtype, head_dim, head_dim, False, False, "i64", True, inplace)
    yield Problem("bf16", 128, 128, False, True, "i32", False, False)
    yield Problem("bf16", 128, 128, True, True, "i32", False, True)
    yield Problem("bf16", 256, 256, False, False, "i32", False, False)
    yield Problem("bf16", 64, 64, True, False, "i64", True, True)
    yield Problem("bf16", 128, 64, False, False, "i64", True, False)
    yield Problem("bf16", 80, 32, True, False, "i32", False, False)
    yield Problem("fp32", 72, 72, False, False, "i32", False, False, aligned=False)


rope = Op(
    "apply_rope",
    Problem,
    (
        Variant("portable", "flashinfer.ops.rope.portable", config=config.portable),
        Variant("reference", "flashinfer.ops.rope.reference"),
    ),
    _catalog,
)
