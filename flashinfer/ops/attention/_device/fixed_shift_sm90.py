"""Weights of a fixed shift: whether they served, and how those who compute say so."""

from flashinfer._core.gluon_compat import gl, gluon

# What the sum of a row's weights of a fixed shift may be, and one over: from there to the end of float32 is room for
# values of 2^79.
RANGE = gl.constexpr(2.0**48)


@gluon.jit
def any_unfair(total, there):
    """Whether the weights of some row that is `there` are not in the middle of what float32 holds, by their sums."""
    fair = (total > 1 / RANGE) & (total < RANGE) | (there == 0)
    # Each warp looks at all rows: what only some threads read in a reduction of warps is kept from tile to tile.
    fair = gl.convert_layout(fair.to(gl.int32), gl.BlockedLayout([total.shape[0] // 32], [32], [4], [0]))
    return gl.min(fair, 0) == 0


@gluon.jit
def one_word(number):
    """A number as what goes to shared memory."""
    return gl.full([1], number, gl.int32, gl.BlockedLayout([1], [32], [gl.num_warps()], [0]))


@gluon.jit
def read_word(place):
    return gl.max(place.load(gl.BlockedLayout([1], [32], [gl.num_warps()], [0])), 0)
