"""Block-scaled GEMM: out = alpha * a @ b.T.

FP8 with float32 scales of blocks (1 x 128, 128 x 128), and the formats with one factor for 16 or 32 elements: NVFP4,
MXFP4 and MXFP8, for both operands or for one.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from flashinfer._core.dispatch import Op, Variant, portable_only
from flashinfer.ops.gemm import hopper
from flashinfer.ops.gemm.blockscaled import config


@dataclass(frozen=True)
class Problem:
    """out [batch, M, N] = alpha * a [batch, M, K] @ b [batch, N, K].T with dequantized operands.

    Arguments of every variant's `run(problem, config, a, b, a_scale, b_scale, alpha, out)`:

    - a [batch, M, .] and b [batch, N, .]: rows contiguous, the other strides any; e2m1 is uint8, two elements a byte.
    - a_scale, b_scale: float32 [batch, ceil(M / rows), ceil(K / width)] and [batch, ceil(N / columns),
      ceil(K / width)] with any strides for "fp32"; else uint8 [batch, .], flat in the layout; None where there is none.
    - alpha: float32 [1] or [M], or None. out: rows contiguous, the other strides any.

    Attributes
    ----------
    a, b : str
        Number formats: "fp8e4nv", "fp8e5" or "e2m1"; `a` may be "bf16".
    scale : str
        Format of the scales: "fp32", or factors in "ue8m0" or "ue4m3".
    width : int
        Elements of K that share a scale.
    out : str
        Dtype of the result: "bf16", "fp16" or "fp32".
    tokens : int
        M rounded up to 16, 32, 64 or 128; 256 for more.
    rows, columns : int
        Rows of a, and of b, that share a scale of "fp32"; 1 for factors.
    a_layout, b_layout : str
        Layout of the factors: "linear", "128x4" or "8x4"; "" for "fp32", and for an operand without factors.
    alpha : str
        Whether there is an alpha: "one", a factor for each of the "rows" of a, or "".
    shuffled : bool
        The rows of b, and of its factors, are in the order of `get_shuffle_matrix_a_row_indices` with blocks of 32.
    aligned : bool
        Rows of a and b can be read, and those of out written, 16 bytes at a time, factors 4 at a time; their lengths
        are multiples of that too, and N of 8.
    whole : bool
        K is a multiple of 128.
    """

    a: str
    b: str
    scale: str
    width: int
    out: str
    tokens: int
    rows: int = 1
    columns: int = 1
    a_layout: str = ""
    b_layout: str = ""
    alpha: str = ""
    shuffled: bool = False
    aligned: bool = True
    whole: bool = True


@dataclass(frozen=True)
class Widen:
    """out bfloat16 [batch, rows, K] = codes [batch, rows, .] times their factors, which is exact within its range.

    Attributes
    ----------
    encoding, scale, width, layout : str, str, int, str
        As of the operand in Problem; factors in "ue8m0" or "ue4m3", or "" for "bf16".
    shuffled : bool
        Rows and factors are shuffled as in Problem; rows of `out` are not.
    aligned : bool
        Rows of codes can be read 16 bytes at a time, factors 4 at a time.
    whole : bool
        K is a multiple of 256.
    arranged : int
        Columns of `out` are in the order of `sm90_widened_kernel.py`, where columns this far apart, 1 or 4, are
        neighbours, and K is a multiple of 128. 0: they are in their own order.
    half : bool
        `out` is float16.
    """

    encoding: str
    scale: str
    width: int
    layout: str
    shuffled: bool = False
    aligned: bool = True
    whole: bool = True
    arranged: int = 0
    half: bool = False


@dataclass(frozen=True)
class Quantize:
    """Rows to e4m3 with a float32 scale for each block of `rows` x 128.

    Attributes
    ----------
    dtype : str
        Of the rows: "bf16" or "fp16".
    rows : int
        1 or 128.
    aligned : bool
        Rows can be read 16 bytes at a time.
    """

    dtype: str
    rows: int
    aligned: bool = True


def _catalog() -> Iterator[Problem]:
    groupwise = dict(scale="fp32", width=128, columns=128)
    yield Problem("fp8e4nv", "fp8e4nv", out="bf16", tokens=256, **groupwise)
    yield Problem("fp8e4nv", "fp8e5", out="fp16", tokens=16, rows=128, aligned=False, whole=False, **groupwise)
    yield Problem("e2m1", "e2m1", "ue4m3", 16, "bf16", 64, alpha="one", shuffled=True, a_layout="8x4", b_layout="128x4")
    yield Problem("fp8e4nv", "fp8e4nv", "ue8m0", 32, "bf16", 128, a_layout="linear", b_layout="linear")
    yield Problem("bf16", "e2m1", "ue4m3", 16, "bf16", 16, alpha="one", b_layout="128x4")
    yield Problem("e2m1", "e2m1", "ue8m0", 32, "bf16", 256, a_layout="128x4", b_layout="128x4")
    yield Problem("bf16", "e2m1", "ue4m3", 16, "bf16", 256, alpha="one", b_layout="128x4")
    yield Problem("bf16", "e2m1", "ue8m0", 32, "fp32", 256, b_layout="8x4", shuffled=True)
    yield Problem("bf16", "fp8e4nv", "ue8m0", 32, "bf16", 256, b_layout="128x4")
    yield Problem("bf16", "fp8e4nv", "ue8m0", 32, "bf16", 64, b_layout="128x4")
    yield Problem("bf16", "fp8e5", "ue8m0", 32, "fp16", 256, b_layout="linear")
    yield Problem("e2m1", "e2m1", "ue4m3", 16, "bf16", 16, alpha="rows", a_layout="128x4", b_layout="128x4")
    yield Problem("e2m1", "fp8e5", "ue8m0", 32, "fp32", 16, a_layout="128x4", b_layout="128x4")


def _quantize_catalog() -> Iterator[Quantize]:
    yield Quantize("bf16", 1)
    yield Quantize("bf16", 128, aligned=False)


def _widen_catalog() -> Iterator[Widen]:
    yield Widen("e2m1", "ue4m3", 16, "128x4")
    yield Widen("e2m1", "ue8m0", 32, "8x4", shuffled=True, whole=False)
    yield Widen("fp8e4nv", "ue8m0", 32, "128x4")
    yield Widen("fp8e5", "ue8m0", 32, "linear", aligned=False, whole=False)
    yield Widen("bf16", "", 16, "", whole=False, arranged=4)
    yield Widen("e2m1", "ue4m3", 16, "8x4", whole=False, arranged=4, half=True)


blockscaled = Op(
    "gemm_blockscaled",
    Problem,
    (
        Variant("sm90", "flashinfer.ops.gemm.blockscaled.sm90", hopper.refuses_blockscaled, hopper.sm90),
        Variant(
            "sm90_widened", "flashinfer.ops.gemm.blockscaled.sm90_widened", config.refuses_sm90_widened,
            config.sm90_widened,
        ),
        Variant("portable", "flashinfer.ops.gemm.blockscaled.portable", config=config.portable),
        Variant("reference", "flashinfer.ops.gemm.blockscaled.reference"),
    ),
    _catalog,
)
quantize_blocks = Op(
    "gemm_quantize", Quantize, portable_only(__name__, config.quantize, "portable_quantize", "reference_quantize"),
    _quantize_catalog,
)
widen = Op(
    "gemm_widen", Widen, portable_only(__name__, config.widen, "portable_widen", "reference_widen"), _widen_catalog
)
