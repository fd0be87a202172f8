"""One token of a whole layer of Kimi Linear's kind, in Triton: convolution, gates, recurrence, gated RMSNorm.

Grid: (sequences, heads). A program has one head of one sequence: its channels of q, k and v, and its state [K, K]
float32 in registers, which is read once and written once.
Warps: all do the same. Shared memory: sums.
Inputs: x [rows, 3 heads K], weight [3, width, heads K], raw gates [rows, heads, K], raw beta [rows, heads], norm gate
[rows, heads, K]. Outputs: [rows, heads, K]; in place the convolution's state [slots, 3 heads K, width - 1] and the
states [slots, heads, K, K].
Method: Kimi Team, Kimi Linear, 2025, https://arxiv.org/abs/2510.26692.
"""

import triton
import triton.language as tl

from flashinfer._core.implementation import Implementation
from flashinfer._core.launch import Build, Launcher
from flashinfer._core.sizes import power_of_two
from flashinfer.ops.recurrent._device.gates import log_decay, sigmoid, unit_length
from flashinfer.ops.recurrent._device.states import load_state, state_offsets, store_state
from flashinfer.ops.recurrent.launching import arguments, place_types, pointers, size_types


@triton.jit
def window(x, x_by, conv, conv_by, row, slot, channel, inside, WIDTH: tl.constexpr):
    """The inputs of some channels, from the newest to the oldest; those that are too old are copies."""
    now = tl.load(x + row * x_by.row + channel.to(tl.int64) * x_by.channel, inside, other=0)
    at = conv + slot * conv_by.slot + channel.to(tl.int64) * conv_by.channel
    h1 = tl.load(at + (WIDTH - 2) * conv_by.token, inside, other=0)
    h2 = h1
    h3 = h1
    if WIDTH > 2:
        h2 = tl.load(at + (WIDTH - 3) * conv_by.token, inside, other=0)
    if WIDTH > 3:
        h3 = tl.load(at, inside, other=0)
    return now, h1, h2, h3


@triton.jit
def convolved(weight, weight_by, part, channel, inside, now, h1, h2, h3, WIDTH: tl.constexpr):
    """SiLU of the convolution of a window of inputs. `channel` is counted within part 0 (q), 1 (k) or 2 (v)."""
    at = weight + part * weight_by.part + channel.to(tl.int64) * weight_by.channel
    y = tl.load(at + (WIDTH - 1) * weight_by.tap, inside, other=0).to(tl.float32) * now.to(tl.float32)
    y += tl.load(at + (WIDTH - 2) * weight_by.tap, inside, other=0).to(tl.float32) * h1.to(tl.float32)
    if WIDTH > 2:
        y += tl.load(at + (WIDTH - 3) * weight_by.tap, inside, other=0).to(tl.float32) * h2.to(tl.float32)
    if WIDTH > 3:
        y += tl.load(at, inside, other=0).to(tl.float32) * h3.to(tl.float32)
    return y * sigmoid(y)


@triton.jit
def shift(conv, conv_by, slot, channel, inside, now, h1, h2, WIDTH: tl.constexpr):
    """Store the window without its oldest input as the convolution's state."""
    at = conv + slot * conv_by.slot + channel.to(tl.int64) * conv_by.channel
    tl.store(at + (WIDTH - 2) * conv_by.token, now.to(conv.dtype.element_ty), inside)
    if WIDTH > 2:
        tl.store(at + (WIDTH - 3) * conv_by.token, h1, inside)
    if WIDTH > 3:
        tl.store(at, h2, inside)


