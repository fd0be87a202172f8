"""Top-k of a small k, second half: finds the k-th largest of a row's list, and writes the k largest.

Grid: (rows, parts). Each program searches the whole list, which is short and stays in registers, and writes its share.
If a list does not hold the k largest, the program reads the row itself.
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
from flashinfer.ops.topk.results import column_offset, write_none, write_taken

# No value has this key; that of NaN is the largest.
_LOWEST = tl.constexpr(-(1 << 31))
_HIGHEST = tl.constexpr((1 << 31) - 1)
# List programs of a row, at most: their counts are then in one warp.
PARTS = tl.constexpr(32)
# Elements of a list that a thread reads at once.
PACK = tl.constexpr(4)


@triton.jit
def list_offsets(at, ends, begins, lasts, capacity):
    """Offsets of list elements in memory, and the end of their program's section of the list.

    at : [n, m], indices of elements in the list, with the n in one warp, so that gathers stay within it.
    begins, lasts, ends : [PARTS], of each program's section: first index, end of its elements, end with padding to a
        multiple of PACK, where the next section begins.

    For example, programs that listed 3 and 5 elements have begins 0, 4, lasts 3, 9 and ends 4, 12. Element 5 is in the
    section of program 1, at offset capacity + 1; its section ends at 9.
    """
    LINES: tl.constexpr = at.shape[1]
    bounds = tl.broadcast_to(ends[:, None], [PARTS, LINES])
    # The number of programs whose section ends at or before `at`, by bisection.
    part = tl.zeros(at.shape, tl.int32)
    for i in tl.static_range(5):
        part += tl.where(tl.gather(bounds, part + ((PARTS >> (i + 1)) - 1), 0) <= at, PARTS >> (i + 1), 0)
    begin = tl.gather(tl.broadcast_to(begins[:, None], [PARTS, LINES]), part, 0)
    last = tl.gather(tl.broadcast_to(lasts[:, None], [PARTS, LINES]), part, 0)
    return part * capacity + at - begin, last


@triton.jit
def flat(x):
    """[n, m] flattened, column by column."""
    return tl.reshape(tl.trans(x), [x.shape[0] * x.shape[1]])


@triton.jit
def listed_keys_at(start, ends, begins, lasts, values, capacity, UNIT: tl.constexpr, TILE: tl.constexpr):
    """TILE keys from index `start` of a list on, in PACK tensors; _LOWEST in padding and past the end."""
    WIDTH: tl.constexpr = min(TILE // PACK, PARTS)
    LINES: tl.constexpr = TILE // PACK // WIDTH
    at = start + (tl.arange(0, LINES)[None, :] * WIDTH + tl.arange(0, WIDTH)[:, None]) * PACK
    place, last = list_offsets(at, ends, begins, lasts, capacity)
    step = tl.arange(0, PACK)[None, None, :]
    exists = (at[:, :, None] + step) < last[:, :, None]
    if UNIT == 1:
        readable = exists
    else:
        # Padding is read too, with the elements in the same 16 bytes: a mask inside of 16 bytes would split the load.
        readable = tl.broadcast_to((at < last)[:, :, None], [WIDTH, LINES, PACK])
    value = tl.load(values + (multiple(place, PACK)[:, :, None] + step), readable, other=0)
    key = tl.where(exists, key_of(value.to(tl.float32)), _LOWEST)
    even, odd = tl.split(tl.reshape(key, [WIDTH, LINES, PACK // 2, 2]))
    a, c = tl.split(even)
    b, d = tl.split(odd)
    return flat(a), flat(b), flat(c), flat(d)


@triton.jit
def listed_share(start, ends, begins, lasts, values, columns, from_list, capacity, SHARE: tl.constexpr):
    """Values and columns of SHARE elements from index `start` of a list on, and whether each exists."""
    WIDTH: tl.constexpr = min(SHARE, PARTS)
    at = start + (tl.arange(0, SHARE // WIDTH)[None, :] * WIDTH + tl.arange(0, WIDTH)[:, None])
    place, last = list_offsets(at, ends, begins, lasts, capacity)
    value = tl.load(values + place, at < last, other=0)
    column = tl.load(columns + place, (at < last) & from_list, other=0)
    column = tl.where(from_list, column, at)
    return flat(value), flat(column), flat(at < last)


@triton.jit
def add_words(a0, a1, a2, a3, b0, b1, b2, b3):
    return a0 + b0, a1 + b1, a2 + b2, a3 + b3


@triton.jit
def halves(x):
    """The two halves of x."""
    return tl.split(tl.trans(tl.reshape(x, [2, x.shape[0] // 2])))


@triton.jit
def eight_bins(key, base, shift):
    """Counts of keys (eight tensors) in eight bins of 2^shift keys from `base` on, four bits a bin.

    The last bin also counts all keys above it. For example, with base 16 and shift 2 the keys 15, 17, 21 and 90 are in
    no bin, bin 0, bin 1 and bin 7: the word is 0x10000011.
    """
    bins = tl.zeros(key[0].shape, tl.int32)
    for i in tl.static_range(8):
        bin = tl.minimum((key[i] - base).to(tl.uint32, bitcast=True) >> shift, 7)
        bins += tl.where(key[i] >= base, (1 << (bin * 4)).to(tl.int32), 0)
    return bins


@triton.jit
def count_reaching(key, base, shift):
    """For each of eight bins, the number of keys (16 tensors) that are at or above the begin of the bin.

    A thread counts with one addition a key, in bit fields that are widened from four to eight and sixteen bits.
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
def add_counts(a, b):
    return a[0] + b[0], a[1] + b[1], a[2] + b[2], a[3] + b[3], a[4] + b[4], a[5] + b[5], a[6] + b[6], a[7] + b[7]


