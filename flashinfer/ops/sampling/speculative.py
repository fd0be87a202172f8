"""Chain speculative sampling in Triton: which draft tokens the target accepts, and the token after them.

Grid: verify_kernel one program a request; last_race_kernel `programs` programs a request, each with `chunk` tiles of
TILE columns of the target's and the draft's distribution at the first rejected token; last_pick_kernel one a request,
over the results of the race's programs. Warps: all share a tile. Shared memory: reductions.
Inputs: draft [batch, count, columns], ids [batch, count], target [batch, count + 1, columns].
Outputs: tokens [batch, count + 1], accepted and emitted [batch].
Method: Leviathan et al., Fast Inference from Transformers via Speculative Decoding, 2023,
https://arxiv.org/abs/2211.17192.
"""

import torch
import triton
import triton.language as tl

from flashinfer._core.implementation import Implementation
from flashinfer._core.launch import Build, Launcher
from flashinfer.ops._device import find_prefix as stages
from flashinfer.ops._device.find_prefix import Parameters, start
from flashinfer.ops._device.philox import exponentials, extra_uniforms, source_of
from flashinfer.ops._device.prefix import BINS, PROBS, larger_score, load_values, row_winner
from flashinfer.ops._device.rows import multiple, pointer, unit


@triton.jit
def accepts(
    draft, ids, target, row, position, count, seed, offset, stream, draft_batch, draft_token, target_batch,
    target_token, ids_batch, columns,
):  # fmt: skip
    """The draft's tokens at some positions, and whether the target accepts each: u * draft < target.

    For example, with draft 0.5, target 0.2 and u = 0.3 the token is accepted, since 0.15 < 0.2.
    """
    ok = position < count
    row, step = row.to(tl.int64), position.to(tl.int64)
    token = tl.load(ids + row * ids_batch + step, ok, other=-1)
    known = ok & (token >= 0) & (token < columns)
    p = tl.load(draft + row * draft_batch + step * draft_token + token, known, other=0).to(tl.float32)
    q = tl.load(target + row * target_batch + step * target_token + token, known, other=0).to(tl.float32)
    u = extra_uniforms(seed, offset, stream, position)
    return token, known & (u * tl.maximum(p, 0.0) < tl.maximum(q, 0.0))


