"""The first two stages of `prefix`: maxima, sums and histograms of a row, and two keys that bracket the prefix's end.

Grid: scan_kernel `programs` programs a row, each with `chunk` tiles of TILE columns, which it reads once;
bracket_kernel one program a row, over group maxima or histograms.
Warps: all share a tile. Shared memory: reductions, scans and histograms.
Inputs: x [rows, columns], a window of each row, and the filters: k and p of all rows or of each.
Outputs: of scan_kernel maxima int32 [rows, tiles, TILE / GROUP], counts int32 [rows, programs, BINS], tile_top and
tile_sum float32 [rows, tiles]; of bracket_kernel state int64 [rows, STATE], numbers float32 [rows, NUMBERS], candidates
int32 as maxima, listed int32 [rows].
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
    CANDIDATES,
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
    load_for_max,
    row_statistics,
    groups_bound_k,
    count_reaching,
    row_parameter,
)


@triton.jit
def total_weight(value, top, DOMAIN: tl.constexpr):
    """The sum of a tile's weights, for logits relative to its largest value. `value` comes from load_ranked."""
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
    [rows, tiles]; counts int32 [rows, programs, BINS], for rows whose group maxima do not bound k. A program takes
    `chunk` tiles; what it writes of a tile does not depend on `chunk`."""
    row = tl.program_id(0) // programs
    part = tl.program_id(0) % programs
    x, length = window_of(x, x_row, window, row, columns, UNIT)
    count_bins = length >= 0
    if TOP_K:
        count_bins = groups_bound_k(row_parameter(filters.top_k, filters.top_ks, row), length, GROUP) == 0
    histogram = tl.zeros([BINS], tl.int32)
    for i in range(chunk):
        tile = part * chunk + i
        value = load_for_max(x, tile, length, TILE)
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
        if count_bins:
            if DOMAIN == PROBS:
                value = tl.where(value < 0, 0.0, value)
            inside = tile * TILE + tl.arange(0, TILE) < length
            histogram += tl.histogram(bin_of(key_of(value), DOMAIN), BINS, mask=inside)
    if count_bins:
        tl.store(counts + tl.program_id(0).to(tl.int64) * BINS + tl.arange(0, BINS), histogram)


@triton.jit
def group_keys(maxima, start, groups, BLOCK: tl.constexpr):
    """BLOCK of a row's group maxima from group `start` on, LOWEST past the last."""
    at = start + tl.arange(0, BLOCK)
    return tl.load(maxima + at, at < groups, other=LOWEST)


