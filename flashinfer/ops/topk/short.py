"""Small k: a sample of a row bounds its k largest, a pass lists what is above the bound, a search ends the list.

    bound  one program a row, where programs are many; of few, each finds the same bound itself, which saves a launch
    list   what each program's part of a row has above the bound
    emit   finds the k-th largest of the list and writes the k; each program searches the whole list, which is short,
           and writes its share

Only speed depends on the sample: where a list does not hold the k first, emit reads the row itself.
"""

from dataclasses import replace
from functools import cache

import torch
import triton
import triton.language as tl

from flashinfer._core.launch import Build, Launcher
from flashinfer._core.target import target_of
from flashinfer.ops._device.find_prefix import Parameters, start
from flashinfer.ops._device.pdl import begin as wait
from flashinfer.ops._device.prefix import key_of, window_of
from flashinfer.ops._device.rows import multiple, pointer, unit
from flashinfer.ops.topk import TopK
from flashinfer.ops.topk.results import Results, add_results, moved_by, write_none, write_taken

# No value has this key; that of NaN is the largest.
_LOWEST = tl.constexpr(-(1 << 31))
_HIGHEST = tl.constexpr((1 << 31) - 1)
# Programs that may share a row: what is said of them is in one warp.
PARTS = tl.constexpr(32)
# Elements of a list that are read at once.
PACK = tl.constexpr(4)
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
    they are few, after u of them: one row in 10^5 has fewer than k above. m of about length / 2 k has u where it tells
    most.

    And how many keys from there on the k-th is among, in all likelihood: as an uint32, bit by bit.
    """
    bound = tl.full([], _LOWEST, tl.int32)
    across = tl.full([], -1, tl.int32)
    if (length > WHOLE) & (k < length):
        size = tl.minimum(tl.maximum((length / (2.0 * k)).to(tl.int32), 1), MEMBERS)
        # Members of a group are spread over the row, by chance within a cell each: no period of the row hits all alike.
        # SIDE neighbours are of as many groups, a quarter of the sectors then. Where fewer members count, the last is
        # read again: behind masks the compiler (ptxas) would wait for the first half before it asks for the second.
        member = tl.minimum(tl.arange(0, MEMBERS), size - 1)[None, :]
        cell = (member * (GROUPS // SIDE) + (tl.arange(0, GROUPS) // SIDE)[:, None]).to(tl.uint32)
        WIDE: tl.constexpr = (1 << 32) // (GROUPS // SIDE * MEMBERS)
        chance = (cell * 2654435769) & (WIDE - 1)
        place = tl.umulhi(cell * WIDE + chance, (length - SIDE + 1).to(tl.uint32)) // SIDE * SIDE
        column = place.to(tl.int32) + (tl.arange(0, GROUPS) % SIDE)[:, None]
        largest = key_of(tl.max(tl.load(x + column).to(tl.float32), 1))
        share = 1 - tl.exp(size * tl.log(1 - k.to(tl.float32) / length))
        aside = 4.5 * tl.sqrt(GROUPS * share * (1 - share)) + 4
        # Bins of equal width, the highest first. The bound is the least group of the bin that reaches what is wanted.
        high, low = tl.reduce((largest, largest), 0, highest_and_lowest)
        width = (high.to(tl.uint32, bitcast=True) - low.to(tl.uint32, bitcast=True)).to(tl.float32)
        shift = tl.maximum((width.to(tl.int32, bitcast=True) >> 23) - 127 - 7, 0).to(tl.uint32)
        bin = ((high - largest).to(tl.uint32, bitcast=True) >> shift).to(tl.int32)
        reached = tl.cumsum(tl.histogram(bin, 256), 0)
        bins = tl.sum((reached < GROUPS * share + aside).to(tl.int32) * 65536 + (reached < GROUPS * share - aside), 0)
        last = bins >> 16
        if last < 256:
            bound = tl.min(tl.where(bin <= last, largest, _HIGHEST), 0)
            over = (high - bound).to(tl.uint32, bitcast=True) - ((bins & 65535).to(tl.uint32) << shift)
            # So few that the k-th may be above all that were seen.
            over = tl.where(GROUPS * share < aside, tl.minimum(over, _HIGHEST) * 2, over)
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


@triton.jit
def places_of(at, ends, begins, lasts, capacity):
    """Where the elements `at` places of a list are kept, and where what their program listed ends. `at` is [n, m], with
    n of a warp: it has all of what it looks up. `begins`, `lasts` and `ends` are [PARTS]: what each program listed
    begins and ends, and the next begins, at a multiple of PACK."""
    LINES: tl.constexpr = at.shape[1]
    bounds = tl.broadcast_to(ends[:, None], [PARTS, LINES])
    # How many programs end before.
    part = tl.zeros(at.shape, tl.int32)
    for i in tl.static_range(5):
        part += tl.where(tl.gather(bounds, part + ((PARTS >> (i + 1)) - 1), 0) <= at, PARTS >> (i + 1), 0)
    begin = tl.gather(tl.broadcast_to(begins[:, None], [PARTS, LINES]), part, 0)
    last = tl.gather(tl.broadcast_to(lasts[:, None], [PARTS, LINES]), part, 0)
    return part * capacity + at - begin, last


@triton.jit
def in_line(x):
    """[n, m] as one line, first the first column."""
    return tl.reshape(tl.trans(x), [x.shape[0] * x.shape[1]])


@triton.jit
def listed_keys_at(start, ends, begins, lasts, values, capacity, UNIT: tl.constexpr, TILE: tl.constexpr):
    """TILE keys from place `start` of a list on, in PACK tensors; _LOWEST past the last."""
    WIDTH: tl.constexpr = min(TILE // PACK, PARTS)
    LINES: tl.constexpr = TILE // PACK // WIDTH
    at = start + (tl.arange(0, LINES)[None, :] * WIDTH + tl.arange(0, WIDTH)[:, None]) * PACK
    place, last = places_of(at, ends, begins, lasts, capacity)
    step = tl.arange(0, PACK)[None, None, :]
    mine = (at[:, :, None] + step) < last[:, :, None]
    if UNIT == 1:
        there = mine
    else:
        # What pads is read too, in the same 16 bytes: neither a mask nor a shape may part what lies side by side.
        there = tl.broadcast_to((at < last)[:, :, None], [WIDTH, LINES, PACK])
    value = tl.load(values + (multiple(place, PACK)[:, :, None] + step), there, other=0)
    key = tl.where(mine, key_of(value.to(tl.float32)), _LOWEST)
    even, odd = tl.split(tl.reshape(key, [WIDTH, LINES, PACK // 2, 2]))
    a, c = tl.split(even)
    b, d = tl.split(odd)
    return in_line(a), in_line(b), in_line(c), in_line(d)


@triton.jit
def listed_share(start, ends, begins, lasts, values, columns, from_list, capacity, SHARE: tl.constexpr):
    """Values and columns of SHARE elements from place `start` of a list on, and whether they are there."""
    WIDTH: tl.constexpr = min(SHARE, PARTS)
    at = start + (tl.arange(0, SHARE // WIDTH)[None, :] * WIDTH + tl.arange(0, WIDTH)[:, None])
    place, last = places_of(at, ends, begins, lasts, capacity)
    value = tl.load(values + place, at < last, other=0)
    column = tl.load(columns + place, (at < last) & from_list, other=0)
    column = tl.where(from_list, column, at)
    return in_line(value), in_line(column), in_line(at < last)


@triton.jit
def add_words(a0, a1, a2, a3, b0, b1, b2, b3):
    return a0 + b0, a1 + b1, a2 + b2, a3 + b3


@triton.jit
def halves(x):
    """Both halves of x."""
    return tl.split(tl.trans(tl.reshape(x, [2, x.shape[0] // 2])))


@triton.jit
def eight_bins(key, base, shift):
    """How many of the keys, in eight tensors, are in each of eight bins of 2^shift keys from `base` on, in four bits a
    bin. The last has those above it as well."""
    bins = tl.zeros(key[0].shape, tl.int32)
    for i in tl.static_range(8):
        bin = tl.minimum((key[i] - base).to(tl.uint32, bitcast=True) >> shift, 7)
        bins += tl.where(key[i] >= base, (1 << (bin * 4)).to(tl.int32), 0)
    return bins


@triton.jit
def reaching(key, base, shift):
    """How many of the keys, in 16 tensors, reach the begin of each of eight bins.

    A thread counts its keys with an addition each, in fields of a word that grow from four to sixteen bits.
    """
    low = eight_bins(key[:8], base, shift)
    high = eight_bins(key[8:], base, shift)
    even = (low & 0x0F0F0F0F) + (high & 0x0F0F0F0F)
    odd = (low >> 4 & 0x0F0F0F0F) + (high >> 4 & 0x0F0F0F0F)
    w0, w1, w2, w3 = tl.reduce(
        (even & 0x00FF00FF, odd & 0x00FF00FF, even >> 8 & 0x00FF00FF, odd >> 8 & 0x00FF00FF), 0, add_words
    )
    c7 = w3 >> 16
    c6 = c7 + (w2 >> 16)
    c5 = c6 + (w1 >> 16)
    c4 = c5 + (w0 >> 16)
    c3 = c4 + (w3 & 65535)
    c2 = c3 + (w2 & 65535)
    c1 = c2 + (w1 & 65535)
    return c1 + (w0 & 65535), c1, c2, c3, c4, c5, c6, c7


@triton.jit
def added(a, b):
    return a[0] + b[0], a[1] + b[1], a[2] + b[2], a[3] + b[3], a[4] + b[4], a[5] + b[5], a[6] + b[6], a[7] + b[7]


@triton.jit
def quarters(x):
    """x in four parts."""
    a, b = halves(x)
    c, d = halves(a)
    e, f = halves(b)
    return c, d, e, f


@triton.jit
def sixteenths(x):
    """Four tensors in four parts each."""
    a, b, c, d = quarters(x[0]), quarters(x[1]), quarters(x[2]), quarters(x[3])
    return (
        a[0], a[1], a[2], a[3], b[0], b[1], b[2], b[3], c[0], c[1], c[2], c[3], d[0], d[1], d[2], d[3],
    )  # fmt: skip


@triton.jit
def find_key(
    first, target, least, across, reach, count, ends, begins, lasts, values, capacity, UNIT: tl.constexpr,
    TILE: tl.constexpr,
):  # fmt: skip
    """A key that `target` elements reach or, if the next are equal to it, more; how many do, and how many are above it
    then. `reach` elements reach `least`; the key is likely among the `across`, an uint32, from there on.

    A step counts keys in eight bins, and waits for one sum over the program. Every other step has bins all over the
    keys that are left; the ones between have narrow bins, around the key that would be the k-th if keys were spread
    evenly. `first` are the first TILE keys, which stay in registers.
    """
    gap = tl.full([], _HIGHEST, tl.uint32) - least.to(tl.uint32, bitcast=True) + 1
    above = reach * 0
    even = reach >= 0
    mine = sixteenths(first)
    while (gap > 1) & (reach > target):
        left = (reach - above).to(tl.float32)
        below = (reach - target + 0.5) / left
        # 2.5 deviations to either side, and what curvature may make of it.
        aside = 2.5 * tl.sqrt(below * (1 - below) / left) + 0.5 / left + 0.02
        wide = gap.to(tl.float32)
        begin = tl.minimum((wide * tl.where(even, 0.0, tl.maximum(below - aside, 0.0))).to(tl.uint32), gap - 1)
        width = tl.where(even, tl.minimum(across, gap).to(tl.float32), wide * tl.minimum(2 * aside, 1.0))
        across = gap
        even = even == 0
        # The least shift by which seven bins and a part of one cover it.
        shift = tl.maximum(((width * 1.0000002).to(tl.int32, bitcast=True) >> 23) - 127 - 2, 0).to(tl.uint32)
        base = (least.to(tl.uint32, bitcast=True) + begin).to(tl.int32, bitcast=True)
        counts = reaching(mine, base, shift)
        for start in range(TILE, count, TILE):
            key = listed_keys_at(start, ends, begins, lasts, values, capacity, UNIT, TILE)
            counts = added(counts, reaching(sixteenths(key), base, shift))
        up = gap * 0
        end = gap
        # Bins that begin at a key of the gap: only there `i << shift` stays below 2^32.
        last = (gap - 1 - begin) >> shift
        for i in tl.static_range(8):
            inside = last >= i
            cut = begin + (i << shift)
            reached = inside & (counts[i] >= target)
            missed = inside & (counts[i] < target) & (cut < end)
            up = tl.where(reached, cut, up)
            reach = tl.where(reached, counts[i], reach)
            end = tl.where(missed, cut, end)
            above = tl.where(missed, counts[i], above)
        gap = end - up
        least = (least.to(tl.uint32, bitcast=True) + up).to(tl.int32, bitcast=True)
    return least, reach, above


@triton.jit
def above_and_level(key, pivot):
    """Whether a key is above the pivot, in the low half, and whether it is equal to it, in the high half."""
    return (key > pivot).to(tl.int32) + (key == pivot).to(tl.int32) * 65536


@triton.jit
def emit_kernel(
    x, window, bounds, counts, ties, list_value, list_column, out, where, x_row, out_row, raw_row, pages, k, columns,
    programs, parts, capacity, LAST: tl.constexpr, UNIT: tl.constexpr, TILE: tl.constexpr, SHARE: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """Writes the k first of a row in the order of their columns, which is that of the list.

    out.value and out.index [rows, k]; out.raw takes the indices where out.index takes slots. Past a short row is
    -1.
    """
    wait(PDL)
    row, part = tl.program_id(0), tl.program_id(1)
    x, length = window_of(x, x_row, window, row, columns, UNIT)
    target = tl.minimum(k, length)
    list_value += multiple(row.to(tl.int64) * programs * capacity, PACK)
    list_column += multiple(row.to(tl.int64) * programs * capacity, PACK)
    sampled = tl.load(bounds + row)
    bound, across = (sampled >> 32).to(tl.int32), sampled.to(tl.int32)
    i = tl.arange(0, PARTS)
    listed = tl.load(counts + row * programs + i, i < programs, other=0)
    equal = tl.load(ties + row * programs + i, i < programs, other=0)
    out_value, out_index, raw = out.value, out.index + row.to(tl.int64) * out_row, out.raw
    if out_value is not None:
        out_value += row.to(tl.int64) * k
    if raw is not None:
        raw += row.to(tl.int64) * raw_row
    shift, batch = moved_by(row, where, window.starts)
    padded = tl.cdiv(listed, PACK) * PACK
    ends = tl.cumsum(padded, 0)
    begins = ends - padded
    lasts = begins + listed
    above = tl.sum(listed, 0)
    reach = above + tl.sum(equal, 0)
    fits = tl.max(listed, 0) <= capacity
    from_list = fits & (above >= target)
    # Where the k-th is at the bound, or all are taken, there is nothing to search.
    known = ((above < target) & (reach >= target)) | (target == length)
    count = tl.where(from_list, tl.max(ends, 0), length)
    entries = tl.where(from_list, above, length)
    # The row is searched as a list of one program.
    values = tl.where(from_list, list_value, x)
    ends, begins = tl.where(from_list, ends, length), tl.where(from_list, begins, 0)
    lasts = tl.where(from_list, lasts, length)
    keys = listed_keys_at(0, ends, begins, lasts, values, capacity, UNIT, TILE)
    # A program's share is on its way while the whole is searched.
    share = tl.cdiv(tl.cdiv(count, parts), PACK) * PACK
    begin = tl.minimum(part * share, count)
    end = tl.minimum(begin + share, count)
    value, column, there = listed_share(
        begin, ends, begins, lasts, values, list_column, from_list, capacity, SHARE
    )  # fmt: skip
    pivot = bound
    if target == length:
        pivot = tl.full([], _LOWEST, tl.int32)
        above = length
    if known == 0:
        likely = tl.where(from_list, across, -1).to(tl.uint32, bitcast=True)
        least = tl.where(from_list, bound, _LOWEST) + 1
        pivot, reach, above = find_key(
            keys, target, least, likely, entries, count, ends, begins, lasts, values, capacity, UNIT, TILE
        )
        # All that reach it are taken: they are above the key before it.
        if reach == target:
            pivot -= 1
            above = target
    # Of those equal to the pivot so many are taken, past so many.
    some = target - above
    skip = tl.where(LAST, reach - target, 0)
    above = tl.full([], 0, tl.int32)
    level = tl.full([], 0, tl.int32)
    for start in range(0, begin, TILE):
        if start > 0:
            keys = listed_keys_at(start, ends, begins, lasts, values, capacity, UNIT, TILE)
        both = tl.zeros([TILE // PACK], tl.int32)
        for j in tl.static_range(PACK):
            both += above_and_level(keys[j], pivot)
        sum = tl.sum(tl.where(start + tl.arange(0, TILE // PACK) * PACK < begin, both, 0), 0)
        above += sum & 65535
        level += sum >> 16
    for start in range(begin, end, SHARE):
        if start > begin:
            value, column, there = listed_share(
                start, ends, begins, lasts, values, list_column, from_list, capacity, SHARE
            )  # fmt: skip
        key = key_of(value.to(tl.float32))
        inside = there & (start + tl.arange(0, SHARE) < end)
        found = tl.where(inside, above_and_level(key, pivot), 0)
        seen = tl.cumsum(found, 0)
        nth = level + (seen >> 16) - skip
        taken = inside & ((key > pivot) | ((key == pivot) & (nth > 0) & (nth <= some)))
        to = above + (seen & 65535) + tl.minimum(tl.maximum(nth, 0), some) - 1
        write_taken(value, column, taken, to, k, out_value, out_index, raw, shift, where, batch, pages)
        if start + SHARE < end:
            sum = tl.sum(found, 0)
            above += sum & 65535
            level += sum >> 16
    if part == 0:
        write_none(out_value, out_index, raw, target, k, SHARE)


def _begin(problem) -> Parameters:
    """The row's values and window, and its bound."""
    p = Parameters().add(pointer(problem.dtype, problem.aligned), "x")
    return p.window("", problem.starts, problem.lengths).add("*i64", "bounds")


