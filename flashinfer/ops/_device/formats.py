"""Narrow number formats: float32 to e4m3, e5m2, e2m1 and ue8m0, and back, with the same bits on every chip.

Rounding is to nearest, ties to even. A value that is too large, infinity included, becomes the largest finite one. NaN
is 0x7F in e4m3 and e5m2, 0xFF in ue8m0, and +6 in e2m1, which has no NaN: these are the results of the chips' own
instructions (PTX ISA, cvt with .satfinite). A scale factor in ue4m3 is an e4m3 without sign. (OCP 8-bit Floating Point
Specification 1.0; OCP Microscaling Formats Specification 1.0.)

CAPABILITY is the compute capability times ten, as in Target, and 0 in Triton's interpreter. It decides whether an
instruction or integer arithmetic converts; both give the same bits.
"""

import triton
import triton.language as tl


@triton.jit
def _encode(x, MANTISSA: tl.constexpr, BIAS: tl.constexpr, LARGEST: tl.constexpr):
    """float32 as int32 codes of an FP8 format with MANTISSA bits of mantissa.

    For e4m3 (MANTISSA 3, BIAS 7), 1.0 has the bits 0x3F800000: shifted right by 20 they are 1016, less (127 - 7) << 3
    = 960 the code is 56 = 0x38.
    """
    bits = x.to(tl.int32, bitcast=True)
    magnitude = bits & 0x7FFFFFFF
    # A normal number drops its low bits. Adding just under half of the last bit kept, plus one if that bit is odd,
    # rounds to nearest even.
    DROPPED: tl.constexpr = 23 - MANTISSA
    rounding = ((1 << (DROPPED - 1)) - 1) + ((magnitude >> DROPPED) & 1)
    normal = ((magnitude + rounding) >> DROPPED) - ((127 - BIAS) << MANTISSA)
    # A subnormal's code is its multiple of the format's smallest value. That value is the last mantissa bit of STEP, so
    # the float32 sum magnitude + STEP rounds to a multiple of it.
    EXPONENT: tl.constexpr = 24 - BIAS - MANTISSA
    STEP: tl.constexpr = 1.0 * (1 << EXPONENT)
    steps = (magnitude.to(tl.float32, bitcast=True) + STEP).to(tl.int32, bitcast=True) - ((127 + EXPONENT) << 23)
    code = tl.minimum(tl.where(magnitude < ((128 - BIAS) << 23), steps, normal), LARGEST)
    return tl.where(magnitude > 0x7F800000, 0x7F, code | ((bits >> 24) & 0x80))


@triton.jit
def to_fp8(x, DTYPE: tl.constexpr, CAPABILITY: tl.constexpr):
    """float32 as bytes of e4m3 ("fp8e4nv") or e5m2 ("fp8e5")."""
    tl.static_assert(DTYPE == "fp8e4nv" or DTYPE == "fp8e5", "fp8e4nv or fp8e5")
    # Compute capability 8.9 has the instructions, but Triton converts through float16 there, which rounds twice.
    if DTYPE == "fp8e4nv":
        if CAPABILITY >= 90:
            return x.to(tl.float8e4nv).to(tl.uint8, bitcast=True)
        return _encode(x, 3, 7, 0x7E).to(tl.uint8)
    if CAPABILITY >= 90:
        return x.to(tl.float8e5).to(tl.uint8, bitcast=True)
    return _encode(x, 2, 15, 0x7B).to(tl.uint8)


@triton.jit
def from_fp8(code, DTYPE: tl.constexpr, CAPABILITY: tl.constexpr):
    """Bytes of e4m3 ("fp8e4nv") or e5m2 ("fp8e5") as float32; exact.

    e5m2 is the upper byte of a float16. e4m3 with its bits in the places of a float16's is the value over 256, since
    the exponent biases are 7 and 15; this holds for subnormals too. Its NaN is handled apart.
    """
    tl.static_assert(DTYPE == "fp8e4nv" or DTYPE == "fp8e5", "fp8e4nv or fp8e5")
    if DTYPE == "fp8e4nv":
        if CAPABILITY >= 89:
            return code.to(tl.float8e4nv, bitcast=True).to(tl.float32)
        bits = code.to(tl.uint16)
        half = (((bits & 0x80) << 8) | ((bits & 0x7F) << 7)).to(tl.float16, bitcast=True)
        return tl.where((bits & 0x7F) == 0x7F, float("nan"), half.to(tl.float32) * 256.0)
    return (code.to(tl.uint16) << 8).to(tl.float16, bitcast=True).to(tl.float32)


