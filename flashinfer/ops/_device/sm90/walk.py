"""In which order the blocks of a persistent kernel take its work.

A block takes work number program, program + programs, ... (`range`), or the same with every other wave backwards
(`snake`), or whatever is left when it comes to ask (`draw`).
"""

from flashinfer._core.gluon_compat import gl, gluon
from flashinfer.ops._device.sm90.registers import programs


@gluon.jit
def raster(number, tiles_m, tiles_n, GROUP: gl.constexpr):
    """(tile along M, tile along N): down GROUP tiles of a column, then the next column, for the L2 cache.

    With 4 x 3 tiles and GROUP 2, numbers stand so:  0 2 4 / 1 3 5 / 6 8 10 / 7 9 11.
    """
    strip = GROUP * tiles_n
    first = number // strip * GROUP
    height = gl.minimum(tiles_m - first, GROUP)
    rest = number % strip
    return first + rest % height, rest // height


@gluon.jit
def snake(wave):
    """The block's wave-th work: every other wave runs backwards, so that who had the longest item has the shortest."""
    blocks = gl.num_programs(0)
    at = gl.program_id(0)
    return wave * blocks + gl.where(wave % 2 == 0, at, blocks - 1 - at)


@gluon.jit
def draw(counter, works):
    """The next work that no block has; past the last one, no less than `works`.

    Each block begins with work number program, and draws once for each work that it has: `works` draws in all. The
    last one puts the counter back to 0.
    """
    drawn = gl.atomic_add(counter, 1, sem="relaxed")
    if drawn == works - 1:
        gl.store(counter, 0)
    return programs() + drawn