def _listed(p: Parameters, problem) -> Parameters:
    p.add("*i32", "counts", "ties")
    return p.add(pointer(problem.dtype, True), "list_value").add(pointer("i32", True), "list_column")


def _sample(problem, config) -> dict:
    constants = {"UNIT": unit(problem.dtype, problem.aligned), "WHOLE": config.short_list}
    return constants | {"GROUPS": config.groups, "MEMBERS": config.members}


def _build_bound(problem, config):
    p = _begin(problem).add("i64", "x_row").add("i32", "k", "columns")
    return Build(bound_kernel, p.types, p.constants | _sample(problem, config), num_warps=config.short_warps)


def _build_list(problem, config):
    p = _listed(_begin(problem), problem).add("i64", "x_row")
    p.add("i32", "k", "columns", "programs", "chunk", "capacity")
    constants = _sample(problem, config) | {"OWN": config.own, "TILE": config.short_tile, "PDL": config.pdl}
    # Three programs on a multiprocessor; that which looks for the bound takes more.
    registers = None if config.own else 80
    return Build(list_kernel, p.types, p.constants | constants, num_warps=config.short_warps, maxnreg=registers)


def _build_emit(problem, config):
    p = add_results(_listed(_begin(problem), problem), problem).add("i32", "programs", "parts", "capacity")
    constants = {"LAST": problem.last, "UNIT": unit(problem.dtype, problem.aligned)}
    constants |= {"TILE": config.short_list, "SHARE": config.share, "PDL": config.pdl}
    return Build(emit_kernel, p.types, p.constants | constants, num_warps=config.short_list_warps)


