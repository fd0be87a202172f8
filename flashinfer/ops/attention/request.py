"""A batch that a plan describes: its tables, checked for every batch."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from flashinfer._core.checks import require
from flashinfer.ops.attention.options import PlanOptions
from flashinfer.ops.attention.tables import KV_INDICES, KV_INDPTR, LENGTHS, NAMES, QO_INDPTR, Stage

_INTEGERS = (torch.int32, torch.int64)


@dataclass(eq=False)
class Request:
    """A batch that a plan() describes. Tables may be on the host or on the compute device.

    Attributes
    ----------
    options : PlanOptions
    qo_indptr, kv_indptr, last_page_len, kv_indices : int Tensor
        The last two of a paged batch only; no qo_indptr where q_len tells it.
    custom_mask, packed_custom_mask : Tensor, optional
    kv_lens : int Tensor [batch], optional
        Keys of each request, in the place of last_page_len.
    q_len : int
        The query length of every request, where they are all alike.
    longest_q : int
        A bound on query lengths, as the caller has it; 0 where it is unknown.
    rows, kv_entries : int
        The last offsets of qo_indptr and kv_indptr; -1 where only the device knows. The first may be any: what lies
        before is of no request.
    first_row : int
        The first offset of qo_indptr; 0 where only the device knows.
    names : tuple of str
        What the caller calls `tables`.
    """

    options: PlanOptions
    qo_indptr: torch.Tensor | None
    kv_indptr: torch.Tensor | None
    last_page_len: torch.Tensor | None = None
    kv_indices: torch.Tensor | None = None
    custom_mask: torch.Tensor | None = None
    packed_custom_mask: torch.Tensor | None = None
    q_len: int = 0
    longest_q: int = 0
    rows: int = -1
    kv_entries: int = -1
    kv_lens: torch.Tensor | None = None
    names: tuple[str, ...] = NAMES
    first_row: int = 0

    @property
    def batch_size(self) -> int:
        return self.kv_indptr.numel() - 1

    @property
    def tables(self) -> tuple[torch.Tensor | None, ...]:
        """In the order of `tables.NAMES`, kv_lens in the place of last_page_len."""
        lens = self.last_page_len if self.kv_lens is None else self.kv_lens
        return self.qo_indptr, self.kv_indptr, lens, self.kv_indices

    @property
    def has_mask(self) -> bool:
        return self.custom_mask is not None or self.packed_custom_mask is not None

    def lengths_on_host(self) -> tuple[int, ...]:
        """The length of each table that is on the host; 0 for the others. Checks what needs no values."""
        counts = []
        for table in self.tables:
            if table is None:
                missing = len(counts) == KV_INDPTR or len(counts) == KV_INDICES and self.options.page_size
                require(not missing, self.names[len(counts)], None, "a tensor of int32 or int64, one dimension")
                counts.append(0)
                continue
            if not isinstance(table, torch.Tensor) or table.dtype not in _INTEGERS or table.dim() != 1:
                of_tensor = isinstance(table, torch.Tensor)
                value = f"{table.dtype} {tuple(table.shape)}" if of_tensor else f"a {type(table).__name__}"
                require(False, self.names[len(counts)], value, "a tensor of int32 or int64, one dimension")
            counts.append(0 if table.is_cuda else table.numel())
        batch = self.kv_indptr.numel() - 1
        if batch < 0 or not self.q_len and self.qo_indptr.numel() != batch + 1:
            expected = 1 if self.qo_indptr is None else max(self.qo_indptr.numel(), 1)
            allowed = f"[{expected}], batch_size + 1, as {self.names[QO_INDPTR]}"
            require(False, self.names[KV_INDPTR], f"[{batch + 1}]", allowed)
        lens = self.last_page_len if self.kv_lens is None else self.kv_lens
        if lens is None and self.options.page_size:
            require(False, self.names[LENGTHS], None, "a tensor of int32 or int64, one dimension")
        if lens is not None and lens.numel() != batch:
            require(False, self.names[LENGTHS], f"[{lens.numel()}]", f"[{batch}]")
        return tuple(counts)

    def check(self, stage: Stage, page_ids: int | None) -> tuple[int, int]:
        """Check the values of tables that `stage` holds, `page_ids` being the length of kv_indices; (rows, kv_entries)
        of a batch that they tell. Notes the first row."""
        qo, kv, lens, _ = stage.counts
        rows, entries = self.rows, self.kv_entries
        if qo:
            rows = stage.check_indptr(QO_INDPTR)
            self.first_row = stage.first(QO_INDPTR)
        if kv:
            what = "" if page_ids is None else f"the length of {self.names[KV_INDICES]}"
            entries = stage.check_indptr(KV_INDPTR, page_ids, what)
        if lens and self.kv_lens is None:
            stage.check_last_page_len(self.options.page_size)
        elif lens:
            stage.check_kv_lens(self.options.page_size, page_ids)
        return rows, entries
