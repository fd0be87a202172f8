"""Prefill of Mamba2's layers by state-space duality, in Triton; docs/rooms/ssd.md derives it.

Four kernels over chunks of CHUNK tokens, which begin at multiples of CHUNK of their own sequence. Places are the chunks
of all sequences, one after another.

Grid: by kernel,
    added_kernel   (places, heads, blocks of dim)             what a chunk adds to a state of zero, and its decay
    passed_kernel  (sequences, heads, blocks of dim)          from chunk to chunk; `states` then has what is before each
                                                              chunk, and the pool what is after the last one
    marked_kernel  (sequences * marks, heads, blocks of dim)  states on the way, where some are wanted
    results_kernel (places * tiles, heads, blocks of dim)     y of a tile of TILE tokens
Warps: all do the same. Shared memory: operands of the products, sums and scans.
Inputs: x, z [rows, tokens, heads, dim], dt [rows, tokens, heads], B, C [rows, tokens, groups, dstate], A, bias [heads],
D [heads] or [heads, dim], offsets [sequences + 1], pools [slots, heads, dim, dstate]. Outputs: y like x, states.
Between them: states, float32 [places, heads, dim, STATES], and logs, float32 [places, heads].
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
from flashinfer.ops.recurrent._device.sequences import place_of, span_of
from flashinfer.ops.recurrent.launching import place_types, pointers, size_types, strides

# A decay below exp(-64) is taken for exp(-64), so that sums of logarithms over a chunk keep their digits.
LEAST = tl.constexpr(-64.0)


@triton.jit
def chunk_at(p, offsets, of, CHUNK: tl.constexpr):
    """Sequence, row, first token of the chunk at place p, and how many of the sequence's tokens are left there."""
    if offsets is None:
        n = p // of.chunks
        chunk = p % of.chunks
    else:
        n, chunk = place_of(p, offsets, of, CHUNK)
    row, first, length = span_of(offsets, n, of)
    # Places in front of the first sequence have a negative chunk, and no tokens.
    left = tl.where(chunk < 0, 0, length - chunk * CHUNK)
    return n, row, first + chunk * CHUNK, tl.minimum(left, CHUNK)


@triton.jit
def rates(A, bias, head):
    """A of a head, and what is added to its dt."""
    shift = 0.0
    if bias is not None:
        shift = tl.load(bias + head).to(tl.float32)
    return tl.load(A + head).to(tl.float32), shift


@triton.jit
def step_sizes(at, by, token, inside, shift, numbers, SOFTPLUS: tl.constexpr):
    """dt of some tokens; 0 outside, which changes nothing."""
    dt = tl.load(at + token * by, inside, other=0).to(tl.float32) + shift
    if SOFTPLUS:
        dt = tl.maximum(dt, 0) + log_one_plus(tl.exp(-tl.abs(dt)))
    return tl.where(inside, tl.minimum(tl.maximum(dt, numbers.least), numbers.most), 0)


