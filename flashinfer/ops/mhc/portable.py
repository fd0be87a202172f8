"""Hyper-connections in Triton: four streams mixed into a layer's input, and its output mixed back into them.

Grid: pre_kernel (tokens); post_kernel (blocks of columns, tokens). A program of pre_kernel reads 24 logits, makes the
mixes in registers (a 4 x 4 tile for Sinkhorn's iterations), then reads the four streams once, BLOCK columns at a time,
and writes the layer's input. With prenorm it reads them twice, the second time from L2. A program of post_kernel has
BLOCK columns of a token: it reads x and four streams and writes four streams.
Warps: all do the same. Shared memory: sums.
Inputs: dot_mix float32 [splits, tokens, 24], sqrsum [splits, tokens], residual [tokens, 4, hidden]; x [tokens, hidden].
Outputs: post [tokens, 4], comb [tokens, 16], layer_input [tokens, hidden]; out [tokens, 4, hidden].
Method: Xie et al., mHC: Manifold-Constrained Hyper-Connections, 2025, https://arxiv.org/abs/2512.24880.
"""

import triton
import triton.language as tl

from flashinfer._core.implementation import Implementation
from flashinfer._core.launch import Build, Launcher
from flashinfer.ops._device.pdl import begin
from flashinfer.ops._device.rows import multiple, pointer, unit
from flashinfer.ops.mhc import LOGITS, STREAMS, Post, Pre

_STREAMS, _LOGITS = tl.constexpr(STREAMS), tl.constexpr(LOGITS)


@triton.jit
def sigmoid(x):
    return 1 / (1 + tl.exp(-x))


@triton.jit
def sinkhorn(square, repeat, eps):
    """Rows by softmax, then columns and rows over their sums in turn; the last are columns. All sums are positive."""
    square = tl.exp(square - tl.max(square, 1)[:, None])
    square = square / tl.sum(square, 1)[:, None] + eps
    square = square / (tl.sum(square, 0)[None, :] + eps)
    for _ in range(repeat - 1):
        square = square / (tl.sum(square, 1)[:, None] + eps)
        square = square / (tl.sum(square, 0)[None, :] + eps)
    return square


