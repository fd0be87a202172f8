"""Top-k in Triton: a small k by `short`; else the pivot of each row by `prefix`, and a pass that writes the elements
above it.

Grid: emit_kernel `programs` programs a row.
Warps: all share a tile. Shared memory: reductions and scans.
Inputs: x [rows, columns], a window of each row, results of the stages of `flashinfer/ops/_device/prefix.py`; page
tables or offsets where indices become slots. Outputs: values and indices [rows, k], or slots and raw indices.
Method: `flashinfer/ops/_device/prefix.py`; docs/rooms/topk.md.
"""

from functools import cache

import torch
import triton
import triton.language as tl

from flashinfer._core.implementation import Implementation
from flashinfer._core.launch import Build, Launcher
from flashinfer.ops._device import find_prefix as stages
from flashinfer.ops._device.find_prefix import Filters, Parameters, Stages, start
from flashinfer.ops._device.prefix import (
    KEPT,
    CANDIDATES,
    PIVOT,
    RANK,
    SCORES,
    STATE,
    is_kept,
    key_of,
    listed_keys,
    load_candidates,
    may_reach,
    candidate_share,
    window_of,
)
from flashinfer.ops.topk import TopK, order, short
from flashinfer.ops.topk.results import Results, add_results, column_offset, write_none, write_taken


@triton.jit
def write_selected(value, column, taken, place, out_value, out_index, raw, k, shift, where, batch, pages):
    """Writes the elements of a tile with `taken` from index `place` on; returns their number."""
    found = taken.to(tl.int32)
    to = place + tl.cumsum(found, 0) - 1
    write_taken(value, column, taken, to, k, out_value, out_index, raw, shift, where, batch, pages)
    return tl.sum(found, 0)


@triton.jit
def kept_before(
    end, lists, row, capacity, x, length, pivot, rank, columns, LAST: tl.constexpr, TILE: tl.constexpr
):
    """The number of elements of the prefix before column `end`, in the list or, if that overflowed, in the row."""
    count = tl.load(lists.count + row)
    from_list = count <= capacity
    count = tl.where(from_list, count, tl.minimum(end, length))
    list_value = lists.value + row.to(tl.int64) * capacity
    list_column = lists.column + row.to(tl.int64) * capacity
    before = tl.full([], 0, tl.int32)
    for start in range(0, count, TILE):
        key, column = listed_keys(
            start, count, from_list, x, list_value, list_column, -(1 << 31), (1 << 31) - 1, SCORES, TILE
        )  # fmt: skip
        exists = (key > -(1 << 31)) & (column < end)
        before += tl.sum((exists & is_kept(key, column, pivot, rank, columns, LAST)).to(tl.int32), 0)
    return before


