"""Routing in Triton: a token's choices by repeated maxima in registers, and the map by counting, without a sort."""

import torch
import triton
import triton.language as tl

from flashinfer._core.implementation import Implementation
from flashinfer._core.launch import Build, Launcher
from flashinfer.ops._device.prefix import key_of, value_of
from flashinfer.ops.moe.routing import Map, Route

# Below the key of every score, and above every place.
_LOWEST = tl.constexpr(-(1 << 31))
_NOWHERE = tl.constexpr(1 << 30)


@triton.jit
def sigmoid(x):
    return 1 / (1 + tl.exp(-x))


@triton.jit
def first_best(key, place, AXIS: tl.constexpr):
    """The largest keys along an axis, and the first places that hold them; the axis is kept. Two reductions of int32,
    for which warps have an instruction."""
    best = tl.max(key, AXIS, keep_dims=True)
    return best, tl.min(tl.where(key == best, place, _NOWHERE), AXIS, keep_dims=True)


@triton.jit
def keep_groups(key, groups, kept_groups, ROWS: tl.constexpr, GROUPS: tl.constexpr, SIZE: tl.constexpr):
    """The keys, lowest outside the groups whose two best scores have the highest sums."""
    cube = tl.reshape(key, [ROWS, GROUPS, SIZE])
    member = tl.arange(0, SIZE)[None, None, :]
    best, of = first_best(cube, member, 2)
    second = tl.max(tl.where(member == of, _LOWEST, cube), 2, keep_dims=True)
    score = tl.reshape(value_of(best) + value_of(second), [ROWS, GROUPS])
    group = tl.arange(0, GROUPS)[None, :]
    left = tl.where(group < groups, key_of(score), _LOWEST)
    kept = tl.zeros([ROWS, GROUPS], tl.int32)
    for _ in range(kept_groups):
        _, at = first_best(left, group, 1)
        kept += (group == at).to(tl.int32)
        left = tl.where(group == at, _LOWEST, left)
    return tl.reshape(tl.where(kept[:, :, None] > 0, cube, _LOWEST), [ROWS, GROUPS * SIZE])


