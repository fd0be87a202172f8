"""LayerNorm of a gated residual stream, modulated by factors and shifts of each row, in Triton: one program a row.

Grid: (rows, padding of tiled block scales included; batch). Warps: all share the row, which stays in registers.
Shared memory: reductions.
Inputs: x [batch, rows, hidden] and the other operands of `Modulation` in `flashinfer/ops/norm/__init__.py`. Outputs:
its results, rows [batch, rows, hidden] or codes and factors.
Method: Peebles and Xie, Scalable Diffusion Models with Transformers, 2022, https://arxiv.org/abs/2212.09748.
"""

import torch
import triton
import triton.language as tl

from flashinfer._core.implementation import Implementation
from flashinfer._core.launch import Build, Launcher
from flashinfer.ops import layouts
from flashinfer.ops._device.pdl import begin
from flashinfer.ops._device.rows import multiple, pointer, unit
from flashinfer.ops._device.scales import quantize_blocks, scale_offset
from flashinfer.ops.formats import FORMATS


@triton.jit
def load_row(x, batch, row, strides, column, inside, UNIT: tl.constexpr):
    at = batch * multiple(strides.batch, UNIT) + row.to(tl.int64) * multiple(strides.row, UNIT)
    return tl.load(x + at + column, inside, other=0).to(tl.float32)


@triton.jit
def modulated_kernel(
    x, residual, gate, gate_bias, factor, factor_bias, shift, shift_bias, input_scale, stream, out, factors,
    global_scale, x_strides, residual_strides, gate_strides, factor_strides, shift_strides, rows, hidden, eps, blocks,
    ONE: tl.constexpr, FORMAT: tl.constexpr, V: tl.constexpr, UNIT: tl.constexpr, FACTOR_UNIT: tl.constexpr,
    BLOCK: tl.constexpr, CAPABILITY: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0)
    batch = tl.program_id(1).to(tl.int64)
    column = tl.arange(0, BLOCK)
    hidden = multiple(hidden, UNIT)
    # Rows past the last are padding of tiled block scales.
    there = row < rows
    inside = (column < hidden) & there
    begin(PDL)
    y = load_row(x, batch, row, x_strides, column, inside, UNIT)
    if gate is not None:
        g = load_row(gate, batch, row, gate_strides, column, inside, UNIT)
        if gate_bias is not None:
            g += tl.load(gate_bias + column, inside, other=0)
        if input_scale is not None:
            g *= tl.load(input_scale)
        y *= g
    elif input_scale is not None:
        y *= tl.load(input_scale)
    if residual is not None:
        y += load_row(residual, batch, row, residual_strides, column, inside, UNIT)
    at = (batch * rows + row) * hidden
    tl.store(stream + at + column, y.to(stream.dtype.element_ty), inside)

    y = tl.where(inside, y - tl.sum(y, 0) / hidden, 0)
    y *= tl.rsqrt(tl.sum(y * y, 0) / hidden + eps)
    f = load_row(factor, batch, row, factor_strides, column, inside, FACTOR_UNIT)
    s = load_row(shift, batch, row, shift_strides, column, inside, FACTOR_UNIT)
    if ONE:
        f += 1
    if factor_bias is not None:
        f += tl.load(factor_bias + column, inside, other=0)
    if shift_bias is not None:
        s += tl.load(shift_bias + column, inside, other=0)
    y = y * f + s
    if FORMAT == "":
        tl.store(out + at + column, y.to(out.dtype.element_ty), inside)
    else:
        # What the norm alone would have written is quantised.
        y = tl.where(inside, y.to(stream.dtype.element_ty).to(tl.float32), 0)[None, :]
        scale = 1.0 if global_scale is None else tl.load(global_scale)
        codes, found = quantize_blocks(y, scale, FORMAT, CAPABILITY)
        BYTES: tl.constexpr = codes.shape[1]
        code_bytes = hidden // (BLOCK // BYTES)
        byte = tl.arange(0, BYTES)[None, :]
        tl.store(out + (batch * rows + row) * code_bytes + byte, codes, (byte < code_bytes) & there)
        block = tl.arange(0, BLOCK // V)[None, :]
        found = tl.where((block * V < hidden) & there, found, 0)
        to = batch * blocks * tl.num_programs(0) + scale_offset(row, block, blocks, "128x4")
        tl.store(factors + to, found, block < blocks)


_VECTORS = ("residual", "gate", "gate_bias", "factor_bias", "shift_bias", "input_scale", "factors", "global_scale")
_STRIDED = ("x", "residual", "gate", "factor", "shift")


def build(problem, config):
    rows, fp32 = pointer(problem.dtype, problem.aligned), pointer("fp32", problem.aligned)
    wide = pointer(problem.factor_dtype, problem.aligned)
    types = {"x": rows, "residual": rows, "gate": rows, "gate_bias": fp32, "factor": wide, "factor_bias": fp32}
    types |= {"shift": wide, "shift_bias": fp32, "input_scale": "*fp32", "stream": rows}
    types["out"] = pointer("u8", problem.aligned) if problem.format else rows
    types |= {"factors": "*u8", "global_scale": "*fp32"}
    types |= {f"{name}_strides.{axis}": "i64" for name in _STRIDED for axis in ("batch", "row")}
    types |= {"rows": "i32", "hidden": "i32", "eps": "fp32", "blocks": "i32"}
    there = {name: getattr(problem, name) for name in _VECTORS[:6]}
    there |= {"factors": problem.format != "", "global_scale": problem.format == "nvfp4"}
    types |= {name: None for name in _VECTORS if not there[name]}
    constants = {
        "ONE": problem.one,
        "FORMAT": problem.format,
        "V": FORMATS[problem.format].width if problem.format else 1,
        "UNIT": unit(problem.dtype, problem.aligned),
        "FACTOR_UNIT": unit(problem.factor_dtype, problem.aligned),
        "BLOCK": problem.block,
        "CAPABILITY": config.capability,
        "PDL": config.pdl,
    }
    return Build(modulated_kernel, types, constants, num_warps=config.num_warps)


# Bytes of stack that a thread may use: a row of more than 16384 with a gate, factors and shifts of each row on the
# way.
STACK_BUDGET = 256

launch = Launcher("modulated_layernorm", build)


def run(problem, config, given, eps):
    """The stream and its modulated norm; given : Modulation."""
    batch, rows, hidden = given.x.shape
    out, blocks, programs = given.out, 0, rows
    if problem.format:
        out = out.view(torch.uint8)
        programs, blocks = layouts.padded(rows, hidden // FORMATS[problem.format].width, "128x4")
    g = given
    tensors = g.x, g.residual, g.gate, g.gate_bias, g.factor, g.factor_bias, g.shift, g.shift_bias, g.input_scale
    tensors = [t for t in (*tensors, g.stream, out, g.factors, g.global_scale) if t is not None]
    strides = []
    for tensor in (given.x, given.residual, given.gate, given.factor, given.shift):
        strides += (0, 0) if tensor is None else tensor.stride()[:2]
    launch(problem, config, (programs, batch, 1), *tensors, *strides, rows, hidden, eps, blocks)


IMPLEMENTATION = Implementation(run, (launch,), stack_budget=STACK_BUDGET)