@triton.jit
def added(
    at_x, at_dt, at_B, x_by, dt_by, B_by, left, rate, shift, numbers, row, column, in_rows, in_columns,
    SOFTPLUS: tl.constexpr, TILE: tl.constexpr, OPERAND: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """The state after `left` tokens of a chunk that began with zero, [ROWS, STATES], and the logarithm of their decay.

    From the last tile to the first, since a token's weight is the decay of those after it.
    """
    i = tl.arange(0, TILE)
    s = tl.zeros([row.shape[0], column.shape[0]], tl.float32)
    after = 0.0
    tiles = tl.cdiv(left, TILE)
    for back in range(tiles):
        token = (tiles - 1 - back) * TILE + i
        inside = token < left
        dt = step_sizes(at_dt, dt_by, token, inside, shift, numbers, SOFTPLUS)
        log = tl.maximum(dt * rate, LEAST)
        weight = dt * tl.exp(after + (tl.cumsum(log, 0, reverse=True) - log))
        x = tl.load(at_x + token[:, None] * x_by + row[None, :], inside[:, None] & in_rows[None, :], other=0)
        x = operand(x.to(tl.float32) * weight[:, None], OPERAND, PRECISION)
        b = tl.load(at_B + token[:, None] * B_by + column[None, :], inside[:, None] & in_columns[None, :], other=0)
        s = tl.dot(tl.trans(x), b.to(OPERAND), s, input_precision=PRECISION)
        after += tl.sum(log, 0)
    return s, after


@triton.jit
def added_kernel(
    x,
    dt,
    B,
    A,
    bias,
    offsets,
    states,
    logs,
    x_by,
    dt_by,
    B_by,
    of,
    numbers,
    SOFTPLUS: tl.constexpr,
    CHUNK: tl.constexpr,
    TILE: tl.constexpr,
    ROWS: tl.constexpr,
    STATES: tl.constexpr,
    OPERAND: tl.constexpr,
    PRECISION: tl.constexpr,
):
    p = tl.program_id(0)
    head = tl.program_id(1)
    row = tl.program_id(2) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, STATES)
    in_rows = row < of.dim
    in_columns = column < of.dstate
    _, origin, first, left = chunk_at(p, offsets, of, CHUNK)
    if left > 0:
        rate, shift = rates(A, bias, head)
        s, log = added(
            x + origin * x_by.row + first * x_by.token + head * x_by.head,
            dt + origin * dt_by.row + first * dt_by.token + head * dt_by.head,
            B + origin * B_by.row + first * B_by.token + head // of.repeat * B_by.head,
            x_by.token, dt_by.token, B_by.token, left, rate, shift, numbers, row, column, in_rows, in_columns,
            SOFTPLUS, TILE, OPERAND, PRECISION,
        )  # fmt: skip
        place = p.to(tl.int64) * of.heads + head
        at = states + place * of.dim * STATES + row[:, None] * STATES + column[None, :]
        tl.store(at, s, in_rows[:, None] & in_columns[None, :])
        tl.store(logs + place, log)


@triton.jit
def passed_kernel(
    offsets,
    read,
    source,
    state,
    states,
    logs,
    source_by,
    state_by,
    of,
    CHUNK: tl.constexpr,
    ROWS: tl.constexpr,
    STATES: tl.constexpr,
):
    n = tl.program_id(0)
    head = tl.program_id(1)
    row = tl.program_id(2) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, STATES)
    inside = (row < of.dim)[:, None] & (column < of.dstate)[None, :]
    _, first, length = span_of(offsets, n, of)
    if offsets is None:
        place = n * of.chunks
    else:
        place = first.to(tl.int32) // CHUNK + n
    slot = n.to(tl.int64)
    if read is not None:
        slot = tl.load(read + n).to(tl.int64)
    if (slot >= 0) & (slot < of.slots):
        s = tl.zeros([ROWS, STATES], tl.float32)
        if source is not None:
            at = source + slot * source_by.slot + head * source_by.head
            s = tl.load(at + row[:, None] * source_by.row + column[None, :], inside, other=0).to(tl.float32)
        at = states + (place.to(tl.int64) * of.heads + head) * of.dim * STATES
        at += row[:, None] * STATES + column[None, :]
        at_log = logs + place.to(tl.int64) * of.heads + head
        step = of.heads.to(tl.int64) * of.dim * STATES
        chunks = tl.cdiv(length, CHUNK)
        # What the next chunk adds is on its way while this one is added.
        coming = tl.load(at, inside & (chunks > 0), other=0)
        for chunk in range(chunks):
            adds = coming
            coming = tl.load(at + step, inside & (chunk + 1 < chunks), other=0)
            tl.store(at, s, inside)
            s = tl.fma(s, tl.zeros_like(s) + tl.exp(tl.load(at_log)), adds)
            at += step
            at_log += of.heads
        if state is not None:
            at = state + slot * state_by.slot + head * state_by.head
            tl.store(at + row[:, None] * state_by.row + column[None, :], s.to(state.dtype.element_ty), inside)