@triton.jit
def pre_kernel(
    dot_mix, sqrsum, residual, scale, base, post, comb, layer_input,
    tokens, hidden, residual_token, residual_stream, k, rms_eps, pre_eps, sinkhorn_eps, mult, repeat,
    SPLITS: tl.constexpr, PRENORM: tl.constexpr, UNIT: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    begin(PDL)
    token = tl.program_id(0).to(tl.int64)
    part = tl.cast(tokens, tl.int64)
    hidden = multiple(hidden, UNIT)
    stream, column = tl.arange(0, _STREAMS), tl.arange(0, BLOCK)
    residual += token * multiple(residual_token, UNIT)
    rows = residual + stream[:, None].to(tl.int64) * multiple(residual_stream, UNIT)

    total = 0.0
    if PRENORM:
        squares = tl.zeros([_STREAMS, BLOCK], tl.float32)
        for start in range(0, hidden, BLOCK):
            x = tl.load(rows + start + column[None, :], (start + column < hidden)[None, :], other=0).to(tl.float32)
            squares += x * x
        total = tl.sum(tl.sum(squares, 1), 0)
    else:
        for split in range(SPLITS):
            total += tl.load(sqrsum + split * part + token)
    rstd = 1 / tl.sqrt_rn(total / k + rms_eps)

    at = stream[:, None] * _STREAMS + stream[None, :]
    pre = tl.zeros([_STREAMS], tl.float32)
    after = tl.zeros([_STREAMS], tl.float32)
    square = tl.zeros([_STREAMS, _STREAMS], tl.float32)
    for split in range(SPLITS):
        logits = dot_mix + (split * part + token) * _LOGITS
        pre += tl.load(logits + stream)
        after += tl.load(logits + _STREAMS + stream)
        square += tl.load(logits + 2 * _STREAMS + at)
    pre = sigmoid(pre * rstd * tl.load(scale) + tl.load(base + stream)) + pre_eps
    after = sigmoid(after * rstd * tl.load(scale + 1) + tl.load(base + _STREAMS + stream)) * mult
    square = square * rstd * tl.load(scale + 2) + tl.load(base + 2 * _STREAMS + at)
    square = sinkhorn(square, repeat, sinkhorn_eps)
    tl.store(post + token * _STREAMS + stream, after)
    tl.store(comb + token * (_STREAMS * _STREAMS) + at, square)

    layer_input += token * hidden
    for start in range(0, hidden, BLOCK):
        inside = start + column < hidden
        x = tl.load(rows + start + column[None, :], inside[None, :], other=0).to(tl.float32)
        mixed = tl.sum(x * pre[:, None], 0)
        tl.store(layer_input + start + column, mixed.to(layer_input.dtype.element_ty), inside)


@triton.jit
def post_kernel(
    x, residual, post, comb, out, hidden, x_token, residual_token, residual_stream,
    UNIT: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    begin(PDL)
    token = tl.program_id(1).to(tl.int64)
    hidden = multiple(hidden, UNIT)
    column = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = column < hidden
    layer = tl.load(x + token * multiple(x_token, UNIT) + column, inside, other=0).to(tl.float32)
    residual += token * multiple(residual_token, UNIT)
    post += token * _STREAMS
    comb += token * (_STREAMS * _STREAMS)
    out += token * _STREAMS * hidden
    stride = multiple(residual_stream, UNIT)
    # All four rows are loaded before the first store, which could alias them for all that the compiler knows.
    a = tl.load(residual + column, inside, other=0).to(tl.float32)
    b = tl.load(residual + stride + column, inside, other=0).to(tl.float32)
    c = tl.load(residual + 2 * stride + column, inside, other=0).to(tl.float32)
    d = tl.load(residual + 3 * stride + column, inside, other=0).to(tl.float32)
    for new in tl.static_range(_STREAMS):
        mixed = layer * tl.load(post + new).to(tl.float32)
        mixed += a * tl.load(comb + new).to(tl.float32)
        mixed += b * tl.load(comb + _STREAMS + new).to(tl.float32)
        mixed += c * tl.load(comb + 2 * _STREAMS + new).to(tl.float32)
        mixed += d * tl.load(comb + 3 * _STREAMS + new).to(tl.float32)
        tl.store(out + new * hidden + column, mixed.to(out.dtype.element_ty), inside)


def _build_pre(problem, config):
    rows = pointer(problem.dtype, problem.aligned)
    types = {"dot_mix": "*fp32", "sqrsum": None if problem.prenorm else "*fp32", "residual": rows}
    types |= {"scale": "*fp32", "base": "*fp32", "post": "*fp32", "comb": "*fp32", "layer_input": rows}
    types |= {"tokens": "i32", "hidden": "i32", "residual_token": "i64", "residual_stream": "i64"}
    types |= dict.fromkeys(("k", "rms_eps", "pre_eps", "sinkhorn_eps", "mult"), "fp32") | {"repeat": "i32"}
    constants = {"SPLITS": problem.splits, "PRENORM": problem.prenorm, "UNIT": unit(problem.dtype, problem.aligned)}
    constants |= {"BLOCK": config.block, "PDL": config.pdl}
    return Build(pre_kernel, types, constants, num_warps=config.num_warps)


def _build_post(problem, config):
    rows, mix = pointer(problem.dtype, problem.aligned), f"*{problem.mix_dtype}"
    types = {"x": rows, "residual": rows, "post": mix, "comb": mix, "out": rows, "hidden": "i32"}
    types |= dict.fromkeys(("x_token", "residual_token", "residual_stream"), "i64")
    constants = {"UNIT": unit(problem.dtype, problem.aligned), "BLOCK": config.block, "PDL": config.pdl}
    return Build(post_kernel, types, constants, num_warps=config.num_warps)


launch_pre = Launcher("mhc_pre", _build_pre)
launch_post = Launcher("mhc_post", _build_post)


def _pre(problem, config, dot_mix, sqrsum, residual, scale, base, numbers, *out):
    """As the reference has it."""
    tokens, _, hidden = residual.shape
    sums = [] if problem.prenorm else [sqrsum]
    launch_pre(problem, config, (tokens, 1, 1), dot_mix, *sums, residual, scale, base, *out, tokens, hidden,
               *residual.stride()[:2], *numbers)  # fmt: skip


def _post(problem, config, x, residual, post, comb, out):
    """As the reference has it."""
    tokens, _, hidden = residual.shape
    grid = (triton.cdiv(hidden, config.block), tokens, 1)
    launch_post(problem, config, grid, x, residual, post, comb, out, hidden, x.stride(0), *residual.stride()[:2])


IMPLEMENTATION = Implementation({Pre: _pre, Post: _post}, {Pre: launch_pre, Post: launch_post})
