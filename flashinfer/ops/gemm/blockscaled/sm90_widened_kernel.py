"""out = alpha * A B^T on Hopper for A in 16 bits and B in codes with factors, widened in registers for wgmma.

B, the weight, is wgmma's first operand, from registers; A, the tokens, is the second, from shared memory. A thread
reads 32 successive codes of a row of B and widens them: codes times factors, bfloat16, or float16 where B and what A
was are NVFP4. wgmma wants other columns of each thread, so the columns of A were brought into the order of B's
registers (`portable_widen.py`). A register has the products of two codes, which are APART: 4 columns with e2m1, where a
word's codes 0 and 4 are decoded at once, 1 with FP8. Of 128 columns, column 32 c + 2 APART j + APART e + i is at 8
APART j + 8 i + 2 c + e.

    column, APART = 4     0  1  2  3  4  5 ... 8 ... 32     belongs to thread 0 of a row's four, ... thread 1
    is at                 0  8 16 24  1  9 .. 32 ...  2

Grid: any number of persistent blocks, over tiles of the result and K slices. Warps: two consumer warpgroups, with ROWS
rows of B each, and one producer warp that copies A, codes and factors. While the tensor cores multiply one operand, a
warpgroup widens the next. Shared memory: a ring of tiles of A, TOKENS x 64, a ring of codes and factors of 2 ROWS x 128
elements of B, and a buffer that transposes results.
Inputs: a [batch, m, k] in that order, b [batch, n, k] in e2m1, e4m3 or e5m2, b_scale: flat factors of b. K is a
multiple of 128. Outputs: out [batch, m, n].
Method: OCP Microscaling Formats (MX) Specification 1.0, 2023.
"""

from flashinfer._core.gluon_compat import (
    aggregate, block_barrier, cp_async, cp_async_arrive, gl, gluon, tma_load, warpgroup_mma,
    warpgroup_mma_wait,
)  # fmt: skip
from flashinfer.ops._device.sm90.mma import halves
from flashinfer.ops._device.sm90.ring import Channel, make_channel
from flashinfer.ops.gemm._device.sm90_slices import Size, add_slices

_BITS = {"e2m1": 4, "fp8e4nv": 8, "fp8e5": 8}
# Elements of K of a stage of codes.
_BLOCK = gl.constexpr(128)

