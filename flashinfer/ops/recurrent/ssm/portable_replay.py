"""Replay from a checkpoint in Triton: the recurrence over the ring's tokens, then over the new ones.

A program has ROWS rows of the state of one head of one sequence in registers. It follows the ring's tokens, writes the
state if the ring is too full to wait, then follows the new tokens, and writes them behind the old ones: x by each
program its rows, B by the first head of its group, dt by the first block. A checkpoint is read at each call and written
at few of them.

Grid: `states_grid`, and one sequence more for packed tokens of none.
Warps: all do the same. Shared memory: sums.
Inputs: tokens, ring and states as `Tokens`, `Ring` and `Pool` of the door have them. Outputs: like x; ring, states.
Method: the recurrence of `flashinfer/ops/recurrent/ssm/portable.py`.
"""

import triton
import triton.language as tl

from flashinfer._core.implementation import Implementation
from flashinfer._core.launch import Build, Launcher
from flashinfer._core.sizes import power_of_two
from flashinfer.ops.recurrent._device.gates import log_one_plus, sigmoid
from flashinfer.ops.recurrent._device.sequences import program_of, states_grid, tokens_of, zero_tokens
from flashinfer.ops.recurrent._device.states import load_state
from flashinfer.ops.recurrent.launching import arguments, place_types, pointers, size_types, strides
from flashinfer.ops.recurrent.ssm import LARGEST
from flashinfer.ops.recurrent.ssm.portable import TOKEN_PLACES, put_state, shared_kinds, token_strides


@triton.jit
def replay_kernel(
    given, layer, pool, ring, read, seed, x_by, dt_by, b_by, c_by, z_by, out_by, a_by, d_by, bias_by, state_by,
    scale_by, rx_by, rb_by, rdt_by, of,
    SOFTPLUS: tl.constexpr, STATE: tl.constexpr, LARGEST: tl.constexpr, ROUNDS: tl.constexpr,
    DIM: tl.constexpr, DSTATE: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, CAPABILITY: tl.constexpr,
):  # fmt: skip
    n, head, block = program_of((DIM + ROWS - 1) // ROWS)
    row = block * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, COLUMNS)
    in_rows = row < DIM
    in_columns = column < DSTATE
    inside = in_rows[:, None] & in_columns[None, :]
    group = head // of.repeat

    sequence, origin, first, length = tokens_of(given.offsets, n, given.out, out_by, head, row, out_by.dim, in_rows, of)
    slot = sequence.to(tl.int64)
    if read is not None:
        slot = tl.load(read + slot).to(tl.int64)
    if (n < of.sequences) & (slot != of.pad) & (slot >= 0) & (slot < of.slots):
        state_at = slot * state_by.slot + head * state_by.head
        state_at += row[:, None].to(tl.int64) * state_by.row + column[None, :]
        scale_at = slot * scale_by.slot + head * scale_by.head + row * scale_by.row
        s = load_state(pool.state + state_at, inside, STATE, CAPABILITY)
        if pool.scale is not None:
            s *= tl.load(pool.scale + scale_at, in_rows, other=0)[:, None]
        rate = tl.load(layer.A + head * a_by.head).to(tl.float32)
        oldest = tl.load(ring.start + slot).to(tl.int32)
        count = tl.load(ring.count + slot).to(tl.int32)
        at_x = ring.x + (slot * rx_by.slot + head * rx_by.head)
        at_b = ring.b + (slot * rb_by.slot + group * rb_by.group)
        at_dt = ring.dt + (slot * rdt_by.slot + head * rdt_by.head)
        for t in range(count):
            at = ((oldest + t) % of.length).to(tl.int64)
            old_x = tl.load(at_x + at * rx_by.token + row, in_rows, other=0).to(tl.float32)
            old_b = tl.load(at_b + at * rb_by.token + column, in_columns, other=0).to(tl.float32)
            old_dt = tl.load(at_dt + at * rdt_by.token)
            s = s * tl.exp(old_dt * rate) + (old_dt * old_x)[:, None] * old_b[None, :]
        full = count + 2 * of.most > of.length
        element = (head * DIM + row[:, None]) * DSTATE + column[None, :]
        put_state(
            pool.state, pool.scale, state_at, scale_at, s, inside & full, in_rows & full, seed, element, slot, 0,
            STATE, LARGEST, ROUNDS, CAPABILITY,
        )  # fmt: skip
        for t in range(length):
            token = first + t
            to = ((oldest + count + t) % of.length).to(tl.int64)
            place_x = origin * x_by.row + token * x_by.token + head * x_by.head + row * x_by.dim
            raw_x = tl.load(given.x + place_x, in_rows, other=0)
            place_b = origin * b_by.row + token * b_by.token + group * b_by.group + column
            raw_b = tl.load(given.B + place_b, in_columns, other=0)
            value = raw_x.to(tl.float32)
            step = tl.load(given.dt + origin * dt_by.row + token * dt_by.token + head * dt_by.head).to(tl.float32)
            if layer.bias is not None:
                step += tl.load(layer.bias + head * bias_by.head).to(tl.float32)
            if SOFTPLUS:
                step = tl.maximum(step, 0) + log_one_plus(tl.exp(-tl.abs(step)))
            s = s * tl.exp(step * rate) + (step * value)[:, None] * raw_b.to(tl.float32)[None, :]
            place = origin * c_by.row + token * c_by.token + group * c_by.group + column
            y = tl.sum(s * tl.load(given.C + place, in_columns, other=0).to(tl.float32)[None, :], 1)
            if layer.D is not None:
                y += tl.load(layer.D + head * d_by.head + row * d_by.dim, in_rows, other=0).to(tl.float32) * value
            if given.z is not None:
                place_z = origin * z_by.row + token * z_by.token + head * z_by.head + row * z_by.dim
                gate = tl.load(given.z + place_z, in_rows, other=0).to(tl.float32)
                y *= gate * sigmoid(gate)
            place_out = origin * out_by.row + token * out_by.token + head * out_by.head + row * out_by.dim
            tl.store(given.out + place_out, y.to(given.out.dtype.element_ty), in_rows)
            tl.store(at_x + to * rx_by.token + row, raw_x, in_rows)
            tl.store(at_b + to * rb_by.token + column, raw_b, in_columns & (block == 0) & (head % of.repeat == 0))
            tl.store(at_dt + to * rdt_by.token, step, block == 0)
    elif n < of.sequences:
        end = first.to(tl.int32) + length
        zero_tokens(given.out, out_by, origin, first.to(tl.int32), end, head, row, out_by.dim, in_rows)