@triton.jit
def verify_kernel(
    draft, ids, target, tokens, stops, accepted, emitted, random, draft_batch, draft_token, target_batch,
    target_token, ids_batch, count, columns, SEED: tl.constexpr, OFFSET: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """One program a request: the number of tokens accepted before the first rejected one, and the number that pass the
    test in total; tokens [batch, count + 1] except the last."""
    row = tl.program_id(0)
    seed, offset, stream = source_of(random, row, SEED, OFFSET)
    stop = count
    agreed = tl.full([], 0, tl.int32)
    for first in range(0, count, BLOCK):
        position = first + tl.arange(0, BLOCK)
        token, ok = accepts(
            draft, ids, target, row, position, count, seed, offset, stream, draft_batch, draft_token, target_batch,
            target_token, ids_batch, columns,
        )  # fmt: skip
        agreed += tl.sum(ok.to(tl.int32), 0)
        stop = tl.minimum(stop, tl.min(tl.where(ok, count, position), 0))
    for first in range(0, count + 1, BLOCK):
        position = first + tl.arange(0, BLOCK)
        token = tl.load(ids + row.to(tl.int64) * ids_batch + position, position < stop, other=-1)
        tl.store(tokens + row.to(tl.int64) * (count + 1) + position, token, position <= count)
    tl.store(stops + row, stop)
    tl.store(accepted + row, tl.load(accepted + row) + agreed)
    tl.store(emitted + row, tl.load(emitted + row) + stop)


@triton.jit
def last_race_kernel(
    draft, target, stops, part_score, part_column, random, draft_batch, draft_token, target_batch,
    target_token, count, columns, programs, chunk, SEED: tl.constexpr, OFFSET: tl.constexpr,
    UNIT: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Races for the token after the accepted ones, over max(target - draft, 0) (over the target, if all are accepted),
    in part_score and part_column [0, rows, programs]; races over the target alone in [1, rows, programs]. A score is
    NaN if the target is not a distribution."""
    row = tl.program_id(0) // programs
    part = tl.program_id(0) % programs
    seed, offset, stream = source_of(random, row, SEED, OFFSET)
    stop = tl.load(stops + row)
    step = stop.to(tl.int64)
    target += row.to(tl.int64) * multiple(target_batch, UNIT) + step * multiple(target_token, UNIT)
    draft += row.to(tl.int64) * multiple(draft_batch, UNIT) + step * multiple(draft_token, UNIT)
    best = tl.full([], 0.0, tl.float32)
    winner = tl.full([], -1, tl.int32)
    target_best = best
    target_winner = winner
    bad = tl.full([], 0, tl.int32)
    for i in range(chunk):
        first = (part * chunk + i) * TILE
        column = first + tl.arange(0, TILE)
        inside = column < columns
        q = load_values(target, column, inside, PROBS)
        p = load_values(draft, column, inside & (stop < count), PROBS)
        bad |= tl.max((inside & ((q != q) | (q == float("inf")))).to(tl.int32), 0)
        variate = exponentials(seed, offset, stream, first, TILE)
        score, place = tl.max(tl.where(inside & (q > p), (q - p) / variate, 0.0), 0, return_indices=True)
        best, winner = larger_score(score, first + place, best, winner)
        score, place = tl.max(tl.where(inside, q / variate, 0.0), 0, return_indices=True)
        target_best, target_winner = larger_score(score, first + place, target_best, target_winner)
    target_race = tl.num_programs(0)
    tl.store(part_score + tl.program_id(0), tl.where(bad > 0, float("nan"), best))
    tl.store(part_column + tl.program_id(0), winner)
    tl.store(part_score + target_race + tl.program_id(0), target_best)
    tl.store(part_column + target_race + tl.program_id(0), target_winner)


@triton.jit
def last_pick_kernel(part_score, part_column, stops, tokens, count, programs, BLOCK: tl.constexpr):
    """Appends the winner to the accepted tokens. If rounding makes max(target - draft, 0) zero everywhere, that is the
    winner of the target alone; -1 if the target is not a distribution."""
    row = tl.program_id(0)
    best, winner = row_winner(part_score, part_column, row, programs, PROBS, BLOCK)
    target_race = tl.num_programs(0).to(tl.int64) * programs
    _, target_winner = row_winner(part_score + target_race, part_column + target_race, row, programs, PROBS, BLOCK)
    bad = tl.full([], 0, tl.int32)
    for first in range(0, programs, BLOCK):
        part = first + tl.arange(0, BLOCK)
        score = tl.load(part_score + row.to(tl.int64) * programs + part, part < programs, other=0)
        bad |= tl.max((score != score).to(tl.int32), 0)
    token = tl.where(bad > 0, -1, tl.where(winner >= 0, winner, target_winner))
    at = row.to(tl.int64) * (count + 1) + tl.load(stops + row)
    tl.store(tokens + at, token.to(tokens.dtype.element_ty))


_DISTRIBUTION_STRIDES = ("draft_batch", "draft_token", "target_batch", "target_token")
# Draft tokens that are verified at a time; more are rare.
_VERIFIED = 32


def _build_verify(problem, config):
    rows, ids = pointer(problem.dtype, problem.aligned), f"*{problem.ids}"
    p = Parameters().add(rows, "draft").add(ids, "ids").add(rows, "target").add(ids, "tokens")
    p.add("*i32", "stops", "accepted", "emitted").randomness(problem.seed, problem.offset)
    p.add("i64", *_DISTRIBUTION_STRIDES, "ids_batch").add("i32", "count", "columns")
    constants = {"SEED": problem.seed, "OFFSET": problem.offset, "BLOCK": _VERIFIED}
    return Build(verify_kernel, p.types, constants, num_warps=1)


def _build_last_race(problem, config):
    p = Parameters().add(pointer(problem.dtype, problem.aligned), "draft", "target").add("*i32", "stops")
    p.add("*fp32", "part_score").add("*i32", "part_column").randomness(problem.seed, problem.offset)
    p.add("i64", *_DISTRIBUTION_STRIDES).add("i32", "count", "columns", "programs", "chunk")
    constants = {
        "SEED": problem.seed,
        "OFFSET": problem.offset,
        "UNIT": unit(problem.dtype, problem.aligned),
        "TILE": config.tile,
    }
    return Build(last_race_kernel, p.types, constants, num_warps=config.num_warps)


def _build_last_pick(problem, config):
    types = {"part_score": "*fp32", "part_column": "*i32", "stops": "*i32", "tokens": f"*{problem.ids}"}
    return Build(last_pick_kernel, types | {"count": "i32", "programs": "i32"}, {"BLOCK": BINS}, num_warps=1)


launch_verify = Launcher("chain_verify", _build_verify)
launch_last_race = Launcher("chain_race", _build_last_race)
launch_last_pick = Launcher("chain_pick", _build_last_pick)


def run(problem, config, draft, ids, target, randomness, tokens, accepted, emitted):
    batch, count, columns = draft.shape
    programs, chunk, _ = stages.share(batch, columns, config.tile, draft.device)
    stops = ids.new_empty(batch, dtype=torch.int32)
    part_score = draft.new_empty((2, batch, programs), dtype=torch.float32)
    part_column = draft.new_empty((2, batch, programs), dtype=torch.int32)
    strides = *draft.stride()[:2], *target.stride()[:2]
    start(launch_verify, problem, config, (batch, 1, 1), draft, ids, target, tokens, stops, accepted, emitted,
          *randomness, *strides, ids.stride(0), count, columns)  # fmt: skip
    start(launch_last_race, problem, config, (batch * programs, 1, 1), draft, target, stops, part_score, part_column,
          *randomness, *strides, count, columns, programs, chunk)  # fmt: skip
    start(launch_last_pick, problem, config, (batch, 1, 1), part_score, part_column, stops, tokens, count, programs)


IMPLEMENTATION = Implementation(
    run, (launch_verify, launch_last_race, launch_last_pick), compile_together=True
)
