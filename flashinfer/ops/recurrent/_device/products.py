"""Operands of tl.dot in recurrent kernels."""

import triton
import triton.language as tl


@triton.jit
def operand(x, OPERAND: tl.constexpr, PRECISION: tl.constexpr):
    """float32 x as an operand of tl.dot, rounded to nearest.

    Tensor cores truncate the last 13 bits of a tf32 operand. The truncation error is up to twice a rounding error, and
    of one sign, so it accumulates in a sum.
    """
    if OPERAND == tl.float32 and PRECISION == "tf32":
        bits = (x.to(tl.int32, bitcast=True) + 0x1000) & -0x2000
        return tl.where(x == x, bits.to(tl.float32, bitcast=True), x)
    else:
        return x.to(OPERAND)
