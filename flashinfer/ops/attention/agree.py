"""Arguments that state the same twice: lengths, block tables and bounds, beside the tables that already say them."""

from __future__ import annotations

from numbers import Integral

import torch

from flashinfer._core.checks import number, require, require_tensor
from flashinfer.ops.attention.tables import KV_INDICES, KV_INDPTR, LENGTHS, QO_INDPTR, Table, graph_buffers

_INTEGERS = (torch.int32, torch.int64)
_INT32 = torch.iinfo(torch.int32).max


def check_agrees(tables: tuple, names: tuple, page_size: int, *, seq_lens=None, seq_lens_q=None, block_tables=None,
                 max_q=None, max_kv=None, uniform_q_len=None) -> int:  # fmt: skip
    """Raise ValueError where one of these contradicts `tables`, in the order of `tables.NAMES`, which `names` names.

    Returns the bound on query lengths that they give; 0 for none.

    Only what is on the host is compared: looking at the rest would wait for the device. What is wrong with the tables
    themselves is left to the plan.
    """
    max_q, max_kv = _bound("max_token_per_sequence", max_q), _bound("max_sequence_kv", max_kv)
    uniform_q_len = _bound("uniform_q_len", uniform_q_len)
    given = dict(seq_lens=seq_lens, seq_lens_q=seq_lens_q, block_tables=block_tables, max_token_per_sequence=max_q,
                 max_sequence_kv=max_kv, uniform_q_len=uniform_q_len)  # fmt: skip
    if not any(value is not None for value in given.values()):
        return 0
    q_lens = _steps(tables[QO_INDPTR])
    pages, last = _steps(tables[KV_INDPTR]), tables[LENGTHS]
    kv_lens = pages
    if page_size and pages is not None:
        known = _on_host(last) and last.shape == pages.shape and isinstance(page_size, int)
        kv_lens = torch.where(pages > 0, (pages - 1) * page_size + last, 0) if known else None
    for name, stated, lens, of in (("seq_lens", seq_lens, kv_lens, names[KV_INDPTR]),
                                 ("seq_lens_q", seq_lens_q, q_lens, names[QO_INDPTR])):  # fmt: skip
        _check_lens(name, stated, lens, of)
    for name, bound, lens in (("max_token_per_sequence", max_q, q_lens), ("max_sequence_kv", max_kv, kv_lens)):
        if bound is not None and lens is not None and lens.numel():
            longest = int(lens.max())
            require(longest <= bound, name, bound, f"at least {longest}, the longest of the tables")
    if uniform_q_len is not None and q_lens is not None:
        uniform = bool((q_lens == uniform_q_len).all())
        require(uniform, "uniform_q_len", uniform_q_len, f"the query length of every request by {names[QO_INDPTR]}")
    if block_tables is not None and pages is not None:
        _check_blocks(block_tables, tables, pages, names)
    return uniform_q_len or max_q or 0


def check_buffers(device: torch.device, names: dict[str, str], **buffers: torch.Tensor | None) -> Table:
    """`graph_buffers`, with errors for buffers that hold different numbers of requests."""
    table, first = graph_buffers(device, names, **buffers), ""
    for field in ("qo_indptr", "kv_indptr", "last_page_len"):
        if field in names:
            # An indptr has one element more than its batch has requests.
            extra, found = int(field != "last_page_len"), getattr(table, field).shape[0]
            first, batch = (first, batch) if first else (names[field], found - extra)
            require(found == batch + extra, names[field], f"{found} elements", f"{batch + extra}, as {first} has")
    return table


def in_rows(indptr, row: tuple, lens, most: int | None):
    """`indptr` in rows, where it may count elements, as cuDNN's ragged offsets do.

    The lengths of requests tell which it is, or the bound on them where there are none; without either, it is rows.
    Nothing waits for the device.

    Parameters
    ----------
    indptr : Tensor [batch + 1]
    row : (int, int)
        Heads and head_dim, whose product is the elements of a row.
    lens : Tensor of batch elements, optional
    most : int, optional
    """
    offsets = _has_integers(indptr) and indptr.dtype in _INTEGERS and indptr.dim() == 1
    if not offsets or not all(type(x) is int and x > 0 for x in row):
        return indptr
    steps, elements = indptr.diff(), row[0] * row[1]
    if elements > _INT32:
        return indptr
    if _has_integers(lens) and lens.numel() == steps.numel():
        if lens.is_cuda and not indptr.is_cuda:
            indptr, steps = indptr.to(lens.device), steps.to(lens.device)
        lens = lens.reshape(-1).to(indptr.device, torch.int64, non_blocking=True)
        counts_elements = (steps == lens * elements).all() & (steps != lens).any()
    elif type(most) is int:
        counts_elements = (steps > most).any() & (indptr % elements == 0).all()
    else:
        return indptr
    return torch.where(counts_elements, torch.div(indptr, elements, rounding_mode="floor"), indptr)


def as_count(name: str, value) -> int:
    """An integer of any kind, one in a tensor too, as Python's."""
    value = number(name, value)
    require(isinstance(value, Integral), name, repr(value), "an integer")
    return int(value)


def _bound(name: str, value) -> int | None:
    return value if value is None or type(value) is int else as_count(name, value)


def _has_integers(table) -> bool:
    """Whether it is a tensor of integers whose values can be had; the plan refuses any other by name."""
    known = isinstance(table, torch.Tensor) and table.device.type in ("cpu", "cuda")
    return known and not table.is_floating_point() and not table.is_complex() and table.dtype != torch.bool


def _on_host(table) -> bool:
    return isinstance(table, torch.Tensor) and table.device.type == "cpu" and table.dtype in _INTEGERS


def _steps(indptr) -> torch.Tensor | None:
    return indptr.diff() if _on_host(indptr) and indptr.dim() == 1 and indptr.numel() else None


def _check_lens(name: str, stated, lens: torch.Tensor | None, of: str) -> None:
    require_tensor(name, stated, optional=True)
    if stated is None or lens is None:
        return
    require(stated.numel() == lens.numel(), name, tuple(stated.shape), f"{lens.numel()} elements, as {of} has requests")
    if stated.device.type != "cpu":
        return
    wrong = (stated.flatten().long() != lens.long()).nonzero().flatten().tolist()
    if wrong:
        at = wrong[0]
        require(False, name, f"{int(stated.flatten()[at])} of request {at}", f"{int(lens[at])}, as {of} has it")


def _check_blocks(block_tables, tables: tuple, pages: torch.Tensor, names: tuple) -> None:
    """Compare the rows of a rectangular block table with the ids that the plan has."""
    require_tensor("block_tables", block_tables)
    require(block_tables.dim() == 2, "block_tables", tuple(block_tables.shape), "[batch, max_pages]")
    require(_has_integers(block_tables), "block_tables", block_tables.dtype, "int32 or int64")
    shape, batch = tuple(block_tables.shape), pages.numel()
    longest = int(pages.max()) if batch else 0
    fits = shape[0] == batch and shape[1] >= longest
    require(fits, "block_tables", shape, f"[{batch}, at least {longest}], as {names[KV_INDPTR]} has it")
    indices, indptr = tables[KV_INDICES], tables[KV_INDPTR]
    if not (_on_host(indices) and _on_host(block_tables)) or indices.dim() != 1:
        return
    if int(indptr[-1]) > indices.shape[0]:
        return
    used = torch.arange(shape[1], dtype=torch.int64, device="cpu") < pages[:, None]
    same = torch.equal(block_tables[used].long(), indices[int(indptr[0]) : int(indptr[-1])].long())
    require(same, "block_tables", "other page ids", f"those of {names[KV_INDICES]}")
