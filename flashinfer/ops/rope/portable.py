"""RoPE in Triton: queries and keys in one launch, cosines and sines computed once for several heads."""

import torch
import triton
import triton.language as tl

from flashinfer._core.launch import Build, Launcher
from flashinfer.ops._device.ragged import request_of
from flashinfer.ops._device.rows import column_offset, multiple, pointer, unit
from flashinfer.ops.rope.frequencies import turns


@triton.jit
def rope_kernel(
    q,
    k,
    q_out,
    k_out,
    positions,
    offsets,
    source,
    q_token,
    q_head,
    q_column,
    k_token,
    k_head,
    k_column,
    q_out_token,
    q_out_head,
    q_out_column,
    k_out_token,
    k_out_head,
    k_out_column,
    source_row,
    tokens,
    batch,
    q_heads,
    k_heads,
    max_position,
    HEAD_DIM: tl.constexpr,
    ROTARY_DIM: tl.constexpr,
    INTERLEAVE: tl.constexpr,
    RAGGED: tl.constexpr,
    CACHED: tl.constexpr,
    UNIT: tl.constexpr,
    TOKENS: tl.constexpr,
    HEADS: tl.constexpr,
    HALF: tl.constexpr,
    REST: tl.constexpr,
):
    token = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    inside = token < tokens
    if RAGGED:
        request = tl.minimum(request_of(positions, batch, token), batch - 1)
        position = tl.load(offsets + request) + token - tl.load(positions + request)
    else:
        position = tl.load(positions + token, inside, other=0)
    if CACHED:
        cos, sin = cached_rotation(source, source_row, position, max_position, ROTARY_DIM, UNIT, HALF)
    else:
        cos, sin = computed_rotation(source, position, ROTARY_DIM, HALF)

    # The blocks of heads: first those of queries, then those of keys.
    block = tl.program_id(1)
    q_blocks = tl.cdiv(q_heads, HEADS)
    if block < q_blocks:
        x = q + token.to(tl.int64)[:, None] * multiple(q_token, UNIT)
        out = q_out + token.to(tl.int64)[:, None] * multiple(q_out_token, UNIT)
        first = block * HEADS
        for head in range(first, tl.minimum(first + HEADS, q_heads)):
            a = x + head * multiple(q_head, UNIT)
            b = out + head * multiple(q_out_head, UNIT)
            rotate(a, b, q_column, q_out_column, inside, cos, sin, HEAD_DIM, ROTARY_DIM, INTERLEAVE, UNIT, HALF, REST)
    else:
        x = k + token.to(tl.int64)[:, None] * multiple(k_token, UNIT)
        out = k_out + token.to(tl.int64)[:, None] * multiple(k_out_token, UNIT)
        first = (block - q_blocks) * HEADS
        for head in range(first, tl.minimum(first + HEADS, k_heads)):
            a = x + head * multiple(k_head, UNIT)
            b = out + head * multiple(k_out_head, UNIT)
            rotate(a, b, k_column, k_out_column, inside, cos, sin, HEAD_DIM, ROTARY_DIM, INTERLEAVE, UNIT, HALF, REST)


