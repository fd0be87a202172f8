"""The all-to-all in Triton: dispatch stores rows in peer memory, combine loads them from there; flags synchronize.

Grid: dispatch_kernel, combine_kernel and blocks_kernel one program a channel; program c of n has tokens c, c + n, ...
(`flashinfer/ops/comm/_device/exchange.py`); place_kernel one a rank; stage_kernel one a row; sanitize_kernel one for
BLOCK ids. Warps: all share a row. Shared memory: place_kernel's scans.
Inputs: experts [tokens, choices]; payloads, up to 8 tensors of tokens; rows [source rank, most, hidden]; peers int64
[WORLD], the addresses of the ranks' buffers.
Outputs: place [tokens, WORLD] and counts [WORLD]; payloads [source rank, most, .] in the peers' buffers; out [tokens,
hidden], the sums of a token's rows.
Method: stores to peer memory, then flags; docs/rooms/comm.md.
"""

from dataclasses import dataclass

import triton
import triton.language as tl

from flashinfer._core.checks import torch_dtype
from flashinfer._core.implementation import Implementation
from flashinfer._core.launch import Build, Launcher
from flashinfer.ops._device.rows import multiple, pointer, unit
from flashinfer.ops.comm._device.exchange import (
    arrive, epoch_of, give_up, int64, is_lost, keep_epoch, pointer_at, slot_of, wait,
)  # fmt: skip
from flashinfer.ops.comm.alltoall import MOST_PAYLOADS, Blocks, Combine, Dispatch, config as sizes
from flashinfer.ops.comm.symmetric import SLOTTED

# Bytes of stack a thread may use. ptxas spills addresses that are live across a wait, up to 80 bytes (blocks_kernel,
# sm_80).
STACK_BUDGET = 96


@triton.jit
def place_kernel(
    experts, place, counts, tokens, choices, per, WORLD: tl.constexpr, CHOICES: tl.constexpr, TOKENS: tl.constexpr
):  # fmt: skip
    """place [tokens, WORLD]: the row of each token on each rank, -1 where it is not sent; counts [WORLD]: rows sent."""
    to = tl.program_id(0)
    choice = tl.arange(0, CHOICES)[None, :]
    count = 0
    for start in range(0, tokens, TOKENS):
        token = start + tl.arange(0, TOKENS)
        at = token.to(tl.int64)[:, None] * choices + choice
        expert = tl.load(experts + at, (token < tokens)[:, None] & (choice < choices), other=-1)
        hit = tl.max(((expert >= to * per) & (expert < (to + 1) * per)).to(tl.int32), 1)
        row = count + tl.cumsum(hit, 0) - hit
        tl.store(place + token.to(tl.int64) * WORLD + to, tl.where(hit != 0, row, -1), token < tokens)
        count += tl.sum(hit, 0)
    tl.store(counts + to, count)


