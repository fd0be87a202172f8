"""The first two stages of `prefix`: what each program's part of a row holds, and between which keys the prefix ends.

Grid: scan_kernel `programs` programs a row, each with `chunk` tiles of TILE columns, and it reads the row once;
bracket_kernel one program a row, over maxima of groups or histograms.
Warps: all share a tile. Shared memory: reductions, scans and histograms.
Inputs: x [rows, columns], a window of each row, and the filters: k and p of all rows or of each.
Outputs: of scan_kernel maxima int32 [rows, tiles, TILE / GROUP], counts int32 [rows, programs, BINS], tile_top and
tile_sum float32 [rows, tiles]; of bracket_kernel state int64 [rows, STATE], numbers float32 [rows, NUMBERS], near int32
as maxima, listed int32 [rows].
Method: `flashinfer/ops/_device/prefix.py`.
"""

import triton
import triton.language as tl

from flashinfer.ops._device.pdl import begin
from flashinfer.ops._device.prefix import (
    BINS,
    PROBS,
    LOGITS,
    HIGH,
    LOW,
    NEAR,
    STATE,
    TOP,
    SUM,
    NUMBERS,
    LOWEST,
    BEYOND,
    INFINITE,
    key_of,
    value_of,
    bin_of,
    first_key,
    weight_of,
    window_of,
    load_ranked,
    row_statistics,
    k_rules,
    reaching,
    parameter,
)


@triton.jit
def total_weight(value, top, DOMAIN: tl.constexpr):
    """The sum of a tile's weights, for logits relative to its largest; of values that load_ranked gave."""
    if DOMAIN == LOGITS:
        weight = tl.exp(value - tl.where(top == float("-inf"), 0.0, top))
    else:
        weight = tl.where(value > 0, value, 0.0)
    return tl.sum(weight, 0)


