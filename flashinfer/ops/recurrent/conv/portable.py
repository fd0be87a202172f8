"""The causal convolution in Triton: a few tokens one after another with the window in registers, many side by side.

Grid: by kernel,
    few_kernel    (sequences, blocks of channels): tokens in turn, and the state; one sequence more for packed tokens
                  of none
    many_kernel   (tiles of tokens, blocks of channels, rows): outputs only
    state_kernel  (sequences, blocks of channels): the state, once many_kernel has read it
Warps: all do the same. Shared memory: none.
Inputs: x [rows, tokens, channels], weight [parts, width, channels / parts], state [slots, channels, length], tables of
`Call`. Outputs: like x; states in place.
Method: the short convolution of Gu and Dao, Mamba, 2023, https://arxiv.org/abs/2312.00752.
"""

import triton
import triton.language as tl

from flashinfer._core.implementation import Implementation
from flashinfer._core.launch import Build, Launcher
from flashinfer.ops._device.rows import column_offset, unit
from flashinfer.ops.recurrent._device.gates import sigmoid
from flashinfer.ops.recurrent._device.sequences import span_of
from flashinfer.ops.recurrent.launching import place_types, pointers, strides


@triton.jit
def weight_at(weight, channel, inside, tap: tl.constexpr, by, of):
    at = weight + channel // of.part * by.part + channel % of.part * by.channel + tap * by.tap
    return tl.load(at, inside, other=0).to(tl.float32)


@triton.jit
def history(state, inside, column, by, back: tl.constexpr, WIDTH: tl.constexpr):
    """The input `back` tokens before the first one, from a state whose window begins at `column`."""
    return tl.load(state + (column + WIDTH - 1 - back) * by.token, inside, other=0).to(tl.float32)