@triton.jit
def dispatch_kernel(
    place, counts, payloads, nbytes, to, begin, end, counts_to, stats, stats_words, stats_to, tokens, most, sizes,
    peers, state, lost, rank, area, limit,
    WORLD: tl.constexpr, PAYLOADS: tl.constexpr, UNITS: tl.constexpr, BLOCK: tl.constexpr, LANES: tl.constexpr,
    CAPABILITY: tl.constexpr, FIRST: tl.constexpr, LAST: tl.constexpr,
):  # fmt: skip
    """Store payload i of this rank's tokens in the peers' buffers at offset `to[i]`, [source rank, most, nbytes[i]].

    payloads, nbytes, to : for each payload the address, the bytes of a row, and the offset in a peer's buffer.
    begin, end : the range of a buffer that a dispatch writes: statistics, then payloads.
    stats : address of this rank's statistics, which become row `rank` of the statistics at `stats_to` on every rank.
    """
    channel = tl.program_id(0)
    channels = tl.num_programs(0)
    epoch = epoch_of(state, channel) + 1
    failed = is_lost(state, LANES)
    failed_rank = -1
    if FIRST == 0:
        sent = tl.where(failed, 0, tokens)
        for i in range(tl.cdiv(tl.maximum(sent - channel, 0), channels)):
            token = (channel + i * channels).to(tl.int64)
            for index in tl.static_range(PAYLOADS):
                _send(
                    payloads[index], nbytes[index], to[index], place, token, most, peers, rank, index,
                    WORLD, UNITS, BLOCK,
                )  # fmt: skip
        if failed == 0:
            if channel == 0:
                for target in tl.static_range(WORLD):
                    at = pointer_at(tl.load(peers + target) + counts_to + rank * 4, tl.int32, 4)
                    tl.store(at, tl.load(counts + target))
                for start in range(0, stats_words, BLOCK):
                    word = start + tl.arange(0, BLOCK)
                    value = tl.load(pointer_at(stats, tl.int32, 4) + word, word < stats_words)
                    for target in tl.static_range(WORLD):
                        there = tl.load(peers + target) + stats_to + rank.to(tl.int64) * stats_words * 4
                        tl.store(pointer_at(there, tl.int32, 4) + word, value, word < stats_words)
            arrive(peers, rank, channel, epoch, sizes, WORLD, LANES, CAPABILITY)
    if LAST == 1:
        if failed == 0:
            failed_rank = wait(peers, rank, channel, epoch, sizes, limit, WORLD, LANES, CAPABILITY)
            if failed_rank >= 0:
                give_up(state, lost, failed_rank, 1, epoch, LANES)
        if failed | (failed_rank >= 0):
            # The received data is incomplete: all of it becomes NaN or -1, and the counts 0.
            own = tl.load(peers + rank)
            words = tl.cdiv(end - begin, 4)
            for at in range(0, words, BLOCK):
                word = at + tl.arange(0, BLOCK)
                tl.store(pointer_at(own + begin, tl.int32, 4) + word, tl.full([BLOCK], -1, tl.int32), word < words)
            for source in tl.static_range(WORLD):
                tl.store(pointer_at(own + counts_to + source * 4, tl.int32, 4), 0)
        keep_epoch(state, channel, tl.where(failed | (failed_rank >= 0), epoch - 1, epoch))


