"""Where the elements that are taken go: values, indices, slots of a page table."""

import triton
import triton.language as tl


@triton.jit
def moved_by(row, page_table, row_to_batch, page_starts, starts, offsets):
    """What a row's columns are moved by (with a page table: entries), and the batch entry whose pages they lie in."""
    shift = 0
    batch = row
    if page_table is not None:
        if row_to_batch is not None:
            batch = tl.load(row_to_batch + row)
        if page_starts is not None:
            shift = tl.load(page_starts + row)
        elif starts is not None:
            shift = tl.load(starts + row)
    if offsets is not None:
        shift = tl.load(offsets + row)
    return shift, batch


@triton.jit
def slot_of(column, first, ok, page_table, batch, pages, table_row, page_size):
    """Where entries from `first` on of a row of the page table put columns; -1 where it ends or has no page."""
    page = first + column // page_size
    ok &= (page >= 0) & (page < pages)
    entry = tl.load(page_table + batch.to(tl.int64) * table_row + page, ok, other=-1)
    return tl.where(entry >= 0, entry * page_size + column % page_size, -1)


@triton.jit
def write_taken(
    value, column, mine, to, k, out_value, out_index, raw, shift, page_table, batch, pages, table_row, page_size
):
    """Writes elements that are `mine` at `to`, and none outside the row's k places, whatever the search found."""
    mine &= (to >= 0) & (to < k)
    if page_table is not None:
        index = slot_of(column, shift, mine, page_table, batch, pages, table_row, page_size)
    else:
        index = column + shift
    tl.store(out_index + to, index.to(out_index.dtype.element_ty), mine)
    if out_value is not None:
        tl.store(out_value + to, value, mine)
    if raw is not None:
        tl.store(raw + to, column, mine)
