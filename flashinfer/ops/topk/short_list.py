"""Top-k of a small k, first half: a sample of a row bounds its k largest, and a pass lists what is above the bound.

Grid: bound_kernel one program a row; list_kernel (rows, programs), each with `chunk` tiles of TILE columns; it finds
the bound itself where programs are few.
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
# Neighbours that are sampled together.
SIDE = tl.constexpr(4)


@triton.jit
def highest_and_lowest(a, b, c, d):
    return tl.maximum(a, c), tl.minimum(b, d)


@triton.jit
def bound_of(x, k, length, WHOLE: tl.constexpr, GROUPS: tl.constexpr, MEMBERS: tl.constexpr):
    """A key that k of the row's elements are above, in all likelihood, and few more; _LOWEST for a row up to WHOLE.

    Of k / length of the elements, each is above the bound to be; u = 1 - (1 - k / length)^m of groups of m have one
    above. So among the GROUPS largest of such groups the bound is the one that comes 4.5 deviations, and 4 for where
    they are few, after u of them: one row in 10^5 has fewer than k above. m of about length / 2 k has u where it
    decides most.

    And how many keys from there on the k-th is among, in all likelihood: as an uint32, bit by bit.
    """
    bound = tl.full([], _LOWEST, tl.int32)
    across = tl.full([], -1, tl.int32)
    if (length > WHOLE) & (k < length):
        size = tl.minimum(tl.maximum((length / (2.0 * k)).to(tl.int32), 1), MEMBERS)
        # Members of a group are spread over the row, by chance within a cell each: no period of the row hits all alike.
        # SIDE neighbours are of as many groups, a quarter of the sectors then. Where fewer members count, the last is
        # read again: behind masks the compiler (ptxas) would wait for the first half before it reads the second.
        member = tl.minimum(tl.arange(0, MEMBERS), size - 1)[None, :]
        cell = (member * (GROUPS // SIDE) + (tl.arange(0, GROUPS) // SIDE)[:, None]).to(tl.uint32)
        WIDE: tl.constexpr = (1 << 32) // (GROUPS // SIDE * MEMBERS)
        chance = (cell * 2654435769) & (WIDE - 1)
        place = tl.umulhi(cell * WIDE + chance, (length - SIDE + 1).to(tl.uint32)) // SIDE * SIDE
        column = place.to(tl.int32) + (tl.arange(0, GROUPS) % SIDE)[:, None]
        largest = key_of(tl.max(tl.load(x + column).to(tl.float32), 1))
        share = 1 - tl.exp(size * tl.log(1 - k.to(tl.float32) / length))
        margin = 4.5 * tl.sqrt(GROUPS * share * (1 - share)) + 4
        # Bins of equal width, the highest first. The bound is the least group of the bin that reaches what is wanted.
        high, low = tl.reduce((largest, largest), 0, highest_and_lowest)
        width = (high.to(tl.uint32, bitcast=True) - low.to(tl.uint32, bitcast=True)).to(tl.float32)
        shift = tl.maximum((width.to(tl.int32, bitcast=True) >> 23) - 127 - 7, 0).to(tl.uint32)
        bin = ((high - largest).to(tl.uint32, bitcast=True) >> shift).to(tl.int32)
        reached = tl.cumsum(tl.histogram(bin, 256), 0)
        bins = tl.sum((reached < GROUPS * share + margin).to(tl.int32) * 65536 + (reached < GROUPS * share - margin), 0)
        last = bins >> 16
        if last < 256:
            bound = tl.min(tl.where(bin <= last, largest, _HIGHEST), 0)
            over = (high - bound).to(tl.uint32, bitcast=True) - ((bins & 65535).to(tl.uint32) << shift)
            # So few that the k-th may be above all that were seen.
            over = tl.where(GROUPS * share < margin, tl.minimum(over, _HIGHEST) * 2, over)
            across = tl.maximum(over, 1).to(tl.int32, bitcast=True)
    return bound, across


@triton.jit
def joined(high, low):
    return high.to(tl.int64) << 32 | low.to(tl.uint32, bitcast=True).to(tl.int64)


@triton.jit
def bound_kernel(
    x, window, bounds, x_row, k, columns, UNIT: tl.constexpr, WHOLE: tl.constexpr, GROUPS: tl.constexpr,
    MEMBERS: tl.constexpr,
):  # fmt: skip
    """bounds int64 [rows]: what bound_of gives, the first in the high half. One program a row."""
    row = tl.program_id(0)
    x, length = window_of(x, x_row, window, row, columns, UNIT)
    bound, across = bound_of(x, k, length, WHOLE, GROUPS, MEMBERS)
    tl.store(bounds + row, joined(bound, across))


@triton.jit
def load_part(x, first, end, TILE: tl.constexpr):
    """A tile of columns from `first` on, as far as `end`."""
    column = first + tl.arange(0, TILE)
    # Without a mask aligned rows are read 16 bytes at a time.
    if first + TILE <= end:
        value = tl.load(x + column)
    else:
        value = tl.load(x + column, column < end, other=0)
    return value


@triton.jit
def neighbours(x, UNIT: tl.constexpr):
    """x as UNIT tensors: every UNIT-th element from the first on, from the second on, and so on."""
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
    OWN: tl.constexpr, UNIT: tl.constexpr, WHOLE: tl.constexpr, GROUPS: tl.constexpr, MEMBERS: tl.constexpr,
    TILE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """bounds int64 [rows], found here if OWN; counts and ties int32 [rows, programs], of elements above the bound and
    at it; list_value, of x's dtype, and list_column int32 [rows, programs, capacity], those above it in the order of
    their columns."""
    wait(PDL)
    row, part = tl.program_id(0), tl.program_id(1)
    program = row * programs + part
    x, length = window_of(x, x_row, window, row, columns, UNIT)
    first = part * chunk * TILE
    end = tl.minimum(first + chunk * TILE, length)
    # On its way while the bound is looked for.
    value = load_part(x, first, end, TILE)
    if OWN:
        bound, across = bound_of(x, k, length, WHOLE, GROUPS, MEMBERS)
        tl.store(bounds + row, joined(bound, across), part == 0)
    else:
        bound = (tl.load(bounds + row) >> 32).to(tl.int32)
    list_value += program.to(tl.int64) * capacity
    list_column += program.to(tl.int64) * capacity
    count = tl.full([], 0, tl.int32)
    equal = tl.full([], 0, tl.int32)
    for i in range(chunk):
        # What a thread has read at once is taken apart, and counted together: then nothing moves between threads.
        values = neighbours(value, UNIT)
        column = first + tl.arange(0, TILE // UNIT) * UNIT
        # Counts of those above in the low half, of those equal in the high half.
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
