"""The all-reduce in Triton: each rank stores rows in the peers' slots, and sums what it receives in rank order.

Grid: one program a channel; program c of n has rows c, c + n, ... (`flashinfer/ops/comm/_device/exchange.py`).
Warps: all share a row. Shared memory: the reductions of norms and of quantised results.
Inputs: given, rows [tokens, hidden] of this rank, or experts' rows with scales and a table; norm, residual [tokens,
hidden] and weight [hidden]; peers int64 [WORLD], the addresses of the ranks' buffers.
Outputs: of `Results` those that are asked for: sum, residual and normed [tokens, hidden], codes and their factors.
Method: one-shot or two-shot all-reduce over peer memory; docs/rooms/comm.md derives the threshold.
"""

import torch
import triton
import triton.language as tl

from flashinfer._core.checks import torch_dtype
from flashinfer._core.implementation import Implementation
from flashinfer._core.launch import Build, Launcher
from flashinfer.ops import layouts
from flashinfer.ops._device.formats import to_fp8, to_ue8m0, inverse_ue8m0
from flashinfer.ops._device.rows import multiple, pointer, unit
from flashinfer.ops._device.scales import block_amax, quantize_fp8, quantize_nvfp4, scale_offset, times_blocks
from flashinfer.ops.comm._device import probe
from flashinfer.ops.comm._device.exchange import (
    arrive, epoch_of, give_up, int64, is_lost, keep_epoch, pointer_at, slot_of, wait,
)  # fmt: skip
from flashinfer.ops.comm.allreduce_fusion import Norm, Problem, Results, Rows, config as sizes


