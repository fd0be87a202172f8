"""Narrow floating-point formats: float32 to e4m3, e5m2, e2m1 and ue8m0, and back, with the same bits on every chip.

Rounding is to nearest, ties to even. What is too large becomes the largest finite value; infinity is too large. NaN is
0x7F in e4m3 and e5m2, 0xFF in ue8m0, and +6 in e2m1, which has none: so the chips' own instructions have it (PTX ISA,
cvt with .satfinite). A scale factor in ue4m3 is an e4m3 without sign. (OCP 8-bit Floating Point Specification 1.0; OCP
Microscaling Formats Specification 1.0.)

CAPABILITY is the compute capability times ten, as Target has it. It is 0 in Triton's interpreter, and decides whether
an instruction or integer arithmetic converts. Both give the same bits.
"""

import triton
import triton.language as tl


@triton.jit
def _encode(
    x, MANTISSA: tl.constexpr, BIAS: tl.constexpr, SIGN: tl.constexpr, LARGEST: tl.constexpr, NAN: tl.constexpr
):  # fmt: skip
    """float32 as int32 codes of a format with MANTISSA bits of mantissa and the sign in bit SIGN."""
    bits = x.to(tl.int32, bitcast=True)
    magnitude = bits & 0x7FFFFFFF
    # A normal number keeps its top bits; just under half of the last of them is added, and the rest if it is odd.
    DROPPED: tl.constexpr = 23 - MANTISSA
    rounding = ((1 << (DROPPED - 1)) - 1) + ((magnitude >> DROPPED) & 1)
    normal = ((magnitude + rounding) >> DROPPED) - ((127 - BIAS) << MANTISSA)
    # A subnormal counts steps. In float32, the last bit of STEP is one of them, so that the sum is rounded to steps.
    EXPONENT: tl.constexpr = 24 - BIAS - MANTISSA
    STEP: tl.constexpr = 1.0 * (1 << EXPONENT)
    steps = (magnitude.to(tl.float32, bitcast=True) + STEP).to(tl.int32, bitcast=True) - ((127 + EXPONENT) << 23)
    code = tl.minimum(tl.where(magnitude < ((128 - BIAS) << 23), steps, normal), LARGEST)
    return tl.where(magnitude > 0x7F800000, NAN, code | ((bits >> (31 - SIGN)) & (1 << SIGN)))


@triton.jit
def to_fp8(x, DTYPE: tl.constexpr, CAPABILITY: tl.constexpr):
    """float32 as bytes of e4m3 ("fp8e4nv") or e5m2 ("fp8e5")."""
    tl.static_assert(DTYPE == "fp8e4nv" or DTYPE == "fp8e5", "fp8e4nv or fp8e5")
    # Compute capability 8.9 has the instructions, but Triton goes through float16 there, and so rounds twice.
    if DTYPE == "fp8e4nv":
        if CAPABILITY >= 90:
            return x.to(tl.float8e4nv).to(tl.uint8, bitcast=True)
        return _encode(x, 3, 7, 7, 0x7E, 0x7F).to(tl.uint8)
    if CAPABILITY >= 90:
        return x.to(tl.float8e5).to(tl.uint8, bitcast=True)
    return _encode(x, 2, 15, 7, 0x7B, 0x7F).to(tl.uint8)


