"""The last stage of `prefix`: searches the list for the pivot, then sums the prefix or draws a sample from it.

Grid: one program a row. It keeps the first TILE elements of the list in registers and reads the rest in each step of
the search; where the list overflowed, it reads the row itself.
Warps: all share a tile. Shared memory: reductions.
Inputs: x [rows, columns], a window of each row, and state, numbers, lists and parts of the stages before.
Outputs: the pivot in state int64 [rows, STATE]; the sum of the prefix in numbers float32 [rows, NUMBERS], or samples
and valid [rows], or in parts.count the output position at which each program's elements begin.
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
    CANDIDATES,
    STATE,
    TOP,
    SUM,
    INSIDE,
    NUMBERS,
    LOWEST,
    BEYOND,
    value_of,
    weight_of,
    fixed_point_scale,
    small_row_scale,
    to_fixed_point,
    window_of,
    count_reaching,
    row_parameter,
    race_score,
    listed_keys,
    is_kept,
    row_winner,
)


@triton.jit
def mass_of(key, top, scale, DOMAIN: tl.constexpr):
    """The weight of an element in fixed point."""
    return to_fixed_point(weight_of(value_of(key), top, DOMAIN), top, scale, DOMAIN)


@triton.jit
def find_pivot(
    target, count, first, first_column, from_list, x, list_value, list_column, least, most, columns, top, scale,
    DOMAIN: tl.constexpr, MASS: tl.constexpr, LAST: tl.constexpr, TILE: tl.constexpr, WAYS: tl.constexpr,
):  # fmt: skip
    """Key and rank of the last element of the shortest prefix of the list that reaches `target`.

    With MASS a prefix reaches `target` by the sum of its weights, else by its number of elements. If the whole list
    does not reach it, the prefix is the whole list. Where LAST is None, all elements equal to the last are in it.
    `first` and `first_column` are the list's first TILE elements; they stay in registers.

    Each step tests WAYS keys, which cut the interval of keys in WAYS + 1 parts: it waits for one sum over the program,
    whatever WAYS is. The search ends where one element is left between the bounds. Its result is a key at or below that
    element's and above the next element's, which keeps the same elements as the element's own key.

    The first step of a search by weights also tests `least`: where the whole list does not reach `target` (k keeps less
    than p would), that step is the only one.
    """
    lower = tl.maximum(least, LOWEST + 1).to(tl.int64)
    upper = most.to(tl.int64) + 1
    # How many elements have a key at or above `lower`, and at or above `upper`. Where the two differ by one, that
    # element is the last of the prefix.
    lower_count = count
    upper_count = count * 0
    way = tl.arange(0, WAYS).to(tl.int64)
    next_way = way if MASS else way + 1
    first_key = first[None, :]
    if MASS:
        first_mass = mass_of(first_key, top, scale, DOMAIN)
    while (upper - lower > 1) & (lower_count - upper_count > 1):
        edge = lower + next_way * ((upper - lower + WAYS) // (WAYS + 1))
        next_way = way + 1
        # An edge past all int32 keys is not below `upper`, so it changes no bound. LOWEST is below all edges.
        key_edge = tl.minimum(edge, BEYOND - 1).to(tl.int32)
        counts = count_reaching(first_key, key_edge)
        if MASS:
            sums = tl.sum(tl.where(first_key >= key_edge[:, None], first_mass, 0), 1)
        for start in range(TILE, count, TILE):
            key, column = listed_keys(
                start, count, from_list, x, list_value, list_column, least, most, DOMAIN, TILE
            )  # fmt: skip
            key = key[None, :]
            counts += count_reaching(key, key_edge)
            if MASS:
                sums += tl.sum(tl.where(key >= key_edge[:, None], mass_of(key, top, scale, DOMAIN), 0), 1)
        if MASS == 0:
            sums = counts.to(tl.int64)
        reached = (sums >= target) & (edge < upper)
        missed = (sums < target) & (edge < upper)
        lower_count = tl.min(tl.where(reached, counts, lower_count), 0)
        upper_count = tl.max(tl.where(missed, counts, upper_count), 0)
        lower = tl.max(tl.where(reached, edge, lower), 0)
        upper = tl.min(tl.where(missed, edge, upper), 0)
        if MASS == 0:
            # Exactly `target` elements are at or above `lower`: the search is over.
            upper_count = tl.where(lower_count == target, lower_count, upper_count)
    rank = columns.to(tl.int64)
    # Weights are never asked to part equal elements.
    tl.static_assert(LAST is None or MASS == 0)
    if LAST is not None:
        if lower_count - upper_count > 1:
            rank = tie_rank(
                target, lower, count, first, first_column, from_list, x, list_value, list_column, least, most, columns,
                DOMAIN, LAST, TILE, WAYS,
            )  # fmt: skip
    return lower, rank


@triton.jit
def tie_rank(
    target, pivot, count, first, first_column, from_list, x, list_value, list_column, least, most, columns,
    DOMAIN: tl.constexpr, LAST: tl.constexpr, TILE: tl.constexpr, WAYS: tl.constexpr,
):  # fmt: skip
    """The rank of the last element at the pivot's key in a prefix of `target` elements; `columns` where all of them
    are in it."""
    way = tl.arange(0, WAYS).to(tl.int64)
    above = tl.full([], 0, tl.int64)
    ties = tl.full([], 0, tl.int64)
    key, column = first, first_column
    for start in range(0, count, TILE):
        if start > 0:
            key, column = listed_keys(
                start, count, from_list, x, list_value, list_column, least, most, DOMAIN, TILE
            )  # fmt: skip
        above += tl.sum((key > pivot).to(tl.int64), 0)
        ties += tl.sum(((key == pivot) & (key > LOWEST)).to(tl.int64), 0)
    # The prefix takes as many of the equal elements as `target` still needs, in order of rank.
    wanted = target - above
    below = tl.full([], -1, tl.int64)
    rank = tl.where(wanted < ties, columns - 1, below + 1)
    while rank - below > 1:
        edge = below + (way + 1) * ((rank - below + WAYS) // (WAYS + 1))
        taken = tl.zeros([WAYS], tl.int64)
        key, column = first, first_column
        for start in range(0, count, TILE):
            if start > 0:
                key, column = listed_keys(
                    start, count, from_list, x, list_value, list_column, least, most, DOMAIN, TILE
                )  # fmt: skip
            order = columns - 1 - column if LAST else column
            tied = (key == pivot) & (key > LOWEST)
            taken += tl.sum((tied[None, :] & (order[None, :] <= edge[:, None])).to(tl.int64), 1)
        reached = taken >= wanted
        below = tl.max(tl.where(reached, below, tl.minimum(edge, rank - 1)), 0)
        rank = tl.min(tl.where(reached, tl.minimum(edge, rank), rank), 0)
    return tl.where(wanted < ties, rank, columns.to(tl.int64))


@triton.jit
def row_parts(parts, row, programs, BLOCK: tl.constexpr):
    """The int64 sum of `parts` [rows, programs] over the programs of a row."""
    total = tl.full([], 0, tl.int64)
    for start in range(0, programs, BLOCK):
        part = start + tl.arange(0, BLOCK)
        total += tl.sum(tl.load(parts + row.to(tl.int64) * programs + part, part < programs, other=0).to(tl.int64), 0)
    return total


@triton.jit
def find_end(
    k, p, inside, inside_mass, sum, count, key, column, from_list, x, list_value, list_column, least, most, length,
    columns, top, scale,
    DOMAIN: tl.constexpr, TOP_K: tl.constexpr, TOP_P: tl.constexpr, TOP_K_FIRST: tl.constexpr, LAST: tl.constexpr,
    TILE: tl.constexpr, WAYS: tl.constexpr,
):  # fmt: skip
    """Pivot and rank of the prefix that top-k and top-p keep: the shorter of their two prefixes."""
    pivot = least.to(tl.int64)
    rank = columns.to(tl.int64)
    if TOP_K:
        if k < length:
            pivot, rank = find_pivot(
                k.to(tl.int64) - inside, count, key, column, from_list, x, list_value, list_column, least, most,
                columns, top, scale, DOMAIN, False, LAST, TILE, WAYS,
            )  # fmt: skip
    if TOP_P:
        if p < 1:
            goal = p.to(tl.float64) * scale * small_row_scale(top, DOMAIN)
            if TOP_K_FIRST:
                if k < length:
                    first = inside_mass
                    tile_key, tile_column = key, column
                    for start in range(0, count, TILE):
                        if start > 0:
                            tile_key, tile_column = listed_keys(
                                start, count, from_list, x, list_value, list_column, least, most, DOMAIN, TILE
                            )  # fmt: skip
                        ok = (tile_key > LOWEST) & is_kept(tile_key, tile_column, pivot, rank, columns, LAST)
                        first += tl.sum(tl.where(ok, mass_of(tile_key, top, scale, DOMAIN), 0), 0)
                    goal = p.to(tl.float64) * first
                else:
                    goal *= sum
            elif DOMAIN == LOGITS:
                goal *= sum
            # A row's fixed-point sum is below 2^62.
            target = tl.maximum(tl.minimum(goal, 4611686018427387904.0).to(tl.int64), 1) - inside_mass
            p_pivot, p_rank = find_pivot(
                target, count, key, column, from_list, x, list_value, list_column, least, most, columns, top, scale,
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
    """Stores the pivot of a row in state, and one of three results by flag. One program a row.

    MASS: the sum of the prefix. RACE: the token that wins the exponential race over the prefix. PLACES: in parts.count
    the output position at which each program's elements begin, for rows whose candidate groups are not listed.
    """
    begin(PDL)
    row = tl.program_id(0)
    x, length = window_of(x, x_row, window, row, columns, UNIT)
    # Listed elements have keys from `least` to `most`. Without any, HIGH may be BEYOND, which is no int32 key.
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
    scale = tl.full([], 0.0, tl.float32)
    sum = tl.full([], 0.0, tl.float32)
    if MASS:
        top = tl.load(numbers + row * NUMBERS + TOP)
        sum = tl.load(numbers + row * NUMBERS + SUM)
        scale = fixed_point_scale(top, DOMAIN)
        inside_mass = row_parts(parts.mass, row, programs, BINS)
    k = row_parameter(filters.top_k, filters.top_ks, row)
    p = row_parameter(filters.top_p, filters.top_ps, row)
    rank = columns.to(tl.int64)
    key, column = listed_keys(0, count, from_list, x, list_value, list_column, least, most, DOMAIN, TILE)
    if count > 0:
        pivot, rank = find_end(
            k, p, inside, inside_mass, sum, count, key, column, from_list, x, list_value, list_column, least, most,
            length, columns, top, scale, DOMAIN, TOP_K, TOP_P, TOP_K_FIRST, LAST, TILE, WAYS,
        )  # fmt: skip
    if RACE:
        seed, offset, stream = source_of(random, row, SEED, OFFSET)
        best, winner = row_winner(parts.score, parts.column, row, programs, DOMAIN, BINS)
    kept = inside
    mass = inside_mass
    if PLACES:
        ranges_unlisted = tl.load(state + row.to(tl.int64) * STATE + CANDIDATES) < 0
        part_counts = tl.zeros([BINS], tl.int32)
    for start in range(0, count, TILE):
        if start > 0:
            key, column = listed_keys(
                start, count, from_list, x, list_value, list_column, least, most, DOMAIN, TILE
            )  # fmt: skip
        ok = (key > LOWEST) & is_kept(key, column, pivot, rank, columns, LAST)
        kept += tl.sum(ok.to(tl.int64), 0)
        if MASS:
            mass += tl.sum(tl.where(ok, mass_of(key, top, scale, DOMAIN), 0), 0)
        if PLACES:
            if ranges_unlisted:
                part_counts += tl.histogram(column // (chunk * CHUNK), BINS, mask=ok)
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
        tl.store(
            numbers + row * NUMBERS + INSIDE,
            (mass.to(tl.float64) / scale / small_row_scale(top, DOMAIN)).to(tl.float32),
        )
    if PLACES:
        part = tl.arange(0, BINS)
        mine = parts.count + row.to(tl.int64) * programs + part
        part_counts += tl.load(mine, part < programs, other=0)
        tl.store(mine, tl.cumsum(part_counts, 0) - part_counts, ranges_unlisted & (part < programs))
    if RACE:
        tl.store(samples + row, tl.maximum(winner, 0).to(samples.dtype.element_ty))
        tl.store(valid + row, (winner >= 0).to(tl.int8))