def _codes_of_four_pairs() -> str:
    """PTX that converts eight float32: $1 ... $4 to the low halves of the four bytes of $0, $5 ... $8 to the high ones.

    Each code is found as in `_e2m1_code`, from half the magnitude: it is what the bits of a float32 exceed 0x4B400000
    by. The eight are joined as sum = sum * 16 + code, by multiplications, because the unit for comparisons and logic
    bounds the conversion. 0x3F400000 is the sum, modulo 2^32, that the eight 0x4B400000 make; it is subtracted.
    """
    lines = [".reg .f32 m, low, middle, high, h<8>;", ".reg .s32 code, next, sum;", ".reg .b32 even, odd, more;"]
    for n in (7, 3, 6, 2, 5, 1, 4, 0):
        # The product of a NaN has no sign; the minimum of it and 3 is 3.
        lines += [f"mul.rn.f32 h{n}, ${n + 1}, 0f3F000000;", f"abs.f32 m, h{n};", "min.f32 m, m, 0f40400000;"]
        lines += ["fma.rn.f32 low, m, 0f40800000, 0f4B400000;", "mov.b32 code, low;"]
        lines += ["fma.rn.f32 middle, m, 0f40000000, 0f4B400002;", "mov.b32 next, middle;", "min.s32 code, code, next;"]
        lines += ["add.rn.f32 high, m, 0f4B400004;", "mov.b32 next, high;", "min.s32 code, code, next;"]
        lines.append("mov.b32 sum, code;" if n == 7 else "mad.lo.s32 sum, sum, 16, code;")
    # Signs: prmt with a selector of 8 or more fills a byte with the sign of the selected byte.
    for name, n in (("even", 0), ("odd", 4)):
        lines += [f"prmt.b32 {name}, h{n}, h{n + 1}, 0x00FB;", f"prmt.b32 more, h{n + 2}, h{n + 3}, 0x00FB;"]
        lines.append(f"prmt.b32 {name}, {name}, more, 0x5410;")
    lines += ["sub.s32 sum, sum, 0x3F400000;", "lop3.b32 $0, sum, even, 0x08080808, 0xF8;"]
    lines.append("lop3.b32 $0, $0, odd, 0x80808080, 0xF8;")
    return "{" + " ".join(lines) + "}"


_CODES_OF_FOUR_PAIRS = tl.constexpr(_codes_of_four_pairs())


