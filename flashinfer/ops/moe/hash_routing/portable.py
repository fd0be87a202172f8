"""Routing by token id in Triton: a table gives a token's experts; their logits give the weights.

Grid: tokens / ROWS. Warps: all share the tokens. Shared memory: the sums.
Inputs: logits [tokens, experts], token ids [tokens], table [vocabulary, top_k], any strides of logits.
Outputs: ids and weights [tokens, top_k + shared].
Method: DeepSeek-V4's first layers; the weights are in `flashinfer/ops/moe/hash_routing/__init__.py`.
"""

import triton
import triton.language as tl

from flashinfer._core.implementation import Implementation
from flashinfer._core.launch import Build, Launcher
from flashinfer.ops._device.pdl import begin


@triton.jit
def softplus(x):
    """log(1 + exp(x)) with the relative accuracy of float32, for x far below 0 too (Goldberg 1991, theorem 4)."""
    e = tl.exp(-tl.abs(x))
    sum = 1 + e
    log = tl.where(sum == 1, e, tl.log(sum) * (e / tl.where(sum == 1, 1, sum - 1)))
    return tl.maximum(x, 0) + log


@triton.jit
def hash_kernel(
    logits, tokens, table, ids, weights, logits_row, logits_column, count, vocabulary, experts, top_k, slots,
    shared_weight, ROWS: tl.constexpr, SLOTS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    begin(PDL)
    row = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)
    slot = tl.arange(0, SLOTS)[None, :]
    in_rows = row < count
    routed = slot < top_k
    token = tl.load(tokens + row, in_rows, other=-1).to(tl.int64)
    known = (token >= 0) & (token < vocabulary)
    expert = tl.load(table + token[:, None] * top_k + slot, known[:, None] & routed, other=-1).to(tl.int64)
    valid = (expert >= 0) & (expert < experts)
    at = row[:, None] * logits_row + expert * logits_column
    score = tl.sqrt_rn(softplus(tl.load(logits + at, valid, other=0).to(tl.float32)))
    score = tl.where(valid, score, 0)
    total = tl.sum(score, 1)[:, None]
    # A token whose scores are all 0 gets 0 / 0 = NaN, as the formula gives. A token without experts gets weights of 0.
    weight = tl.where(valid, score / total, 0)
    id = tl.where(valid, expert, -1)
    id = tl.where(routed, id, experts + slot - top_k)
    weight = tl.where(routed, weight, shared_weight)
    offset = row[:, None] * slots + slot
    tl.store(ids + offset, id.to(tl.int32), in_rows[:, None] & (slot < slots))
    tl.store(weights + offset, weight, in_rows[:, None] & (slot < slots))


def build(problem, config):
    types = {"logits": f"*{problem.dtype}", "tokens": f"*{problem.token}", "table": f"*{problem.expert}"}
    types |= {"ids": "*i32", "weights": "*fp32", "logits_row": "i64", "logits_column": "i64"}
    types |= dict.fromkeys(("count", "vocabulary", "experts", "top_k", "slots"), "i32") | {"shared_weight": "fp32"}
    constants = {"ROWS": config.rows, "SLOTS": problem.slots, "PDL": config.pdl}
    return Build(hash_kernel, types, constants, num_warps=config.num_warps)


launch = Launcher("moe_hash_route", build)


def run(problem, config, logits, tokens, table, shared_weight, ids, weights):
    """Arguments as in the reference; table, ids and weights are contiguous."""
    count, experts = logits.shape
    grid = (triton.cdiv(count, config.rows), 1, 1)
    sizes = count, len(table), experts, table.shape[1], ids.shape[1]
    launch(problem, config, grid, logits, tokens, table, ids, weights, *logits.stride(), *sizes, shared_weight)


IMPLEMENTATION = Implementation(run, (launch,))