_PLACES = TOKEN_PLACES | {
    "a_by": ("head",),
    "d_by": ("head", "dim"),
    "bias_by": ("head",),
    "state_by": ("slot", "head", "row"),
    "scale_by": ("slot", "head", "row"),
    "rx_by": ("slot", "head", "token"),
    "rb_by": ("slot", "group", "token"),
    "rdt_by": ("slot", "head", "token"),
}
_SIZES = ("sequences", "tokens", "repeat", "slots", "pad", "length", "most")


def _build(problem, config):
    kinds = shared_kinds(problem) | {
        "ring.x": problem.dtype,
        "ring.b": problem.dtype,
        "ring.dt": "fp32",
        "ring.start": "i32",
        "ring.count": "i32",
        "read": problem.index if problem.read else "",
        "seed": "i64" if problem.rounds else "",
    }
    rows = {"pool.state": "state_by", "given.B": "b_by", "given.C": "c_by", "ring.b": "rb_by"}
    whole = {place: kinds[name] for name, place in rows.items()} if problem.aligned else {}
    types = pointers(kinds, rows if problem.aligned else ()) | place_types(_PLACES, whole)
    types |= size_types(_SIZES, dim=problem.dim, dstate=problem.dstate)
    constants = {
        "SOFTPLUS": problem.softplus,
        "STATE": problem.state_dtype,
        "LARGEST": LARGEST.get(problem.state_dtype, 0),
        "ROUNDS": problem.rounds,
        "DIM": problem.dim,
        "DSTATE": problem.dstate,
        "ROWS": config.rows,
        "COLUMNS": power_of_two(problem.dstate, 16),
        "CAPABILITY": config.capability,
    }
    return Build(replay_kernel, types, constants, num_warps=config.num_warps)


launch = Launcher("ssm_replay", _build)


def run(problem, config, tokens, layer, pool, ring):
    """As `flashinfer/ops/recurrent/ssm/__init__.py` states it."""
    _, count, heads, dim = tokens.x.shape
    sizes = (tokens.sequences, count, heads // tokens.B.shape[2], len(pool.state), pool.pad, ring.length, ring.most)
    given = [*tokens[:6], tokens.offsets, *layer, pool.state, pool.scale, *ring[:5], pool.read]
    given += [pool.seed if problem.rounds else None]
    places = [*token_strides(tokens), strides(layer.A, (0,)), strides(layer.D, (0, 1)), strides(layer.bias, (0,))]
    places += [strides(x, (0, 1, 2)) for x in (pool.state, pool.scale, ring.x, ring.B, ring.dt)]
    grid = states_grid(tokens.sequences + problem.packed, heads, triton.cdiv(dim, config.rows))
    launch(problem, config, grid, *arguments(given, places), *sizes)


IMPLEMENTATION = Implementation(run, (launch,))
