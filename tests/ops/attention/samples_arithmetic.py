"""Functions of a float and two integers that say what device functions mean by what they write."""

import triton
import triton.language as tl

STEP = tl.constexpr(3)


@triton.jit
def apply(function: tl.constexpr, x, i, j, out, N: tl.constexpr):
    at = tl.arange(0, N)
    result = function(tl.load(x + at), tl.load(i + at), tl.load(j + at))
    tl.store(out + at, result.to(tl.float64))


@triton.jit
def towards_zero(x, i, j):
    return (i // STEP) * 100 + i % STEP + (i // j) * 1000


@triton.jit
def remainder_of_floats(x, i, j):
    return x % 0.75


@triton.jit
def bits(x, i, j):
    return ((i << 2) ^ (j >> 1)) | (i & 5) + ~j


@triton.jit
def quotient(x, i, j):
    return i / j + 1 / j


@triton.jit
def casts(x, i, j):
    return (x * 100).to(tl.int32) + i.to(tl.float32) * 0.5 + (i.to(tl.int64) * 3000000000).to(tl.float32)


@triton.jit
def narrow(x, i, j):
    return (i.to(tl.uint8) + 250).to(tl.float32) + (i.to(tl.int8) + 100).to(tl.float32)


@triton.jit
def halves(x, i, j):
    h = x.to(tl.float16)
    return (h * 3).to(tl.float32) + (h / h) + (h + x)


@triton.jit
def booleans(x, i, j):
    both = (i > j) & (x < 0.5) | ~(i >= 2)
    return both.to(tl.int32) + 1 + (both ^ (j == 3)).to(tl.float32)


@triton.jit
def choices(x, i, j):
    return tl.where(i > 0, 1, 0) * x + tl.where(j > 2, x, -1.5) + tl.where(i == j, i, j)


@triton.jit
def extremes(x, i, j):
    return tl.maximum(x, 0.25) + tl.minimum(i, j) + tl.maximum(i, 2) + tl.minimum(x, 0.5) + tl.clamp(x, -0.5, 0.5)


@triton.jit
def functions(x, i, j):
    y = tl.abs(x) + 0.5
    total = tl.exp(x) + tl.exp2(x) + tl.log(y) + tl.log2(y) + tl.sqrt(y) + tl.rsqrt(y) + tl.sin(x) + tl.cos(x)
    return total + tl.erf(x) + tl.floor(x * 3) + tl.ceil(x * 3) + tl.sigmoid(x) + tl.fma(x, y, 1.0) + x.abs()


@triton.jit
def loops(x, i, j):
    total = x
    for step in tl.static_range(1, 4):
        if step % 2 == 1:
            total += shifted(total, step)
    total *= -1
    return total - tl.cdiv(j, 2) + tl.zeros_like(x)


@triton.jit
def shifted(x, by, SCALE: tl.constexpr = STEP):
    return x + by * SCALE


ALL = (
    towards_zero, remainder_of_floats, bits, quotient, casts, narrow, halves, booleans, choices, extremes, functions,
    loops,
)  # fmt: skip
