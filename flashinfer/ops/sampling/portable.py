"""Sampling in Triton. Many programs share a row; a later launch combines their results.

Grid: statistics_kernel, softmax_kernel and write_kernel one program for a tile of a row; race_kernel `programs`
programs a row, each with `chunk` tiles; pick_kernel one a row. Warps: all share a tile. Shared memory: reductions.
Inputs: x [rows, columns], probabilities or logits, a window of each row, temperatures, min_p, a seed and an offset.
Outputs: tile_top, tile_sum float32 [rows, tiles]; probabilities or scores [rows, columns]; samples and valid [rows].
Method: an exponential race with variates of Philox 4x32-10 (Salmon et al., 2011); docs/rooms/sampling.md.
"""

from functools import cache

import torch
import triton
import triton.language as tl

from flashinfer._core.implementation import Implementation
from flashinfer._core.launch import Build, Launcher
from flashinfer.ops._device import find_prefix as stages
from flashinfer.ops._device.find_prefix import Filters, Parameters, Stages, start
from flashinfer.ops._device.philox import exponentials, source_of
from flashinfer.ops._device.prefix import (
    BINS,
    INSIDE,
    LOGITS,
    NUMBERS,
    PIVOT,
    PROBS,
    RANK,
    STATE,
    TOP,
    larger_score,
    is_kept,
    key_of,
    load_for_max,
    load_tile,
    load_values,
    may_reach,
    row_parameter,
    race_score,
    row_statistics,
    row_winner,
    window_of,
)
from flashinfer.ops._device.rows import multiple, pointer, unit
from flashinfer.ops.sampling import Draw, Prefix, Softmax


@triton.jit
def inverse_temperature(temperature, temperatures, row):
    """1 / temperature; 1 without a temperature, NaN if it is negative. Never 0 or inf, whose products may be NaN: at 0,
    where upstream multiplies by 0, the least above it."""
    if temperature is None and temperatures is None:
        scale = 1.0
    else:
        t = row_parameter(temperature, temperatures, row)
        least = tl.full([], 1, tl.int32).to(tl.float32, bitcast=True)
        scale = tl.minimum(tl.maximum(1.0 / t, least), 3.4028234663852886e38)
        scale = tl.where(t > 0, scale, tl.where(t == 0, least, float("nan")))
    return scale


