"""Loads of keys and values: rows of a ragged tensor, or rows of pages found through a page table."""

import triton
import triton.language as tl

from flashinfer.ops._device.formats import i4_to_fp16, i8_to_fp16


@triton.jit
def page_ids(positions, there, kv_base, kv_indices, PAGE_SIZE: tl.constexpr):
    """Page numbers of a request's keys at `positions`. For a ragged source the result is not used."""
    if PAGE_SIZE == 0:
        return positions
    return tl.load(kv_indices + kv_base + positions // PAGE_SIZE, mask=there, other=0)


@triton.jit
def offsets_in(pages, positions, kv_base, stride_page, stride_n, PAGE_SIZE: tl.constexpr):
    """Offsets, in elements, of the rows of a request's keys at `positions`; int64, for pools of any size."""
    if PAGE_SIZE == 0:
        return (kv_base + positions).to(tl.int64) * stride_n
    return pages.to(tl.int64) * stride_page + (positions % PAGE_SIZE).to(tl.int64) * stride_n


@triton.jit
def row_offsets(positions, there, kv_base, kv_indices, stride_page, stride_n, PAGE_SIZE: tl.constexpr):
    """`offsets_in` for the `page_ids` of a request's keys at `positions`."""
    pages = page_ids(positions, there, kv_base, kv_indices, PAGE_SIZE)
    return offsets_in(pages, positions, kv_base, stride_page, stride_n, PAGE_SIZE)


@triton.jit
def widen(x, DTYPE: tl.constexpr, NATIVE_FP8: tl.constexpr, to: tl.constexpr):
    """Keys or values as the dtype `to` of the products. Bytes are int8 ("i8"), e4m3 ("fp8e4nv") or e5m2 ("fp8e5").

    e5m2 is the upper byte of a float16. e4m3 with its bits in the places of a float16's is the value over 256, since
    the exponent biases are 7 and 15; this holds for subnormals too. Its NaN is handled apart. (OCP 8-bit Floating Point
    Specification 1.0.)
    """
    if DTYPE == "i8":
        return i8_to_fp16(x).to(to)
    if DTYPE == "fp8e5":
        return (x.to(tl.uint16) << 8).to(tl.float16, bitcast=True).to(to)
    if DTYPE == "fp8e4nv":
        if NATIVE_FP8:
            return x.to(tl.float8e4nv, bitcast=True).to(to)
        bits = x.to(tl.uint16)
        magnitude = bits & 0x7F
        half = (magnitude << 7).to(tl.float16, bitcast=True) * 256.0
        half = tl.where((bits & 0x80) != 0, -half, half)
        return tl.where(magnitude == 0x7F, float("nan"), half).to(to)
    return x.to(to)


@triton.jit
def _e2m1(code):
    """The e2m1 in the low four bits, as float16. Its bits in the upper bits of a float16 are the value over 2^14, since
    the exponent biases are 1 and 15."""
    bits = code.to(tl.uint16)
    return (((bits & 8) << 12) | ((bits & 7) << 9)).to(tl.float16, bitcast=True) * 16384.0


@triton.jit
def _codes(bits, ELEMENT: tl.constexpr):
    """The ELEMENT ("e2m1" or int4) in the low four bits of bytes, as float16."""
    return _e2m1(bits) if ELEMENT == "e2m1" else i4_to_fp16(bits)


@triton.jit
def load_packed(
    codes, factors, at, at_factors, units, there, first,
    DIM: tl.constexpr, PAD: tl.constexpr, ELEMENT: tl.constexpr, WIDTH: tl.constexpr, ROW_MASK: tl.constexpr,
    NATIVE_FP8: tl.constexpr, to: tl.constexpr,
):  # fmt: skip
    """Load rows of 4-bit codes, two a byte, at offsets `at`: DIM elements from `first` on, divided by a unit of the row
    (`row_units`), as [rows, PAD].

    With WIDTH 0 the unit is the row's factor, so the elements are the codes. Else factors are at offsets `at_factors`
    [rows, PAD // WIDTH], and elements are code * factor / unit. In nvfp4 units are 1 and the products exact: e2m1 has
    two significant bits and e4m3 four, which float16 and bfloat16 represent.
    """
    ROWS: tl.constexpr = at.shape[0]
    byte = tl.arange(0, PAD // 2)
    byte_ok = (byte < DIM // 2)[None, :]
    if ROW_MASK:
        byte_ok = byte_ok & there[:, None]
    pairs = tl.load(codes + at[:, None] + (first // 2 + byte)[None, :], mask=byte_ok, other=0)
    if WIDTH == 0:
        low, high = _codes(pairs, ELEMENT), _codes(pairs >> 4, ELEMENT)
    else:
        block = tl.arange(0, PAD // WIDTH)
        block_ok = (block < DIM // WIDTH)[None, :]
        if ROW_MASK:
            block_ok = block_ok & there[:, None]
        factor = tl.load(factors + at_factors, mask=block_ok, other=0)
        HALF: tl.constexpr = tl.float32 if to == tl.float32 else tl.float16
        if ELEMENT == "e2m1":
            factor = widen(factor, "fp8e4nv", NATIVE_FP8, tl.float16)[:, :, None]
        else:
            factor = (factor * (1.0 / units)[:, None]).to(HALF)[:, :, None]
        pairs = tl.reshape(pairs, [ROWS, PAD // WIDTH, WIDTH // 2])
        low, high = _codes(pairs, ELEMENT) * factor, _codes(pairs >> 4, ELEMENT) * factor
    return tl.reshape(tl.join(low, high), [ROWS, PAD]).to(to)


@triton.jit
def factors_at(
    positions, there, kv_base, kv_indices, first, stride_page, stride_n, DIM: tl.constexpr, PAD: tl.constexpr,
    WIDTH: tl.constexpr, PAGE_SIZE: tl.constexpr, INTERLEAVED: tl.constexpr,
):  # fmt: skip
    """Offsets [keys, PAD // WIDTH] of the factors of elements from `first` of a request's keys at `positions`.

    INTERLEAVED: the factors of each four tokens of a page are stored transposed: first factor 0 of the four tokens,
    then factor 1, in one contiguous block. With 8 factors a token, factor 3 of token 6 is at 3 * 4 + 6 % 4 = 14 of its
    block, which is row 4 + 14 // 8 = 5, column 6.
    """
    pages = page_ids(positions, there, kv_base, kv_indices, PAGE_SIZE)
    token = (positions % PAGE_SIZE)[:, None]
    block = first // WIDTH + tl.arange(0, PAD // WIDTH)[None, :]
    if INTERLEAVED:
        place = block * 4 + token % 4
        token = token // 4 * 4 + place // (DIM // WIDTH)
        block = place % (DIM // WIDTH)
    return pages.to(tl.int64)[:, None] * stride_page + token.to(tl.int64) * stride_n + block


@triton.jit
def power_of_two(x):
    """The power of two at or below a positive float32; at least 1e-30."""
    return tl.maximum((x.to(tl.int32, bitcast=True) & 0x7F800000).to(tl.float32, bitcast=True), 1e-30)


@triton.jit
def row_units(
    factors, positions, there, kv_base, kv_indices, stride_page, stride_n, D: tl.constexpr, D_PAD: tl.constexpr,
    WIDTH: tl.constexpr, PAGE_SIZE: tl.constexpr, ROW_MASK: tl.constexpr,
):  # fmt: skip
    """The units by which `load_packed` divides rows, float32 [keys]: the row's factor, or with several factors in a row
    a power of two.

    That power makes the largest factor 2048 to 4096, so that 7 times it is in float16's range. Factors down to 2^-25 of
    the largest are normal float16 numbers.
    """
    if WIDTH == 0:
        at = row_offsets(positions, there, kv_base, kv_indices, stride_page, stride_n, PAGE_SIZE)
        units = tl.load(factors + at, mask=there, other=0) if ROW_MASK else tl.load(factors + at)
    else:
        at = factors_at(
            positions, there, kv_base, kv_indices, 0, stride_page, stride_n, D, D_PAD, WIDTH, PAGE_SIZE, False
        )
        ok = (tl.arange(0, D_PAD // WIDTH) < D // WIDTH)[None, :]
        if ROW_MASK:
            ok = ok & there[:, None]
        units = power_of_two(tl.max(tl.load(factors + at, mask=ok, other=0), 1)) * (1.0 / 2048)
    return units


@triton.jit
def fit_half(x, AXIS: tl.constexpr):
    """bfloat16 rows as float16 rows and a power of two for each row. Products with FP8 need it, since FP8 is widened to
    float16.

    The largest element of a row is scaled into [2^14, 2^15). Elements down to 2^-28 of it are exact; smaller ones have
    an error of 2^-39 of it, which is less than that of float32 accumulation.
    """
    largest = tl.max(tl.abs(x.to(tl.float32)), AXIS, keep_dims=True)
    power = power_of_two(largest)
    return (x.to(tl.float32) * (16384.0 / power)).to(tl.float16), power * (1.0 / 16384.0)
