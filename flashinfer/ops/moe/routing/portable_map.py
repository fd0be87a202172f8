"""The token map in Triton, by counting sort.

Grid: few_kernel, the whole map in one launch, one program for each expert; count_kernel and place_kernel, for many
pairs, one program for `steps` blocks of pairs. Warps: all share a block. Shared memory: histograms, scans and gathers.
Inputs: ids [tokens, top_k], or packed with weights; of place_kernel counts int32 [programs, EXPERTS].
Outputs: the fields of `TokenMap` in `flashinfer/ops/moe/token_map.py`, and float32 weights of packed ids.
Method: counting sort, in the order of the pairs.
"""

import torch
import triton
import triton.language as tl

from flashinfer._core.implementation import Implementation
from flashinfer._core.launch import Build, Launcher


@triton.jit
def local_experts(ids, pair, pairs, experts, offset, PACKED: tl.constexpr):
    """The ids of pairs, and their experts counted from `offset`; -1 for experts of other ranks and past the last
    pair."""
    id = tl.load(ids + pair, pair < pairs, other=-1)
    expert = id
    if PACKED:
        expert = id >> 16
    local = expert - offset
    mine = (expert >= 0) & (local >= 0) & (local < experts)
    return id, tl.where(mine, local, -1).to(tl.int32)


