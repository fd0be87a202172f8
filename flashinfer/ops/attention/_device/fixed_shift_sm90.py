"""Softmax weights with a fixed shift on Hopper: the check that no sum overflowed or underflowed.

Weights are 2^(logit - shift), where the shift is not the row's maximum. They are summed in float32 and multiplied in
bf16, which have the same range of exponents. Any shift gives the same result as long as the sums stay in the middle of
that range.
"""

from flashinfer._core.gluon_compat import gl, gluon

# Sums of a row's weights between 1 / RANGE and RANGE are accepted. At RANGE, values up to 2^79 do not overflow float32.
RANGE = gl.constexpr(2.0**48)


@gluon.jit
def any_out_of_range(total, row_ok):
    """Whether for some row that is `row_ok` the sum of weights is NaN or outside of 1 / RANGE to RANGE."""
    in_range = (total > 1 / RANGE) & (total < RANGE) | (row_ok == 0)
    # In this layout each warp has all rows. A reduction across warps would allocate shared memory for the whole kernel.
    in_range = gl.convert_layout(in_range.to(gl.int32), gl.BlockedLayout([total.shape[0] // 32], [32], [4], [0]))
    return gl.min(in_range, 0) == 0
