"""Routing in Triton: a token's experts are chosen by repeated argmax in registers.

Grid: tokens / ROWS. Warps: all share the tokens. Shared memory: maxima and sums.
Inputs: logits [tokens, experts], bias [experts] or none.
Outputs: ids and weights [tokens, top_k + shared], replay [tokens, top_k] or none.
Method: DeepSeek-AI, DeepSeek-V3 Technical Report, 2024, https://arxiv.org/abs/2412.19437, for groups and bias.
"""

import triton
import triton.language as tl

from flashinfer._core.implementation import Implementation
from flashinfer._core.launch import Build, Launcher
from flashinfer.ops._device.prefix import key_of, value_of

# Below the keys of all scores, and above all positions.
_LOWEST = tl.constexpr(-(1 << 31))
_NOWHERE = tl.constexpr(1 << 30)


@triton.jit
def sigmoid(x):
    return 1 / (1 + tl.exp(-x))


@triton.jit
def first_best(key, place, AXIS: tl.constexpr):
    """The largest key along an axis, and the first position that has it; the axis is kept. Both are int32 reductions,
    for which warps have an instruction."""
    best = tl.max(key, AXIS, keep_dims=True)
    return best, tl.min(tl.where(key == best, place, _NOWHERE), AXIS, keep_dims=True)


@triton.jit
def keep_groups(key, groups, kept_groups, ROWS: tl.constexpr, GROUPS: tl.constexpr, SIZE: tl.constexpr):
    """The keys, with _LOWEST outside the `kept_groups` groups whose two best scores have the highest sums."""
    cube = tl.reshape(key, [ROWS, GROUPS, SIZE])
    member = tl.arange(0, SIZE)[None, None, :]
    best, best_member = first_best(cube, member, 2)
    second = tl.max(tl.where(member == best_member, _LOWEST, cube), 2, keep_dims=True)
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
    chosen_ok = (row < tokens) & chosen
    y = tl.load(logits + expert.to(tl.int64) * logits_column, chosen_ok, other=0).to(tl.float32)
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
        tl.store(replay + row.to(tl.int64) * replay_row + slot, expert.to(tl.int16), chosen_ok)
    expert = tl.where(chosen, expert, experts + slot - top_k)
    written = (row < tokens) & (slot < top_k + shared)
    tl.store(ids + row.to(tl.int64) * ids_row + slot, expert.to(ids.dtype.element_ty), written)
    tl.store(weights + row.to(tl.int64) * weights_row + slot, weight.to(weights.dtype.element_ty), written)


def build(problem, config):
    types = {"logits": f"*{problem.dtype}", "bias": f"*{problem.bias}" if problem.bias else None}
    types |= {"ids": f"*{problem.ids}", "weights": f"*{problem.weights}", "replay": "*i16" if problem.replay else None}
    types |= dict.fromkeys(("logits_row", "logits_column", "ids_row", "weights_row", "replay_row"), "i64")
    types |= dict.fromkeys(("tokens", "experts", "groups", "kept_groups", "top_k", "shared"), "i32") | {"scale": "fp32"}
    types["replay_row"] = "i64" if problem.replay else None
    constants = {
        "RANK": problem.rank,
        "WEIGHT": problem.weight,
        "ROWS": config.rows,
        "GROUPS": problem.groups,
        "SIZE": problem.size,
        "SLOTS": problem.slots,
    }
    return Build(route_kernel, types, constants, num_warps=config.num_warps)


launch = Launcher("moe_route", build)


def run(problem, config, logits, bias, groups, kept_groups, top_k, shared, scale, *out):
    """Write ids and weights [tokens, top_k + shared] of logits [tokens, experts]; replay as ids, without shared ones.

    kept_groups : of `groups`. shared : experts beyond the last that every token has, with weight 1. scale : a factor of
    the others' weights.
    """
    tokens, experts = logits.shape
    ids, weights, *replay = out
    optional = [bias] if problem.bias else []
    strides = [*logits.stride(), *(tensor.stride(0) for tensor in (ids, weights, *replay))]
    grid = (triton.cdiv(tokens, config.rows), 1, 1)
    launch(problem, config, grid, logits, *optional, ids, weights, *replay, *strides, tokens, experts, groups,
           kept_groups, top_k, shared, scale)  # fmt: skip


IMPLEMENTATION = Implementation(run, (launch,))
