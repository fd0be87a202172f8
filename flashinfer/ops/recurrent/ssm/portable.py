"""The state-space recurrence in Triton, token by token.

Grid: `states_grid`, with one sequence more that zeroes the tokens of none. A program has ROWS rows of the state of one
head of one sequence in registers, [ROWS, dstate] in float32, and follows the sequence's tokens. The state is read once
and written once; decode is bound by these bytes.
Warps: all do the same. Shared memory: sums.
Inputs: x, z [rows, tokens, heads, dim], dt [rows, tokens, heads], B, C [rows, tokens, groups, dstate], A, D, bias
[heads] or [heads, dim], states [slots, heads, dim, dstate]. Outputs: like x; states in place, or after each token.
Method: Dao and Gu, Transformers are SSMs, 2024, https://arxiv.org/abs/2405.21060.
"""

import triton
import triton.language as tl

from flashinfer._core.implementation import Implementation
from flashinfer._core.launch import Build, Launcher
from flashinfer._core.sizes import power_of_two
from flashinfer._core.target import target_of
from flashinfer.ops._device.pdl import begin
from flashinfer.ops.recurrent._device.gates import log_one_plus, sigmoid
from flashinfer.ops.recurrent._device.sequences import head_of, program_of, states_grid, tokens_of, zero_tokens
from flashinfer.ops.recurrent._device.states import load_state, store_state, tile_offsets
from flashinfer.ops.recurrent.launching import arguments, place_types, pointers, size_types, strides, table_strides
from flashinfer.ops.recurrent.ssm import LARGEST
from flashinfer.ops.recurrent.ssm.config import with_many


@triton.jit
def quantum(x, FRACTION: tl.constexpr, LEAST: tl.constexpr):
    """The distance of x's neighbours in a format with so many fraction bits and least normal exponent."""
    exponent = (x.to(tl.int32, bitcast=True) >> 23) & 255
    exponent = tl.maximum(exponent, LEAST + 127) - FRACTION
    # Below float32's least normal exponent, the bit of a subnormal number.
    bits = tl.where(exponent > 0, exponent << 23, tl.full(x.shape, 1, tl.int32) << tl.maximum(exponent + 22, 0))
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def put_state(
    states, scales, at, scale_at, s, inside, in_rows, seed, element, slot, step,
    DTYPE: tl.constexpr, LARGEST: tl.constexpr, ROUNDS: tl.constexpr, CAPABILITY: tl.constexpr,
):  # fmt: skip
    """Write a tile of a state, with the scales of its rows where there are any."""
    if scales is not None:
        largest = tl.max(tl.abs(s), 1)
        scale = tl.where(largest > 0, largest / LARGEST, 1.0)
        # A code may not be NaN, so that a row with one has it as its scale.
        scale = tl.where(tl.max((s != s).to(tl.int32), 1) > 0, float("nan"), scale)
        tl.store(scales + scale_at, scale, in_rows)
        s = s / scale[:, None]
    if ROUNDS > 0 and DTYPE != "fp32":
        zero = element * 0
        random, _, _, _ = tl.philox(tl.load(seed), element, zero + slot.to(tl.int32), zero + step, zero, ROUNDS)
        part = (random.to(tl.uint32, bitcast=True) >> 8).to(tl.float32) / 16777216.0
        if DTYPE == "i16" or DTYPE == "i8":
            s = tl.floor(s + part)
        else:
            if DTYPE == "bf16":
                unit = quantum(s, 7, -126)
            elif DTYPE == "fp16":
                unit = quantum(s, 10, -14)
            else:
                unit = quantum(s, 3, -6)
            s = tl.floor(s / unit + part) * unit
    elif DTYPE == "i16" or DTYPE == "i8":
        # To the nearest, ties to even: adding 1.5 * 2^23 leaves no fraction bits.
        s = (s + 12582912.0) - 12582912.0
    if LARGEST > 0:
        s = tl.minimum(tl.maximum(s, -LARGEST), LARGEST)
    store_state(states + at, s, inside, DTYPE, CAPABILITY)