# A word of eight e2m1 codes ($4) times a factor, twice in a word ($5): codes 0 and 4, 1 and 5, 2 and 6, 3 and 7, as two
# bfloat16 in a word each.
#
# An e2m1 in the sign, the two lowest exponent bits and the highest mantissa bit of a bfloat16 is the value over 2^126.
# A multiplication puts a code's sign and its other bits in their places at once. SCALED stands for what makes products
# of these: factors are multiplied by 2^118 before, and sums by the other 2^8, _REST; or the value by 2^126 first, where
# factors have all exponents.
_FROM_E2M1 = """
{
.reg .b32 shifted, none;
mov.b32 none, 0x80008000;
shr.u32 shifted, $4, 8;
and.b32 $0, $4, 0x000F000F;
and.b32 $1, $4, 0x00F000F0;
and.b32 $2, shifted, 0x000F000F;
and.b32 $3, shifted, 0x00F000F0;
mul.lo.u32 $0, $0, 0x1040;
mul.lo.u32 $1, $1, 0x0104;
mul.lo.u32 $2, $2, 0x1040;
mul.lo.u32 $3, $3, 0x0104;
and.b32 $0, $0, 0x81C081C0;
and.b32 $1, $1, 0x81C081C0;
and.b32 $2, $2, 0x81C081C0;
and.b32 $3, $3, 0x81C081C0;
SCALED
fma.rn.bf16x2 $0, $0, $5, none;
fma.rn.bf16x2 $1, $1, $5, none;
fma.rn.bf16x2 $2, $2, $5, none;
fma.rn.bf16x2 $3, $3, $5, none;
}
"""
_REST = gl.constexpr(256.0)
# The same as float16, where the tokens are NVFP4 too: an e4m3 is one, and so is its product with an e2m1. $5 has the
# factor in its lower half. A byte of `high` and `low` is the first of a float16, whose second is 0: the value over
# 2^14, _REST_OF_HALF.
_FROM_E2M1_AS_HALF = """
{
.reg .b16 first, second;
.reg .b32 high, low, other, factor;
mov.b32 {first, second}, $5;
mov.b32 factor, {first, first};
shr.u32 high, $4, 3;
and.b32 high, high, 0x0E0E0E0E;
lop3.b32 high, $4, 0x80808080, high, 0xEA;
shl.b32 low, $4, 4;
shl.b32 other, $4, 1;
and.b32 other, other, 0x0E0E0E0E;
lop3.b32 low, low, 0x80808080, other, 0xEA;
prmt.b32 $0, low, 0, 0x2404;
prmt.b32 $1, high, 0, 0x2404;
and.b32 $2, low, 0xFF00FF00;
and.b32 $3, high, 0xFF00FF00;
mul.rn.f16x2 $0, $0, factor;
mul.rn.f16x2 $1, $1, factor;
mul.rn.f16x2 $2, $2, factor;
mul.rn.f16x2 $3, $3, factor;
}
"""
_REST_OF_HALF = gl.constexpr(16384.0)
# Two e4m3 in the lower half of a word as float16; the first of them counts.
_UE4M3_AS_HALF = """
{
.reg .b16 first, second;
mov.b32 {first, second}, $1;
cvt.rn.f16x2.e4m3x2 $0, first;
}
"""
_BY_2_126 = """
.reg .b32 most;
mov.b32 most, 0x7E807E80;
fma.rn.bf16x2 $0, $0, most, none;
fma.rn.bf16x2 $1, $1, most, none;
fma.rn.bf16x2 $2, $2, most, none;
fma.rn.bf16x2 $3, $3, most, none;
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
# An e4m3 in the lowest byte times 2^118 as bfloat16, twice.
_FROM_UE4M3 = """
{
.reg .b16 code, a, b;
.reg .b32 h;
.reg .f32 x;
cvt.u16.u32 code, $1;
cvt.rn.f16x2.e4m3x2 h, code;
mov.b32 {a, b}, h;
cvt.f32.f16 x, a;
mul.f32 x, x, 0f7A800000;
cvt.rn.bf16x2.f32 $0, x, x;
}
"""
_TEXTS = {
    "e2m1 ue4m3": _FROM_E2M1.replace("SCALED", ""),
    "e2m1 ue8m0": _FROM_E2M1.replace("SCALED", _BY_2_126),
    "fp8e4nv": _FROM_FP8.replace("KIND", "e4m3"),
    "fp8e5": _FROM_FP8.replace("KIND", "e5m2"),
    "ue4m3": _FROM_UE4M3,
    "e2m1 as half": _FROM_E2M1_AS_HALF,
    "ue4m3 as half": _UE4M3_AS_HALF,
}


@gluon.constexpr_function
def _text(NAME, FIRST=False):
    """FIRST : for the first block of a loop that is not in the loop. LLVM would move what it shares with the loop's end
    to the loop's begin, and codes would go there as bytes: a comment makes it another text."""
    return _TEXTS[NAME] + ("// first" if FIRST else "")


@gluon.constexpr_function
def _bytes(FORMAT):
    """Bytes of a thread's 32 codes."""
    return 4 * _BITS[FORMAT]


