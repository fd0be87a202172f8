"""Operands of the experts' GEMM in Triton: row numbers of weights, scale factors, and decoded codes.

Two 4-bit values share a byte, the first in its low half. One instruction decodes two, and they are not interleaved:
the low halves of a row are multiplied with the even columns of the other operand, the high halves with the odd ones. A
sum over K may take columns in any order.

    row of a weight     w0 w1 w2 w3 ...   bytes  w1|w0  w3|w2 ...   decoded  [w0 w2 ...] and [w1 w3 ...]
    row of a token      x0 x1 x2 x3 ...                             split    [x0 x2 ...] and [x1 x3 ...]
"""

import triton
import triton.language as tl

from flashinfer.ops._device.formats import from_fp8, from_ue8m0
from flashinfer.ops._device.scales import scale_offset, times_blocks
from flashinfer.ops._device.widen import e2m1_times


@triton.jit
def weight_rows(column, n, GATED: tl.constexpr, PAIRED: tl.constexpr, SHUFFLE: tl.constexpr):
    """The row of the weights for each column of the product.

    Columns of a gated product alternate, factor and gate, so that both inputs of a result are in one tile. In memory
    the rows of factors and gates alternate in groups of PAIRED, or, if PAIRED is 0, are the two halves. With n = 8 and
    PAIRED 0 the columns 0 1 2 3 are rows 0 4 1 5; with PAIRED 2 they are rows 0 2 1 3. SHUFFLE is the block of
    `shuffle_matrix_a`.
    """
    row = column
    if GATED and PAIRED == 0:
        row = (column % 2) * (n // 2) + column // 2
    elif GATED:
        row = column // 2 // PAIRED * (2 * PAIRED) + column % 2 * PAIRED + column // 2 % PAIRED
    if SHUFFLE:
        EIGHTH: tl.constexpr = SHUFFLE // 8
        row = row // SHUFFLE * SHUFFLE + row % EIGHTH * 8 + row % SHUFFLE // EIGHTH
    return row


@triton.jit
def load_arranged(codes, row, column, k):
    """Bytes of rows `row` [ROWS] and pairs of elements `column` [BYTES] of arranged weights: two codes each, in the
    order before `fragments.arrange`."""
    inside = row % 64
    thread = inside // 16 * 32 + row % 8 * 4
    row_at = (row // 64).to(tl.int64) * (k // 64) * 512 + thread * 4
    column_at = column // 32 * 512 + column % 4 * 4 + column % 16 // 8 * 2 + column % 8 // 4
    words = codes.to(tl.pointer_type(tl.uint32), bitcast=True)
    word = tl.load(words + row_at[:, None] + column_at[None, :], (column < k // 2)[None, :], other=0)
    # The index j of the codes in the two halves of the word.
    pair = (inside % 16 // 8)[:, None] + (column % 32 // 16 * 2)[None, :]
    return arranged_code(word, pair, 0) | arranged_code(word, pair, 16) << 4


@triton.jit
def arranged_code(word, pair, lane):
    """Code `pair` of one half of a word (`fragments.WHERE`); `lane` is 0 for the low half, 16 for the high half."""
    at = tl.where(pair == 0, 6, tl.where(pair == 1, 10, tl.where(pair == 2, 0, 4)))
    sign_at = tl.where(pair == 0, 15, tl.where(pair == 1, 19, tl.where(pair == 2, 9, 13)))
    found = word >> (at + lane) & 7
    found = tl.where(pair == 3, found & 3 | (word >> (14 + lane) & 1) << 2, found)
    return (found | (word >> ((sign_at + lane) % 32) & 1) << 3).to(tl.uint8)


@triton.jit
def load_factors(scale, row, first, live, k, strides, WIDTH: tl.constexpr, TILE_K: tl.constexpr, LAYOUT: tl.constexpr):
    """The scale factors of elements `first` to `first + TILE_K` of rows, [rows, TILE_K / WIDTH].

    strides : in "linear" the strides of a row and of a block; in "strips" the stride from 128 elements of all rows to
    the next 128, and nothing.
    """
    block = first // WIDTH + tl.arange(0, TILE_K // WIDTH)
    inside = live[:, None] & (block * WIDTH < k)[None, :]
    if LAYOUT == "linear":
        at = row.to(tl.int64)[:, None] * strides[0] + block.to(tl.int64)[None, :] * strides[1]
    elif LAYOUT == "strips":
        EACH: tl.constexpr = 128 // WIDTH
        at = (block // EACH).to(tl.int64)[None, :] * strides[0] + row[:, None] * EACH + (block % EACH)[None, :]
    else:
        blocks = (tl.cdiv(k, WIDTH) + 3) // 4 * 4
        at = scale_offset(row[:, None], block[None, :], blocks, LAYOUT)
    return tl.load(scale + at, inside, other=0)


@triton.jit
def operand(
    codes, factors, FORMAT: tl.constexpr, FP8: tl.constexpr, DTYPE: tl.constexpr, CAPABILITY: tl.constexpr
):  # fmt: skip
    """A tile of unpacked codes as an operand of tl.dot, times its scale factors. With FP8 tl.dot takes the codes."""
    if FP8:
        return codes
    elif FORMAT == "fp8" or FORMAT == "fp8_block":
        return from_fp8(codes, "fp8e4nv", CAPABILITY).to(DTYPE)
    elif FORMAT == "mxfp8":
        return times_blocks(from_fp8(codes, "fp8e4nv", CAPABILITY), from_ue8m0(factors), 32).to(DTYPE)
    else:
        return codes.to(DTYPE)


@triton.jit
def packed_operand(
    codes, factors, FORMAT: tl.constexpr, WIDTH: tl.constexpr, DTYPE: tl.constexpr, CAPABILITY: tl.constexpr
):  # fmt: skip
    """A tile of bytes [rows, n] with two codes each, as two operands [rows, n]: the low codes and the high codes."""
    if FORMAT == "nvfp4":
        factors = from_fp8(factors, "fp8e4nv", CAPABILITY)
    elif FORMAT == "mxfp4":
        factors = from_ue8m0(factors)
    else:
        factors = factors.to(tl.float32)
    SHAPE: tl.constexpr = [codes.shape[0], factors.shape[1], WIDTH // 2]
    factors = tl.reshape(tl.broadcast_to(factors[:, :, None], SHAPE), codes.shape)
    if FORMAT == "nvfp4" or FORMAT == "mxfp4":
        return e2m1_times(codes, factors, DTYPE, CAPABILITY)
    else:
        return int4_times(codes, factors, DTYPE, CAPABILITY)


@triton.jit
def even_odd_operands(
    codes, factors, FORMAT: tl.constexpr, WIDTH: tl.constexpr, PACK: tl.constexpr, DTYPE: tl.constexpr,
    CAPABILITY: tl.constexpr,
):  # fmt: skip
    """The even and the odd columns of a tile, packed or not, as two operands."""
    if PACK == 2:
        return packed_operand(codes, factors, FORMAT, WIDTH, DTYPE, CAPABILITY)
    else:
        wide = operand(codes, factors, FORMAT, False, DTYPE, CAPABILITY)
        return tl.split(tl.reshape(wide, [codes.shape[0], codes.shape[1] // 2, 2]))


# PTX for four bytes of int4 codes ($4) and their four float32 factors ($5 ... $8): $0 and $1 become the low codes of
# the four bytes, $2 and $3 the high ones, each times its factor, two bfloat16 in a register.
#
# A two's complement code c is (c ^ 8) - 8. With c ^ 8 as its lowest bits, the bfloat16 0x4300 is 128 + (c ^ 8); adding
# 0xC308, which is -136, gives the code exactly.
_INT4_TIMES = tl.constexpr("""
{
.reg .b32 pair, code, factor, none, one, offset;
mov.b32 none, 0x80008000;
mov.b32 one, 0x3F803F80;
mov.b32 offset, 0xC308C308;
cvt.rn.bf16x2.f32 factor, $6, $5;
prmt.b32 pair, $4, 0, 0x4140;
lop3.b32 $0, pair, 0x000F000F, 0x43084308, 0x6A;
fma.rn.bf16x2 $0, $0, one, offset;
fma.rn.bf16x2 $0, $0, factor, none;
shr.u32 code, pair, 4;
lop3.b32 $2, code, 0x000F000F, 0x43084308, 0x6A;
fma.rn.bf16x2 $2, $2, one, offset;
fma.rn.bf16x2 $2, $2, factor, none;
cvt.rn.bf16x2.f32 factor, $8, $7;
prmt.b32 pair, $4, 0, 0x4342;
lop3.b32 $1, pair, 0x000F000F, 0x43084308, 0x6A;
fma.rn.bf16x2 $1, $1, one, offset;
fma.rn.bf16x2 $1, $1, factor, none;
shr.u32 code, pair, 4;
lop3.b32 $3, code, 0x000F000F, 0x43084308, 0x6A;
fma.rn.bf16x2 $3, $3, one, offset;
fma.rn.bf16x2 $3, $3, factor, none;
}
""")


@triton.jit
def int4_times(codes, factor, DTYPE: tl.constexpr, CAPABILITY: tl.constexpr):
    """`e2m1_times` for int4. In bfloat16 the product is rounded once if the factor is a bfloat16."""
    if CAPABILITY >= 80 and DTYPE == tl.bfloat16:
        low, high = tl.inline_asm_elementwise(
            _INT4_TIMES, "=&r,=&r,=&r,=&r,r,r,r,r,r", [codes, factor], dtype=(tl.bfloat16, tl.bfloat16), is_pure=True,
            pack=4,
        )  # fmt: skip
    else:
        wide = codes.to(tl.int32)
        low = ((((wide & 15) ^ 8) - 8).to(tl.float32) * factor).to(DTYPE)
        high = (((wide >> 4 ^ 8) - 8).to(tl.float32) * factor).to(DTYPE)
    return low, high