@triton.jit
def allreduce_kernel(
    given, norm, out, tokens, hidden, elements, peers, state, lost, rank, area, limit,
    WORLD: tl.constexpr, TWO_SHOT: tl.constexpr, SOURCE: tl.constexpr, NUMBER_FORMAT: tl.constexpr,
    LAYOUT: tl.constexpr, SCALE: tl.constexpr, UNIT: tl.constexpr, ITEM: tl.constexpr, BLOCK: tl.constexpr,
    LANES: tl.constexpr, CAPABILITY: tl.constexpr, FIRST: tl.constexpr, LAST: tl.constexpr,
):  # fmt: skip
    """One-shot sends row i of a program's rows to all ranks. Two-shot sends it to rank (program + i) % WORLD, which
    sends the sum to all.

    given, norm, out : the fields of `Rows`, `Norm` and `Results`; absent ones are None. given.choices is the number of
    experts ("reduce") or of a token's choices ("finalize"). out.factor_row and out.factor_word are strides of factors.
    """
    channel = tl.program_id(0)
    channels = tl.num_programs(0)
    column = tl.arange(0, BLOCK)
    hidden = multiple(hidden, UNIT)
    dtype: tl.constexpr = given.rows.dtype.element_ty
    before = epoch_of(state, channel)
    failed = is_lost(state, LANES)
    sizes = (elements & 0x3FFFFFFF).to(tl.int32) + hidden
    # Nothing is sent after a failure: a late peer could take it for the exchange that it waits for.
    sent = tl.where(failed, 0, tokens)
    own = tl.load(peers + rank)
    failed_rank = -1
    epoch = before + 1

    if FIRST == 0:
        for i in range(tl.cdiv(tl.maximum(sent - channel, 0), channels)):
            row = channel + i * channels
            inside = column < tl.minimum(hidden, multiple(elements - row.to(tl.int64) * hidden, UNIT))
            y = _own_row(given, row, tokens, hidden, column, inside, SOURCE)
            if TWO_SHOT:
                to = tl.load(peers + (channel + i) % WORLD) + slot_of(epoch, channel, rank, area, WORLD)
                at = pointer_at(to + int64(i // WORLD) * hidden * ITEM, dtype, UNIT * ITEM)
                tl.store(at + column, y.to(dtype), inside)
            else:
                offset = slot_of(epoch, channel, rank, area, WORLD) + int64(i) * hidden * ITEM
                for step in tl.static_range(WORLD):
                    # Ranks begin with different peers, so that no link gets all traffic at once.
                    at = pointer_at(tl.load(peers + (rank + step) % WORLD) + offset, dtype, UNIT * ITEM)
                    tl.store(at + column, y.to(dtype), inside)
        if failed == 0:
            arrive(peers, rank, channel, epoch, sizes, WORLD, LANES, CAPABILITY)

    if norm.weight is not None:
        # Loaded while the peers' rows are in flight; the next row's residual is loaded ahead in the same way.
        gain = tl.load(norm.weight + column, column < hidden, other=0)
        residual_row = _row_of(norm.residual, channel, sent, elements, hidden, column, UNIT)

    if LAST > 0:
        if failed == 0:
            failed_rank = wait(peers, rank, channel, epoch, sizes, limit, WORLD, LANES, CAPABILITY)
            if failed_rank >= 0:
                give_up(state, lost, failed_rank, 0, epoch, LANES)
        ready = tl.where(failed | (failed_rank >= 0), 0, tokens)

        if TWO_SHOT:
            if FIRST <= 1:
                mine = channel + (rank + WORLD - channel % WORLD) % WORLD * channels
                for i in range(tl.cdiv(tl.maximum(ready - mine, 0), channels * WORLD)):
                    row = mine + i * channels * WORLD
                    inside = column < tl.minimum(hidden, multiple(elements - row.to(tl.int64) * hidden, UNIT))
                    y = _sum(own, epoch, channel, i, area, hidden, column, inside, dtype, WORLD, UNIT, ITEM, BLOCK)
                    offset = slot_of(epoch + 1, channel, rank, area, WORLD) + int64(i) * hidden * ITEM
                    for step in tl.static_range(WORLD):
                        at = pointer_at(tl.load(peers + (rank + step) % WORLD) + offset, dtype, UNIT * ITEM)
                        tl.store(at + column, y.to(dtype), inside)
            epoch += 1
            if ready > 0:
                if FIRST <= 1:
                    arrive(peers, rank, channel, epoch, sizes, WORLD, LANES, CAPABILITY)
                if LAST > 1:
                    failed_rank = wait(peers, rank, channel, epoch, sizes, limit, WORLD, LANES, CAPABILITY)
                    if failed_rank >= 0:
                        give_up(state, lost, failed_rank, 0, epoch, LANES)
            ready = tl.where(failed_rank >= 0, 0, ready)

        if LAST > 1 or not TWO_SHOT:
            for i in range(tl.cdiv(tl.maximum(ready - channel, 0), channels)):
                row = channel + i * channels
                inside = column < tl.minimum(hidden, multiple(elements - row.to(tl.int64) * hidden, UNIT))
                if TWO_SHOT:
                    offset = slot_of(epoch, channel, (channel + i) % WORLD, area, WORLD)
                    at = pointer_at(own + offset + int64(i // WORLD) * hidden * ITEM, dtype, UNIT * ITEM)
                    y = tl.load(at + column, inside, other=0).to(tl.float32)
                else:
                    y = _sum(own, epoch, channel, i, area, hidden, column, inside, dtype, WORLD, UNIT, ITEM, BLOCK)
                place = row.to(tl.int64) * hidden + column
                if out.sum is not None:
                    tl.store(out.sum + place, y.to(dtype), inside)
                if norm.weight is not None:
                    y += residual_row.to(tl.float32)
                    residual_row = _row_of(norm.residual, row + channels, sent, elements, hidden, column, UNIT)
                    tl.store(out.residual + place, y.to(dtype), inside)
                    y *= tl.rsqrt(tl.sum(y * y, 0) / hidden + norm.eps)
                    y *= gain.to(tl.float32) + norm.bias
                    if out.normed is not None:
                        tl.store(out.normed + place, y.to(dtype), inside)
                    if NUMBER_FORMAT == "fp8_group":
                        y = y.to(dtype).to(tl.float32)
                    _quantize(
                        y, norm.scale, out, row, hidden, column, inside, NUMBER_FORMAT, LAYOUT, SCALE, BLOCK, CAPABILITY
                    )  # fmt: skip
            # A failed exchange leaves NaN, not what was there before.
            for i in range(tl.cdiv(tl.maximum(tokens - ready - channel, 0), channels)):
                row = channel + i * channels
                inside = column < tl.minimum(hidden, multiple(elements - row.to(tl.int64) * hidden, UNIT))
                _spoil(out, row, hidden, column, inside, dtype, NUMBER_FORMAT, LAYOUT, BLOCK)
            if NUMBER_FORMAT == "nvfp4" and LAYOUT != "linear":
                block = tl.arange(0, BLOCK // 16)
                for i in range(tl.cdiv(out.factor_rows - tokens, channels)):
                    row = tokens + channel + i * channels
                    at = scale_offset(row + block * 0, block, out.factor_row, LAYOUT)
                    inside = (block < out.factor_row) & (row < out.factor_rows)
                    tl.store(out.factors + at, tl.zeros([BLOCK // 16], tl.uint8), inside)
            keep_epoch(state, channel, tl.where(ready > 0, epoch, before))


@triton.jit
def _row_of(tensor, row, rows, elements, hidden, column, UNIT: tl.constexpr):
    """Row `row` of a tensor [rows, hidden] that ends after `elements` elements; 0 past its end."""
    start = row.to(tl.int64) * hidden
    inside = column < tl.minimum(hidden, multiple(elements - start, UNIT))
    return tl.load(tensor + start + column, inside & (row < rows), other=0)


@triton.jit
def _own_row(given, row, tokens, hidden, column, inside, SOURCE: tl.constexpr):
    """This rank's contribution to a row of the sum, float32."""
    row = row.to(tl.int64)
    if SOURCE == "finalize":
        y = tl.zeros(column.shape, tl.float32)
        if given.beside is not None:
            y += tl.load(given.beside + row * hidden + column, inside, other=0).to(tl.float32)
        for choice in range(given.choices):
            picked = tl.load(given.index + row * given.choices + choice).to(tl.int64)
            value = tl.load(given.rows + picked * hidden + column, inside & (picked >= 0), other=0).to(tl.float32)
            if given.scales is not None:
                value *= tl.load(given.scales + row * given.choices + choice).to(tl.float32)
            y += value
        return y
    y = tl.load(given.rows + row * hidden + column, inside, other=0).to(tl.float32)
    if SOURCE == "reduce":
        for expert in range(given.choices):
            at = int64(expert) * tokens + row
            value = tl.load(given.experts + at * hidden + column, inside, other=0).to(tl.float32)
            y += value * tl.load(given.scales + at)
    return y


@triton.jit
def _sum(
    own, epoch, channel, i, area, hidden, column, inside, dtype: tl.constexpr, WORLD: tl.constexpr,
    UNIT: tl.constexpr, ITEM: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The float32 sum of row i over all ranks' areas, in rank order: the same bits on every rank."""
    y = tl.zeros([BLOCK], tl.float32)
    for source in tl.static_range(WORLD):
        offset = slot_of(epoch, channel, source, area, WORLD) + int64(i) * hidden * ITEM
        at = pointer_at(own + offset, dtype, UNIT * ITEM)
        y += tl.load(at + column, inside, other=0).to(tl.float32)
    return y


@triton.jit
def _quantize(
    y, scale, out, row, hidden, column, inside, NUMBER_FORMAT: tl.constexpr, LAYOUT: tl.constexpr,
    SCALE: tl.constexpr, BLOCK: tl.constexpr, CAPABILITY: tl.constexpr,
):  # fmt: skip
    """Write a row quantized: codes and scales."""
    wide = row.to(tl.int64) * hidden
    if NUMBER_FORMAT == "fp8":
        tl.store(out.codes + wide + column, to_fp8(y * _inverse(scale, SCALE), "fp8e4nv", CAPABILITY), inside)
    elif NUMBER_FORMAT == "fp8_row":
        code, factor = quantize_fp8(y[None, :], BLOCK, "fp8e4nv", False, CAPABILITY)
        tl.store((out.codes + wide + column)[None, :], code, inside[None, :])
        tl.store(out.factors + row + tl.zeros([1, 1], tl.int32), factor)
    elif NUMBER_FORMAT == "fp8_group":
        # At least 1e-10 (bits 0x2EDBE6FF), so that the scale of a group of zeros is not subnormal.
        amax = tl.maximum(block_amax(y[None, :], 128), 0x2EDBE6FF)
        factor = to_ue8m0(amax, 448)
        code = to_fp8(times_blocks(y[None, :], inverse_ue8m0(factor), 128), "fp8e4nv", CAPABILITY)
        tl.store((out.codes + wide + column)[None, :], code, inside[None, :])
        group = tl.arange(0, BLOCK // 128)[None, :]
        at = (row.to(tl.int64) * out.factor_row + (group // 4).to(tl.int64) * out.factor_word) * 4 + group % 4
        # The last word's bytes past the row are 0.
        tl.store(out.factors + at, tl.where(group < hidden // 128, factor, 0), group < (hidden + 511) // 512 * 4)
    elif NUMBER_FORMAT == "nvfp4":
        code, factor = quantize_nvfp4(y[None, :], _number(scale, SCALE), CAPABILITY)
        pair = tl.arange(0, BLOCK // 2)[None, :]
        tl.store(out.codes + row.to(tl.int64) * (hidden // 2) + pair, code, pair < hidden // 2)
        block = tl.arange(0, BLOCK // 16)[None, :]
        at = scale_offset(row + block * 0, block, out.factor_row, LAYOUT)
        tl.store(out.factors + at, factor, block < out.factor_row)


@triton.jit
def _spoil(
    out, row, hidden, column, inside, dtype: tl.constexpr, NUMBER_FORMAT: tl.constexpr, LAYOUT: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Write NaN to a row of every output; to quantized codes and scales bytes of 0xFF."""
    wide = row.to(tl.int64) * hidden
    nan = tl.full([BLOCK], float("nan"), tl.float32).to(dtype)
    if out.sum is not None:
        tl.store(out.sum + wide + column, nan, inside)
    if out.residual is not None:
        tl.store(out.residual + wide + column, nan, inside)
    if out.normed is not None:
        tl.store(out.normed + wide + column, nan, inside)
    if NUMBER_FORMAT == "nvfp4":
        pair = tl.arange(0, BLOCK // 2)
        half = row.to(tl.int64) * (hidden // 2) + pair
        tl.store(out.codes + half, tl.full([BLOCK // 2], 0xFF, tl.uint8), pair < hidden // 2)
        block = tl.arange(0, BLOCK // 16)
        at = scale_offset(row + block * 0, block, out.factor_row, LAYOUT)
        tl.store(out.factors + at, tl.full([BLOCK // 16], 0xFF, tl.uint8), block < out.factor_row)
    elif NUMBER_FORMAT != "":
        tl.store(out.codes + wide + column, tl.full([BLOCK], 0xFF, tl.uint8), inside)
        if NUMBER_FORMAT == "fp8_row":
            tl.store(out.factors + row, float("nan"))
        elif NUMBER_FORMAT == "fp8_group":
            group = tl.arange(0, BLOCK // 128)
            at = (row.to(tl.int64) * out.factor_row + (group // 4).to(tl.int64) * out.factor_word) * 4 + group % 4
            tl.store(out.factors + at, tl.full([BLOCK // 128], 0xFF, tl.uint8), group < (hidden + 511) // 512 * 4)


@triton.jit
def _number(scale, SCALE: tl.constexpr):
    """The scale as float32: a loaded "tensor", a "number", or 1."""
    one = tl.full([], 1.0, tl.float32)
    if SCALE == "tensor":
        return tl.load(scale)
    elif SCALE == "number":
        return one * scale
    else:
        return one


@triton.jit
def _inverse(scale, SCALE: tl.constexpr):
    return tl.div_rn(tl.full([], 1.0, tl.float32), _number(scale, SCALE))


def build(problem: Problem, config) -> Build:
    rows = pointer(problem.dtype, problem.aligned)
    picked, reduced, normed = problem.source == "finalize", problem.source == "reduce", bool(problem.weight_dtype)
    scales = "*fp32" if reduced else f"*{problem.scale_dtype}" if picked and problem.scale_dtype else None
    factors = {"fp8_row": "*fp32", "fp8_group": "*u8", "nvfp4": "*u8"}.get(problem.number_format)
    types = {
        "given.rows": rows,
        "given.experts": rows if reduced else None,
        "given.scales": scales,
        "given.index": "*i32" if picked else None,
        "given.beside": rows if picked and problem.beside else None,
        "given.choices": "i32" if picked or reduced else None,
        "norm.residual": rows if normed else None,
        "norm.weight": pointer(problem.weight_dtype, problem.aligned) if normed else None,
        "norm.scale": {"number": "fp32", "tensor": "*fp32"}.get(problem.scale),
        "norm.eps": "fp32",
        "norm.bias": "fp32",
        "out.sum": rows if problem.sum else None,
        "out.residual": rows if normed else None,
        "out.normed": rows if normed and problem.normed else None,
        "out.codes": pointer("u8", problem.aligned) if problem.number_format else None,
        "out.factors": factors,
        **dict.fromkeys(("out.factor_row", "out.factor_word", "out.factor_rows"), "i32" if factors else None),
        **{"tokens": "i32", "hidden": "i32", "elements": "i64", "peers": "*i64", "state": "*i32", "lost": "*i32"},
        **{"rank": "i32", "area": "i64:16", "limit": "i64"},
    }
    constants = {
        "WORLD": problem.world,
        "TWO_SHOT": problem.two_shot,
        "SOURCE": problem.source,
        "NUMBER_FORMAT": problem.number_format,
        "LAYOUT": problem.layout,
        "SCALE": problem.scale,
        "UNIT": unit(problem.dtype, problem.aligned),
        "ITEM": torch_dtype(problem.dtype).itemsize,
        "BLOCK": problem.block,
        "LANES": 32 * config.num_warps,
        "CAPABILITY": config.capability,
        "FIRST": config.first,
        "LAST": config.last,
    }
    return Build(allreduce_kernel, types, constants, num_warps=config.num_warps)


# Bytes of stack a thread may use. ptxas spills addresses that are live across a wait, 8 bytes on sm_80.
STACK_BUDGET = 32

launch = Launcher("allreduce_fusion", build)


def kernels(problem, config):
    """(launcher, problem, config) of each kernel that may run for a problem, for compiling ahead; also the probe of a
    workspace's set-up."""
    yield launch, problem, config
    yield probe.launch, probe.Problem(problem.world, config.capability), None


def run(problem, config, link, given: Rows, norm: Norm, out: Results, tokens: int, hidden: int, elements: int) -> None:
    """Add the rows of all ranks. tokens, hidden : of the rows as they travel; elements : of all of them."""
    choices = {"reduce": given.experts, "finalize": given.index}.get(problem.source)
    arguments = (
        *given, None if choices is None else choices.shape[0 if problem.source == "reduce" else 1],
        norm.residual, norm.weight, norm.scale if problem.scale else None, norm.eps, norm.bias,
        out.sum, out.residual, out.normed, None if out.codes is None else out.codes.view(torch.uint8),
        *_factor_arguments(problem, out.factors, tokens, hidden), tokens, hidden, elements, *link.arguments,
    )  # fmt: skip
    # The kernel is compiled without the parameters that are None.
    launch(problem, config, (sizes.programs(tokens), 1, 1), *(x for x in arguments if x is not None))


def _factor_arguments(problem, factors: torch.Tensor | None, tokens: int, hidden: int) -> list:
    """The kernel's arguments for factors: the tensor, two strides, and the padded number of rows."""
    if factors is None:
        return []
    if problem.number_format == "fp8_row":
        return [factors, 1, 0, tokens]
    if problem.number_format == "fp8_group":
        row, word = factors.stride()
        # A flat view of bytes, for words with any strides.
        extent = 1 + (factors.shape[0] - 1) * row + (factors.shape[1] - 1) * word
        return [factors.as_strided((extent,), (1,)).view(torch.uint8), row, word, tokens]
    rows, blocks = layouts.padded(tokens, hidden // 16, problem.layout)
    return [factors.view(torch.uint8), blocks, 0, rows]


IMPLEMENTATION = Implementation(run, (launch, probe.launch), kernels=kernels, stack_budget=STACK_BUDGET)
