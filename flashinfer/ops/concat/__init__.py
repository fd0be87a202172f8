"""Keys of multi-head latent attention put together: each head's own part, and the part that all heads share."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from flashinfer._core.dispatch import Op, portable_only
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


@dataclass(frozen=True)
class Pack:
    """key[t, h] = fp8((kv[t, h, :nope], k_rope[t])), value[t, h] = fp8(kv[t, h, nope:]).

    Attributes
    ----------
    dtype : str
        Of the inputs. The results are e4m3.
    nope_block, rope_block, value_block : int
        Widths rounded up to powers of two.
    aligned : bool
        Rows can be read 16 bytes at a time, and written 8 at a time.
    """

    dtype: str
    nope_block: int
    rope_block: int
    value_block: int
    aligned: bool = True


def _catalog() -> Iterator[Problem]:
    for dtype in ("bf16", "fp16", "u8"):
        yield Problem(dtype, 128, 64)
    yield Problem("bf16", 128, 64, aligned=False)


def _packs() -> Iterator[Pack]:
    yield Pack("bf16", 128, 64, 128)
    yield Pack("fp16", 128, 64, 128, aligned=False)


_VARIANTS = portable_only(__name__, config.portable)
concat_mla_k = Op("concat_mla_k", Problem, _VARIANTS, _catalog)
pack_mla_kv = Op("pack_mla_kv_fp8", Pack, _VARIANTS, _packs)
