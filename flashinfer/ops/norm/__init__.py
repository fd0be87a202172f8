"""Normalisation of rows: RMSNorm, LayerNorm, with residual add, gates, an activation and quantised results."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch

from flashinfer._core.dispatch import Op, Variant, portable_only
from flashinfer.ops.norm import config
from flashinfer.ops.norm.config import LONGEST

@dataclass(frozen=True)
class Problem:
    """A norm over the last dimension.

    Attributes
    ----------
    kind : str
        "rmsnorm", "fused_add_rmsnorm" or "layernorm".
    dtype, weight_dtype : str
        Of the rows, and of the weight (and bias).
    block : int
        The length of a row, rounded up to a power of two. The length itself is a run-time argument.
    gemma : bool
        The weight is stored minus one.
    aligned : bool
        Rows can be read 16 bytes at a time.
    after : str
        What the normalised row goes through: "" nothing, "silu", or "sigmoid_gate", the sigmoid of a second tensor as a
        factor (in place of a weight).
    format : str
        Of the result: "" rows in their dtype, "fp8e4nv" or "fp8e5" with one scale, "fp8_block" e4m3 with a scale for
        each 128 columns, "nvfp4" or "mxfp4".
    scale : str
        How the scale of the whole tensor comes: "" there is none, "tensor" of one element, "number".
    layout : str
        Of an FP4 format's block scales: "linear", "128x4", or "both".
    normed : bool
        Whether the result is written unquantised too.
    pdl : bool
        The launch may be dependent, where the chip has that.
    """

    kind: str
    dtype: str
    weight_dtype: str
    block: int
    gemma: bool = False
    aligned: bool = True
    after: str = ""
    format: str = ""
    scale: str = ""
    layout: str = ""
    normed: bool = False
    pdl: bool = True


@dataclass(frozen=True)
class Gated:
    """A normalised branch joins a residual stream of float32: alpha * residual + beta * rmsnorm(branch * weight).

    Attributes
    ----------
    dtype, weight_dtype : str
        Of the branch, and of the weights.
    block : int
        The length of a row, rounded up to a power of two.
    weighted : bool
        Whether the branch has a weight.
    alpha : bool
        Whether alpha is a vector; else it is a number.
    next : bool
        Whether the new stream is normalised too, for what reads it next.
    aligned : bool
        Rows can be read 16 bytes at a time.
    pdl : bool
        The launch may be dependent, where the chip has that.
    """

    dtype: str
    weight_dtype: str
    block: int
    weighted: bool
    alpha: bool
    next: bool
    aligned: bool = True
    pdl: bool = True


@dataclass(frozen=True)
class Modulated:
    """A branch joins a residual stream, whose LayerNorm is times a factor, and shifted.

    stream = residual + input * (gate + gate_bias) * input_scale; out = layernorm(stream) * (one + factor + factor_bias)
    + shift + shift_bias.

    Attributes
    ----------
    dtype, factor_dtype : str
        Of the rows and the gate; of factor and shift.
    block : int
        The length of a row, rounded up to a power of two; for a format at least four block scales long.
    residual, gate, gate_bias, factor_bias, shift_bias, input_scale : bool
        Which of them there are.
    one : bool
        One is added to the factor.
    format : str
        Of the result: "" rows, "nvfp4" or "mxfp8", with block scales in 128x4 tiles.
    aligned : bool
        Rows can be read 16 bytes at a time.
    """

    dtype: str
    factor_dtype: str
    block: int
    residual: bool = True
    gate: bool = False
    gate_bias: bool = False
    factor_bias: bool = False
    shift_bias: bool = False
    input_scale: bool = False
    one: bool = True
    format: str = ""
    aligned: bool = True


class Modulation(NamedTuple):
    """The tensors of a `Modulated`; None where there is none.

    x, residual, gate, factor, shift : [batch, rows, hidden], contiguous columns. Biases : float32 [hidden].
    input_scale, global_scale : float32 [1]. stream : receives the stream, [batch, rows, hidden], contiguous. out :
    receives the rows, or codes of a format. factors : receives its block scales, bytes [batch, padded rows x blocks].
    """

    x: torch.Tensor
    residual: torch.Tensor | None
    gate: torch.Tensor | None
    gate_bias: torch.Tensor | None
    factor: torch.Tensor
    factor_bias: torch.Tensor | None
    shift: torch.Tensor
    shift_bias: torch.Tensor | None
    input_scale: torch.Tensor | None
    stream: torch.Tensor
    out: torch.Tensor
    factors: torch.Tensor | None
    global_scale: torch.Tensor | None


class Quantised(NamedTuple):
    """What a quantised result takes and gives beside its codes.

    scale : the scale of the whole tensor, float32 [1] or a number; None is 1. FP8 is divided by it, and NVFP4's block
        scales are multiplied by it.
    block_scale : receives block scales; float32 [hidden / 128, pitch] of "fp8_block", bytes of an FP4 format in its
        layout ("128x4" if "both").
    linear_scale : receives the linear ones of "both".
    normed : receives the result unquantised.
    """

    scale: torch.Tensor | float | None = None
    block_scale: torch.Tensor | None = None
    linear_scale: torch.Tensor | None = None
    normed: torch.Tensor | None = None


def _too_long(problem, target) -> str:
    return f"rows longer than {LONGEST} do not fit in registers" if problem.block > LONGEST else ""


def _blocks_too_long(problem, target) -> str:
    """Longer rows are read in parts, into what has no block scales."""
    return "" if problem.format in ("", "fp8e4nv", "fp8e5") else _too_long(problem, target)


def _variants(
    portable_config, portable: str = "portable", reference: str = "reference", refuses=_blocks_too_long
) -> tuple[Variant, ...]:
    return portable_only(__name__, portable_config, portable, reference, refuses)


def _catalog(kind: str) -> Iterator[Problem]:
    if kind == "layernorm":
        for block in (1024, 4096, 8192, LONGEST):
            yield Problem(kind, "bf16", "fp32", block)
        yield Problem(kind, "bf16", "fp32", 4096, format="fp8e4nv", scale="tensor")
        yield Problem(kind, "bf16", "bf16", 1024, format="fp8e5", scale="number")
        yield Problem(kind, "bf16", "fp32", 2 * LONGEST)
        return
    for dtype in ("bf16", "fp16"):
        for block in (128, 1024, 2048, 4096, 8192):
            yield Problem(kind, dtype, dtype, block)
    for block in (256, 1024, 2048, 4096, 8192):
        yield Problem(kind, "bf16", "bf16", block, gemma=True)
    for block in (LONGEST, 2 * LONGEST):
        yield Problem(kind, "bf16", "bf16", block)
    yield Problem(kind, "bf16", "bf16", 2 * LONGEST, format="fp8e4nv", scale="tensor")
    yield Problem(kind, "fp32", "fp32", 1024, aligned=False)
    for block in (4096, 8192):
        yield Problem(kind, "bf16", "bf16", block, format="fp8e4nv", scale="tensor")
        yield Problem(kind, "bf16", "bf16", block, format="nvfp4", scale="tensor", layout="128x4")
    yield Problem(kind, "bf16", "bf16", 2048, format="mxfp4", layout="linear")
    if kind == "rmsnorm":
        yield Problem(kind, "bf16", "bf16", 64, after="sigmoid_gate")
        yield Problem(kind, "bf16", "bf16", 1024, after="silu")
        yield Problem(kind, "bf16", "bf16", 1024, after="silu", format="fp8e4nv")
        yield Problem(kind, "bf16", "bf16", 4096, format="fp8e5", scale="number")
    else:
        yield Problem(kind, "bf16", "bf16", 8192, format="fp8_block", normed=True)
        yield Problem(kind, "bf16", "bf16", 2048, format="nvfp4", scale="tensor", layout="both", normed=True)


def _gated() -> Iterator[Gated]:
    yield Gated("bf16", "bf16", 8192, weighted=True, alpha=True, next=False)
    yield Gated("bf16", "bf16", 8192, weighted=False, alpha=True, next=True)
    yield Gated("bf16", "bf16", 8192, weighted=True, alpha=False, next=True)
    yield Gated("fp16", "fp32", 512, weighted=True, alpha=True, next=True, aligned=False)


def _modulated() -> Iterator[Modulated]:
    yield Modulated("bf16", "bf16", 4096, gate=True, gate_bias=True, factor_bias=True, shift_bias=True)
    yield Modulated("bf16", "fp32", 4096, gate=True, one=False)
    yield Modulated("bf16", "bf16", 4096, residual=False)
    yield Modulated("bf16", "bf16", 4096, gate=True, input_scale=True, format="nvfp4")
    yield Modulated("bf16", "fp32", 4096, one=False, format="mxfp8")
    yield Modulated("fp16", "fp16", 512, input_scale=True, aligned=False)


rmsnorm = Op("rmsnorm", Problem, _variants(config.portable), lambda: _catalog("rmsnorm"))
fused_add_rmsnorm = Op("fused_add_rmsnorm", Problem, _variants(config.portable), lambda: _catalog("fused_add_rmsnorm"))
layernorm = Op("layernorm", Problem, _variants(config.portable), lambda: _catalog("layernorm"))
gated_residual = Op(
    "gated_residual_rmsnorm", Gated, _variants(config.gated, "gated", "reference_gated", _too_long), _gated
)
modulated_layernorm = Op(
    "modulated_layernorm",
    Modulated,
    _variants(config.modulated, "modulated", "reference_modulated", _too_long),
    _modulated,
)
