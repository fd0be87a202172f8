"""Keys of multi-head latent attention put together: each head's own part, and the part that all heads share."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from flashinfer._core.dispatch import Op, Variant
from flashinfer.ops.concat import config


@dataclass(frozen=True)
class Problem:
    """k[t, h] = (k_nope[t, h], k_rope[t]).

    Attributes
    ----------
    dtype : str
        Of all three; "u8" for every dtype of one byte, since elements are moved and never interpreted.
    nope_block, rope_block : int
        Widths rounded up to powers of two. The widths themselves are run-time arguments.
    aligned : bool
        Rows can be read and written 16 bytes at a time.
    """

    dtype: str
    nope_block: int
    rope_block: int
    aligned: bool = True


def _catalog() -> Iterator[Problem]:
    for dtype in ("bf16", "fp16", "u8"):
        yield Problem(dtype, 128, 64)
    yield Problem("bf16", 128, 64, aligned=False)


concat_mla_k = Op(
    "concat_mla_k",
    Problem,
    (
        Variant("portable", "flashinfer.ops.concat.portable", config=config.portable),
        Variant("reference", "flashinfer.ops.concat.reference"),
    ),
    _catalog,
)