@triton.jit
def marked_kernel(
    x,
    dt,
    B,
    A,
    bias,
    offsets,
    read,
    source,
    marks,
    mark_tokens,
    mark_places,
    states,
    x_by,
    dt_by,
    B_by,
    source_by,
    marks_by,
    of,
    numbers,
    SOFTPLUS: tl.constexpr,
    CHUNK: tl.constexpr,
    TILE: tl.constexpr,
    ROWS: tl.constexpr,
    STATES: tl.constexpr,
    OPERAND: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """The state before a token is that before its chunk, decayed, and what the chunk's tokens up to it add."""
    n = tl.program_id(0) // of.marks
    head = tl.program_id(1)
    row = tl.program_id(2) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, STATES)
    in_rows = row < of.dim
    in_columns = column < of.dstate
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
        s = tl.zeros([ROWS, STATES], tl.float32)
        # Without tokens a sequence has no place; its state in the pool is still the one that it began with.
        if length > 0:
            if offsets is None:
                place = n * of.chunks + chunk
            else:
                place = first // CHUNK + n + chunk
            at = states + (place * of.heads + head) * of.dim * STATES
            s = tl.load(at + row[:, None] * STATES + column[None, :], inside, other=0)
            rate, shift = rates(A, bias, head)
            first += chunk * CHUNK
            adds, log = added(
                x + origin * x_by.row + first * x_by.token + head * x_by.head,
                dt + origin * dt_by.row + first * dt_by.token + head * dt_by.head,
                B + origin * B_by.row + first * B_by.token + head // of.repeat * B_by.head,
                x_by.token, dt_by.token, B_by.token, (token - chunk * CHUNK).to(tl.int32),
                rate, shift, numbers, row, column, in_rows, in_columns, SOFTPLUS, TILE, OPERAND, PRECISION,
            )  # fmt: skip
            s = tl.fma(s, tl.zeros_like(s) + tl.exp(log), adds)
        else:
            if source is not None:
                at = source + slot * source_by.slot + head * source_by.head
                s = tl.load(at + row[:, None] * source_by.row + column[None, :], inside, other=0).to(tl.float32)
        at = marks + mark * marks_by.slot + head * marks_by.head
        tl.store(at + row[:, None] * marks_by.row + column[None, :], s.to(marks.dtype.element_ty), inside)


