"""States after some of a ring's tokens, in Triton.

Grid: (requests, heads by blocks of rows, layers). A program has ROWS rows of the state of one head of one request and
one layer. Layers' tensors are found by addresses in tables, so that one launch serves all of them.
Warps: all do the same. Shared memory: none.
Inputs: `Layers` and `Requests` of the door. Outputs: states, in place.
Method: the recurrence of `flashinfer/ops/recurrent/ssm/portable.py`, without its outputs.
"""

import triton
import triton.language as tl

from flashinfer._core.implementation import Implementation
from flashinfer._core.launch import Build, Launcher
from flashinfer._core.sizes import power_of_two
from flashinfer.ops.recurrent._device.states import load_state
from flashinfer.ops.recurrent.ssm import LARGEST
from flashinfer.ops.recurrent.ssm.portable import put_state

_ELEMENTS = {"fp32": tl.float32, "bf16": tl.bfloat16, "fp16": tl.float16, "i16": tl.int16, "i8": tl.int8}


@triton.jit
def at_address(tables, layer, ELEMENT: tl.constexpr):
    """The pointer to elements that a table has for a layer."""
    return tl.load(tables + layer).to(tl.pointer_type(ELEMENT))


@triton.jit
def materialize_kernel(
    layers, source, goal, start, count, active, seed, of,
    SCALED: tl.constexpr, STATE: tl.constexpr, STORED: tl.constexpr, ELEMENT: tl.constexpr, RATE: tl.constexpr,
    LARGEST: tl.constexpr, ROUNDS: tl.constexpr, DIM: tl.constexpr, DSTATE: tl.constexpr, ROWS: tl.constexpr,
    COLUMNS: tl.constexpr, CAPABILITY: tl.constexpr,
):  # fmt: skip
    place = tl.program_id(0)
    head = tl.program_id(1) // of.blocks
    layer = tl.program_id(2)
    row = tl.program_id(1) % of.blocks * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, COLUMNS)
    in_rows = row < DIM
    in_columns = column < DSTATE
    inside = in_rows[:, None] & in_columns[None, :]
    # Entries behind the first -1 do not count.
    stops = 0
    for i in range(place + 1):
        stops += (tl.load(active + i) < 0).to(tl.int32)
    request = tl.maximum(tl.load(active + place), 0)
    old = tl.load(source + layer * of.batch + request).to(tl.int64)
    new = tl.load(goal + layer * of.batch + request).to(tl.int64)
    if (stops == 0) & (old != of.pad) & (new != of.pad) & (old >= 0) & (new >= 0):
        states = at_address(layers.state_at, layer, STORED)
        stride = tl.load(layers.state_stride + layer)
        tile = (head * DIM + row[:, None]) * DSTATE + column[None, :]
        s = load_state(states + old * stride + tile, inside, STATE, CAPABILITY)
        rows = head * DIM + row
        scales = None
        scale_home = rows.to(tl.int64)
        scale = tl.full([ROWS], 1, tl.float32)
        if SCALED:
            scales = at_address(layers.scale_at, layer, tl.float32)
            scale_step = tl.load(layers.scale_stride + layer)
            scale = tl.load(scales + old * scale_step + rows, in_rows, other=0)
            scale_home += new * scale_step
        tokens = tl.load(count + request)
        if tokens == 0:
            raw = tl.load(states + old * stride + tile, inside)
            tl.store(states + new * stride + tile, raw, inside)
            if SCALED:
                tl.store(scales + scale_home, scale, in_rows)
        else:
            s *= scale[:, None]
            rate = tl.load(at_address(layers.a_at, layer, RATE) + head).to(tl.float32)
            ring_x = at_address(layers.x_at, layer, ELEMENT) + old * tl.load(layers.x_stride + layer)
            ring_x += head * of.length * DIM
            ring_b = at_address(layers.b_at, layer, ELEMENT) + old * tl.load(layers.b_stride + layer)
            ring_b += head // of.repeat * of.length * DSTATE
            ring_dt = at_address(layers.dt_at, layer, tl.float32) + old * tl.load(layers.dt_stride + layer)
            ring_dt += head * of.length
            oldest = tl.load(start + request)
            for t in range(tokens):
                at = (oldest + t) % of.length
                x = tl.load(ring_x + at * DIM + row, in_rows, other=0).to(tl.float32)
                b = tl.load(ring_b + at * DSTATE + column, in_columns, other=0).to(tl.float32)
                dt = tl.load(ring_dt + at)
                s = s * tl.exp(dt * rate) + (dt * x)[:, None] * b[None, :]
            put_state(
                states, scales, new * stride + tile, scale_home, s, inside, in_rows, seed, tile, new * 0,
                new.to(tl.int32), STATE, LARGEST, ROUNDS, CAPABILITY,
            )  # fmt: skip


_TABLES = (
    "state_at", "state_stride", "x_at", "x_stride", "b_at", "b_stride", "dt_at", "dt_stride", "a_at", "scale_at",
    "scale_stride",
)  # fmt: skip
_REQUESTS = ("source", "goal", "start", "count", "active")
_SIZES = ("batch", "heads", "repeat", "length", "pad", "blocks")


def _build(problem, config):
    types = {f"layers.{name}": "*i64" for name in _TABLES} | dict.fromkeys(_REQUESTS, "*i32")
    types |= {"seed": "*i64" if problem.rounds else None}
    types |= {f"of.{name}": "i32" for name in _SIZES}
    constants = {
        "SCALED": problem.state_dtype in LARGEST,
        "STATE": problem.state_dtype,
        "STORED": _ELEMENTS.get(problem.state_dtype, tl.uint8),
        "ELEMENT": _ELEMENTS[problem.dtype],
        "RATE": _ELEMENTS[problem.a_dtype],
        "LARGEST": LARGEST.get(problem.state_dtype, 0),
        "ROUNDS": problem.rounds,
        "DIM": problem.dim,
        "DSTATE": problem.dstate,
        "ROWS": config.rows,
        "COLUMNS": power_of_two(problem.dstate, 16),
        "CAPABILITY": config.capability,
    }
    return Build(materialize_kernel, types, constants, num_warps=config.num_warps)


launch = Launcher("ssm_materialize", _build)


def run(problem, config, layers, requests, heads, groups, length):
    """As `flashinfer/ops/recurrent/ssm/__init__.py` states it."""
    batch, blocks = len(requests.start), triton.cdiv(problem.dim, config.rows)
    seed = [requests.seed] if problem.rounds else []
    grid = (batch, heads * blocks, len(layers.state))
    sizes = (batch, heads, heads // groups, length, requests.pad, blocks)
    launch(problem, config, grid, *layers, *requests[:5], *seed, *sizes)


IMPLEMENTATION = Implementation(run, (launch,))