@triton.jit
def quarters(x):
    """The four quarters of x."""
    a, b = halves(x)
    c, d = halves(a)
    e, f = halves(b)
    return c, d, e, f


@triton.jit
def sixteenths(x):
    """The quarters of each of four tensors."""
    a, b, c, d = quarters(x[0]), quarters(x[1]), quarters(x[2]), quarters(x[3])
    return (
        a[0], a[1], a[2], a[3], b[0], b[1], b[2], b[3], c[0], c[1], c[2], c[3], d[0], d[1], d[2], d[3],
    )  # fmt: skip


@triton.jit
def find_key(
    first, target, least, likely_range, reach, count, ends, begins, lasts, values, capacity, UNIT: tl.constexpr,
    TILE: tl.constexpr,
):  # fmt: skip
    """Search for a key that `target` elements reach (are equal to or above), or more if several are equal to it.

    Returns the key, the number of elements that reach it, and, if that is more than target, the number above it.

    first : the first TILE keys of the list, which stay in registers.
    least, reach : a lower bound of the key, and the number of elements that reach it.
    likely_range : uint32; the key is likely among the `likely_range` keys from `least` on.

    A step counts keys in eight bins, with one sum over the program. Every other step has bins over the whole
    interval; the steps between have narrow bins around the key that would be the result if keys were evenly
    distributed.
    """
    gap = tl.full([], _HIGHEST, tl.uint32) - least.to(tl.uint32, bitcast=True) + 1
    above = reach * 0
    whole_interval = reach >= 0
    in_registers = sixteenths(first)
    while (gap > 1) & (reach > target):
        left = (reach - above).to(tl.float32)
        below = (reach - target + 0.5) / left
        # 2.5 standard deviations to either side, and an allowance for a density that is not constant.
        margin = 2.5 * tl.sqrt(below * (1 - below) / left) + 0.5 / left + 0.02
        gap_size = gap.to(tl.float32)
        begin = gap_size * tl.where(whole_interval, 0.0, tl.maximum(below - margin, 0.0))
        begin = tl.minimum(begin.to(tl.uint32), gap - 1)
        width = tl.where(
            whole_interval, tl.minimum(likely_range, gap).to(tl.float32), gap_size * tl.minimum(2 * margin, 1.0)
        )
        likely_range = gap
        whole_interval = whole_interval == 0
        # The least shift with which the eight bins cover the width.
        shift = tl.maximum(((width * 1.0000002).to(tl.int32, bitcast=True) >> 23) - 127 - 2, 0).to(tl.uint32)
        base = (least.to(tl.uint32, bitcast=True) + begin).to(tl.int32, bitcast=True)
        counts = count_reaching(in_registers, base, shift)
        for start in range(TILE, count, TILE):
            key = listed_keys_at(start, ends, begins, lasts, values, capacity, UNIT, TILE)
            counts = add_counts(counts, count_reaching(sixteenths(key), base, shift))
        up = gap * 0
        end = gap
        # The last bin that begins inside of the gap: up to it `i << shift` is below 2^32.
        last = (gap - 1 - begin) >> shift
        for i in tl.static_range(8):
            inside = last >= i
            bin_begin = begin + (i << shift)
            reached = inside & (counts[i] >= target)
            missed = inside & (counts[i] < target) & (bin_begin < end)
            up = tl.where(reached, bin_begin, up)
            reach = tl.where(reached, counts[i], reach)
            end = tl.where(missed, bin_begin, end)
            above = tl.where(missed, counts[i], above)
        gap = end - up
        least = (least.to(tl.uint32, bitcast=True) + up).to(tl.int32, bitcast=True)
    return least, reach, above


@triton.jit
def above_and_level(key, pivot):
    """1 in the low 16 bits if a key is above the pivot, 1 in the high 16 bits if it is equal to it."""
    return (key > pivot).to(tl.int32) + (key == pivot).to(tl.int32) * 65536


