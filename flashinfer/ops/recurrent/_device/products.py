"""What the products of a recurrence multiply."""

import triton
import triton.language as tl


@triton.jit
def operand(x, OPERAND: tl.constexpr, PRECISION: tl.constexpr):
    """float32 x as a product takes it, rounded to nearest.

    Tensor cores cut the last 13 bits of a tf32 operand off: an error twice as large as that of rounding, and of one
    sign, so that it adds up along a sum.
    """
    if OPERAND == tl.float32 and PRECISION == "tf32":
        bits = (x.to(tl.int32, bitcast=True) + 0x1000) & -0x2000
        return tl.where(x == x, bits.to(tl.float32, bitcast=True), x)
    else:
        return x.to(OPERAND)
