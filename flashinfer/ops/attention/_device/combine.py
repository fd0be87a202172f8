"""Combine the partial results of split tiles: a softmax over their log-sum-exps."""

import triton
import triton.language as tl

from flashinfer.ops.attention._device.schedule import (
    SPLIT_COUNT,
    SPLIT_Q_LEN,
    SPLIT_Q_ROW,
    SPLIT_SLOT,
    SPLIT_TILE_ROW,
    SPLIT_WIDTH,
)


@triton.jit
def combine_kernel(
    partial_out,
    partial_lse,
    out,
    lse,
    splits,
    counts,
    sinks,
    num_kv_heads,
    o_stride_n,
    o_stride_h,
    GROUP: tl.constexpr,
    D_VO: tl.constexpr,
    D_VO_PAD: tl.constexpr,
    BLOCK_M: tl.constexpr,
    SINKS: tl.constexpr,
    LSE: tl.constexpr,
    PIECES: tl.constexpr,
    ROWS: tl.constexpr,
):
    """One program per (split tile and KV head, ROWS rows of the tile).

    partial_out is float32 [slots, kv_heads, BLOCK_M, D_VO], normalised per piece; partial_lse float32
    [slots, kv_heads, BLOCK_M], base 2, -inf for a piece that saw no key.
    """
    tile = tl.program_id(0) // num_kv_heads
    kv_head = tl.program_id(0) % num_kv_heads
    if tile >= tl.load(counts + 1):
        return
    record = splits + tile * SPLIT_WIDTH
    tile_row = tl.load(record + SPLIT_TILE_ROW)
    q_len = tl.load(record + SPLIT_Q_LEN)
    q_row = tl.load(record + SPLIT_Q_ROW)
    pieces = tl.load(record + SPLIT_COUNT)
    slot = tl.load(record + SPLIT_SLOT).to(tl.int64)
    piece = tl.arange(0, PIECES)
    d = tl.arange(0, D_VO_PAD)
    for r in range(ROWS):
        row = tl.program_id(1) * ROWS + r
        token = (tile_row + row) // GROUP
        head = kv_head * GROUP + (tile_row + row) % GROUP
        if token < q_len:
            top = tl.full([], float("-inf"), tl.float32)
            if SINKS:
                top = tl.load(sinks + head) * 1.4426950408889634
            total = tl.where(top == float("-inf"), 0.0, 1.0)
            acc = tl.zeros([D_VO_PAD], tl.float32)
            for start in range(0, pieces, PIECES):
                there = start + piece < pieces
                at = ((slot + start + piece) * num_kv_heads + kv_head) * BLOCK_M + row
                s = tl.load(partial_lse + at, mask=there, other=float("-inf"))
                new_top = tl.maximum(top, tl.max(s, 0))
                base = tl.where(new_top == float("-inf"), 0.0, new_top)
                weight = tl.exp2(s - base)
                keep = tl.exp2(top - base)
                x = tl.load(
                    partial_out + at[:, None] * D_VO + d[None, :],
                    # A piece that saw no key holds nothing worth reading.
                    mask=(there & (s > float("-inf")))[:, None] & (d < D_VO)[None, :],
                    other=0.0,
                )
                acc = acc * keep + tl.sum(x * weight[:, None], 0)
                total = total * keep + tl.sum(weight, 0)
                top = new_top
            result = tl.where(total > 0, acc / tl.where(total > 0, total, 1.0), 0.0)
            n = (q_row + token).to(tl.int64)
            tl.store(out + n * o_stride_n + head * o_stride_h + d, result.to(out.dtype.element_ty), mask=d < D_VO)
            if LSE:
                base = tl.where(top == float("-inf"), 0.0, top)
                value = tl.where(total > 0, base + tl.log2(tl.where(total > 0, total, 1.0)), float("-inf"))
                tl.store(lse + n * (num_kv_heads * GROUP) + head, value)
