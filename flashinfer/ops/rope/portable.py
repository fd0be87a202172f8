"""RoPE in Triton: queries and keys in one launch, cosines and sines computed once for several heads.

rope_kernel: q, k [tokens, heads, HEAD_DIM] to q_out, k_out, any strides. Grid: (blocks of HEADS heads, tiles of TOKENS
tokens over two axes), one warp a program. quantize_kernel: rotated and other parts of heads to FP8, in tensors or in
pages. Grid: blocks of ROWS heads of tokens, first of queries, then of keys, then of values. video_kernel: one program
for the queries, the keys or the values of a patch. No shared memory but what reductions and layouts take.

Angles are exact fractions of turns (`flashinfer/ops/rope/frequencies.py`). Source: Su et al., RoFormer, 2021,
https://arxiv.org/abs/2104.09864.
"""

import torch
import triton
import triton.language as tl

from flashinfer._core.implementation import Implementation
from flashinfer._core.launch import Build, Launcher
from flashinfer.ops._device.formats import to_fp8
from flashinfer.ops._device.pages import slot_of
from flashinfer.ops._device.pdl import begin
from flashinfer.ops._device.ragged import request_of
from flashinfer.ops._device.rows import column_offset, multiple, pointer, unit
from flashinfer.ops.rope import Heads, Pages, Problem, Quantize, Video
from flashinfer.ops.rope.frequencies import turns