@gluon.constexpr_function
def _by_threads(ROWS, *inside):
    """The layout [ROWS, ...], 64 or 128 rows, of what the four threads of a row have of it, rows r and r + 8 each:
    `inside` are the bases of registers, and of the two bits of a row's threads, in the other dimensions, whose sizes
    come first."""
    sizes, registers, threads = inside
    rest = [0] * len(sizes)
    return gl.DistributedLinearLayout(
        [[0, *base] for base in registers] + [[row, *rest] for row in (8, 64)[: ROWS // 64]],
        [[0, *base] for base in threads] + [[1, *rest], [2, *rest], [4, *rest]],
        [[16, *rest], [32, *rest]], [], [ROWS, *sizes],
    )  # fmt: skip


@gluon.constexpr_function
def _by_bytes(ROWS, BYTES):
    """The layout of bytes of codes [ROWS, 4 * BYTES]."""
    return _by_threads(ROWS, [4 * BYTES], [[1 << i] for i in range(BYTES.bit_length() - 1)], [[BYTES], [2 * BYTES]])


@gluon.constexpr_function
def _by_factors(ROWS, WIDTH):
    """The layout of words of four factors [ROWS, 1 or 2, 4 or 2]: of 32 elements all four threads share a word, of 16
    elements two."""
    if WIDTH == 32:
        return _by_threads(ROWS, [1, 4], [], [[0, 1], [0, 2]])
    return _by_threads(ROWS, [2, 2], [], [[0, 1], [1, 0]])


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
def _pairs(codes, SCALE: gl.constexpr):
    """Factors as bfloat16, twice in a word, from their codes in the lowest byte."""
    if SCALE == "ue8m0":
        # 2^-127, code 0, is subnormal in bfloat16; code 255 is NaN.
        codes &= 0xFF
        pairs = gl.maximum(codes << 7, 0x40) | (((codes + 1) >> 2) & 0x40)
        pairs |= pairs << 16
    else:
        pairs = gl.inline_asm_elementwise(
            _text("ue4m3"), "=r,r", [codes], dtype=gl.int32, is_pure=True, pack=1
        )  # fmt: skip
    return pairs


@gluon.jit
def _widened(bytes, factor, FORMAT: gl.constexpr, TEXT: gl.constexpr, TYPE: gl.constexpr, LAYOUT: gl.constexpr):
    """Bytes of codes [rows, 4, .] times the factors [rows, 4] as wgmma's first operand, TYPE [rows, 64]: each thread's
    own."""
    ROWS: gl.constexpr = bytes.shape[0]
    WORDS: gl.constexpr = bytes.shape[2] // 4
    factor = gl.convert_layout(factor, gl.SliceLayout(2, bytes.type.layout), assert_trivial=True)
    factors, bytes = gl.broadcast(factor[:, :, None], bytes)
    # Four bytes at a time, as a word.
    if FORMAT == "e2m1":
        CONSTRAINTS: gl.constexpr = "=&r,=&r,=&r,=&r,r,r,r,r,r"
        if TYPE == gl.float16:
            first, second = gl.inline_asm_elementwise(
                TEXT, CONSTRAINTS, [bytes, factors], dtype=(gl.float16, gl.float16), is_pure=True, pack=4
            )  # fmt: skip
        else:
            first, second = gl.inline_asm_elementwise(
                TEXT, CONSTRAINTS, [bytes, factors], dtype=(gl.bfloat16, gl.bfloat16), is_pure=True, pack=4
            )  # fmt: skip
        # rows, threads, words, pair of first or second, which of a pair, first or second
        wide = gl.join(first, second).reshape([ROWS, 4, WORDS, 2, 2, 2]).permute([0, 2, 5, 3, 1, 4])
    else:
        wide = gl.inline_asm_elementwise(
            TEXT, "=&r,=&r,r,r,r,r,r", [bytes, factors], dtype=gl.bfloat16, is_pure=True, pack=4
        )  # fmt: skip
        wide = wide.reshape([ROWS, 4, WORDS, 2, 2]).permute([0, 2, 3, 1, 4])
    return gl.convert_layout(wide.reshape([ROWS, 64]), LAYOUT, assert_trivial=True)


@aggregate
class Weights:
    """The ring of codes, [STAGES, TILE, bytes], and of their factors in words of four, [STAGES, words, TILE]."""

    codes: gl.shared_memory_descriptor
    factors: gl.shared_memory_descriptor
    channel: Channel
    FORMAT: gl.constexpr
    SCALE: gl.constexpr
    WIDTH: gl.constexpr
    FACTOR_LAYOUT: gl.constexpr
    SHUFFLED: gl.constexpr

    @gluon.jit
    def read(self, WG: gl.constexpr, step):
        """A thread's bytes of codes [rows, 4, .], and its words of factors [rows, 4]."""
        ROWS: gl.constexpr = self.codes.shape[1] // 2
        BYTES: gl.constexpr = _bytes(self.FORMAT)
        PER: gl.constexpr = 32 // self.WIDTH
        BY_FACTORS: gl.constexpr = _by_factors(ROWS, self.WIDTH)
        stage = self.channel.wait(step)
        bytes = self.codes.index(stage).slice(WG * ROWS, ROWS, dim=0).load(_by_bytes(ROWS, BYTES))
        bytes = bytes.reshape([ROWS, 4, BYTES])
        found = self.factors.index(stage).slice(WG * ROWS, ROWS, dim=1).permute([1, 0])
        found = found.load(gl.SliceLayout(2, BY_FACTORS))
        found = (found[:, :, None] + gl.zeros([ROWS, PER, 4 // PER], gl.int32, BY_FACTORS)).reshape([ROWS, 4])
        self.channel.release(step)
        return bytes, found

    @gluon.jit
    def half(self, bytes, found, HALF: gl.constexpr, FIRST: gl.constexpr, TYPE: gl.constexpr, OPERAND: gl.constexpr):
        """The first or the second half of a thread's bytes and factors, widened."""
        BYTES: gl.constexpr = bytes.shape[2]
        both = bytes.reshape([bytes.shape[0], 4, 2, BYTES // 2]).permute([0, 1, 3, 2]).split()
        thread = gl.arange(0, 4, gl.SliceLayout(0, found.type.layout))[None, :]
        if self.WIDTH == 16:
            found = found >> (thread % 2 * 16 + 8 * HALF)
        else:
            found = found >> (thread * 8)
        if TYPE == gl.float16:
            factor = gl.inline_asm_elementwise(
                _text("ue4m3 as half"), "=r,r", [found], dtype=gl.int32, is_pure=True, pack=1
            )  # fmt: skip
            TEXT: gl.constexpr = _text("e2m1 as half", FIRST)
        else:
            factor = _pairs(found, self.SCALE)
            TEXT: gl.constexpr = _text("e2m1 " + self.SCALE if self.FORMAT == "e2m1" else self.FORMAT, FIRST)
        return _widened(both[HALF], factor, self.FORMAT, TEXT, TYPE, OPERAND)


@aggregate
class Tokens:
    """The ring of tiles of A, [STAGES * BOXES, TOKENS, 64]: BOXES of them, 64 elements of K each, in a stage."""

    tiles: gl.shared_memory_descriptor
    channel: Channel
    BOXES: gl.constexpr


@gluon.jit
def _copy_weights(b_map, b_scale, of_rows, weights: Weights, step, entry, column, block):
    """Copy the codes and factors of 128 elements of K of a tile of B. `of_rows` are the first words of the factors of
    its rows."""
    PER: gl.constexpr = 32 // weights.WIDTH
    NEXT: gl.constexpr = _next_word(weights.FACTOR_LAYOUT)
    BYTES: gl.constexpr = weights.codes.shape[2]
    channel = weights.channel
    stage = channel.acquire(step)
    factors = b_scale.at + entry.to(gl.int64) * b_scale.entry
    factors = factors.to(gl.pointer_type(gl.int32)) + block * (PER * NEXT)
    word = gl.arange(0, PER, gl.SliceLayout(1, of_rows.type.layout))[:, None]
    cp_async(weights.factors.index(stage), factors + (of_rows + word * NEXT))
    # cp_async_arrive keeps the phase incomplete until each thread's copies have arrived. It leaves the number of
    # expected arrivals as it is: the stage expects one, that of `expect` below.
    cp_async_arrive(channel.full.index(stage))
    block_barrier()
    _, full = channel.expect(step, weights.codes.shape[1] * BYTES)
    if weights.SHUFFLED:
        tma_load(b_map, [entry, column // 32, 0, 0, block * BYTES], full, weights.codes.index(stage))
    else:
        tma_load(b_map, [entry, column, block * BYTES], full, weights.codes.index(stage))


@gluon.jit
def _produce(a_map, b_map, b_scale, N, tokens: Tokens, weights: Weights, size: Size, GROUP: gl.constexpr):
    """Producer warp: copies A, codes and factors of each work item."""
    BOXES: gl.constexpr = tokens.BOXES
    ROWS_OF_A: gl.constexpr = tokens.tiles.shape[1]
    PER: gl.constexpr = 32 // weights.WIDTH
    TILE: gl.constexpr = weights.codes.shape[1]
    LAYOUT: gl.constexpr = gl.BlockedLayout([PER, 1], [1, 32], [1, 1], [1, 0])
    step = 0
    copied = 0
    for work in range(gl.program_id(0), size.items, gl.num_programs(0)):
        entry, tile_m, tile_n, index, tile, begin, end = size.place(work, GROUP)
        # Factors past the last row are those of the last; the results are not written.
        row = tile_n * TILE + gl.arange(0, TILE, gl.SliceLayout(0, LAYOUT))
        row = _stored(gl.minimum(row, N - 1), weights.SHUFFLED)
        of_rows = _first_word(row, b_scale.blocks, weights.FACTOR_LAYOUT)[None, :]
        for block in range(begin, end):
            _copy_weights(b_map, b_scale, of_rows, weights, copied, entry, tile_n * TILE, block)
            copied += 1
            for part in gl.static_range(2 // BOXES):
                stage, full = tokens.channel.expect(step, BOXES * ROWS_OF_A * 64 * 2)
                for box in gl.static_range(BOXES):
                    at = [entry, tile_m * ROWS_OF_A, block * _BLOCK + (part * BOXES + box) * 64]
                    tma_load(a_map, at, full, tokens.tiles.index(stage * BOXES + box))
                step += 1


@gluon.jit
def _write(acc, factor, staging, out, row, column, M, N, out_row):
    """Write a tile [64 or 128 columns of the result, tokens], as many tokens at a time as `staging` holds, transposed
    through it so that whole rows are written."""
    if acc.shape[1] > staging.shape[0]:
        left, right = halves(acc)
        _write(left, factor, staging, out, row, column, M, N, out_row)
        _write(right, factor, staging, out, row + left.shape[1], column, M, N, out_row)
    else:
        OUT: gl.constexpr = out.dtype.element_ty
        WIDE: gl.constexpr = 128 // OUT.primitive_bitwidth
        ROWS: gl.constexpr = staging.shape[1]
        staging.store((acc * factor).to(OUT).permute([1, 0]))
        result = staging.load(gl.BlockedLayout([1, WIDE], [32 * WIDE // ROWS, ROWS // WIDE], [4, 1], [1, 0]))
        rows = row + gl.arange(0, result.shape[0], gl.SliceLayout(1, result.type.layout))
        columns = column + gl.arange(0, ROWS, gl.SliceLayout(0, result.type.layout))
        at = out + rows.to(gl.int64)[:, None] * out_row + columns[None, :]
        gl.store(at, result, mask=(rows < M)[:, None] & (columns < N)[None, :])


@gluon.jit
def _finish(acc, factor, staging, tensors, slot, index, slices, row, column, sizes):
    """Write the sums of a warpgroup, or those of all K slices once the last is there; 128 tokens at a time."""
    out, partial, arrived = tensors
    M, N, out_row = sizes
    if acc.shape[1] > 128:
        left, right = halves(acc)
        _finish(left, factor, staging, tensors, 2 * slot, index, slices, row, column, sizes)
        _finish(right, factor, staging, tensors, 2 * slot + 1, index, slices, row + 128, column, sizes)
    else:
        whole = slices == 1
        if not whole:
            whole, acc = add_slices(acc, partial, arrived, slot, index, slices, N - column, 128 * acc.shape[0])
        if whole:
            _write(acc, factor, staging, out, row, column, M, N, out_row)


@gluon.jit
def _add_block(
    acc, tokens: Tokens, weights: Weights, WG: gl.constexpr, read, step, FIRST: gl.constexpr, OPERAND: gl.constexpr
):  # fmt: skip
    """acc + the product of 128 elements of K. A half is widened while the tensor cores multiply the half before, whose
    stage of tokens is then free. FIRST : there is none before."""
    AHEAD: gl.constexpr = tokens.channel.full.shape[0] - 1
    codes, found = weights.read(WG, read)
    for half in gl.static_range(2):
        operand = weights.half(codes, found, half, FIRST, tokens.tiles.dtype, OPERAND)
        box = half % tokens.BOXES
        if box == 0:
            tokens.channel.wait(step)
        tile = tokens.tiles.index(tokens.channel.stage(step) * tokens.BOXES + box).permute([1, 0])
        acc = warpgroup_mma(operand, tile, acc, is_async=True)
        acc = warpgroup_mma_wait(1, [acc])
        if box == 0:
            if half == 1 or not FIRST:
                tokens.channel.release(step + AHEAD)
        if box == tokens.BOXES - 1:
            step += 1
    return acc, step


@gluon.jit
def _consume(
    WG: gl.constexpr, tensors, alpha, sizes, tokens: Tokens, weights: Weights, staging, size: Size,
    GROUP: gl.constexpr, ALPHA: gl.constexpr,
):  # fmt: skip
    """Consumer warpgroup WG: widens and multiplies its half of the rows of each tile of B, and writes them."""
    out, partial, arrived = tensors
    M, N, out_entry, out_row = sizes
    COLUMNS: gl.constexpr = tokens.tiles.shape[1]
    ROWS: gl.constexpr = weights.codes.shape[1] // 2
    SUMS: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, COLUMNS, 16])
    OPERAND: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=SUMS, k_width=2)
    step = 0
    read = 0
    for work in range(gl.program_id(0), size.items, gl.num_programs(0)):
        entry, tile_m, tile_n, index, tile, begin, end = size.place(work, GROUP)
        acc = gl.zeros([ROWS, COLUMNS], gl.float32, SUMS)
        # A product is in flight wherever the loop begins. Where one may be or not, ptxas waits after each product.
        acc, step = _add_block(acc, tokens, weights, WG, read, step, True, OPERAND)
        for block in range(begin + 1, end):
            read += 1
            acc, step = _add_block(acc, tokens, weights, WG, read, step, False, OPERAND)
        read += 1
        acc = warpgroup_mma_wait(0, [acc])
        tokens.channel.release(step + tokens.channel.full.shape[0] - 1)
        # Loaded here and not before the loop over K, through which it would take a register.
        factor = _REST if weights.FORMAT == "e2m1" and weights.SCALE == "ue4m3" else 1.0
        if tokens.tiles.dtype == gl.float16:
            factor = _REST_OF_HALF
        if ALPHA:
            factor *= gl.load(alpha)
        to = (out + entry.to(gl.int64) * out_entry, partial, arrived)
        _finish(
            acc, factor, staging.index(WG), to, 2 * tile + WG, index, size.slices, tile_m * COLUMNS,
            tile_n * (2 * ROWS) + WG * ROWS, (M, N, out_row),
        )  # fmt: skip


@gluon.jit
def widened_sm90_kernel(
    a_map, b_map, b_scale, out, alpha, partial, arrived, M, N, K, batch, slices,
    TOKENS: gl.constexpr, ROWS: gl.constexpr, BOXES: gl.constexpr, STAGES: gl.constexpr, CODE_STAGES: gl.constexpr,
    GROUP: gl.constexpr, REGISTERS: gl.constexpr, COPY_REGISTERS: gl.constexpr, FORMAT: gl.constexpr,
    SCALE: gl.constexpr, WIDTH: gl.constexpr, FACTOR_LAYOUT: gl.constexpr, SHUFFLED: gl.constexpr, ALPHA: gl.constexpr,
):  # fmt: skip
    """a_map is of [batch, m, k], b_map of the bytes of codes; of shuffled ones [batch, n / 32, 8, 4, bytes]. With
    slices, `partial` has room for 2 * tiles * slices warpgroup tiles, and `arrived` 4 * tiles counters, all 0."""
    OUT: gl.constexpr = out.rows.dtype.element_ty
    PART: gl.constexpr = min(TOKENS, 2048 // OUT.primitive_bitwidth)
    BYTES: gl.constexpr = 4 * _bytes(FORMAT)
    TYPE: gl.constexpr = a_map.dtype
    tiles = gl.allocate_shared_memory(
        TYPE, [STAGES * BOXES, TOKENS, 64], gl.NVMMASharedLayout.get_default_for([TOKENS, 64], TYPE)
    )  # fmt: skip
    codes = gl.allocate_shared_memory(
        gl.uint8, [CODE_STAGES, 2 * ROWS, BYTES], gl.NVMMASharedLayout.get_default_for([2 * ROWS, BYTES], gl.uint8)
    )  # fmt: skip
    factors = gl.allocate_shared_memory(
        gl.int32, [CODE_STAGES, 32 // WIDTH, 2 * ROWS], gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    )  # fmt: skip
    staging = gl.allocate_shared_memory(
        OUT, [2, PART, ROWS], gl.NVMMASharedLayout.get_default_for([PART, ROWS], OUT)
    )  # fmt: skip
    tokens = Tokens(tiles, make_channel(STAGES, 1, 2), BOXES)
    weights = Weights(codes, factors, make_channel(CODE_STAGES, 1, 2), FORMAT, SCALE, WIDTH, FACTOR_LAYOUT, SHUFFLED)
    tiles_m = gl.cdiv(M, TOKENS)
    tiles_n = gl.cdiv(N, 2 * ROWS)
    size = Size(K // _BLOCK, tiles_m, tiles_n, slices, tiles_m * tiles_n * slices * batch)
    tensors = (out.rows, partial, arrived)
    sizes = (M, N, out.entry, out.row)
    GROUP_ARG: gl.constexpr = gl.constexpr(GROUP)
    ALPHA_ARG: gl.constexpr = gl.constexpr(ALPHA)
    gl.warp_specialize(
        [
            (
                _consume,
                (gl.constexpr(0), tensors, alpha, sizes, tokens, weights, staging, size, GROUP_ARG, ALPHA_ARG),
            ),
            (
                _consume,
                (gl.constexpr(1), tensors, alpha, sizes, tokens, weights, staging, size, GROUP_ARG, ALPHA_ARG),
            ),
            (_produce, (a_map, b_map, b_scale, N, tokens, weights, size, GROUP_ARG)),
        ],
        [4, 1],
        [REGISTERS, COPY_REGISTERS],
    )  # fmt: skip
