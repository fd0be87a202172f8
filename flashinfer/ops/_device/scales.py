"""Scale factors: their offsets in each layout, and the quantization of rows with one factor per block.

The functions that quantize take rows `y`, float32 [ROWS, BLOCK] in registers with zeros past the row's end, ROWS and
BLOCK powers of two. They return codes, as bytes, and the scale factor of each block of V columns. A NaN makes the
factor of its block NaN; other blocks are not affected.
"""

import triton
import triton.language as tl

from flashinfer.ops._device.formats import (
    from_e2m1,
    from_fp8,
    inverse_ue8m0,
    reciprocal,
    to_e2m1,
    to_fp8,
    to_ints,
    to_ue8m0,
)


@triton.jit
def scale_offset(row, block, blocks, LAYOUT: tl.constexpr):
    """Offset, 64 bits, of the scale factor of (row, block) in a layout: "linear", "128x4" or "8x4".

    `blocks` is the number of factors in a row of the layout; the tiled layouts pad it to a multiple of 4, and rows to
    a multiple of 128 or 8. A tile of "128x4" takes 512 bytes and has four groups of 32 rows: row r of group g has its
    four factors at 16 r + 4 g. A tile of "8x4" is eight rows of four. Tiles of the same rows follow each other.

    With blocks = 8 in "128x4", the factor of row 37 and block 6 is in tile 6 // 4 = 1, group 1, row 5 of the group, at
    512 + 16 * 5 + 4 * 1 + 2 = 598.
    """
    tl.static_assert(LAYOUT == "linear" or LAYOUT == "128x4" or LAYOUT == "8x4", "linear, 128x4 or 8x4")
    row = row.to(tl.int64)
    if LAYOUT == "linear":
        return row * blocks + block
    if LAYOUT == "128x4":
        inside = row % 32 * 16 + row // 32 % 4 * 4 + block % 4
        return (row // 128 * (blocks // 4) + block // 4) * 512 + inside
    return (row // 8 * (blocks // 4) + block // 4) * 32 + row % 8 * 4 + block % 4


@triton.jit
def _larger(a, b):
    """The larger value; NaN if either is."""
    return tl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def block_amax(y, V: tl.constexpr):
    """The largest magnitude in each block of V columns, as the bits of a float32, int32 [ROWS, BLOCK // V]. NaN counts
    as larger than infinity."""
    largest = tl.reduce(tl.reshape(tl.abs(y), [y.shape[0], y.shape[1] // V, V]), 2, _larger)
    return largest.to(tl.int32, bitcast=True)


@triton.jit
def times_blocks(y, factor, V: tl.constexpr):
    """y [ROWS, BLOCK] times factor [ROWS, BLOCK // V], one for V columns."""
    blocks = tl.reshape(y, [y.shape[0], y.shape[1] // V, V]) * factor[:, :, None]
    return tl.reshape(blocks, [y.shape[0], y.shape[1]])


@triton.jit
def quantize_fp8(y, V: tl.constexpr, DTYPE: tl.constexpr, POWER_OF_TWO: tl.constexpr, CAPABILITY: tl.constexpr):
    """Codes [ROWS, BLOCK] of e4m3 or e5m2, and float32 scales [ROWS, BLOCK // V]; y is code * scale.

    V = BLOCK gives one scale a row. scale = amax / largest, at least 2^-126, so that its inverse is finite.
    POWER_OF_TWO rounds it up to a power of two.
    """
    LARGEST: tl.constexpr = 448.0 if DTYPE == "fp8e4nv" else 57344.0
    amax = block_amax(y, V).to(tl.float32, bitcast=True)
    scale = tl.div_rn(amax, tl.full(amax.shape, LARGEST, tl.float32))
    # Not tl.maximum, which would lose a NaN.
    scale = tl.where(scale < 1.1754943508222875e-38, 1.1754943508222875e-38, scale)
    if POWER_OF_TWO:
        bits = scale.to(tl.int32, bitcast=True)
        scale = tl.where(scale < float("inf"), (bits + 0x7FFFFF) & 0x7F800000, bits).to(tl.float32, bitcast=True)
    return to_fp8(times_blocks(y, reciprocal(scale, CAPABILITY), V), DTYPE, CAPABILITY), scale


@triton.jit
def quantize_rows(y, ELEMENT: tl.constexpr, WIDTH: tl.constexpr, CAPABILITY: tl.constexpr):
    """Bytes of codes of "fp8e4nv", "i8" or "i4", and float32 factors: one for WIDTH columns, or one a row if WIDTH is
    0.

    The factor is amax / largest, as in `quantize_fp8`. Infinity counts as the largest float32.
    """
    MOST: tl.constexpr = 3.4028234663852886e38
    y = tl.where(tl.abs(y) == float("inf"), tl.where(y > 0, MOST, -MOST), y)
    V: tl.constexpr = y.shape[1] if WIDTH == 0 else WIDTH
    if ELEMENT == "fp8e4nv":
        codes, scale = quantize_fp8(y, V, ELEMENT, False, CAPABILITY)
    else:
        LARGEST: tl.constexpr = 127.0 if ELEMENT == "i8" else 7.0
        amax = block_amax(y, V).to(tl.float32, bitcast=True)
        scale = tl.div_rn(amax, tl.full(amax.shape, LARGEST, tl.float32))
        # Not tl.maximum, which would lose a NaN.
        scale = tl.where(scale < 1.1754943508222875e-38, 1.1754943508222875e-38, scale)
        codes = to_ints(times_blocks(y, reciprocal(scale, CAPABILITY), V), LARGEST)
        if ELEMENT == "i4":
            low, high = tl.split(tl.reshape(codes, [y.shape[0], y.shape[1] // 2, 2]))
            codes = (low & 15) | (high << 4)
        codes = codes.to(tl.uint8)
    return codes, scale


@triton.jit
def quantize_nvfp4(y, global_scale, CAPABILITY: tl.constexpr, SCORE: tl.constexpr = tl.constexpr("")):
    """NVFP4: e2m1 codes [ROWS, BLOCK // 2], and ue4m3 bytes [ROWS, BLOCK // 16]; y is code * factor / global_scale.

    factor = e4m3(global_scale * (amax * (1 / 6))), code = e2m1(y * (1 / (factor * (1 / global_scale)))), each
    operation with one float32 rounding. A factor of zero gives codes of zero. global_scale is a scalar or [ROWS, 1].

    With a SCORE each block is also quantized with amax / 4 in place of amax / 6, and the better of the two is taken:
    the one with the smaller sum of absolute errors ("mae") or of squared errors ("mse"). e2m1 has no value between 4
    and 6, so amax / 4 can have smaller errors. (Cook et al., Four Over Six, 2025, https://arxiv.org/abs/2512.02010)
    """
    codes, factor = _nvfp4(y, global_scale, 6, CAPABILITY)
    if SCORE != "":
        codes4, factor4 = _nvfp4(y, global_scale, 4, CAPABILITY)
        worse = _nvfp4_error(y, codes, factor, global_scale, SCORE, CAPABILITY)
        take = _nvfp4_error(y, codes4, factor4, global_scale, SCORE, CAPABILITY) < worse
        factor = tl.where(take, factor4, factor)
        SHAPE: tl.constexpr = [y.shape[0], y.shape[1] // 16, 8]
        codes = tl.where(take[:, :, None], tl.reshape(codes4, SHAPE), tl.reshape(codes, SHAPE))
        codes = tl.reshape(codes, [y.shape[0], y.shape[1] // 2])
    return codes, factor


@triton.jit
def _nvfp4(y, global_scale, PEAK: tl.constexpr, CAPABILITY: tl.constexpr):
    """NVFP4 with the largest value of each block mapped to PEAK."""
    amax = block_amax(y, 16).to(tl.float32, bitcast=True)
    factor = to_fp8(global_scale * (amax * (1.0 / PEAK)), "fp8e4nv", CAPABILITY)
    wide = from_fp8(factor, "fp8e4nv", CAPABILITY)
    inverse = reciprocal(wide * reciprocal(global_scale, CAPABILITY), CAPABILITY)
    inverse = tl.where(wide == 0, 0.0, inverse)
    return to_e2m1(times_blocks(y, inverse, 16), CAPABILITY), factor


@triton.jit
def _product(a, b, CAPABILITY: tl.constexpr):
    """a * b, rounded. The compiler cannot fuse it with an addition that follows."""
    if CAPABILITY == 0:
        return a * b
    a, b = tl.broadcast(a, b)
    return tl.inline_asm_elementwise("mul.rn.f32 $0, $1, $2;", "=f,f,f", [a, b], dtype=tl.float32, is_pure=True, pack=1)


@triton.jit
def _nvfp4_error(y, codes, factor, global_scale, SCORE: tl.constexpr, CAPABILITY: tl.constexpr):
    """Per block, the sum of |y - decoded| or of its square. It is a tree sum with neighbours first: a fixed order gives
    the same rounding everywhere."""
    tl.static_assert(SCORE == "mae" or SCORE == "mse", "mae or mse")
    scale = from_fp8(factor, "fp8e4nv", CAPABILITY) * reciprocal(global_scale, CAPABILITY)
    SHAPE: tl.constexpr = [y.shape[0], y.shape[1] // 16, 16]
    decoded = _product(tl.reshape(from_e2m1(codes), SHAPE), scale[:, :, None], CAPABILITY)
    error = tl.abs(tl.reshape(y, SHAPE) - decoded)
    if SCORE == "mse":
        error = _product(error, error, CAPABILITY)
    for i in tl.static_range(4):
        a, b = tl.split(tl.reshape(error, [y.shape[0], y.shape[1] // 16, 8 >> i, 2]))
        error = a + b
    return tl.reshape(error, [y.shape[0], y.shape[1] // 16])


@triton.jit
def quantize_blocks(y, scale, FORMAT: tl.constexpr, CAPABILITY: tl.constexpr, SCORE: tl.constexpr = tl.constexpr("")):
    """Codes and factors, as bytes, in "nvfp4", "mxfp4" or "mxfp8". `scale` and SCORE are used by NVFP4 alone."""
    tl.static_assert(FORMAT == "nvfp4" or FORMAT == "mxfp4" or FORMAT == "mxfp8", "nvfp4, mxfp4 or mxfp8")
    if FORMAT == "nvfp4":
        codes, factors = quantize_nvfp4(y, scale, CAPABILITY, SCORE)
    elif FORMAT == "mxfp4":
        codes, factors = quantize_mxfp4(y, CAPABILITY)
    else:
        codes, factors = quantize_mxfp8(y, CAPABILITY)
    return codes, factors


@triton.jit
def quantize_mxfp4(y, CAPABILITY: tl.constexpr):
    """MXFP4: e2m1 codes [ROWS, BLOCK // 2], and ue8m0 bytes [ROWS, BLOCK // 32], the least with amax / factor <= 6."""
    factor = to_ue8m0(block_amax(y, 32), 6)
    return to_e2m1(times_blocks(y, inverse_ue8m0(factor), 32), CAPABILITY), factor


@triton.jit
def quantize_mxfp8(y, CAPABILITY: tl.constexpr):
    """MXFP8: e4m3 codes [ROWS, BLOCK], and ue8m0 bytes [ROWS, BLOCK // 32], the least with amax / factor <= 448."""
    factor = to_ue8m0(block_amax(y, 32), 448)
    return to_fp8(times_blocks(y, inverse_ue8m0(factor), 32), "fp8e4nv", CAPABILITY), factor
