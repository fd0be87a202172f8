"""The experts' GEMM: rows grouped by expert times that expert's weights, in every format of either."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch

from flashinfer._core.dispatch import Op, Variant, portable_only
from flashinfer.ops.formats import ELEMENTS, FORMATS
from flashinfer.ops.moe.experts import config

# Elements of a row that share a scale factor, for the formats with factors.
WIDTH = {name: known.width for name, known in FORMATS.items() if known.factor}
# Formats with two elements to a byte, the first in the low half.
PACKED = tuple(name for name, known in FORMATS.items() if ELEMENTS[known.element].per_byte == 2)
GATED = ("swiglu", "geglu", "geglu_tanh", "swiglu_step", "situ", "situ_gate")
PLAIN = ("", "silu", "gelu", "relu", "relu2", "clamped_relu2")


@dataclass(frozen=True)
class Problem:
    """y = act(x @ w.T) for each row x of the token map, with w the weights of the row's expert.

    Attributes
    ----------
    rows : str
        Format of the rows: "bf16", "fp16", "fp32"; "fp8" (e4m3 without factors), "fp8_block" (e4m3, a float32 factor
        for 128 of a row), "mxfp8" (e4m3, ue8m0 for 32), "nvfp4" (e2m1, e4m3 for 16).
    weights : str
        Format of the weights: a format of the rows, where "fp8_block" has a float32 factor for 128 x 128 and halves of
        gated weights have a multiple of 64 rows; or "mxfp4" (e2m1, ue8m0 for 32), "mxint4" or "int4" (4-bit integers,
        bfloat16 for 32 or for 128).
    out : str
        Format of the result: "bf16", "fp16", "fp32", or "fp8", which is e4m3 without a factor.
    tile : int
        Rows of a tile of the token map.
    experts : str
        "few" where the tiles of rows are too few to occupy a chip, else "many".
    gather : bool
        x is [tokens, k], and a row of the map reads its token's row; else x has the rows of the map.
    act : str
        One of GATED, whose weights have two halves of rows, first the factor's and then the gate's; or one of PLAIN.
        "situ_gate" is "situ" without the bound on the factor.
    paired : int
        Rows of gated weights alternate in groups of this many: factors, gates, factors, gates. 0 for two halves.
    shuffle : int
        Rows of the weights are permuted by `shuffle_matrix_a` within blocks of 16 or 32; 0 for no permutation.
    block : int
        Weights are [experts, k / block, n, block], in stored elements; 0 for [experts, n, k].
    row_layout, weight_layout : str
        Layout of one-byte scale factors: "linear", "128x4" or "8x4". Weights may also have "strips",
        [k / 128, n, 128 / width]: for each 128 elements of K the factors of all rows.
    bias : str
        Dtype of a bias for each row of the weights, in their order; "" for none.
    scale : str
        Factor of the product, before bias and activation: "" for none, or a float32 "tensor" of one element or of one
        for each expert.
    scale_out : str
        Factor of the result: "" for none, "tensor", or "ratio", the tensor over `scale`'s.
    fragments : bool
        Weights are in the order of `fragments.arrange`, with the shape [experts, n, k].
    channels : bool
        A float32 factor of the product for each row of the weights, in their order, before bias and activation.
    shape : str
        Which of alpha, beta and limit the activation has: "a", "b", "l" for float32 tensors [experts], "A", "B", "L"
        for scalars.
    delta : str
        Dtype of what is added to each pair's product after the bias, before the activation; "" for nothing.
    weighted : str
        Factor of the product before bias and activation: "" for none, "pair" for each pair, "row" for each row of x.
    aligned : bool
        16-byte loads of rows and weights and stores of the result are aligned; n is a multiple of 32.
    whole : bool
        Halves of gated weights in "fp8_block" have a multiple of 128 rows.
    full : bool
        `config.is_full`: experts have enough rows on average for tiles of 128. True for smaller tiles.
    """

    rows: str
    weights: str
    out: str
    tile: int
    experts: str = "many"
    gather: bool = False
    act: str = ""
    paired: int = 0
    shuffle: int = 0
    block: int = 0
    row_layout: str = "linear"
    weight_layout: str = "linear"
    bias: str = ""
    scale: str = ""
    scale_out: str = ""
    fragments: bool = False
    channels: bool = False
    shape: str = ""
    weighted: str = ""
    delta: str = ""
    aligned: bool = True
    whole: bool = True
    full: bool = True


@dataclass(frozen=True)
class Quantize:
    """Quantize rows to a format with scale factors: all rows, or those of a token map.

    Attributes
    ----------
    encoding : str
        "fp8_block", "mxfp8" or "nvfp4", as in Problem; or "fp8", with one factor.
    dtype : str
        Of the rows.
    tile : int
        Rows of a tile of the token map; 0 without a map: all rows are quantized.
    scaled : bool
        A global scale is given, one or one for each expert (NVFP4), or a factor (fp8).
    row_scale : bool
        NVFP4 or fp8 divides each row by a scale of its own, the global scale times the row's largest magnitude, and
        stores that scale.
    aligned : bool
        Rows can be read 16 bytes at a time.
    """

    encoding: str
    dtype: str
    tile: int
    scaled: bool = False
    row_scale: bool = False
    aligned: bool = True


class Rows(NamedTuple):
    """codes : [rows, .], stored elements. scale : factors; of "fp8_block" float32 with strides [row, block]."""

    codes: torch.Tensor
    scale: torch.Tensor | None = None
    top_k: int = 1


class Weights(NamedTuple):
    """codes : [experts, n, .] or in blocks. scale : [experts, ...]. bias, channels : [experts, n]."""

    codes: torch.Tensor
    scale: torch.Tensor | None = None
    bias: torch.Tensor | None = None
    channels: torch.Tensor | None = None


class Finish(NamedTuple):
    """Arguments of the epilogue, float32. scale, scale_out : [1] or [experts]. alpha, beta, limit : [experts].

    weight : [pairs] or [rows]. delta : [tokens, top_k, n], contiguous, the factor's columns first and then the gate's.
    numbers : alpha, beta and limit where they are scalars. "situ" uses the first two, "swiglu_step" and "clamped_relu2"
    the last.
    """

    scale: torch.Tensor | None = None
    scale_out: torch.Tensor | None = None
    alpha: torch.Tensor | None = None
    beta: torch.Tensor | None = None
    limit: torch.Tensor | None = None
    weight: torch.Tensor | None = None
    numbers: tuple[float, float, float] = (0.0, 0.0, 0.0)
    delta: torch.Tensor | None = None


def extents(codes: torch.Tensor, encoding: str, block: int) -> tuple[int, int]:
    """Rows of an expert's weights, and elements of each; `block` as in Problem."""
    shape = codes.shape
    n, stored = (shape[2], shape[1] * shape[3]) if block else (shape[1], shape[2])
    return n, stored * (2 if encoding in PACKED else 1)


