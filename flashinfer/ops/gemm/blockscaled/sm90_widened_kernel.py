"""out = alpha * A B^T on Hopper for A in bfloat16 and B in codes with factors, which are widened on their way to wgmma.

Grid: any number of persistent blocks, over tiles of the result and K slices. Warps: two consumer warpgroups, as of
dense products; a producer warpgroup for each tile of B in a stage, the first of which issues the copies of A. Producers
widen B: they load codes and factors into registers LEAD blocks of K ahead, and store codes times factors, bfloat16, in
the swizzled tile that wgmma reads. Shared memory: the ring of tiles, and a staging buffer for 16-bit output.

Inputs: a [batch, m, k], b [batch, n, k] in e2m1, e4m3 or e5m2, b_scale: flat factors of b. K is a multiple of 128.
Outputs: out [batch, m, n]. Method: OCP Microscaling Formats (MX) Specification 1.0, 2023.
"""

from flashinfer._core.gluon_compat import block_barrier, gl, gluon, reinterpret, tma_load
from flashinfer.ops._device.sm90.mma import ROWS, Ring, Settings, make_ring
from flashinfer.ops._device.sm90.store import make_staging
from flashinfer.ops.gemm._device.sm90_slices import Size, consume, size_of

_BITS = {"e2m1": 4, "fp8e4nv": 8, "fp8e5": 8}

# A word of eight e2m1 codes ($4) times a factor, twice in a word ($5): four words of two bfloat16 each.
#
# prmt looks up four codes at a time: a magnitude selects the high byte of its bfloat16 from one table of eight bytes,
# the low byte from another. Signs go to the highest bits of the high bytes.
_FROM_E2M1 = """
{
.reg .b32 magnitudes, shifted, signs, high, low, none;
mov.b32 none, 0x80008000;
and.b32 magnitudes, $4, 0x77777777;
shl.b32 shifted, $4, 4;
prmt.b32 high, 0x3F3F3F00, 0x40404040, magnitudes;
prmt.b32 low, 0xC0800000, 0xC0804000, magnitudes;
prmt.b32 signs, shifted, $4, 0x5140;
lop3.b32 high, high, signs, 0x80808080, 0xF8;
prmt.b32 $0, low, high, 0x5140;
prmt.b32 $1, low, high, 0x7362;
shr.u32 magnitudes, magnitudes, 16;
prmt.b32 high, 0x3F3F3F00, 0x40404040, magnitudes;
prmt.b32 low, 0xC0800000, 0xC0804000, magnitudes;
prmt.b32 signs, shifted, $4, 0x7362;
lop3.b32 high, high, signs, 0x80808080, 0xF8;
prmt.b32 $2, low, high, 0x5140;
prmt.b32 $3, low, high, 0x7362;
fma.rn.bf16x2 $0, $0, $5, none;
fma.rn.bf16x2 $1, $1, $5, none;
fma.rn.bf16x2 $2, $2, $5, none;
fma.rn.bf16x2 $3, $3, $5, none;
}
"""
# A word of four FP8 codes ($2) times a factor, twice in a word ($3): two words of two bfloat16 each.
_FROM_FP8 = """
{
.reg .b16 first, second, a, b;
.reg .b32 h, none;
.reg .f32 x, y;
mov.b32 none, 0x80008000;
mov.b32 {first, second}, $2;
cvt.rn.f16x2.KINDx2 h, first;
mov.b32 {a, b}, h;
cvt.f32.f16 x, a;
cvt.f32.f16 y, b;
cvt.rn.bf16x2.f32 h, y, x;
fma.rn.bf16x2 $0, h, $3, none;
cvt.rn.f16x2.KINDx2 h, second;
mov.b32 {a, b}, h;
cvt.f32.f16 x, a;
cvt.f32.f16 y, b;
cvt.rn.bf16x2.f32 h, y, x;
fma.rn.bf16x2 $1, h, $3, none;
}
"""
# An e4m3 in the lowest byte as bfloat16, twice.
_FROM_UE4M3 = """
{
.reg .b16 code, a, b;
.reg .b32 h;
.reg .f32 x;
cvt.u16.u32 code, $1;
cvt.rn.f16x2.e4m3x2 h, code;
mov.b32 {a, b}, h;
cvt.f32.f16 x, a;
cvt.rn.bf16x2.f32 $0, x, x;
}
"""
_TEXTS = {
    "e2m1": _FROM_E2M1,
    "fp8e4nv": _FROM_FP8.replace("KIND", "e4m3"),
    "fp8e5": _FROM_FP8.replace("KIND", "e5m2"),
    "ue4m3": _FROM_UE4M3,
}


