"""Block-scaled formats: quantising and dequantising rows, arranging scale factors, and packing bits."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from flashinfer._core.dispatch import Op, portable_only
from flashinfer.ops.quantize import config


@dataclass(frozen=True)
class Problem:
    """Rows to a block-scaled format.

    Attributes
    ----------
    kind : str
        "nvfp4" (e2m1, an e4m3 factor for 16), "mxfp4" (e2m1, a ue8m0 factor for 32) or "mxfp8" (e4m3, ue8m0, 32).
    dtype : str
        Of the rows: "bf16", "fp16", "fp32" or "fp8e4nv".
    layout : str
        Of the factors: "linear", "128x4" or "8x4".
    block : int
        The length of a row, rounded up to a power of two, or the 1024 (8192 for `row_scale` without `score`, where a
        row has one program) that longer ones are cut into.
    aligned : bool
        Rows can be read 16 bytes at a time.
    score : str
        NVFP4 that maps a block's largest value to 6 or to 4, whichever errs less: "mae" or "mse"; "" always takes 6.
    row_scale : bool
        NVFP4 with a global scale for each row, from its largest value.
    inverse : bool
        The global scale is given as its inverse, the factor of dequantisation.
    counted : bool
        Only the first rows of each batch entry count, as many as a tensor has.
    pdl : bool
        The launch may be dependent, where the chip has that.
    """

    kind: str
    dtype: str
    layout: str
    block: int
    aligned: bool = True
    score: str = ""
    row_scale: bool = False
    inverse: bool = False
    counted: bool = False
    pdl: bool = True


@dataclass(frozen=True)
class Dequantize:
    """A block-scaled format to floats.

    Attributes
    ----------
    element, factor : str
        "e2m1" or "e4m3"; "e4m3" or "ue8m0".
    width : int
        Elements to a factor: a power of two from 16 to 128.
    layout : str
        Of the factors: "linear", "128x4" or "8x4".
    dtype : str
        Of the result: "bf16", "fp16" or "fp32".
    block : int
        The length of a row, rounded up to a power of two, from `width` to 1024.
    scaled : bool
        The result is times a global scale.
    aligned : bool
        Codes can be read 16 bytes at a time.
    """

    element: str
    factor: str
    width: int
    layout: str
    dtype: str
    block: int
    scaled: bool = False
    aligned: bool = True


@dataclass(frozen=True)
class Interleave:
    """Linear scale factors to a tiled layout.

    Attributes
    ----------
    dtype, layout : str
        Of the factors, "u8" or "bf16"; "128x4" or "8x4".
    """

    dtype: str
    layout: str


@dataclass(frozen=True)
class Packbits:
    """Eight elements to a byte.

    Attributes
    ----------
    little : bool
        The first element is the lowest bit; else the highest.
    index : str
        The dtype of the segments' offsets, "i32" or "i64"; "" where all is one segment.
    aligned : bool
        The first element is at an address divisible by 16.
    """

    little: bool
    index: str = ""
    aligned: bool = True


@dataclass(frozen=True)
class Groups:
    """Groups of a row to eight bits, with a float32 scale each.

    Attributes
    ----------
    dtype, out : str
        Of the rows; of the codes: "fp8e4nv", "fp8e5" or "i8".
    block : int
        The length of a group, rounded up to a power of two.
    power_of_two : bool
        Scales are rounded up to powers of two.
    aligned : bool
        Groups can be read 16 bytes at a time.
    """

    dtype: str
    out: str
    block: int
    power_of_two: bool = False
    aligned: bool = True


def _quantize_catalog() -> Iterator[Problem]:
    for layout in ("128x4", "linear", "8x4"):
        yield Problem("nvfp4", "bf16", layout, 1024)
    yield Problem("mxfp4", "bf16", "128x4", 1024)
    yield Problem("mxfp8", "fp16", "128x4", 1024)
    yield Problem("mxfp8", "fp32", "linear", 1024)
    yield Problem("nvfp4", "fp8e4nv", "128x4", 128, counted=True, inverse=True, aligned=False)
    yield Problem("nvfp4", "bf16", "linear", 1024, score="mae")
    yield Problem("nvfp4", "bf16", "linear", 8192, row_scale=True)
    yield Problem("nvfp4", "bf16", "linear", 1024, score="mse", row_scale=True)


def _dequantize_catalog() -> Iterator[Dequantize]:
    yield Dequantize("e2m1", "e4m3", 16, "linear", "bf16", 128, scaled=True)
    yield Dequantize("e2m1", "ue8m0", 32, "128x4", "fp32", 1024)
    yield Dequantize("e4m3", "ue8m0", 32, "8x4", "fp16", 1024, aligned=False)


def _groups_catalog() -> Iterator[Groups]:
    yield Groups("bf16", "fp8e4nv", 128)
    yield Groups("bf16", "fp8e5", 128, power_of_two=True)
    yield Groups("fp16", "i8", 64, aligned=False)


quantize = Op("quantize", Problem, portable_only(__name__, config.quantize), _quantize_catalog)
quantize_groups = Op(
    "quantize_groups", Groups, portable_only(__name__, config.quantize, "groups"), _groups_catalog
)
dequantize = Op(
    "dequantize", Dequantize, portable_only(__name__, config.dequantize, "portable_dequantize"), _dequantize_catalog
)
interleave = Op(
    "interleave", Interleave, portable_only(__name__, config.interleave, "portable_interleave"),
    lambda: (Interleave(d, "128x4") for d in ("u8", "bf16")),
)  # fmt: skip
packbits = Op(
    "packbits", Packbits, portable_only(__name__, config.packbits, "portable_packbits"),
    lambda: (Packbits(True), Packbits(False, "i32", False)),
)  # fmt: skip
