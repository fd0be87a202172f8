"""Tables of a wrapper that outlive a plan: fixed buffers of CUDA graphs, and what an engine writes or puts in place."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from flashinfer._core.checks import require
from flashinfer.ops.attention.batch import limits_of
from flashinfer.ops.attention.kind import means
from flashinfer.ops.attention.problem import Table
from flashinfer.ops.attention.request import Request

# What an engine may write or replace.
_TABLES = ("qo_indptr", "kv_indptr", "last_page_len", "kv_indices", "mask", "mask_indptr", "kv_lens")
# Of those, what goes into work lists. Kernels read page ids and masks themselves.
_PLANNED = ("qo_indptr", "kv_indptr", "last_page_len", "kv_lens")


# Of masks, and what callers call them.
MASK_BUFFERS = dict(custom_mask="custom_mask_buf", mask_indptr="mask_indptr_buf")


@dataclass
class GraphBuffers:
    """Fixed device buffers of a wrapper in CUDA-graph mode; None where the wrapper has no such table."""

    qo_indptr: torch.Tensor | None = None
    kv_indptr: torch.Tensor | None = None
    kv_indices: torch.Tensor | None = None
    last_page_len: torch.Tensor | None = None
    custom_mask: torch.Tensor | None = None
    mask_indptr: torch.Tensor | None = None

    def check(self, device: torch.device, needed: dict[str, str]) -> None:
        """Check the fields that are `needed`; the values are what the caller calls them."""
        for field, name in needed.items():
            tensor = getattr(self, field)
            given = isinstance(tensor, torch.Tensor)
            require(given, name, None if tensor is None else f"a {type(tensor).__name__}",
                    "a buffer, with use_cuda_graph=True")  # fmt: skip
            require(tensor.device == device, name, f"a buffer on {tensor.device}", str(device))
            wide = torch.uint8 if field == "custom_mask" else torch.int32
            require(tensor.dtype == wide, name, tensor.dtype, str(wide))
            require(tensor.is_contiguous(), name, f"strides {tensor.stride()}", "contiguous")

    def table(self) -> Table:
        return Table(
            self.qo_indptr, self.kv_indptr, self.last_page_len, self.kv_indices, self.custom_mask, self.mask_indptr
        )


def device_of(float_workspace_buffer: torch.Tensor) -> torch.device:
    """The device of a wrapper: its workspace's."""
    fits = isinstance(float_workspace_buffer, torch.Tensor)
    kind = type(float_workspace_buffer).__name__
    require(fits, "float_workspace_buffer", None if float_workspace_buffer is None else f"a {kind}",
            "a uint8 tensor on the compute device, of any size")  # fmt: skip
    return float_workspace_buffer.device


class Replaceable:
    """What becomes of a wrapper whose tables or options an engine has replaced, or whose tables it has written.

    Names are those of `Table` and `Options`; flashinfer/compat has the names that engines use.
    """

    def _lend(self, name: str) -> torch.Tensor | None:
        """A table, by its name in `Table`, for an engine that may write into it; the next run plans anew if it can tell
        of that in no other way."""
        if name in _PLANNED:
            self._batch = None
        return getattr(self._shown, name)

    def _show(self, name: str, tensor: torch.Tensor | None) -> None:
        """Replace a table, by its name in `Table`; the next plan or run takes it up."""
        if tensor is not None and self._use_cuda_graph:
            what = {"mask": "custom_mask", "kv_lens": "last_page_len"}.get(name, name)
            GraphBuffers(**{what: tensor}).check(self.device, {what: what})
        self._shown, self._last = replace(self._shown, **{name: tensor}), None
        self._batch = None

    def _tell(self, name: str, value) -> None:
        """Replace an option of the plan, by its name in `Options`; the next plan from tables, or run, takes it up."""
        self._told[name] = value
        if self._base is None or not means(self._base.kind, {name: value}, False):
            self._batch = None

    def _option(self, name: str):
        """An option as engines read it; AttributeError before a plan."""
        return self._told[name] if name in self._told else getattr((self._batch or self._base).options, name)

    def _replan(self, rows: int | None = None, longest_q: int = 0) -> None:
        """Plan again from the tables that are in use, which an engine has written or replaced.

        Options are those of the last plan. Nothing waits for the device.

        Parameters
        ----------
        rows, longest_q : int
            Query rows in all and of the longest request, if known; None for as many as before, if qo_indptr is that of
            before.
        """
        if self._on_gpu and torch._C._cuda_getDevice() != self.device.index:
            with torch.cuda.device(self.device):
                return self._replan(rows, longest_q)
        base, graph, shown = self._base, self._use_cuda_graph, self._shown
        stream = self._look_at_stream(())
        stride = base.table.kv_stride
        require(not stride, "plan", f"tables of one stride, {stride}", "pages of kv_indptr and kv_indices")
        table = Table(**{name: self._as_table(name, getattr(shown, name)) for name in _TABLES})
        if graph and base.table.mask is None:
            table.mask = table.mask_indptr = None
        if table.kv_lens is None and base.table.kv_lens is not None:
            table.kv_lens, table.last_page_len = table.last_page_len, None
        if rows is None:
            rows = base.request.rows if shown.qo_indptr is base.table.qo_indptr else -1
        batch = table.kv_indptr.shape[0] - 1
        q_len = base.request.q_len
        if q_len:
            table.qo_indptr, rows = self._uniform_indptr(batch, q_len, stream), batch * q_len
        told = {name: value for name, value in self._told.items() if not means(base.kind, {name: value}, False)}
        options = base.options.changed(**told) if told else base.options
        request = replace(
            base.request, options=options, qo_indptr=None if q_len else table.qo_indptr, kv_indptr=table.kv_indptr,
            last_page_len=table.last_page_len, kv_indices=table.kv_indices, kv_lens=table.kv_lens, custom_mask=None,
            packed_custom_mask=table.mask, rows=rows, kv_entries=-1, longest_q=longest_q,
        )  # fmt: skip
        self._check_tables(request, table)
        limits = limits_of(request, table)
        kind = self._kind_of(options, base.kind.problem.rows, request.has_mask, self._backend)
        if graph:
            kind, limits = self._captured(request, kind, limits)
        self._take_up(kind, request, table, limits, stream)

    def _as_table(self, name: str, table: torch.Tensor | None) -> torch.Tensor | None:
        """A table as an engine has put it, on the compute device, int32 (a mask: uint8) and contiguous."""
        if table is None:
            return None
        dtype = torch.uint8 if name == "mask" else torch.int32
        if table.device != self.device or table.dtype != dtype:
            require(not table.is_floating_point() and table.dtype != torch.bool, name, table.dtype, str(dtype))
            table = table.to(self.device, dtype)
        return table if table.is_contiguous() else table.contiguous()

    def _check_tables(self, request: Request, table: Table) -> None:
        """Check what tables that an engine has put tell without their values."""
        batch = request.batch_size
        lengths = dict(qo_indptr=batch + 1, last_page_len=batch, kv_lens=batch, mask_indptr=batch + 1)
        for name, length in lengths.items():
            given = getattr(table, name)
            if given is not None:
                require(given.shape == (length,), name, tuple(given.shape), f"[{length}], as kv_indptr has it")
        require((table.mask is None) == (table.mask_indptr is None), "mask_indptr", "one of two", "with custom_mask")
