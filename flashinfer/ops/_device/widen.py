"""FP4 to bfloat16 for tensor cores that do not take it, two values an instruction.

A weight of 4 bits is read from memory at 30 values a clock and multiprocessor on an H100, so that few instructions are
left for each: as float32, values and factors take three times as many.
"""

import triton
import triton.language as tl

from flashinfer.ops._device.formats import from_e2m1


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
