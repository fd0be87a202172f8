"""Writing rows of keys and values into a paged cache, as they are or as codes: where slots are, and the stores.

A cache is [pages, page_size, heads, dim] with any strides, `strides` (page, slot, head, column) in elements.
"""

import triton
import triton.language as tl

from flashinfer.ops._device.formats import to_fp8
from flashinfer.ops._device.rows import column_offset, multiple
from flashinfer.ops._device.scales import quantize_nvfp4, quantize_rows


@triton.jit
def slot_of(table, token, inside):
    """For each of a block of tokens: its page and its slot there, 64 bits, and whether it has one.

    Token t is at table.positions[t] of request table.batch_indices[t]; table.kv_indices holds `entries` pages of
    `batch` requests. A token that is not `inside`, of no request, or outside its request's pages or the cache, has no
    slot.
    """
    request = tl.load(table.batch_indices + token, inside, other=-1)
    position = tl.load(table.positions + token, inside, other=-1)
    kept = (request >= 0) & (request < table.batch) & (position >= 0)
    entry = tl.load(table.kv_indptr + request, kept, other=0) + position // table.page_size
    kept &= (entry < tl.load(table.kv_indptr + request + 1, kept, other=0)) & (entry < table.entries)
    page = tl.load(table.kv_indices + entry, kept, other=-1)
    kept &= (page >= 0) & (page < table.num_pages)
    return page.to(tl.int64), (position % table.page_size).to(tl.int64), kept


@triton.jit
def mapped_slot_of(table, token, inside):
    """The same where table.slots[t] counts the slots of all pages: s is slot s % page_size of page s // page_size."""
    at = tl.load(table.slots + token, inside, other=-1).to(tl.int64)
    page = at // table.page_size
    return page, at % table.page_size, (at >= 0) & (page < table.num_pages)


@triton.jit
def cache_offset(page, slot, head, strides, UNIT: tl.constexpr):
    """Offsets of rows in a cache, whose strides are multiples of UNIT."""
    at = page * multiple(strides.page, UNIT) + slot * multiple(strides.slot, UNIT)
    return at + head * multiple(strides.head, UNIT)


@triton.jit
def store_rows(x, at, kept, column_stride, dim, tile, UNIT, BLOCK: tl.constexpr):
    """Write a tile's rows [ROWS, BLOCK] at the offsets `at` [ROWS] of x."""
    column = tl.arange(0, BLOCK)
    mask = kept[:, None] & (column < multiple(dim, UNIT))[None, :]
    tl.store(x + at[:, None] + column_offset(column, column_stride, UNIT)[None, :], tile, mask)


@triton.jit
def _inverse(scale):
    one = tl.full([], 1.0, tl.float32)
    return tl.div_rn(one, one * scale)


@triton.jit
def append_rows(
    cache, factors, page, slot, head, kept, strides, factor_strides, dim, tile, scale,
    FORMAT: tl.constexpr, WIDTH: tl.constexpr, UNIT: tl.constexpr, BLOCK: tl.constexpr, CAPABILITY: tl.constexpr,
):  # fmt: skip
    """Write a tile's rows [ROWS, BLOCK] to their slots: as they are (FORMAT ""), or as codes, and factors.

    A value is code * scale, in "nvfp4" code * factor * scale; with WIDTH of `quantize_rows` it is code * factor.
    """
    at = cache_offset(page, slot, head, strides, UNIT)
    if FORMAT == "":
        store_rows(cache, at, kept, strides.column, dim, tile, UNIT, BLOCK)
    else:
        column = tl.arange(0, BLOCK)
        dim = multiple(dim, UNIT)
        y = tl.where((column < dim)[None, :], tile.to(tl.float32), 0)
        if WIDTH != 1:
            codes, found = quantize_rows(y, FORMAT, WIDTH, CAPABILITY)
            PACKED: tl.constexpr = 2 if FORMAT == "i4" else 1
            FEW: tl.constexpr = UNIT // PACKED if UNIT > 1 else 1
            store_rows(cache, at, kept, strides.column, dim // PACKED, codes, FEW, BLOCK // PACKED)
            to = cache_offset(page, slot, head, factor_strides, 1)
            blocks = dim // WIDTH if WIDTH else 1
            store_rows(factors, to, kept, factor_strides.column, blocks, found, 1, found.shape[1])
        elif FORMAT == "nvfp4":
            codes, found = quantize_nvfp4(y, _inverse(scale), CAPABILITY)
            store_rows(cache, at, kept, strides.column, dim // 2, codes, UNIT // 2 if UNIT > 1 else 1, BLOCK // 2)
            to = cache_offset(page, slot, head, factor_strides, 1)
            store_rows(factors, to, kept, factor_strides.column, dim // 16, found, 1, BLOCK // 16)
        else:
            codes = to_fp8(y * _inverse(scale), FORMAT, CAPABILITY)
            store_rows(cache, at, kept, strides.column, dim, codes, UNIT, BLOCK)
