"""FP8 keys and values on Hopper under wider queries: codes are converted in registers, and stored as wgmma reads them.

A thread loads 16 codes, four words, and stores them as 32 bytes. A tile's rows of 128 bytes are swizzled: the 16 bytes
number c of row r lie at place c ^ (r % 8). Four lanes have the 64 columns of a row, each of them the 16 bytes 2 l and
2 l + 1. In the first store lanes 0 to 3 of row 0 write places 0, 2, 4, 6, and lanes 4 to 7 of row 1 places 1, 3, 5, 7:
all banks once.
"""

from flashinfer._core.gluon_compat import gl, gluon, reinterpret

# The formats as PTX has them.
FORMATS = {"fp8e4nv": "e4m3", "fp8e5": "e5m2"}


@gluon.constexpr_function
def lanes(WARPS):
    """The layout of words [rows, words of four codes] of WARPS warps."""
    return gl.BlockedLayout([1, 4], [8, 4], [WARPS, 1], [1, 0])


@gluon.constexpr_function
def _widening(FORMAT, BF16):
    """PTX that converts a word of four FP8 elements ("e4m3", "e5m2") to two words of two elements, exactly."""
    out = "{ .reg .b16 lo, hi; .reg .b32 h; .reg .b16 a, b; .reg .f32 x, y; mov.b32 {lo, hi}, $2;"
    for i, half in enumerate(("lo", "hi")):
        if BF16:
            out += f"cvt.rn.f16x2.{FORMAT}x2 h, {half}; mov.b32 {{a, b}}, h; cvt.f32.f16 x, a; cvt.f32.f16 y, b;"
            out += f"cvt.rn.bf16x2.f32 ${i}, y, x;"
        else:
            out += f"cvt.rn.f16x2.{FORMAT}x2 ${i}, {half};"
    return out + "}"


@gluon.jit
def store_widened(tile, ROW: gl.constexpr, COLUMN: gl.constexpr, words, FORMAT: gl.constexpr):
    """Store FP8 elements as a part of a tile, from ROW and COLUMN on, in the tile's dtype."""
    COLUMNS: gl.constexpr = tile.shape[1] // 2
    LAYOUT: gl.constexpr = gl.NVMMASharedLayout.get_default_for([tile.shape[0], COLUMNS], gl.int32)
    low, high = gl.inline_asm_elementwise(
        _widening(FORMAT, tile.dtype == gl.bfloat16), "=r,=r,r", [words], dtype=(gl.int32, gl.int32), is_pure=True,
        pack=1,
    )  # fmt: skip
    wide = gl.join(low, high).reshape([words.shape[0], 2 * words.shape[1]])
    to = reinterpret(tile, gl.int32, [tile.shape[0], COLUMNS], LAYOUT)
    to.slice(ROW, words.shape[0], dim=0).slice(COLUMN // 2, 2 * words.shape[1], dim=1).store(wide)