@triton.jit
def few_kernel(
    x,
    weight,
    bias,
    state,
    out,
    slots,
    accepted,
    fresh,
    offsets,
    x_by,
    weight_by,
    state_by,
    out_by,
    of,
    WIDTH: tl.constexpr,
    SILU: tl.constexpr,
    ROLLING: tl.constexpr,
    CHANNELS: tl.constexpr,
    UNIT: tl.constexpr,
    DENSE: tl.constexpr,
):
    n = tl.program_id(0)
    channel = tl.program_id(1) * CHANNELS + tl.arange(0, CHANNELS)
    inside = channel < of.channels
    at_out = out + column_offset(channel, out_by.channel, UNIT)
    if offsets is not None:
        if n == of.sequences:
            # There is one program more than packed sequences: it writes 0 for tokens of no sequence.
            for t in range(0, tl.load(offsets).to(tl.int32)):
                tl.store(at_out + t * out_by.token, tl.zeros_like(channel).to(out.dtype.element_ty), inside)
            for t in range(tl.load(offsets + n).to(tl.int32), of.tokens):
                tl.store(at_out + t * out_by.token, tl.zeros_like(channel).to(out.dtype.element_ty), inside)
    if n < of.sequences:
        row, first, length = span_of(offsets, n, of)
        slot = tl.full([], 0, tl.int64) + n
        if slots is not None:
            slot = tl.load(slots + n).to(tl.int64)
        here = at_out + row * out_by.row + first * out_by.token
        if slot <= of.null:
            for t in range(length):
                tl.store(here + t * out_by.token, tl.zeros_like(channel).to(out.dtype.element_ty), inside)
        else:
            reads = inside
            if fresh is not None:
                reads &= tl.load(fresh + n) != 0
            column = 0
            if accepted is not None:
                column = tl.minimum(tl.maximum(tl.load(accepted + n).to(tl.int32) - 1, 0), of.length - WIDTH + 1)
            h1 = tl.zeros([CHANNELS], tl.float32)
            h2 = h1
            h3 = h1
            if state is not None:
                at_state = state + slot * state_by.slot + column_offset(channel, state_by.channel, DENSE)
                h1 = history(at_state, reads, column, state_by, 1, WIDTH)
                if WIDTH > 2:
                    h2 = history(at_state, reads, column, state_by, 2, WIDTH)
                if WIDTH > 3:
                    h3 = history(at_state, reads, column, state_by, 3, WIDTH)
            w0 = weight_at(weight, channel, inside, WIDTH - 1, weight_by, of)
            w1 = weight_at(weight, channel, inside, WIDTH - 2, weight_by, of)
            w2 = w1
            w3 = w1
            if WIDTH > 2:
                w2 = weight_at(weight, channel, inside, WIDTH - 3, weight_by, of)
            if WIDTH > 3:
                w3 = weight_at(weight, channel, inside, WIDTH - 4, weight_by, of)
            b = tl.zeros([CHANNELS], tl.float32)
            if bias is not None:
                b = tl.load(bias + channel, inside, other=0).to(tl.float32)
            at_x = x + row * x_by.row + first * x_by.token + column_offset(channel, x_by.channel, UNIT)
            if state is not None:
                if ROLLING:
                    if length > 0:
                        if WIDTH > 3:
                            tl.store(at_state, h2.to(state.dtype.element_ty), inside)
                        if WIDTH > 2:
                            tl.store(at_state + (WIDTH - 3) * state_by.token, h1.to(state.dtype.element_ty), inside)
            for t in range(length):
                now = tl.load(at_x + t * x_by.token, inside, other=0).to(tl.float32)
                y = b + w0 * now + w1 * h1
                if WIDTH > 2:
                    y += w2 * h2
                if WIDTH > 3:
                    y += w3 * h3
                if SILU:
                    y *= sigmoid(y)
                tl.store(here + t * out_by.token, y.to(out.dtype.element_ty), inside)
                if ROLLING:
                    at = at_state + (WIDTH - 2 + t) * state_by.token
                    tl.store(at, now.to(state.dtype.element_ty), inside & (WIDTH - 2 + t < of.length))
                h3 = h2
                h2 = h1
                h1 = now
            if state is not None and not ROLLING:
                tl.store(at_state + (WIDTH - 2) * state_by.token, h1.to(state.dtype.element_ty), inside)
                if WIDTH > 2:
                    tl.store(at_state + (WIDTH - 3) * state_by.token, h2.to(state.dtype.element_ty), inside)
                if WIDTH > 3:
                    tl.store(at_state, h3.to(state.dtype.element_ty), inside)


