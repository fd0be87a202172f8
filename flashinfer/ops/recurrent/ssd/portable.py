"""Prefill of Mamba2's layers by state-space duality, in Triton; docs/rooms/ssd.md derives it.

Four kernels over chunks of CHUNK tokens in tiles of TILE, which begin at multiples of CHUNK of their own sequence.
Places are the chunks of all sequences, one after another.

Grid: by kernel,
    steps_kernel   (places, blocks of heads)                          of each token dt, its decays and its weight
    states_kernel  (sequences, heads, blocks of dim x dstate)         from chunk to chunk; `states` then has what is
                                                                      before each, and the pool what is after the last
    marked_kernel  (sequences * marks, heads, blocks of dim x dstate) states on the way, where some are wanted
    results_kernel (places * tiles * blocks of heads, blocks of dim)  y of a tile, for heads that share B and C
Warps: all do the same. Shared memory: operands of the products, and loads on their way.
Inputs: x, z [rows, tokens, heads, dim], dt [rows, tokens, heads], B, C [rows, tokens, groups, dstate], A, bias [heads],
D [heads] or [heads, dim], offsets [sequences + 1], pools [slots, heads, dim, dstate]. Outputs: y like x, states.
Between them: states [places, heads, dim, STATES] in the dtype of operands, float32 where marks are wanted; in float32
sizes, sums, weights [places, heads, CHUNK] and logs [places, heads].
Method: Dao and Gu, Transformers are SSMs, 2024, https://arxiv.org/abs/2405.21060.
"""

import torch
import triton
import triton.language as tl

from flashinfer._core.implementation import Implementation
from flashinfer._core.launch import Build, Launcher
from flashinfer._core.sizes import power_of_two
from flashinfer.ops.recurrent._device.gates import log_one_plus, sigmoid
from flashinfer.ops.recurrent._device.products import operand
from flashinfer.ops.recurrent._device.sequences import chunk_of, span_of
from flashinfer.ops.recurrent.launching import place_types, pointers, size_types, strides

# A decay below exp(-64) is taken for exp(-64), so that sums of logarithms over a tile keep their digits.
LEAST = tl.constexpr(-64.0)
LOG2E = tl.constexpr(1.4426950408889634)


@triton.jit
def chunk_at(p, offsets, of, CHUNK: tl.constexpr):
    """Sequence, row, first token of the chunk at place p, and how many of the sequence's tokens are left there."""
    n, chunk = chunk_of(p, offsets, of, CHUNK)
    row, first, length = span_of(offsets, n, of)
    # Places in front of the first sequence have a negative chunk, and no tokens.
    left = tl.where(chunk < 0, 0, length - chunk * CHUNK)
    return n, row, first + chunk * CHUNK, tl.minimum(left, CHUNK)


