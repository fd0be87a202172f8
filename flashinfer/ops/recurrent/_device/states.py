"""Loads and stores of states of any layout and dtype; float32 in registers."""

import triton
import triton.language as tl

from flashinfer.ops._device.formats import from_fp8, to_fp8


@triton.jit
def state_offsets(row, column, row_stride, column_stride, LAYOUT: tl.constexpr):
    """Offsets of a tile of a state [V, K]. LAYOUT is the contiguous dimension: "k", "v", or "" for neither."""
    if LAYOUT == "k":
        return row[:, None].to(tl.int64) * row_stride + column[None, :]
    elif LAYOUT == "v":
        return row[:, None] + column[None, :].to(tl.int64) * column_stride
    else:
        return row[:, None].to(tl.int64) * row_stride + column[None, :].to(tl.int64) * column_stride


@triton.jit
def tile_offsets(block, row, column, row_stride, column_stride, LAYOUT: tl.constexpr, DENSE: tl.constexpr):
    """Offsets of the rows of a block of a state. With DENSE a row begins where the one before it ends, so that all
    accesses of a thread have one address and constants."""
    if DENSE:
        ROWS: tl.constexpr = row.shape[0]
        KEYS: tl.constexpr = column.shape[0]
        return block * (ROWS * KEYS) + (tl.arange(0, ROWS)[:, None] * KEYS + column[None, :])
    else:
        return state_offsets(row, column, row_stride, column_stride, LAYOUT)


@triton.jit
def load_state(at, inside, DTYPE: tl.constexpr, CAPABILITY: tl.constexpr):
    x = tl.load(at, inside, other=0)
    if DTYPE == "fp8e4nv" or DTYPE == "fp8e5":
        return from_fp8(x, DTYPE, CAPABILITY)
    return x.to(tl.float32)


@triton.jit
def store_state(at, s, inside, DTYPE: tl.constexpr, CAPABILITY: tl.constexpr):
    if DTYPE == "fp8e4nv" or DTYPE == "fp8e5":
        tl.store(at, to_fp8(s, DTYPE, CAPABILITY), inside)
    else:
        tl.store(at, s.to(at.dtype.element_ty), inside)
