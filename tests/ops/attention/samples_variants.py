"""Variants for tests, at the top of a module: another process can import them."""

import triton
import triton.language as tl

LN10 = tl.constexpr(2.302585092994046)


@triton.jit
def tanh(x):
    return 2.0 * tl.sigmoid(2.0 * x) - 1.0


@triton.jit
def soft_cap(logits, batch, q_pos, kv_pos, head, params):
    return params.cap * tanh(logits / params.cap)


@triton.jit
def alibi(logits, batch, q_pos, kv_pos, head, params):
    return logits + tl.load(params.slopes + head) * (kv_pos - q_pos)


@triton.jit
def sigmoid(logits, batch, q_pos, kv_pos, head, params):
    return tl.sigmoid(logits + params.bias)


@triton.jit
def same_document(logits, batch, q_pos, kv_pos, head, params):
    first = batch * params.longest
    return tl.load(params.documents + first + q_pos) == tl.load(params.documents + first + kv_pos)


@triton.jit
def strided(logits, batch, q_pos, kv_pos, head, params):
    """Every third key before a query, seen from it: a remainder of numbers below zero, too."""
    return (kv_pos - q_pos) % 3 == -(batch % 2)


@triton.jit
def cold_heads(logits, batch, q_pos, kv_pos, head, params):
    """Keys of odd positions hidden in odd heads, by -inf; the rest divided by ln 10."""
    hidden = (head % 2 == 1) & (kv_pos % 2 == 1)
    return tl.where(hidden, float("-inf"), logits / LN10)