@triton.jit
def bracket_by_groups(first, maxima, k, groups, BLOCK: tl.constexpr, WAYS: tl.constexpr):
    """The keys high, above all of the row's, and low, which at least k group maxima reach.

    At most k + k / 8 maxima reach low, unless maxima are equal. The exact k-th maximum is not needed, and each step
    saved is a pass over the maxima. `first` are the first BLOCK maxima, which stay in registers.
    """
    top = tl.max(first, 0)
    bottom = tl.min(tl.where(first == LOWEST, INFINITE, first), 0)
    for start in range(BLOCK, groups, BLOCK):
        key = group_keys(maxima, start, groups, BLOCK)
        top = tl.maximum(top, tl.max(key, 0))
        bottom = tl.minimum(bottom, tl.min(tl.where(key == LOWEST, INFINITE, key), 0))
    first = first[None, :]
    lower = bottom.to(tl.int64)
    upper = top.to(tl.int64) + 1
    reach = groups
    way = tl.arange(0, WAYS).to(tl.int64)
    while (upper - lower > 1) & (reach > k + k // 8):
        edge = lower + (way + 1) * ((upper - lower + WAYS) // (WAYS + 1))
        least = tl.minimum(edge, INFINITE).to(tl.int32)
        count = count_reaching(first, least)
        for start in range(BLOCK, groups, BLOCK):
            count += count_reaching(group_keys(maxima, start, groups, BLOCK)[None, :], least)
        reached = (count >= k) & (edge < upper)
        reach = tl.min(tl.where(reached, count, reach), 0)
        lower = tl.max(tl.where(reached, edge, lower), 0)
        upper = tl.min(tl.where(reached, upper, tl.minimum(edge, upper)), 0)
    # The maxima count NaN as inf, but the key of NaN is above that of inf.
    return tl.where(top == INFINITE, BEYOND, top.to(tl.int64) + 1), lower


@triton.jit
def list_groups(first, maxima, candidates, low, groups, BLOCK: tl.constexpr):
    """Lists the groups whose maximum reaches `low` in `candidates`, in ascending order; returns their number. `first`
    as in bracket_by_groups."""
    least = tl.minimum(low, INFINITE).to(tl.int32)
    reached = first >= least
    group = tl.arange(0, BLOCK)
    tl.store(candidates + tl.cumsum(reached.to(tl.int32), 0) - 1, group, reached)
    count = tl.sum(reached.to(tl.int32), 0)
    for start in range(BLOCK, groups, BLOCK):
        reached = group_keys(maxima, start, groups, BLOCK) >= least
        tl.store(candidates + count + tl.cumsum(reached.to(tl.int32), 0) - 1, start + group, reached)
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
    """Two bins for top-k: elements from the first bin on are among the first k, elements below the second are not.

    The counts 1 0 4 3 of bins 0 to 3 and k = 5 give (3, 2): bin 3 has three of the first k, bin 2 the other two.
    """
    bin = tl.arange(0, BINS)
    above = tl.cumsum(count, 0, reverse=True)
    edge = tl.max(tl.where(above >= k, bin, 0), 0)
    full = tl.max(tl.where(bin == edge, above, 0), 0) == k
    keep_all = k >= total
    return tl.where(keep_all, 0, tl.where(full, edge, edge + 1)), tl.where(keep_all, 0, edge)


@triton.jit
def bracket_by_mass(count, k_high, k_low, all_kept, p, top, total, DOMAIN: tl.constexpr, TOP_K_FIRST: tl.constexpr):
    """The same two bins for top-p: the fewest elements whose weights sum to p, a share of the whole sum for logits, and
    of the sum of the first k with TOP_K_FIRST. An element's weight lies between those of its bin's two ends, which
    bounds the sum of whole bins from below and above."""
    bin = tl.arange(0, BINS)
    low = value_of(tl.maximum(first_key(bin, DOMAIN), LOWEST + 0x800000).to(tl.int32))
    high = value_of(tl.minimum(first_key(bin + 1, DOMAIN), 0x7F800000).to(tl.int32))
    low = tl.where(bin == 0, 0.0, weight_of(tl.minimum(low, top), top, DOMAIN))
    high = weight_of(tl.minimum(high, top), top, DOMAIN)
    low = count * low
    high = count * high
    # at_most bounds the weight of a bin and all above it: by their upper ends, or by the total less the bins below.
    # at_least bounds the weight of the bins above it in the same two ways.
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
    # The float32 sums above have rounding errors, and resolve adds weights in fixed point: 1e-5 of the total covers
    # both. For a row of denormals that product would be 0; 1e-37 is not.
    slack = tl.maximum(total * 1e-5, 1e-37)
    inside = tl.min(tl.where(at_most < least - slack, bin, BINS), 0)
    outside = tl.max(tl.where(at_least >= most + slack, bin + 1, 0), 0)
    keep_all = p >= 1
    inside = tl.where(keep_all, 0, inside)
    outside = tl.where(keep_all, 0, outside)
    if TOP_K_FIRST:
        # p is a share of the exact sum of the first k, so resolve needs all of them that are not summed already.
        outside = tl.where(all_kept, outside, 0)
    return tl.maximum(inside, k_high), tl.maximum(outside, k_low)


@triton.jit
def bracket_by_bins(
    counts, row, programs, k, p, length, top, total, DOMAIN: tl.constexpr, TOP_K: tl.constexpr, TOP_P: tl.constexpr,
    TOP_K_FIRST: tl.constexpr,
):  # fmt: skip
    """The keys high and low: elements at or above high are in the prefix, elements below low are not."""
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
    maxima, candidates, counts, tile_top, tile_sum, window, filters, state, numbers, listed, columns,
    programs, tiles, DOMAIN: tl.constexpr, STATISTICS: tl.constexpr, TOP_K: tl.constexpr, TOP_P: tl.constexpr,
    TOP_K_FIRST: tl.constexpr, TILE: tl.constexpr, GROUP: tl.constexpr, BLOCK: tl.constexpr, WAYS: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """state int64 [rows, STATE]; numbers float32 [rows, NUMBERS]; listed int32 [rows], set to 0; candidates int32 as
    maxima, [rows, tiles * TILE // GROUP]. One program a row.

    The prefix is empty for a row with NaN, without weight, or with a k below 1 or a p of 0 or less.
    """
    begin(PDL)
    row = tl.program_id(0)
    _, length = window_of(counts, 0, window, row, columns, 1)
    nonempty = length > 0
    top = tl.full([], 0.0, tl.float32)
    total = top
    if STATISTICS:
        top, total = row_statistics(tile_top, tile_sum, row, tiles, DOMAIN, 256)
        nonempty &= (top == top) & (top > (float("-inf") if DOMAIN == LOGITS else 0.0))
        tl.store(numbers + row * NUMBERS + TOP, top)
        tl.store(numbers + row * NUMBERS + SUM, total)
    k = row_parameter(filters.top_k, filters.top_ks, row)
    p = row_parameter(filters.top_p, filters.top_ps, row)
    by_bins = nonempty
    if TOP_P:
        nonempty &= p > 0
    if TOP_K:
        nonempty &= k >= 1
        by_bins = groups_bound_k(k, length, GROUP) == 0
    high = tl.full([], BEYOND, tl.int64)
    low = high
    candidate_groups = tl.where(by_bins, -1, 0)
    if nonempty & by_bins:
        high, low = bracket_by_bins(
            counts, row, programs, k, p, length, top, total, DOMAIN, TOP_K, TOP_P, TOP_K_FIRST
        )  # fmt: skip
    if TOP_K:
        if nonempty & (by_bins == 0):
            maxima += row.to(tl.int64) * tiles * (TILE // GROUP)
            candidates += row.to(tl.int64) * tiles * (TILE // GROUP)
            groups = tl.cdiv(length, GROUP)
            first = group_keys(maxima, 0, groups, BLOCK)
            high, low = bracket_by_groups(first, maxima, k.to(tl.int32), groups, BLOCK, WAYS)
            # An element without weight is never drawn and adds nothing. A row of many such elements need not list them.
            if DOMAIN == PROBS:
                low = tl.maximum(low, 1)
            elif DOMAIN == LOGITS:
                low = tl.maximum(low, -INFINITE)
            candidate_groups = list_groups(first, maxima, candidates, low, groups, BLOCK)
    at = state + row.to(tl.int64) * STATE
    tl.store(at + CANDIDATES, candidate_groups)
    tl.store(at + HIGH, high)
    tl.store(at + LOW, low)
    tl.store(listed + row, 0)
