"""The all-reduce in Triton: rows go into the peers' slots, and are summed where they arrive, in rank order."""

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
    arrive, epoch_of, give_up, is_lost, keep_epoch, pointer_at, slot_of, wait,
)  # fmt: skip
from flashinfer.ops.comm.allreduce_fusion import Norm, Problem, Results, Rows, config as sizes


@triton.jit
def allreduce_kernel(
    x,
    experts,
    scales,
    index,
    beside,
    choices,
    residual,
    weight,
    scale,
    total,
    residual_out,
    normed,
    codes,
    factors,
    factor_row,
    factor_word,
    factor_rows,
    tokens,
    hidden,
    elements,
    eps,
    bias,
    peers,
    state,
    lost,
    rank,
    area,
    limit,
    WORLD: tl.constexpr,
    TWO_SHOT: tl.constexpr,
    SOURCE: tl.constexpr,
    NUMBER_FORMAT: tl.constexpr,
    LAYOUT: tl.constexpr,
    SCALE: tl.constexpr,
    UNIT: tl.constexpr,
    ITEM: tl.constexpr,
    BLOCK: tl.constexpr,
    LANES: tl.constexpr,
    CAPABILITY: tl.constexpr,
    FIRST: tl.constexpr,
    LAST: tl.constexpr,
):
    """Row i of a program's rows: one shot sends it to all; two shots to rank (program + i) % WORLD, which sends its sum
    to all."""
    channel = tl.program_id(0)
    channels = tl.num_programs(0)
    column = tl.arange(0, BLOCK)
    hidden = multiple(hidden, UNIT)
    dtype: tl.constexpr = x.dtype.element_ty
    before = epoch_of(state, channel)
    failed = is_lost(state, LANES)
    sizes = (elements & 0x3FFFFFFF).to(tl.int32) + hidden
    # Nothing is sent after a failure: a peer that is late still could take it for what it waits for.
    sent = tl.where(failed, 0, tokens)
    own = tl.load(peers + rank)
    late = -1
    epoch = before + 1

    if FIRST == 0:
        for i in range(tl.cdiv(tl.maximum(sent - channel, 0), channels)):
            row = channel + i * channels
            inside = column < tl.minimum(hidden, multiple(elements - row.to(tl.int64) * hidden, UNIT))
            y = _own_row(x, experts, scales, index, beside, choices, row, tokens, hidden, column, inside, SOURCE)
            if TWO_SHOT:
                to = tl.load(peers + (channel + i) % WORLD) + slot_of(epoch, channel, rank, area, WORLD)
                at = pointer_at(to + _wide(i // WORLD) * hidden * ITEM, dtype, UNIT * ITEM)
                tl.store(at + column, y.to(dtype), inside)
            else:
                offset = slot_of(epoch, channel, rank, area, WORLD) + _wide(i) * hidden * ITEM
                for step in tl.static_range(WORLD):
                    # Every rank begins with another, so that no link gets all of them at once.
                    at = pointer_at(tl.load(peers + (rank + step) % WORLD) + offset, dtype, UNIT * ITEM)
                    tl.store(at + column, y.to(dtype), inside)
        if failed == 0:
            arrive(peers, rank, channel, epoch, sizes, WORLD, LANES, CAPABILITY)

    if weight is not None:
        # Read while the peers' rows are on their way; so is, below, the next row's.
        gain = tl.load(weight + column, column < hidden, other=0)
        beside_sum = _row_of(residual, channel, sent, elements, hidden, column, UNIT)

    if LAST > 0:
        if failed == 0:
            late = wait(peers, rank, channel, epoch, sizes, limit, WORLD, LANES, CAPABILITY)
            if late >= 0:
                give_up(state, lost, late, 0, epoch, LANES)
        ready = tl.where(failed | (late >= 0), 0, tokens)

        if TWO_SHOT:
            if FIRST <= 1:
                mine = channel + (rank + WORLD - channel % WORLD) % WORLD * channels
                for i in range(tl.cdiv(tl.maximum(ready - mine, 0), channels * WORLD)):
                    row = mine + i * channels * WORLD
                    inside = column < tl.minimum(hidden, multiple(elements - row.to(tl.int64) * hidden, UNIT))
                    y = _sum(own, epoch, channel, i, area, hidden, column, inside, dtype, WORLD, UNIT, ITEM, BLOCK)
                    offset = slot_of(epoch + 1, channel, rank, area, WORLD) + _wide(i) * hidden * ITEM
                    for step in tl.static_range(WORLD):
                        at = pointer_at(tl.load(peers + (rank + step) % WORLD) + offset, dtype, UNIT * ITEM)
                        tl.store(at + column, y.to(dtype), inside)
            epoch += 1
            if ready > 0:
                if FIRST <= 1:
                    arrive(peers, rank, channel, epoch, sizes, WORLD, LANES, CAPABILITY)
                if LAST > 1:
                    late = wait(peers, rank, channel, epoch, sizes, limit, WORLD, LANES, CAPABILITY)
                    if late >= 0:
                        give_up(state, lost, late, 0, epoch, LANES)
            ready = tl.where(late >= 0, 0, ready)

        if LAST > 1 or not TWO_SHOT:
            for i in range(tl.cdiv(tl.maximum(ready - channel, 0), channels)):
                row = channel + i * channels
                inside = column < tl.minimum(hidden, multiple(elements - row.to(tl.int64) * hidden, UNIT))
                if TWO_SHOT:
                    offset = slot_of(epoch, channel, (channel + i) % WORLD, area, WORLD)
                    at = pointer_at(own + offset + _wide(i // WORLD) * hidden * ITEM, dtype, UNIT * ITEM)
                    y = tl.load(at + column, inside, other=0).to(tl.float32)
                else:
                    y = _sum(own, epoch, channel, i, area, hidden, column, inside, dtype, WORLD, UNIT, ITEM, BLOCK)
                place = row.to(tl.int64) * hidden + column
                if total is not None:
                    tl.store(total + place, y.to(dtype), inside)
                if weight is not None:
                    y += beside_sum.to(tl.float32)
                    beside_sum = _row_of(residual, row + channels, sent, elements, hidden, column, UNIT)
                    tl.store(residual_out + place, y.to(dtype), inside)
                    y *= tl.rsqrt(tl.sum(y * y, 0) / hidden + eps)
                    y *= gain.to(tl.float32) + bias
                    if normed is not None:
                        tl.store(normed + place, y.to(dtype), inside)
                    if NUMBER_FORMAT == "fp8_group":
                        y = y.to(dtype).to(tl.float32)
                    _quantise(
                        y, scale, codes, factors, factor_row, factor_word, row, hidden, column, inside,
                        NUMBER_FORMAT, LAYOUT, SCALE, BLOCK, CAPABILITY,
                    )  # fmt: skip
            # A failed exchange leaves NaN, not what was there before.
            for i in range(tl.cdiv(tl.maximum(tokens - ready - channel, 0), channels)):
                row = channel + i * channels
                inside = column < tl.minimum(hidden, multiple(elements - row.to(tl.int64) * hidden, UNIT))
                _spoil(
                    total, residual_out, normed, codes, factors, factor_row, factor_word, row, hidden, column, inside,
                    dtype, NUMBER_FORMAT, LAYOUT, BLOCK,
                )  # fmt: skip
            if NUMBER_FORMAT == "nvfp4" and LAYOUT != "linear":
                block = tl.arange(0, BLOCK // 16)
                for i in range(tl.cdiv(factor_rows - tokens, channels)):
                    row = tokens + channel + i * channels
                    at = scale_offset(row + block * 0, block, factor_row, LAYOUT)
                    inside = (block < factor_row) & (row < factor_rows)
                    tl.store(factors + at, tl.zeros([BLOCK // 16], tl.uint8), inside)
            keep_epoch(state, channel, tl.where(ready > 0, epoch, before))


@triton.jit
def _wide(i):
    """i as 64 bits; in the interpreter a loop counts in Python's integers."""
    return tl.zeros([], tl.int64) + i


@triton.jit
def _row_of(tensor, row, rows, elements, hidden, column, UNIT: tl.constexpr):
    """A row of [rows, hidden], `elements` in all; 0 where there is none."""
    start = row.to(tl.int64) * hidden
    inside = column < tl.minimum(hidden, multiple(elements - start, UNIT))
    return tl.load(tensor + start + column, inside & (row < rows), other=0)


@triton.jit
def _own_row(
    x, experts, scales, index, beside, choices, row, tokens, hidden, column, inside, SOURCE: tl.constexpr
):  # fmt: skip
    """What this rank adds to a row of the sum, float32."""
    row = row.to(tl.int64)
    if SOURCE == "finalize":
        y = tl.zeros(column.shape, tl.float32)
        if beside is not None:
            y += tl.load(beside + row * hidden + column, inside, other=0).to(tl.float32)
        for choice in range(choices):
            picked = tl.load(index + row * choices + choice).to(tl.int64)
            value = tl.load(x + picked * hidden + column, inside & (picked >= 0), other=0).to(tl.float32)
            if scales is not None:
                value *= tl.load(scales + row * choices + choice).to(tl.float32)
            y += value
        return y
    y = tl.load(x + row * hidden + column, inside, other=0).to(tl.float32)
    if SOURCE == "reduce":
        for expert in range(choices):
            at = _wide(expert) * tokens + row
            value = tl.load(experts + at * hidden + column, inside, other=0).to(tl.float32)
            y += value * tl.load(scales + at)
    return y


@triton.jit
def _sum(
    own, epoch, channel, i, area, hidden, column, inside, dtype: tl.constexpr, WORLD: tl.constexpr,
    UNIT: tl.constexpr, ITEM: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Row i of what has arrived, float32, summed in rank order: the same bits on every rank."""
    y = tl.zeros([BLOCK], tl.float32)
    for source in tl.static_range(WORLD):
        offset = slot_of(epoch, channel, source, area, WORLD) + _wide(i) * hidden * ITEM
        at = pointer_at(own + offset, dtype, UNIT * ITEM)
        y += tl.load(at + column, inside, other=0).to(tl.float32)
    return y


@triton.jit
def _quantise(
    y, scale, codes, factors, factor_row, factor_word, row, hidden, column, inside,
    NUMBER_FORMAT: tl.constexpr, LAYOUT: tl.constexpr, SCALE: tl.constexpr, BLOCK: tl.constexpr,
    CAPABILITY: tl.constexpr,
):  # fmt: skip
    """Write a row quantised: codes, and its scales."""
    wide = row.to(tl.int64) * hidden
    if NUMBER_FORMAT == "fp8":
        tl.store(codes + wide + column, to_fp8(y * _inverse(scale, SCALE), "fp8e4nv", CAPABILITY), inside)
    elif NUMBER_FORMAT == "fp8_row":
        code, factor = quantize_fp8(y[None, :], BLOCK, "fp8e4nv", False, CAPABILITY)
        tl.store((codes + wide + column)[None, :], code, inside[None, :])
        tl.store(factors + row + tl.zeros([1, 1], tl.int32), factor)
    elif NUMBER_FORMAT == "fp8_group":
        # No smaller than 1e-10, so that a group of zeros has a scale that is no subnormal.
        amax = tl.maximum(block_amax(y[None, :], 128), 0x2EDBE6FF)
        factor = to_ue8m0(amax, 448)
        code = to_fp8(times_blocks(y[None, :], inverse_ue8m0(factor), 128), "fp8e4nv", CAPABILITY)
        tl.store((codes + wide + column)[None, :], code, inside[None, :])
        group = tl.arange(0, BLOCK // 128)[None, :]
        at = (row.to(tl.int64) * factor_row + (group // 4).to(tl.int64) * factor_word) * 4 + group % 4
        # The last word's bytes past the row are 0.
        tl.store(factors + at, tl.where(group < hidden // 128, factor, 0), group < (hidden + 511) // 512 * 4)
    elif NUMBER_FORMAT == "nvfp4":
        code, factor = quantize_nvfp4(y[None, :], _number(scale, SCALE), CAPABILITY)
        pair = tl.arange(0, BLOCK // 2)[None, :]
        tl.store(codes + row.to(tl.int64) * (hidden // 2) + pair, code, pair < hidden // 2)
        block = tl.arange(0, BLOCK // 16)[None, :]
        at = scale_offset(row + block * 0, block, factor_row, LAYOUT)
        tl.store(factors + at, factor, block < factor_row)


@triton.jit
def _spoil(
    total, residual_out, normed, codes, factors, factor_row, factor_word, row, hidden, column, inside,
    dtype: tl.constexpr, NUMBER_FORMAT: tl.constexpr, LAYOUT: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Write NaN to a row of every result: bytes 0xFF in what is quantised, codes and scales."""
    wide = row.to(tl.int64) * hidden
    nan = tl.full([BLOCK], float("nan"), tl.float32).to(dtype)
    if total is not None:
        tl.store(total + wide + column, nan, inside)
    if residual_out is not None:
        tl.store(residual_out + wide + column, nan, inside)
    if normed is not None:
        tl.store(normed + wide + column, nan, inside)
    if NUMBER_FORMAT == "nvfp4":
        pair = tl.arange(0, BLOCK // 2)
        half = row.to(tl.int64) * (hidden // 2) + pair
        tl.store(codes + half, tl.full([BLOCK // 2], 0xFF, tl.uint8), pair < hidden // 2)
        block = tl.arange(0, BLOCK // 16)
        at = scale_offset(row + block * 0, block, factor_row, LAYOUT)
        tl.store(factors + at, tl.full([BLOCK // 16], 0xFF, tl.uint8), block < factor_row)
    elif NUMBER_FORMAT != "":
        tl.store(codes + wide + column, tl.full([BLOCK], 0xFF, tl.uint8), inside)
        if NUMBER_FORMAT == "fp8_row":
            tl.store(factors + row, float("nan"))
        elif NUMBER_FORMAT == "fp8_group":
            group = tl.arange(0, BLOCK // 128)
            at = (row.to(tl.int64) * factor_row + (group // 4).to(tl.int64) * factor_word) * 4 + group % 4
            tl.store(factors + at, tl.full([BLOCK // 128], 0xFF, tl.uint8), group < (hidden + 511) // 512 * 4)


@triton.jit
def _number(scale, SCALE: tl.constexpr):
    """The scale: at the address of a "tensor", a "number", or "" for 1."""
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
    types = {"x": rows}
    if problem.source == "reduce":
        types |= {"experts": rows, "scales": "*fp32", "choices": "i32"}
    elif problem.source == "finalize":
        types |= {"scales": f"*{problem.scale_dtype}"} if problem.scale_dtype else {}
        types |= {"index": "*i32"}
        types |= {"beside": rows} if problem.beside else {}
        types |= {"choices": "i32"}
    if problem.weight_dtype:
        types |= {"residual": rows, "weight": pointer(problem.weight_dtype, problem.aligned)}
    if problem.scale:
        types["scale"] = "fp32" if problem.scale == "number" else "*fp32"
    types |= {"total": rows} if problem.sum else {}
    if problem.weight_dtype:
        types |= {"residual_out": rows} | ({"normed": rows} if problem.normed else {})
    if problem.number_format:
        types["codes"] = pointer("u8", problem.aligned)
    if problem.number_format in ("nvfp4", "fp8_group", "fp8_row"):
        types["factors"] = "*fp32" if problem.number_format == "fp8_row" else "*u8"
        types |= {"factor_row": "i32", "factor_word": "i32", "factor_rows": "i32"}
    types |= {"tokens": "i32", "hidden": "i32", "elements": "i64", "eps": "fp32", "bias": "fp32"}
    types |= {"peers": "*i64", "state": "*i32", "lost": "*i32", "rank": "i32", "area": "i64:16", "limit": "i64"}
    constants = {name: None for name in allreduce_kernel.arg_names if name not in types} | {
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


# Bytes of stack a thread may use: ptxas keeps an address or two there across a wait, 8 bytes seen on sm_80.
STACK_BUDGET = 32

launch = Launcher("allreduce_fusion", build)


def kernels(problem, config):
    """The launches of a Problem, for compiling ahead: the probe that comes before a workspace, too."""
    yield launch, problem, config
    yield probe.launch, probe.Problem(problem.world, config.capability), None


def run(problem, config, link, given: Rows, norm: Norm, out: Results, tokens: int, hidden: int, elements: int) -> None:
    """Add the rows of all ranks. tokens, hidden : of the rows as they travel; elements : of all of them."""
    args = [given.rows]
    if problem.source == "reduce":
        args += [given.experts, given.scales, given.experts.shape[0]]
    elif problem.source == "finalize":
        args += [t for t in (given.scales, given.index, given.beside) if t is not None]
        args.append(given.index.shape[1])
    args += [t for t in (norm.residual, norm.weight, norm.scale if problem.scale else None) if t is not None]
    codes = None if out.codes is None else out.codes.view(torch.uint8)
    args += [t for t in (out.sum, out.residual, out.normed, codes) if t is not None]
    if out.factors is not None:
        args += _factor_arguments(problem, out.factors, tokens, hidden)
    grid = (sizes.programs(tokens), 1, 1)
    launch(problem, config, grid, *args, tokens, hidden, elements, norm.eps, norm.bias, *link.arguments)


def _factor_arguments(problem, factors: torch.Tensor, tokens: int, hidden: int) -> list:
    """The scales as the kernel writes them, what it needs to find one, and the rows that their layout has."""
    if problem.number_format == "fp8_row":
        return [factors, 1, 0, tokens]
    if problem.number_format == "fp8_group":
        row, word = factors.stride()
        # The bytes of words with any strides.
        extent = 1 + (factors.shape[0] - 1) * row + (factors.shape[1] - 1) * word
        return [factors.as_strided((extent,), (1,)).view(torch.uint8), row, word, tokens]
    rows, blocks = layouts.padded(tokens, hidden // 16, problem.layout)
    return [factors.view(torch.uint8), blocks, 0, rows]


IMPLEMENTATION = Implementation(run, (launch, probe.launch), kernels=kernels, stack_budget=STACK_BUDGET)
