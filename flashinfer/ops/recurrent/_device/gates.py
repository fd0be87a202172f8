"""Decays from raw gates, and other functions of a recurrent layer's inputs."""

import triton
import triton.language as tl


@triton.jit
def sigmoid(x):
    return 1 / (1 + tl.exp(-x))


@triton.jit
def log_one_plus(x):
    """log(1 + x) of x >= 0 with the relative accuracy of float32 where x is small (Goldberg 1991, theorem 4)."""
    sum = 1 + x
    return tl.where(sum == 1, x, tl.log(sum) * (x / tl.where(sum == 1, 1, sum - 1)))


@triton.jit
def at_least(log, LEAST: tl.constexpr):
    """The larger of both; NaN stays NaN, so that a gate of NaN does not pass for one that forgets."""
    return tl.maximum(log, LEAST, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def log_decay(x, rate, numbers, GATE: tl.constexpr):
    """The logarithm of the decay for a float32 gate x with its bias added. A "log" gate is that logarithm."""
    if GATE == "softplus":
        x *= numbers.sharp
        soft = tl.maximum(x, 0) + log_one_plus(tl.exp(-tl.abs(x)))
        return -rate * tl.where(x > numbers.threshold, x, soft) / numbers.sharp
    elif GATE == "bounded":
        return numbers.lower * sigmoid(rate * x)
    else:
        return x


@triton.jit
def unit_length(x):
    """A vector over its L2 norm, x * rsqrt(sum(x^2) + 1e-6)."""
    return x * tl.rsqrt(tl.sum(x * x, 0) + 1e-6)
