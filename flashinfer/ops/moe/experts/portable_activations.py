"""The experts' activations in Triton: of one value, or of a factor and a gate.

Values are float32 in registers. ACT and SHAPE are fields of the room's Problem. Sources: Shazeer, GLU Variants Improve
Transformer, 2020, https://arxiv.org/abs/2002.05202, and the models that the activations are named after.
"""

import triton
import triton.language as tl


@triton.jit
def sigmoid(x):
    return 1 / (1 + tl.exp(-x))


@triton.jit
def bounded(x, bound):
    """bound * tanh(x / bound), with full relative accuracy for small x / bound.

    tanh(t) = 2 * sigmoid(2 t) - 1 cancels where t is small. Up to 0.03 it is t * (1 - t^2 / 3 + 2 t^4 / 15); the next
    term is below 4e-11.
    """
    t = x / bound
    square = t * t
    small = x * (1 - square * (1.0 / 3 - square * (2.0 / 15)))
    return tl.where(square < 0.0009, small, bound * (2 * sigmoid(2 * t) - 1))


@triton.jit
def gelu_tanh(x):
    return x * sigmoid(1.5957691216057308 * (x + 0.044715 * x * x * x))


@triton.jit
def gated(factor, gate, alpha, beta, limit, ACT: tl.constexpr, SHAPE: tl.constexpr):
    """act(gate) * factor, with alpha, beta and limit where SHAPE has "a", "b" or "l"."""
    a: tl.constexpr = SHAPE == "a" or SHAPE == "ab" or SHAPE == "al" or SHAPE == "abl"
    b: tl.constexpr = SHAPE == "b" or SHAPE == "ab" or SHAPE == "bl" or SHAPE == "abl"
    c: tl.constexpr = SHAPE == "l" or SHAPE == "al" or SHAPE == "bl" or SHAPE == "abl"
    if c or ACT == "swiglu_step":
        factor = tl.minimum(tl.maximum(factor, -limit), limit)
        if ACT != "swiglu_step":
            gate = tl.minimum(gate, limit)
    if ACT == "situ" or ACT == "situ_gate":
        if ACT == "situ":
            factor = bounded(factor, beta)
        return bounded(gate, alpha) * sigmoid(gate) * factor
    if ACT == "geglu":
        gate = 0.5 * gate * (1 + tl.erf(gate * 0.7071067811865476))
    elif ACT == "geglu_tanh":
        gate = gelu_tanh(gate)
    elif a:
        gate *= sigmoid(alpha * gate)
    else:
        gate *= sigmoid(gate)
    if ACT == "swiglu_step":
        gate = tl.minimum(gate, limit)
    if b:
        factor += beta
    return gate * factor


@triton.jit
def plain(y, limit, ACT: tl.constexpr):
    """act(y); `limit` is used by "clamped_relu2" alone."""
    if ACT == "silu":
        return y * sigmoid(y)
    elif ACT == "gelu":
        return 0.5 * y * (1 + tl.erf(y * 0.7071067811865476))
    elif ACT == "relu":
        return tl.maximum(y, 0.0)
    elif ACT == "relu2":
        y = tl.maximum(y, 0.0)
        return y * y
    elif ACT == "clamped_relu2":
        y = bounded(tl.maximum(y, 0.0), limit)
        return y * y
    else:
        return y
