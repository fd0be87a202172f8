"""Rotated heads to FP8 in Triton, in tensors or, keys and values, in pages.

Grid: first the blocks of queries, then of keys, then of values. A program has ROWS heads of tokens, rotated part and
rest. Warps: all share the rows. Shared memory: none but what changes of layout take.
Inputs: the tensors of `Heads` in `flashinfer/ops/rope/__init__.py`, [tokens, heads, dim]. Outputs: those that `Heads`
names, as large, or the caches of `Pages`.
Method: Su et al., RoFormer, 2021, https://arxiv.org/abs/2104.09864.
"""

import triton
import triton.language as tl

from flashinfer._core.implementation import Implementation
from flashinfer._core.launch import Build, Launcher
from flashinfer.ops._device.pages import slot_of
from flashinfer.ops._device.pdl import begin
from flashinfer.ops._device.rows import column_offset, multiple, pointer, unit
from flashinfer.ops.rope import Heads, Pages
from flashinfer.ops.rope.rotation import cached_rotation, load_head, place, rotate_head, rounded


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
def narrow(
    x, out, x_column, out_column, inside, kept, scale,
    DIM: tl.constexpr, BLOCK: tl.constexpr, UNIT: tl.constexpr, FP8: tl.constexpr, CAPABILITY: tl.constexpr,
):  # fmt: skip
    """Write DIM columns of each row, times `scale`, as FP8; x and out are [ROWS, 1] pointers."""
    column = tl.arange(0, BLOCK)
    y = tl.load(x + column_offset(column, x_column, UNIT)[None, :], inside[:, None] & (column < DIM)[None, :], other=0)
    y = rounded(y.to(tl.float32), scale, out, FP8, CAPABILITY)
    tl.store(out + column_offset(column, out_column, UNIT)[None, :], y, kept[:, None] & (column < DIM)[None, :])


def build(problem, config):
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


launch = Launcher("rope_quantize", build)


def run(problem, config, q, k, v, pos_ids, cache, q_scale, kv_scale, pages=None):
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


def _strides(x, axes: int) -> tuple[int, ...]:
    """Strides of x [tokens, heads, dim], with 0 for pages before them if there are none; of an absent x, zeros."""
    strides = () if x is None else x.stride()
    return (0,) * (axes - len(strides)) + strides


IMPLEMENTATION = Implementation(run, (launch,))
