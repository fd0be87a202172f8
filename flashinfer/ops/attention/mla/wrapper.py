"""Latent attention over the wrapper that all batch attentions share: its options, its block tables."""

from __future__ import annotations

import torch

from flashinfer._core.checks import require
from flashinfer.ops.attention.direct import block_table
from flashinfer.ops.attention.engine import flat_integers, integers
from flashinfer.ops.attention.mla.batch import LatentBatch, LatentKind, latent_kind
from flashinfer.ops.attention.options import PlanOptions, tile_rows
from flashinfer.ops.attention.problem import Table
from flashinfer.ops.attention.request import Request
from flashinfer.ops.attention.split import Limits
from flashinfer.ops.attention.variants import AttentionVariant
from flashinfer.ops.attention.wrapper import AttentionWrapper, GraphBuffers

_TABLES = ("qo_indptr", "kv_indptr", "kv_len_arr", "kv_indices")


class LatentWrapper(AttentionWrapper):
    """Tables as latent attention has them: keys per request in a tensor of their own, one cache for keys and values."""

    _lengths_in_tokens = True
    _names = _TABLES

    def __init__(
        self, float_workspace_buffer: torch.Tensor, backend: str, fixed: tuple[torch.Tensor, ...] | None,
        variant: AttentionVariant | None = None,
    ):  # fmt: skip
        """`fixed` are the buffers of CUDA-graph mode: qo_indptr, kv_indptr, kv_len_arr, kv_indices."""
        buffers = None
        if fixed is not None:
            for name, t in zip(_TABLES, fixed, strict=True):
                require(t is not None, name, None, "a buffer, with use_cuda_graph=True")
                require(t.device == float_workspace_buffer.device, name, f"a buffer on {t.device}",
                        str(float_workspace_buffer.device))  # fmt: skip
                require(t.dtype == torch.int32 and t.is_contiguous(), name, f"{t.dtype} {t.stride()}",
                        "int32, contiguous")  # fmt: skip
            buffers = GraphBuffers(fixed[0], fixed[1], fixed[3])
        super().__init__(float_workspace_buffer, "NHD", backend, buffers, variant)
        if fixed is not None:
            self._shown.kv_lens = fixed[2]

    def _plan_blocks(self, asked: PlanOptions, block_tables, seq_lens, cum_seq_lens_q, longest_q: int) -> None:
        """Plan a batch of a rectangular block table on the device; it is read where it is, at every run."""
        if self._on_gpu and torch._C._cuda_getDevice() != self.device.index:
            with torch.cuda.device(self.device):
                return self._plan_blocks(asked, block_tables, seq_lens, cum_seq_lens_q, longest_q)
        table = latent_blocks(block_tables, seq_lens, cum_seq_lens_q, longest_q, self.device)
        rows = table.batch_size * table.q_len if table.q_len else -1
        request = Request(asked, table.qo_indptr, table.kv_indptr, q_len=table.q_len, rows=rows)
        limits = Limits(table.batch_size, rows, table.kv_indices.shape[0] * asked.page_size)
        old = self._base if self._use_cuda_graph else None
        tile = tile_rows(longest_q, asked.num_qo_heads) if old is None else old.kind.problem.rows
        kind = self._kind_of(asked, tile, False, self._backend)
        if old is not None:
            kind, limits = self._captured(request, kind, limits)
        self._take_up(kind, request, table, limits, self._look_at_stream(()))

    def _new_batch(self, kind: LatentKind, stream: int | None) -> LatentBatch:
        return LatentBatch(kind, self._partials, None, self._debug)

    def _new_kind(self, options: PlanOptions, rows: int, custom: bool, backend: str) -> LatentKind:
        return latent_kind(options, rows, self.device, backend)


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