@triton.jit
def emit_kernel(
    x, window, maxima, candidates, state, lists, places, out, where, x_row, out_row, raw_row, pages, k, columns,
    programs, chunk, tiles, capacity,
    LAST: tl.constexpr, UNIT: tl.constexpr, TILE: tl.constexpr, CANDIDATE_TILE: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    """Writes the elements of a row's prefix in the order of their indices.

    `places` has the index of each program's first result; where candidate groups are listed, each program counts the
    results before its own groups. out.value and out.index [rows, k]; out.raw gets the indices where out.index gets
    slots. -1 after the prefix.
    """
    row = tl.program_id(0) // programs
    part = tl.program_id(0) % programs
    x, length = window_of(x, x_row, window, row, columns, UNIT)
    at = state + row.to(tl.int64) * STATE
    pivot, rank, kept = tl.load(at + PIVOT), tl.load(at + RANK), tl.load(at + KEPT).to(tl.int32)
    candidate_groups = tl.load(at + CANDIDATES).to(tl.int32)
    candidates += row.to(tl.int64) * tiles * (TILE // GROUP)
    out_value, out_index, raw = out.value, out.index + row.to(tl.int64) * out_row, out.raw
    if out_value is not None:
        out_value += row.to(tl.int64) * k
    if raw is not None:
        raw += row.to(tl.int64) * raw_row
    shift, batch = column_offset(row, where, window.starts)
    first, end = candidate_share(candidate_groups, part, programs, CANDIDATE_TILE // GROUP)
    if first < end:
        place = kept_before(
            tl.load(candidates + first) * GROUP, lists, row, capacity, x, length, pivot, rank, columns, LAST, TILE
        )
        for slot in range(first, end, CANDIDATE_TILE // GROUP):
            value, column, ok = load_candidates(x, candidates, slot, end, length, UNIT, CANDIDATE_TILE, GROUP)
            key = key_of(value.to(tl.float32)).to(tl.int64)
            taken = ok & is_kept(key, column, pivot, rank, columns, LAST)
            place += write_selected(
                value, column, taken, place, out_value, out_index, raw, k, shift, where, batch, pages
            )
    if candidate_groups < 0:
        place = tl.load(places + tl.program_id(0))
        for i in range(chunk):
            tile = part * chunk + i
            reach = may_reach(maxima, row, tile, tiles, pivot, TILE, GROUP)
            if tl.max(reach.to(tl.int32), 0) > 0:
                column = tile * TILE + tl.arange(0, TILE)
                inside = (column < length) & reach
                value = tl.load(x + column, inside, other=0)
                key = key_of(value.to(tl.float32)).to(tl.int64)
                taken = inside & is_kept(key, column, pivot, rank, columns, LAST)
                place += write_selected(
                    value, column, taken, place, out_value, out_index, raw, k, shift, where, batch, pages
                )
    if part == 0:
        write_none(out_value, out_index, raw, kept, k, TILE)


@cache
def stages_of(problem: TopK) -> Stages:
    return Stages(
        "scores",
        problem.dtype,
        problem.aligned,
        top_k="scalar",
        places=True,
        last=problem.last,
        starts=problem.starts,
        lengths=problem.lengths,
    )


def _build_emit(problem, config):
    s = stages_of(problem)
    p = Parameters().add(stages.rows_pointer(s), "x").window("", s.starts, s.lengths)
    p.add("*i32", "maxima", "candidates").add("*i64", "state")
    p.add("*i32", "lists.count").add("*fp32", "lists.value").add("*i32", "lists.column", "places")
    add_results(p, problem).add("i32", "programs", "chunk", "tiles", "capacity")
    unit = stages.constants_of(s)["UNIT"]
    constants = stages.groups_of(config) | stages.candidate_tile_of(config)
    constants |= {"LAST": problem.last, "UNIT": unit}
    return Build(emit_kernel, p.types, constants, num_warps=config.num_warps)


launch_emit = Launcher("top_k_emit", _build_emit)

# Bytes of stack that a thread may use: scalars that live during all of resolve's search, twelve words at most, on
# sm_120, and six words of the list kernel (ptxas).
STACK_BUDGET = 48


def kernels(problem, config):
    """(launcher, problem, config) of every kernel that a problem needs."""
    yield from short.kernels(problem, config)
    yield from stages.stages_to_compile(stages_of(problem), config)
    yield launch_emit, problem, config
    if problem.result == "sorted":
        yield from order.kernels(order.Problem(problem.dtype, problem.last))


def run(problem, config, x, k, starts, lengths, places, outputs):
    """Write the k largest of each row to `outputs`: values and indices, or slots and raw indices (or None).

    `places` are page table, row_to_batch, page_starts and page_size of "pages", or the offsets of "ragged"; `outputs`
    of "columns" are values (or None) and indices.
    """
    rows = len(x)
    if problem.result == "pages":
        table, row_to_batch, page_starts, page_size = places
        index, raw = outputs
        results = Results(None, index, raw, table, row_to_batch, page_starts, page_size=page_size)
    elif problem.result == "ragged":
        results = Results(None, *outputs, offsets=places[0])
    elif problem.result == "sorted":
        results = Results(*map(torch.empty_like, outputs))
    else:
        results = Results(*outputs)
    if k <= config.short_k:
        short.run(problem, config, x, k, (starts, lengths), results)
    else:
        found = stages.find_prefix(stages_of(problem), config, x, rows, Filters(k=k, starts=starts, lengths=lengths))
        start(launch_emit, problem, config, (rows * found.programs, 1, 1), x, starts, lengths, found.maxima,
              found.candidates, found.state, found.listed, found.list_value, found.list_column, found.part_count,
              *results.arguments(x, k), found.programs, found.chunk, found.tiles,
              found.list_column.shape[1])  # fmt: skip
    if problem.result == "sorted":
        order.run(order.Problem(problem.dtype, problem.last), results.value, results.index, *outputs)


IMPLEMENTATION = Implementation(
    run,
    (launch_emit, *order.LAUNCHERS, *short.LAUNCHERS, *stages.LAUNCHERS),
    kernels=kernels,
    stack_budget=STACK_BUDGET,
)
