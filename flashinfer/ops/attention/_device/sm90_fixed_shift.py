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


# Sums of weights for which the sums of weighted values are not looked at: below LARGE those of values up to 2^115 are
# finite, as they are with maxima and 4096 keys. From HUGE on, the reciprocal would be close to underflow.
LARGE = gl.constexpr(2.0**12)
HUGE = gl.constexpr(2.0**120)
# Results of `verdict`.
FAIR = gl.constexpr(0)
DOUBTFUL = gl.constexpr(1)
FAILED = gl.constexpr(2)


@gluon.jit
def verdict(total, row_ok):
    """For the rows that are `row_ok` and their sums of weights: FAILED if one is NaN or outside of 1 / RANGE to HUGE,
    DOUBTFUL if one is LARGE or more, so that sums of weighted values may have overflowed, else FAIR."""
    level = gl.where((total > 1 / RANGE) & (total < HUGE), gl.where(total < LARGE, FAIR, DOUBTFUL), FAILED)
    level = gl.where(row_ok, level, FAIR).to(gl.int32)
    # In this layout each warp has all rows. A reduction across warps would allocate shared memory for the whole kernel.
    level = gl.convert_layout(level, gl.BlockedLayout([total.shape[0] // 32], [32], [4], [0]))
    return gl.max(level, 0)