@triton.jit
def few_kernel(
    ids, first, count, tiles, tile_expert, tile_end, row_pair, pair_row, weights, pairs, experts, offset, tile, most,
    PACKED: tl.constexpr, EXPERTS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The whole map in one launch. A program counts all pairs, assigns rows to its expert's pairs in order, and writes
    the expert's padding and tiles."""
    expert = tl.program_id(0)
    index = tl.arange(0, BLOCK)
    each = tl.arange(0, EXPERTS)
    none = tl.full([BLOCK], -1, tl.int32)
    counts = tl.zeros([EXPERTS], tl.int32)
    for start in range(0, pairs, BLOCK):
        _, local = local_experts(ids, start + index, pairs, experts, offset, PACKED)
        counts += tl.histogram(tl.maximum(local, 0), EXPERTS, mask=local >= 0)
    padded = (counts + tile - 1) // tile * tile
    begin = tl.sum(tl.where(each < expert, padded, 0), 0)
    mine = tl.sum(tl.where(each == expert, counts, 0), 0)
    following = begin + (mine + tile - 1) // tile * tile
    used = tl.sum(padded, 0) // tile
    tl.store(first + expert, begin)
    tl.store(count + expert, mine)
    if expert == experts - 1:
        tl.store(first + experts, following)
        tl.store(tiles, used)

    row = begin
    for start in range(0, pairs, BLOCK):
        pair = start + index
        id, local = local_experts(ids, pair, pairs, experts, offset, PACKED)
        match = local == expert
        place = row + tl.cumsum(match.to(tl.int32), 0) - 1
        row += tl.sum(match.to(tl.int32), 0)
        tl.store(row_pair + place, pair, match)
        tl.store(pair_row + pair, place, match)
        if PACKED:
            tl.store(weights + pair, packed_weight(id), match)
        # Pairs without a row have no expert: the programs take turns in writing their -1.
        lost = (pair < pairs) & (local < 0) & (start // BLOCK % experts == expert)
        tl.store(pair_row + pair, none, lost)

    for start in range(begin + mine, following, BLOCK):
        tl.store(row_pair + start + index, none, start + index < following)
    for start in range(begin // tile, following // tile, BLOCK):
        inside = start + index < following // tile
        tl.store(tile_expert + start + index, tl.zeros([BLOCK], tl.int32) + expert, inside)
        tl.store(tile_end + start + index, tl.zeros([BLOCK], tl.int32) + begin + mine, inside)
    for start in range(used + expert * BLOCK, most, experts * BLOCK):
        tl.store(tile_expert + start + index, none, start + index < most)


@triton.jit
def packed_weight(id):
    """The float32 value of the bfloat16 in the lower half."""
    return ((id & 0xFFFF) << 16).to(tl.float32, bitcast=True)


@triton.jit
def count_kernel(
    ids, counts, pairs, experts, offset, steps,
    PACKED: tl.constexpr, EXPERTS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Counts each expert's pairs in the program's `steps` blocks: one row of counts [programs, EXPERTS]."""
    each = tl.arange(0, EXPERTS)
    found = tl.zeros([EXPERTS], tl.int32)
    for step in range(steps):
        pair = (tl.program_id(0) * steps + step) * BLOCK + tl.arange(0, BLOCK)
        _, local = local_experts(ids, pair, pairs, experts, offset, PACKED)
        found += tl.histogram(tl.maximum(local, 0), EXPERTS, mask=local >= 0)
    tl.store(counts + tl.program_id(0).to(tl.int64) * EXPERTS + each, found)


@triton.jit
def place_kernel(
    ids, counts, first, count, tiles, tile_expert, tile_end, row_pair, pair_row, weights, pairs, experts, offset, tile,
    most, programs, steps,
    PACKED: tl.constexpr, EXPERTS: tl.constexpr, BLOCK: tl.constexpr, COUNTS: tl.constexpr, TILES: tl.constexpr,
    PADDING: tl.constexpr,
):  # fmt: skip
    """Assigns rows to the pairs of the program's `steps` blocks, and writes its share of the tiles and their
    padding."""
    mine = tl.program_id(0)
    each = tl.arange(0, EXPERTS)
    total = tl.zeros([EXPERTS], tl.int32)
    before = tl.zeros([EXPERTS], tl.int32)
    for start in range(0, programs, COUNTS):
        program = (start + tl.arange(0, COUNTS))[:, None]
        found = tl.load(counts + program.to(tl.int64) * EXPERTS + each[None, :], program < programs, other=0)
        total += tl.sum(found, 0)
        before += tl.sum(tl.where(program < mine, found, 0), 0)
    padded = (total + tile - 1) // tile * tile
    following = tl.cumsum(padded, 0)
    begin = following - padded
    used = tl.sum(padded, 0) // tile
    if mine == 0:
        tl.store(first + each, begin, each < experts)
        tl.store(first + experts, used * tile)
        tl.store(count + each, total, each < experts)
        tl.store(tiles, used)

    # For each expert the row of its next pair.
    free = begin + before
    index = tl.arange(0, BLOCK)
    for step in range(steps):
        pair = (mine * steps + step) * BLOCK + index
        id, local = local_experts(ids, pair, pairs, experts, offset, PACKED)
        earlier = (local[:, None] == local[None, :]) & (index[None, :] < index[:, None])
        row = tl.gather(free, tl.maximum(local, 0), 0) + tl.sum(earlier.to(tl.int32), 1)
        free += tl.histogram(tl.maximum(local, 0), EXPERTS, mask=local >= 0)
        tl.store(row_pair + row, pair, local >= 0)
        tl.store(pair_row + pair, tl.where(local >= 0, row, -1), pair < pairs)
        if PACKED:
            tl.store(weights + pair, packed_weight(id), local >= 0)

    end = begin + total
    for start in range(mine * TILES, most, programs * TILES):
        t = start + tl.arange(0, TILES)
        # The expert of a tile is the number of experts that end at or before it.
        expert = tl.sum((following[None, :] <= (t * tile)[:, None]).to(tl.int32), 1)
        stop = tl.gather(end, tl.minimum(expert, EXPERTS - 1), 0)
        tl.store(tile_expert + t, tl.where(t < used, expert, -1), t < most)
        tl.store(tile_end + t, stop, t < used)
        for within in range(0, tile, PADDING):
            column = (within + tl.arange(0, PADDING))[None, :]
            row = (t * tile)[:, None] + column
            none = tl.full([TILES, PADDING], -1, tl.int32)
            tl.store(row_pair + row, none, (t < used)[:, None] & (column < tile) & (row >= stop[:, None]))


def _ids(problem) -> str:
    return "*i64" if problem.ids == "i64" else "*i32"


_OUTPUTS = ("first", "count", "tiles", "tile_expert", "tile_end", "row_pair", "pair_row")
_NUMBERS = ("pairs", "experts", "offset")


def _build_map(problem, config, kernel, counts: tuple = (), outputs: tuple = (), numbers: tuple = (), **constants):
    types = {"ids": _ids(problem)} | dict.fromkeys((*counts, *outputs), "*i32")
    constants |= {"PACKED": problem.ids == "packed", "EXPERTS": problem.experts, "BLOCK": config.pairs}
    if outputs:
        types["weights"] = "*fp32" if problem.ids == "packed" else None
    return Build(kernel, types | dict.fromkeys(_NUMBERS + numbers, "i32"), constants, num_warps=config.num_warps)


def _build_few(problem, config):
    return _build_map(problem, config, few_kernel, (), _OUTPUTS, ("tile", "most"))


def _build_count(problem, config):
    return _build_map(problem, config, count_kernel, ("counts",), numbers=("steps",))


def _build_place(problem, config):
    # COUNTS rows of counts are loaded at once: 16 counts a thread.
    share = {"COUNTS": max(512 * config.num_warps // problem.experts, 1), "TILES": 16, "PADDING": 32}
    numbers = ("tile", "most", "programs", "steps")
    return _build_map(problem, config, place_kernel, ("counts",), _OUTPUTS, numbers, **share)


launch_few = Launcher("moe_map_few", _build_few)
launch_count = Launcher("moe_map_count", _build_count)
launch_place = Launcher("moe_map_place", _build_place)


def kernels(problem, config):
    """(launcher, problem, config) of every kernel that a problem needs."""
    for launch in (launch_few,) if problem.few else (launch_count, launch_place):
        yield launch, problem, config


def run(problem, config, ids, offset, tile, out, weights=None):
    """Write the TokenMap `out` of ids [tokens, top_k], for len(out.count) experts from `offset` on.

    weights : float32 [tokens, top_k], receives those of packed ids.
    """
    experts, pairs = len(out.count), ids.numel()
    packed = [weights] if problem.ids == "packed" else []
    numbers = pairs, experts, offset
    if problem.few:
        launch_few(problem, config, (experts, 1, 1), ids, *out, *packed, *numbers, tile, len(out.tile_expert))
        return
    steps = triton.cdiv(pairs, config.pairs * config.programs)
    programs = triton.cdiv(pairs, config.pairs * steps)
    counts = torch.empty(programs, problem.experts, dtype=torch.int32, device=ids.device)
    launch_count(problem, config, (programs, 1, 1), ids, counts, *numbers, steps)
    launch_place(problem, config, (programs, 1, 1), ids, counts, *out, *packed, *numbers, tile, len(out.tile_expert),
                 programs, steps)  # fmt: skip


IMPLEMENTATION = Implementation(run, (launch_few, launch_count, launch_place), kernels=kernels)
