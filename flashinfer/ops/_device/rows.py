"""Offsets of rows and columns of a strided tensor, with the alignment that the compiler may assume."""

import triton
import triton.language as tl

from flashinfer._core.checks import torch_dtype


def unit(dtype: str, aligned: bool) -> int:
    """UNIT of the functions below: the elements of `dtype` in 16 bytes where the tensors are `aligned`, else 1."""
    return 16 // torch_dtype(dtype).itemsize if aligned else 1


def pointer(dtype: str, aligned: bool) -> str:
    """The type of a pointer parameter to elements of `dtype`."""
    return f"*{dtype}:16" if aligned else f"*{dtype}"


@triton.jit
def multiple(x, UNIT: tl.constexpr):
    """x, which is a multiple of UNIT, in a way that shows the compiler so; 16-byte accesses depend on it."""
    return x // UNIT * UNIT


@triton.jit
def row_offset(row, inner, outer_stride, inner_stride, UNIT: tl.constexpr):
    """Offset in elements, 64 bits, of row `row` of a tensor [outer, inner, columns]; UNIT divides both strides."""
    # The division delays the loads by 0.1 us, and most tensors have no inner rows. The compiler does not see that the
    # result of a branch is a multiple of UNIT, so `multiple` is applied after it.
    if inner == 1:
        offset = row.to(tl.int64) * outer_stride
    else:
        offset = (row // inner).to(tl.int64) * outer_stride + (row % inner).to(tl.int64) * inner_stride
    return multiple(offset, UNIT)


@triton.jit
def column_offset(column, stride, UNIT: tl.constexpr):
    """Offset in elements of column `column` of a row; rows of aligned tensors (UNIT > 1) are contiguous."""
    return column if UNIT > 1 else column.to(tl.int64) * stride