@triton.jit
def _load_token(
    given, there, origin, token, head, group, row, column, in_rows, in_columns, x_by, dt_by, b_by, c_by, z_by,
    TIED: tl.constexpr,
):  # fmt: skip
    """x, dt, B, C and z of a token as stored, if it is `there`; 0 for a z that is not given."""
    in_rows &= there
    in_columns &= there
    at = origin * x_by.row + token * x_by.token + head * x_by.head + row * x_by.dim
    value = tl.load(given.x + at, in_rows, other=0)
    at = given.dt + origin * dt_by.row + token * dt_by.token + head * dt_by.head
    if TIED:
        step = tl.load(at, there, other=0)
    else:
        step = tl.load(at + row * dt_by.dim, in_rows, other=0)
    at = origin * b_by.row + token * b_by.token + group * b_by.group + column
    wide_b = tl.load(given.B + at, in_columns, other=0)
    at = origin * c_by.row + token * c_by.token + group * c_by.group + column
    wide_c = tl.load(given.C + at, in_columns, other=0)
    gate = 0.0
    if given.z is not None:
        at = origin * z_by.row + token * z_by.token + head * z_by.head + row * z_by.dim
        gate = tl.load(given.z + at, in_rows, other=0)
    return value, step, wide_b, wide_c, gate


@triton.jit
def update_kernel(
    given, layer, pool, x_by, dt_by, b_by, c_by, z_by, out_by, a_by, d_by, bias_by, state_by, scale_by, read_by,
    write_by, of, share,
    TIED: tl.constexpr, SOFTPLUS: tl.constexpr, EACH: tl.constexpr, FINAL: tl.constexpr, ROUNDS: tl.constexpr,
    SINGLE: tl.constexpr, PDL: tl.constexpr,
    DIM: tl.constexpr, DSTATE: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, CAPABILITY: tl.constexpr,
):  # fmt: skip
    begin(PDL)
    n, head, block = program_of((DIM + ROWS - 1) // ROWS)
    row = block * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, COLUMNS)
    in_rows = row < DIM
    in_columns = column < DSTATE
    inside = in_rows[:, None] & in_columns[None, :]
    group = head_of(head, share)

    sequence, origin, first, length = tokens_of(given.offsets, n, given.out, out_by, head, row, out_by.dim, in_rows, of)
    if SINGLE:
        length = 1
    is_sequence = n < of.sequences
    entry = sequence.to(tl.int64)

    slot = entry
    if pool.read is not None:
        start = tl.full([], 0, tl.int64)
        if pool.accepted is not None:
            start = tl.load(pool.accepted + entry).to(tl.int64) - 1
            start = tl.minimum(tl.maximum(start, 0), of.read_columns - 1)
        slot = tl.load(pool.read + entry * read_by.sequence + start * read_by.column).to(tl.int64)
    live = is_sequence & (slot != of.pad) & (slot >= 0) & (slot < of.slots)

    # All loads precede a barrier and a branch, which ptxas moves neither them nor their uses across. So none waits for
    # another, but for a slot.
    raw_x, raw_dt, raw_b, raw_c, raw_z = _load_token(
        given, length > 0, origin, first, head, group, row, column, in_rows, in_columns, x_by, dt_by, b_by, c_by, z_by,
        TIED,
    )  # fmt: skip
    bias = 0.0
    if layer.bias is not None:
        if TIED:
            bias = tl.load(layer.bias + head * bias_by.head)
        else:
            bias = tl.load(layer.bias + head * bias_by.head + row * bias_by.dim, in_rows, other=0)
    skip = 0.0
    if layer.D is not None:
        skip = tl.load(layer.D + head * d_by.head + row * d_by.dim, in_rows, other=0)
    rates = layer.A + head * a_by.head
    if TIED:
        raw_rate = tl.load(rates)
    else:
        rates += row[:, None] * a_by.row + column[None, :] * a_by.column
        raw_rate = tl.load(rates, inside, other=0)
    tile = tile_offsets(block, row, column, state_by.row, 1, "k", pool.DENSE)
    read_at = slot * state_by.slot + head * state_by.head
    s = load_state(pool.state + read_at + tile, inside & live, pool.STATE, CAPABILITY)
    if pool.scale is not None:
        scale_at = slot * scale_by.slot + head * scale_by.head + row * scale_by.row
        scales = tl.load(pool.scale + scale_at, in_rows & live, other=0)
    tl.debug_barrier()
    if live:
        element = (head * DIM + row[:, None]) * DSTATE + column[None, :]
        if pool.scale is not None:
            s *= scales[:, None]
        rate = raw_rate.to(tl.float32)
        for t in range(length):
            token = first + t
            if not SINGLE:
                # Behind the last token it is that one again.
                next_x, next_dt, next_b, next_c, next_z = _load_token(
                    given, t >= 0, origin, first + tl.minimum(t + 1, length - 1), head, group, row, column,
                    in_rows, in_columns, x_by, dt_by, b_by, c_by, z_by, TIED,
                )  # fmt: skip
            value = raw_x.to(tl.float32)
            step = raw_dt.to(tl.float32)
            if layer.bias is not None:
                step += bias.to(tl.float32)
            if SOFTPLUS:
                step = tl.maximum(step, 0) + log_one_plus(tl.exp(-tl.abs(step)))
            if TIED:
                s = s * tl.exp(step * rate)
            else:
                s = s * tl.exp(step[:, None] * rate)
            s += (step * value)[:, None] * raw_b.to(tl.float32)[None, :]
            y = tl.sum(s * raw_c.to(tl.float32)[None, :], 1)
            if layer.D is not None:
                y += skip.to(tl.float32) * value
            if given.z is not None:
                y *= raw_z.to(tl.float32) * sigmoid(raw_z.to(tl.float32))
            at = origin * out_by.row + token * out_by.token + head * out_by.head + row * out_by.dim
            tl.store(given.out + at, y.to(given.out.dtype.element_ty), in_rows)
            if EACH == "buffer":
                buffer = slot
                if pool.buffers is not None:
                    buffer = tl.load(pool.buffers + entry).to(tl.int64)
                there = (buffer >= 0) & (buffer < of.buffers)
                place = ((buffer * of.steps + t) * of.heads + head) * DIM + row
                at = place[:, None] * DSTATE + column[None, :]
                put_state(
                    pool.each, pool.each_scale, at, place, s, inside & there, in_rows & there, pool.seed, element,
                    buffer * of.steps + t, t, pool.EACH_STATE, pool.EACH_LARGEST, ROUNDS, CAPABILITY,
                )  # fmt: skip
            if EACH == "pool" or FINAL:
                goal = slot
                step_column = tl.minimum(t, of.write_columns - 1) if EACH == "pool" else 0
                if pool.write is not None:
                    goal = tl.load(pool.write + entry * write_by.sequence + step_column * write_by.column).to(tl.int64)
                there = (goal != of.pad) & (goal >= 0) & (goal < of.slots)
                there &= (EACH == "pool") | (t + 1 == length)
                at = goal * state_by.slot + head * state_by.head + tile
                scale_at = goal * scale_by.slot + head * scale_by.head + row * scale_by.row
                put_state(
                    pool.state, pool.scale, at, scale_at, s, inside & there, in_rows & there, pool.seed, element, goal,
                    t, pool.STATE, pool.LARGEST, ROUNDS, CAPABILITY,
                )  # fmt: skip
            if not SINGLE:
                raw_x, raw_dt, raw_b, raw_c = next_x, next_dt, next_b, next_c
                if given.z is not None:
                    raw_z = next_z
    elif is_sequence:
        end = first.to(tl.int32) + length
        zero_tokens(given.out, out_by, origin, first.to(tl.int32), end, head, row, out_by.dim, in_rows)


