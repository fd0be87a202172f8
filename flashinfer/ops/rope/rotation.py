"""Rotating heads, for all kernels of the room: angles, and what is read, rotated and written."""

import triton
import triton.language as tl

from flashinfer.ops._device.formats import to_fp8
from flashinfer.ops._device.rows import column_offset, multiple


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
    The general functions of the compiler carry a reduction of large angles, with arrays in local memory, that is not
    needed here.
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
def load_head(x, x_column, inside, ROTARY_DIM: tl.constexpr, INTERLEAVE: tl.constexpr, UNIT, HALF: tl.constexpr):
    """What rotates of one head of each token, as `rotate_head` takes it: both halves or, of INTERLEAVE, twice all."""
    if INTERLEAVE:
        column = tl.arange(0, 2 * HALF)
        mask = inside[:, None] & (column < ROTARY_DIM)[None, :]
        a = tl.load(x + column_offset(column, x_column, UNIT)[None, :], mask, other=0)
        b = a
    else:
        column = tl.arange(0, HALF)
        mask = inside[:, None] & (column < ROTARY_DIM // 2)[None, :]
        a = tl.load(x + column_offset(column, x_column, UNIT)[None, :], mask, other=0)
        b = tl.load(x + column_offset(column + ROTARY_DIM // 2, x_column, UNIT)[None, :], mask, other=0)
    return a, b


@triton.jit
def rotate_head(
    a, b, x, out, x_column, out_column, inside, cos, sin, scale,
    HEAD_DIM: tl.constexpr, ROTARY_DIM: tl.constexpr, INTERLEAVE: tl.constexpr, UNIT: tl.constexpr, HALF: tl.constexpr,
    REST: tl.constexpr, FP8: tl.constexpr, CAPABILITY: tl.constexpr,
):  # fmt: skip
    """Rotate one head of each token, of which `load_head` has read a and b, and copy the rest of it.

    x and out are [TOKENS, 1] pointers to its start. FP8 : "", or the format of the result, which is multiplied by
    `scale` before.
    """
    if INTERLEAVE:
        column = tl.arange(0, 2 * HALF)
        mask = inside[:, None] & (column < ROTARY_DIM)[None, :]
        a, b = tl.split(tl.reshape(a.to(tl.float32), (inside.shape[0], HALF, 2)))
        pairs = tl.reshape(tl.join(a * cos - b * sin, b * cos + a * sin), (inside.shape[0], 2 * HALF))
        pairs = rounded(pairs, scale, out, FP8, CAPABILITY)
        tl.store(out + column_offset(column, out_column, UNIT)[None, :], pairs, mask)
    else:
        column = tl.arange(0, HALF)
        other = column + ROTARY_DIM // 2
        mask = inside[:, None] & (column < ROTARY_DIM // 2)[None, :]
        a, b = a.to(tl.float32), b.to(tl.float32)
        low = rounded(a * cos - b * sin, scale, out, FP8, CAPABILITY)
        high = rounded(b * cos + a * sin, scale, out, FP8, CAPABILITY)
        tl.store(out + column_offset(column, out_column, UNIT)[None, :], low, mask)
        tl.store(out + column_offset(other, out_column, UNIT)[None, :], high, mask)
    if REST > 0:
        column = ROTARY_DIM + tl.arange(0, REST)
        mask = inside[:, None] & (column < HEAD_DIM)[None, :]
        rest = tl.load(x + column_offset(column, x_column, UNIT)[None, :], mask)
        tl.store(out + column_offset(column, out_column, UNIT)[None, :], rest, mask)


@triton.jit
def rounded(x, scale, out, FP8: tl.constexpr, CAPABILITY: tl.constexpr):
    """float32 x in the dtype of `out`, or times `scale` as bytes of FP8."""
    if FP8 == "":
        return x.to(out.dtype.element_ty)
    else:
        return to_fp8(x * scale, FP8, CAPABILITY)


@triton.jit
def place(token, head, token_stride, head_stride, UNIT: tl.constexpr):
    """Offsets [ROWS, 1] of heads of tokens."""
    return (token.to(tl.int64) * multiple(token_stride, UNIT) + head * multiple(head_stride, UNIT))[:, None]