@triton.jit
def rope_kernel(
    q, k, q_out, k_out, positions, offsets, source, q_strides, k_strides, q_out_strides, k_out_strides, source_row,
    tokens, batch, q_heads, k_heads, max_position,
    HEAD_DIM: tl.constexpr, ROTARY_DIM: tl.constexpr, INTERLEAVE: tl.constexpr, RAGGED: tl.constexpr,
    CACHED: tl.constexpr, UNIT: tl.constexpr, TOKENS: tl.constexpr, HEADS: tl.constexpr, HALF: tl.constexpr,
    REST: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    # Blocks of heads, first those of queries, then those of keys; programs that follow each other have the same tokens.
    q_blocks = tl.cdiv(q_heads, HEADS)
    block = tl.program_id(0)
    first = (tl.program_id(2) * tl.num_programs(1) + tl.program_id(1)) * TOKENS
    # What waits for positions waits longest: they are asked for first, and the heads while they come. Loads stay before
    # a barrier; ptxas would put them behind what does not wait for them.
    at = first + tl.arange(0, TOKENS)
    begin(PDL)
    if RAGGED:
        request = tl.minimum(request_of(positions, batch, at), batch - 1)
        position = tl.load(offsets + request) + at - tl.load(positions + request)
    else:
        position = tl.load(positions + at, at < tokens, other=0)
    tl.debug_barrier()
    # A row is a head of a token. The heads of a token are in one thread, which has their cosines and sines once.
    row = tl.arange(0, HEADS * TOKENS)
    token = (first + row % TOKENS).to(tl.int64)
    is_q = block < q_blocks
    head = tl.where(is_q, block, block - q_blocks) * HEADS + row // TOKENS
    there = (token < tokens) & (head < tl.where(is_q, q_heads, k_heads))
    x_column = tl.where(is_q, q_strides.column, k_strides.column)
    x = tl.where(is_q, q, k)
    x_token, x_head = tl.where(is_q, q_strides.token, k_strides.token), tl.where(is_q, q_strides.head, k_strides.head)
    x += place(token, head, x_token, x_head, UNIT)
    a, b = load_head(x, x_column, there, ROTARY_DIM, INTERLEAVE, UNIT, HALF)
    tl.debug_barrier()
    if CACHED:
        cos, sin = cached_rotation(source, source_row, position, max_position, ROTARY_DIM, UNIT, HALF)
    else:
        cos, sin = computed_rotation(source, position, ROTARY_DIM, HALF)
    cos, sin = for_heads(cos, HEADS), for_heads(sin, HEADS)
    out = tl.where(is_q, q_out, k_out)
    out_token = tl.where(is_q, q_out_strides.token, k_out_strides.token)
    out_head = tl.where(is_q, q_out_strides.head, k_out_strides.head)
    out += place(token, head, out_token, out_head, UNIT)
    out_column = tl.where(is_q, q_out_strides.column, k_out_strides.column)
    rotate_head(
        a, b, x, out, x_column, out_column, there, cos, sin, 1.0,
        HEAD_DIM, ROTARY_DIM, INTERLEAVE, UNIT, HALF, REST, "", 0,
    )  # fmt: skip


@triton.jit
def for_heads(x, HEADS: tl.constexpr):
    """x [TOKENS, n] for HEADS heads of each token, [HEADS * TOKENS, n]."""
    wide = tl.broadcast_to(x[None, :, :], [HEADS, x.shape[0], x.shape[1]])
    return tl.reshape(wide, [HEADS * x.shape[0], x.shape[1]])


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
def quantize_kernel(
    q, k, v, angles, table, q_strides, k_strides, v_strides, tokens, q_heads, k_heads, q_scale, kv_scale,
    ROTARY_DIM: tl.constexpr, Q_REST: tl.constexpr, K_REST: tl.constexpr, VALUE_DIM: tl.constexpr,
    INTERLEAVE: tl.constexpr, APPEND: tl.constexpr, FP8: tl.constexpr, UNIT: tl.constexpr, ROWS: tl.constexpr,
    HALF: tl.constexpr, Q_BLOCK: tl.constexpr, K_BLOCK: tl.constexpr, V_BLOCK: tl.constexpr, CAPABILITY: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    # The blocks of rows, which are heads of tokens: first those of queries, then of keys, then of values.
    block = tl.program_id(0)
    q_blocks = tl.cdiv(tokens * q_heads, ROWS)
    row = block * ROWS + tl.arange(0, ROWS)
    begin(PDL)
    if block < q_blocks:
        token, head = row // q_heads, (row % q_heads).to(tl.int64)
        inside = token < tokens
        cos, sin = rotation_of(angles, token, inside, ROTARY_DIM, UNIT, HALF)
        x = q.rope + place(token, head, q_strides.rope_token, q_strides.rope_head, UNIT)
        out = q.rope_out + place(token, head, q_strides.rope_out_token, q_strides.rope_out_head, UNIT)
        rotate_narrow(
            x, out, q_strides.rope_column, q_strides.rope_out_column, inside, cos, sin, q_scale,
            ROTARY_DIM, INTERLEAVE, UNIT, HALF, FP8, CAPABILITY,
        )  # fmt: skip
        if Q_REST > 0:
            x = q.rest + place(token, head, q_strides.rest_token, q_strides.rest_head, UNIT)
            out = q.rest_out + place(token, head, q_strides.rest_out_token, q_strides.rest_out_head, UNIT)
            narrow(
                x, out, q_strides.rest_column, q_strides.rest_out_column, inside, inside, q_scale,
                Q_REST, Q_BLOCK, UNIT, FP8, CAPABILITY,
            )  # fmt: skip
    else:
        k_blocks = tl.cdiv(tokens * k_heads, ROWS)
        row -= q_blocks * ROWS
        if VALUE_DIM > 0:
            row = tl.where(block < q_blocks + k_blocks, row, row - k_blocks * ROWS)
        token, head = row // k_heads, (row % k_heads).to(tl.int64)
        inside = token < tokens
        if APPEND:
            page, slot, kept = slot_of(table, token, inside)
        else:
            page, slot, kept = tl.zeros_like(head), token.to(tl.int64), inside
        if block < q_blocks + k_blocks:
            cos, sin = rotation_of(angles, token, inside, ROTARY_DIM, UNIT, HALF)
            x = k.rope + place(token, head, k_strides.rope_token, k_strides.rope_head, UNIT)
            out = k.rope_out + place(slot, head, k_strides.rope_out_token, k_strides.rope_out_head, UNIT)
            out += (page * multiple(k_strides.rope_out_page, UNIT))[:, None]
            rotate_narrow(
                x, out, k_strides.rope_column, k_strides.rope_out_column, kept, cos, sin, kv_scale,
                ROTARY_DIM, INTERLEAVE, UNIT, HALF, FP8, CAPABILITY,
            )  # fmt: skip
            if K_REST > 0:
                x = k.rest + place(token, head, k_strides.rest_token, k_strides.rest_head, UNIT)
                out = k.rest_out + place(slot, head, k_strides.rest_out_token, k_strides.rest_out_head, UNIT)
                out += (page * multiple(k_strides.rest_out_page, UNIT))[:, None]
                narrow(
                    x, out, k_strides.rest_column, k_strides.rest_out_column, inside, kept, kv_scale,
                    K_REST, K_BLOCK, UNIT, FP8, CAPABILITY,
                )  # fmt: skip
        elif VALUE_DIM > 0:
            x = v.rope + place(token, head, v_strides.rope_token, v_strides.rope_head, UNIT)
            out = v.rope_out + place(slot, head, v_strides.rope_out_token, v_strides.rope_out_head, UNIT)
            out += (page * multiple(v_strides.rope_out_page, UNIT))[:, None]
            narrow(
                x, out, v_strides.rope_column, v_strides.rope_out_column, inside, kept, kv_scale,
                VALUE_DIM, V_BLOCK, UNIT, FP8, CAPABILITY,
            )  # fmt: skip


@triton.jit
def rotation_of(angles, token, inside, ROTARY_DIM: tl.constexpr, UNIT: tl.constexpr, HALF: tl.constexpr):
    """Cosines and sines [ROWS, HALF] of tokens' positions."""
    position = tl.load(angles.pos_ids + token, inside, other=0)
    return cached_rotation(angles.cache, angles.cache_row, position, angles.max_position, ROTARY_DIM, UNIT, HALF)


@triton.jit
def rotate_narrow(
    x, out, x_column, out_column, kept, cos, sin, scale,
    ROTARY_DIM: tl.constexpr, INTERLEAVE: tl.constexpr, UNIT: tl.constexpr, HALF: tl.constexpr, FP8: tl.constexpr,
    CAPABILITY: tl.constexpr,
):  # fmt: skip
    """Rotate heads of tokens at x [ROWS, 1] and write them to out, where they are `kept`, times `scale` as FP8."""
    a, b = load_head(x, x_column, kept, ROTARY_DIM, INTERLEAVE, UNIT, HALF)
    rotate_head(
        a, b, x, out, x_column, out_column, kept, cos, sin, scale,
        ROTARY_DIM, ROTARY_DIM, INTERLEAVE, UNIT, HALF, 0, FP8, CAPABILITY,
    )  # fmt: skip


@triton.jit
def place(token, head, token_stride, head_stride, UNIT: tl.constexpr):
    """Offsets [ROWS, 1] of heads of tokens."""
    return (token.to(tl.int64) * multiple(token_stride, UNIT) + head * multiple(head_stride, UNIT))[:, None]


@triton.jit
def narrow(
    x, out, x_column, out_column, inside, kept, scale,
    DIM: tl.constexpr, BLOCK: tl.constexpr, UNIT: tl.constexpr, FP8: tl.constexpr, CAPABILITY: tl.constexpr,
):  # fmt: skip
    """Write DIM columns of each row, times `scale`, as FP8; x and out are [ROWS, 1] pointers."""
    column = tl.arange(0, BLOCK)
    y = tl.load(x + column_offset(column, x_column, UNIT)[None, :], inside[:, None] & (column < DIM)[None, :], other=0)
    y = rounded(y.to(tl.float32), scale, out, FP8, CAPABILITY)
    tl.store(out + column_offset(column, out_column, UNIT)[None, :], y, kept[:, None] & (column < DIM)[None, :])


@triton.jit
def video_kernel(
    rows, q_weight, k_weight, q_out, k_out, v_out, turns, rows_row, q_heads, k_heads, v_heads, frames, height, width,
    frame_pairs, height_pairs, eps, scale, v_scale,
    HEAD_DIM: tl.constexpr, INTERLEAVE: tl.constexpr, FP8: tl.constexpr, UNIT: tl.constexpr, HEADS: tl.constexpr,
    HALF: tl.constexpr, CAPABILITY: tl.constexpr,
):  # fmt: skip
    """A program has the queries, the keys or the values of one patch."""
    token = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1)
    x = rows + token * multiple(rows_row, UNIT)
    if part == 2:
        head, column = tl.arange(0, HEADS)[:, None], tl.arange(0, 2 * HALF)[None, :]
        mask = (head < v_heads) & (column < HEAD_DIM)
        at = head * HEAD_DIM + column
        v = tl.load(x + (q_heads + k_heads) * HEAD_DIM + at, mask, other=0).to(tl.float32)
        tl.store(v_out + token * v_heads * HEAD_DIM + at, rounded(v, v_scale, v_out, FP8, CAPABILITY), mask)
    else:
        pair = tl.arange(0, HALF)[None, :]
        turn = tl.load(turns + pair, pair < HEAD_DIM // 2, other=0)
        in_frame = token // width // height % frames
        place = tl.where(pair < frame_pairs, in_frame, token // width % height)
        place = tl.where(pair < frame_pairs + height_pairs, place, token % width)
        cos, sin = cos_sin(((place * turn) >> 32).to(tl.int32))
        if part == 0:
            video_heads(
                x, q_weight, q_out + token * q_heads * HEAD_DIM, q_heads, cos, sin, eps, scale,
                HEAD_DIM, INTERLEAVE, FP8, HEADS, HALF, CAPABILITY,
            )  # fmt: skip
        else:
            video_heads(
                x + q_heads * HEAD_DIM, k_weight, k_out + token * k_heads * HEAD_DIM, k_heads, cos, sin, eps, scale,
                HEAD_DIM, INTERLEAVE, FP8, HEADS, HALF, CAPABILITY,
            )  # fmt: skip


@triton.jit
def video_heads(
    x, weight, out, heads, cos, sin, eps, scale, HEAD_DIM: tl.constexpr, INTERLEAVE: tl.constexpr, FP8: tl.constexpr,
    HEADS: tl.constexpr, HALF: tl.constexpr, CAPABILITY: tl.constexpr,
):  # fmt: skip
    """Normalise all heads together and rotate them; cos and sin are [1, HALF]."""
    head = tl.arange(0, HEADS)[:, None]
    if INTERLEAVE:
        column = tl.arange(0, 2 * HALF)[None, :]
        mask = (head < heads) & (column < HEAD_DIM)
        at = head * HEAD_DIM + column
        y = tl.load(x + at, mask, other=0).to(tl.float32)
        if weight is not None:
            w = tl.load(weight + at, mask, other=0).to(tl.float32)
            y *= tl.rsqrt(tl.sum(tl.sum(y * y, 1), 0) / (heads * HEAD_DIM) + eps) * w
        a, b = tl.split(tl.reshape(y, (HEADS, HALF, 2)))
        y = tl.reshape(tl.join(a * cos - b * sin, b * cos + a * sin), (HEADS, 2 * HALF))
        tl.store(out + at, rounded(y, scale, out, FP8, CAPABILITY), mask)
    else:
        column = tl.arange(0, HALF)[None, :]
        mask = (head < heads) & (column < HEAD_DIM // 2)
        at = head * HEAD_DIM + column
        a = tl.load(x + at, mask, other=0).to(tl.float32)
        b = tl.load(x + at + HEAD_DIM // 2, mask, other=0).to(tl.float32)
        if weight is not None:
            v = tl.load(weight + at, mask, other=0).to(tl.float32)
            w = tl.load(weight + at + HEAD_DIM // 2, mask, other=0).to(tl.float32)
            inverse = tl.rsqrt(tl.sum(tl.sum(a * a + b * b, 1), 0) / (heads * HEAD_DIM) + eps)
            a *= inverse * v
            b *= inverse * w
        tl.store(out + at, rounded(a * cos - b * sin, scale, out, FP8, CAPABILITY), mask)
        tl.store(out + at + HEAD_DIM // 2, rounded(b * cos + a * sin, scale, out, FP8, CAPABILITY), mask)


def build(problem, config):
    return _BUILD[type(problem)](problem, config)


def _build_rope(problem, config):
    head = pointer(problem.dtype, problem.aligned)
    types = {"q": head, "k": head, "q_out": head, "k_out": head}
    types |= {"positions": f"*{problem.position_dtype}", "offsets": "*i32"}
    types["source"] = pointer("fp32", problem.aligned) if problem.cached else "*i64"
    operands = "q", "k", "q_out", "k_out"
    types |= {f"{x}_strides.{axis}": "i64" for x in operands for axis in ("token", "head", "column")}
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
        "PDL": config.pdl,
    }
    return Build(rope_kernel, types, constants, num_warps=config.num_warps)


def _build_quantize(problem, config):
    head, out = pointer(problem.dtype, problem.aligned), pointer("u8", problem.aligned)
    types = {f"{x}.{part}": out if "out" in part else head for x in ("q", "k") for part in Heads._fields}
    types |= {"v.rope": head, "v.rope_out": out}
    types |= {"angles.pos_ids": f"*{problem.position_dtype}", "angles.cache": pointer("fp32", problem.aligned)}
    types |= {"angles.cache_row": "i64", "angles.max_position": "i32"}
    types |= dict.fromkeys((f"table.{name}" for name in Pages._fields), "*i32")
    types |= dict.fromkeys((f"table.{name}" for name in ("batch", "entries", "num_pages", "page_size")), "i32")
    for x, parts in (("q", Heads._fields), ("k", Heads._fields), ("v", ("rope", "rope_out"))):
        for part in parts:
            paged = ("page",) if x != "q" and "out" in part else ()
            types |= {f"{x}_strides.{part}_{axis}": "i64" for axis in (*paged, "token", "head", "column")}
    types |= dict.fromkeys(("tokens", "q_heads", "k_heads"), "i32") | {"q_scale": "fp32", "kv_scale": "fp32"}
    constants = {
        "ROTARY_DIM": problem.rotary_dim,
        "Q_REST": problem.q_rest,
        "K_REST": problem.k_rest,
        "VALUE_DIM": problem.value_dim,
        "INTERLEAVE": problem.interleave,
        "APPEND": problem.append,
        "FP8": problem.out_dtype,
        "UNIT": unit(problem.dtype, problem.aligned),
        "ROWS": config.rows,
        "HALF": triton.next_power_of_2(problem.rotary_dim // 2),
        "Q_BLOCK": triton.next_power_of_2(problem.q_rest),
        "K_BLOCK": triton.next_power_of_2(problem.k_rest),
        "V_BLOCK": triton.next_power_of_2(problem.value_dim),
        "CAPABILITY": config.capability,
        "PDL": config.pdl,
    }
    return Build(quantize_kernel, types, constants, num_warps=config.num_warps)


def _build_video(problem, config):
    rows, weights = pointer(problem.dtype, problem.aligned), pointer(problem.weight_dtype or "fp32", problem.aligned)
    out = pointer("u8" if problem.out else problem.dtype, problem.aligned)
    types = {"rows": rows, "q_weight": weights, "k_weight": weights, "q_out": out, "k_out": out, "v_out": out}
    types |= {"turns": "*i64", "rows_row": "i64"}
    sizes = ("q_heads", "k_heads", "v_heads", "frames", "height", "width", "frame_pairs", "height_pairs")
    types |= dict.fromkeys(sizes, "i32") | dict.fromkeys(("eps", "scale", "v_scale"), "fp32")
    absent = () if problem.weight_dtype else ("q_weight", "k_weight")
    constants = dict.fromkeys(absent) | {
        "HEAD_DIM": problem.head_dim,
        "INTERLEAVE": problem.interleave,
        "FP8": problem.out,
        "UNIT": unit(problem.dtype, problem.aligned),
        "HEADS": problem.heads,
        "HALF": triton.next_power_of_2(problem.head_dim // 2),
        "CAPABILITY": config.capability,
    }
    types = {name: kind for name, kind in types.items() if name not in absent}
    return Build(video_kernel, types, constants, num_warps=config.num_warps)


_BUILD = {Problem: _build_rope, Quantize: _build_quantize, Video: _build_video}
launch = Launcher("rope", build)

# Programs along y that a grid may have (CUDA C++ Programming Guide, "Technical Specifications per Compute Capability").
_LONGEST_AXIS = 65535


def run(problem, config, *args):
    _RUN[type(problem)](problem, config, *args)


def rotate_heads(problem, config, q, k, q_out, k_out, positions, offsets, source):
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
    # Three axes, for a division that finds a program's tile would stand before all loads.
    tiles = triton.cdiv(tokens, config.tokens)
    more = triton.cdiv(tiles, _LONGEST_AXIS)
    grid = (blocks, triton.cdiv(tiles, more) if more else 0, more)
    tensors = q, k, q_out, k_out, positions, offsets, source
    launch(problem, config, grid, *tensors, *strides, tokens, batch, q_heads, k_heads, len(source))


def quantize(problem, config, q, k, v, pos_ids, cache, q_scale, kv_scale, pages=None):
    """Rotate q and k, multiply q by q_scale, k and v by kv_scale, and write them in FP8.

    q, k, v : Heads; v may be None. pages : Pages, where keys and values are appended.
    """
    tokens, q_heads = q.rope.shape[:2]
    k_heads = k.rope.shape[1]
    v = Heads(None, None, None, None) if v is None else v
    strides = [n for x in (*q, k.rope, k.rest) for n in _strides(x, 3)]
    strides += [n for x in (k.rope_out, k.rest_out) for n in _strides(x, 4)]
    strides += [*_strides(v.rope, 3), *_strides(v.rope_out, 4)]
    table = 0, 0, 0, 1
    if pages is not None:
        table = len(pages.kv_indptr) - 1, len(pages.kv_indices), *k.rope_out.shape[:2]
    programs = triton.cdiv(tokens * q_heads, config.rows)
    programs += (2 if problem.value_dim else 1) * triton.cdiv(tokens * k_heads, config.rows)
    tensors = *q, *k, v.rope, v.rope_out, pos_ids, cache, cache.stride(0), len(cache)
    table = *(pages or Pages(None, None, None, None)), *table
    sizes = tokens, q_heads, k_heads
    launch(problem, config, (programs, 1, 1), *tensors, *table, *strides, *sizes, q_scale, kv_scale)


def video(problem, config, rows, weights, outputs, space, axes, eps, scales):
    """Rows [tokens, n] of queries, keys and values to `outputs`, [tokens, heads, head_dim] each, contiguous.

    weights : of the norms of queries and keys, or None. space : Space; videos follow one another. axes : Axes.
    scales : of queries and keys, and of values, where the problem has another form.
    """
    if problem.out:
        outputs = [out.view(torch.uint8) for out in outputs]
    given = weights if problem.weight_dtype else ()
    heads = (out.shape[1] for out in outputs)
    table = turns(axes, rows.device)
    grid = (len(rows), 3, 1)
    launch(problem, config, grid, rows, *given, *outputs, table, rows.stride(0), *heads, *space, eps, *scales)


def _strides(x, axes: int) -> tuple[int, ...]:
    """Strides of x [tokens, heads, dim], with 0 for pages before them if there are none; of an absent x, zeros."""
    strides = () if x is None else x.stride()
    return (0,) * (axes - len(strides)) + strides


_RUN = {Problem: rotate_heads, Quantize: quantize, Video: video}

IMPLEMENTATION = Implementation(run, (launch,))