@triton.jit
def _send(
    payload, nbytes, to_bytes, place, token, most, peers, rank, INDEX: tl.constexpr, WORLD: tl.constexpr,
    UNITS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Load a token's row of one payload once, and store it on every rank that the token goes to."""
    UNIT: tl.constexpr = 1 << (UNITS // 8**INDEX % 8)
    ITEM: tl.constexpr = 4 if UNIT > 4 else UNIT
    dtype: tl.constexpr = tl.int32 if ITEM == 4 else (tl.int16 if ITEM == 2 else tl.int8)
    words = multiple(nbytes // ITEM, UNIT // ITEM)
    row = token * words * ITEM
    source = pointer_at(payload + row, dtype, UNIT)
    for start in range(0, words, BLOCK):
        word = start + tl.arange(0, BLOCK)
        value = tl.load(source + word, word < words, other=0)
        for step in tl.static_range(WORLD):
            to = (rank + step) % WORLD
            at = tl.load(place + token * WORLD + to)
            row = (rank.to(tl.int64) * most + tl.maximum(at, 0)) * words * ITEM
            there = pointer_at(tl.load(peers + to) + to_bytes + row, dtype, UNIT)
            tl.store(there + word, value, (word < words) & (at >= 0))


@triton.jit
def stage_kernel(rows, own, counts, most, hidden, UNIT: tl.constexpr, BLOCK: tl.constexpr):
    """Copy the rows [source rank, most, hidden] that exist to peer memory."""
    row = tl.program_id(0)
    hidden = multiple(hidden, UNIT)
    if row % most < tl.load(counts + row // most):
        offset = row.to(tl.int64) * hidden
        for start in range(0, hidden, BLOCK):
            column = start + tl.arange(0, BLOCK)
            tl.store(own + offset + column, tl.load(rows + offset + column, column < hidden), column < hidden)


@triton.jit
def combine_kernel(
    place,
    out,
    rows_at,
    tokens,
    most,
    hidden,
    sizes,
    peers,
    state,
    lost,
    rank,
    area,
    limit,
    WORLD: tl.constexpr,
    DTYPE: tl.constexpr,
    UNIT: tl.constexpr,
    ITEM: tl.constexpr,
    BLOCK: tl.constexpr,
    LANES: tl.constexpr,
    CAPABILITY: tl.constexpr,
    FIRST: tl.constexpr,
    LAST: tl.constexpr,
):
    """Signal to the peers that this rank's rows are ready, and add the peers' rows of this rank's tokens."""
    channel = tl.program_id(0)
    channels = tl.num_programs(0)
    hidden = multiple(hidden, UNIT)
    epoch = epoch_of(state, channel) + 1
    failed = is_lost(state, LANES)
    failed_rank = -1
    if FIRST == 0:
        if failed == 0:
            arrive(peers, rank, channel, epoch, sizes, WORLD, LANES, CAPABILITY)
    if LAST == 1:
        if failed == 0:
            failed_rank = wait(peers, rank, channel, epoch, sizes, limit, WORLD, LANES, CAPABILITY)
            if failed_rank >= 0:
                give_up(state, lost, failed_rank, 2, epoch, LANES)
        ready = tl.where(failed | (failed_rank >= 0), 0, tokens)
        for i in range(tl.cdiv(tl.maximum(ready - channel, 0), channels)):
            token = (channel + i * channels).to(tl.int64)
            for start in range(0, hidden, BLOCK):
                column = start + tl.arange(0, BLOCK)
                y = tl.zeros([BLOCK], tl.float32)
                for source in tl.static_range(WORLD):
                    at = tl.load(place + token * WORLD + source)
                    row = (rank.to(tl.int64) * most + tl.maximum(at, 0)) * hidden * ITEM
                    rows = pointer_at(tl.load(peers + source) + rows_at + row, DTYPE, UNIT * ITEM)
                    y += tl.load(rows + column, (column < hidden) & (at >= 0), other=0).to(tl.float32)
                tl.store(out + token * hidden + column, y.to(out.dtype.element_ty), column < hidden)
        # After a failed exchange the output is NaN.
        for i in range(tl.cdiv(tl.maximum(tokens - ready - channel, 0), channels)):
            token = (channel + i * channels).to(tl.int64)
            for start in range(0, hidden, BLOCK):
                column = start + tl.arange(0, BLOCK)
                nan = tl.full([BLOCK], float("nan"), tl.float32).to(out.dtype.element_ty)
                tl.store(out + token * hidden + column, nan, column < hidden)
        keep_epoch(state, channel, tl.where(failed | (failed_rank >= 0), epoch - 1, epoch))


@triton.jit
def sanitize_kernel(ids, counts, rows, most, choices, invalid, BLOCK: tl.constexpr):
    """Set expert ids [source rank, most, choices] of unused rows to `invalid`."""
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    row = at // choices
    inside = row < rows
    count = tl.load(counts + row // most, inside, other=0)
    tl.store(ids + at, tl.zeros([BLOCK], tl.int32) + invalid, inside & (row % most >= count))


@triton.jit
def blocks_kernel(
    given0, given1, out0, out1, bytes0, bytes1, rows, rounds, each, peers, state, lost, rank, area, limit,
    WORLD: tl.constexpr, UNITS: tl.constexpr, BLOCK: tl.constexpr, LANES: tl.constexpr, CAPABILITY: tl.constexpr,
    FIRST: tl.constexpr, LAST: tl.constexpr,
):  # fmt: skip
    """Send row [i, r] of two tensors to rank r, where it is row [i, this rank]. A program sends `each` rows a round."""
    channel = tl.program_id(0)
    channels = tl.num_programs(0)
    before = epoch_of(state, channel)
    going = is_lost(state, LANES) == 0
    sizes = rows * 31 + bytes0 + bytes1
    done = 0
    for round_index in range(rounds):
        epoch = before + 1 + round_index
        if FIRST == 0:
            if going:
                for i in range(each):
                    row = channel + (round_index * each + i) * channels
                    for step in tl.static_range(WORLD):
                        to = (rank + step) % WORLD
                        slot = slot_of(epoch, channel, rank, area, WORLD) + int64(i) * (bytes0 + bytes1)
                        there = tl.load(peers + to) + slot
                        from0 = given0 + (int64(row) * WORLD + to) * bytes0
                        from1 = given1 + (int64(row) * WORLD + to) * bytes1
                        _copy(from0, there, bytes0, row < rows, 0, UNITS, BLOCK)
                        _copy(from1, there + bytes0, bytes1, row < rows, 1, UNITS, BLOCK)
                arrive(peers, rank, channel, epoch, sizes, WORLD, LANES, CAPABILITY)
        if LAST == 1:
            if going:
                failed_rank = wait(peers, rank, channel, epoch, sizes, limit, WORLD, LANES, CAPABILITY)
                if failed_rank >= 0:
                    give_up(state, lost, failed_rank, 3, epoch, LANES)
                going = failed_rank < 0
            if going:
                own = tl.load(peers + rank)
                for i in range(each):
                    row = channel + (round_index * each + i) * channels
                    for source in tl.static_range(WORLD):
                        here = own + slot_of(epoch, channel, source, area, WORLD) + int64(i) * (bytes0 + bytes1)
                        to0 = out0 + (int64(row) * WORLD + source) * bytes0
                        to1 = out1 + (int64(row) * WORLD + source) * bytes1
                        _copy(here, to0, bytes0, row < rows, 0, UNITS, BLOCK)
                        _copy(here + bytes0, to1, bytes1, row < rows, 1, UNITS, BLOCK)
                done += 1
    if LAST == 1:
        for i in range((rounds - done) * each):
            row = channel + (done * each + i) * channels
            for source in tl.static_range(WORLD):
                to0 = out0 + (int64(row) * WORLD + source) * bytes0
                to1 = out1 + (int64(row) * WORLD + source) * bytes1
                _spoil(to0, bytes0, row < rows, 0, UNITS, BLOCK)
                _spoil(to1, bytes1, row < rows, 1, UNITS, BLOCK)
        keep_epoch(state, channel, before + done)


@triton.jit
def _copy(source, to, nbytes, on, INDEX: tl.constexpr, UNITS: tl.constexpr, BLOCK: tl.constexpr):
    """Copy nbytes from one address to another, if `on`."""
    UNIT: tl.constexpr = 1 << (UNITS // 8**INDEX % 8)
    ITEM: tl.constexpr = 4 if UNIT > 4 else UNIT
    dtype: tl.constexpr = tl.int32 if ITEM == 4 else (tl.int16 if ITEM == 2 else tl.int8)
    words = multiple(nbytes // ITEM, UNIT // ITEM)
    for start in range(0, words, BLOCK):
        word = start + tl.arange(0, BLOCK)
        value = tl.load(pointer_at(source, dtype, UNIT) + word, (word < words) & on, other=0)
        tl.store(pointer_at(to, dtype, UNIT) + word, value, (word < words) & on)


@triton.jit
def _spoil(to, nbytes, on, INDEX: tl.constexpr, UNITS: tl.constexpr, BLOCK: tl.constexpr):
    """Store nbytes of 0xFF at an address, if `on`."""
    UNIT: tl.constexpr = 1 << (UNITS // 8**INDEX % 8)
    ITEM: tl.constexpr = 4 if UNIT > 4 else UNIT
    dtype: tl.constexpr = tl.int32 if ITEM == 4 else (tl.int16 if ITEM == 2 else tl.int8)
    words = multiple(nbytes // ITEM, UNIT // ITEM)
    for start in range(0, words, BLOCK):
        word = start + tl.arange(0, BLOCK)
        tl.store(pointer_at(to, dtype, UNIT) + word, tl.full([BLOCK], -1, dtype), (word < words) & on)


_LINK = {"peers": "*i64", "state": "*i32", "lost": "*i32", "rank": "i32", "area": "i64:16", "limit": "i64"}


@dataclass(frozen=True)
class Small:
    """The problem of the kernels around an exchange: `kind` is "place", "stage" or "sanitize". dtype and aligned are
    used by "stage" alone."""

    kind: str
    world: int = 1
    choices: int = 1
    dtype: str = ""
    block: int = 1024
    aligned: bool = True


def _units(digits: str) -> int:
    """A Problem's units as one octal number, the first payload's digit lowest."""
    return sum(int(digit) * 8**i for i, digit in enumerate(digits))


def _exchanging(problem, config) -> dict:
    return {
        "WORLD": problem.world, "BLOCK": problem.block, "LANES": 32 * config.num_warps,
        "CAPABILITY": config.capability, "FIRST": config.first, "LAST": config.last,
    }  # fmt: skip


def _build_dispatch(problem: Dispatch, config) -> Build:
    many = range(MOST_PAYLOADS)
    types = {"place": "*i32", "counts": "*i32"} | {f"payloads.at{i}": "i64" for i in many}
    types |= {f"nbytes.of{i}": "i32" for i in many} | {f"to.at{i}": "i64" for i in many}
    types |= {"begin": "i64", "end": "i64", "counts_to": "i64", "stats": "i64", "stats_words": "i32", "stats_to": "i64"}
    types |= {"tokens": "i32", "most": "i32", "sizes": "i32"} | _LINK
    constants = {"PAYLOADS": len(problem.units), "UNITS": _units(problem.units)} | _exchanging(problem, config)
    return Build(dispatch_kernel, types, constants, num_warps=config.num_warps)


def _build_combine(problem: Combine, config) -> Build:
    types = {"place": "*i32", "out": pointer(problem.out_dtype, problem.aligned), "rows_at": "i64", "tokens": "i32"}
    types |= {"most": "i32", "hidden": "i32", "sizes": "i32"} | _LINK
    constants = {
        "DTYPE": _DTYPES[problem.dtype],
        "UNIT": unit(problem.dtype, problem.aligned),
        "ITEM": torch_dtype(problem.dtype).itemsize,
    }
    constants |= _exchanging(problem, config)
    return Build(combine_kernel, types, constants, num_warps=config.num_warps)


_DTYPES = {"bf16": tl.bfloat16, "fp16": tl.float16, "fp32": tl.float32}


def _build_blocks(problem: Blocks, config) -> Build:
    types = dict.fromkeys(("given0", "given1", "out0", "out1"), "i64")
    types |= dict.fromkeys(("bytes0", "bytes1", "rows", "rounds", "each"), "i32") | _LINK
    constants = {"UNITS": _units(problem.units)} | _exchanging(problem, config)
    return Build(blocks_kernel, types, constants, num_warps=config.num_warps)


def _build_small(problem: Small, config) -> Build:
    if problem.kind == "place":
        types = {"experts": "*i32", "place": "*i32", "counts": "*i32", "tokens": "i32", "choices": "i32", "per": "i32"}
        constants = {"WORLD": problem.world, "CHOICES": problem.choices, "TOKENS": problem.block}
        return Build(place_kernel, types, constants, num_warps=8)
    if problem.kind == "stage":
        rows = pointer(problem.dtype, problem.aligned)
        types = {"rows": rows, "own": rows, "counts": "*i32", "most": "i32", "hidden": "i32"}
        constants = {"UNIT": unit(problem.dtype, problem.aligned), "BLOCK": problem.block}
        return Build(stage_kernel, types, constants, num_warps=min(max(problem.block // 512, 2), 8))
    types = {"ids": "*i32", "counts": "*i32", "rows": "i64", "most": "i32", "choices": "i32", "invalid": "i32"}
    return Build(sanitize_kernel, types, {"BLOCK": problem.block})


_BUILD = {Dispatch: _build_dispatch, Combine: _build_combine, Blocks: _build_blocks, Small: _build_small}


def build(problem, config) -> Build:
    return _BUILD[type(problem)](problem, config)


launch = Launcher("comm_alltoall", build)


def kernels(problem, config):
    """(launcher, problem, config) of each kernel that may run for a problem, for compiling ahead."""
    yield launch, problem, config
    if isinstance(problem, Dispatch):
        for few in (True, False):
            yield launch, _placing(problem, few), None
        yield launch, Small("sanitize"), None
    elif isinstance(problem, Combine) and problem.staged:
        yield launch, _staging(problem), None


def _placing(problem: Dispatch, few: bool) -> Small:
    return Small("place", world=problem.world, choices=problem.choices, block=sizes.PLACED[0 if few else 1])


def _staging(problem: Combine) -> Small:
    return Small("stage", dtype=problem.dtype, block=problem.block, aligned=problem.aligned)


def dispatch(problem: Dispatch, config, space, experts, payloads, places, most: int, per: int, stats=None) -> None:
    """Send the payloads of tokens to the ranks of their experts: [source rank, most, ...] at byte offset `places[i]`.

    per : experts of a rank. stats : int32 [n] of this rank and int32 [ranks, n] of the space for every rank's, or None.
    """
    tokens = len(experts)
    if config.first == 0:
        if tokens:
            args = experts, space.place, space.sent, tokens, experts.shape[1], per
            placing = _placing(problem, tokens <= sizes.PLACED[0])
            launch(placing, None, (problem.world, 1, 1), *args)
        else:
            space.sent.zero_()
    pad = [0] * (MOST_PAYLOADS - len(payloads))
    rows = [payload.shape[1:].numel() * payload.element_size() for payload in payloads]
    args = [space.place, space.sent, *(p.data_ptr() for p in payloads), *pad, *rows, *pad, *places, *pad]
    # The checksum must agree on all ranks, so it does not contain the number of tokens.
    check = (most * 31 + sum(places)) & 0x7FFFFFFF
    mine, everyone = (None, None) if stats is None else stats
    begin = places[0] if stats is None else space.offset(everyone)
    args += [begin, places[-1] + problem.world * most * rows[-1], space.counts_at]
    args += [0, 0, 0] if stats is None else [mine.data_ptr(), mine.numel(), begin]
    args += [tokens, most, check]
    launch(problem, config, (sizes.programs(most), 1, 1), *args, *space.link.arguments)


def combine(problem: Combine, config, space, rows, out, at: int, most: int) -> None:
    """Add the rows [source rank, most, hidden] of the ranks that this rank's tokens went to."""
    hidden = out.shape[1]
    if problem.staged and config.first == 0:
        args = rows, space.view(at, rows.shape, rows.dtype), space.counts, most, hidden
        launch(_staging(problem), None, (problem.world * most, 1, 1), *args)
    check = (most * 31 + hidden) & 0x7FFFFFFF
    args = space.place, out, at, len(out), most, hidden, check
    launch(problem, config, (sizes.programs(most), 1, 1), *args, *space.link.arguments)


def blocks(problem: Blocks, config, link, given, outs) -> None:
    """Exchange row [i, r] with rank r, of two tensors [rows, world, ...]."""
    rows = given[0].shape[0]
    if not any(t.numel() for t in given):
        # Every rank has the same shapes: none waits.
        return
    nbytes = [t.nbytes // (rows * problem.world) for t in given]
    programs = sizes.programs(rows, SLOTTED)
    most = -(-rows // programs)
    each = min(most, link.area // sum(nbytes))
    args = [t.data_ptr() for t in (*given, *outs)] + nbytes + [rows, -(-most // each), each]
    launch(problem, config, (programs, 1, 1), *args, *link.arguments)


def sanitize(ids, counts, most: int, invalid: int) -> None:
    """Set expert ids [source rank, most, choices] of unused rows to `invalid`."""
    problem = Small("sanitize")
    rows, choices = ids.shape[0] * ids.shape[1], ids.shape[2]
    launch(problem, None, (triton.cdiv(ids.numel(), problem.block), 1, 1), ids, counts, rows, most, choices, invalid)


# One module for three ops, which share the helpers of an exchange.
_RUN = {Dispatch: dispatch, Combine: combine, Blocks: blocks}
IMPLEMENTATION = Implementation(_RUN, (launch,), kernels=kernels, stack_budget=STACK_BUDGET)