@triton.jit
def many_kernel(
    x,
    weight,
    bias,
    state,
    out,
    slots,
    accepted,
    fresh,
    offsets,
    x_by,
    weight_by,
    state_by,
    out_by,
    of,
    WIDTH: tl.constexpr,
    SILU: tl.constexpr,
    ROLLING: tl.constexpr,
    CHANNELS: tl.constexpr,
    UNIT: tl.constexpr,
    DENSE: tl.constexpr,
    TOKENS: tl.constexpr,
):
    """Tiles of tokens: of a row, or of all that are packed, where every token looks its sequence up."""
    token = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    channel = tl.program_id(1) * CHANNELS + tl.arange(0, CHANNELS)
    row = tl.program_id(2).to(tl.int64)
    inside = channel < of.channels
    n = tl.zeros([TOKENS], tl.int32) + tl.program_id(2)
    first = tl.zeros([TOKENS], tl.int32)
    live = token < of.tokens
    if offsets is not None:
        # The last sequence that begins at or before the token.
        high = n * 0 + of.sequences - 1
        n = n * 0
        span = of.sequences
        while span > 0:
            middle = (n + high + 1) // 2
            begins = tl.load(offsets + middle).to(tl.int32) <= token
            open = n < high
            n = tl.where(open & begins, middle, n)
            high = tl.where(open & (begins == 0), middle - 1, high)
            span = span // 2
        first = tl.load(offsets + n).to(tl.int32)
        live &= (token >= first) & (token < tl.load(offsets + n + 1).to(tl.int32))
    slot = n.to(tl.int64)
    if slots is not None:
        slot = tl.load(slots + n).to(tl.int64)
    live &= slot > of.null
    reads = live
    if fresh is not None:
        reads &= tl.load(fresh + n) != 0
    column = tl.zeros([TOKENS], tl.int32)
    if accepted is not None:
        column = tl.minimum(tl.maximum(tl.load(accepted + n).to(tl.int32) - 1, 0), of.length - WIDTH + 1)
    y = tl.zeros([TOKENS, CHANNELS], tl.float32)
    if bias is not None:
        y += tl.load(bias + channel, inside, other=0).to(tl.float32)[None, :]
    for back in tl.static_range(WIDTH):
        w = weight_at(weight, channel, inside, WIDTH - 1 - back, weight_by, of)
        there = live & (token - back >= first)
        at = row * x_by.row + (token - back).to(tl.int64)[:, None] * x_by.token
        at += column_offset(channel, x_by.channel, UNIT)[None, :]
        y += w[None, :] * tl.load(x + at, there[:, None] & inside[None, :], other=0).to(tl.float32)
        if state is not None and back > 0:
            # The inputs before a sequence's first token are in the state.
            before = reads & (token - back < first)
            at = slot * state_by.slot + (column + WIDTH - 1 + token - back - first) * state_by.token
            at = at[:, None] + column_offset(channel, state_by.channel, DENSE)[None, :]
            y += w[None, :] * tl.load(state + at, before[:, None] & inside[None, :], other=0).to(tl.float32)
    if SILU:
        y *= sigmoid(y)
    at = row * out_by.row + token.to(tl.int64)[:, None] * out_by.token
    at += column_offset(channel, out_by.channel, UNIT)[None, :]
    y = tl.where(live[:, None], y, 0).to(out.dtype.element_ty)
    tl.store(out + at, y, (token < of.tokens)[:, None] & inside[None, :])


@triton.jit
def state_kernel(
    x,
    state,
    slots,
    accepted,
    fresh,
    offsets,
    x_by,
    state_by,
    of,
    WIDTH: tl.constexpr,
    ROLLING: tl.constexpr,
    CHANNELS: tl.constexpr,
    UNIT: tl.constexpr,
    DENSE: tl.constexpr,
):
    """The last inputs of each sequence, of its state and its tokens one after another."""
    n = tl.program_id(0)
    channel = tl.program_id(1) * CHANNELS + tl.arange(0, CHANNELS)
    inside = channel < of.channels
    row, first, length = span_of(offsets, n, of)
    slot = tl.full([], 0, tl.int64) + n
    if slots is not None:
        slot = tl.load(slots + n).to(tl.int64)
    if slot > of.null:
        reads = inside
        if fresh is not None:
            reads &= tl.load(fresh + n) != 0
        column = 0
        if accepted is not None:
            column = tl.minimum(tl.maximum(tl.load(accepted + n).to(tl.int32) - 1, 0), of.length - WIDTH + 1)
        at_x = x + row * x_by.row + first * x_by.token + column_offset(channel, x_by.channel, UNIT)
        at_state = state + slot * state_by.slot + column_offset(channel, state_by.channel, DENSE)
        # The inputs that stay begin `skip` behind the first of the state. Each column is read before it is written.
        skip = length
        count = WIDTH - 1
        if ROLLING:
            skip = tl.minimum(length, 1)
            count = tl.where(length > 0, WIDTH - 2 + length, 0)
        for i in range(count):
            place = i + skip
            old = tl.load(at_state + (column + place) * state_by.token, reads & (place < WIDTH - 1), other=0)
            new = tl.load(at_x + (place - (WIDTH - 1)) * x_by.token, inside & (place >= WIDTH - 1), other=0)
            kept = tl.where(place < WIDTH - 1, old.to(tl.float32), new.to(tl.float32))
            tl.store(at_state + i * state_by.token, kept.to(state.dtype.element_ty), inside & (i < of.length))


