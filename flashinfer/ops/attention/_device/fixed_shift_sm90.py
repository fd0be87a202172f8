"""Weights with a fixed shift on Hopper: whether they served.

A fixed shift is not the maximum of its row. Weights are 2^(logit - shift), summed in float32 and multiplied in bf16,
whose ranges are alike. Any shift gives the same result, as long as no sum leaves the middle of that range.
"""

from flashinfer._core.gluon_compat import gl, gluon

# The sum of a row's weights may be RANGE, and 1 / RANGE: from there to the end of float32 is room for values of 2^79.
RANGE = gl.constexpr(2.0**48)


@gluon.jit
def any_out_of_range(total, row_ok):
    """Whether the sum of weights of some row that is `row_ok` is not between 1 / RANGE and RANGE, or NaN."""
    served = (total > 1 / RANGE) & (total < RANGE) | (row_ok == 0)
    # In a layout where each warp has all rows: shared memory of a reduction across warps would be kept for all tiles.
    served = gl.convert_layout(served.to(gl.int32), gl.BlockedLayout([total.shape[0] // 32], [32], [4], [0]))
    return gl.min(served, 0) == 0