@triton.jit
def layer_kernel(
    x,
    weight,
    conv,
    gate,
    beta,
    a_log,
    bias,
    state,
    slots,
    norm_gate,
    norm_weight,
    out,
    x_by,
    weight_by,
    conv_by,
    gate_by,
    beta_by,
    state_by,
    norm_by,
    out_by,
    of,
    numbers,
    WIDTH: tl.constexpr,
    GATE: tl.constexpr,
    LAYOUT: tl.constexpr,
    STATE: tl.constexpr,
    KEYS: tl.constexpr,
    CAPABILITY: tl.constexpr,
):
    n = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    i = tl.arange(0, KEYS)
    inside = i < of.dim
    at_out = out + n * out_by.row + head * out_by.head + i
    slot = tl.load(slots + n).to(tl.int64)
    if slot > of.null:
        here = head * of.dim + i
        all = of.heads * of.dim
        q0, q1, q2, q3 = window(x, x_by, conv, conv_by, n, slot, here, inside, WIDTH)
        k0, k1, k2, k3 = window(x, x_by, conv, conv_by, n, slot, here + all, inside, WIDTH)
        v0, v1, v2, v3 = window(x, x_by, conv, conv_by, n, slot, here + 2 * all, inside, WIDTH)
        # Several warps read the same channels and one writes them: all reads come before the write.
        tl.debug_barrier()
        shift(conv, conv_by, slot, here, inside, q0, q1, q2, WIDTH)
        shift(conv, conv_by, slot, here + all, inside, k0, k1, k2, WIDTH)
        shift(conv, conv_by, slot, here + 2 * all, inside, v0, v1, v2, WIDTH)
        query = unit_length(convolved(weight, weight_by, 0, here, inside, q0, q1, q2, q3, WIDTH))
        key = unit_length(convolved(weight, weight_by, 1, here, inside, k0, k1, k2, k3, WIDTH))
        value = convolved(weight, weight_by, 2, here, inside, v0, v1, v2, v3, WIDTH)

        rate = tl.exp(tl.load(a_log + head))
        x_gate = tl.load(gate + n * gate_by.row + head * gate_by.head + i, inside, other=0).to(tl.float32)
        if bias is not None:
            x_gate += tl.load(bias + here, inside, other=0).to(tl.float32)
        decay = tl.exp(log_decay(x_gate, rate, numbers, GATE))
        share = sigmoid(tl.load(beta + n * beta_by.row + head * beta_by.head).to(tl.float32))
        both = inside[:, None] & inside[None, :]
        state_at = slot * state_by.slot + head * state_by.head
        state_at += state_offsets(i, i, state_by.row, state_by.column, LAYOUT)
        s = load_state(state + state_at, both, STATE, CAPABILITY) * decay[None, :]
        s += (share * (value - tl.sum(s * key[None, :], 1)))[:, None] * key[None, :]
        store_state(state + state_at, s, both, STATE, CAPABILITY)
        o = tl.sum(s * query[None, :], 1) * numbers.scale
        o *= tl.rsqrt(tl.sum(o * o, 0) / of.dim + numbers.eps) * tl.load(norm_weight + i, inside, other=0)
        at = norm_gate + n * norm_by.row + head * norm_by.head
        o *= sigmoid(tl.load(at + i, inside, other=0).to(tl.float32))
        tl.store(at_out, o.to(out.dtype.element_ty), inside)
    else:
        tl.store(at_out, tl.zeros_like(i).to(out.dtype.element_ty), inside)


_ROW = ("row", "head")
_PLACES = {"x_by": ("row", "channel"), "weight_by": ("part", "tap", "channel"), "conv_by": ("slot", "channel", "token")}
_PLACES |= {"gate_by": _ROW, "beta_by": _ROW, "state_by": ("slot", "head", "row", "column")}
_PLACES |= {"norm_by": _ROW, "out_by": _ROW}
_WHOLE = {"k": ("slot", "head", "row"), "v": ("slot", "head", "column"), "": ()}


def _build(problem, config):
    kinds = {"x": problem.dtype, "weight": problem.weight_dtype, "conv": problem.conv_dtype}
    kinds |= {"gate": problem.gate_dtype, "beta": problem.beta_dtype, "a_log": "fp32", "bias": problem.bias_dtype}
    kinds |= {"state": problem.state_dtype, "slots": problem.index, "norm_gate": problem.dtype, "norm_weight": "fp32"}
    kinds |= {"out": problem.out_dtype}
    types = pointers(kinds, ("state",) if problem.aligned else ())
    whole = {"state_by": problem.state_dtype} if problem.aligned else {}
    types |= place_types(_PLACES, whole, {"state_by": _WHOLE[problem.layout]})
    types |= size_types(("heads", "dim", "null"), dim=problem.dim)
    types |= {f"numbers.{name}": "fp32" for name in ("scale", "eps", "lower", "sharp", "threshold")}
    constants = {"WIDTH": problem.width, "GATE": problem.gate, "LAYOUT": problem.layout, "STATE": problem.state_dtype}
    constants |= {"KEYS": power_of_two(problem.dim, 16), "CAPABILITY": config.capability}
    return Build(layer_kernel, types, constants, num_warps=config.num_warps)


launch_layer = Launcher("delta_layer", _build)


def run(problem, config, tokens, gates, states, out, scale, norm):
    """Process one token of every sequence; `LayerTokens` and `LayerStates` of operands.py describe the tensors."""
    heads, dim = out.shape[1:]
    given = [tokens.x, tokens.weight, states.conv, tokens.gate, tokens.beta, gates.a_log, gates.bias, states.state]
    given += [states.slots, norm.gate, norm.weight, out]
    places = [tokens.x.stride(), tokens.weight.stride(), states.conv.stride(), tokens.gate.stride()[:2]]
    places += [tokens.beta.stride(), states.state.stride(), norm.gate.stride()[:2], out.stride()[:2]]
    numbers = scale, norm.eps, gates.lower, gates.sharp, gates.threshold
    sizes = heads, dim, states.null
    launch_layer(problem, config, (len(out), heads, 1), *arguments(given, places), *sizes, *numbers)


IMPLEMENTATION = Implementation(run, (launch_layer,))