@triton.jit
def statistics_kernel(
    x, window, tile_top, tile_sum, temperature, temperatures, x_row, columns, tiles,
    SUM: tl.constexpr, UNIT: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """tile_top and tile_sum float32 [rows, tiles]: the largest value of each tile, NaN if it holds NaN or inf, and the
    sum of its exponentials. One program a tile. A temperature scales differences from the largest, which stays
    exact."""
    row = tl.program_id(0) // tiles
    tile = tl.program_id(0) % tiles
    x, length = window_of(x, x_row, window, row, columns, UNIT)
    value = load_for_max(x, tile, length, TILE)
    top = tl.max(value, 0)
    if SUM:
        scale = inverse_temperature(temperature, temperatures, row)
        base = tl.where(top == float("-inf"), 0.0, top)
        total = tl.sum(tl.exp((value - base) * scale), 0)
        tl.store(tile_sum + tl.program_id(0), total)
    tl.store(tile_top + tl.program_id(0), tl.where(top == float("inf"), float("nan"), top))


@triton.jit
def store_tile(out, first, columns, value, TILE: tl.constexpr):
    """Writes a tile of a row; 16 bytes at a time if it is aligned and entirely inside of the row."""
    column = first + tl.arange(0, TILE)
    if first + TILE <= columns:
        tl.store(out + column, value)
    else:
        tl.store(out + column, value, column < columns)


@triton.jit
def softmax_kernel(
    x, tile_top, tile_sum, temperature, temperatures, out, x_row, out_row, columns, tiles,
    UNIT: tl.constexpr, OUT_UNIT: tl.constexpr, TILE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The softmax of a tile. Each program adds up the sums of all tiles of its row."""
    row = tl.program_id(0) // tiles
    scale = inverse_temperature(temperature, temperatures, row)
    at = row.to(tl.int64) * tiles
    top, _ = row_statistics(tile_top, tile_sum, row, tiles, PROBS, BLOCK)
    total = tl.full([], 0.0, tl.float32)
    for first in range(0, tiles, BLOCK):
        tile = first + tl.arange(0, BLOCK)
        tops = tl.load(tile_top + at + tile, tile < tiles, other=float("-inf"))
        sums = tl.load(tile_sum + at + tile, tile < tiles, other=0.0)
        total += tl.sum(sums * tl.where(tops == float("-inf"), 0.0, tl.exp((tops - top) * scale)), 0)
    first = tl.program_id(0) % tiles * TILE
    value = load_tile(x + row.to(tl.int64) * multiple(x_row, UNIT), first, columns, LOGITS, TILE)
    # A row without a finite logit has no distribution: 0 / 0 is NaN.
    share = tl.math.div_rn(tl.exp((value - tl.where(top == float("-inf"), 0.0, top)) * scale), total)
    store_tile(out + row.to(tl.int64) * multiple(out_row, OUT_UNIT), first, columns, share, TILE)


@triton.jit
def race_kernel(
    x, window, tile_top, min_p, min_ps, part_score, part_column, random, x_row, columns, programs,
    chunk, tiles, DOMAIN: tl.constexpr, SEED: tl.constexpr, OFFSET: tl.constexpr, UNIT: tl.constexpr,
    TILE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """part_score float32, part_column int32 [rows, programs]: the largest score among a program's columns and its
    column; a score of NaN in an invalid row. With tile_top only columns of at least min_p times the row's largest take
    part."""
    row = tl.program_id(0) // programs
    part = tl.program_id(0) % programs
    x, length = window_of(x, x_row, window, row, columns, UNIT)
    seed, offset, stream = source_of(random, row, SEED, OFFSET)
    # Each lane of a tile keeps its largest score; the reduction over lanes runs once, after the last tile.
    lowest = float("-inf") if DOMAIN == LOGITS else 0.0
    best = tl.full([TILE], lowest, tl.float32)
    winner = tl.full([TILE], -1, tl.int32)
    bad = tl.zeros([TILE], tl.int32)
    least = tl.full([], float("-inf"), tl.float32)
    refused = tl.full([], 0, tl.int32)
    if tile_top is not None:
        top, _ = row_statistics(tile_top, tile_top, row, tiles, PROBS, BLOCK)
        share = row_parameter(min_p, min_ps, row)
        least = share * top
        refused = tl.where((share >= 0) & (share <= 1), 0, 1)
    for i in range(chunk):
        first = (part * chunk + i) * TILE
        column = first + tl.arange(0, TILE)
        value = load_tile(x, first, length, DOMAIN, TILE)
        bad |= ((value != value) | (value == float("inf"))).to(tl.int32)
        score = race_score(value, exponentials(seed, offset, stream, first, TILE), DOMAIN)
        score = tl.where((column < length) & (value >= least), score, best)
        best, winner = larger_score(score, column, best, winner)
    top_score = tl.max(best, 0)
    # Of equal scores the first column; a lane without any score has column -1.
    first = tl.min(tl.where((best == top_score) & (winner >= 0), winner, 0x7FFFFFFF), 0)
    refused |= tl.max(bad, 0)
    tl.store(part_score + tl.program_id(0), tl.where(refused > 0, float("nan"), top_score))
    tl.store(part_column + tl.program_id(0), tl.where(first == 0x7FFFFFFF, -1, first))


@triton.jit
def pick_kernel(part_score, part_column, samples, valid, programs, DOMAIN: tl.constexpr, BLOCK: tl.constexpr):
    """The column with the largest score of a row; token 0 and not valid if a score is NaN, or if there is no column."""
    row = tl.program_id(0)
    best, winner = row_winner(part_score, part_column, row, programs, DOMAIN, BLOCK)
    bad = tl.full([], 0, tl.int32)
    for first in range(0, programs, BLOCK):
        part = first + tl.arange(0, BLOCK)
        score = tl.load(part_score + row.to(tl.int64) * programs + part, part < programs, other=0)
        bad |= tl.max((score != score).to(tl.int32), 0)
    winner = tl.where(bad > 0, -1, winner)
    tl.store(samples + row, tl.maximum(winner, 0).to(samples.dtype.element_ty))
    tl.store(valid + row, (winner >= 0).to(tl.int8))


@triton.jit
def write_kernel(
    x, maxima, state, numbers, out, x_row, out_row, columns, tiles,
    DOMAIN: tl.constexpr, UNIT: tl.constexpr, TILE: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    """A tile of a row: probabilities divided by the sum of the prefix and 0 outside it, or scores and -inf outside."""
    row = tl.program_id(0) // tiles
    tile = tl.program_id(0) % tiles
    column = tile * TILE + tl.arange(0, TILE)
    inside = column < columns
    at = state + row.to(tl.int64) * STATE
    pivot = tl.load(at + PIVOT)
    read = inside & may_reach(maxima, row, tile, tiles, pivot, TILE, GROUP)
    value = load_values(x + row.to(tl.int64) * multiple(x_row, UNIT), column, read, DOMAIN)
    kept = read & is_kept(key_of(value).to(tl.int64), column, pivot, tl.load(at + RANK), columns, None)
    if DOMAIN == PROBS:
        top = tl.load(numbers + row * NUMBERS + TOP)
        share = tl.math.div_rn(value, tl.load(numbers + row * NUMBERS + INSIDE))
        result = tl.where(kept, share, 0.0)
        result = tl.where(top == top, result, float("nan")).to(out.dtype.element_ty)
    else:
        result = tl.where(kept, value, float("-inf")).to(out.dtype.element_ty)
    store_tile(out + row.to(tl.int64) * multiple(out_row, UNIT), tile * TILE, columns, result, TILE)


def _build_statistics(problem, config):
    p = Parameters().add(pointer(problem.dtype, problem.aligned), "x")
    sums = isinstance(problem, Softmax)
    indices = "" if sums else problem.indices
    p.window(indices).add("*fp32", "tile_top")
    p.add("*fp32", "tile_sum", present=sums)
    _temperature(p, problem.temperature if sums else "")
    p.add("i64", "x_row").add("i32", "columns", "tiles")
    constants = {
        "SUM": sums,
        "UNIT": unit(problem.dtype, problem.aligned),
        "TILE": config.tile,
    }
    return Build(statistics_kernel, p.types, constants, num_warps=config.num_warps)


def _temperature(p, kind):
    p.add("fp32", "temperature", present=kind == "scalar")
    p.add(f"*{kind}", "temperatures", present=kind not in ("", "scalar"))


def _build_softmax(problem, config):
    p = Parameters().add(pointer(problem.dtype, problem.aligned), "x").add("*fp32", "tile_top", "tile_sum")
    _temperature(p, problem.temperature)
    p.add(pointer("fp32", problem.aligned), "out").add("i64", "x_row", "out_row").add("i32", "columns", "tiles")
    constants = {
        "UNIT": unit(problem.dtype, problem.aligned),
        "OUT_UNIT": unit("fp32", problem.aligned),
        "TILE": config.tile,
        "BLOCK": 128,
    }
    return Build(softmax_kernel, p.types, constants, num_warps=config.num_warps)


def _build_race(problem, config):
    p = Parameters().add(pointer(problem.dtype, problem.aligned), "x")
    p.window(problem.indices)
    p.add("*fp32", "tile_top", present=bool(problem.min_p)).add("fp32", "min_p", present=problem.min_p == "scalar")
    p.add(f"*{problem.min_p}", "min_ps", present=problem.min_p not in ("", "scalar"))
    p.add("*fp32", "part_score").add("*i32", "part_column").randomness(problem.seed, problem.offset)
    p.add("i64", "x_row").add("i32", "columns", "programs", "chunk", "tiles")
    constants = {
        "DOMAIN": LOGITS if problem.source == "logits" else PROBS,
        "SEED": problem.seed,
        "OFFSET": problem.offset,
        "UNIT": unit(problem.dtype, problem.aligned),
        "TILE": config.tile,
        "BLOCK": 128,
    }
    return Build(race_kernel, p.types, constants, num_warps=config.num_warps)


def _build_pick(problem, config):
    types = {"part_score": "*fp32", "part_column": "*i32", "samples": f"*{problem.out}", "valid": "*i8"}
    constants = {"DOMAIN": LOGITS if problem.source == "logits" else PROBS, "BLOCK": BINS}
    return Build(pick_kernel, types | {"programs": "i32"}, constants, num_warps=1)


def _build_write(problem, config):
    rows = pointer(problem.dtype, problem.aligned)
    p = Parameters().add(rows, "x").add("*i32", "maxima").add("*i64", "state").add("*fp32", "numbers").add(rows, "out")
    p.add("i64", "x_row", "out_row").add("i32", "columns", "tiles")
    constants = stages.constants_of(stages_of(problem)) | stages.groups_of(config)
    return Build(write_kernel, p.types, constants, num_warps=config.num_warps)


launch_statistics = Launcher("sampling_statistics", _build_statistics)
launch_softmax = Launcher("softmax", _build_softmax)
launch_race = Launcher("sampling_race", _build_race)
launch_pick = Launcher("sampling_pick", _build_pick)
launch_write = Launcher("sampling_write", _build_write)

# Bytes of stack that a thread may use: scalars that live during all of resolve's search, three at most (ptxas).
STACK_BUDGET = 24


@cache
def stages_of(problem: Prefix) -> Stages:
    drawing, distribution = problem.use == "draw", problem.source != "scores"
    return Stages(
        problem.source,
        problem.dtype,
        problem.aligned,
        problem.top_k,
        problem.top_p,
        problem.top_k_first and bool(problem.top_k and problem.top_p),
        statistics=distribution,
        mass=bool(problem.top_p) or problem.use == "renorm",
        race=drawing,
        ties=True,
        seed=problem.seed,
        offset=problem.offset,
        indices=problem.indices,
        out=problem.out,
    )


def kernels(problem, config):
    """(launcher, problem, config) of every kernel that a problem needs."""
    if isinstance(problem, Softmax):
        names = (launch_statistics, launch_softmax)
    elif isinstance(problem, Draw):
        names = (launch_statistics, launch_race, launch_pick) if problem.min_p else (launch_race, launch_pick)
    else:
        yield from stages.stages_to_compile(stages_of(problem), config)
        names = () if problem.use == "draw" else (launch_write,)
    yield from ((launcher, problem, config) for launcher in names)


def _split(values):
    """(None, values) for a tensor of values, (values, None) for a scalar."""
    return (None, values) if isinstance(values, torch.Tensor) else (values, None)


def _softmax(problem, config, logits, temperature, out):
    rows, columns = logits.shape
    tiles = triton.cdiv(columns, config.tile)
    tile_top, tile_sum = logits.new_empty((2, rows, tiles), dtype=torch.float32)
    grid, both = (rows * tiles, 1, 1), _split(temperature)
    start(launch_statistics, problem, config, grid, logits, tile_top, tile_sum, *both, logits.stride(0), columns, tiles)
    start(launch_softmax, problem, config, grid, logits, tile_top, tile_sum, *both, out, logits.stride(0),
          out.stride(0), columns, tiles)  # fmt: skip


def _draw(problem, config, x, min_p, randomness, indices, samples, valid):
    rows, columns = len(samples), x.shape[1]
    programs, chunk, tiles = stages.share(rows, columns, config.tile, x.device)
    tile_top = None
    if min_p is not None:
        tile_top = x.new_empty((rows, tiles), dtype=torch.float32)
        grid = (rows * tiles, 1, 1)
        start(launch_statistics, problem, config, grid, x, indices, tile_top, x.stride(0), columns, tiles)
    part_score = x.new_empty((rows, programs), dtype=torch.float32)
    part_column = x.new_empty((rows, programs), dtype=torch.int32)
    start(launch_race, problem, config, (rows * programs, 1, 1), x, indices, tile_top, *_split(min_p), part_score,
          part_column, *randomness, x.stride(0), columns, programs, chunk, tiles)  # fmt: skip
    valid = valid.view(torch.int8)
    start(launch_pick, problem, config, (rows, 1, 1), part_score, part_column, samples, valid, programs)


def _prefix(problem, config, x, k, p, randomness, indices, out, valid):
    filters = Filters(*_split(k), *_split(p), indices=indices, randomness=randomness)
    if problem.use == "draw":
        stages.find_prefix(stages_of(problem), config, x, len(out), filters, out, valid.view(torch.int8))
        return
    rows, columns = x.shape
    found = stages.find_prefix(stages_of(problem), config, x, rows, filters)
    start(launch_write, problem, config, (rows * found.tiles, 1, 1), x, found.maxima, found.state, found.numbers, out,
          x.stride(0), out.stride(0), columns, found.tiles)  # fmt: skip


# One module for three ops: softmax and draw share the statistics of logits, softmax and prefix `store_tile`.
IMPLEMENTATION = Implementation(
    {Softmax: _softmax, Draw: _draw, Prefix: _prefix},
    (launch_statistics, launch_softmax, launch_race, launch_pick, launch_write, *stages.LAUNCHERS),
    kernels=kernels,
    compile_together=True,
    stack_budget=STACK_BUDGET,
)