@triton.jit
def from_fp8(code, DTYPE: tl.constexpr, CAPABILITY: tl.constexpr):
    """Bytes of e4m3 ("fp8e4nv") or e5m2 ("fp8e5") as float32; exact.

    Both are float16 with fewer bits. e5m2 is its upper byte. e4m3 shifted into place has an exponent bias 8 smaller,
    which a factor of 256 restores, subnormals included; its one NaN has to be named.
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
    """PTX: the e2m1 of $1 ... $4 in the low halves of the bytes of $0, of $5 ... $8 in the high ones.

    Each code is in the bits of a float32, above 0x4B400000, as `_e2m1_code` finds it, but from half a magnitude. The
    eight are put together by multiplications with 16, for the unit of comparisons and logic is the one that bounds a
    conversion; 0x3F400000 is what 32 bits keep of the eight 0x4B400000.
    """
    lines = [".reg .f32 m, low, middle, high, h<8>;", ".reg .s32 code, next, sum;", ".reg .b32 even, odd, more;"]
    for n in (7, 3, 6, 2, 5, 1, 4, 0):
        # The product of a NaN has no sign; the minimum of it and 3 is 3.
        lines += [f"mul.rn.f32 h{n}, ${n + 1}, 0f3F000000;", f"abs.f32 m, h{n};", "min.f32 m, m, 0f40400000;"]
        lines += ["fma.rn.f32 low, m, 0f40800000, 0f4B400000;", "mov.b32 code, low;"]
        lines += ["fma.rn.f32 middle, m, 0f40000000, 0f4B400002;", "mov.b32 next, middle;", "min.s32 code, code, next;"]
        lines += ["add.rn.f32 high, m, 0f4B400004;", "mov.b32 next, high;", "min.s32 code, code, next;"]
        lines.append("mov.b32 sum, code;" if n == 7 else "mad.lo.s32 sum, sum, 16, code;")
    # Signs: prmt's selectors from 8 on make a byte of the uppermost bit.
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
    """float32 as int32 codes of e2m1, by half the instructions of `_encode`.

    A magnitude m has code 2 m up to 2, m + 2 from there to 4, m / 2 + 4 to 6: the least of the three at each place.
    Each is rounded to an integer, ties to even, in the last bits of a float32 where one step is 1.
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
    """The low four bits as float32. As float16's upper bits they are an e2m1 with an exponent bias 14 larger."""
    bits = code.to(tl.uint16)
    return (((bits & 8) << 12) | ((bits & 7) << 9)).to(tl.float16, bitcast=True).to(tl.float32) * 16384.0


@triton.jit
def from_e2m1(code):
    """e2m1 bytes [rows, n] as float32 [rows, 2 n], low halves in even columns; exact."""
    pairs = tl.join(_e2m1_value(code), _e2m1_value(code >> 4))
    return tl.reshape(pairs, [code.shape[0], code.shape[1] * 2])


@triton.jit
def from_int4(code):
    """Bytes of two's complement halves [rows, n] as float32 [rows, 2 n], low halves in even columns; exact."""
    wide = code.to(tl.int32)
    pairs = tl.join(((wide & 15) ^ 8) - 8, ((wide >> 4) ^ 8) - 8)
    return tl.reshape(pairs, [code.shape[0], code.shape[1] * 2]).to(tl.float32)


@triton.jit
def half_of_i8(code):
    """Bytes of int8 as float16; exact. A byte below the exponent of 1024 adds to it, and its sign bit counts 128."""
    return ((code ^ 0x80).to(tl.uint16) | 0x6400).to(tl.float16, bitcast=True) - 1152.0


@triton.jit
def half_of_i4(code):
    """The low four bits, two's complement, as float16; exact, in the same way."""
    return (((code & 15) ^ 8).to(tl.uint16) | 0x6400).to(tl.float16, bitcast=True) - 1032.0


@triton.jit
def to_ints(x, LARGEST: tl.constexpr):
    """float32 as integers of magnitude up to LARGEST, int32; to nearest, ties to even. NaN is 0."""
    # Where one step of a float32 is 1, it is rounded so.
    STEPS: tl.constexpr = 12582912.0
    whole = (tl.minimum(tl.maximum(x, -LARGEST), LARGEST) + STEPS) - STEPS
    return tl.where(x == x, whole, 0.0).to(tl.int32)


@triton.jit
def to_ue8m0(magnitude, PEAK: tl.constexpr):
    """Bytes of the least power of two that is no less than a / PEAK, for the bits of a float32 a >= 0, as int32.

    PEAK is the largest value of the elements that the factor is for: 448 of e4m3, 6 of e2m1. The quotient is not
    computed: at equal exponents, a is above PEAK if its mantissa is, and only then is the next power of two due.
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
