"""Where keys and values are: rows of a ragged tensor, or rows of pages found through a table."""

import triton
import triton.language as tl


@triton.jit
def page_ids(positions, there, kv_base, kv_indices, PAGE_SIZE: tl.constexpr):
    """Entries of the page table for a request's keys at `positions`; nothing of use for a ragged source."""
    if PAGE_SIZE == 0:
        return positions
    return tl.load(kv_indices + kv_base + positions // PAGE_SIZE, mask=there, other=0)


@triton.jit
def offsets_in(pages, positions, kv_base, stride_page, stride_n, PAGE_SIZE: tl.constexpr):
    """Offsets, in elements, of the rows of a request's keys at `positions`; int64, for pools of any size."""
    if PAGE_SIZE == 0:
        return (kv_base + positions).to(tl.int64) * stride_n
    return pages.to(tl.int64) * stride_page + (positions % PAGE_SIZE).to(tl.int64) * stride_n


@triton.jit
def row_offsets(positions, there, kv_base, kv_indices, stride_page, stride_n, PAGE_SIZE: tl.constexpr):
    """Both in one."""
    pages = page_ids(positions, there, kv_base, kv_indices, PAGE_SIZE)
    return offsets_in(pages, positions, kv_base, stride_page, stride_n, PAGE_SIZE)


@triton.jit
def widen(x, DTYPE: tl.constexpr, NATIVE_FP8: tl.constexpr, to: tl.constexpr):
    """Keys or values as the type they are multiplied in. FP8 comes as bytes, e4m3 ("fp8e4nv") or e5m2 ("fp8e5").

    Both are float16 with fewer bits. e5m2 is its upper byte. e4m3 shifted into place has an exponent bias 8 smaller,
    which a factor of 256 restores, subnormals included; its one NaN pattern has to be named. (OCP 8-bit Floating Point
    Specification 1.0.)
    """
    if DTYPE == "fp8e5":
        return (x.to(tl.uint16) << 8).to(tl.float16, bitcast=True).to(to)
    if DTYPE == "fp8e4nv":
        if NATIVE_FP8:
            return x.to(tl.float8e4nv, bitcast=True).to(to)
        bits = x.to(tl.uint16)
        magnitude = bits & 0x7F
        half = (magnitude << 7).to(tl.float16, bitcast=True) * 256.0
        half = tl.where((bits & 0x80) != 0, -half, half)
        return tl.where(magnitude == 0x7F, float("nan"), half).to(to)
    return x.to(to)


@triton.jit
def fit_half(x, AXIS: tl.constexpr):
    """bfloat16 rows as float16 times a power of two each, and these powers; for products with FP8, which float16 holds.

    The largest element of a row comes to lie in [2^14, 2^15). Elements down to 2^-28 of it are kept exactly, and what
    smaller ones lose is 2^-39 of it: less than float32 accumulation does.
    """
    most = tl.max(tl.abs(x.to(tl.float32)), AXIS, keep_dims=True)
    power = (most.to(tl.int32, bitcast=True) & 0x7F800000).to(tl.float32, bitcast=True)
    power = tl.maximum(power, 1e-30)
    return (x.to(tl.float32) * (16384.0 / power)).to(tl.float16), power * (1.0 / 16384.0)
