"""The first elements of a row in the order (value descending, index ascending), found without sorting.

Top-k, top-p and their combinations all keep a prefix of that order. It is told by its pivot: the key and the index of
its last element. Four launches find it, however a row's programs share it, and read the row once and some of it again:

    scan     largest value of each group of neighbours; largest value and sum of each tile; where k does not rule,
             a histogram of the values' leading bits
    bracket  which keys are surely inside the prefix, which surely outside, and which may hold its end
    gather   sums up what is inside, and lists what is in between; reads only groups that hold any of it, which
             bracket has listed where k rules
    resolve  searches the list for the pivot

A k that is small against the number of groups rules by itself: if T is the k-th largest of the groups' maxima, at least
k elements are T or more, so all of the k first are, ties included, and only groups whose maximum is T or more hold one.
Of G groups that agree in nothing but chance, -G log(1 - k / G) elements are T or more: little above k.

What is added over programs is integers, and of variates the largest is taken, so results depend on no order.
Probabilities are added as multiples of 2^-40 of (a power of two at or above) the row's largest.
"""

import triton
import triton.language as tl

from flashinfer.ops._device.philox import exponentials, exponentials_at, source_of
from flashinfer.ops._device.rows import multiple

BINS = tl.constexpr(256)
# What the values are: any numbers; probabilities (what is negative counts as 0); or logits, whose exponential counts.
SCORES = tl.constexpr(0)
PROBS = tl.constexpr(1)
LOGITS = tl.constexpr(2)
# Integers that bracket leaves for a row. Keys at HIGH or above are inside, keys below LOW are outside. NEAR groups
# reach LOW and are listed; -1 where k does not rule, and none is.
HIGH = tl.constexpr(0)
LOW = tl.constexpr(1)
# Integers that resolve leaves: elements above key PIVOT are inside, and those at it up to rank RANK; KEPT of them.
PIVOT = tl.constexpr(2)
RANK = tl.constexpr(3)
KEPT = tl.constexpr(4)
NEAR = tl.constexpr(5)
STATE = tl.constexpr(6)
# Numbers of a row: its largest value (NaN where the row holds NaN or inf), its sum, and the sum of the prefix.
TOP = tl.constexpr(0)
SUM = tl.constexpr(1)
INSIDE = tl.constexpr(2)
NUMBERS = tl.constexpr(3)

# No value has this key.
_LOWEST = tl.constexpr(-(1 << 31))
_BEYOND = tl.constexpr(1 << 31)
# The key of inf; those of NaN are above. Group maxima count NaN as inf.
_INFINITE = tl.constexpr(0x7F800000)


@triton.jit
def key_of(value):
    """An int32 in the order of the float32 values: -0 is 0, NaN stands above all."""
    bits = tl.where(value == 0, 0.0, value).to(tl.int32, bitcast=True)
    key = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    return tl.where(value != value, 0x7FFFFFFF, key)