@gluon.constexpr_function
def _words(FORMAT, BLOCK_K):
    """Words of codes of a row of a tile."""
    return BLOCK_K * _BITS[FORMAT] // 32


@gluon.constexpr_function
def _words_of_factor(FORMAT, WIDTH):
    return WIDTH * _BITS[FORMAT] // 32


@gluon.constexpr_function
def _by_words(WORDS):
    """The layout of a part of B, [rows, words]: a thread has four words of a row, 16 bytes."""
    return gl.BlockedLayout([1, 4], [128 // WORDS, WORDS // 4], [4, 1], [1, 0])


@gluon.constexpr_function
def _by_factors(WORDS, OF_FACTOR):
    """The same registers as [rows, factors, words of a factor]."""
    inside = min(OF_FACTOR, 4)
    lanes = WORDS // 4
    sharing = OF_FACTOR // inside
    return gl.BlockedLayout(
        [1, 4 // inside, inside], [128 // WORDS, lanes // sharing, sharing], [4, 1, 1], [2, 1, 0]
    )  # fmt: skip


@gluon.constexpr_function
def _text(NAME):
    return _TEXTS[NAME]


@gluon.jit
def _stored(row, SHUFFLED: gl.constexpr):
    """Where a row of B is stored: `shuffle_matrix_a` stores row 4 j + i of each 32 as row 8 i + j."""
    if SHUFFLED:
        inside = row % 32
        row = row - inside + inside % 4 * 8 + inside // 4
    return row


@gluon.jit
def _first_word(row, blocks, LAYOUT: gl.constexpr):
    """The word with the first four factors of a row, in the layouts of `flashinfer/ops/layouts.py`."""
    if LAYOUT == "linear":
        at = row * (blocks // 4)
    elif LAYOUT == "128x4":
        at = row // 128 * (blocks // 4) * 128 + row % 32 * 4 + row // 32 % 4
    else:
        at = row // 8 * (blocks // 4) * 8 + row % 8
    return at


@gluon.constexpr_function
def _next_word(LAYOUT):
    """How far the words of a row's factors are apart."""
    return {"linear": 1, "128x4": 128, "8x4": 8}[LAYOUT]


@gluon.jit
def _factor_pairs(words, block, SCALE: gl.constexpr, FACTORS: gl.constexpr, LAYOUT: gl.constexpr):
    """The factors [rows, FACTORS] of a block of K, from the words [rows] that hold them: bfloat16, twice in a word."""
    IN_WORD: gl.constexpr = 4 // FACTORS
    index = gl.arange(0, FACTORS, gl.SliceLayout(0, LAYOUT)) + block % IN_WORD * FACTORS
    bytes = (words[:, None] >> (8 * index)[None, :]) & 0xFF
    if SCALE == "ue8m0":
        # 2^-127, code 0, is subnormal in bfloat16; code 255 is NaN.
        pairs = gl.maximum(bytes << 7, 0x40) | (((bytes + 1) >> 2) & 0x40)
        pairs |= pairs << 16
    else:
        pairs = gl.inline_asm_elementwise(
            _text("ue4m3"), "=r,r", [bytes], dtype=gl.int32, is_pure=True, pack=1
        )  # fmt: skip
    return pairs


@gluon.jit
def _store(tile, ROW: gl.constexpr, words, pairs, FORMAT: gl.constexpr, LAYOUT: gl.constexpr):
    """Widen codes, words [rows, .], with their factors, pairs [rows, factors], and store them from ROW on in a tile."""
    R: gl.constexpr = words.shape[0]
    WORDS: gl.constexpr = words.shape[1]
    FACTORS: gl.constexpr = pairs.shape[1]
    spread = pairs[:, :, None] + gl.zeros([R, FACTORS, WORDS // FACTORS], gl.int32, LAYOUT)
    factors = gl.convert_layout(spread.reshape([R, WORDS]), words.type.layout, assert_trivial=True)
    if FORMAT == "e2m1":
        w0, w1, w2, w3 = gl.inline_asm_elementwise(
            _text("e2m1"), "=&r,=&r,=&r,=&r,r,r", [words, factors],
            dtype=(gl.int32, gl.int32, gl.int32, gl.int32), is_pure=True, pack=1,
        )  # fmt: skip
        wide = gl.join(gl.join(w0, w2), gl.join(w1, w3)).reshape([R, 4 * WORDS])
    else:
        w0, w1 = gl.inline_asm_elementwise(
            _text(FORMAT), "=&r,=&r,r,r", [words, factors], dtype=(gl.int32, gl.int32), is_pure=True, pack=1
        )  # fmt: skip
        wide = gl.join(w0, w1).reshape([R, 2 * WORDS])
    COLUMNS: gl.constexpr = tile.shape[1] // 2
    TILE: gl.constexpr = gl.NVMMASharedLayout.get_default_for([tile.shape[0], COLUMNS], gl.int32)
    to = reinterpret(tile, gl.int32, [tile.shape[0], COLUMNS], TILE)
    to.slice(ROW, R, dim=0).store(wide)


@gluon.jit
def _load_words(base, offsets, k, WORDS: gl.constexpr):
    """A thread's four words of each of its rows; `offsets` of rows and `k` in bytes."""
    LANES: gl.constexpr = _by_words(WORDS)
    columns = 4 * gl.arange(0, WORDS, gl.SliceLayout(0, LANES))
    at = (base + k + (offsets[:, None] + columns[None, :])).to(gl.pointer_type(gl.int32))
    # The pointer cast drops the alignment information: each thread reads 16 aligned bytes.
    return gl.load(gl.max_contiguous(gl.multiple_of(at, [1, 16]), [1, 4]))


@gluon.jit
def _produce(
    PRODUCER: gl.constexpr, a_map, b, b_scale, sizes, ring: Ring, size: Size, FORMAT: gl.constexpr,
    SCALE: gl.constexpr, WIDTH: gl.constexpr, FACTOR_LAYOUT: gl.constexpr, SHUFFLED: gl.constexpr, LEAD: gl.constexpr,
):  # fmt: skip
    """Producer warpgroup: widens its part of B of each work item, one block of K after another; the first copies A."""
    M, N, K, out_entry, out_row = sizes
    settings = ring.settings
    WORDS: gl.constexpr = _words(FORMAT, settings.BLOCK_K)
    FACTORS: gl.constexpr = WORDS // _words_of_factor(FORMAT, WIDTH)
    IN_WORD: gl.constexpr = 4 // FACTORS
    BY_FACTORS: gl.constexpr = _by_factors(WORDS, WORDS // FACTORS)
    OF_FACTORS: gl.constexpr = gl.SliceLayout(2, BY_FACTORS)
    # Rows of B that the warpgroup widens at once: four words of a thread.
    AT_ONCE: gl.constexpr = 512 // WORDS
    PART_N: gl.constexpr = settings.BLOCK_N // settings.B_PARTS
    PARTS: gl.constexpr = PART_N // AT_ONCE
    SIZE: gl.constexpr = settings.A_PARTS * settings.BOX * settings.BLOCK_K * 2
    NEXT: gl.constexpr = _next_word(FACTOR_LAYOUT)
    rows = gl.arange(0, AT_ONCE, gl.SliceLayout(1, _by_words(WORDS)))
    factor_rows = gl.arange(0, AT_ONCE, gl.SliceLayout(1, OF_FACTORS))
    step = 0
    for work in range(gl.program_id(0), size.items, gl.num_programs(0)):
        entry, tile_m, tile_n, index, tile, begin, end = size.place(work, settings.GROUP)
        row = tile_m * (settings.A_PARTS * ROWS)
        column = tile_n * settings.BLOCK_N
        codes = b.at + entry.to(gl.int64) * b.entry + column.to(gl.int64) * b.row
        factors = b_scale.at + entry.to(gl.int64) * b_scale.entry
        factors = factors.to(gl.pointer_type(gl.int32))
        offsets = ()
        first_words = ()
        words = ()
        found = ()
        for i in gl.static_range(PARTS):
            # Rows past the last one are read as the last one; their results are not written.
            first = column + PRODUCER * PART_N + i * AT_ONCE
            of_part = _stored(gl.minimum(first + rows, N - 1), SHUFFLED)
            offsets += ((of_part - column) * b.row.to(gl.int32),)
            of_part = _stored(gl.minimum(first + factor_rows, N - 1), SHUFFLED)
            first_words += (_first_word(of_part, b_scale.blocks, FACTOR_LAYOUT),)
        for ahead in gl.static_range(LEAD):
            block = gl.minimum(begin + ahead, end - 1)
            for i in gl.static_range(PARTS):
                words += (_load_words(codes, offsets[i], block * (4 * WORDS), WORDS),)
                found += (gl.load(factors + first_words[i] + block // IN_WORD * NEXT),)
        for first in range(begin, end, LEAD):
            for ahead in gl.static_range(LEAD):
                block = first + ahead
                if block < end:
                    if PRODUCER == 0:
                        stage, full = ring.channel.expect(step, SIZE)
                        for part in gl.static_range(settings.A_PARTS):
                            to = ring.a.index(stage * settings.A_PARTS + part)
                            if settings.BOX < ROWS:
                                to = to.slice(0, settings.BOX, dim=0)
                            tma_load(a_map, [entry, row + part * ROWS, block * settings.BLOCK_K], full, to)
                    else:
                        stage = ring.channel.acquire(step)
                    after = gl.minimum(block + LEAD, end - 1)
                    for i in gl.static_range(PARTS):
                        pairs = _factor_pairs(found[ahead * PARTS + i], block, SCALE, FACTORS, OF_FACTORS)
                        tile_of_b = ring.b.index(stage * settings.B_PARTS + PRODUCER)
                        _store(tile_of_b, i * AT_ONCE, words[ahead * PARTS + i], pairs, FORMAT, BY_FACTORS)
                        # Into the same registers: moving what is in flight would wait for it.
                        next_words = _load_words(codes, offsets[i], after * (4 * WORDS), WORDS)
                        next_found = gl.load(factors + first_words[i] + after // IN_WORD * NEXT)
                        words = words[: ahead * PARTS + i] + (next_words,) + words[ahead * PARTS + i + 1 :]
                        found = found[: ahead * PARTS + i] + (next_found,) + found[ahead * PARTS + i + 1 :]
                    # Consumers execute the fence that orders these stores before wgmma's reads.
                    block_barrier()
                    ring.channel.commit(step)
                    step += 1


@gluon.jit
def widened_sm90_kernel(
    a_map, b, b_scale, out, alpha, partial, arrived, M, N, K, batch, slices,
    BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, STAGES: gl.constexpr, BOX: gl.constexpr, GROUP: gl.constexpr,
    LEAD: gl.constexpr, REGISTERS: gl.constexpr, COPY_REGISTERS: gl.constexpr, FORMAT: gl.constexpr,
    SCALE: gl.constexpr, WIDTH: gl.constexpr, FACTOR_LAYOUT: gl.constexpr, SHUFFLED: gl.constexpr,
    ALPHA: gl.constexpr,
):  # fmt: skip
    """a_map is of [batch, m, k]. `partial` has room for 2 * tiles * slices warpgroup tiles, and `arrived` 2 * tiles
    counters, all 0."""
    OUT: gl.constexpr = out.rows.dtype.element_ty
    A_PARTS: gl.constexpr = BLOCK_M // ROWS
    # For few rows the consumers have half of the columns each, and a producer for each half.
    B_PARTS: gl.constexpr = 3 - A_PARTS
    settings = Settings(
        BLOCK_N=BLOCK_N, BLOCK_K=64, STAGES=STAGES, A_PARTS=A_PARTS, B_PARTS=B_PARTS, BOX=BOX, GROUP=GROUP,
        B_MAJOR="k", SPLIT=BLOCK_N < 256, SCALES=1 if ALPHA else 0, BIAS=False, UNROLL=1,
    )  # fmt: skip
    ring = make_ring(gl.bfloat16, settings, 1 + B_PARTS)
    staging = make_staging(OUT, min(BLOCK_N // B_PARTS, 128))
    size = size_of(M, N, K, batch, slices, settings)
    tensors = (out.rows, alpha, alpha, alpha, partial, arrived)
    sizes = (M, N, K, out.entry, out.row)
    consumed = (M, N, out.entry, out.row)
    FORMAT_ARG: gl.constexpr = gl.constexpr(FORMAT)
    SCALE_ARG: gl.constexpr = gl.constexpr(SCALE)
    WIDTH_ARG: gl.constexpr = gl.constexpr(WIDTH)
    LAYOUT_ARG: gl.constexpr = gl.constexpr(FACTOR_LAYOUT)
    SHUFFLED_ARG: gl.constexpr = gl.constexpr(SHUFFLED)
    LEAD_ARG: gl.constexpr = gl.constexpr(LEAD)
    WRITTEN: gl.constexpr = gl.constexpr(True)
    if B_PARTS == 1:
        gl.warp_specialize(
            [
                (consume, (gl.constexpr(0), tensors, consumed, ring, size, staging, WRITTEN)),
                (consume, (gl.constexpr(1), tensors, consumed, ring, size, staging, WRITTEN)),
                (
                    _produce,
                    (gl.constexpr(0), a_map, b, b_scale, sizes, ring, size, FORMAT_ARG, SCALE_ARG, WIDTH_ARG,
                     LAYOUT_ARG, SHUFFLED_ARG, LEAD_ARG),
                ),
            ],
            [4, 4],
            [REGISTERS, COPY_REGISTERS],
        )  # fmt: skip
    else:
        gl.warp_specialize(
            [
                (consume, (gl.constexpr(0), tensors, consumed, ring, size, staging, WRITTEN)),
                (consume, (gl.constexpr(1), tensors, consumed, ring, size, staging, WRITTEN)),
                (
                    _produce,
                    (gl.constexpr(0), a_map, b, b_scale, sizes, ring, size, FORMAT_ARG, SCALE_ARG, WIDTH_ARG,
                     LAYOUT_ARG, SHUFFLED_ARG, LEAD_ARG),
                ),
                (
                    _produce,
                    (gl.constexpr(1), a_map, b, b_scale, sizes, ring, size, FORMAT_ARG, SCALE_ARG, WIDTH_ARG,
                     LAYOUT_ARG, SHUFFLED_ARG, LEAD_ARG),
                ),
            ],
            [4, 4, 4],
            [REGISTERS, COPY_REGISTERS, COPY_REGISTERS],
        )  # fmt: skip