launch_bound = Launcher("top_k_bound", _build_bound)
launch_list = Launcher("top_k_list", _build_list)
launch_emit = Launcher("top_k_emit_list", _build_emit)
LAUNCHERS = (launch_bound, launch_list, launch_emit)


def kernels(problem, config):
    """(launcher, problem, config) of each kernel."""
    for own in (False, True):
        yield launch_list, _listing(problem), _owning(config, own)
    yield launch_bound, _listing(problem), _owning(config, False)
    for parts in (1, int(PARTS)):
        yield launch_emit, problem, _sharing(config, parts)


@cache
def _listing(problem):
    """What a list depends on: not what is written of it."""
    p = problem
    return TopK("values", p.dtype, starts=p.starts, lengths=p.lengths, aligned=p.aligned)


@cache
def _owning(config, own: bool):
    """The list's, where each program finds the bound itself, or does not."""
    # Where programs are many, those of the next kernel would take their room: 64 x 65536 took 36.3 us, not 34.0 (H100).
    return replace(config, own=own, pdl=config.early and own)


@cache
def _sharing(config, parts: int):
    """Emit's: of a share that is a small part of the list one element a thread, else four."""
    few = config.short_list_warps * 32 if parts >= 8 else config.short_list // 4
    return replace(config, share=few, pdl=config.early)