@triton.jit
def scan_kernel(
    x, window, filters, maxima, counts, tile_top, tile_sum, x_row, columns, programs, chunk, tiles,
    DOMAIN: tl.constexpr, TOP_K: tl.constexpr, STATISTICS: tl.constexpr, UNIT: tl.constexpr, TILE: tl.constexpr,
    GROUP: tl.constexpr,
):  # fmt: skip
    """maxima int32 [rows, tiles, TILE // GROUP]: the largest key of GROUP neighbours; tile_top and tile_sum float32
    [rows, tiles]; counts int32 [rows, programs, BINS], of rows where k does not rule. A program takes `chunk` tiles;
    what it writes of them does not depend on how many that is."""
    row = tl.program_id(0) // programs
    part = tl.program_id(0) % programs
    x, length = window_of(x, x_row, window, row, columns, UNIT)
    counting = length >= 0
    if TOP_K:
        counting = k_rules(parameter(filters.top_k, filters.top_ks, row), length, GROUP) == 0
    histogram = tl.zeros([BINS], tl.int32)
    for i in range(chunk):
        tile = part * chunk + i
        value = load_ranked(x, tile, length, TILE)
        largest = tl.max(tl.reshape(value, [TILE // GROUP, GROUP]), 1)
        if DOMAIN == PROBS:
            largest = tl.where(largest < 0, 0.0, largest)
        at = row.to(tl.int64) * tiles + tile
        tl.store(maxima + at * (TILE // GROUP) + tl.arange(0, TILE // GROUP), key_of(largest), tile < tiles)
        if STATISTICS:
            top = tl.max(largest, 0)
            total = total_weight(value, top, DOMAIN)
            tl.store(tile_top + at, tl.where(top == float("inf"), float("nan"), top), tile < tiles)
            tl.store(tile_sum + at, total, tile < tiles)
        if counting:
            if DOMAIN == PROBS:
                value = tl.where(value < 0, 0.0, value)
            inside = tile * TILE + tl.arange(0, TILE) < length
            histogram += tl.histogram(bin_of(key_of(value), DOMAIN), BINS, mask=inside)
    if counting:
        tl.store(counts + tl.program_id(0).to(tl.int64) * BINS + tl.arange(0, BINS), histogram)


@triton.jit
def group_keys(maxima, start, groups, BLOCK: tl.constexpr):
    """Maxima of a row's groups, LOWEST past the last."""
    at = start + tl.arange(0, BLOCK)
    return tl.load(maxima + at, at < groups, other=LOWEST)


@triton.jit
def bracket_by_groups(first, maxima, k, groups, BLOCK: tl.constexpr, WAYS: tl.constexpr):
    """Keys: one that none of the row's elements reaches, and one that k groups reach, and at most an eighth more unless
    they are equal. Any such key will do, and each step saved is a pass over the groups. `first` are the maxima of BLOCK
    groups, which stay in registers."""
    top = tl.max(first, 0)
    bottom = tl.min(tl.where(first == LOWEST, INFINITE, first), 0)
    for start in range(BLOCK, groups, BLOCK):
        key = group_keys(maxima, start, groups, BLOCK)
        top = tl.maximum(top, tl.max(key, 0))
        bottom = tl.minimum(bottom, tl.min(tl.where(key == LOWEST, INFINITE, key), 0))
    first = first[None, :]
    enough = bottom.to(tl.int64)
    beyond = top.to(tl.int64) + 1
    reach = groups
    way = tl.arange(0, WAYS).to(tl.int64)
    while (beyond - enough > 1) & (reach > k + k // 8):
        edge = enough + (way + 1) * ((beyond - enough + WAYS) // (WAYS + 1))
        least = tl.minimum(edge, INFINITE).to(tl.int32)
        count = reaching(first, least)
        for start in range(BLOCK, groups, BLOCK):
            count += reaching(group_keys(maxima, start, groups, BLOCK)[None, :], least)
        reached = (count >= k) & (edge < beyond)
        reach = tl.min(tl.where(reached, count, reach), 0)
        enough = tl.max(tl.where(reached, edge, enough), 0)
        beyond = tl.min(tl.where(reached, beyond, tl.minimum(edge, beyond)), 0)
    # NaN is counted as inf, but stands above it.
    return tl.where(top == INFINITE, BEYOND, top.to(tl.int64) + 1), enough


@triton.jit
def list_groups(first, maxima, near, low, groups, BLOCK: tl.constexpr):
    """Lists the groups that reach `low` in near, in their order; how many they are. `first` as above."""
    least = tl.minimum(low, INFINITE).to(tl.int32)
    reached = first >= least
    group = tl.arange(0, BLOCK)
    tl.store(near + tl.cumsum(reached.to(tl.int32), 0) - 1, group, reached)
    count = tl.sum(reached.to(tl.int32), 0)
    for start in range(BLOCK, groups, BLOCK):
        reached = group_keys(maxima, start, groups, BLOCK) >= least
        tl.store(near + count + tl.cumsum(reached.to(tl.int32), 0) - 1, start + group, reached)
        count += tl.sum(reached.to(tl.int32), 0)
    return count


@triton.jit
def row_counts(counts, row, programs):
    """The histogram of a row, from those of its programs."""
    bin = tl.arange(0, BINS)
    total = tl.zeros([BINS], tl.int32)
    for start in range(0, programs, 16):
        part = start + tl.arange(0, 16)
        at = (row.to(tl.int64) * programs + part) * BINS
        total += tl.sum(tl.load(counts + at[:, None] + bin[None, :], (part < programs)[:, None], other=0), 0)
    return total


@triton.jit
def bracket_by_count(count, k, total):
    """Bins from the first result on are inside the k first, bins below the second outside."""
    bin = tl.arange(0, BINS)
    above = tl.cumsum(count, 0, reverse=True)
    edge = tl.max(tl.where(above >= k, bin, 0), 0)
    full = tl.max(tl.where(bin == edge, above, 0), 0) == k
    everything = k >= total
    return tl.where(everything, 0, tl.where(full, edge, edge + 1)), tl.where(everything, 0, edge)


@triton.jit
def bracket_by_mass(count, k_high, k_low, all_kept, p, top, total, DOMAIN: tl.constexpr, TOP_K_FIRST: tl.constexpr):
    """The same for the fewest elements whose weights sum to p (of the whole, for logits; of the k first, if those are
    taken first). Within a bin weights are between its ends', which bounds every sum of whole bins."""
    bin = tl.arange(0, BINS)
    low = value_of(tl.maximum(first_key(bin, DOMAIN), LOWEST + 0x800000).to(tl.int32))
    high = value_of(tl.minimum(first_key(bin + 1, DOMAIN), 0x7F800000).to(tl.int32))
    low = tl.where(bin == 0, 0.0, weight_of(tl.minimum(low, top), top, DOMAIN))
    high = weight_of(tl.minimum(high, top), top, DOMAIN)
    low = count * low
    high = count * high
    # Weights of a bin and of all above it, from above or as what is left by those below; of all above it alone.
    at_most = tl.minimum(tl.cumsum(high, 0, reverse=True), total - tl.cumsum(low, 0) + low)
    at_least = tl.maximum(tl.cumsum(low, 0, reverse=True) - low, total - tl.cumsum(high, 0))
    if TOP_K_FIRST:
        least = tl.max(tl.where(bin == k_low, at_least, float("-inf")), 0)
        most = tl.max(tl.where(bin == k_low, at_most, float("-inf")), 0)
        least = p * tl.where(all_kept, total, least)
        most = p * tl.where(all_kept, total, most)
    else:
        least = p * total if DOMAIN == LOGITS else p
        most = least
    # The sums above are right to a few roundings, and weights are added in units: 1e-5 of the whole covers both.
    # Of a row of denormals that would be 0.
    slack = tl.maximum(total * 1e-5, 1e-37)
    inside = tl.min(tl.where(at_most < least - slack, bin, BINS), 0)
    outside = tl.max(tl.where(at_least >= most + slack, bin + 1, 0), 0)
    everything = p >= 1
    inside = tl.where(everything, 0, inside)
    outside = tl.where(everything, 0, outside)
    if TOP_K_FIRST:
        # The sum of the k first decides, so all of them that are not surely inside have to be listed.
        outside = tl.where(all_kept, outside, 0)
    return tl.maximum(inside, k_high), tl.maximum(outside, k_low)


@triton.jit
def bracket_by_bins(
    counts, row, programs, k, p, length, top, total, DOMAIN: tl.constexpr, TOP_K: tl.constexpr, TOP_P: tl.constexpr,
    TOP_K_FIRST: tl.constexpr,
):  # fmt: skip
    """Keys: from the first on all are inside, below the second all outside."""
    count = row_counts(counts, row, programs)
    high = tl.full([], 0, tl.int32)
    low = tl.full([], 0, tl.int32)
    all_kept = length > -1
    if TOP_K:
        all_kept = k >= length
        high, low = bracket_by_count(count, k, length)
    if TOP_P:
        high, low = bracket_by_mass(count, high, low, all_kept, p, top, total, DOMAIN, TOP_K_FIRST)
    return first_key(high, DOMAIN), first_key(low, DOMAIN)


@triton.jit
def bracket_kernel(
    maxima, near, counts, tile_top, tile_sum, window, filters, state, numbers, listed, columns,
    programs, tiles, DOMAIN: tl.constexpr, STATISTICS: tl.constexpr, TOP_K: tl.constexpr, TOP_P: tl.constexpr,
    TOP_K_FIRST: tl.constexpr, TILE: tl.constexpr, GROUP: tl.constexpr, BLOCK: tl.constexpr, WAYS: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """state int64 [rows, STATE]; numbers float32 [rows, NUMBERS]; listed int32 [rows], set to 0; near int32 as maxima,
    [rows, tiles * TILE // GROUP]. One program a row.

    A row with NaN, without weight, or with an impossible k or p has nothing inside.
    """
    begin(PDL)
    row = tl.program_id(0)
    _, length = window_of(counts, 0, window, row, columns, 1)
    possible = length > 0
    top = tl.full([], 0.0, tl.float32)
    total = top
    if STATISTICS:
        top, total = row_statistics(tile_top, tile_sum, row, tiles, DOMAIN, 256)
        possible &= (top == top) & (top > (float("-inf") if DOMAIN == LOGITS else 0.0))
        tl.store(numbers + row * NUMBERS + TOP, top)
        tl.store(numbers + row * NUMBERS + SUM, total)
    k = parameter(filters.top_k, filters.top_ks, row)
    p = parameter(filters.top_p, filters.top_ps, row)
    counted = possible
    if TOP_P:
        possible &= p > 0
    if TOP_K:
        possible &= k >= 1
        counted = k_rules(k, length, GROUP) == 0
    high = tl.full([], BEYOND, tl.int64)
    low = high
    near_groups = tl.where(counted, -1, 0)
    if possible & counted:
        high, low = bracket_by_bins(
            counts, row, programs, k, p, length, top, total, DOMAIN, TOP_K, TOP_P, TOP_K_FIRST
        )  # fmt: skip
    if TOP_K:
        if possible & (counted == 0):
            maxima += row.to(tl.int64) * tiles * (TILE // GROUP)
            near += row.to(tl.int64) * tiles * (TILE // GROUP)
            groups = tl.cdiv(length, GROUP)
            first = group_keys(maxima, 0, groups, BLOCK)
            high, low = bracket_by_groups(first, maxima, k.to(tl.int32), groups, BLOCK, WAYS)
            # What weighs nothing is never drawn and adds nothing: no need to list a row full of it.
            if DOMAIN == PROBS:
                low = tl.maximum(low, 1)
            elif DOMAIN == LOGITS:
                low = tl.maximum(low, -INFINITE)
            near_groups = list_groups(first, maxima, near, low, groups, BLOCK)
    at = state + row.to(tl.int64) * STATE
    tl.store(at + NEAR, near_groups)
    tl.store(at + HIGH, high)
    tl.store(at + LOW, low)
    tl.store(listed + row, 0)