_TOKEN, _GROUP = ("row", "token", "head", "dim"), ("row", "token", "group")
# Of Tokens, as `token_strides` gives them.
TOKEN_PLACES = {"x_by": _TOKEN, "dt_by": _TOKEN, "b_by": _GROUP, "c_by": _GROUP, "z_by": _TOKEN, "out_by": _TOKEN}
_PLACES = TOKEN_PLACES | {
    "a_by": ("head", "row", "column"),
    "d_by": ("head", "dim"),
    "bias_by": ("head", "dim"),
    "state_by": ("slot", "head", "row"),
    "scale_by": ("slot", "head", "row"),
    "read_by": ("sequence", "column"),
    "write_by": ("sequence", "column"),
}
_SIZES = (
    "sequences", "tokens", "heads", "slots", "pad", "buffers", "steps", "read_columns", "write_columns",
)  # fmt: skip


def shared_kinds(problem) -> dict[str, str]:
    """Dtypes of tokens, of a layer's parameters and of its states, by the names of kernels."""
    return {
        "given.x": problem.dtype,
        "given.dt": problem.dt_dtype,
        "given.B": problem.dtype,
        "given.C": problem.dtype,
        "given.z": problem.dtype if problem.gated else "",
        "given.out": problem.dtype,
        "given.offsets": problem.index if problem.packed else "",
        "layer.A": problem.a_dtype,
        "layer.D": problem.d_dtype,
        "layer.bias": problem.bias_dtype,
        "pool.state": problem.state_dtype,
        "pool.scale": "fp32" if problem.state_dtype in LARGEST else "",
    }


