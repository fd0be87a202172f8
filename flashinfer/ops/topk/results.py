"""Outputs of the selected elements: values, indices, slots of a page table."""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from flashinfer.ops._device.find_prefix import Parameters
from flashinfer.ops.topk import TopK


class Results(NamedTuple):
    """Outputs of a call, and the tables that map columns to slots; None for those that its problem does not have.

    value : [rows, k] of x's dtype. index : [rows, k], indices or slots. raw : int32 [rows, k], indices beside slots.
    page_table : int32 [batch, pages], of pages of page_size. row_to_batch, page_starts, offsets : int32 [rows].
    """

    value: torch.Tensor | None
    index: torch.Tensor
    raw: torch.Tensor | None = None
    page_table: torch.Tensor | None = None
    row_to_batch: torch.Tensor | None = None
    page_starts: torch.Tensor | None = None
    offsets: torch.Tensor | None = None
    page_size: int | None = None

    def arguments(self, x: torch.Tensor, k: int) -> tuple:
        """The arguments for the parameters of `add_results`."""
        raw_row = None if self.raw is None else self.raw.stride(0)
        table = self.page_table
        pages = (None, None) if table is None else (table.stride(0), table.shape[1])
        return *self[:7], x.stride(0), self.index.stride(0), raw_row, *pages, self.page_size, k, x.shape[1]


def add_results(p: Parameters, problem: TopK) -> Parameters:
    """Adds the parameters out, where, x_row, out_row, raw_row, pages, k and columns."""
    paged = problem.result == "pages"
    p.add(f"*{problem.dtype}", "out.value", present=problem.with_values).add(f"*{problem.index}", "out.index")
    p.add("*i32", "out.raw", present=problem.raw).add("*i32", "where.page_table", present=paged)
    p.add("*i32", "where.row_to_batch", present=problem.mapped)
    p.add("*i32", "where.page_starts", present=problem.page_starts)
    p.add("*i32", "where.offsets", present=problem.result == "ragged")
    p.add("i64", "x_row", "out_row").add("i64", "raw_row", present=problem.raw).add("i64", "pages.row", present=paged)
    return p.add("i32", "pages.count", "pages.size", present=paged).add("i32", "k", "columns")


@triton.jit
def column_offset(row, where, starts):
    """The offset that is added to a row's columns (with a page table, to its entries), and the row of the page table.

    where : pointers page_table, row_to_batch, page_starts and offsets, or None.
    """
    shift = 0
    batch = row
    if where.page_table is not None:
        if where.row_to_batch is not None:
            batch = tl.load(where.row_to_batch + row)
        if where.page_starts is not None:
            shift = tl.load(where.page_starts + row)
        elif starts is not None:
            shift = tl.load(starts + row)
    if where.offsets is not None:
        shift = tl.load(where.offsets + row)
    return shift, batch


@triton.jit
def page_slots(column, first, ok, where, batch, pages):
    """Slots of columns, by the entries from `first` on of a row of the page table; -1 past its end and without a page.

    For example, with pages of 4, first 0 and entries 7, 2, column 5 is row 1 of page 2: slot 2 * 4 + 1 = 9.
    """
    page = first + column // pages.size
    ok &= (page >= 0) & (page < pages.count)
    entry = tl.load(where.page_table + batch.to(tl.int64) * pages.row + page, ok, other=-1)
    return tl.where(entry >= 0, entry * pages.size + column % pages.size, -1)


@triton.jit
def write_taken(value, column, taken, to, k, out_value, out_index, raw, shift, where, batch, pages):
    """Writes the elements with `taken` at index `to`, never outside of the row's k, whatever the search finds."""
    taken &= (to >= 0) & (to < k)
    if where.page_table is not None:
        index = page_slots(column, shift, taken, where, batch, pages)
    else:
        index = column + shift
    tl.store(out_index + to, index.to(out_index.dtype.element_ty), taken)
    if out_value is not None:
        tl.store(out_value + to, value, taken)
    if raw is not None:
        tl.store(raw + to, column, taken)


@triton.jit
def write_none(out_value, out_index, raw, first, k, BLOCK: tl.constexpr):
    """Writes -1, and values of 0, from index `first` to the last."""
    for start in range(first, k, BLOCK):
        to = start + tl.arange(0, BLOCK)
        none = tl.full([BLOCK], -1, tl.int32)
        tl.store(out_index + to, none.to(out_index.dtype.element_ty), to < k)
        if out_value is not None:
            tl.store(out_value + to, tl.zeros([BLOCK], out_value.dtype.element_ty), to < k)
        if raw is not None:
            tl.store(raw + to, none, to < k)
