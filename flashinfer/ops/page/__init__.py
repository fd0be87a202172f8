"""The paged KV cache: writing new tokens into it, and the index arithmetic of page tables."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch

from flashinfer._core.dispatch import Op, portable_only
from flashinfer.ops.formats import KV_FORMATS
from flashinfer.ops.page import config


@dataclass(frozen=True)
class Append:
    """Write the keys and values of new tokens into pages. MLA's compressed rows are keys and values of one head.

    Attributes
    ----------
    dtype : str
        Of the rows and the caches; "u8" for every dtype of one byte, since elements are moved and never interpreted
        (and not every architecture has each float8).
    key_block, value_block : int
        Head dimensions rounded up to powers of two. The dimensions themselves are run-time arguments.
    aligned : bool
        Rows can be read and written 16 bytes at a time.
    key_format, value_format : str
        Of what is written: "" the rows as they are, a name of `formats.KV_FORMATS` codes and factors, "fp8e4nv" codes.
        Both are one, or neither's factors are float32.
    slots : str
        Dtype of a slot mapping, "i32" or "i64"; "" where a page table says where tokens go.
    scale : str
        Scales are a "tensor" of one element each, or "number"s.
    """

    dtype: str
    key_block: int
    value_block: int
    aligned: bool = True
    key_format: str = ""
    value_format: str = ""
    slots: str = ""
    scale: str = "number"


class PageTable(NamedTuple):
    """Token t goes to position positions[t] of request batch_indices[t]. Everything is int32."""

    batch_indices: torch.Tensor
    positions: torch.Tensor
    kv_indices: torch.Tensor
    kv_indptr: torch.Tensor


class Quantised(NamedTuple):
    """What quantising takes and gives beside codes: scales of dequantisation, and caches of factors.

    k_scale, v_scale : numbers, or float32 [1]. k_factors, v_factors : [pages, page_size, heads, blocks], bytes
    or float32; None where the format has none. Formats with float32 factors have no scale.
    """

    k_scale: float | torch.Tensor
    v_scale: float | torch.Tensor
    k_factors: torch.Tensor | None
    v_factors: torch.Tensor | None


@dataclass(frozen=True)
class Positions:
    """The request of each appended token, and its position in that request. Everything is int32."""


@dataclass(frozen=True)
class SeqLens:
    """Lengths of requests from their page tables.

    Attributes
    ----------
    dtype : str
        "i32" or "i64": of the tables and the result.
    """

    dtype: str


def _appends() -> Iterator[Append]:
    for dtype in ("u8", "bf16", "fp16"):
        for block in (64, 128, 256):
            yield Append(dtype, block, block)
    for dtype in ("u8", "bf16"):
        yield Append(dtype, 256, 128)
        yield Append(dtype, 512, 64)
    yield Append("bf16", 512, 512)
    yield Append("fp32", 256, 256)
    yield Append("bf16", 128, 128, aligned=False)
    yield Append("bf16", 128, 128, key_format="nvfp4", value_format="nvfp4")
    yield Append("bf16", 128, 128, key_format="nvfp4", value_format="nvfp4", slots="i64")
    yield Append("fp16", 64, 64, False, key_format="nvfp4", value_format="nvfp4", slots="i32", scale="tensor")
    yield Append("bf16", 512, 64, key_format="nvfp4", value_format="fp8e4nv")
    for name, known in KV_FORMATS.items():
        if known.factor == "fp32":
            yield Append("bf16", 128, 128, key_format=name, value_format=name)
    yield Append("bf16", 128, 128, key_format="int8_per_token_head", value_format="int8_per_token_head", slots="i64")
    yield Append("fp16", 256, 256, False, key_format="int4_group_64", value_format="int4_group_64")


append = Op("append_paged_kv_cache", Append, portable_only(__name__, config.append), _appends)
positions = Op(
    "get_batch_indices_positions", Positions, portable_only(__name__, config.index, "portable_positions"),
    lambda: [Positions()],
)
seq_lens = Op(
    "get_seq_lens", SeqLens, portable_only(__name__, config.index, "portable_seq_lens"),
    lambda: [SeqLens("i32"), SeqLens("i64")],
)