def share(rows: int, columns: int, config, device: torch.device) -> tuple[int, int, int]:
    """Programs that list a row, tiles of each, and programs that emit it."""
    tiles, sms = triton.cdiv(columns, config.short_tile), target_of(device).sms
    chunk = triton.cdiv(tiles, min(max(8 * sms // rows, 1), int(PARTS)))
    # Every program of emit searches the whole list: enough of them to fill the chip once, and no more.
    return triton.cdiv(tiles, chunk), chunk, min(max(sms // rows, 1), int(PARTS))


def run(problem, config, x, k, window, results: Results):
    """Launch it. `window` are starts and lengths."""
    rows, columns = x.shape
    programs, chunk, parts = share(rows, columns, config, x.device)
    # A list longer than emit has registers for takes it several times as long.
    capacity = min(chunk * config.short_tile, 2 * config.short_list)
    own = rows * programs <= 2 * target_of(x.device).sms

    def scratch(*shape, dtype=torch.int32):
        return torch.empty(shape, dtype=dtype, device=x.device)

    bounds, counts, ties = scratch(rows, dtype=torch.int64), scratch(rows, programs), scratch(rows, programs)
    list_value, list_column = scratch(rows, programs, capacity, dtype=x.dtype), scratch(rows, programs, capacity)
    given, listed, x_row = (x, *window, bounds), (counts, ties, list_value, list_column), x.stride(0)
    listing = _listing(problem)
    if not own:
        start(launch_bound, listing, _owning(config, False), (rows, 1, 1), *given, x_row, k, columns)
    start(launch_list, listing, _owning(config, own), (rows, programs, 1), *given, *listed, x_row, k, columns,
          programs, chunk, capacity)  # fmt: skip
    start(launch_emit, problem, _sharing(config, parts), (rows, parts, 1), *given, *listed, *results.arguments(x, k),
          programs, parts, capacity)  # fmt: skip
