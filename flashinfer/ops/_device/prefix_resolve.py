"""The last stage of `prefix`: searches the list for the pivot, then sums up or draws from the prefix.

Grid: one program a row. It keeps the first TILE elements of the list in registers and reads the rest in each step of
the search; where the list overflowed, it reads the row itself.
Warps: all share a tile. Shared memory: reductions.
Inputs: x [rows, columns], a window of each row, and state, numbers, lists and parts of the stages before.
Outputs: the pivot in state int64 [rows, STATE]; the sum of the prefix in numbers float32 [rows, NUMBERS], or samples
and valid [rows], or in parts.count where the elements of each program come.
Method: `flashinfer/ops/_device/prefix.py`.
"""

import triton
import triton.language as tl

from flashinfer.ops._device.pdl import begin
from flashinfer.ops._device.philox import exponentials_at, source_of
from flashinfer.ops._device.prefix import (
    BINS,
    LOGITS,
    HIGH,
    LOW,
    PIVOT,
    RANK,
    KEPT,
    NEAR,
    STATE,
    TOP,
    SUM,
    INSIDE,
    NUMBERS,
    LOWEST,
    BEYOND,
    value_of,
    first_key,
    weight_of,
    unit_of,
    lift_of,
    in_units,
    window_of,
    reaching,
    parameter,
    race_score,
    listed_keys,
    is_kept,
    row_winner,
)


@triton.jit
def mass_of(key, top, unit, DOMAIN: tl.constexpr):
    """The weight of an element, in units."""
    return in_units(weight_of(value_of(key), top, DOMAIN), top, unit, DOMAIN)


