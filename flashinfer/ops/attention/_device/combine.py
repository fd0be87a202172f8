"""Split-KV: the partial results of a tile are combined by a softmax over their log-sum-exps.

A tile of up to FEW splits is combined by the program that counts its last split, alone. Of a tile of more splits, the
program that counts the last split of a group of TOGETHER combines the group, all groups side by side, and the program
that counts the last group combines the groups: of 100 splits, the groups 0 to 15, ..., 80 to 95 and 96 to 99.
docs/rooms/attention-decode.md has the times.
"""

import triton
import triton.language as tl

from flashinfer.ops.attention._device.logits import LOG2E
from flashinfer.ops.attention.split import FEW as _FEW

# Splits of a group. About the root of the splits that a chip makes of one tile, 256 of 132 multiprocessors with two
# programs each, and one round of loads.
TOGETHER = tl.constexpr(16)
FEW = tl.constexpr(_FEW)


@triton.jit
def _sum_splits(
    partial_out, partial_lse, first_slot, splits, apart, row, split, d, row_ok, mask, top, kv_head, num_kv_heads,
    D_VO: tl.constexpr, BLOCK_M: tl.constexpr, SINKS: tl.constexpr,
):  # fmt: skip
    """The sum of partial results by their weights, the sum of weights, and the largest LSE, which weights are relative
    to: of the `splits` slots first_slot, first_slot + apart, ...; `top` is the LSE of the sinks or -inf."""
    AT_A_TIME: tl.constexpr = split.shape[0]
    total = tl.where(top == float("-inf"), 0.0, 1.0)
    acc = tl.where(mask, 0.0, 0.0)
    first_row = (first_slot.to(tl.int64) * num_kv_heads + kv_head) * BLOCK_M
    partial_lse += first_row
    partial_out += first_row * D_VO
    for start in range(0, splits, AT_A_TIME):
        # 32-bit offsets from the tile's first slot: its slots have fewer than 2^31 rows.
        at = (start + split) * (apart * num_kv_heads * BLOCK_M) + row
        ok = (start + split < splits) & row_ok
        # Other multiprocessors may have written this in the same launch: .cg bypasses L1.
        s = tl.load(partial_lse + at, mask=ok, other=float("-inf"), cache_modifier=".cg")
        rows = partial_out + (at.to(tl.int64) * D_VO)[:, :, None]
        x = tl.load(rows + d, mask=ok[:, :, None] & mask, other=0, cache_modifier=".cg")
        new_top = tl.maximum(top, tl.max(s, 0, keep_dims=True))
        base = tl.where(new_top == float("-inf"), 0.0, new_top)
        weight = tl.exp2(s - base)
        keep = tl.exp2(top - base)
        if SINKS:
            # A sink times LOG2E may be inf, and inf - inf is NaN. Without sinks `top` is finite or -inf.
            keep = tl.where(top == new_top, 1.0, keep)
        acc = acc * keep[:, :, None] + tl.sum(x * weight[:, :, None], 0, keep_dims=True)
        total = total * keep + tl.sum(weight, 0, keep_dims=True)
        top = new_top
    return acc, total, top


@triton.jit
def combine_rows(
    partial_out, partial_lse, out, lse, sinks, first_slot, splits, row, split, d, tile_row, q_row, q_len, kv_head,
    num_kv_heads, o_stride_n, o_stride_h, GROUP: tl.constexpr, D_VO: tl.constexpr, BLOCK_M: tl.constexpr,
    SINKS: tl.constexpr, LSE: tl.constexpr, SOFTMAX: tl.constexpr = True, LSE_UNIT: tl.constexpr = 1.0,
    apart=1,
):  # fmt: skip
    """Combine rows `row` ([1, rows]) of a tile, whose partial results are in `splits` slots: first_slot, first_slot +
    apart, ...

    partial_out is float32 [slots, kv_heads, BLOCK_M, D_VO], normalized per split; partial_lse is float32
    [slots, kv_heads, BLOCK_M], base 2. For a row that saw no key in a split they are 0 and -inf. Splits are added in
    the order of their keys, so the result does not depend on the order in which they finished. `split` ([n, 1]: 0, 1,
    ...) sets how many are loaded at once; `d` ([1, 1, D_VO padded]) counts columns. The caller passes these aranges,
    because Gluon needs their layouts.

    Without SOFTMAX the partial results are sums of weighted values, which are added; their LSE is 0. The result's LSE
    is in base 2 times LSE_UNIT; ln 2 gives base e.
    """
    token = (tile_row + row) // GROUP
    head = kv_head * GROUP + (tile_row + row) % GROUP
    row_ok = token < q_len
    mask = row_ok[:, :, None] & (d < D_VO)
    top = tl.where(row_ok, float("-inf"), float("-inf"))
    if SINKS:
        top = tl.load(sinks + head, mask=row_ok, other=float("-inf")) * LOG2E
    acc, total, top = _sum_splits(
        partial_out, partial_lse, first_slot, splits, apart, row, split, d, row_ok, mask, top, kv_head, num_kv_heads,
        D_VO, BLOCK_M, SINKS,
    )  # fmt: skip
    seen = total != 0
    safe = tl.where(seen, total, 1.0) if SOFTMAX else tl.where(row_ok, 1.0, 1.0)
    n = (q_row + token).to(tl.int64)
    result = (acc / safe[:, :, None]).to(out.dtype.element_ty)
    tl.store(out + (n * o_stride_n + head * o_stride_h)[:, :, None] + d, result, mask=mask)
    if LSE:
        value = tl.where(seen, top + tl.log2(safe), float("-inf"))
        tl.store(lse + n * (num_kv_heads * GROUP) + head, value * LSE_UNIT, mask=row_ok)


