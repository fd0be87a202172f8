"""Rotary position embedding of queries and keys, with their norm or their quantising to FP8 in the same launch."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch

from flashinfer._core.dispatch import Op, portable_only
from flashinfer._core.sizes import power_of_two
from flashinfer.ops.rope import config

LARGEST_ROW = 32768


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


@dataclass(frozen=True)
class Quantize:
    """Rotate heads and write them in FP8, to tensors or, keys and values, into pages.

    A head comes in two tensors: the elements that are rotated, and the rest.

    Attributes
    ----------
    dtype, out_dtype : str
        Of heads before and after ("fp8e4nv" or "fp8e5").
    rotary_dim, q_rest, k_rest, value_dim : int
        Elements of a head that are rotated, that are not (of queries, of keys), and of a value. 0 where there are none.
    interleave : bool
        As in Problem.
    position_dtype : str
        Of positions, "i32" or "i64".
    append : bool
        Whether keys and values go into pages.
    aligned : bool
        Everything can be read and written 16 bytes at a time.
    pdl : bool
        The launch may be dependent, where the chip has that.
    """

    dtype: str
    out_dtype: str
    rotary_dim: int
    q_rest: int
    k_rest: int
    value_dim: int
    interleave: bool
    position_dtype: str
    append: bool
    aligned: bool = True
    pdl: bool = False


@dataclass(frozen=True)
class Video:
    """Rows of queries, keys and values of the patches of videos: queries and keys are normalised over all their heads
    and rotated by their patch's frame, height and width; values are copied.

    Attributes
    ----------
    dtype, weight_dtype : str
        Of the rows; of the norms' weights, "" where nothing is normalised.
    out : str
        "" for the dtype of the rows, or "fp8e4nv".
    head_dim : int
    heads : int
        The most of queries, keys and values, rounded up to a power of two. Their numbers are run-time arguments.
    interleave : bool
        As in Problem.
    aligned : bool
        Everything can be read and written 16 bytes at a time.
    """

    dtype: str
    weight_dtype: str
    out: str
    head_dim: int
    heads: int
    interleave: bool
    aligned: bool = True


class Space(NamedTuple):
    """Patches of a video: how many in each axis, and the pairs of a head that turn with frame and height."""

    frames: int
    height: int
    width: int
    frame_pairs: int
    height_pairs: int


class Heads(NamedTuple):
    """Queries or keys, [tokens, heads, dim], rotated part and rest; values have a `rope` only. None is nothing.

    What is appended goes to `*_out` [pages, page_size, heads, dim].
    """

    rope: torch.Tensor
    rest: torch.Tensor | None
    rope_out: torch.Tensor
    rest_out: torch.Tensor | None


class Pages(NamedTuple):
    """Where keys and values go: token t to position positions[t] of request batch_indices[t]. Everything is int32."""

    batch_indices: torch.Tensor
    positions: torch.Tensor
    kv_indices: torch.Tensor
    kv_indptr: torch.Tensor


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


def _quantized() -> Iterator[Quantize]:
    mla = dict(rotary_dim=64, q_rest=512, k_rest=512, value_dim=0)
    gqa = dict(rotary_dim=128, q_rest=0, k_rest=0, value_dim=128)
    yield Quantize("bf16", "fp8e4nv", **mla, interleave=True, position_dtype="i64", append=False)
    yield Quantize("bf16", "fp8e4nv", **mla, interleave=False, position_dtype="i32", append=True, pdl=True)
    yield Quantize("bf16", "fp8e4nv", **gqa, interleave=False, position_dtype="i32", append=True)
    yield Quantize("fp16", "fp8e5", 64, 64, 64, 128, False, "i32", True, aligned=False)
    yield Quantize("bf16", "fp8e4nv", **(gqa | {"value_dim": 0}), interleave=False, position_dtype="i64", append=False)


def _videos() -> Iterator[Video]:
    yield Video("bf16", "bf16", "", 128, 16, interleave=True)
    yield Video("bf16", "bf16", "fp8e4nv", 128, 64, interleave=False)
    yield Video("fp16", "", "", 64, 8, interleave=False, aligned=False)


def _too_many(problem, target) -> str:
    row = problem.heads * power_of_two(problem.head_dim)
    return f"{problem.heads} heads of {problem.head_dim} do not fit in registers" if row > LARGEST_ROW else ""


rope = Op("apply_rope", Problem, portable_only(__name__, config.portable), _catalog)
rope_quantize = Op(
    "rope_quantize_fp8", Quantize, portable_only(__name__, config.quantize, "quantize", "reference_quantize"),
    _quantized,
)
video_rope = Op(
    "qk_rmsnorm_rope", Video, portable_only(__name__, config.video, "video", "reference_video", refuses=_too_many),
    _videos,
)