def _product_catalog() -> Iterator[Problem]:
    # Mixtral with many tokens, DeepSeek-V3 with few and many, gpt-oss with few.
    yield Problem("bf16", "bf16", "bf16", 128, gather=True, act="swiglu")
    yield Problem("fp8", "fp8", "fp8", 128, gather=True, act="swiglu", scale="tensor", scale_out="tensor")
    for tile in (16, 128):
        yield Problem("fp8_block", "fp8_block", "bf16", tile, gather=True, act="swiglu")
    yield Problem("bf16", "mxfp4", "bf16", 16, gather=True, act="swiglu", bias="bf16", shape="abl")
    yield Problem("bf16", "bf16", "bf16", 16, gather=True, act="swiglu", paired=1, shuffle=32, block=64, delta="bf16")
    for tile in (16, 128):
        yield Problem(
            "bf16", "mxfp4", "bf16", tile, gather=True, act="swiglu", weight_layout="strips", bias="bf16",
            fragments=True, shape="abl",
        )  # fmt: skip


def _quantize_catalog() -> Iterator[Quantize]:
    yield Quantize("fp8_block", "bf16", 16)
    # With row scales: that kernel contains the code of the one without.
    yield Quantize("nvfp4", "bf16", 16, scaled=True, row_scale=True)


_ROOM = "flashinfer.ops.moe.experts"
product = Op(
    "moe_product",
    Problem,
    (
        Variant("sm90", f"{_ROOM}.sm90", config.refuses_sm90, config.sm90),
        Variant("sm90_fragments", f"{_ROOM}.sm90_fragments", config.refuses_fragments, config.fragments),
        Variant("portable", f"{_ROOM}.portable", config=config.product),
        Variant("reference", f"{_ROOM}.reference"),
    ),
    _product_catalog,
)
quantize = Op(
    "moe_quantize", Quantize, portable_only(__name__, config.quantize, "portable_quantize", "reference_quantize"),
    _quantize_catalog,
)