def token_strides(tokens) -> list[tuple[int, ...]]:
    token, group = (0, 1, 2, 3), (0, 1, 2)
    given = (tokens.x, token), (tokens.dt, token), (tokens.B, group), (tokens.C, group), (tokens.z, token)
    return [strides(x, dims) for x, dims in (*given, (tokens.out, token))]


def _build(problem, config):
    each_scaled = problem.each_dtype in LARGEST
    kinds = shared_kinds(problem) | {
        "pool.each": problem.each_dtype if problem.each == "buffer" else "",
        "pool.each_scale": "fp32" if problem.each == "buffer" and each_scaled else "",
        "pool.read": problem.index if problem.read else "",
        "pool.write": problem.index if problem.write else "",
        "pool.buffers": problem.index if problem.rows else "",
        "pool.accepted": problem.index if problem.accepted else "",
        "pool.seed": "i64" if problem.rounds else "",
    }
    rows = {"pool.state": "state_by", "given.B": "b_by", "given.C": "c_by"}
    whole = {place: kinds[name] for name, place in rows.items()} if problem.aligned else {}
    types = pointers(kinds, (*rows, "pool.each") if problem.aligned else ()) | place_types(_PLACES, whole)
    types |= size_types(_SIZES, dim=problem.dim, dstate=problem.dstate) | {"share": "fp32"}
    constants = {
        "TIED": problem.tied,
        "SOFTPLUS": problem.softplus,
        "EACH": problem.each,
        "FINAL": problem.final,
        "pool.STATE": problem.state_dtype,
        "pool.DENSE": problem.dense,
        "pool.EACH_STATE": problem.each_dtype,
        "pool.LARGEST": LARGEST.get(problem.state_dtype, 0),
        "pool.EACH_LARGEST": LARGEST.get(problem.each_dtype, 0),
        "ROUNDS": problem.rounds,
        "SINGLE": problem.single,
        "PDL": config.pdl,
        "DIM": problem.dim,
        "DSTATE": problem.dstate,
        "ROWS": config.rows,
        "COLUMNS": power_of_two(problem.dstate, 16),
        "CAPABILITY": config.capability,
    }
    return Build(update_kernel, types, constants, num_warps=config.num_warps)


launch = Launcher("ssm_update", _build)


# Programs a multiprocessor from which a program has 16 rows in place of 8. H100, 64 heads of 64 x 128, 16 rows and 8:
# 256 requests 385 and 396 us in float32, 198 and 207 in bfloat16; 1 request 4.0 and 3.8, and 2.7 both.
_MANY = 128


def run(problem, config, tokens, layer, pool):
    """As `flashinfer/ops/recurrent/ssm/__init__.py` states it."""
    _, count, heads, dim = tokens.x.shape
    columns = [1 if t is None or t.dim() == 1 else t.shape[1] for t in (pool.read, pool.write)]
    buffers, steps = (0, 0) if pool.each is None else pool.each.shape[:2]
    sizes = (tokens.sequences, count, heads, len(pool.state))
    sizes += (pool.pad, buffers, steps, *columns)
    given = [*tokens[:6], tokens.offsets, *layer, pool.state, pool.scale, pool.each, pool.each_scale]
    given += [pool.read, pool.write, pool.rows, pool.accepted, pool.seed if problem.rounds else None]
    places = [*token_strides(tokens), strides(layer.A, (0, 1, 2))]
    places += [strides(x, (0, 1)) for x in (layer.D, layer.bias)]
    places += [strides(x, (0, 1, 2)) for x in (pool.state, pool.scale)]
    places += [table_strides(x) for x in (pool.read, pool.write)]
    many = with_many(problem, config)
    programs = tokens.sequences * heads * triton.cdiv(dim, config.rows)
    if many is not None and programs > _MANY * target_of(tokens.x.device).sms:
        config = many
    grid = states_grid(tokens.sequences + problem.packed, heads, triton.cdiv(dim, config.rows))
    launch(problem, config, grid, *arguments(given, places), *sizes, tokens.B.shape[2] / heads)


def kernels(problem, config):
    yield launch, problem, config
    many = with_many(problem, config)
    if many is not None:
        yield launch, problem, many


IMPLEMENTATION = Implementation(run, (launch,), kernels=kernels)