@triton.jit
def to_e2m1(x, CAPABILITY: tl.constexpr):
    """float32 [rows, n] as e2m1 bytes [rows, n // 2]: an even column in the low half, its neighbour in the high."""
    even, odd = tl.split(tl.reshape(x, [x.shape[0], x.shape[1] // 2, 2]))
    if CAPABILITY >= 100:
        return tl.inline_asm_elementwise(
            "{ .reg .b8 pair; cvt.rn.satfinite.e2m1x2.f32 pair, $2, $1; cvt.u32.u8 $0, pair; }",
            "=r,f,f", [even, odd], dtype=tl.int32, is_pure=True, pack=1,
        ).to(tl.uint8)  # fmt: skip
    if CAPABILITY >= 80:
        return tl.inline_asm_elementwise(
            _CODES_OF_FOUR_PAIRS, "=&r,f,f,f,f,f,f,f,f", [even, odd], dtype=tl.uint8, is_pure=True, pack=4
        )
    return (_e2m1_code(even) | (_e2m1_code(odd) << 4)).to(tl.uint8)


@triton.jit
def _e2m1_code(x):
    """float32 as int32 codes of e2m1, with half the instructions of `_encode`.

    A magnitude m has code 2 m up to 2, m + 2 from 2 to 4, and m / 2 + 4 from 4 to 6; for every m it is the least of
    the three. Adding 1.5 * 2^23 (STEPS), where float32 values are 1 apart, rounds each to an integer, ties to even.
    """
    STEPS: tl.constexpr = 12582912.0
    magnitude = tl.abs(x)
    low = tl.minimum(magnitude * 2 + STEPS, magnitude + (STEPS + 2))
    high = tl.minimum(magnitude * 0.5 + (STEPS + 4), STEPS + 7)
    code = (tl.minimum(low, high).to(tl.int32, bitcast=True) & 7) | ((x.to(tl.int32, bitcast=True) >> 28) & 8)
    return tl.where(x == x, code, 7)


@triton.jit
def reciprocal(x, CAPABILITY: tl.constexpr):
    """1 / float32 x, rounded once."""
    if CAPABILITY == 0:
        return tl.div_rn(tl.full(x.shape, 1.0, tl.float32), x)
    return tl.inline_asm_elementwise("rcp.rn.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1)


@triton.jit
def _e2m1_value(code):
    """The e2m1 in the low four bits, as float32. Its bits in the upper bits of a float16 are the value over 2^14, since
    the exponent biases are 1 and 15."""
    bits = code.to(tl.uint16)
    return (((bits & 8) << 12) | ((bits & 7) << 9)).to(tl.float16, bitcast=True).to(tl.float32) * 16384.0


@triton.jit
def from_e2m1(code):
    """e2m1 bytes [rows, n] as float32 [rows, 2 n], low halves in even columns; exact."""
    pairs = tl.join(_e2m1_value(code), _e2m1_value(code >> 4))
    return tl.reshape(pairs, [code.shape[0], code.shape[1] * 2])


@triton.jit
def from_int4(code):
    """Bytes of two int4 each [rows, n] as float32 [rows, 2 n], low halves in even columns; exact."""
    wide = code.to(tl.int32)
    pairs = tl.join(((wide & 15) ^ 8) - 8, ((wide >> 4) ^ 8) - 8)
    return tl.reshape(pairs, [code.shape[0], code.shape[1] * 2]).to(tl.float32)


@triton.jit
def i8_to_fp16(code):
    """Bytes of int8 as float16; exact. With the sign bit flipped a byte is x + 128; as the low mantissa bits of 1024 it
    is 1024 + 128 + x, of which 1152 is subtracted."""
    return ((code ^ 0x80).to(tl.uint16) | 0x6400).to(tl.float16, bitcast=True) - 1152.0


@triton.jit
def i4_to_fp16(code):
    """The int4 in the low four bits as float16; exact, as in half_of_i8."""
    return (((code & 15) ^ 8).to(tl.uint16) | 0x6400).to(tl.float16, bitcast=True) - 1032.0


@triton.jit
def to_ints(x, LARGEST: tl.constexpr):
    """float32 as integers of magnitude up to LARGEST, int32; to nearest, ties to even. NaN is 0."""
    # Above 2^23 float32 values are 1 apart, so the addition rounds to an integer.
    STEPS: tl.constexpr = 12582912.0
    whole = (tl.minimum(tl.maximum(x, -LARGEST), LARGEST) + STEPS) - STEPS
    return tl.where(x == x, whole, 0.0).to(tl.int32)


@triton.jit
def to_ue8m0(magnitude, PEAK: tl.constexpr):
    """The least power of two that is at least a / PEAK, as bytes of ue8m0. `magnitude` is the bits of a float32 a >= 0.

    PEAK is the largest value of the elements that share the factor: 448 for e4m3, 6 for e2m1. No quotient is computed.
    With a = m * 2^e and PEAK = n * 2^f (1 <= m, n < 2), the result is 2^(e - f), or twice that where m > n. For PEAK
    6 = 1.5 * 2^2: a = 12 = 1.5 * 2^3 gives 2, a = 13 gives 4.
    """
    tl.static_assert(PEAK == 448 or PEAK == 6, "448 or 6")
    MANTISSA: tl.constexpr = 0x600000 if PEAK == 448 else 0x400000
    EXPONENT: tl.constexpr = 8 if PEAK == 448 else 2
    code = tl.maximum(((magnitude + (0x7FFFFF - MANTISSA)) >> 23) - EXPONENT, 0)
    code = tl.where(magnitude == 0x7F800000, 254, code)
    return tl.where(magnitude > 0x7F800000, 255, code).to(tl.uint8)


@triton.jit
def from_ue8m0(code):
    """Bytes of ue8m0 as float32; exact. 2^-127 is a subnormal."""
    wide = code.to(tl.int32)
    bits = tl.where(wide == 0, 0x400000, wide << 23)
    return tl.where(wide == 255, 0x7FC00000, bits).to(tl.float32, bitcast=True)


@triton.jit
def inverse_ue8m0(code):
    """1 / from_ue8m0(code); exact."""
    wide = code.to(tl.int32)
    return from_ue8m0(tl.where(wide == 255, 255, 254 - wide))
