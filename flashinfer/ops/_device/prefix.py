"""The first elements of a row in the order (value descending, index ascending), found without sorting.

Top-k, top-p and their combinations all keep a prefix of that order. It is given by its pivot: the key and the index
of its last element. Four launches find it, however a row's programs share it; they read the row once and some of it
again:

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
LOWEST = tl.constexpr(-(1 << 31))
BEYOND = tl.constexpr(1 << 31)
# The key of inf; those of NaN are above. Group maxima count NaN as inf.
INFINITE = tl.constexpr(0x7F800000)


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
        key = tl.where(bin == 0, LOWEST, key)
    return tl.where(bin == BINS, BEYOND, key)


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
def window_of(x, x_row, window, row, columns, UNIT: tl.constexpr):
    """Where a row begins and how many columns it has: all, or those from its start on, as many as its length.

    window : pointers indices (the row of x for each row), starts and lengths; None for what there is not.
    """
    source = row.to(tl.int64)
    if window.indices is not None:
        source = tl.load(window.indices + row).to(tl.int64)
    x += source * multiple(x_row, UNIT)
    begin = 0
    if window.starts is not None:
        begin = tl.minimum(tl.maximum(tl.load(window.starts + row), 0), columns)
    length = columns - begin
    if window.lengths is not None:
        length = tl.minimum(tl.maximum(tl.load(window.lengths + row), 0), length)
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
def may_reach(maxima, row, tile, tiles, key, TILE: tl.constexpr, GROUP: tl.constexpr):
    """Which elements of a tile are in a group that has one at `key` or above."""
    maxima += (row.to(tl.int64) * tiles + tile) * (TILE // GROUP)
    largest = tl.load(maxima + tl.arange(0, TILE) // GROUP, tile < tiles, other=LOWEST)
    return largest >= tl.minimum(key, INFINITE).to(tl.int32)


@triton.jit
def reaching(key, edge):
    """How many of [1, N] keys reach each edge."""
    return tl.sum((key >= edge[:, None]).to(tl.int32), 1)


@triton.jit
def parameter(scalar, values, row):
    """A row's own value, or the one that all rows share."""
    if values is not None:
        value = tl.load(values + row)
    else:
        value = scalar
    return value


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
def listed_keys(start, count, from_list, x, list_value, list_column, least, most, DOMAIN, TILE: tl.constexpr):
    """Keys and columns of the list's elements; or, where it overflowed, of the row's from `least` to `most`. LOWEST
    for what is not there."""
    at = start + tl.arange(0, TILE)
    ok = at < count
    column = tl.load(list_column + at, ok & from_list, other=0)
    value = tl.load(list_value + at, ok & from_list, other=0)
    column = tl.where(from_list, column, at)
    value = tl.where(from_list, value, load_values(x, at, ok & (from_list == 0), DOMAIN))
    key = key_of(value)
    return tl.where(ok & (key >= least) & (key <= most), key, LOWEST), column


@triton.jit
def is_kept(key, column, pivot, rank, columns, LAST: tl.constexpr):
    """Whether elements are in the prefix that ends with this key and rank; the last of equal ones first, if LAST."""
    mine = columns - 1 - column if LAST else column
    return (key > pivot) | ((key == pivot) & (mine <= rank))


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
