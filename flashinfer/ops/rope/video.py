"""Heads of a video's patches in Triton: queries and keys normalised over all heads and rotated, values copied.

Grid: (patches, 3): one program for the queries, the keys or the values of a patch.
Warps: all share the row. Shared memory: the reductions of the norm.
Inputs: rows [patches, .] of queries, keys and values side by side, weights of the norms. Outputs: each [patches, heads,
head_dim].
Method: Su et al., RoFormer, 2021, https://arxiv.org/abs/2104.09864, over three axes.
"""

import torch
import triton
import triton.language as tl

from flashinfer._core.implementation import Implementation
from flashinfer._core.launch import Build, Launcher
from flashinfer.ops._device.rows import multiple, pointer, unit
from flashinfer.ops.rope.frequencies import turns
from flashinfer.ops.rope.rotation import cos_sin, rounded


@triton.jit
def video_kernel(
    rows, q_weight, k_weight, q_out, k_out, v_out, turns, rows_row, q_heads, k_heads, v_heads, frames, height, width,
    frame_pairs, height_pairs, eps, length, scale, v_scale,
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
        cos *= length
        sin *= length
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
    rows = pointer(problem.dtype, problem.aligned)
    weights = pointer(problem.weight_dtype, problem.aligned) if problem.weight_dtype else None
    out = pointer("u8" if problem.out else problem.dtype, problem.aligned)
    types = {"rows": rows, "q_weight": weights, "k_weight": weights, "q_out": out, "k_out": out, "v_out": out}
    types |= {"turns": "*i64", "rows_row": "i64"}
    sizes = ("q_heads", "k_heads", "v_heads", "frames", "height", "width", "frame_pairs", "height_pairs")
    types |= dict.fromkeys(sizes, "i32") | dict.fromkeys(("eps", "length", "scale", "v_scale"), "fp32")
    constants = {
        "HEAD_DIM": problem.head_dim,
        "INTERLEAVE": problem.interleave,
        "FP8": problem.out,
        "UNIT": unit(problem.dtype, problem.aligned),
        "HEADS": problem.heads,
        "HALF": triton.next_power_of_2(problem.head_dim // 2),
        "CAPABILITY": config.capability,
    }
    return Build(video_kernel, types, constants, num_warps=config.num_warps)


launch = Launcher("rope_video", build)


def run(problem, config, rows, weights, outputs, space, axes, eps, length, scales):
    """Rows [tokens, n] of queries, keys and values to `outputs`, [tokens, heads, head_dim] each, contiguous.

    weights : of the norms of queries and keys, or None. space : Space; videos follow one another. axes : Axes.
    length : what rotated pairs are multiplied by.
    scales : of queries and keys, and of values, where the problem has another format.
    """
    if problem.out:
        outputs = [out.view(torch.uint8) for out in outputs]
    given = weights if problem.weight_dtype else ()
    heads = (out.shape[1] for out in outputs)
    table = turns(axes, rows.device)
    grid = (len(rows), 3, 1)
    launch(problem, config, grid, rows, *given, *outputs, table, rows.stride(0), *heads, *space, eps, length, *scales)


IMPLEMENTATION = Implementation(run, (launch,))