@triton.jit
def value_of(key):
    """The float32 value of an int32 key."""
    return (key ^ ((key >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def bin_of(key, DOMAIN: tl.constexpr):
    """The bin of a key. Probabilities: 8 bins for each power of two from 2^-31 to 2. Others: 4 for each from 2^-16 to
    2^16, of either sign. What is beyond is in the outermost bin, what is too small in the one next to zero."""
    if DOMAIN == PROBS:
        return tl.minimum(tl.maximum((key >> 20) - 768, 0), 255)
    upper = tl.minimum(tl.maximum((key >> 21) - 444, 0), 127)
    lower = tl.minimum(tl.maximum((~key >> 21) - 444, 0), 127)
    return tl.where(key >= 0, 128 + upper, 127 - lower)


@triton.jit
def first_key(bin, DOMAIN: tl.constexpr):
    """The smallest key of a bin, as int64; of bin 256, what no key reaches."""
    bin = bin.to(tl.int64)
    if DOMAIN == PROBS:
        key = tl.where(bin == 0, 0, (bin + 768) << 20)
    else:
        key = tl.where(bin < 128, -((572 - bin) << 21), tl.where(bin == 128, 0, (bin + 316) << 21))
        key = tl.where(bin == 0, _LOWEST, key)
    return tl.where(bin == BINS, _BEYOND, key)


@triton.jit
def weight_of(value, top, DOMAIN: tl.constexpr):
    """What a value adds to the sums: itself, or for logits its exponential relative to the row's largest."""
    return tl.exp(value - top) if DOMAIN == LOGITS else value


@triton.jit
def unit_of(top, DOMAIN: tl.constexpr):
    """How many units one is, over lift_of(top): a power of two. The row's largest weight has at most 2^41 units."""
    if DOMAIN == LOGITS:
        return top * 0 + 1099511627776.0
    exponent = (top.to(tl.int32, bitcast=True) >> 23) & 255
    return (tl.where(exponent < 64, 230, 294) - exponent << 23).to(tl.float32, bitcast=True)


@triton.jit
def lift_of(top, DOMAIN: tl.constexpr):
    """2^64 for rows so small that one float32 does not hold their unit, below 2^-63, else 1."""
    return tl.where(top < 1.0842021724855044e-19, 18446744073709551616.0, 1.0) if DOMAIN == PROBS else 1.0


@triton.jit
def in_units(weight, top, unit, DOMAIN: tl.constexpr):
    return (weight * lift_of(top, DOMAIN) * unit).to(tl.int64)


@triton.jit
def window_of(x, x_row, indices, starts, lengths, row, columns, UNIT: tl.constexpr):
    """Where a row begins and how many columns it has: all, or those that its start and length tell."""
    source = row.to(tl.int64)
    if indices is not None:
        source = tl.load(indices + row).to(tl.int64)
    x += source * multiple(x_row, UNIT)
    begin = 0
    if starts is not None:
        begin = tl.minimum(tl.maximum(tl.load(starts + row), 0), columns)
    length = columns - begin
    if lengths is not None:
        length = tl.minimum(tl.maximum(tl.load(lengths + row), 0), length)
    return x + begin, length


@triton.jit
def load_values(x, column, inside, DOMAIN: tl.constexpr):
    value = tl.load(x + column, inside, other=0).to(tl.float32)
    if DOMAIN == PROBS:
        value = tl.where(value < 0, 0.0, value)
    return value


@triton.jit
def load_tile(x, first, length, DOMAIN: tl.constexpr, TILE: tl.constexpr):
    """The values of columns from `first` on, 0 past the row's end."""
    column = first + tl.arange(0, TILE)
    # Without a mask aligned rows are read 16 bytes at a time, and all reads are under way before the first is used.
    if first + TILE <= length:
        value = tl.load(x + column).to(tl.float32)
    else:
        value = tl.load(x + column, column < length, other=0).to(tl.float32)
    if DOMAIN == PROBS:
        value = tl.where(value < 0, 0.0, value)
    return value


@triton.jit
def load_ranked(x, tile, length, TILE: tl.constexpr):
    """The values of a tile of which the largest is wanted: inf for NaN, -inf past the row's end."""
    column = tile * TILE + tl.arange(0, TILE)
    if tile * TILE + TILE <= length:
        value = tl.load(x + column).to(tl.float32)
    else:
        value = tl.load(x + column, column < length, other=float("-inf")).to(tl.float32)
    return tl.where(value != value, float("inf"), value)


@triton.jit
def total_weight(value, top, DOMAIN: tl.constexpr):
    """The sum of a tile's weights, for logits relative to its largest; of values that load_ranked gave."""
    if DOMAIN == LOGITS:
        weight = tl.exp(value - tl.where(top == float("-inf"), 0.0, top))
    else:
        weight = tl.where(value > 0, value, 0.0)
    return tl.sum(weight, 0)


@triton.jit
def row_statistics(tile_top, tile_sum, row, tiles, DOMAIN: tl.constexpr, BLOCK: tl.constexpr):
    """The largest of a row (NaN, if a tile's is) and the sum of its weights, from those of its tiles."""
    at = row.to(tl.int64) * tiles
    top = tl.full([], float("-inf"), tl.float32)
    bad = tl.full([], 0, tl.int32)
    for start in range(0, tiles, BLOCK):
        tile = start + tl.arange(0, BLOCK)
        tops = tl.load(tile_top + at + tile, tile < tiles, other=float("-inf"))
        top = tl.maximum(top, tl.max(tl.where(tops == tops, tops, float("-inf")), 0))
        bad |= tl.max((tops != tops).to(tl.int32), 0)
    total = tl.full([], 0.0, tl.float32)
    for start in range(0, tiles, BLOCK):
        tile = start + tl.arange(0, BLOCK)
        sums = tl.load(tile_sum + at + tile, tile < tiles, other=0.0)
        if DOMAIN == LOGITS:
            tops = tl.load(tile_top + at + tile, tile < tiles, other=float("-inf"))
            sums *= tl.where(tops == float("-inf"), 0.0, tl.exp(tops - top))
        total += tl.sum(sums, 0)
    return tl.where(bad > 0, float("nan"), top), total


@triton.jit
def k_rules(k, length, GROUP: tl.constexpr):
    """Whether k is at most a quarter of a row's groups, so that their maxima tell what the k first may be."""
    return k <= tl.cdiv(length, GROUP) // 4


@triton.jit
def scan_kernel(
    x, indices, starts, lengths, top_k, top_ks, maxima, counts, tile_top, tile_sum, x_row, columns, programs, chunk,
    tiles, DOMAIN: tl.constexpr, TOP_K: tl.constexpr, STATISTICS: tl.constexpr, UNIT: tl.constexpr, TILE: tl.constexpr,
    GROUP: tl.constexpr,
):  # fmt: skip
    """maxima int32 [rows, tiles, TILE // GROUP]: the largest key of GROUP neighbours; tile_top and tile_sum float32
    [rows, tiles]; counts int32 [rows, programs, BINS], of rows where k does not rule. A program takes `chunk` tiles;
    what it says of them does not depend on how many that is."""
    row = tl.program_id(0) // programs
    part = tl.program_id(0) % programs
    x, length = window_of(x, x_row, indices, starts, lengths, row, columns, UNIT)
    counting = length >= 0
    if TOP_K:
        counting = k_rules(parameter(top_k, top_ks, row), length, GROUP) == 0
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
def may_reach(maxima, row, tile, tiles, key, TILE: tl.constexpr, GROUP: tl.constexpr):
    """Which elements of a tile are in a group that has one at `key` or above."""
    maxima += (row.to(tl.int64) * tiles + tile) * (TILE // GROUP)
    largest = tl.load(maxima + tl.arange(0, TILE) // GROUP, tile < tiles, other=_LOWEST)
    return largest >= tl.minimum(key, _INFINITE).to(tl.int32)


@triton.jit
def group_keys(maxima, start, groups, BLOCK: tl.constexpr):
    """Maxima of a row's groups, _LOWEST past the last."""
    at = start + tl.arange(0, BLOCK)
    return tl.load(maxima + at, at < groups, other=_LOWEST)


@triton.jit
def reaching(key, edge):
    """How many of [1, N] keys reach each edge."""
    return tl.sum((key >= edge[:, None]).to(tl.int32), 1)


@triton.jit
def bracket_by_groups(first, maxima, k, groups, BLOCK: tl.constexpr, WAYS: tl.constexpr):
    """Keys: one that none of the row's elements reaches, and one that k groups reach, and at most an eighth more unless
    they are equal. Any such key will do, and each step saved is a pass over the groups. `first` are the maxima of BLOCK
    groups, which stay in registers."""
    top = tl.max(first, 0)
    bottom = tl.min(tl.where(first == _LOWEST, _INFINITE, first), 0)
    for start in range(BLOCK, groups, BLOCK):
        key = group_keys(maxima, start, groups, BLOCK)
        top = tl.maximum(top, tl.max(key, 0))
        bottom = tl.minimum(bottom, tl.min(tl.where(key == _LOWEST, _INFINITE, key), 0))
    first = first[None, :]
    enough = bottom.to(tl.int64)
    beyond = top.to(tl.int64) + 1
    reach = groups
    way = tl.arange(0, WAYS).to(tl.int64)
    while (beyond - enough > 1) & (reach > k + k // 8):
        edge = enough + (way + 1) * ((beyond - enough + WAYS) // (WAYS + 1))
        least = tl.minimum(edge, _INFINITE).to(tl.int32)
        count = reaching(first, least)
        for start in range(BLOCK, groups, BLOCK):
            count += reaching(group_keys(maxima, start, groups, BLOCK)[None, :], least)
        reached = (count >= k) & (edge < beyond)
        reach = tl.min(tl.where(reached, count, reach), 0)
        enough = tl.max(tl.where(reached, edge, enough), 0)
        beyond = tl.min(tl.where(reached, beyond, tl.minimum(edge, beyond)), 0)
    # NaN is counted as inf, but stands above it.
    return tl.where(top == _INFINITE, _BEYOND, top.to(tl.int64) + 1), enough


@triton.jit
def list_groups(first, maxima, near, low, groups, BLOCK: tl.constexpr):
    """Lists the groups that reach `low` in near, in their order; how many they are. `first` as above."""
    least = tl.minimum(low, _INFINITE).to(tl.int32)
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
    low = value_of(tl.maximum(first_key(bin, DOMAIN), _LOWEST + 0x800000).to(tl.int32))
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
def parameter(scalar, values, row):
    """A row's own value, or the one that all rows share."""
    if values is not None:
        value = tl.load(values + row)
    else:
        value = scalar
    return value


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
    maxima, near, counts, tile_top, tile_sum, lengths, starts, top_k, top_ks, top_p, top_ps, state, numbers, listed,
    columns, programs, tiles, DOMAIN: tl.constexpr, STATISTICS: tl.constexpr, TOP_K: tl.constexpr, TOP_P: tl.constexpr,
    TOP_K_FIRST: tl.constexpr, TILE: tl.constexpr, GROUP: tl.constexpr, BLOCK: tl.constexpr, WAYS: tl.constexpr,
):  # fmt: skip
    """state int64 [rows, STATE]; numbers float32 [rows, NUMBERS]; listed int32 [rows], set to 0; near int32 as maxima,
    [rows, tiles * TILE // GROUP]. One program a row.

    A row with NaN, without weight, or with an impossible k or p has nothing inside.
    """
    row = tl.program_id(0)
    _, length = window_of(counts, 0, None, starts, lengths, row, columns, 1)
    possible = length > 0
    top = tl.full([], 0.0, tl.float32)
    total = top
    if STATISTICS:
        top, total = row_statistics(tile_top, tile_sum, row, tiles, DOMAIN, 256)
        possible &= (top == top) & (top > (float("-inf") if DOMAIN == LOGITS else 0.0))
        tl.store(numbers + row * NUMBERS + TOP, top)
        tl.store(numbers + row * NUMBERS + SUM, total)
    k = parameter(top_k, top_ks, row)
    p = parameter(top_p, top_ps, row)
    counted = possible
    if TOP_P:
        possible &= p > 0
    if TOP_K:
        possible &= k >= 1
        counted = k_rules(k, length, GROUP) == 0
    high = tl.full([], _BEYOND, tl.int64)
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
                low = tl.maximum(low, -_INFINITE)
            near_groups = list_groups(first, maxima, near, low, groups, BLOCK)
    at = state + row.to(tl.int64) * STATE
    tl.store(at + NEAR, near_groups)
    tl.store(at + HIGH, high)
    tl.store(at + LOW, low)
    tl.store(listed + row, 0)


@triton.jit
def better(score, place, best, best_place):
    """The larger of two scores with its place; of equal ones the first."""
    larger = score > best
    return tl.where(larger, score, best), tl.where(larger, place, best_place)


@triton.jit
def race_score(value, variate, DOMAIN: tl.constexpr):
    """The element with the largest of these is drawn with a probability in proportion to its weight."""
    return value - tl.log(variate) if DOMAIN == LOGITS else value / variate


@triton.jit
def near_share(count, part, programs, WHOLE: tl.constexpr):
    """Which of a row's listed groups a program takes: as many as fill tiles of WHOLE groups; none if count is -1."""
    share = tl.cdiv(tl.maximum(count, 0), programs * WHOLE) * WHOLE
    return part * share, tl.minimum(part * share + share, count)


@triton.jit
def load_near(x, near, start, end, length, UNIT: tl.constexpr, TILE: tl.constexpr, GROUP: tl.constexpr):
    """Values and columns of a tile of listed groups, and which of them there are."""
    slot = start + tl.arange(0, TILE) // GROUP
    ok = slot < end
    column = tl.load(near + slot, ok, other=0) * GROUP + tl.arange(0, TILE) % GROUP
    # The mask is one for UNIT neighbours; what the row's end cuts is read apart. ptxas is still given single reads: the
    # columns come from memory, and the compiler does not see that they are neighbours.
    whole = column // UNIT * UNIT + UNIT <= length
    value = tl.load(x + column, ok & whole, other=0)
    if UNIT > 1:
        value = tl.where(whole, value, tl.load(x + column, ok & (whole == 0) & (column < length), other=0))
    return value, column, ok & (column < length)


@triton.jit
def append(between, value, column, listed, list_value, list_column, capacity):
    """Puts a tile's elements behind those that a row's list has; what does not fit is counted alone."""
    count = tl.sum(between.to(tl.int32), 0)
    if count > 0:
        place = tl.atomic_add(listed, count) + tl.cumsum(between.to(tl.int32), 0) - 1
        fits = between & (place < capacity)
        tl.store(list_value + place, value, fits)
        tl.store(list_column + place, column, fits)


@triton.jit
def gather_kernel(
    x, indices, starts, lengths, maxima, near, state, numbers, listed, list_value, list_column, part_count, part_mass,
    part_score, part_column, seed, seeds, offset, offsets, x_row, columns, programs, chunk, tiles, capacity,
    DOMAIN: tl.constexpr, TOP_K: tl.constexpr, MASS: tl.constexpr, RACE: tl.constexpr, SEED: tl.constexpr,
    OFFSET: tl.constexpr, UNIT: tl.constexpr, TILE: tl.constexpr, NEAR_TILE: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    """What is inside: part_count int32, part_mass int64 and the winner of its race, part_score float32 and part_column
    int32, all [rows, programs]. What may be: list_value float32, list_column int32 [rows, capacity], in any order."""
    row = tl.program_id(0) // programs
    part = tl.program_id(0) % programs
    x, length = window_of(x, x_row, indices, starts, lengths, row, columns, UNIT)
    high = tl.load(state + row.to(tl.int64) * STATE + HIGH)
    low = tl.load(state + row.to(tl.int64) * STATE + LOW)
    # Comparisons in 32 bits take half the registers of those in 64.
    some_inside, some_kept = high < _BEYOND, low < _BEYOND
    high_key, low_key = tl.minimum(high, _BEYOND - 1).to(tl.int32), tl.minimum(low, _BEYOND - 1).to(tl.int32)
    if MASS:
        top = tl.load(numbers + row * NUMBERS + TOP)
        unit = unit_of(top, DOMAIN)
    if RACE:
        seed, offset, stream = source_of(seed, seeds, offset, offsets, row, SEED, OFFSET)
        best = tl.full([], float("-inf") if DOMAIN == LOGITS else 0.0, tl.float32)
        winner = tl.full([], -1, tl.int32)
    inside_count = tl.full([], 0, tl.int32)
    mass = tl.full([], 0, tl.int64)
    first_tile = part * chunk
    listed += row
    list_value += row.to(tl.int64) * capacity
    list_column += row.to(tl.int64) * capacity
    if TOP_K:
        # Where k rules nothing is inside.
        count = tl.load(state + row.to(tl.int64) * STATE + NEAR).to(tl.int32)
        near += row.to(tl.int64) * tiles * (TILE // GROUP)
        start, end = near_share(count, part, programs, NEAR_TILE // GROUP)
        for slot in range(start, end, NEAR_TILE // GROUP):
            value, column, ok = load_near(x, near, slot, end, length, UNIT, NEAR_TILE, GROUP)
            value = value.to(tl.float32)
            if DOMAIN == PROBS:
                value = tl.where(value < 0, 0.0, value)
            append(ok & (key_of(value) >= low_key), value, column, listed, list_value, list_column, capacity)
        chunk = tl.where(count < 0, chunk, 0)
    for i in range(chunk):
        tile = first_tile + i
        reach = may_reach(maxima, row, tile, tiles, low_key, TILE, GROUP) & some_kept
        if tl.max(reach.to(tl.int32), 0) > 0:
            first = tile * TILE
            column = first + tl.arange(0, TILE)
            ok = (column < length) & reach
            value = load_values(x, column, ok, DOMAIN)
            key = key_of(value)
            inside = ok & (key >= high_key) & some_inside
            between = ok & (key >= low_key) & (inside == 0)
            found = tl.sum(inside.to(tl.int32), 0)
            inside_count += found
            if found > 0:
                if MASS:
                    weight = in_units(weight_of(value, top, DOMAIN), top, unit, DOMAIN)
                    mass += tl.sum(tl.where(inside, weight, 0), 0)
                if RACE:
                    score = race_score(value, exponentials(seed, offset, stream, first, TILE), DOMAIN)
                    score, place = tl.max(tl.where(inside, score, best), 0, return_indices=True)
                    best, winner = better(score, first + place, best, winner)
            append(between, value, column, listed, list_value, list_column, capacity)
    tl.store(part_count + tl.program_id(0), inside_count)
    if MASS:
        tl.store(part_mass + tl.program_id(0), mass)
    if RACE:
        tl.store(part_score + tl.program_id(0), best)
        tl.store(part_column + tl.program_id(0), winner)


@triton.jit
def listed_keys(start, count, from_list, x, list_value, list_column, least, most, DOMAIN, TILE: tl.constexpr):
    """Keys and columns of the list's elements; or, where it overflowed, of the row's from `least` to `most`. _LOWEST
    for what is not there."""
    at = start + tl.arange(0, TILE)
    ok = at < count
    column = tl.load(list_column + at, ok & from_list, other=0)
    value = tl.load(list_value + at, ok & from_list, other=0)
    column = tl.where(from_list, column, at)
    value = tl.where(from_list, value, load_values(x, at, ok & (from_list == 0), DOMAIN))
    key = key_of(value)
    return tl.where(ok & (key >= least) & (key <= most), key, _LOWEST), column


@triton.jit
def mass_of(key, top, unit, DOMAIN: tl.constexpr):
    """The weight of an element, in units."""
    return in_units(weight_of(value_of(key), top, DOMAIN), top, unit, DOMAIN)


@triton.jit
def find_pivot(
    target, count, first, first_column, from_list, x, list_value, list_column, least, most, columns, top, unit,
    DOMAIN: tl.constexpr, MASS: tl.constexpr, LAST: tl.constexpr, TILE: tl.constexpr, WAYS: tl.constexpr,
):  # fmt: skip
    """Key and rank of the last of the fewest elements that measure `target` together, by their weights or each one; of
    all if they do not. `first` and `first_column` are the first TILE elements, which stay in registers.

    The search cuts the keys in WAYS + 1 parts at a time: a step waits for one sum over the program, however many keys
    it is for. It ends where one element is left between its bounds; the key is then at most that element's, and above
    the next one's, which keeps the same.
    """
    enough = least.to(tl.int64)
    beyond = most.to(tl.int64) + 1
    # Elements from `enough` on and from `beyond` on. Where they differ by one, it is the last that is taken.
    many = count
    few = count * 0
    way = tl.arange(0, WAYS).to(tl.int64)
    first_key = first[None, :]
    if MASS:
        first_mass = mass_of(first_key, top, unit, DOMAIN)
    while (beyond - enough > 1) & (many - few > 1):
        edge = enough + (way + 1) * ((beyond - enough + WAYS) // (WAYS + 1))
        # In 32 bits. An edge past all keys is not below `beyond`, and nothing comes of it; _LOWEST is below all edges.
        key_edge = tl.minimum(edge, _BEYOND - 1).to(tl.int32)
        counts = reaching(first_key, key_edge)
        if MASS:
            sums = tl.sum(tl.where(first_key >= key_edge[:, None], first_mass, 0), 1)
        for start in range(TILE, count, TILE):
            key, column = listed_keys(
                start, count, from_list, x, list_value, list_column, least, most, DOMAIN, TILE
            )  # fmt: skip
            key = key[None, :]
            counts += reaching(key, key_edge)
            if MASS:
                sums += tl.sum(tl.where(key >= key_edge[:, None], mass_of(key, top, unit, DOMAIN), 0), 1)
        if MASS == 0:
            sums = counts.to(tl.int64)
        reached = (sums >= target) & (edge < beyond)
        missed = (sums < target) & (edge < beyond)
        many = tl.min(tl.where(reached, counts, many), 0)
        few = tl.max(tl.where(missed, counts, few), 0)
        enough = tl.max(tl.where(reached, edge, enough), 0)
        beyond = tl.min(tl.where(missed, edge, beyond), 0)
        if MASS == 0:
            # From `enough` on there are as many as are wanted: nothing is left to find.
            few = tl.where(many == target, many, few)
    rank = columns.to(tl.int64)
    if many - few > 1:
        rank = tie_rank(
            target, enough, count, first, first_column, from_list, x, list_value, list_column, least, most, columns,
            top, unit, DOMAIN, MASS, LAST, TILE, WAYS,
        )  # fmt: skip
    return enough, rank


@triton.jit
def tie_rank(
    target, pivot, count, first, first_column, from_list, x, list_value, list_column, least, most, columns, top, unit,
    DOMAIN: tl.constexpr, MASS: tl.constexpr, LAST: tl.constexpr, TILE: tl.constexpr, WAYS: tl.constexpr,
):  # fmt: skip
    """The rank of the last element that is taken of those at the pivot; `columns` where all are."""
    way = tl.arange(0, WAYS).to(tl.int64)
    above = tl.full([], 0, tl.int64)
    ties = tl.full([], 0, tl.int64)
    key, column = first, first_column
    for start in range(0, count, TILE):
        if start > 0:
            key, column = listed_keys(
                start, count, from_list, x, list_value, list_column, least, most, DOMAIN, TILE
            )  # fmt: skip
        if MASS:
            above += tl.sum(tl.where(key > pivot, mass_of(key, top, unit, DOMAIN), 0), 0)
        else:
            above += tl.sum((key > pivot).to(tl.int64), 0)
        ties += tl.sum(((key == pivot) & (key > _LOWEST)).to(tl.int64), 0)
    # Equal elements measure the same, so as many of them as fill the rest are taken, by rank.
    wanted = target - above
    if MASS:
        equal = tl.maximum(mass_of(pivot.to(tl.int32), top, unit, DOMAIN), 1)
        wanted = (wanted + equal - 1) // equal
    few = tl.full([], -1, tl.int64)
    rank = tl.where(wanted < ties, columns - 1, few + 1)
    while rank - few > 1:
        edge = few + (way + 1) * ((rank - few + WAYS) // (WAYS + 1))
        taken = tl.zeros([WAYS], tl.int64)
        key, column = first, first_column
        for start in range(0, count, TILE):
            if start > 0:
                key, column = listed_keys(
                    start, count, from_list, x, list_value, list_column, least, most, DOMAIN, TILE
                )  # fmt: skip
            mine = columns - 1 - column if LAST else column
            tied = (key == pivot) & (key > _LOWEST)
            taken += tl.sum((tied[None, :] & (mine[None, :] <= edge[:, None])).to(tl.int64), 1)
        reached = taken >= wanted
        few = tl.max(tl.where(reached, few, tl.minimum(edge, rank - 1)), 0)
        rank = tl.min(tl.where(reached, tl.minimum(edge, rank), rank), 0)
    return tl.where(wanted < ties, rank, columns.to(tl.int64))


@triton.jit
def is_kept(key, column, pivot, rank, columns, LAST: tl.constexpr):
    """Whether elements are in the prefix that ends with this key and rank; the last of equal ones first, if LAST."""
    mine = columns - 1 - column if LAST else column
    return (key > pivot) | ((key == pivot) & (mine <= rank))


@triton.jit
def row_parts(parts, row, programs, BLOCK: tl.constexpr):
    """The sum, int64, over the programs of a row."""
    total = tl.full([], 0, tl.int64)
    for start in range(0, programs, BLOCK):
        part = start + tl.arange(0, BLOCK)
        total += tl.sum(tl.load(parts + row.to(tl.int64) * programs + part, part < programs, other=0).to(tl.int64), 0)
    return total


@triton.jit
def find_end(
    k, p, inside, inside_mass, sum, count, key, column, from_list, x, list_value, list_column, least, most, length,
    columns, top, unit,
    DOMAIN: tl.constexpr, TOP_K: tl.constexpr, TOP_P: tl.constexpr, TOP_K_FIRST: tl.constexpr, LAST: tl.constexpr,
    TILE: tl.constexpr, WAYS: tl.constexpr,
):  # fmt: skip
    """Pivot and rank of the prefix that the filters keep: of two prefixes the shorter one."""
    pivot = least.to(tl.int64)
    rank = columns.to(tl.int64)
    if TOP_K:
        if k < length:
            pivot, rank = find_pivot(
                k.to(tl.int64) - inside, count, key, column, from_list, x, list_value, list_column, least, most,
                columns, top, unit, DOMAIN, False, LAST, TILE, WAYS,
            )  # fmt: skip
    if TOP_P:
        if p < 1:
            goal = p.to(tl.float64) * unit * lift_of(top, DOMAIN)
            if TOP_K_FIRST:
                if k < length:
                    first = inside_mass
                    some, some_column = key, column
                    for start in range(0, count, TILE):
                        if start > 0:
                            some, some_column = listed_keys(
                                start, count, from_list, x, list_value, list_column, least, most, DOMAIN, TILE
                            )  # fmt: skip
                        ok = (some > _LOWEST) & is_kept(some, some_column, pivot, rank, columns, LAST)
                        first += tl.sum(tl.where(ok, mass_of(some, top, unit, DOMAIN), 0), 0)
                    goal = p.to(tl.float64) * first
                else:
                    goal *= sum
            elif DOMAIN == LOGITS:
                goal *= sum
            # No sum of a row reaches 2^62.
            target = tl.maximum(tl.minimum(goal, 4611686018427387904.0).to(tl.int64), 1) - inside_mass
            p_pivot, p_rank = find_pivot(
                target, count, key, column, from_list, x, list_value, list_column, least, most, columns, top, unit,
                DOMAIN, True, LAST, TILE, WAYS,
            )  # fmt: skip
            shorter = (p_pivot > pivot) | ((p_pivot == pivot) & (p_rank < rank))
            pivot = tl.where(shorter, p_pivot, pivot)
            rank = tl.where(shorter, p_rank, rank)
    return pivot, rank


@triton.jit
def resolve_kernel(
    x, indices, starts, lengths, state, numbers, listed, list_value, list_column, part_count, part_mass, part_score,
    part_column, top_k, top_ks, top_p, top_ps, seed, seeds, offset, offsets, samples, valid, x_row, columns, programs,
    chunk, capacity, DOMAIN: tl.constexpr, TOP_K: tl.constexpr, TOP_P: tl.constexpr, TOP_K_FIRST: tl.constexpr,
    MASS: tl.constexpr, RACE: tl.constexpr, PLACES: tl.constexpr, LAST: tl.constexpr, SEED: tl.constexpr,
    OFFSET: tl.constexpr, UNIT: tl.constexpr, CHUNK: tl.constexpr, TILE: tl.constexpr, WAYS: tl.constexpr,
):  # fmt: skip
    """The pivot of a row into state, and what the caller is after: the sum of the prefix (MASS), the token that wins
    the race over it (RACE), or in part_count where the elements of each program come (PLACES; not where groups are
    listed). One program a row."""
    row = tl.program_id(0)
    x, length = window_of(x, x_row, indices, starts, lengths, row, columns, UNIT)
    # Where anything is listed, the first is a key; the last is one wherever anything is kept.
    pivot = tl.load(state + row.to(tl.int64) * STATE + HIGH)
    most = (pivot - 1).to(tl.int32)
    least = tl.load(state + row.to(tl.int64) * STATE + LOW).to(tl.int32)
    count = tl.load(listed + row)
    from_list = count <= capacity
    count = tl.where(from_list, count, length)
    list_value += row.to(tl.int64) * capacity
    list_column += row.to(tl.int64) * capacity
    inside = row_parts(part_count, row, programs, BINS)
    inside_mass = inside * 0
    top = tl.full([], 0.0, tl.float32)
    unit = tl.full([], 0.0, tl.float32)
    sum = tl.full([], 0.0, tl.float32)
    if MASS:
        top = tl.load(numbers + row * NUMBERS + TOP)
        sum = tl.load(numbers + row * NUMBERS + SUM)
        unit = unit_of(top, DOMAIN)
        inside_mass = row_parts(part_mass, row, programs, BINS)
    k = parameter(top_k, top_ks, row)
    p = parameter(top_p, top_ps, row)
    rank = columns.to(tl.int64)
    key, column = listed_keys(0, count, from_list, x, list_value, list_column, least, most, DOMAIN, TILE)
    if count > 0:
        pivot, rank = find_end(
            k, p, inside, inside_mass, sum, count, key, column, from_list, x, list_value, list_column, least, most,
            length, columns, top, unit, DOMAIN, TOP_K, TOP_P, TOP_K_FIRST, LAST, TILE, WAYS,
        )  # fmt: skip
    if RACE:
        seed, offset, stream = source_of(seed, seeds, offset, offsets, row, SEED, OFFSET)
        best, winner = row_winner(part_score, part_column, row, programs, DOMAIN, BINS)
    kept = inside
    mass = inside_mass
    if PLACES:
        placed = tl.load(state + row.to(tl.int64) * STATE + NEAR) < 0
        places = tl.zeros([BINS], tl.int32)
    for start in range(0, count, TILE):
        if start > 0:
            key, column = listed_keys(
                start, count, from_list, x, list_value, list_column, least, most, DOMAIN, TILE
            )  # fmt: skip
        ok = (key > _LOWEST) & is_kept(key, column, pivot, rank, columns, LAST)
        kept += tl.sum(ok.to(tl.int64), 0)
        if MASS:
            mass += tl.sum(tl.where(ok, mass_of(key, top, unit, DOMAIN), 0), 0)
        if PLACES:
            if placed:
                places += tl.histogram(column // (chunk * CHUNK), BINS, mask=ok)
        if RACE:
            variate = exponentials_at(seed, offset, stream, column)
            lowest = float("-inf") if DOMAIN == LOGITS else 0.0
            score = tl.where(ok, race_score(value_of(key), variate, DOMAIN), lowest)
            tile_best = tl.max(score, 0)
            first = tl.min(tl.where(ok & (score == tile_best), column, columns), 0)
            ahead = (tile_best > best) | ((tile_best == best) & (tile_best > lowest) & (first < winner))
            best = tl.where(ahead, tile_best, best)
            winner = tl.where(ahead, first, winner)
    at = state + row.to(tl.int64) * STATE
    tl.store(at + PIVOT, pivot)
    tl.store(at + RANK, rank)
    tl.store(at + KEPT, kept)
    if MASS:
        tl.store(numbers + row * NUMBERS + INSIDE, (mass.to(tl.float64) / unit / lift_of(top, DOMAIN)).to(tl.float32))
    if PLACES:
        part = tl.arange(0, BINS)
        mine = part_count + row.to(tl.int64) * programs + part
        places += tl.load(mine, part < programs, other=0)
        tl.store(mine, tl.cumsum(places, 0) - places, placed & (part < programs))
    if RACE:
        tl.store(samples + row, tl.maximum(winner, 0).to(samples.dtype.element_ty))
        tl.store(valid + row, (winner >= 0).to(tl.int8))


@triton.jit
def row_winner(part_score, part_column, row, programs, DOMAIN: tl.constexpr, BLOCK: tl.constexpr):
    """The best score of a row's programs and its column, -1 if there is none; the first of equal ones."""
    best = tl.full([], float("-inf") if DOMAIN == LOGITS else 0.0, tl.float32)
    winner = tl.full([], -1, tl.int32)
    for start in range(0, programs, BLOCK):
        part = start + tl.arange(0, BLOCK)
        ok = part < programs
        at = row.to(tl.int64) * programs + part
        score = tl.load(part_score + at, ok, other=float("-inf"))
        column = tl.load(part_column + at, ok, other=-1)
        score, place = tl.max(score, 0, return_indices=True)
        column = tl.max(tl.where(part == start + place, column, -1), 0)
        best, winner = better(score, column, best, winner)
    return best, winner
