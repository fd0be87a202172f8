"""The first elements of a row in the order (value descending, index ascending), found without sorting.

Top-k, top-p and their combinations all keep a prefix of that order. The prefix is described by its pivot: the key and
the index of its last element. Four launches find it; they read the row once and some of it again:

    scan     the largest value of each group of GROUP neighbours; largest value and sum of each tile; where group maxima
             do not bound k (see below), a histogram of the values' leading bits
    bracket  two keys, high and low: elements at or above high are in the prefix, elements below low are not
    gather   sums the elements at or above high, and lists those between low and high; it reads only groups whose
             maximum reaches low
    resolve  searches the list for the pivot

Group maxima bound k where k is small against the number of groups. If T is the k-th largest group maximum, at least k
elements are T or more. So the first k elements are all T or more, ties included, and only groups whose maximum is T or
more hold one of them: these are the row's candidate groups. For values in random order, G groups have about
-G log(1 - k / G) elements at or above T, which is little more than k.

An example with groups of two and k = 2: the row 5 1 | 7 6 | 2 0 | 3 4 has the maxima 5, 7, 2, 4. T is 5, the candidate
groups are the first two, and their elements at or above T are 5, 7 and 6. The search in that list ends at pivot 6.

A sample from the prefix is drawn by an exponential race: each element's weight is divided by an exponential variate of
its own, and the largest quotient wins.

Sums over programs are of integers, and of race scores the largest is taken, so results do not depend on the order of
programs. Weights are added in fixed point, as multiples of 2^-40 of a power of two at or above the row's largest.
"""

import triton
import triton.language as tl

from flashinfer.ops._device.rows import multiple

BINS = tl.constexpr(256)
# DOMAIN, what the values are: numbers without weights; probabilities, which are their own weights (a negative one
# counts as 0); or logits, whose weight is their exponential.
SCORES = tl.constexpr(0)
PROBS = tl.constexpr(1)
LOGITS = tl.constexpr(2)
# Words of a row in `state`, int64 [rows, STATE]. From bracket: keys at HIGH or above are in the prefix, keys below LOW
# are not; NEAR is the number of candidate groups, which are listed, or -1 where group maxima do not bound k.
HIGH = tl.constexpr(0)
LOW = tl.constexpr(1)
# From resolve: elements above key PIVOT are in the prefix, and those at PIVOT up to rank RANK; they are KEPT in number.
PIVOT = tl.constexpr(2)
RANK = tl.constexpr(3)
KEPT = tl.constexpr(4)
CANDIDATES = tl.constexpr(5)
STATE = tl.constexpr(6)
# Words of a row in `numbers`, float32 [rows, NUMBERS]: the largest value (NaN where the row holds NaN or inf), the sum
# of weights, and the prefix's sum.
TOP = tl.constexpr(0)
SUM = tl.constexpr(1)
INSIDE = tl.constexpr(2)
NUMBERS = tl.constexpr(3)

# Below the keys of all values, and above them (an int64).
LOWEST = tl.constexpr(-(1 << 31))
BEYOND = tl.constexpr(1 << 31)
# The key of inf; that of NaN is above. Group maxima count NaN as inf.
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
    """The bin of a key. Probabilities have 8 bins for each power of two from 2^-31 to 2; other values 4 for each from
    2^-16 to 2^16, for either sign. Larger magnitudes are in the outermost bin, smaller ones in the bin next to zero.

    A probability of 0.5 has the key 0x3F000000, whose upper 12 bits are 1008: its bin is 1008 - 768 = 240.
    """
    if DOMAIN == PROBS:
        return tl.minimum(tl.maximum((key >> 20) - 768, 0), 255)
    upper = tl.minimum(tl.maximum((key >> 21) - 444, 0), 127)
    lower = tl.minimum(tl.maximum((~key >> 21) - 444, 0), 127)
    return tl.where(key >= 0, 128 + upper, 127 - lower)


@triton.jit
def first_key(bin, DOMAIN: tl.constexpr):
    """The smallest key of a bin, as int64; for bin 256, BEYOND."""
    bin = bin.to(tl.int64)
    if DOMAIN == PROBS:
        key = tl.where(bin == 0, 0, (bin + 768) << 20)
    else:
        key = tl.where(bin < 128, -((572 - bin) << 21), tl.where(bin == 128, 0, (bin + 316) << 21))
        key = tl.where(bin == 0, LOWEST, key)
    return tl.where(bin == BINS, BEYOND, key)


@triton.jit
def weight_of(value, top, DOMAIN: tl.constexpr):
    """What a value adds to the sums: itself, or for logits exp(value - top), `top` the row's largest."""
    return tl.exp(value - top) if DOMAIN == LOGITS else value


@triton.jit
def fixed_point_scale(top, DOMAIN: tl.constexpr):
    """The power of two that turns a weight, times lift_of(top), into fixed point: the row's largest weight becomes at
    most 2^41."""
    if DOMAIN == LOGITS:
        return top * 0 + 1099511627776.0
    exponent = (top.to(tl.int32, bitcast=True) >> 23) & 255
    return (tl.where(exponent < 64, 230, 294) - exponent << 23).to(tl.float32, bitcast=True)


@triton.jit
def small_row_scale(top, DOMAIN: tl.constexpr):
    """A second factor of the fixed-point scale: 2^64 where the row's largest is below 2^-63, since one float32 does not
    hold the whole scale there; else 1."""
    return tl.where(top < 1.0842021724855044e-19, 18446744073709551616.0, 1.0) if DOMAIN == PROBS else 1.0


@triton.jit
def to_fixed_point(weight, top, scale, DOMAIN: tl.constexpr):
    """A float32 weight as an int64 in fixed point."""
    return (weight * small_row_scale(top, DOMAIN) * scale).to(tl.int64)


