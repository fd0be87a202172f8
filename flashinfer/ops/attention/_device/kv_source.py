"""Where keys and values are: rows of a ragged tensor, or rows of pages found through a table."""

import triton
import triton.language as tl

from flashinfer.ops._device.formats import i4_to_fp16, i8_to_fp16


@triton.jit
def page_ids(positions, there, kv_base, kv_indices, PAGE_SIZE: tl.constexpr):
    """Entries of the page table for a request's keys at `positions`; nothing of use for a ragged source."""
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
    """Both in one."""
    pages = page_ids(positions, there, kv_base, kv_indices, PAGE_SIZE)
    return offsets_in(pages, positions, kv_base, stride_page, stride_n, PAGE_SIZE)


@triton.jit
def widen(x, DTYPE: tl.constexpr, NATIVE_FP8: tl.constexpr, to: tl.constexpr):
    """Keys or values as the type they are multiplied in. Bytes are int8 ("i8"), e4m3 ("fp8e4nv") or e5m2 ("fp8e5").

    The last two are float16 with fewer bits. e5m2 is its upper byte. e4m3 shifted into place has an exponent bias 8
    smaller, which a factor of 256 restores, subnormals included; its one NaN pattern has to be named. (OCP 8-bit
    Floating Point Specification 1.0.)
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
    """The low four bits as float16. As its upper bits they are an e2m1 with an exponent bias 14 larger."""
    bits = code.to(tl.uint16)
    return (((bits & 8) << 12) | ((bits & 7) << 9)).to(tl.float16, bitcast=True) * 16384.0


@triton.jit
def _codes(bits, ELEMENT: tl.constexpr):
    """The low four bits of bytes as float16."""
    return _e2m1(bits) if ELEMENT == "e2m1" else i4_to_fp16(bits)


@triton.jit
def load_packed(
    codes, factors, at, at_factors, units, there, first,
    DIM: tl.constexpr, PAD: tl.constexpr, ELEMENT: tl.constexpr, WIDTH: tl.constexpr, ROW_MASK: tl.constexpr,
    NATIVE_FP8: tl.constexpr, to: tl.constexpr,
):  # fmt: skip
    """DIM elements from `first` of rows of codes, two a byte, at offsets `at`, over units of the rows, as [rows, PAD].

    With WIDTH 0 a unit is a row's factor, and elements are codes. Else factors are at [rows, PAD // WIDTH], and
    elements are code * factor / unit: of nvfp4, whose units are 1, exactly, for an e2m1 has two significant bits and an
    e4m3 four, so that float16 and bfloat16 hold every product.
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

    INTERLEAVED: of each four tokens of a page, factor by factor, as one row-major block.
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
    """What rows of `load_packed` are multiples of, float32 [keys]: their factors, or of several, a power of two.

    The largest factor is 2048 to 4096 of it, times 7 within float16; factors down to 2^-25 of it are normal there.
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
    """bfloat16 rows as float16 times a power of two each, and these powers; for products with FP8, which float16 holds.

    The largest element of a row comes to lie in [2^14, 2^15). Elements down to 2^-28 of it are kept exactly, and what
    smaller ones lose is 2^-39 of it: less than float32 accumulation does.
    """
    most = tl.max(tl.abs(x.to(tl.float32)), AXIS, keep_dims=True)
    power = power_of_two(most)
    return (x.to(tl.float32) * (16384.0 / power)).to(tl.float16), power * (1.0 / 16384.0)