@triton.jit
def route_kernel(
    logits, bias, ids, weights, replay, logits_row, logits_column, ids_row, weights_row, replay_row, tokens, experts,
    groups, kept_groups, top_k, shared, scale,
    RANK: tl.constexpr, WEIGHT: tl.constexpr, ROWS: tl.constexpr, GROUPS: tl.constexpr, SIZE: tl.constexpr,
    SLOTS: tl.constexpr,
):  # fmt: skip
    PLACES: tl.constexpr = GROUPS * SIZE
    row = (tl.program_id(0) * ROWS + tl.arange(0, ROWS))[:, None]
    place = tl.arange(0, PLACES)[None, :]
    if GROUPS > 1:
        size = experts // groups
        expert = place // SIZE * size + place % SIZE
        real = (place % SIZE < size) & (place // SIZE < groups)
    else:
        expert = place
        real = place < experts
    logits += row.to(tl.int64) * logits_row
    inside = (row < tokens) & real
    x = tl.load(logits + expert.to(tl.int64) * logits_column, inside, other=float("-inf")).to(tl.float32)
    score = x
    if RANK == "sigmoid":
        score = sigmoid(x)
        if bias is not None:
            score += tl.load(bias + expert, real, other=0).to(tl.float32)
    key = tl.where(real, key_of(score), _LOWEST)
    if GROUPS > 1:
        key = keep_groups(key, groups, kept_groups, ROWS, GROUPS, SIZE)

    slot = tl.arange(0, SLOTS)[None, :]
    found = tl.zeros([ROWS, SLOTS], tl.int32)
    for i in range(top_k):
        _, at = first_best(key, place, 1)
        found = tl.where(slot == i, at, found)
        key = tl.where(place == at, _LOWEST, key)
    expert = found
    if GROUPS > 1:
        expert = found // SIZE * size + found % SIZE

    chosen = slot < top_k
    here = (row < tokens) & chosen
    y = tl.load(logits + expert.to(tl.int64) * logits_column, here, other=0).to(tl.float32)
    if WEIGHT == "softmax":
        top = tl.max(x, 1)[:, None]
        weight = tl.exp(y - top) / tl.sum(tl.exp(x - top), 1)[:, None]
    elif WEIGHT == "softmax_kept":
        top = tl.max(tl.where(chosen, y, float("-inf")), 1)[:, None]
        weight = tl.where(chosen, tl.exp(y - top), 0)
        weight /= tl.sum(weight, 1)[:, None]
    elif WEIGHT == "logit":
        weight = y
    else:
        weight = sigmoid(y)
        if WEIGHT == "sigmoid_sum":
            weight /= tl.sum(tl.where(chosen, weight, 0), 1)[:, None] + 1e-20
    weight = tl.where(chosen, weight * scale, 1)
    if replay is not None:
        tl.store(replay + row.to(tl.int64) * replay_row + slot, expert.to(tl.int16), here)
    expert = tl.where(chosen, expert, experts + slot - top_k)
    written = (row < tokens) & (slot < top_k + shared)
    tl.store(ids + row.to(tl.int64) * ids_row + slot, expert.to(ids.dtype.element_ty), written)
    tl.store(weights + row.to(tl.int64) * weights_row + slot, weight.to(weights.dtype.element_ty), written)


@triton.jit
def local_experts(ids, pair, pairs, experts, offset, PACKED: tl.constexpr):
    """The ids of pairs, and their experts counted from `offset`: -1 for one of another rank, and past the last pair."""
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
    """The whole map in one launch: a program counts all pairs, gives rows to those of its expert in their order, and
    writes the expert's padding and tiles."""
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
        # Pairs without a row are of no expert: the programs share them.
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
    """How many pairs of the program's `steps` blocks each expert has: a row of counts [programs, EXPERTS]."""
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
    """Gives rows to the pairs of the program's `steps` blocks, and writes its share of the tiles with their padding."""
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

    # Of each expert, the row that its next pair gets.
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
        # The expert of a tile: as many as end at or before it.
        expert = tl.sum((following[None, :] <= (t * tile)[:, None]).to(tl.int32), 1)
        stop = tl.gather(end, tl.minimum(expert, EXPERTS - 1), 0)
        tl.store(tile_expert + t, tl.where(t < used, expert, -1), t < most)
        tl.store(tile_end + t, stop, t < used)
        for within in range(0, tile, PADDING):
            column = (within + tl.arange(0, PADDING))[None, :]
            row = (t * tile)[:, None] + column
            none = tl.full([TILES, PADDING], -1, tl.int32)
            tl.store(row_pair + row, none, (t < used)[:, None] & (column < tile) & (row >= stop[:, None]))


def _build_route(problem, config):
    types = {"logits": f"*{problem.dtype}", "bias": f"*{problem.bias}", "ids": f"*{problem.ids}"}
    types |= {"weights": f"*{problem.weights}", "replay": "*i16"}
    types |= dict.fromkeys(("logits_row", "logits_column", "ids_row", "weights_row", "replay_row"), "i64")
    types |= dict.fromkeys(("tokens", "experts", "groups", "kept_groups", "top_k", "shared"), "i32") | {"scale": "fp32"}
    absent = () if problem.bias else ("bias",)
    absent += () if problem.replay else ("replay", "replay_row")
    constants = dict.fromkeys(absent) | {
        "RANK": problem.rank,
        "WEIGHT": problem.weight,
        "ROWS": config.rows,
        "GROUPS": problem.groups,
        "SIZE": problem.size,
        "SLOTS": problem.slots,
    }
    types = {name: kind for name, kind in types.items() if name not in absent}
    return Build(route_kernel, types, constants, num_warps=config.num_warps)


def _ids(problem) -> str:
    return "*i64" if problem.ids == "i64" else "*i32"


_OUTPUTS = ("first", "count", "tiles", "tile_expert", "tile_end", "row_pair", "pair_row")
_NUMBERS = ("pairs", "experts", "offset")


def _build_map(problem, config, kernel, counts: tuple = (), outputs: tuple = (), numbers: tuple = (), **constants):
    types = {"ids": _ids(problem)} | dict.fromkeys((*counts, *outputs), "*i32")
    constants |= {"PACKED": problem.ids == "packed", "EXPERTS": problem.experts, "BLOCK": config.pairs}
    if outputs and problem.ids == "packed":
        types["weights"] = "*fp32"
    elif outputs:
        constants["weights"] = None
    return Build(kernel, types | dict.fromkeys(_NUMBERS + numbers, "i32"), constants, num_warps=config.num_warps)


def _build_few(problem, config):
    return _build_map(problem, config, few_kernel, (), _OUTPUTS, ("tile", "most"))


def _build_count(problem, config):
    return _build_map(problem, config, count_kernel, ("counts",), numbers=("steps",))


def _build_place(problem, config):
    # Rows of counts read at once: 16 numbers a thread.
    share = {"COUNTS": max(512 * config.num_warps // problem.experts, 1), "TILES": 16, "PADDING": 32}
    numbers = ("tile", "most", "programs", "steps")
    return _build_map(problem, config, place_kernel, ("counts",), _OUTPUTS, numbers, **share)


launch_route = Launcher("moe_route", _build_route)
launch_few = Launcher("moe_map_few", _build_few)
launch_count = Launcher("moe_map_count", _build_count)
launch_place = Launcher("moe_map_place", _build_place)


def kernels(problem, config):
    """(launcher, problem, config) of every kernel that a problem needs."""
    if isinstance(problem, Route):
        yield launch_route, problem, config
        return
    for launch in (launch_few,) if problem.few else (launch_count, launch_place):
        yield launch, problem, config


def run(problem, config, *args):
    _RUN[type(problem)](problem, config, *args)


def route(problem, config, logits, bias, groups, kept_groups, top_k, shared, scale, *out):
    """Write ids and weights [tokens, top_k + shared] of logits [tokens, experts]; replay as ids, without shared ones.

    kept_groups : of `groups`. shared : experts beyond the last that every token has, with weight 1. scale : a factor of
    the others' weights.
    """
    tokens, experts = logits.shape
    ids, weights, *replay = out
    optional = [bias] if problem.bias else []
    strides = [*logits.stride(), *(tensor.stride(0) for tensor in (ids, weights, *replay))]
    grid = (triton.cdiv(tokens, config.rows), 1, 1)
    launch_route(problem, config, grid, logits, *optional, ids, weights, *replay, *strides, tokens, experts, groups,
                 kept_groups, top_k, shared, scale)  # fmt: skip


def token_map(problem, config, ids, offset, tile, out, weights=None):
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


_RUN = {Route: route, Map: token_map}

IMPLEMENTATION = Implementation(run, (launch_route, launch_few, launch_count, launch_place), kernels=kernels)