@triton.jit
def results_kernel(
    x,
    dt,
    B,
    C,
    z,
    A,
    D,
    bias,
    offsets,
    read,
    states,
    out,
    x_by,
    dt_by,
    B_by,
    C_by,
    z_by,
    out_by,
    of,
    numbers,
    SOFTPLUS: tl.constexpr,
    WIDE_D: tl.constexpr,
    CHUNK: tl.constexpr,
    TILE: tl.constexpr,
    ROWS: tl.constexpr,
    STATES: tl.constexpr,
    OPERAND: tl.constexpr,
    PRECISION: tl.constexpr,
):
    p = tl.program_id(0) // (CHUNK // TILE)
    tile = tl.program_id(0) % (CHUNK // TILE)
    head = tl.program_id(1)
    row = tl.program_id(2) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, STATES)
    i = tl.arange(0, TILE)
    in_rows = row < of.dim
    in_columns = column < of.dstate
    at_out = out + head * out_by.head + row[None, :]
    if offsets is not None:
        # The programs cover all tokens by tiles: each also zeroes those of its tile that no sequence has.
        free = tl.program_id(0) * TILE + i
        free_of_all = (free < tl.load(offsets)) | (free >= tl.load(offsets + of.sequences))
        nobodys = (free < of.tokens) & free_of_all
        zeros = tl.zeros([TILE, ROWS], out.dtype.element_ty)
        tl.store(at_out + free[:, None].to(tl.int64) * out_by.token, zeros, nobodys[:, None] & in_rows[None, :])
    n, origin, first, left = chunk_at(p, offsets, of, CHUNK)
    token = tile * TILE + i
    inside = token < left
    if tile * TILE < left:
        slot = tl.full([], 0, tl.int64)
        if read is not None:
            slot = tl.load(read + n).to(tl.int64)
        y = tl.zeros([TILE, ROWS], tl.float32)
        if (slot >= 0) & (slot < of.slots):
            rate, shift = rates(A, bias, head)
            at_x = x + origin * x_by.row + first * x_by.token + head * x_by.head
            at_dt = dt + origin * dt_by.row + first * dt_by.token + head * dt_by.head
            at_B = B + origin * B_by.row + first * B_by.token + head // of.repeat * B_by.head
            at_C = C + origin * C_by.row + first * C_by.token + head // of.repeat * C_by.head
            c = tl.load(
                at_C + token[:, None] * C_by.token + column[None, :], inside[:, None] & in_columns[None, :], other=0
            ).to(OPERAND)
            sizes = step_sizes(at_dt, dt_by.token, token, inside, shift, numbers, SOFTPLUS)
            # The logarithm of the decay from the start of the tile, or of the one looked at, to each token.
            until = tl.cumsum(tl.maximum(sizes * rate, LEAST), 0)
            for back in range(tile + 1):
                other = (tile - back) * TILE + i
                there = other < left
                sizes = step_sizes(at_dt, dt_by.token, other, there, shift, numbers, SOFTPLUS)
                log = tl.maximum(sizes * rate, LEAST)
                if back == 0:
                    gap = until[:, None] - until[None, :]
                    seen = i[:, None] >= i[None, :]
                else:
                    gap = until[:, None] + (tl.cumsum(log, 0, reverse=True) - log)[None, :]
                    seen = i[:, None] >= 0
                    seen = seen & (i[None, :] >= 0)
                b_mask = there[:, None] & in_columns[None, :]
                b = tl.load(at_B + other[:, None] * B_by.token + column[None, :], b_mask, other=0).to(OPERAND)
                scores = tl.dot(c, tl.trans(b), input_precision=PRECISION)
                scores *= tl.where(seen, tl.exp(tl.where(seen, gap, 0)), 0) * sizes[None, :]
                x_mask = there[:, None] & in_rows[None, :]
                xs = tl.load(at_x + other[:, None] * x_by.token + row[None, :], x_mask, other=0)
                y = tl.dot(operand(scores, OPERAND, PRECISION), xs.to(OPERAND), y, input_precision=PRECISION)
                if back > 0:
                    until += tl.sum(log, 0)
            place = p.to(tl.int64) * of.heads + head
            at = states + place * of.dim * STATES + row[:, None] * STATES + column[None, :]
            s = operand(tl.load(at, in_rows[:, None] & in_columns[None, :], other=0), OPERAND, PRECISION)
            y += tl.dot(c, tl.trans(s), input_precision=PRECISION) * tl.exp(until)[:, None]
            mask = inside[:, None] & in_rows[None, :]
            if D is not None:
                if WIDE_D:
                    d = tl.load(D + head * of.dim + row, in_rows, other=0).to(tl.float32)[None, :]
                else:
                    d = tl.load(D + head).to(tl.float32)
                y += d * tl.load(at_x + token[:, None] * x_by.token + row[None, :], mask, other=0).to(tl.float32)
            if z is not None:
                at = z + origin * z_by.row + (first + token)[:, None] * z_by.token + head * z_by.head + row[None, :]
                gate = tl.load(at, mask, other=0).to(tl.float32)
                y *= gate * sigmoid(gate)
        at = at_out + origin * out_by.row + (first + token)[:, None] * out_by.token
        tl.store(at, y.to(out.dtype.element_ty), inside[:, None] & in_rows[None, :])


_TYPES = {"bf16": tl.bfloat16, "fp32": tl.float32}
_INPUTS = dict.fromkeys(("x_by", "dt_by", "B_by", "C_by", "z_by", "out_by"), ("row", "token", "head"))
_PLACES = _INPUTS | dict.fromkeys(("source_by", "state_by", "marks_by"), ("slot", "head", "row"))
_SIZES = ("sequences", "tokens", "chunks", "heads", "repeat", "dim", "dstate", "slots", "marks", "places")


def _build(kernel, problem, config, rows: int) -> Build:
    """The build of one of the kernels, of the parameters that it has. rows : of the state, of a program."""
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
        "states": "fp32",
        "logs": "fp32",
        "out": problem.dtype,
    }
    kinds = {name: kinds[name] for name in kernel.arg_names if name in kinds}
    whole = {"x", "B", "C", "z", "source", "state", "marks", "out"} if problem.aligned else set()
    units = {f"{name}_by": kinds[name] for name in whole & kinds.keys() if kinds[name]}
    places = {name: _PLACES[name] for name in kernel.arg_names if name in _PLACES}
    types = pointers(kinds, whole | {"states"}) | place_types(places, units)
    types |= size_types(_SIZES, dim=problem.dim, dstate=problem.dstate)
    if "numbers" in kernel.arg_names:
        types |= {"numbers.least": "fp32", "numbers.most": "fp32"}
    constants = {
        "SOFTPLUS": problem.softplus,
        "WIDE_D": problem.wide_d,
        "CHUNK": problem.chunk,
        "TILE": config.tile,
        "ROWS": rows,
        "STATES": power_of_two(problem.dstate, 16),
        "OPERAND": _TYPES[config.operand],
        "PRECISION": "tf32x3" if problem.dtype == "fp32" else "tf32",
    }
    constants = {name: value for name, value in constants.items() if name in kernel.arg_names}
    constants |= {name: None for name, kind in kinds.items() if not kind}
    return Build(kernel, types, constants, num_warps=config.num_warps)


