"""Wrappers whose tables or options an engine replaces, or whose tables it writes, behind plan()'s back."""

from __future__ import annotations

from dataclasses import replace

import torch

from flashinfer._core.checks import require
from flashinfer.ops.attention.kernels import means
from flashinfer.ops.attention.plan import Plan
from flashinfer.ops.attention.tables import Table, graph_buffers
from flashinfer.ops.attention.wrapper import AttentionWrapper

# What an engine may write or replace, by its name in Table.
_TABLES = ("qo_indptr", "kv_indptr", "last_page_len", "kv_indices", "mask", "mask_indptr", "kv_lens")
# Of those, what goes into work lists. Kernels read page ids and masks themselves.
_PLANNED = ("qo_indptr", "kv_indptr", "last_page_len", "kv_lens")


class ReplaceableWrapper(AttentionWrapper):
    """A wrapper whose next run or plan takes up what an engine has replaced or written since.

    Names are those of `Table` and `PlanOptions`; flashinfer/compat has the names that engines use.
    """

    def _read_table(self, name: str) -> torch.Tensor | None:
        """A table, for an engine that may write into it; the next run plans if it can know of that in no other way."""
        if name in _PLANNED:
            self._active = None
        return getattr(self._shown, name)

    def _replace_table(self, name: str, tensor: torch.Tensor | None) -> None:
        """Replace a table; the next plan or run takes it up."""
        if tensor is not None and self._use_cuda_graph:
            named = {"mask": "custom_mask", "kv_lens": "last_page_len"}.get(name, name)
            graph_buffers(self.device, {name: named}, **{name: tensor})
        self._shown, self._replays = replace(self._shown, **{name: tensor}), None
        self._active = None

    def _read_option(self, name: str):
        """An option as engines read it; AttributeError before a plan."""
        if name in self._options_set:
            return self._options_set[name]
        return getattr((self._active or self._base).options, name)

    def _replace_option(self, name: str, value) -> None:
        """Replace an option of the plan; the next plan from tables, or run, takes it up."""
        self._options_set[name] = value
        if self._base is None or not means(self._base.kernels, {name: value}, False):
            self._active = None

    def _planned(self) -> Plan:
        if self._base is not None and self._active is None:
            self._replan()
        return super()._planned()

    def _replan(self, rows: int | None = None, longest_q: int = 0) -> None:
        """Plan again from the tables that are in use, which an engine has written or replaced.

        Options are those of the last plan. Nothing waits for the device.

        Parameters
        ----------
        rows, longest_q : int
            Query rows in all and of the longest request, if known; None for as many as before, if qo_indptr is that of
            before.
        """
        if self._on_gpu and torch._C._cuda_getDevice() != self._index:
            with torch.cuda.device(self.device):
                return self._replan(rows, longest_q)
        base, graph, shown = self._base, self._use_cuda_graph, self._shown
        stream = self._look_at_stream(())
        stride = base.table.kv_stride
        require(not stride, "plan", f"tables of one stride, {stride}", "pages of kv_indptr and kv_indices")
        tables = {name: self._as_table(name, getattr(shown, name)) for name in _TABLES}
        table = Table(**tables, names=base.table.names, operands=base.table.operands)
        table.longest_q, table.uniform_q_len, table.first_row = longest_q, base.table.each_q, base.table.first_row
        if graph and base.table.mask is None:
            table.mask = table.mask_indptr = None
        if table.kv_lens is None and base.table.kv_lens is not None:
            table.kv_lens, table.last_page_len = table.last_page_len, None
        if rows is None:
            rows = base.table.rows if shown.qo_indptr is base.table.qo_indptr else -1
        requests, q_len = table.kv_indptr.shape[0] - 1, table.uniform_q_len
        if q_len:
            table.qo_indptr = self._store.uniform_indptr(requests, q_len, stream, self._capturing)
            rows = requests * q_len
        table.rows = rows
        changes = {
            name: value for name, value in self._options_set.items() if not means(base.kernels, {name: value}, False)
        }
        options = base.options.changed(**changes) if changes else base.options
        _check_lengths(table, requests)
        limits = table.limits(options.page_size)
        kernels = self._kernels_of(options, base.kernels.problem.rows, table.mask is not None, self._backend)
        if graph:
            kernels, limits = self._captured(kernels, q_len, limits)
        self._take_up(kernels, table, limits, stream)

    def _plan_for(self, q, causal: bool) -> None:
        """Plan again where `q` has another number of queries of each request than was planned.

        `causal` says what several queries of a request are among themselves.
        """
        base, rows = self._planned(), len(q) if isinstance(q, torch.Tensor) and q.dim() else 0
        requests, was = base.table.batch_size, base.table.each_q
        if not rows or not requests or rows % requests or rows == requests * was or torch.compiler.is_compiling():
            return
        q_len, shown = rows // requests, self._shown
        tables = None, shown.kv_indptr, shown.last_page_len, shown.kv_indices
        self._plan(base.options.changed(causal=causal and q_len > 1), tables, q_len=q_len)

    def _as_table(self, name: str, table: torch.Tensor | None) -> torch.Tensor | None:
        """A table as an engine has put it, on the compute device, int32 (a mask: uint8) and contiguous."""
        if table is None:
            return None
        dtype = torch.uint8 if name == "mask" else torch.int32
        if table.device != self.device or table.dtype != dtype:
            require(not table.is_floating_point() and table.dtype != torch.bool, name, table.dtype, str(dtype))
            table = table.to(self.device, dtype)
        return table if table.is_contiguous() else table.contiguous()


def _check_lengths(table: Table, requests: int) -> None:
    """Check the lengths of tables that an engine has put in place."""
    lengths = dict(qo_indptr=requests + 1, last_page_len=requests, kv_lens=requests, mask_indptr=requests + 1)
    for name, length in lengths.items():
        given = getattr(table, name)
        if given is not None:
            require(given.shape == (length,), name, tuple(given.shape), f"[{length}], as kv_indptr has it")
    require((table.mask is None) == (table.mask_indptr is None), "mask_indptr", "one of two", "with custom_mask")
