"""FP8 on its way to shared memory of a Hopper kernel: words of four elements, loaded by four warps, stored widened."""

from flashinfer._core.gluon_compat import gl, gluon, reinterpret


@gluon.constexpr_function
def _widening(FORMAT, BF16):
    """PTX that takes a word of four FP8 elements ("e4m3", "e5m2") for two words of two elements, exactly."""
    out = "{ .reg .b16 lo, hi; .reg .b32 h; .reg .b16 a, b; .reg .f32 x, y; mov.b32 {lo, hi}, $2;"
    for i, half in enumerate(("lo", "hi")):
        if BF16:
            out += f"cvt.rn.f16x2.{FORMAT}x2 h, {half}; mov.b32 {{a, b}}, h; cvt.f32.f16 x, a; cvt.f32.f16 y, b;"
            out += f"cvt.rn.bf16x2.f32 ${i}, y, x;"
        else:
            out += f"cvt.rn.f16x2.{FORMAT}x2 ${i}, {half};"
    return out + "}"


@gluon.jit
def load_words(source, at, there, FIRST: gl.constexpr, WORDS: gl.constexpr):
    """Words FIRST ... FIRST + WORDS of the rows at offsets `at`; zeros where there is none."""
    # Four lanes of a row, eight rows: stored widened, 16 bytes of eight lanes lie in different banks.
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 4], [8, 4], [4, 1], [1, 0])
    d = FIRST + gl.arange(0, WORDS, gl.SliceLayout(0, LAYOUT))
    return gl.load(source + at[:, None] + d[None, :], mask=there[:, None], other=0)


@gluon.jit
def store_widened(tile, FIRST: gl.constexpr, words, FORMAT: gl.constexpr):
    """Store FP8 elements as a tile's columns from FIRST on, in the tile's type."""
    ROWS_IN: gl.constexpr = tile.shape[0]
    COLUMNS: gl.constexpr = tile.shape[1] // 2
    LAYOUT: gl.constexpr = gl.NVMMASharedLayout.get_default_for([ROWS_IN, COLUMNS], gl.int32)
    low, high = gl.inline_asm_elementwise(
        _widening(FORMAT, tile.dtype == gl.bfloat16), "=r,=r,r", [words], dtype=(gl.int32, gl.int32), is_pure=True,
        pack=1,
    )  # fmt: skip
    wide = gl.join(low, high).reshape([ROWS_IN, 2 * words.shape[1]])
    to = reinterpret(tile, gl.int32, [ROWS_IN, COLUMNS], LAYOUT)
    to.slice(FIRST // 2, 2 * words.shape[1], dim=1).store(wide)
