"""RMSNorm and LayerNorm of rows that do not fit in registers, in Triton: a row is read again for each step.

Grid: rows. Warps: all share the row, BLOCK columns at a time. Shared memory: reductions.
Inputs: those of `norm_kernel` in `flashinfer/ops/norm/portable.py`; what is read a second time comes from the L2 cache.
Outputs: its ones, without block scales.
Method: Zhang and Sennrich, Root Mean Square Layer Normalization, 2019, https://arxiv.org/abs/1910.07467.
"""

import triton
import triton.language as tl

from flashinfer.ops._device.formats import to_fp8
from flashinfer.ops._device.pdl import begin
from flashinfer.ops._device.rows import column_offset, multiple, row_offset


@triton.jit
def looped_kernel(
    x, residual, weight, bias, out, given, x_strides, residual_strides, out_strides, normed_strides, rows, inner,
    hidden, eps,
    ADD: tl.constexpr, CENTRE: tl.constexpr, GEMMA: tl.constexpr, AFTER: tl.constexpr, FORMAT: tl.constexpr,
    SCALE: tl.constexpr, UNIT: tl.constexpr, BLOCK: tl.constexpr, CAPABILITY: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    GATE: tl.constexpr = AFTER == "sigmoid_gate"
    row = tl.program_id(0)
    hidden = multiple(hidden, UNIT)
    begin(PDL)
    x += row_offset(row, inner, x_strides.outer, x_strides.inner, UNIT)
    out += row_offset(row, inner, out_strides.outer, out_strides.inner, UNIT)
    if ADD or GATE:
        residual += row_offset(row, inner, residual_strides.outer, residual_strides.inner, UNIT)

    mean = 0.0
    if CENTRE:
        total = tl.zeros([BLOCK], tl.float32)
        for start in range(0, hidden, BLOCK):
            column = start + tl.arange(0, BLOCK)
            total += read(x, column, hidden, x_strides.column, UNIT)
        mean = tl.sum(total, 0) / hidden
    squares = tl.zeros([BLOCK], tl.float32)
    for start in range(0, hidden, BLOCK):
        column = start + tl.arange(0, BLOCK)
        y = read(x, column, hidden, x_strides.column, UNIT)
        if ADD:
            y += read(residual, column, hidden, residual_strides.column, UNIT)
        if CENTRE:
            y = tl.where(column < hidden, y - mean, 0)
        squares += y * y
    inverse = tl.rsqrt(tl.sum(squares, 0) / hidden + eps)

    for start in range(0, hidden, BLOCK):
        column = start + tl.arange(0, BLOCK)
        inside = column < hidden
        y = read(x, column, hidden, x_strides.column, UNIT)
        if ADD:
            y += read(residual, column, hidden, residual_strides.column, UNIT)
            at = column_offset(column, residual_strides.column, UNIT)
            tl.store(residual + at, y.to(residual.dtype.element_ty), inside)
        y = (y - mean) * inverse if CENTRE else y * inverse
        if GATE:
            y /= 1 + tl.exp(-read(residual, column, hidden, residual_strides.column, UNIT))
        else:
            w = tl.load(weight + column, inside, other=0).to(tl.float32)
            y *= w + 1 if GEMMA else w
        if CENTRE:
            y += tl.load(bias + column, inside, other=0).to(tl.float32)
        if AFTER == "silu":
            y /= 1 + tl.exp(-y)
        at = out + column_offset(column, out_strides.column, UNIT)
        if FORMAT == "":
            tl.store(at, y.to(out.dtype.element_ty), inside)
        else:
            tl.store(at, to_fp8(y * factor_of(given.scale, SCALE, True), FORMAT, CAPABILITY), inside)


@triton.jit
def read(x, column, hidden, stride, UNIT: tl.constexpr):
    """Columns of the row at x, in float32; those past its end are 0."""
    return tl.load(x + column_offset(column, stride, UNIT), column < hidden, other=0).to(tl.float32)


@triton.jit
def factor_of(scale, SCALE: tl.constexpr, DIVIDES: tl.constexpr):
    """The scale, or its inverse, rounded once. SCALE: the address of a "tensor", a "number", or "" for 1."""
    value = tl.full([], 1.0, tl.float32)
    if SCALE == "tensor":
        value = tl.load(scale)
    elif SCALE == "number":
        value *= scale
    if DIVIDES and SCALE != "":
        value = tl.div_rn(tl.full([], 1.0, tl.float32), value)
    return value
