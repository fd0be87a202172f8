"""Operands of products: factors are loaded, and codes widened to what the tensor cores take, times their factors.

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

    Of "linear", rows are `pitch` apart and blocks `step`. Of "strips", STRIP blocks of all rows lie side by side, row
    after row, and the next STRIP blocks `pitch` further: block 5 of row 7, with a STRIP of 4, at pitch + 7 * 4 + 1. Of
    the tiled layouts `pitch` is the number of blocks in a row of the layout, as in `scale_offset`.

    With WORDS, of bytes that lie side by side in fours, four are read at a time: `first`, `count`, `pitch` and the base
    divide by 4.
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
    """Codes of an element as COMPUTE, which holds them exactly."""
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
    """Factors as float32; of "ue8m0" and "ue4m3" they are bytes."""
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
    """Codes [ROWS, .] times the factors [ROWS, blocks] of their blocks of WIDTH, as COMPUTE.

    The product of e2m1 and ue4m3 has 6 significant bits and that of anything and a power of two its own: both are exact
    in bfloat16, within its range.
    """
    wide = widen(codes, ELEMENT, tl.float32, CAPABILITY)
    return times_blocks(wide, wide_factors(factors, FACTOR, CAPABILITY), WIDTH).to(COMPUTE)


# FP4 is read from memory at 30 values a clock and multiprocessor on an H100, so few instructions are left for each: as
# float32, values and factors take three times as many as two bfloat16 at a time do.
#
# An e2m1 in the sign, the two lowest exponent bits and the highest mantissa bit of a bfloat16 has an exponent bias 126
# larger; 0x7E80 is 2^126. It is restored before the factor comes, for both together may be out of range. The values of
# neighbouring bytes are the halves of a register, as their factors are: $5 ... $8 are float32. fma with -0 is a product
# that compute capability 8.0 has too.
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
    """e2m1 bytes [rows, n] times float32 factors [rows, n], one a byte: the low halves and the high halves as DTYPE.

    Exact where DTYPE holds the products; bfloat16 holds those with factors in ue4m3 and, within its range, ue8m0.
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
    """`widen_blocks` of e2m1, the even columns and the odd ones apart, [ROWS, BYTES] each."""
    wide = wide_factors(factors, FACTOR, CAPABILITY)
    SHAPE: tl.constexpr = [codes.shape[0], codes.shape[1] // (WIDTH // 2), WIDTH // 2]
    wide = tl.reshape(tl.broadcast_to(wide[:, :, None], SHAPE), codes.shape)
    return e2m1_times(codes, wide, COMPUTE, CAPABILITY)
