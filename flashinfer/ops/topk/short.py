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
from flashinfer.ops._device.prefix import key_of, window_of
from flashinfer.ops._device.rows import pointer, unit
from flashinfer.ops.topk.results import moved_by, write_taken
from flashinfer.ops.topk import TopK

# No value has this key; that of NaN is the largest.
_LOWEST = tl.constexpr(-(1 << 31))
_HIGHEST = tl.constexpr((1 << 31) - 1)
# Programs that may share a row: what is said of them is in one warp.
PARTS = tl.constexpr(32)


@triton.jit
def bound_of(x, k, length, WHOLE: tl.constexpr, GROUPS: tl.constexpr, MEMBERS: tl.constexpr):
    """A key that k of the row's elements are above, in all likelihood, and few more; _LOWEST for a row up to WHOLE.

    Of k / length of the elements, each is above the bound to be; u = 1 - (1 - k / length)^m of groups of m have one
    above. So among the GROUPS largest of such groups the bound is the one that comes 4.5 deviations, and 4 for where
    they are few, after u of them: one row in 10^5 has fewer than k above. m of about length / 2 k has u where it tells
    most.
    """
    bound = tl.full([], _LOWEST, tl.int32)
    if (length > WHOLE) & (k < length):
        # Members of a group are spread over the row, and moved a little, so that no period of the row hits all of them
        # alike: bits of the cell's number times 2^32 over the golden ratio.
        member = tl.arange(0, MEMBERS)[None, :]
        cell = member * GROUPS + tl.arange(0, GROUPS)[:, None]
        moved = (cell.to(tl.uint32) * 2654435769 >> 12).to(tl.int32) % (length // (GROUPS * MEMBERS))
        column = (cell.to(tl.int64) * length // (GROUPS * MEMBERS)).to(tl.int32) + moved
        size = tl.minimum(tl.maximum(length // (2 * k), 1), MEMBERS)
        value = tl.load(x + column, member < size, other=0)
        largest = tl.max(tl.where(member < size, key_of(value.to(tl.float32)), _LOWEST), 1)
        share = 1 - tl.exp(size * tl.log(1 - k.to(tl.float32) / length))
        wanted = GROUPS * share + 4.5 * tl.sqrt(GROUPS * share * (1 - share)) + 4
        reached = tl.sum((largest[None, :] >= largest[:, None]).to(tl.int32), 1)
        bound = tl.max(tl.where(reached >= wanted, largest, _LOWEST), 0)
    return bound


@triton.jit
def bound_kernel(
    x, starts, lengths, bounds, x_row, k, columns, UNIT: tl.constexpr, WHOLE: tl.constexpr, GROUPS: tl.constexpr,
    MEMBERS: tl.constexpr,
):  # fmt: skip
    """bounds int32 [rows]. One program a row."""
    row = tl.program_id(0)
    x, length = window_of(x, x_row, None, starts, lengths, row, columns, UNIT)
    tl.store(bounds + row, bound_of(x, k, length, WHOLE, GROUPS, MEMBERS))


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
def list_kernel(
    x, starts, lengths, bounds, counts, ties, list_value, list_column, x_row, k, columns, programs, chunk, capacity,
    OWN: tl.constexpr, UNIT: tl.constexpr, WHOLE: tl.constexpr, GROUPS: tl.constexpr, MEMBERS: tl.constexpr,
    TILE: tl.constexpr,
):  # fmt: skip
    """bounds int32 [rows], found here if OWN; counts and ties int32 [rows, programs], of elements above the bound and
    at it; list_value, of x's dtype, and list_column int32 [rows, programs, capacity], those above it in the order of
    their columns."""
    row = tl.program_id(0) // programs
    part = tl.program_id(0) % programs
    x, length = window_of(x, x_row, None, starts, lengths, row, columns, UNIT)
    first = part * chunk * TILE
    end = tl.minimum(first + chunk * TILE, length)
    # On its way while the bound is looked for.
    value = load_part(x, first, end, TILE)
    if OWN:
        bound = bound_of(x, k, length, WHOLE, GROUPS, MEMBERS)
        tl.store(bounds + row, bound, part == 0)
    else:
        bound = tl.load(bounds + row)
    list_value += tl.program_id(0).to(tl.int64) * capacity
    list_column += tl.program_id(0).to(tl.int64) * capacity
    count = tl.full([], 0, tl.int32)
    equal = tl.full([], 0, tl.int32)
    for i in range(chunk):
        column = first + tl.arange(0, TILE)
        first += TILE
        key = tl.where(column < end, key_of(value.to(tl.float32)), _LOWEST)
        above = key > bound
        to = count + tl.cumsum(above.to(tl.int32), 0) - 1
        tl.store(list_value + to, value, above & (to < capacity))
        tl.store(list_column + to, column, above & (to < capacity))
        # Both counts of a tile in one sum.
        sum = tl.sum(above.to(tl.int32) + ((key == bound) & (column < end)).to(tl.int32) * 65536, 0)
        count += sum & 65535
        equal += sum >> 16
        value = load_part(x, first, end, TILE)
    tl.store(counts + tl.program_id(0), count)
    tl.store(ties + tl.program_id(0), equal)


@triton.jit
def listed_tile(start, count, from_list, ends, begins, x, list_value, list_column, capacity, TILE: tl.constexpr):
    """Keys, columns and values of TILE elements from `start` on of a list of `count`, or else of the row. Keys past the
    last are _LOWEST. `begins` and `ends` are [PARTS]: the places in the list of what each program listed."""
    at = start + tl.arange(0, TILE)
    there = at < count
    if from_list:
        # How many programs end before.
        part = tl.zeros([TILE], tl.int32)
        for i in tl.static_range(5):
            part += tl.where(tl.gather(ends, part + ((PARTS >> (i + 1)) - 1), 0) <= at, PARTS >> (i + 1), 0)
        place = part * capacity + at - tl.gather(begins, part, 0)
        column = tl.load(list_column + place, there, other=0)
        value = tl.load(list_value + place, there, other=0)
    else:
        column = at
        value = tl.load(x + at, there, other=0)
    return tl.where(there, key_of(value.to(tl.float32)), _LOWEST), column, value


@triton.jit
def find_key(
    first, target, least, most, count, from_list, ends, begins, x, list_value, list_column, capacity,
    TILE: tl.constexpr, WAYS: tl.constexpr,
):  # fmt: skip
    """A key that `target` elements reach or, if the next are equal to it, more; how many do, and how many are above it
    then. `count` elements reach `least`, and none is above `most`.

    A step cuts the keys that are left in WAYS + 1 parts, and waits for one sum over the program. `first` are the first
    TILE keys, which stay in registers.
    """
    way = (tl.arange(0, WAYS) + 1).to(tl.uint32)
    gap = most.to(tl.uint32, bitcast=True) - least.to(tl.uint32, bitcast=True) + 1
    reach = count
    above = count * 0
    while (gap > 1) & (reach > target):
        cut = way * (gap // (WAYS + 1) + 1)
        edge = (least.to(tl.uint32, bitcast=True) + cut).to(tl.int32, bitcast=True)
        counts = tl.sum((first[None, :] >= edge[:, None]).to(tl.int32), 1)
        for start in range(TILE, count, TILE):
            key, _, _ = listed_tile(
                start, count, from_list, ends, begins, x, list_value, list_column, capacity, TILE
            )  # fmt: skip
            counts += tl.sum((key[None, :] >= edge[:, None]).to(tl.int32), 1)
        # An edge past the last key may have wrapped around.
        reached = (cut < gap) & (counts >= target)
        missed = (cut < gap) & (counts < target)
        up = tl.max(tl.where(reached, cut, 0), 0)
        gap = tl.min(tl.where(missed, cut, gap), 0) - up
        least = (least.to(tl.uint32, bitcast=True) + up).to(tl.int32, bitcast=True)
        reach = tl.min(tl.where(reached, counts, reach), 0)
        above = tl.max(tl.where(missed, counts, above), 0)
    return least, reach, above


@triton.jit
def emit_kernel(
    x, starts, lengths, bounds, counts, ties, list_value, list_column, out_value, out_index, raw, page_table,
    row_to_batch, page_starts, offsets, x_row, out_row, raw_row, table_row, k, columns, programs, parts, capacity,
    pages, page_size, LAST: tl.constexpr, UNIT: tl.constexpr, TILE: tl.constexpr, WAYS: tl.constexpr,
):  # fmt: skip
    """Writes the k first of a row in the order of their columns, which is that of the list.

    out_value and out_index [rows, k]; raw takes the indices where out_index takes slots. Past a short row stands -1.
    """
    row = tl.program_id(0) // parts
    part = tl.program_id(0) % parts
    x, length = window_of(x, x_row, None, starts, lengths, row, columns, UNIT)
    target = tl.minimum(k, length)
    list_value += row.to(tl.int64) * programs * capacity
    list_column += row.to(tl.int64) * programs * capacity
    bound = tl.load(bounds + row)
    i = tl.arange(0, PARTS)
    listed = tl.load(counts + row * programs + i, i < programs, other=0)
    equal = tl.load(ties + row * programs + i, i < programs, other=0)
    out_index += row.to(tl.int64) * out_row
    if out_value is not None:
        out_value += row.to(tl.int64) * k
    if raw is not None:
        raw += row.to(tl.int64) * raw_row
    shift, batch = moved_by(row, page_table, row_to_batch, page_starts, starts, offsets)
    ends = tl.cumsum(listed, 0)
    begins = ends - listed
    above = tl.sum(listed, 0)
    reach = above + tl.sum(equal, 0)
    fits = tl.max(listed, 0) <= capacity
    from_list = fits & (above >= target)
    # Where the k-th is at the bound, or all are taken, there is nothing to search.
    known = ((above < target) & (reach >= target)) | (target == length)
    count = tl.where(from_list, above, length)
    key, column, value = listed_tile(0, count, from_list, ends, begins, x, list_value, list_column, capacity, TILE)
    pivot = bound
    if target == length:
        pivot = tl.full([], _LOWEST, tl.int32)
        above = length
    if known == 0:
        most = tl.where(count <= TILE, tl.max(key, 0), _HIGHEST)
        least = tl.where(from_list, bound, _LOWEST) + 1
        pivot, reach, above = find_key(
            key, target, least, most, count, from_list, ends, begins, x, list_value, list_column, capacity, TILE, WAYS
        )  # fmt: skip
        # All that reach it are taken: they are above the key before it.
        if reach == target:
            pivot -= 1
            above = target
    # Of those equal to the pivot so many are taken, past so many.
    some = target - above
    skip = tl.where(LAST, reach - target, 0)
    share = tl.cdiv(count, parts)
    begin = part * share
    end = tl.minimum(begin + share, count)
    above = tl.full([], 0, tl.int32)
    level = tl.full([], 0, tl.int32)
    for start in range(0, end, TILE):
        if start > 0:
            key, column, value = listed_tile(
                start, count, from_list, ends, begins, x, list_value, list_column, capacity, TILE
            )  # fmt: skip
        at = start + tl.arange(0, TILE)
        # Both counts in one sum: TILE is less than 2^16.
        is_above = key > pivot
        is_level = (key == pivot) & (at < count)
        both = is_above.to(tl.int32) + is_level.to(tl.int32) * 65536
        seen = tl.cumsum(both, 0)
        nth = level + (seen >> 16) - skip
        taken = is_above | (is_level & (nth > 0) & (nth <= some))
        to = above + (seen & 65535) + tl.minimum(tl.maximum(nth, 0), some) - 1
        write_taken(
            value, column, taken & (at >= begin) & (at < end), to, out_value, out_index, raw, shift, page_table, batch,
            pages, table_row, page_size,
        )  # fmt: skip
        if start + TILE < end:
            sum = tl.sum(both, 0)
            above += sum & 65535
            level += sum >> 16
    if part == 0:
        for first in range(target, k, TILE):
            to = first + tl.arange(0, TILE)
            none = tl.full([TILE], -1, tl.int32)
            tl.store(out_index + to, none.to(out_index.dtype.element_ty), to < k)
            if raw is not None:
                tl.store(raw + to, none, to < k)


def _begin(problem) -> Parameters:
    """The row's values and window, and its bound."""
    p = Parameters().add(pointer(problem.dtype, problem.aligned), "x")
    p.add("*i32", "starts", present=problem.starts).add("*i32", "lengths", present=problem.lengths)
    return p.add("*i32", "bounds")


def _listed(p: Parameters, problem) -> Parameters:
    return p.add("*i32", "counts", "ties").add(f"*{problem.dtype}", "list_value").add("*i32", "list_column")


def _sample(problem, config) -> dict:
    constants = {"UNIT": unit(problem.dtype, problem.aligned), "WHOLE": config.short_list}
    return constants | {"GROUPS": config.groups, "MEMBERS": config.members}


def _build_bound(problem, config):
    p = _begin(problem).add("i64", "x_row").add("i32", "k", "columns")
    return Build(bound_kernel, p.types, p.constants | _sample(problem, config), num_warps=config.short_warps)


def _build_list(problem, config):
    p = _listed(_begin(problem), problem).add("i64", "x_row")
    p.add("i32", "k", "columns", "programs", "chunk", "capacity")
    constants = _sample(problem, config) | {"OWN": config.own, "TILE": config.short_tile}
    # Left to itself ptxas takes 120 and more, and one program fills a multiprocessor. Looking for the bound takes them.
    registers = None if config.own else 80
    return Build(list_kernel, p.types, p.constants | constants, num_warps=config.short_warps, maxnreg=registers)


def _build_emit(problem, config):
    pages, values = problem.form == "pages", problem.form in ("values", "sorted")
    p = _listed(_begin(problem), problem).add(f"*{problem.dtype}", "out_value", present=values)
    p.add("*i64" if values else "*i32", "out_index").add("*i32", "raw", present=problem.raw)
    p.add("*i32", "page_table", present=pages).add("*i32", "row_to_batch", present=problem.mapped)
    p.add("*i32", "page_starts", present=problem.page_starts).add("*i32", "offsets", present=problem.form == "ragged")
    p.add("i64", "x_row", "out_row").add("i64", "raw_row", present=problem.raw).add("i64", "table_row", present=pages)
    p.add("i32", "k", "columns", "programs", "parts", "capacity").add("i32", "pages", "page_size", present=pages)
    constants = {"LAST": problem.last, "UNIT": unit(problem.dtype, problem.aligned)}
    constants |= {"TILE": config.short_list, "WAYS": config.short_ways}
    return Build(emit_kernel, p.types, p.constants | constants, num_warps=config.short_list_warps)


launch_bound = Launcher("top_k_bound", _build_bound)
launch_list = Launcher("top_k_list", _build_list)
launch_emit = Launcher("top_k_emit_list", _build_emit)
LAUNCHERS = (launch_bound, launch_list, launch_emit)


def kernels(problem, config):
    """(launcher, problem, config) of each kernel."""
    for own in (False, True):
        yield launch_list, _listing(problem), _configs(config)[own]
    yield launch_bound, _listing(problem), config
    yield launch_emit, problem, config


@cache
def _listing(problem):
    """What a list depends on: not what is written of it."""
    p = problem
    return TopK("values", p.dtype, starts=p.starts, lengths=p.lengths, aligned=p.aligned)


@cache
def _configs(config):
    """The list's, where each program finds the bound itself, by whether it does."""
    return replace(config, own=False), replace(config, own=True)


def share(rows: int, columns: int, config, device: torch.device) -> tuple[int, int, int]:
    """Programs that list a row, tiles of each, and programs that emit it."""
    tiles, sms = triton.cdiv(columns, config.short_tile), target_of(device).sms
    chunk = triton.cdiv(tiles, min(max(8 * sms // rows, 1), int(PARTS)))
    # Every program of emit searches the whole list: enough of them to fill the chip once, no more.
    return triton.cdiv(tiles, chunk), chunk, min(max(sms // rows, 1), 16)


def run(problem, config, x, k, window, outputs, strides, places):
    """Launch it. `window` are starts and lengths; `places`, after the strides of outputs, what only some forms have."""
    rows, columns = x.shape
    programs, chunk, parts = share(rows, columns, config, x.device)
    # A list longer than emit has registers for takes it several times as long.
    capacity = min(chunk * config.short_tile, 2 * config.short_list)
    own = rows * programs <= 2 * target_of(x.device).sms

    def scratch(*shape, dtype=torch.int32):
        return torch.empty(shape, dtype=dtype, device=x.device)

    bounds, counts, ties = scratch(rows), scratch(rows, programs), scratch(rows, programs)
    list_value, list_column = scratch(rows, programs, capacity, dtype=x.dtype), scratch(rows, programs, capacity)
    given, listed, x_row = (x, *window, bounds), (counts, ties, list_value, list_column), x.stride(0)
    listing = _listing(problem)
    if not own:
        start(launch_bound, listing, config, (rows, 1, 1), *given, x_row, k, columns)
    start(launch_list, listing, _configs(config)[own], (rows * programs, 1, 1), *given, *listed, x_row, k, columns,
          programs, chunk, capacity)  # fmt: skip
    start(launch_emit, problem, config, (rows * parts, 1, 1), *given, *listed, *outputs, *places[:4], x_row, *strides,
          k, columns, programs, parts, capacity, *places[4:])  # fmt: skip
