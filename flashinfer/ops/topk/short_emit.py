"""Top-k of a small k, second half: the k-th largest of a row's list, and the k that are written.

Grid: (rows, parts). Each program searches the whole list, which is short and stays in registers, and writes its share.
Where a list does not hold the k first, it reads the row itself.
Warps: all share the list. Shared memory: reductions, scans and gathers.
Inputs: x [rows, columns], a window of each row, bounds and lists of short_list.py. Outputs: out.value and out.index
[rows, k], in the order of columns; out.raw the indices where out.index takes slots.
Method: docs/rooms/topk.md.
"""

import triton
import triton.language as tl

from flashinfer.ops._device.pdl import begin as wait
from flashinfer.ops._device.prefix import key_of, window_of
from flashinfer.ops._device.rows import multiple
from flashinfer.ops.topk.results import moved_by, write_none, write_taken

# No value has this key; that of NaN is the largest.
_LOWEST = tl.constexpr(-(1 << 31))
_HIGHEST = tl.constexpr((1 << 31) - 1)
# Programs that may share a row: what is published of them is in one warp.
PARTS = tl.constexpr(32)
# Elements of a list that are read at once.
PACK = tl.constexpr(4)


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
        margin = 2.5 * tl.sqrt(below * (1 - below) / left) + 0.5 / left + 0.02
        wide = gap.to(tl.float32)
        begin = tl.minimum((wide * tl.where(even, 0.0, tl.maximum(below - margin, 0.0))).to(tl.uint32), gap - 1)
        width = tl.where(even, tl.minimum(across, gap).to(tl.float32), wide * tl.minimum(2 * margin, 1.0))
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
