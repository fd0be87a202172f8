"""The third stage of `prefix`: sums the elements at or above the key `high`, and lists those between `low` and `high`.

Grid: `programs` programs a row, each with `chunk` tiles of TILE columns, of which it reads the groups whose maximum
reaches `low`; or with its share of the candidate groups that bracket_kernel has listed.
Warps: all share a tile. Shared memory: reductions and scans.
Inputs: x [rows, columns], a window of each row, maxima, candidates, state and numbers of the stages before.
Outputs: parts [rows, programs], a count, a mass and a winner each; lists.value float32 and lists.column int32 [rows,
capacity], lists.count int32 [rows].
Method: `flashinfer/ops/_device/prefix.py`.
"""

import triton
import triton.language as tl

from flashinfer.ops._device.pdl import begin
from flashinfer.ops._device.philox import exponentials, source_of
from flashinfer.ops._device.prefix import (
    PROBS,
    LOGITS,
    HIGH,
    LOW,
    CANDIDATES,
    STATE,
    TOP,
    NUMBERS,
    BEYOND,
    key_of,
    weight_of,
    fixed_point_scale,
    to_fixed_point,
    window_of,
    load_values,
    may_reach,
    larger_score,
    race_score,
    candidate_share,
    load_candidates,
)


@triton.jit
def append(between, value, column, listed, list_value, list_column, capacity):
    """Appends a tile's elements to a row's list. Elements past its capacity are counted but not stored."""
    count = tl.sum(between.to(tl.int32), 0)
    if count > 0:
        # The list has no order, and only the next launch reads it: relaxed memory order is enough.
        place = tl.atomic_add(listed, count, sem="relaxed") + tl.cumsum(between.to(tl.int32), 0) - 1
        fits = between & (place < capacity)
        tl.store(list_value + place, value, fits)
        tl.store(list_column + place, column, fits)


@triton.jit
def gather_kernel(
    x, window, maxima, candidates, state, numbers, lists, parts, random, x_row, columns, programs, chunk, tiles,
    capacity, DOMAIN: tl.constexpr, TOP_K: tl.constexpr, MASS: tl.constexpr, RACE: tl.constexpr, SEED: tl.constexpr,
    OFFSET: tl.constexpr, UNIT: tl.constexpr, TILE: tl.constexpr, CANDIDATE_TILE: tl.constexpr, GROUP: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """Of the elements at or above `high`: their number parts.count int32, their weight parts.mass int64, and the winner
    of their race, parts.score float32 and parts.column int32, all [rows, programs]. The elements between `low` and
    `high`: lists.value float32 and lists.column int32 [rows, capacity], in any order; lists.count int32 [rows]."""
    begin(PDL)
    row = tl.program_id(0) // programs
    part = tl.program_id(0) % programs
    x, length = window_of(x, x_row, window, row, columns, UNIT)
    high = tl.load(state + row.to(tl.int64) * STATE + HIGH)
    low = tl.load(state + row.to(tl.int64) * STATE + LOW)
    # 32-bit comparisons take half the registers of 64-bit ones.
    some_inside, some_kept = high < BEYOND, low < BEYOND
    high_key, low_key = tl.minimum(high, BEYOND - 1).to(tl.int32), tl.minimum(low, BEYOND - 1).to(tl.int32)
    if MASS:
        top = tl.load(numbers + row * NUMBERS + TOP)
        scale = fixed_point_scale(top, DOMAIN)
    if RACE:
        seed, offset, stream = source_of(random, row, SEED, OFFSET)
        best = tl.full([], float("-inf") if DOMAIN == LOGITS else 0.0, tl.float32)
        winner = tl.full([], -1, tl.int32)
    inside_count = tl.full([], 0, tl.int32)
    mass = tl.full([], 0, tl.int64)
    first_tile = part * chunk
    listed = lists.count + row
    list_value = lists.value + row.to(tl.int64) * capacity
    list_column = lists.column + row.to(tl.int64) * capacity
    if TOP_K:
        # Where group maxima bound k, bracket sets `high` above all keys: every element is listed, none summed.
        count = tl.load(state + row.to(tl.int64) * STATE + CANDIDATES).to(tl.int32)
        candidates += row.to(tl.int64) * tiles * (TILE // GROUP)
        start, end = candidate_share(count, part, programs, CANDIDATE_TILE // GROUP)
        for slot in range(start, end, CANDIDATE_TILE // GROUP):
            value, column, ok = load_candidates(x, candidates, slot, end, length, UNIT, CANDIDATE_TILE, GROUP)
            value = value.to(tl.float32)
            if DOMAIN == PROBS:
                value = tl.where(value < 0, 0.0, value)
            append(ok & (key_of(value) >= low_key), value, column, listed, list_value, list_column, capacity)
        chunk = tl.where(count < 0, chunk, 0)
    for i in range(chunk):
        tile = first_tile + i
        reach = may_reach(maxima, row, tile, tiles, low_key, TILE, GROUP) & some_kept
        if tl.max(reach.to(tl.int32), 0) > 0:
            first = tile * TILE
            column = first + tl.arange(0, TILE)
            ok = (column < length) & reach
            value = load_values(x, column, ok, DOMAIN)
            key = key_of(value)
            inside = ok & (key >= high_key) & some_inside
            between = ok & (key >= low_key) & (inside == 0)
            found = tl.sum(inside.to(tl.int32), 0)
            inside_count += found
            if found > 0:
                if MASS:
                    weight = to_fixed_point(weight_of(value, top, DOMAIN), top, scale, DOMAIN)
                    mass += tl.sum(tl.where(inside, weight, 0), 0)
                if RACE:
                    score = race_score(value, exponentials(seed, offset, stream, first, TILE), DOMAIN)
                    score, place = tl.max(tl.where(inside, score, best), 0, return_indices=True)
                    best, winner = larger_score(score, first + place, best, winner)
            append(between, value, column, listed, list_value, list_column, capacity)
    tl.store(parts.count + tl.program_id(0), inside_count)
    if MASS:
        tl.store(parts.mass + tl.program_id(0), mass)
    if RACE:
        tl.store(parts.score + tl.program_id(0), best)
        tl.store(parts.column + tl.program_id(0), winner)