@triton.jit
def window_of(x, x_row, window, row, columns, UNIT: tl.constexpr):
    """Pointer to a row's first column, and its number of columns.

    window : pointers indices (the row of x that a row reads), starts (its first column) and lengths; each may be None.
    Without starts a row begins at column 0, without lengths it ends with x's columns.
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
    """Values as float32, 0 where not `inside`; of probabilities negative ones are 0."""
    value = tl.load(x + column, inside, other=0).to(tl.float32)
    if DOMAIN == PROBS:
        value = tl.where(value < 0, 0.0, value)
    return value


@triton.jit
def load_tile(x, first, length, DOMAIN: tl.constexpr, TILE: tl.constexpr):
    """The values of columns from `first` on, 0 past the row's end."""
    column = first + tl.arange(0, TILE)
    # Loads without a mask take 16 bytes of an aligned row each, and all are in flight before the first is used.
    if first + TILE <= length:
        value = tl.load(x + column).to(tl.float32)
    else:
        value = tl.load(x + column, column < length, other=0).to(tl.float32)
    if DOMAIN == PROBS:
        value = tl.where(value < 0, 0.0, value)
    return value


@triton.jit
def load_for_max(x, tile, length, TILE: tl.constexpr):
    """The values of a tile for a maximum: inf for NaN, -inf past the row's end."""
    column = tile * TILE + tl.arange(0, TILE)
    if tile * TILE + TILE <= length:
        value = tl.load(x + column).to(tl.float32)
    else:
        value = tl.load(x + column, column < length, other=float("-inf")).to(tl.float32)
    return tl.where(value != value, float("inf"), value)


@triton.jit
def row_statistics(tile_top, tile_sum, row, tiles, DOMAIN: tl.constexpr, BLOCK: tl.constexpr):
    """The largest value of a row (NaN if that of a tile is) and the sum of its weights, from those of its tiles."""
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
def groups_bound_k(k, length, GROUP: tl.constexpr):
    """Whether the row's group maxima bound k: it is at most a quarter of the number of groups."""
    return k <= tl.cdiv(length, GROUP) // 4


@triton.jit
def may_reach(maxima, row, tile, tiles, key, TILE: tl.constexpr, GROUP: tl.constexpr):
    """Which elements of a tile are in a group whose maximum is `key` or above."""
    maxima += (row.to(tl.int64) * tiles + tile) * (TILE // GROUP)
    largest = tl.load(maxima + tl.arange(0, TILE) // GROUP, tile < tiles, other=LOWEST)
    return largest >= tl.minimum(key, INFINITE).to(tl.int32)


@triton.jit
def count_reaching(key, edge):
    """How many of the keys [1, N] are at or above each edge."""
    return tl.sum((key >= edge[:, None]).to(tl.int32), 1)


@triton.jit
def row_parameter(scalar, values, row):
    """The row's element of `values`, or `scalar`, which all rows share, where `values` is None."""
    if values is not None:
        value = tl.load(values + row)
    else:
        value = scalar
    return value


@triton.jit
def larger_score(score, place, best, best_place):
    """The larger of two scores, with its position; of equal scores `best`."""
    larger = score > best
    return tl.where(larger, score, best), tl.where(larger, place, best_place)


@triton.jit
def race_score(value, variate, DOMAIN: tl.constexpr):
    """The score in an exponential race: the element with the largest one is a sample in proportion to the weights."""
    return value - tl.log(variate) if DOMAIN == LOGITS else value / variate


@triton.jit
def candidate_share(count, part, programs, WHOLE: tl.constexpr):
    """The range (first, end) of a row's `count` candidate groups that program `part` reads, in whole tiles of WHOLE
    groups; an empty range if count is -1."""
    share = tl.cdiv(tl.maximum(count, 0), programs * WHOLE) * WHOLE
    return part * share, tl.minimum(part * share + share, count)


@triton.jit
def load_candidates(x, candidates, start, end, length, UNIT: tl.constexpr, TILE: tl.constexpr, GROUP: tl.constexpr):
    """Values and columns of a tile of candidate groups, and which of its elements exist."""
    slot = start + tl.arange(0, TILE) // GROUP
    ok = slot < end
    column = tl.load(candidates + slot, ok, other=0) * GROUP + tl.arange(0, TILE) % GROUP
    # UNIT neighbours share a mask; those that the row's end cuts have a load of their own. The loads stay scalar in
    # PTX: the columns come from memory, so the compiler cannot see that they are neighbours.
    whole = column // UNIT * UNIT + UNIT <= length
    value = tl.load(x + column, ok & whole, other=0)
    if UNIT > 1:
        value = tl.where(whole, value, tl.load(x + column, ok & (whole == 0) & (column < length), other=0))
    return value, column, ok & (column < length)


@triton.jit
def listed_keys(start, count, from_list, x, list_value, list_column, least, most, DOMAIN, TILE: tl.constexpr):
    """Keys and columns of TILE elements of the list; where the list overflowed, of the row's elements with keys from
    `least` to `most`. Lanes without an element have the key LOWEST."""
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
    """Whether elements are in the prefix that ends at this pivot and rank. The rank of an element is its column, with
    LAST its distance from the last column: of equal elements the last come first then. Where LAST is None, the rank of
    a prefix is past all columns: of equal elements all are in it."""
    order = columns - 1 - column if LAST else column
    return (key > pivot) | ((key == pivot) & (order <= rank))


@triton.jit
def row_winner(part_score, part_column, row, programs, DOMAIN: tl.constexpr, BLOCK: tl.constexpr):
    """The best race score of a row's programs, and its column, -1 if there is none; of equal scores the first."""
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
        best, winner = larger_score(score, column, best, winner)
    return best, winner
