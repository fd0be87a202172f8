"""The third stage of `prefix`: sums up what is surely inside the prefix, and lists what may be.

Grid: `programs` programs a row, each with `chunk` tiles of TILE columns, of which it reads the groups that may hold
any; or with its share of the groups that bracket_kernel has listed.
Warps: all share a tile. Shared memory: reductions and scans.
Inputs: x [rows, columns], a window of each row, maxima, near, state and numbers of the stages before.
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
    NEAR,
    STATE,
    TOP,
    NUMBERS,
    BEYOND,
    key_of,
    weight_of,
    unit_of,
    in_units,
    window_of,
    load_values,
    may_reach,
    better,
    race_score,
    near_share,
    load_near,
)


@triton.jit
def append(between, value, column, listed, list_value, list_column, capacity):
    """Puts a tile's elements behind those that a row's list has; what does not fit is counted alone."""
    count = tl.sum(between.to(tl.int32), 0)
    if count > 0:
        # The order is left to chance, and what is listed is read by the next launch: nothing has to be seen before.
        place = tl.atomic_add(listed, count, sem="relaxed") + tl.cumsum(between.to(tl.int32), 0) - 1
        fits = between & (place < capacity)
        tl.store(list_value + place, value, fits)
        tl.store(list_column + place, column, fits)


@triton.jit
def gather_kernel(
    x, window, maxima, near, state, numbers, lists, parts, random, x_row, columns, programs, chunk, tiles, capacity,
    DOMAIN: tl.constexpr, TOP_K: tl.constexpr, MASS: tl.constexpr, RACE: tl.constexpr, SEED: tl.constexpr,
    OFFSET: tl.constexpr, UNIT: tl.constexpr, TILE: tl.constexpr, NEAR_TILE: tl.constexpr, GROUP: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """What is inside: parts.count int32, parts.mass int64 and the winner of its race, parts.score float32 and
    parts.column int32, all [rows, programs]. What may be: lists.value float32, lists.column int32 [rows, capacity], in
    any order, and how many they are, lists.count int32 [rows]."""
    begin(PDL)
    row = tl.program_id(0) // programs
    part = tl.program_id(0) % programs
    x, length = window_of(x, x_row, window, row, columns, UNIT)
    high = tl.load(state + row.to(tl.int64) * STATE + HIGH)
    low = tl.load(state + row.to(tl.int64) * STATE + LOW)
    # Comparisons in 32 bits take half the registers of those in 64.
    some_inside, some_kept = high < BEYOND, low < BEYOND
    high_key, low_key = tl.minimum(high, BEYOND - 1).to(tl.int32), tl.minimum(low, BEYOND - 1).to(tl.int32)
    if MASS:
        top = tl.load(numbers + row * NUMBERS + TOP)
        unit = unit_of(top, DOMAIN)
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
        # Where k rules nothing is inside.
        count = tl.load(state + row.to(tl.int64) * STATE + NEAR).to(tl.int32)
        near += row.to(tl.int64) * tiles * (TILE // GROUP)
        start, end = near_share(count, part, programs, NEAR_TILE // GROUP)
        for slot in range(start, end, NEAR_TILE // GROUP):
            value, column, ok = load_near(x, near, slot, end, length, UNIT, NEAR_TILE, GROUP)
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
                    weight = in_units(weight_of(value, top, DOMAIN), top, unit, DOMAIN)
                    mass += tl.sum(tl.where(inside, weight, 0), 0)
                if RACE:
                    score = race_score(value, exponentials(seed, offset, stream, first, TILE), DOMAIN)
                    score, place = tl.max(tl.where(inside, score, best), 0, return_indices=True)
                    best, winner = better(score, first + place, best, winner)
            append(between, value, column, listed, list_value, list_column, capacity)
    tl.store(parts.count + tl.program_id(0), inside_count)
    if MASS:
        tl.store(parts.mass + tl.program_id(0), mass)
    if RACE:
        tl.store(parts.score + tl.program_id(0), best)
        tl.store(parts.column + tl.program_id(0), winner)