@triton.jit
def cached_rotation(cache, row_stride, position, max_position, ROTARY_DIM: tl.constexpr, UNIT, HALF: tl.constexpr):
    """Cosines and sines [TOKENS, HALF] from a table; NaN for a position outside it."""
    pair = tl.arange(0, HALF)
    known = (position >= 0) & (position < max_position)
    mask = known[:, None] & (pair < ROTARY_DIM // 2)[None, :]
    at = cache + position.to(tl.int64)[:, None] * multiple(row_stride, 4 if UNIT > 1 else 1) + pair[None, :]
    cos = tl.load(at, mask, other=float("nan"))
    sin = tl.load(at + ROTARY_DIM // 2, mask, other=float("nan"))
    return cos, sin


@triton.jit
def computed_rotation(turns, position, ROTARY_DIM: tl.constexpr, HALF: tl.constexpr):
    """Cosines and sines [TOKENS, HALF] of position * turns, which is in units of 2 ** -64 turns and wraps."""
    pair = tl.arange(0, HALF)
    turn = tl.load(turns + pair, pair < ROTARY_DIM // 2, other=0)
    wrapped = position.to(tl.int64)[:, None] * turn[None, :]
    return cos_sin((wrapped >> 32).to(tl.int32))


@triton.jit
def cos_sin(turn):
    """Cosine and sine, to a rounding or two of float32, of an angle in units of 2 ** -32 turns (int32).

    The angle is a number of quarter turns plus at most an eighth, for which the Taylor series of both converge fast.
    The general functions of the compiler carry a reduction of large angles, with a stack, that is not needed here.
    """
    quarter = (turn + (1 << 29)) >> 30
    x = (turn - (quarter << 30)).to(tl.float32) * (6.283185307179586 / 4294967296)
    y = x * x
    s = x * (1 - y * (1 / 6) * (1 - y * (1 / 20) * (1 - y * (1 / 42) * (1 - y * (1 / 72)))))
    c = 1 - y * (1 / 2) * (1 - y * (1 / 12) * (1 - y * (1 / 30) * (1 - y * (1 / 56))))
    odd = (quarter & 1) != 0
    cos, sin = tl.where(odd, s, c), tl.where(odd, c, s)
    return tl.where(((quarter + 1) & 2) != 0, -cos, cos), tl.where((quarter & 2) != 0, -sin, sin)


@triton.jit
def rotate(
    x,
    out,
    x_column,
    out_column,
    inside,
    cos,
    sin,
    HEAD_DIM: tl.constexpr,
    ROTARY_DIM: tl.constexpr,
    INTERLEAVE: tl.constexpr,
    UNIT: tl.constexpr,
    HALF: tl.constexpr,
    REST: tl.constexpr,
):
    """Rotate one head of each token and copy the rest of it; x and out are [TOKENS, 1] pointers to its start."""
    element = out.dtype.element_ty
    if INTERLEAVE:
        column = tl.arange(0, 2 * HALF)
        mask = inside[:, None] & (column < ROTARY_DIM)[None, :]
        pairs = tl.load(x + column_offset(column, x_column, UNIT)[None, :], mask, other=0).to(tl.float32)
        a, b = tl.split(tl.reshape(pairs, (inside.shape[0], HALF, 2)))
        pairs = tl.reshape(tl.join(a * cos - b * sin, b * cos + a * sin), (inside.shape[0], 2 * HALF))
        tl.store(out + column_offset(column, out_column, UNIT)[None, :], pairs.to(element), mask)
    else:
        column = tl.arange(0, HALF)
        other = column + ROTARY_DIM // 2
        mask = inside[:, None] & (column < ROTARY_DIM // 2)[None, :]
        a = tl.load(x + column_offset(column, x_column, UNIT)[None, :], mask, other=0).to(tl.float32)
        b = tl.load(x + column_offset(other, x_column, UNIT)[None, :], mask, other=0).to(tl.float32)
        tl.store(out + column_offset(column, out_column, UNIT)[None, :], (a * cos - b * sin).to(element), mask)
        tl.store(out + column_offset(other, out_column, UNIT)[None, :], (b * cos + a * sin).to(element), mask)
    if REST > 0:
        column = ROTARY_DIM + tl.arange(0, REST)
        mask = inside[:, None] & (column < HEAD_DIM)[None, :]
        rest = tl.load(x + column_offset(column, x_column, UNIT)[None, :], mask)
        tl.store(out + column_offset(column, out_column, UNIT)[None, :], rest, mask)


def build(problem, config):
    head = pointer(problem.dtype, problem.aligned)
    types = {"q": head, "k": head, "q_out": head, "k_out": head}
    types |= {"positions": f"*{problem.position_dtype}", "offsets": "*i32"}
    types["source"] = pointer("fp32", problem.aligned) if problem.cached else "*i64"
    types |= {f"{x}_{axis}": "i64" for x in ("q", "k", "q_out", "k_out") for axis in ("token", "head", "column")}
    types |= {"source_row": "i64"} | dict.fromkeys(("tokens", "batch", "q_heads", "k_heads", "max_position"), "i32")
    # What is not rotated is copied, unless it is in place already.
    rest = 0 if problem.inplace else problem.head_dim - problem.rotary_dim
    constants = {
        "HEAD_DIM": problem.head_dim,
        "ROTARY_DIM": problem.rotary_dim,
        "INTERLEAVE": problem.interleave,
        "RAGGED": problem.ragged,
        "CACHED": problem.cached,
        "UNIT": unit(problem.dtype, problem.aligned),
        "TOKENS": config.tokens,
        "HEADS": config.heads,
        "HALF": triton.next_power_of_2(problem.rotary_dim // 2),
        "REST": triton.next_power_of_2(rest) if rest else 0,
    }
    return Build(rope_kernel, types, constants, num_warps=config.num_warps)


launch = Launcher("rope", build)
LAUNCHERS = (launch,)


def run(problem, config, q, k, q_out, k_out, positions, offsets, source):
    """Rotate q into q_out and k into k_out; all are [tokens, heads, head_dim].

    positions : [tokens]; or, where offsets [batch] is given, the indptr [batch + 1] of a ragged batch whose request i
    begins at position offsets[i].
    source : cosines and sines [positions, rotary_dim], or Frequencies.
    """
    tokens, q_heads = q.shape[:2]
    k_heads = k.shape[1]
    if not isinstance(source, torch.Tensor):
        source = turns(source, q.device)
    strides = q.stride() + k.stride() + q_out.stride() + k_out.stride() + (source.stride(0),)
    batch = 0 if offsets is None else len(offsets)
    blocks = triton.cdiv(q_heads, config.heads) + triton.cdiv(k_heads, config.heads)
    grid = (triton.cdiv(tokens, config.tokens), blocks, 1)
    tensors = q, k, q_out, k_out, positions, offsets, source
    launch(problem, config, grid, *tensors, *strides, tokens, batch, q_heads, k_heads, len(source))