launch_added = Launcher("ssd_added", lambda p, c: _build(added_kernel, p, c, c.rows))
launch_passed = Launcher("ssd_passed", lambda p, c: _build(passed_kernel, p, c, c.passed_rows))
launch_marked = Launcher("ssd_marked", lambda p, c: _build(marked_kernel, p, c, c.rows))
launch_results = Launcher("ssd_results", lambda p, c: _build(results_kernel, p, c, c.rows))
# Bytes of stack a thread may use: results_kernel in float32 takes 24 on sm_120a by Triton 3.9; others take 8 at most.
STACK_BUDGET = 24
LAUNCHERS = (launch_added, launch_passed, launch_marked, launch_results)


def kernels(problem, config):
    for launcher in LAUNCHERS:
        if launcher is not launch_marked or problem.marks_dtype:
            yield launcher, problem, config


def run(problem, config, tokens, layer, pool, out, marks=None):
    """Every sequence from its state to its last token, as `flashinfer/ops/recurrent/ssd/__init__.py` states it."""
    x, n = tokens.x, tokens.sequences
    rows, length, heads, dim = x.shape
    chunks = triton.cdiv(length, problem.chunk)
    places = rows * chunks if tokens.offsets is None else length // problem.chunk + n
    workspace = torch.empty(places, heads, dim, power_of_two(problem.dstate, 16), dtype=torch.float32, device=x.device)
    logs = torch.empty(places, heads, dtype=torch.float32, device=x.device)
    wanted = 0 if marks is None else marks.tokens.shape[1]
    slots = n if pool.read is None else len(pool.source)
    rest = slots, wanted, 0 if marks is None else len(marks.out)
    sizes = n, length, chunks, heads, heads // tokens.B.shape[2], dim, problem.dstate, *rest
    by = {name: strides(getattr(tokens, name), (0, 1, 2)) for name in ("x", "dt", "B", "C", "z")}
    by |= {name: strides(t, (0, 1, 2)) for name, t in (("source", pool.source), ("state", pool.state), ("out", out))}
    numbers = layer.least, layer.most
    blocks = triton.cdiv(dim, config.rows)

    def launch(launcher, grid, tensors, names, *last):
        given = [t for t in tensors if t is not None]
        launcher(problem, config, grid, *given, *(s for name in names for s in by[name]), *sizes, *last)

    inputs = tokens.x, tokens.dt, tokens.B, layer.A, layer.bias, tokens.offsets
    if places:
        launch(launch_added, (places, heads, blocks), (*inputs, workspace, logs), ("x", "dt", "B"), *numbers)
    launch(
        launch_passed,
        (n, heads, triton.cdiv(dim, config.passed_rows)),
        (tokens.offsets, pool.read, pool.source, pool.state, workspace, logs),
        ("source", "state"),
    )
    if wanted:
        by["marks"] = strides(marks.out, (0, 1, 2))
        tensors = *inputs, pool.read, pool.source, *marks, workspace
        launch(launch_marked, (n * wanted, heads, blocks), tensors, ("x", "dt", "B", "source", "marks"), *numbers)
    if places:
        tensors = *tokens[:5], layer.A, layer.D, layer.bias, tokens.offsets, pool.read, workspace, out
        grid = (places * (problem.chunk // config.tile), heads, blocks)
        launch(launch_results, grid, tensors, ("x", "dt", "B", "C", "z", "out"), *numbers)


IMPLEMENTATION = Implementation(run, LAUNCHERS, kernels=kernels, compile_together=True, stack_budget=STACK_BUDGET)
