"""Dequantizes operands of matrix products: loads factors, widens codes to a tensor core's dtype, multiplies the two.

`flashinfer/ops/formats.py` has the elements and factors that are named here.
"""

import triton
import triton.language as tl

from flashinfer.ops._device.formats import from_e2m1, from_fp8, from_int4, from_ue8m0
from flashinfer.ops._device.scales import scale_offset, times_blocks


@triton.jit
def load_factors(
    base, row, ok, first, count, pitch, step,
    LAYOUT: tl.constexpr, COUNT: tl.constexpr, STRIP: tl.constexpr = 1, WORDS: tl.constexpr = False,
):  # fmt: skip
    """Factors [ROWS, COUNT] of rows `row` [ROWS], from block `first` on; 0 where a row is not `ok` and from `count` on.

    LAYOUT "linear": rows are `pitch` apart and blocks `step`. "strips": STRIP blocks of each row lie side by side, row
    after row, and the next STRIP blocks begin `pitch` further; with a STRIP of 4, block 5 of row 7 is at pitch + 7 * 4
    + 1. The tiled layouts "128x4" and "8x4": `pitch` is the number of blocks in a row of the layout, as in
    `scale_offset`.

    WORDS reads four bytes at a time, where four blocks lie side by side: `first`, `count`, `pitch` and the address
    `base` are multiples of 4.
    """
    if WORDS:
        word = first + 4 * tl.arange(0, COUNT // 4)
        words = base.to(tl.pointer_type(tl.int32), bitcast=True)
        at = scale_offset(row[:, None], word[None, :], pitch, LAYOUT)
        found = tl.load(words + at // 4, ok[:, None] & (word < count)[None, :], other=0)
        bytes = found[:, :, None] >> (8 * tl.arange(0, 4))[None, None, :]
        factors = tl.reshape(bytes, [row.shape[0], COUNT]).to(tl.uint8)
    else:
        block = first + tl.arange(0, COUNT)
        if LAYOUT == "linear":
            at = row.to(tl.int64)[:, None] * pitch + block.to(tl.int64)[None, :] * step
        elif LAYOUT == "strips":
            at = (block // STRIP).to(tl.int64)[None, :] * pitch + row[:, None] * STRIP + (block % STRIP)[None, :]
        else:
            at = scale_offset(row[:, None], block[None, :], pitch, LAYOUT)
        factors = tl.load(base + at, ok[:, None] & (block < count)[None, :], other=0)
    return factors


@triton.jit
def widen(codes, ELEMENT: tl.constexpr, COMPUTE: tl.constexpr, CAPABILITY: tl.constexpr):
    """Codes of a number format ELEMENT as the dtype COMPUTE, which represents them exactly."""
    if ELEMENT == "e2m1":
        wide = from_e2m1(codes)
    elif ELEMENT == "i4":
        wide = from_int4(codes)
    elif ELEMENT == "fp8e4nv" or ELEMENT == "fp8e5":
        wide = from_fp8(codes, ELEMENT, CAPABILITY)
    else:
        wide = codes
    return wide.to(COMPUTE)


@triton.jit
def wide_factors(factors, FACTOR: tl.constexpr, CAPABILITY: tl.constexpr):
    """Factors as float32. Factors in "ue8m0" and "ue4m3" come as bytes."""
    if FACTOR == "ue8m0":
        wide = from_ue8m0(factors)
    elif FACTOR == "ue4m3":
        wide = from_fp8(factors, "fp8e4nv", CAPABILITY)
    else:
        wide = factors.to(tl.float32)
    return wide


@triton.jit
def widen_blocks(
    codes, factors, ELEMENT: tl.constexpr, FACTOR: tl.constexpr, WIDTH: tl.constexpr, COMPUTE: tl.constexpr,
    CAPABILITY: tl.constexpr,
):  # fmt: skip
    """Codes [ROWS, .] times the factors [ROWS, blocks] of their blocks of WIDTH columns, as the dtype COMPUTE.

    Two products are exact in bfloat16, within its range: e2m1 times ue4m3 has 6 significant bits, and a code times a
    power of two has the code's.
    """
    wide = widen(codes, ELEMENT, tl.float32, CAPABILITY)
    return times_blocks(wide, wide_factors(factors, FACTOR, CAPABILITY), WIDTH).to(COMPUTE)


# PTX for four bytes of e2m1 codes ($4) and their four float32 factors ($5 ... $8): $0 and $1 become the low codes of
# the four bytes, $2 and $3 the high ones, each times its factor, two bfloat16 in a register.
#
# An H100 reads FP4 from memory at 30 values a clock and multiprocessor, which leaves few instructions for each. Two
# bfloat16 at a time take a third of the instructions of float32.
#
# The three bits of a magnitude go to the two lowest exponent bits and the highest mantissa bit of a bfloat16. This
# bfloat16 is the value over 2^126: 1.5, e2m1 code 0b011, becomes 0x00C0, which is 1.5 * 2^-126. The first fma
# multiplies by 2^126 (0x7E80), the second by the factor; one product of both could overflow. fma with -0 is a
# multiplication that compute capability 8.0 has too.
_E2M1_TIMES = tl.constexpr("""
{
.reg .b32 pair, code, factor, none, power;
mov.b32 none, 0x80008000;
mov.b32 power, 0x7E807E80;
cvt.rn.bf16x2.f32 factor, $6, $5;
prmt.b32 pair, $4, 0, 0x1404;
shr.u32 code, pair, 2;
and.b32 code, code, 0x01C001C0;
shl.b32 $0, pair, 4;
lop3.b32 $0, $0, none, code, 0xEA;
fma.rn.bf16x2 $0, $0, power, none;
fma.rn.bf16x2 $0, $0, factor, none;
shr.u32 code, pair, 6;
and.b32 code, code, 0x01C001C0;
lop3.b32 $2, pair, none, code, 0xEA;
fma.rn.bf16x2 $2, $2, power, none;
fma.rn.bf16x2 $2, $2, factor, none;
cvt.rn.bf16x2.f32 factor, $8, $7;
prmt.b32 pair, $4, 0, 0x3424;
shr.u32 code, pair, 2;
and.b32 code, code, 0x01C001C0;
shl.b32 $1, pair, 4;
lop3.b32 $1, $1, none, code, 0xEA;
fma.rn.bf16x2 $1, $1, power, none;
fma.rn.bf16x2 $1, $1, factor, none;
shr.u32 code, pair, 6;
and.b32 code, code, 0x01C001C0;
lop3.b32 $3, pair, none, code, 0xEA;
fma.rn.bf16x2 $3, $3, power, none;
fma.rn.bf16x2 $3, $3, factor, none;
}
""")


@triton.jit
def e2m1_times(codes, factor, DTYPE: tl.constexpr, CAPABILITY: tl.constexpr):
    """e2m1 bytes [rows, n] times float32 factors [rows, n], one a byte: the codes in the low halves of the bytes, and
    those in the high halves, each [rows, n] of DTYPE.

    Exact where DTYPE represents the products: bfloat16 does with factors in ue4m3 and, within its range, in ue8m0.
    """
    if CAPABILITY >= 80 and DTYPE == tl.bfloat16:
        low, high = tl.inline_asm_elementwise(
            _E2M1_TIMES, "=&r,=&r,=&r,=&r,r,r,r,r,r", [codes, factor], dtype=(tl.bfloat16, tl.bfloat16), is_pure=True,
            pack=4,
        )  # fmt: skip
    else:
        pairs = tl.reshape(from_e2m1(codes), [codes.shape[0], codes.shape[1], 2])
        low, high = tl.split(pairs * factor[:, :, None])
        low = low.to(DTYPE)
        high = high.to(DTYPE)
    return low, high


@triton.jit
def halves(
    codes, factors, FACTOR: tl.constexpr, WIDTH: tl.constexpr, COMPUTE: tl.constexpr, CAPABILITY: tl.constexpr
):  # fmt: skip
    """`widen_blocks` of e2m1 as two tensors: the even columns and the odd columns, [ROWS, BYTES] each."""
    wide = wide_factors(factors, FACTOR, CAPABILITY)
    SHAPE: tl.constexpr = [codes.shape[0], codes.shape[1] // (WIDTH // 2), WIDTH // 2]
    wide = tl.reshape(tl.broadcast_to(wide[:, :, None], SHAPE), codes.shape)
    return e2m1_times(codes, wide, COMPUTE, CAPABILITY)
