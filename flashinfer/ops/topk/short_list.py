"""Top-k of a small k, first half: a sample of a row bounds its k-th largest, and a pass lists the elements above it.

Grid: bound_kernel one program a row; list_kernel (rows, programs), each with `chunk` tiles of TILE columns; with few
programs each computes the bound itself.
Warps: all share a tile. Shared memory: reductions, scans and a histogram.
Inputs: x [rows, columns], a window of each row. Outputs: bounds int64 [rows]; counts and ties int32 [rows, programs];
list_value and list_column [rows, programs, capacity].
Method: docs/rooms/topk.md.
"""

import triton
import triton.language as tl

from flashinfer.ops._device.pdl import begin as wait
from flashinfer.ops._device.prefix import key_of, window_of

# No value has this key; that of NaN is the largest.
_LOWEST = tl.constexpr(-(1 << 31))
_HIGHEST = tl.constexpr((1 << 31) - 1)
# Neighbouring elements that are sampled together.
SIDE = tl.constexpr(4)


@triton.jit
def max_and_min(a, b, c, d):
    return tl.maximum(a, c), tl.minimum(b, d)


@triton.jit
def bound_of(x, k, length, WHOLE: tl.constexpr, GROUPS: tl.constexpr, MEMBERS: tl.constexpr):
    """A key that at least k elements of the row very likely exceed, and few more; _LOWEST for a row of up to WHOLE.

    Also the number of keys after it in which the k-th largest very likely is: an uint32 in the bits of an int32.

    A share k / length of the elements is to be above the bound, so a share u = 1 - (1 - k / length)^m of groups of m
    elements has an element above it. Of the maxima of GROUPS such groups, in descending order, the bound is the one at
    index u GROUPS, plus 4.5 standard deviations, plus 4 for small u GROUPS: one row in 10^5 has fewer than k
    above. m is about length / 2 k, where u is most precise.

    For example, k = 2048 of 65536 gives m = 16 and u = 1 - (31/32)^16 = 0.40: 102 of 256 maxima are expected above, the
    standard deviation is 7.8, so the bound is about the 141st largest maximum.
    """
    bound = tl.full([], _LOWEST, tl.int32)
    likely_range = tl.full([], -1, tl.int32)
    if (length > WHOLE) & (k < length):
        size = tl.minimum(tl.maximum((length / (2.0 * k)).to(tl.int32), 1), MEMBERS)
        # Members of a group are in different cells of the row, at a pseudo-random place of each: a row with a period
        # is sampled at all phases. SIDE neighbours belong to different groups, which takes a quarter of the sectors.
        # With fewer members the last one is read again: with masks, ptxas would wait for the first half of the loads
        # before it starts the second.
        member = tl.minimum(tl.arange(0, MEMBERS), size - 1)[None, :]
        cell = (member * (GROUPS // SIDE) + (tl.arange(0, GROUPS) // SIDE)[:, None]).to(tl.uint32)
        WIDE: tl.constexpr = (1 << 32) // (GROUPS // SIDE * MEMBERS)
        random_offset = (cell * 2654435769) & (WIDE - 1)
        place = tl.umulhi(cell * WIDE + random_offset, (length - SIDE + 1).to(tl.uint32)) // SIDE * SIDE
        column = place.to(tl.int32) + (tl.arange(0, GROUPS) % SIDE)[:, None]
        largest = key_of(tl.max(tl.load(x + column).to(tl.float32), 1))
        share = 1 - tl.exp(size * tl.log(1 - k.to(tl.float32) / length))
        margin = 4.5 * tl.sqrt(GROUPS * share * (1 - share)) + 4
        # Bins of equal width, the highest first. The bound is the least maximum in the bin that reaches the index.
        high, low = tl.reduce((largest, largest), 0, max_and_min)
        width = (high.to(tl.uint32, bitcast=True) - low.to(tl.uint32, bitcast=True)).to(tl.float32)
        shift = tl.maximum((width.to(tl.int32, bitcast=True) >> 23) - 127 - 7, 0).to(tl.uint32)
        bin = ((high - largest).to(tl.uint32, bitcast=True) >> shift).to(tl.int32)
        reached = tl.cumsum(tl.histogram(bin, 256), 0)
        bins = tl.sum((reached < GROUPS * share + margin).to(tl.int32) * 65536 + (reached < GROUPS * share - margin), 0)
        last = bins >> 16
        if last < 256:
            bound = tl.min(tl.where(bin <= last, largest, _HIGHEST), 0)
            range_above = (high - bound).to(tl.uint32, bitcast=True) - ((bins & 65535).to(tl.uint32) << shift)
            # With so few, the k-th may be above all sampled elements.
            range_above = tl.where(GROUPS * share < margin, tl.minimum(range_above, _HIGHEST) * 2, range_above)
            likely_range = tl.maximum(range_above, 1).to(tl.int32, bitcast=True)
    return bound, likely_range


@triton.jit
def pack_halves(high, low):
    return high.to(tl.int64) << 32 | low.to(tl.uint32, bitcast=True).to(tl.int64)


@triton.jit
def bound_kernel(
    x, window, bounds, x_row, k, columns, UNIT: tl.constexpr, WHOLE: tl.constexpr, GROUPS: tl.constexpr,
    MEMBERS: tl.constexpr,
):  # fmt: skip
    """bounds int64 [rows]: the results of bound_of, the first in the high 32 bits. One program a row."""
    row = tl.program_id(0)
    x, length = window_of(x, x_row, window, row, columns, UNIT)
    bound, likely_range = bound_of(x, k, length, WHOLE, GROUPS, MEMBERS)
    tl.store(bounds + row, pack_halves(bound, likely_range))


@triton.jit
def load_part(x, first, end, TILE: tl.constexpr):
    """A tile of values from column `first` on, 0 from `end` on."""
    column = first + tl.arange(0, TILE)
    # Without a mask aligned rows are read 16 bytes at a time.
    if first + TILE <= end:
        value = tl.load(x + column)
    else:
        value = tl.load(x + column, column < end, other=0)
    return value


@triton.jit
def neighbours(x, UNIT: tl.constexpr):
    """x as UNIT tensors, tensor i with the elements i, i + UNIT, i + 2 UNIT ...

    For example, 0 1 2 3 4 5 6 7 with UNIT 4 gives 0 4, 1 5, 2 6 and 3 7.
    """
    if UNIT == 1:
        return (x,)
    elif UNIT == 2:
        return tl.split(tl.reshape(x, [x.shape[0] // 2, 2]))
    elif UNIT == 4:
        a, b = tl.split(tl.reshape(x, [x.shape[0] // 2, 2]))
        c, d = neighbours(a, 2), neighbours(b, 2)
        return c[0], d[0], c[1], d[1]
    else:
        a, b = tl.split(tl.reshape(x, [x.shape[0] // 2, 2]))
        c, d = neighbours(a, 4), neighbours(b, 4)
        return c[0], d[0], c[1], d[1], c[2], d[2], c[3], d[3]


@triton.jit
def listed_key(value, column, end):
    return tl.where(column < end, key_of(value.to(tl.float32)), _LOWEST)


@triton.jit
def list_kernel(
    x, window, bounds, counts, ties, list_value, list_column, x_row, k, columns, programs, chunk, capacity,
    FINDS_BOUND: tl.constexpr, UNIT: tl.constexpr, WHOLE: tl.constexpr, GROUPS: tl.constexpr, MEMBERS: tl.constexpr,
    TILE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """bounds int64 [rows], computed here if FINDS_BOUND; counts and ties int32 [rows, programs], the number of elements
    above and equal to the bound; list_value, of x's dtype, and list_column int32 [rows, programs, capacity], the
    elements above it in the order of their columns."""
    wait(PDL)
    row, part = tl.program_id(0), tl.program_id(1)
    program = row * programs + part
    x, length = window_of(x, x_row, window, row, columns, UNIT)
    first = part * chunk * TILE
    end = tl.minimum(first + chunk * TILE, length)
    # This load overlaps the computation of the bound.
    value = load_part(x, first, end, TILE)
    if FINDS_BOUND:
        bound, likely_range = bound_of(x, k, length, WHOLE, GROUPS, MEMBERS)
        tl.store(bounds + row, pack_halves(bound, likely_range), part == 0)
    else:
        bound = (tl.load(bounds + row) >> 32).to(tl.int32)
    list_value += program.to(tl.int64) * capacity
    list_column += program.to(tl.int64) * capacity
    count = tl.full([], 0, tl.int32)
    equal = tl.full([], 0, tl.int32)
    for i in range(chunk):
        # Each tensor has one of the elements that a thread has read at once, so no data moves between threads.
        values = neighbours(value, UNIT)
        column = first + tl.arange(0, TILE // UNIT) * UNIT
        # Elements above are counted in the low 16 bits, equal ones in the high 16 bits.
        both = tl.zeros([TILE // UNIT], tl.int32)
        for j in tl.static_range(UNIT):
            key = listed_key(values[j], column + j, end)
            both += (key > bound).to(tl.int32) + ((key == bound) & (column + j < end)).to(tl.int32) * 65536
        to = count + ((tl.cumsum(both, 0) - both) & 65535)
        for j in tl.static_range(UNIT):
            above = listed_key(values[j], column + j, end) > bound
            tl.store(list_value + to, values[j], above & (to < capacity))
            tl.store(list_column + to, column + j, above & (to < capacity))
            to += above.to(tl.int32)
        sum = tl.sum(both, 0)
        count += sum & 65535
        equal += sum >> 16
        first += TILE
        if first < end:
            value = load_part(x, first, end, TILE)
    tl.store(counts + program, count)
    tl.store(ties + program, equal)
