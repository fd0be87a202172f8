"""Writes rows of keys and values into a paged cache, unchanged or quantized: slot lookup and stores.

A cache is [pages, page_size, heads, dim] with any strides, `strides` (page, slot, head, column) in elements.
"""

import triton
import triton.language as tl

from flashinfer.ops._device.formats import to_fp8
from flashinfer.ops._device.rows import column_offset, multiple
from flashinfer.ops._device.scales import quantize_nvfp4, quantize_rows


@triton.jit
def slot_of(table, token, inside):
    """For each of a block of tokens: its page and its slot in the page, int64, and whether it has a slot.

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
    """slot_of by table.slots[t], a slot number over all pages: s is slot s % page_size of page s // page_size."""
    offset = tl.load(table.slots + token, inside, other=-1).to(tl.int64)
    page = offset // table.page_size
    return page, offset % table.page_size, (offset >= 0) & (page < table.num_pages)


@triton.jit
def cache_offset(page, slot, head, strides, UNIT: tl.constexpr):
    """Offsets in elements of rows of a cache whose strides are multiples of UNIT."""
    offset = page * multiple(strides.page, UNIT) + slot * multiple(strides.slot, UNIT)
    return offset + head * multiple(strides.head, UNIT)


@triton.jit
def store_rows(x, offset, kept, column_stride, dim, tile, UNIT, BLOCK: tl.constexpr):
    """Write a tile's rows [ROWS, BLOCK] at the offsets `offset` [ROWS] of x."""
    column = tl.arange(0, BLOCK)
    mask = kept[:, None] & (column < multiple(dim, UNIT))[None, :]
    tl.store(x + offset[:, None] + column_offset(column, column_stride, UNIT)[None, :], tile, mask)


@triton.jit
def _inverse(scale):
    """1 / scale, rounded once; `scale` may be a float or a tensor element."""
    one = tl.full([], 1.0, tl.float32)
    return tl.div_rn(one, one * scale)


@triton.jit
def append_rows(
    cache, factors, page, slot, head, kept, strides, factor_strides, dim, tile, scale,
    FORMAT: tl.constexpr, WIDTH: tl.constexpr, UNIT: tl.constexpr, BLOCK: tl.constexpr, CAPABILITY: tl.constexpr,
):  # fmt: skip
    """Write a tile's rows [ROWS, BLOCK] to their slots: unchanged (FORMAT ""), or as codes with their factors.

    A decoded value is code * scale, in "nvfp4" code * factor * scale, and with a WIDTH other than 1, the columns that
    share a factor in `quantize_rows`, code * factor.
    """
    offset = cache_offset(page, slot, head, strides, UNIT)
    if FORMAT == "":
        store_rows(cache, offset, kept, strides.column, dim, tile, UNIT, BLOCK)
    else:
        column = tl.arange(0, BLOCK)
        dim = multiple(dim, UNIT)
        y = tl.where((column < dim)[None, :], tile.to(tl.float32), 0)
        if WIDTH != 1:
            codes, found = quantize_rows(y, FORMAT, WIDTH, CAPABILITY)
            PACKED: tl.constexpr = 2 if FORMAT == "i4" else 1
            FEW: tl.constexpr = UNIT // PACKED if UNIT > 1 else 1
            store_rows(cache, offset, kept, strides.column, dim // PACKED, codes, FEW, BLOCK // PACKED)
            to = cache_offset(page, slot, head, factor_strides, 1)
            blocks = dim // WIDTH if WIDTH else 1
            store_rows(factors, to, kept, factor_strides.column, blocks, found, 1, found.shape[1])
        elif FORMAT == "nvfp4":
            codes, found = quantize_nvfp4(y, _inverse(scale), CAPABILITY)
            store_rows(cache, offset, kept, strides.column, dim // 2, codes, UNIT // 2 if UNIT > 1 else 1, BLOCK // 2)
            to = cache_offset(page, slot, head, factor_strides, 1)
            store_rows(factors, to, kept, factor_strides.column, dim // 16, found, 1, BLOCK // 16)
        else:
            codes = to_fp8(y * _inverse(scale), FORMAT, CAPABILITY)
            store_rows(cache, offset, kept, strides.column, dim, codes, UNIT, BLOCK)
