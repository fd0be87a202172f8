"""Routing in Triton: a token's choices by repeated maxima in registers, and the map by counting, without a sort."""

import triton
import triton.language as tl

from flashinfer._core.launch import Build, Launcher
from flashinfer.ops._device.prefix import key_of, value_of
from flashinfer.ops.moe.routing import Map, Route

# Below the key of every score.
_LOWEST = tl.constexpr(-(1 << 63))


@triton.jit
def sigmoid(x):
    return 1 / (1 + tl.exp(-x))


@triton.jit
def ordered(score, place, PLACES: tl.constexpr):
    """An int64 in the order of choice: by score, then by place; it tells both."""
    return (key_of(score).to(tl.int64) << 32) | (PLACES - 1 - place).to(tl.int64)


@triton.jit
def keep_groups(key, groups, kept_groups, ROWS: tl.constexpr, GROUPS: tl.constexpr, SIZE: tl.constexpr):
    """The keys, lowest outside the groups whose two best scores have the highest sums."""
    cube = tl.reshape(key, [ROWS, GROUPS, SIZE])
    best = tl.max(cube, 2)
    second = tl.max(tl.where(cube == best[:, :, None], _LOWEST, cube), 2)
    score = value_of((best >> 32).to(tl.int32)) + value_of((second >> 32).to(tl.int32))
    group = tl.arange(0, GROUPS)[None, :]
    left = tl.where(group < groups, ordered(score, group, GROUPS), _LOWEST)
    last = tl.max(left, 1)
    for _ in range(kept_groups - 1):
        left = tl.where(left == last[:, None], _LOWEST, left)
        last = tl.max(left, 1)
    kept = (group < groups) & (ordered(score, group, GROUPS) >= last[:, None])
    return tl.reshape(tl.where(kept[:, :, None], cube, _LOWEST), [ROWS, GROUPS * SIZE])


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
    key = tl.where(real, ordered(score, place, PLACES), _LOWEST)
    if GROUPS > 1:
        key = keep_groups(key, groups, kept_groups, ROWS, GROUPS, SIZE)

    slot = tl.arange(0, SLOTS)[None, :]
    found = tl.zeros([ROWS, SLOTS], tl.int64)
    for i in range(top_k):
        best = tl.max(key, 1)[:, None]
        found = tl.where(slot == i, best, found)
        key = tl.where(key == best, _LOWEST, key)
    place = PLACES - 1 - (found & 0xFFFFFFFF).to(tl.int32)
    expert = place
    if GROUPS > 1:
        expert = place // SIZE * size + place % SIZE

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
def count_kernel(ids, count, pairs, experts, offset, PACKED: tl.constexpr, BLOCK: tl.constexpr):
    """The number of pairs of the program's expert."""
    expert = tl.program_id(0)
    found = tl.zeros([BLOCK], tl.int32)
    for start in range(0, pairs, BLOCK):
        _, local = local_experts(ids, start + tl.arange(0, BLOCK), pairs, experts, offset, PACKED)
        found += (local == expert).to(tl.int32)
    tl.store(count + expert, tl.sum(found, 0))


@triton.jit
def map_kernel(
    ids, first, count, tiles, tile_expert, tile_end, row_pair, pair_row, weights, pairs, experts, offset, tile, most,
    PACKED: tl.constexpr, COUNTED: tl.constexpr, EXPERTS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """A program gives rows to the pairs of its expert, in their order, and writes the expert's padding and tiles."""
    expert = tl.program_id(0)
    index = tl.arange(0, BLOCK)
    each = tl.arange(0, EXPERTS)
    if COUNTED:
        counts = tl.load(count + each, each < experts, other=0)
    else:
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
    if not COUNTED:
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
            tl.store(weights + pair, ((id & 0xFFFF) << 16).to(tl.float32, bitcast=True), match)
        # Pairs without a row are of no expert: the programs share them.
        none = (pair < pairs) & (local < 0) & (start // BLOCK % experts == expert)
        tl.store(pair_row + pair, tl.full([BLOCK], -1, tl.int32), none)

    for start in range(begin + mine, following, BLOCK):
        tl.store(row_pair + start + index, tl.full([BLOCK], -1, tl.int32), start + index < following)
    for start in range(begin // tile, following // tile, BLOCK):
        inside = start + index < following // tile
        tl.store(tile_expert + start + index, tl.zeros([BLOCK], tl.int32) + expert, inside)
        tl.store(tile_end + start + index, tl.zeros([BLOCK], tl.int32) + begin + mine, inside)
    for start in range(used + expert * BLOCK, most, experts * BLOCK):
        tl.store(tile_expert + start + index, tl.full([BLOCK], -1, tl.int32), start + index < most)


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


def _build_count(problem, config):
    types = {"ids": _ids(problem), "count": "*i32"} | dict.fromkeys(("pairs", "experts", "offset"), "i32")
    constants = {"PACKED": problem.ids == "packed", "BLOCK": config.pairs}
    return Build(count_kernel, types, constants, num_warps=config.num_warps)


def _build_map(problem, config):
    outputs = ("first", "count", "tiles", "tile_expert", "tile_end", "row_pair", "pair_row")
    types = {"ids": _ids(problem)} | dict.fromkeys(outputs, "*i32") | {"weights": "*fp32"}
    types |= dict.fromkeys(("pairs", "experts", "offset", "tile", "most"), "i32")
    constants = {
        "PACKED": problem.ids == "packed",
        "COUNTED": not problem.few,
        "EXPERTS": problem.experts,
        "BLOCK": config.pairs,
    }
    if problem.ids != "packed":
        del types["weights"]
        constants["weights"] = None
    return Build(map_kernel, types, constants, num_warps=config.num_warps)


launch_route = Launcher("moe_route", _build_route)
launch_count = Launcher("moe_count", _build_count)
launch_map = Launcher("moe_map", _build_map)
LAUNCHERS = (launch_route, launch_count, launch_map)

# Bytes of stack a thread may use: 16 pairs a thread and their places, by Triton 3.9's ptxas on sm_120.
STACK_BUDGET = 16


def kernels(problem, config):
    """(launcher, problem, config) of every kernel that a problem needs."""
    if isinstance(problem, Route):
        yield launch_route, problem, config
        return
    if not problem.few:
        yield launch_count, problem, config
    yield launch_map, problem, config


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
    if not problem.few:
        launch_count(problem, config, (experts, 1, 1), ids, out.count, pairs, experts, offset)
    packed = [weights] if problem.ids == "packed" else []
    launch_map(problem, config, (experts, 1, 1), ids, *out, *packed, pairs, experts, offset, tile,
               len(out.tile_expert))  # fmt: skip


_RUN = {Route: route, Map: token_map}