_PLACES = {
    "x_by": ("row", "token", "channel"),
    "weight_by": ("part", "tap", "channel"),
    "state_by": ("slot", "channel", "token"),
    "out_by": ("row", "token", "channel"),
}
_SIZES = ("sequences", "tokens", "channels", "part", "length", "null")


def _kinds(problem) -> dict:
    table = problem.index
    kinds = {"x": problem.dtype, "weight": problem.weight_dtype, "bias": problem.bias_dtype}
    kinds |= {"state": problem.state_dtype, "out": problem.out_dtype, "slots": table if problem.read else ""}
    kinds |= {"accepted": table if problem.accepted else "", "fresh": table if problem.fresh else ""}
    return kinds | {"offsets": table if problem.packed else ""}


def _build(problem, config, kernel, names, groups, constants):
    kinds = {name: kind for name, kind in _kinds(problem).items() if name in names}
    whole = ("x", "out") if problem.aligned else ()
    types = pointers(kinds, whole)
    units = {f"{name}_by": kinds[name] for name in whole if name in kinds}
    fields = dict.fromkeys(("x_by", "out_by"), ("row", "token"))
    types |= place_types({group: _PLACES[group] for group in groups}, units, fields)
    types |= {f"of.{name}": "i32" for name in _SIZES}
    constants = {"WIDTH": problem.width, "ROLLING": problem.rolling, "CHANNELS": config.channels} | constants
    # DENSE above 1 says that channels are contiguous.
    constants |= {"UNIT": unit(problem.dtype, problem.aligned), "DENSE": 2 if problem.dense else 1}
    return Build(kernel, types, constants, num_warps=config.num_warps)


def _build_outputs(problem, config):
    constants = {"SILU": problem.silu} | ({"TOKENS": config.tokens} if problem.long else {})
    kernel = many_kernel if problem.long else few_kernel
    return _build(problem, config, kernel, tuple(_kinds(problem)), tuple(_PLACES), constants)


def _build_state(problem, config):
    names = ("x", "state", "slots", "accepted", "fresh", "offsets")
    return _build(problem, config, state_kernel, names, ("x_by", "state_by"), {})


launch_outputs = Launcher("causal_conv1d", _build_outputs)
launch_state = Launcher("causal_conv1d_state", _build_state)


def kernels(problem, config):
    yield launch_outputs, problem, config
    if problem.long and problem.state_dtype:
        yield launch_state, problem, config


def run(problem, config, call):
    """Outputs of all tokens, then the states."""
    x, weight, state = call.x, call.weight, call.state
    places = {"x_by": strides(x, (0, 1, 2)), "weight_by": strides(weight, (0, 1, 2))}
    places |= {"state_by": strides(state, (0, 1, 2)), "out_by": strides(call.out, (0, 1, 2))}
    length = problem.width - 1 if state is None else state.shape[2]
    sizes = (call.sequences, x.shape[1], x.shape[2], weight.shape[2], length, call.null)
    tables = [t for t in (call.slots, call.accepted, call.fresh, call.offsets) if t is not None]
    blocks = triton.cdiv(x.shape[2], config.channels)
    given = [t for t in (x, weight, call.bias, state, call.out) if t is not None] + tables
    flat = [s for place in places.values() for s in place]
    if not problem.long:
        launch_outputs(problem, config, (call.sequences + problem.packed, blocks, 1), *given, *flat, *sizes)
        return
    grid = (triton.cdiv(x.shape[1], config.tokens), blocks, x.shape[0])
    launch_outputs(problem, config, grid, *given, *flat, *sizes)
    if state is not None:
        grid = (call.sequences, blocks, 1)
        launch_state(problem, config, grid, x, state, *tables, *places["x_by"], *places["state_by"], *sizes)


IMPLEMENTATION = Implementation(run, (launch_outputs, launch_state), kernels=kernels)
