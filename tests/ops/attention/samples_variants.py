"""Variants for tests, at the top of a module: another process can import them."""

import triton
import triton.language as tl

from flashinfer import AttentionVariant

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


@triton.jit
def wrong(logits, batch, q_pos, kv_pos, head, params):
    shifted = logits + 1.0
    return shifted * params.nowhere


@triton.jit
def not_boolean(logits, batch, q_pos, kv_pos, head, params):
    return kv_pos - q_pos


@triton.jit
def sorted_logits(logits, batch, q_pos, kv_pos, head, params):
    return tl.sort(logits)


@triton.jit
def past_the_end(logits, batch, q_pos, kv_pos, head, params):
    return logits + tl.load(params.slopes + kv_pos + 100)


def shifted_by(number):
    """A variant's function that reads a number of its surroundings."""
    NUMBER: tl.constexpr = tl.constexpr(number)

    @triton.jit
    def shifted(logits, batch, q_pos, kv_pos, head, params):
        return logits + NUMBER * kv_pos

    return shifted


VARIANTS = {
    "soft cap": AttentionVariant(soft_cap, params={"cap": "fp32"}),
    "alibi": AttentionVariant(alibi, params={"slopes": "*fp32"}),
    "documents": AttentionVariant(mask=same_document, params={"documents": "*i32", "longest": "i32"}),
    "both": AttentionVariant(cold_heads, strided),
    "sigmoid": AttentionVariant(sigmoid, params={"bias": "fp32"}, use_softmax=False),
    "own mask": AttentionVariant(mask=strided, owns_mask=True),
    "wrong": AttentionVariant(wrong),
    "not boolean": AttentionVariant(mask=not_boolean),
}