@triton.jit
def _combine_group(
    partial_out, partial_lse, first_slot, splits, row, split, d, row_count, kv_head, num_kv_heads,
    D_VO: tl.constexpr, BLOCK_M: tl.constexpr, SOFTMAX: tl.constexpr,
):  # fmt: skip
    """Combine rows `row` of `splits` slots from `first_slot` on into a partial result, in the place of the first."""
    row_ok = row < row_count
    mask = row_ok[:, :, None] & (d < D_VO)
    top = tl.where(row_ok, float("-inf"), float("-inf"))
    acc, total, top = _sum_splits(
        partial_out, partial_lse, first_slot, splits, 1, row, split, d, row_ok, mask, top, kv_head, num_kv_heads, D_VO,
        BLOCK_M, False,
    )  # fmt: skip
    # Not `> 0`: a NaN has to come out. A row that saw no key remains 0 and -inf.
    safe = tl.where(total != 0, total, 1.0) if SOFTMAX else tl.where(row_ok, 1.0, 1.0)
    at = (first_slot.to(tl.int64) * num_kv_heads + kv_head) * BLOCK_M + row
    # Several threads may have read what one of them overwrites.
    tl.debug_barrier()
    tl.store(partial_out + (at * D_VO)[:, :, None] + d, acc / safe[:, :, None], mask=mask)
    tl.store(partial_lse + at, top + tl.log2(safe), mask=row_ok)


@triton.jit
def _is_last(counter, splits):
    """Count a result as stored; whether it is the last of `splits`. The last one resets the counter to zero, for the
    next launch or replay."""
    # The barrier orders the stores of all threads before the atomic, which releases them and acquires other programs'.
    tl.debug_barrier()
    last = tl.atomic_add(counter, 1, sem="acq_rel") == splits - 1
    if last:
        tl.store(counter, 0)
    return last


@triton.jit
def combine_if_last(
    arrivals, partial_out, partial_lse, out, lse, sinks, slot, first_slot, splits, row, split, d, tile_row, q_row,
    q_len, kv_head, num_kv_heads, o_stride_n, o_stride_h, MANY: tl.constexpr, GROUP: tl.constexpr, D_VO: tl.constexpr,
    BLOCK_M: tl.constexpr, SINKS: tl.constexpr, LSE: tl.constexpr, SOFTMAX: tl.constexpr = True,
    LSE_UNIT: tl.constexpr = 1.0,
):  # fmt: skip
    """Count a split of a tile, in `slot`, as stored. The program that counts the last split combines the tile; no
    program waits. With MANY there may be more than FEW splits, and then there are groups.

    Groups are of neighbouring splits, so that the result depends on the splits of the tile alone, not on the order in
    which they finished. Counters are at slots of the tile, and 0 between launches: a group's at its first slot, the
    tile's at the tile's first, and with groups at its second.
    """
    row_count = tl.minimum(q_len * GROUP - tile_row, BLOCK_M)
    counters = arrivals + first_slot * num_kv_heads + kv_head
    parts = splits
    apart = 1
    complete = True
    if MANY:
        in_groups = splits > FEW
        complete = splits > 0
        if in_groups:
            first = (slot - first_slot) // TOGETHER * TOGETHER
            members = tl.minimum(splits - first, TOGETHER)
            complete = _is_last(counters + first * num_kv_heads, members)
            if complete:
                for first_row in range(0, row_count, row.shape[1]):
                    _combine_group(
                        partial_out, partial_lse, first_slot + first, members, first_row + row, split, d, row_count,
                        kv_head, num_kv_heads, D_VO, BLOCK_M, SOFTMAX,
                    )  # fmt: skip
        parts = tl.where(in_groups, (splits + TOGETHER - 1) // TOGETHER, splits)
        apart = tl.where(in_groups, TOGETHER, 1)
        counters += tl.where(in_groups, num_kv_heads, 0)
    if complete:
        if _is_last(counters, parts):
            for first_row in range(0, row_count, row.shape[1]):
                combine_rows(
                    partial_out, partial_lse, out, lse, sinks, first_slot, parts, first_row + row, split, d, tile_row,
                    q_row, q_len, kv_head, num_kv_heads, o_stride_n, o_stride_h, GROUP, D_VO, BLOCK_M, SINKS, LSE,
                    SOFTMAX, LSE_UNIT, apart,
                )  # fmt: skip
