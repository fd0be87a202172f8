"""plan() and CUDA-graph buffers of latent attention, over the wrapper that all batch attentions share."""

from __future__ import annotations

import numpy as np
import torch

from flashinfer._core.checks import require
from flashinfer.ops.attention.direct import block_table
from flashinfer.ops.attention.engine import flat_integers, integers
from flashinfer.ops.attention.mla.batch import LatentBatch, LatentKind, LatentOptions, latent_kind
from flashinfer.ops.attention.problem import Table
from flashinfer.ops.attention.request import Limits, Request, tile_rows
from flashinfer.ops.attention.tables import KV_INDPTR, QO_INDPTR, Stage
from flashinfer.ops.attention.variants import AttentionVariant
from flashinfer.ops.attention.wrapper import AttentionWrapper, GraphBuffers

# In the order of a Stage, whose third table holds lengths.
_NAMES = ("qo_indptr", "kv_indptr", "kv_len_arr", "kv_indices")
_KV_LENS = 2
_INTEGERS = (torch.int32, torch.int64)


class LatentWrapper(AttentionWrapper):
    """Tables as latent attention has them: keys per request in a tensor of their own, one cache for keys and values."""

    def __init__(
        self, float_workspace_buffer: torch.Tensor, backend: str, fixed: tuple[torch.Tensor, ...] | None,
        variant: AttentionVariant | None = None,
    ):  # fmt: skip
        """`fixed` are the buffers of CUDA-graph mode: qo_indptr, kv_indptr, kv_len_arr, kv_indices."""
        buffers = None
        if fixed is not None:
            for name, t in zip(_NAMES, fixed, strict=True):
                require(t is not None, name, None, "a buffer, with use_cuda_graph=True")
                require(t.device == float_workspace_buffer.device, name, f"a buffer on {t.device}",
                        str(float_workspace_buffer.device))  # fmt: skip
                require(t.dtype == torch.int32 and t.is_contiguous(), name, f"{t.dtype} {t.stride()}",
                        "int32, contiguous")  # fmt: skip
            buffers = GraphBuffers(fixed[0], fixed[1], fixed[3])
        super().__init__(float_workspace_buffer, "NHD", backend, buffers, variant)
        if fixed is not None:
            self._shown.kv_lens = fixed[_KV_LENS]

    @property
    def _fixed(self) -> tuple[torch.Tensor, ...]:
        shown = self._shown
        return shown.qo_indptr, shown.kv_indptr, shown.kv_lens, shown.kv_indices

    def _plan_pages(self, asked: LatentOptions, tables: tuple[torch.Tensor, ...], longest_q: int) -> None:
        """Plan a batch of pages of a table; `tables` as the buffers of CUDA-graph mode, on the host or the device."""
        if self._on_gpu and torch._C._cuda_getDevice() != self.device.index:
            with torch.cuda.device(self.device):
                return self._plan_pages(asked, tables, longest_q)
        batch = self._check_shapes(tables)
        counts = tuple([0 if t.is_cuda else t.shape[0] for t in tables])
        stream = self._look_at_stream(counts)
        stage = self._stage_for(counts, stream)
        for i, t in enumerate(tables):
            if counts[i]:
                stage.take(i, t)
        rows = self._check_values(stage, asked.page_size, tables[3].shape[0])
        if counts[QO_INDPTR]:
            longest_q = longest_q or stage.longest_step(QO_INDPTR)
        on_device = self._fill_fixed(tables) if self._use_cuda_graph else self._bring_all(tables, stage, stream)
        table = Table(qo_indptr=on_device[0], kv_indptr=on_device[1], kv_lens=on_device[2], kv_indices=on_device[3])
        if self._use_cuda_graph:
            batch = table.batch_size
        self._take_over(asked, table, Limits(batch, rows, table.kv_indices.shape[0] * asked.page_size), longest_q,
                        stream)  # fmt: skip

    def _plan_blocks(self, asked: LatentOptions, block_tables, seq_lens, cum_seq_lens_q, longest_q: int) -> None:
        """Plan a batch of a rectangular block table on the device; it is read where it is, at every run."""
        if self._on_gpu and torch._C._cuda_getDevice() != self.device.index:
            with torch.cuda.device(self.device):
                return self._plan_blocks(asked, block_tables, seq_lens, cum_seq_lens_q, longest_q)
        table = latent_blocks(block_tables, seq_lens, cum_seq_lens_q, longest_q, self.device)
        rows = table.batch_size * table.q_len if table.q_len else -1
        limits = Limits(table.batch_size, rows, table.kv_indices.shape[0] * asked.page_size)
        self._take_over(asked, table, limits, longest_q, self._look_at_stream(()))

    def _take_over(self, asked: LatentOptions, table: Table, limits: Limits, longest_q: int, stream) -> None:
        """Make the batch of a plan, in the buffers of the last where they suffice."""
        old, graph = self._base, self._use_cuda_graph
        # Where only the device knows how long queries are, they are likely one token each.
        rows = old.kind.problem.rows if graph and old else tile_rows(max(longest_q, 1), asked.num_qo_heads)
        kind = self._kind_of(asked, rows, False, self._backend)
        request = Request(asked, table.qo_indptr, table.kv_indptr, q_len=table.q_len, rows=limits.q_rows)
        if graph and old is not None:
            kind, limits = self._captured(request, kind, limits)
        self._take_up(kind, request, table, limits, stream)

    def _new_batch(self, kind: LatentKind, stream: int | None) -> LatentBatch:
        return LatentBatch(kind, self._partials, None, self._debug)

    def _new_kind(self, options: LatentOptions, rows: int, custom: bool, backend: str) -> LatentKind:
        return latent_kind(options, rows, self.device, backend)

    def _check_shapes(self, tables: tuple[torch.Tensor, ...]) -> int:
        """Check what needs no values. Returns the batch size."""
        for name, t in zip(_NAMES, tables, strict=True):
            require(t is not None, name, None, "a tensor")
            # Words only where they are needed: they take longer than the checks.
            if t.dtype not in _INTEGERS or t.dim() != 1:
                require(False, name, f"{t.dtype} {tuple(t.shape)}", "int32 or int64, one dimension")
            if t.is_cuda and t.device != self.device:
                require(False, name, f"a tensor on {t.device}", f"the host, or {self.device}")
        batch = tables[_KV_LENS].shape[0]
        for i in (QO_INDPTR, KV_INDPTR):
            n = tables[i].shape[0]
            if n != batch + 1:
                require(False, _NAMES[i], f"[{n}]", f"[{batch + 1}], one more than kv_len_arr")
        if self._use_cuda_graph:
            for name, t, buffer in zip(_NAMES, tables, self._fixed, strict=True):
                require(t.shape[0] <= buffer.shape[0], name, f"{t.shape[0]} elements",
                        f"at most {buffer.shape[0]}, the buffer's length")  # fmt: skip
        return batch

    def _check_values(self, stage: Stage, page_size: int, entries: int) -> int:
        """Check tables that are on the host. Returns the query rows in all, -1 where only the device knows."""
        rows = stage.check_indptr(QO_INDPTR) if stage.counts[QO_INDPTR] else -1
        if stage.counts[KV_INDPTR]:
            stage.check_indptr(KV_INDPTR, entries, "the length of kv_indices")
        told = KV_INDPTR if stage.counts[KV_INDPTR] else None
        if stage.counts[_KV_LENS] and not stage.lengths_fit(_KV_LENS, told, page_size):
            lens = stage.values[_KV_LENS]
            require(not (lens < 0).any(), "kv_len_arr", lens.min(), "no negative length")
            if stage.counts[KV_INDPTR]:
                over = -(-lens // page_size) - np.diff(stage.values[KV_INDPTR])
                worst = int(over.argmax()) if len(over) else 0
                require(not len(over) or over[worst] <= 0, "kv_len_arr", f"{lens[worst]} of request {worst}",
                        f"what its entries of kv_indices hold, pages of {page_size}")  # fmt: skip
        return rows

    def _bring_all(self, tables, stage: Stage, stream) -> list[torch.Tensor]:
        """The tables as int32 on the compute device; those on the host in one copy."""
        if stage.parts:
            stage.send(stream)
        there = []
        for i, t in enumerate(tables):
            if stage.parts and stage.counts[i]:
                n = t.shape[0]
                t = stage.parts[i] if n == stage.counts[i] else stage.parts[i][:n]
            elif t.dtype != torch.int32 or t.device != self.device:
                t = t.to(self.device, torch.int32)
            there.append(t if t.is_contiguous() else t.contiguous())
        return there

    def _fill_fixed(self, tables) -> tuple[torch.Tensor, ...]:
        """Copy the tables into the fixed buffers. Requests past the batch are empty."""
        for i, (t, buffer) in enumerate(zip(tables, self._fixed, strict=True)):
            n = t.shape[0]
            if buffer.data_ptr() != t.data_ptr():
                buffer[:n].copy_(t, non_blocking=True)
            if i in (QO_INDPTR, KV_INDPTR):
                buffer[n:].copy_(buffer[n - 1 : n].expand(buffer.shape[0] - n))
            elif i == _KV_LENS:
                buffer[n:].zero_()
        return self._fixed


def latent_blocks(block_tables, seq_lens, cum_seq_lens_q, q_len: int, device: torch.device) -> Table:
    """The Table of block tables [batch, max_pages] and lengths [batch].

    Queries are told by cum_seq_lens_q [batch + 1], or all are `q_len` long.
    """
    for name, t in (("block_tables", block_tables), ("seq_lens", seq_lens)):
        require(t is not None, name, None, "a tensor")
    tables = integers(block_tables, "block_tables", device, (None, None))
    batch = tables.shape[0]
    lens = flat_integers(seq_lens, "seq_lens", device, batch)
    check_entries("block_tables", tables)
    if cum_seq_lens_q is None:
        return block_table(tables, lens, q_len=max(q_len, 1))
    return block_table(tables, lens, qo_indptr=integers(cum_seq_lens_q, "cum_seq_lens_q", device, (batch + 1,)))


def check_entries(name: str, table: torch.Tensor) -> None:
    """Work lists count entries of a table in int32."""
    entries = table.shape[0] * max(table.stride(0), table.shape[1])
    require(entries < 1 << 31, name, f"{entries} entries", "fewer than 2^31")