@triton.jit
def steps_kernel(
    dt,
    A,
    bias,
    offsets,
    sizes,
    sums,
    weights,
    logs,
    dt_by,
    of,
    numbers,
    SOFTPLUS: tl.constexpr,
    CHUNK: tl.constexpr,
    TILE: tl.constexpr,
    HEADS: tl.constexpr,
):
    """dt; the logarithm (base 2) of the decay from the start of a tile to each token; dt times the decay of what is
    left of the chunk; and the logarithm of the chunk's decay. Tokens past the end have dt 0, which changes nothing."""
    p = tl.program_id(0)
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    in_heads = head < of.heads
    i = tl.arange(0, TILE)
    _, origin, first, left = chunk_at(p, offsets, of, CHUNK)
    if left > 0:
        rate = tl.load(A + head, in_heads, other=0).to(tl.float32)
        shift = tl.zeros([HEADS], tl.float32)
        if bias is not None:
            shift = tl.load(bias + head, in_heads, other=0).to(tl.float32)
        at = (p.to(tl.int64) * of.heads + head)[None, :] * CHUNK + i[:, None]
        total = tl.zeros([HEADS], tl.float32)
        # From the last tile to the first, since a token's weight is the decay of those after it.
        for back in tl.static_range(CHUNK // TILE):
            begin = CHUNK - TILE * (back + 1)
            inside = (begin + i < left)[:, None] & in_heads[None, :]
            at_dt = dt + origin * dt_by.row + (first + begin + i)[:, None] * dt_by.token
            step = tl.load(at_dt + head[None, :] * dt_by.head, inside, other=0).to(tl.float32) + shift[None, :]
            if SOFTPLUS:
                step = tl.maximum(step, 0) + log_one_plus(tl.exp(-tl.abs(step)))
            step = tl.clamp(step, numbers.least, numbers.most, propagate_nan=tl.PropagateNan.ALL)
            step = tl.where(inside, step, 0)
            sum = tl.cumsum(tl.maximum(step * rate[None, :], LEAST) * LOG2E, 0)
            # That of the tile's last token: a scan adds the zeros behind it in another order, where a state before a
            # later token has to have the same bits (weights_until).
            last = tl.sum(tl.where(i[:, None] == tl.minimum(left - begin, TILE) - 1, sum, 0), 0)
            weight = step * tl.exp2((last[None, :] - sum) + total[None, :])
            total = last + total
            tl.store(sizes + at + begin, step, in_heads[None, :])
            tl.store(sums + at + begin, sum, in_heads[None, :])
            tl.store(weights + at + begin, weight, in_heads[None, :])
        tl.store(logs + p.to(tl.int64) * of.heads + head, total, in_heads)


@triton.jit
def added(
    at_x, at_B, x_by, B_by, weight, left, row, column, in_rows, in_columns,
    CHUNK: tl.constexpr, OPERAND: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """The state after `left` tokens of a chunk that began with zero, [ROWS, COLUMNS]."""
    token = tl.arange(0, CHUNK)
    inside = token < left
    x = tl.load(at_x + token[:, None] * x_by + row[None, :], inside[:, None] & in_rows[None, :], other=0)
    b = tl.load(at_B + token[:, None] * B_by + column[None, :], inside[:, None] & in_columns[None, :], other=0)
    b = operand(b.to(tl.float32) * weight[:, None], OPERAND, PRECISION)
    return tl.dot(tl.trans(x.to(OPERAND)), b, input_precision=PRECISION)


@triton.jit
def block_of(block, of, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Rows and columns of a block of a state, and which of them there are."""
    blocks = tl.cdiv(of.dstate, COLUMNS)
    row = block // blocks * ROWS + tl.arange(0, ROWS)
    column = block % blocks * COLUMNS + tl.arange(0, COLUMNS)
    return row, column, row < of.dim, column < of.dstate


@triton.jit
def states_kernel(
    x,
    B,
    offsets,
    read,
    source,
    state,
    weights,
    logs,
    states,
    x_by,
    B_by,
    source_by,
    state_by,
    of,
    CHUNK: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    STATES: tl.constexpr,
    OPERAND: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """A block of a head's state through all chunks of a sequence."""
    n = tl.program_id(0)
    head = tl.program_id(1)
    row, column, in_rows, in_columns = block_of(tl.program_id(2), of, ROWS, COLUMNS)
    inside = in_rows[:, None] & in_columns[None, :]
    origin, first, length = span_of(offsets, n, of)
    if offsets is None:
        place = n * of.chunks
    else:
        place = first.to(tl.int32) // CHUNK + n
    slot = n.to(tl.int64)
    if read is not None:
        slot = tl.load(read + n).to(tl.int64)
    if (slot >= 0) & (slot < of.slots):
        s = tl.zeros([ROWS, COLUMNS], tl.float32)
        if source is not None:
            at = source + slot * source_by.slot + head * source_by.head
            s = tl.load(at + row[:, None] * source_by.row + column[None, :], inside, other=0).to(tl.float32)
        at_place = place.to(tl.int64) * of.heads + head
        at_states = states + at_place * of.dim * STATES + row[:, None] * STATES + column[None, :]
        at_logs = logs + at_place
        at_weights = weights + at_place * CHUNK + tl.arange(0, CHUNK)
        at_x = x + origin * x_by.row + first * x_by.token + head * x_by.head
        at_B = B + origin * B_by.row + first * B_by.token + head // of.repeat * B_by.head
        heads = of.heads.to(tl.int64)
        chunks = tl.cdiv(length, CHUNK)
        coming = tl.load(at_logs, chunks > 0, other=0)
        for chunk in range(chunks):
            log = coming
            coming = tl.load(at_logs + heads, chunk + 1 < chunks, other=0)
            tl.store(at_states, s.to(states.dtype.element_ty), inside)
            adds = added(
                at_x, at_B, x_by.token, B_by.token, tl.load(at_weights), length - chunk * CHUNK,
                row, column, in_rows, in_columns, CHUNK, OPERAND, PRECISION,
            )  # fmt: skip
            s = tl.fma(s, tl.zeros_like(s) + tl.exp2(log), adds)
            at_logs += heads
            at_weights += heads * CHUNK
            at_states += heads * of.dim * STATES
            at_x += CHUNK * x_by.token
            at_B += CHUNK * B_by.token
        if state is not None:
            at = state + slot * state_by.slot + head * state_by.head
            tl.store(at + row[:, None] * state_by.row + column[None, :], s.to(state.dtype.element_ty), inside)


@triton.jit
def weights_until(at_sizes, at_sums, left, CHUNK: tl.constexpr, TILE: tl.constexpr):
    """`weights` and the entry of `logs` of a chunk of which only the first `left` tokens count, bit for bit."""
    j = tl.arange(0, CHUNK)
    size = tl.load(at_sizes + j, j < left, other=0)
    sum = tl.load(at_sums + j, j < left, other=0)
    weight = tl.zeros([CHUNK], tl.float32)
    total = 0.0
    for back in tl.static_range(CHUNK // TILE):
        begin = CHUNK - TILE * (back + 1)
        if left > begin:
            last = tl.load(at_sums + tl.minimum(left, begin + TILE) - 1)
            mine = (j >= begin) & (j < tl.minimum(left, begin + TILE))
            weight = tl.where(mine, size * tl.exp2(tl.where(mine, (last - sum) + total, 0)), weight)
            total = last + total
    return weight, total


@triton.jit
def marked_kernel(
    x,
    B,
    offsets,
    read,
    source,
    marks,
    mark_tokens,
    mark_places,
    sizes,
    sums,
    states,
    x_by,
    B_by,
    source_by,
    marks_by,
    of,
    CHUNK: tl.constexpr,
    TILE: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    STATES: tl.constexpr,
    OPERAND: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """The state before a token is that before its chunk, decayed, and what the chunk's tokens up to it add."""
    n = tl.program_id(0) // of.marks
    head = tl.program_id(1)
    row, column, in_rows, in_columns = block_of(tl.program_id(2), of, ROWS, COLUMNS)
    inside = in_rows[:, None] & in_columns[None, :]
    origin, first, length = span_of(offsets, n, of)
    given = tl.load(mark_tokens + tl.program_id(0)).to(tl.int64)
    mark = tl.load(mark_places + tl.program_id(0)).to(tl.int64)
    token = given
    if offsets is not None:
        token -= first
    slot = n.to(tl.int64)
    if read is not None:
        slot = tl.load(read + n).to(tl.int64)
    wanted = (given >= 0) & (token >= 0) & (token <= length) & (mark >= 0) & (mark < of.places)
    if wanted & (slot >= 0) & (slot < of.slots):
        chunk = tl.maximum(token - 1, 0) // CHUNK
        s = tl.zeros([ROWS, COLUMNS], tl.float32)
        # Without tokens a sequence has no place; its state in the pool is still the one that it began with.
        if length > 0:
            if offsets is None:
                place = n * of.chunks + chunk
            else:
                place = first // CHUNK + n + chunk
            at_place = place * of.heads + head
            before = states + at_place * of.dim * STATES
            s = tl.load(before + row[:, None] * STATES + column[None, :], inside, other=0)
            left = (token - chunk * CHUNK).to(tl.int32)
            weight, log = weights_until(sizes + at_place * CHUNK, sums + at_place * CHUNK, left, CHUNK, TILE)
            first += chunk * CHUNK
            adds = added(
                x + origin * x_by.row + first * x_by.token + head * x_by.head,
                B + origin * B_by.row + first * B_by.token + head // of.repeat * B_by.head,
                x_by.token, B_by.token, weight, left,
                row, column, in_rows, in_columns, CHUNK, OPERAND, PRECISION,
            )  # fmt: skip
            s = tl.fma(s, tl.zeros_like(s) + tl.exp2(log), adds)
        else:
            if source is not None:
                begun = source + slot * source_by.slot + head * source_by.head
                s = tl.load(begun + row[:, None] * source_by.row + column[None, :], inside, other=0).to(tl.float32)
        at = marks + mark * marks_by.slot + head * marks_by.head
        tl.store(at + row[:, None] * marks_by.row + column[None, :], s.to(marks.dtype.element_ty), inside)


@triton.jit
def zero(at, by_head, mask, head, end, ROWS: tl.constexpr):
    """Zeros in the results of some tokens, of heads head to end - 1."""
    for h in range(head, end):
        tl.store(at + h * by_head, tl.zeros([mask.shape[0], ROWS], at.dtype.element_ty), mask)


@triton.jit
def weighted(scores, gap, size, OPERAND: tl.constexpr, PRECISION: tl.constexpr):
    """Products of C and B, times the decay between their tokens and dt of the earlier one. gap : its logarithm."""
    return operand(scores * tl.exp2(gap) * size[None, :], OPERAND, PRECISION)


@triton.jit
def head_result(
    c, own, past, seen, at_x, at_sizes, at_sums, at_s, at_D, at_z, at_out, x_step, mask, in_rows, in_columns,
    PAST: tl.constexpr, WIDE_D: tl.constexpr, TILE: tl.constexpr, OPERAND: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """y of a tile of a head: from the state before the chunk, the tile in front, and its own tokens. Stored.

    own, past : products of the tile's C with its own B and that of the tile in front, which is there if PAST.
    seen : whether a token comes before another, or is it. x_step : elements from a tile to the next.
    """
    size = tl.load(at_sizes)
    sum = tl.load(at_sums)
    xs = tl.load(at_x, mask, other=0)
    s = tl.load(at_s, in_rows[:, None] & in_columns[None, :], other=0).to(tl.float32)
    s = tl.trans(operand(s, OPERAND, PRECISION))
    if PAST:
        past_size = tl.load(at_sizes - TILE)
        past_sum = tl.load(at_sums - TILE)
        past_x = tl.load(at_x - x_step, in_rows[None, :], other=0)
        last = tl.sum(tl.where(tl.arange(0, TILE) == TILE - 1, past_sum, 0), 0)
        y = tl.dot(c, s, input_precision=PRECISION) * tl.exp2(last + sum)[:, None]
        scores = weighted(past, sum[:, None] + (last - past_sum)[None, :], past_size, OPERAND, PRECISION)
        y = tl.dot(scores, past_x.to(OPERAND), y, input_precision=PRECISION)
    else:
        y = tl.dot(c, s, input_precision=PRECISION) * tl.exp2(sum)[:, None]
    gap = tl.where(seen, sum[:, None] - sum[None, :], float("-inf"))
    y = tl.dot(weighted(own, gap, size, OPERAND, PRECISION), xs.to(OPERAND), y, input_precision=PRECISION)
    if at_D is not None:
        if WIDE_D:
            y += tl.load(at_D, in_rows, other=0).to(tl.float32)[None, :] * xs.to(tl.float32)
        else:
            y += tl.load(at_D).to(tl.float32) * xs.to(tl.float32)
    if at_z is not None:
        gate = tl.load(at_z, mask, other=0).to(tl.float32)
        y *= gate * sigmoid(gate)
    tl.store(at_out, y.to(at_out.dtype.element_ty), mask)


@triton.jit
def results_of(
    own, past, c, tile, at_x, at_z, at_out, x_by, z_by, out_by, D, sizes, sums, states, place, left, head, end, of,
    row, in_rows, PAST: tl.constexpr, WIDE_D: tl.constexpr, CHUNK: tl.constexpr, TILE: tl.constexpr,
    STATES: tl.constexpr, OPERAND: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """y of a tile, of heads head to end - 1."""
    i = tl.arange(0, TILE)
    column = tl.arange(0, STATES)
    mask = (tile * TILE + i < left)[:, None] & in_rows[None, :]
    for h in range(head, end):
        at_step = (place + h) * CHUNK + tile * TILE + i
        at_D = D
        if D is not None:
            at_D = D + h * of.dim + row if WIDE_D else D + h
        at_gate = at_z
        if at_z is not None:
            at_gate = at_z + h * z_by.head
        head_result(
            c, own, past, i[:, None] >= i[None, :], at_x + h * x_by.head, sizes + at_step, sums + at_step,
            states + (place + h) * of.dim * STATES + row[:, None] * STATES + column[None, :],
            at_D, at_gate, at_out + h * out_by.head, TILE * x_by.token, mask, in_rows, column < of.dstate,
            PAST, WIDE_D, TILE, OPERAND, PRECISION,
        )  # fmt: skip


@triton.jit
def results_kernel(
    x,
    B,
    C,
    z,
    D,
    offsets,
    read,
    sizes,
    sums,
    states,
    out,
    x_by,
    B_by,
    C_by,
    z_by,
    out_by,
    of,
    WIDE_D: tl.constexpr,
    CHUNK: tl.constexpr,
    TILE: tl.constexpr,
    ROWS: tl.constexpr,
    STATES: tl.constexpr,
    OPERAND: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """The products of B and C are those of all heads of a group: `of.each` of them are one program's.

    From the last tile to the first: what states_kernel read and wrote last may still be in L2.
    """
    of_group = tl.cdiv(of.repeat, of.each)
    blocks = of.heads // of.repeat * of_group
    p = (tl.num_programs(0) - 1 - tl.program_id(0)) // blocks
    tile = p % (CHUNK // TILE)
    p = p // (CHUNK // TILE)
    block = tl.program_id(0) % blocks
    group = block // of_group
    head = group * of.repeat + block % of_group * of.each
    end = tl.minimum(head + of.each, (group + 1) * of.repeat)
    row = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, STATES)
    i = tl.arange(0, TILE)
    in_rows = row < of.dim
    in_columns = column < of.dstate
    if offsets is not None:
        # The programs cover all tokens by tiles: each also zeroes those of its tile that no sequence has.
        begins = tl.load(offsets)
        ends = tl.load(offsets + of.sequences)
        begin = p * CHUNK + tile * TILE
        if (begin < begins) | (begin + TILE > ends):
            free = begin + i
            nobodys = (free < of.tokens) & ((free < begins) | (free >= ends))
            at = out + free[:, None].to(tl.int64) * out_by.token + row[None, :]
            zero(at, out_by.head, nobodys[:, None] & in_rows[None, :], head, end, ROWS)
    n, origin, first, left = chunk_at(p, offsets, of, CHUNK)
    if tile * TILE < left:
        token = first + tile * TILE + i
        at_out = out + origin * out_by.row + token[:, None] * out_by.token + row[None, :]
        slot = tl.full([], 0, tl.int64)
        if read is not None:
            slot = tl.load(read + n).to(tl.int64)
        inside = tile * TILE + i < left
        if (slot >= 0) & (slot < of.slots):
            at_x = x + origin * x_by.row + token[:, None] * x_by.token + row[None, :]
            at_B = B + origin * B_by.row + token[:, None] * B_by.token + group * B_by.head + column[None, :]
            at_C = C + origin * C_by.row + token[:, None] * C_by.token + group * C_by.head + column[None, :]
            at_z = z
            if z is not None:
                at_z = z + origin * z_by.row + token[:, None] * z_by.token + row[None, :]
            there = inside[:, None] & in_columns[None, :]
            c = tl.load(at_C, there, other=0).to(OPERAND)
            b = tl.load(at_B, there, other=0).to(OPERAND)
            own = tl.dot(c, tl.trans(b), input_precision=PRECISION)
            place = p.to(tl.int64) * of.heads
            if tile == 0:
                results_of(
                    own, own, c, tile, at_x, at_z, at_out, x_by, z_by, out_by, D, sizes, sums, states, place, left,
                    head, end, of, row, in_rows, False, WIDE_D, CHUNK, TILE, STATES, OPERAND, PRECISION,
                )  # fmt: skip
            else:
                b = tl.load(at_B - TILE * B_by.token, in_columns[None, :], other=0).to(OPERAND)
                past = tl.dot(c, tl.trans(b), input_precision=PRECISION)
                results_of(
                    own, past, c, tile, at_x, at_z, at_out, x_by, z_by, out_by, D, sizes, sums, states, place, left,
                    head, end, of, row, in_rows, True, WIDE_D, CHUNK, TILE, STATES, OPERAND, PRECISION,
                )  # fmt: skip
        else:
            zero(at_out, out_by.head, inside[:, None] & in_rows[None, :], head, end, ROWS)


_TYPES = {"bf16": tl.bfloat16, "fp32": tl.float32}
_INPUTS = dict.fromkeys(("x_by", "dt_by", "B_by", "C_by", "z_by", "out_by"), ("row", "token", "head"))
_PLACES = _INPUTS | dict.fromkeys(("source_by", "state_by", "marks_by"), ("slot", "head", "row"))
_SIZES = ("sequences", "tokens", "chunks", "heads", "repeat", "each", "dim", "dstate", "slots", "marks", "places")
# Heads of a program of steps_kernel.
HEADS_OF_STEPS = 32
# Programs of results_kernel that fill a chip: two for each of 132 multiprocessors.
PROGRAMS = 264


def _states_dtype(problem, config) -> str:
    """A checkpoint goes on from the state before its chunk in float32; products round it anyway."""
    return "fp32" if problem.marks_dtype else config.operand


def _build(kernel, problem, config, num_warps: int, num_stages: int = 1) -> Build:
    """The build of one of the kernels, of the parameters that it has."""
    table = problem.index if problem.read else ""
    kinds = {
        "x": problem.dtype,
        "dt": problem.dt_dtype,
        "B": problem.dtype,
        "C": problem.dtype,
        "z": problem.dtype if problem.gated else "",
        "A": problem.a_dtype,
        "D": problem.d_dtype,
        "bias": problem.bias_dtype,
        "offsets": problem.index if problem.packed else "",
        "read": table,
        "source": problem.source_dtype,
        "state": problem.state_dtype,
        "marks": problem.marks_dtype,
        "mark_tokens": "i32",
        "mark_places": "i32",
        "sizes": "fp32",
        "sums": "fp32",
        "weights": "fp32",
        "logs": "fp32",
        "states": _states_dtype(problem, config),
        "out": problem.dtype,
    }
    kinds = {name: kinds[name] for name in kernel.arg_names if name in kinds}
    whole = {"x", "B", "C", "z", "source", "state", "marks", "out"} if problem.aligned else set()
    units = {f"{name}_by": kinds[name] for name in whole & kinds.keys() if kinds[name]}
    places = {name: _PLACES[name] for name in kernel.arg_names if name in _PLACES}
    types = pointers(kinds, whole | {"states", "sizes", "sums", "weights"}) | place_types(places, units)
    types |= size_types(_SIZES, dim=problem.dim, dstate=problem.dstate)
    if "numbers" in kernel.arg_names:
        types |= {"numbers.least": "fp32", "numbers.most": "fp32"}
    constants = {
        "SOFTPLUS": problem.softplus,
        "WIDE_D": problem.wide_d,
        "CHUNK": config.chunk,
        "TILE": config.tile,
        "HEADS": HEADS_OF_STEPS,
        "ROWS": config.rows,
        "COLUMNS": config.columns,
        "STATES": power_of_two(problem.dstate, 16),
        "OPERAND": _TYPES[config.operand],
        "PRECISION": "tf32x3" if problem.dtype == "fp32" else "tf32",
    }
    constants = {name: value for name, value in constants.items() if name in kernel.arg_names}
    return Build(kernel, types, constants, num_warps=num_warps, num_stages=num_stages)


launch_steps = Launcher("ssd_steps", lambda p, c: _build(steps_kernel, p, c, 4))
launch_states = Launcher("ssd_states", lambda p, c: _build(states_kernel, p, c, c.states_warps, c.states_stages))
launch_marked = Launcher("ssd_marked", lambda p, c: _build(marked_kernel, p, c, c.states_warps))
launch_results = Launcher("ssd_results", lambda p, c: _build(results_kernel, p, c, c.num_warps, c.num_stages))
# Bytes: of results in bfloat16 with 64 rows on Hopper, which took 109 us of 193 with them (docs/rooms/ssd.md).
STACK_BUDGET = 48
LAUNCHERS = (launch_steps, launch_states, launch_marked, launch_results)


def kernels(problem, config):
    for launcher in LAUNCHERS:
        if launcher is not launch_marked or problem.marks_dtype:
            yield launcher, problem, config


def run(problem, config, tokens, layer, pool, out, marks=None):
    """Every sequence from its state to its last token, as `flashinfer/ops/recurrent/ssd/__init__.py` states it."""
    x, n = tokens.x, tokens.sequences
    rows, length, heads, dim = x.shape
    chunks = triton.cdiv(length, config.chunk)
    places = rows * chunks if tokens.offsets is None else length // config.chunk + n
    dtype = torch.bfloat16 if _states_dtype(problem, config) == "bf16" else torch.float32
    states = torch.empty(places, heads, dim, power_of_two(problem.dstate, 16), dtype=dtype, device=x.device)
    sizes, sums, weights = torch.empty(3, places, heads, config.chunk, dtype=torch.float32, device=x.device)
    logs = torch.empty(places, heads, dtype=torch.float32, device=x.device)
    wanted = 0 if marks is None else marks.tokens.shape[1]
    slots = n if pool.read is None else len(pool.source)
    repeat = heads // tokens.B.shape[2]
    each = min(repeat, max(1, places * heads // PROGRAMS))
    rest = slots, wanted, 0 if marks is None else len(marks.out)
    counts = n, length, chunks, heads, repeat, each, dim, problem.dstate, *rest
    by = {name: strides(getattr(tokens, name), (0, 1, 2)) for name in ("x", "dt", "B", "C", "z")}
    by |= {name: strides(t, (0, 1, 2)) for name, t in (("source", pool.source), ("state", pool.state), ("out", out))}

    def launch(launcher, grid, tensors, names, *last):
        given = [t for t in tensors if t is not None]
        launcher(problem, config, grid, *given, *(s for name in names for s in by[name]), *counts, *last)

    if places:
        tensors = tokens.dt, layer.A, layer.bias, tokens.offsets, sizes, sums, weights, logs
        launch(launch_steps, (places, triton.cdiv(heads, HEADS_OF_STEPS), 1), tensors, ("dt",), layer.least, layer.most)
    inputs = x, tokens.B, tokens.offsets, pool.read, pool.source
    blocks = triton.cdiv(dim, config.rows) * triton.cdiv(problem.dstate, config.columns)
    tensors = *inputs, pool.state, weights, logs, states
    launch(launch_states, (n, heads, blocks), tensors, ("x", "B", "source", "state"))
    if wanted:
        by["marks"] = strides(marks.out, (0, 1, 2))
        tensors = *inputs, *marks, sizes, sums, states
        launch(launch_marked, (n * wanted, heads, blocks), tensors, ("x", "B", "source", "marks"))
    if places:
        tensors = x, *tokens[2:5], layer.D, tokens.offsets, pool.read, sizes, sums, states, out
        tiles = config.chunk // config.tile
        grid = (places * tiles * (heads // repeat) * triton.cdiv(repeat, each), triton.cdiv(dim, config.rows), 1)
        launch(launch_results, grid, tensors, ("x", "B", "C", "z", "out"))


IMPLEMENTATION = Implementation(run, LAUNCHERS, kernels=kernels, compile_together=True, stack_budget=STACK_BUDGET)
