"""The order in which the thread blocks of a persistent kernel take work items.

Three orders are in use. With `range` block b of B takes items b, b + B, b + 2 B, ... With `snake` every other wave is
reversed: with 3 blocks and 9 items, block 0 takes items 0, 5, 6. With `draw` a block takes the next free item from a
counter in global memory.
"""

from flashinfer._core.gluon_compat import gl, gluon
from flashinfer.ops._device.sm90.registers import programs


@gluon.jit
def raster(number, tiles_m, tiles_n, GROUP: gl.constexpr):
    """(tile along M, tile along N) of tile `number`: GROUP tiles down a column, then the next column, for the L2 cache.

    With 4 x 3 tiles and GROUP 2, the four rows of tiles have the numbers 0 2 4, 1 3 5, 6 8 10 and 7 9 11.
    """
    strip = GROUP * tiles_n
    first = number // strip * GROUP
    height = gl.minimum(tiles_m - first, GROUP)
    rest = number % strip
    return first + rest % height, rest // height


@gluon.jit
def snake(wave):
    """The block's work item in wave `wave`. Items are sorted by length: the block with the longest item of one wave has
    the shortest of the next."""
    blocks = gl.num_programs(0)
    block = gl.program_id(0)
    return wave * blocks + gl.where(wave % 2 == 0, block, blocks - 1 - block)


@gluon.jit
def draw(counter, works):
    """The next work item that no block has taken; a number of `works` or more when none is left.

    `works` is the number of items. Each block begins with item program(), and draws once after each item: this makes
    `works` draws in all. The last one sets the counter back to 0 for the next launch.
    """
    drawn = gl.atomic_add(counter, 1, sem="relaxed")
    if drawn == works - 1:
        gl.store(counter, 0)
    return programs() + drawn