@triton.jit
def find_pivot(
    target, count, first, first_column, from_list, x, list_value, list_column, least, most, columns, top, unit,
    DOMAIN: tl.constexpr, MASS: tl.constexpr, LAST: tl.constexpr, TILE: tl.constexpr, WAYS: tl.constexpr,
):  # fmt: skip
    """Key and rank of the last of the fewest elements that measure `target` together, by their weights or each one; of
    all if they do not. `first` and `first_column` are the first TILE elements, which stay in registers.

    The search cuts the keys in WAYS + 1 parts at a time: a step waits for one sum over the program, however many keys
    it is for. It ends where one element is left between its bounds; the key is then at most that element's, and above
    the next one's, which keeps the same.

    The first step of a search by weights tries `least` as well: where all elements together do not measure `target`, as
    where k keeps less than p would, it is the only one.
    """
    enough = tl.maximum(least, LOWEST + 1).to(tl.int64)
    beyond = most.to(tl.int64) + 1
    # Elements from `enough` on and from `beyond` on. Where they differ by one, it is the last that is taken.
    many = count
    few = count * 0
    way = tl.arange(0, WAYS).to(tl.int64)
    next_way = way if MASS else way + 1
    first_key = first[None, :]
    if MASS:
        first_mass = mass_of(first_key, top, unit, DOMAIN)
    while (beyond - enough > 1) & (many - few > 1):
        edge = enough + next_way * ((beyond - enough + WAYS) // (WAYS + 1))
        next_way = way + 1
        # In 32 bits. An edge past all keys is not below `beyond`, and nothing comes of it; LOWEST is below all edges.
        key_edge = tl.minimum(edge, BEYOND - 1).to(tl.int32)
        counts = reaching(first_key, key_edge)
        if MASS:
            sums = tl.sum(tl.where(first_key >= key_edge[:, None], first_mass, 0), 1)
        for start in range(TILE, count, TILE):
            key, column = listed_keys(
                start, count, from_list, x, list_value, list_column, least, most, DOMAIN, TILE
            )  # fmt: skip
            key = key[None, :]
            counts += reaching(key, key_edge)
            if MASS:
                sums += tl.sum(tl.where(key >= key_edge[:, None], mass_of(key, top, unit, DOMAIN), 0), 1)
        if MASS == 0:
            sums = counts.to(tl.int64)
        reached = (sums >= target) & (edge < beyond)
        missed = (sums < target) & (edge < beyond)
        many = tl.min(tl.where(reached, counts, many), 0)
        few = tl.max(tl.where(missed, counts, few), 0)
        enough = tl.max(tl.where(reached, edge, enough), 0)
        beyond = tl.min(tl.where(missed, edge, beyond), 0)
        if MASS == 0:
            # From `enough` on there are as many as are wanted: nothing is left to find.
            few = tl.where(many == target, many, few)
    rank = columns.to(tl.int64)
    if many - few > 1:
        rank = tie_rank(
            target, enough, count, first, first_column, from_list, x, list_value, list_column, least, most, columns,
            top, unit, DOMAIN, MASS, LAST, TILE, WAYS,
        )  # fmt: skip
    return enough, rank


@triton.jit
def tie_rank(
    target, pivot, count, first, first_column, from_list, x, list_value, list_column, least, most, columns, top, unit,
    DOMAIN: tl.constexpr, MASS: tl.constexpr, LAST: tl.constexpr, TILE: tl.constexpr, WAYS: tl.constexpr,
):  # fmt: skip
    """The rank of the last element that is taken of those at the pivot; `columns` where all are."""
    way = tl.arange(0, WAYS).to(tl.int64)
    above = tl.full([], 0, tl.int64)
    ties = tl.full([], 0, tl.int64)
    key, column = first, first_column
    for start in range(0, count, TILE):
        if start > 0:
            key, column = listed_keys(
                start, count, from_list, x, list_value, list_column, least, most, DOMAIN, TILE
            )  # fmt: skip
        if MASS:
            above += tl.sum(tl.where(key > pivot, mass_of(key, top, unit, DOMAIN), 0), 0)
        else:
            above += tl.sum((key > pivot).to(tl.int64), 0)
        ties += tl.sum(((key == pivot) & (key > LOWEST)).to(tl.int64), 0)
    # Equal elements measure the same, so as many of them as fill the rest are taken, by rank.
    wanted = target - above
    if MASS:
        equal = tl.maximum(mass_of(pivot.to(tl.int32), top, unit, DOMAIN), 1)
        wanted = (wanted + equal - 1) // equal
    few = tl.full([], -1, tl.int64)
    rank = tl.where(wanted < ties, columns - 1, few + 1)
    while rank - few > 1:
        edge = few + (way + 1) * ((rank - few + WAYS) // (WAYS + 1))
        taken = tl.zeros([WAYS], tl.int64)
        key, column = first, first_column
        for start in range(0, count, TILE):
            if start > 0:
                key, column = listed_keys(
                    start, count, from_list, x, list_value, list_column, least, most, DOMAIN, TILE
                )  # fmt: skip
            mine = columns - 1 - column if LAST else column
            tied = (key == pivot) & (key > LOWEST)
            taken += tl.sum((tied[None, :] & (mine[None, :] <= edge[:, None])).to(tl.int64), 1)
        reached = taken >= wanted
        few = tl.max(tl.where(reached, few, tl.minimum(edge, rank - 1)), 0)
        rank = tl.min(tl.where(reached, tl.minimum(edge, rank), rank), 0)
    return tl.where(wanted < ties, rank, columns.to(tl.int64))


@triton.jit
def row_parts(parts, row, programs, BLOCK: tl.constexpr):
    """The sum, int64, over the programs of a row."""
    total = tl.full([], 0, tl.int64)
    for start in range(0, programs, BLOCK):
        part = start + tl.arange(0, BLOCK)
        total += tl.sum(tl.load(parts + row.to(tl.int64) * programs + part, part < programs, other=0).to(tl.int64), 0)
    return total


@triton.jit
def find_end(
    k, p, inside, inside_mass, sum, count, key, column, from_list, x, list_value, list_column, least, most, length,
    columns, top, unit,
    DOMAIN: tl.constexpr, TOP_K: tl.constexpr, TOP_P: tl.constexpr, TOP_K_FIRST: tl.constexpr, LAST: tl.constexpr,
    TILE: tl.constexpr, WAYS: tl.constexpr,
):  # fmt: skip
    """Pivot and rank of the prefix that the filters keep: of two prefixes the shorter one."""
    pivot = least.to(tl.int64)
    rank = columns.to(tl.int64)
    if TOP_K:
        if k < length:
            pivot, rank = find_pivot(
                k.to(tl.int64) - inside, count, key, column, from_list, x, list_value, list_column, least, most,
                columns, top, unit, DOMAIN, False, LAST, TILE, WAYS,
            )  # fmt: skip
    if TOP_P:
        if p < 1:
            goal = p.to(tl.float64) * unit * lift_of(top, DOMAIN)
            if TOP_K_FIRST:
                if k < length:
                    first = inside_mass
                    some, some_column = key, column
                    for start in range(0, count, TILE):
                        if start > 0:
                            some, some_column = listed_keys(
                                start, count, from_list, x, list_value, list_column, least, most, DOMAIN, TILE
                            )  # fmt: skip
                        ok = (some > LOWEST) & is_kept(some, some_column, pivot, rank, columns, LAST)
                        first += tl.sum(tl.where(ok, mass_of(some, top, unit, DOMAIN), 0), 0)
                    goal = p.to(tl.float64) * first
                else:
                    goal *= sum
            elif DOMAIN == LOGITS:
                goal *= sum
            # No sum of a row reaches 2^62.
            target = tl.maximum(tl.minimum(goal, 4611686018427387904.0).to(tl.int64), 1) - inside_mass
            p_pivot, p_rank = find_pivot(
                target, count, key, column, from_list, x, list_value, list_column, least, most, columns, top, unit,
                DOMAIN, True, LAST, TILE, WAYS,
            )  # fmt: skip
            shorter = (p_pivot > pivot) | ((p_pivot == pivot) & (p_rank < rank))
            pivot = tl.where(shorter, p_pivot, pivot)
            rank = tl.where(shorter, p_rank, rank)
    return pivot, rank


@triton.jit
def resolve_kernel(
    x, window, state, numbers, lists, parts, filters, random, samples, valid, x_row, columns, programs, chunk, capacity,
    DOMAIN: tl.constexpr, TOP_K: tl.constexpr, TOP_P: tl.constexpr, TOP_K_FIRST: tl.constexpr, MASS: tl.constexpr,
    RACE: tl.constexpr, PLACES: tl.constexpr, LAST: tl.constexpr, SEED: tl.constexpr, OFFSET: tl.constexpr,
    UNIT: tl.constexpr, CHUNK: tl.constexpr, TILE: tl.constexpr, WAYS: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """The pivot of a row into state, and what the caller is after: the sum of the prefix (MASS), the token that wins
    the race over it (RACE), or in parts.count where the elements of each program come (PLACES; not where groups are
    listed). One program a row."""
    begin(PDL)
    row = tl.program_id(0)
    x, length = window_of(x, x_row, window, row, columns, UNIT)
    # Where anything is listed, the first is a key; the last is one wherever anything is kept.
    pivot = tl.load(state + row.to(tl.int64) * STATE + HIGH)
    most = (pivot - 1).to(tl.int32)
    least = tl.load(state + row.to(tl.int64) * STATE + LOW).to(tl.int32)
    count = tl.load(lists.count + row)
    from_list = count <= capacity
    count = tl.where(from_list, count, length)
    list_value = lists.value + row.to(tl.int64) * capacity
    list_column = lists.column + row.to(tl.int64) * capacity
    inside = row_parts(parts.count, row, programs, BINS)
    inside_mass = inside * 0
    top = tl.full([], 0.0, tl.float32)
    unit = tl.full([], 0.0, tl.float32)
    sum = tl.full([], 0.0, tl.float32)
    if MASS:
        top = tl.load(numbers + row * NUMBERS + TOP)
        sum = tl.load(numbers + row * NUMBERS + SUM)
        unit = unit_of(top, DOMAIN)
        inside_mass = row_parts(parts.mass, row, programs, BINS)
    k = parameter(filters.top_k, filters.top_ks, row)
    p = parameter(filters.top_p, filters.top_ps, row)
    rank = columns.to(tl.int64)
    key, column = listed_keys(0, count, from_list, x, list_value, list_column, least, most, DOMAIN, TILE)
    if count > 0:
        pivot, rank = find_end(
            k, p, inside, inside_mass, sum, count, key, column, from_list, x, list_value, list_column, least, most,
            length, columns, top, unit, DOMAIN, TOP_K, TOP_P, TOP_K_FIRST, LAST, TILE, WAYS,
        )  # fmt: skip
    if RACE:
        seed, offset, stream = source_of(random, row, SEED, OFFSET)
        best, winner = row_winner(parts.score, parts.column, row, programs, DOMAIN, BINS)
    kept = inside
    mass = inside_mass
    if PLACES:
        placed = tl.load(state + row.to(tl.int64) * STATE + NEAR) < 0
        places = tl.zeros([BINS], tl.int32)
    for start in range(0, count, TILE):
        if start > 0:
            key, column = listed_keys(
                start, count, from_list, x, list_value, list_column, least, most, DOMAIN, TILE
            )  # fmt: skip
        ok = (key > LOWEST) & is_kept(key, column, pivot, rank, columns, LAST)
        kept += tl.sum(ok.to(tl.int64), 0)
        if MASS:
            mass += tl.sum(tl.where(ok, mass_of(key, top, unit, DOMAIN), 0), 0)
        if PLACES:
            if placed:
                places += tl.histogram(column // (chunk * CHUNK), BINS, mask=ok)
        if RACE:
            variate = exponentials_at(seed, offset, stream, column)
            lowest = float("-inf") if DOMAIN == LOGITS else 0.0
            score = tl.where(ok, race_score(value_of(key), variate, DOMAIN), lowest)
            tile_best = tl.max(score, 0)
            first = tl.min(tl.where(ok & (score == tile_best), column, columns), 0)
            ahead = (tile_best > best) | ((tile_best == best) & (tile_best > lowest) & (first < winner))
            best = tl.where(ahead, tile_best, best)
            winner = tl.where(ahead, first, winner)
    at = state + row.to(tl.int64) * STATE
    tl.store(at + PIVOT, pivot)
    tl.store(at + RANK, rank)
    tl.store(at + KEPT, kept)
    if MASS:
        tl.store(numbers + row * NUMBERS + INSIDE, (mass.to(tl.float64) / unit / lift_of(top, DOMAIN)).to(tl.float32))
    if PLACES:
        part = tl.arange(0, BINS)
        mine = parts.count + row.to(tl.int64) * programs + part
        places += tl.load(mine, part < programs, other=0)
        tl.store(mine, tl.cumsum(places, 0) - places, placed & (part < programs))
    if RACE:
        tl.store(samples + row, tl.maximum(winner, 0).to(samples.dtype.element_ty))
        tl.store(valid + row, (winner >= 0).to(tl.int8))