@triton.jit
def emit_kernel(
    x, window, bounds, counts, ties, list_value, list_column, out, where, x_row, out_row, raw_row, pages, k, columns,
    programs, parts, capacity, LAST: tl.constexpr, UNIT: tl.constexpr, TILE: tl.constexpr, SHARE: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """Writes the k largest of a row in the order of their columns, which is that of the list.

    out.value and out.index [rows, k]; out.raw gets the indices where out.index gets slots. -1 after the elements of a
    row that has fewer than k.
    """
    wait(PDL)
    row, part = tl.program_id(0), tl.program_id(1)
    x, length = window_of(x, x_row, window, row, columns, UNIT)
    target = tl.minimum(k, length)
    list_value += multiple(row.to(tl.int64) * programs * capacity, PACK)
    list_column += multiple(row.to(tl.int64) * programs * capacity, PACK)
    sampled = tl.load(bounds + row)
    bound, sampled_range = (sampled >> 32).to(tl.int32), sampled.to(tl.int32)
    i = tl.arange(0, PARTS)
    listed = tl.load(counts + row * programs + i, i < programs, other=0)
    equal = tl.load(ties + row * programs + i, i < programs, other=0)
    out_value, out_index, raw = out.value, out.index + row.to(tl.int64) * out_row, out.raw
    if out_value is not None:
        out_value += row.to(tl.int64) * k
    if raw is not None:
        raw += row.to(tl.int64) * raw_row
    shift, batch = column_offset(row, where, window.starts)
    padded = tl.cdiv(listed, PACK) * PACK
    ends = tl.cumsum(padded, 0)
    begins = ends - padded
    lasts = begins + listed
    above = tl.sum(listed, 0)
    reach = above + tl.sum(equal, 0)
    no_overflow = tl.max(listed, 0) <= capacity
    from_list = no_overflow & (above >= target)
    # If the k-th is equal to the bound, or all elements are taken, no search is needed.
    no_search = ((above < target) & (reach >= target)) | (target == length)
    count = tl.where(from_list, tl.max(ends, 0), length)
    entries = tl.where(from_list, above, length)
    # Otherwise the row itself is searched, as the list of one program.
    values = tl.where(from_list, list_value, x)
    ends, begins = tl.where(from_list, ends, length), tl.where(from_list, begins, 0)
    lasts = tl.where(from_list, lasts, length)
    keys = listed_keys_at(0, ends, begins, lasts, values, capacity, UNIT, TILE)
    # The loads of this program's share overlap the search.
    share = tl.cdiv(tl.cdiv(count, parts), PACK) * PACK
    begin = tl.minimum(part * share, count)
    end = tl.minimum(begin + share, count)
    value, column, exists = listed_share(
        begin, ends, begins, lasts, values, list_column, from_list, capacity, SHARE
    )  # fmt: skip
    pivot = bound
    if target == length:
        pivot = tl.full([], _LOWEST, tl.int32)
        above = length
    if no_search == 0:
        likely_range = tl.where(from_list, sampled_range, -1).to(tl.uint32, bitcast=True)
        least = tl.where(from_list, bound, _LOWEST) + 1
        pivot, reach, above = find_key(
            keys, target, least, likely_range, entries, count, ends, begins, lasts, values, capacity, UNIT, TILE
        )
        # All elements that reach it are taken: they are above the preceding key.
        if reach == target:
            pivot -= 1
            above = target
    # Of the elements equal to the pivot, `equal_skipped` are skipped and the next `equal_taken` are taken.
    equal_taken = target - above
    equal_skipped = tl.where(LAST, reach - target, 0)
    above = tl.full([], 0, tl.int32)
    equal_before = tl.full([], 0, tl.int32)
    for start in range(0, begin, TILE):
        if start > 0:
            keys = listed_keys_at(start, ends, begins, lasts, values, capacity, UNIT, TILE)
        both = tl.zeros([TILE // PACK], tl.int32)
        for j in tl.static_range(PACK):
            both += above_and_level(keys[j], pivot)
        sum = tl.sum(tl.where(start + tl.arange(0, TILE // PACK) * PACK < begin, both, 0), 0)
        above += sum & 65535
        equal_before += sum >> 16
    for start in range(begin, end, SHARE):
        if start > begin:
            value, column, exists = listed_share(
                start, ends, begins, lasts, values, list_column, from_list, capacity, SHARE
            )  # fmt: skip
        key = key_of(value.to(tl.float32))
        inside = exists & (start + tl.arange(0, SHARE) < end)
        found = tl.where(inside, above_and_level(key, pivot), 0)
        seen = tl.cumsum(found, 0)
        nth = equal_before + (seen >> 16) - equal_skipped
        taken = inside & ((key > pivot) | ((key == pivot) & (nth > 0) & (nth <= equal_taken)))
        to = above + (seen & 65535) + tl.minimum(tl.maximum(nth, 0), equal_taken) - 1
        write_taken(value, column, taken, to, k, out_value, out_index, raw, shift, where, batch, pages)
        if start + SHARE < end:
            sum = tl.sum(found, 0)
            above += sum & 65535
            equal_before += sum >> 16
    if part == 0:
        write_none(out_value, out_index, raw, target, k, SHARE)
