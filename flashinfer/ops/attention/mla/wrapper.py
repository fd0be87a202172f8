"""Latent attention over the wrapper that all batch attentions share: its options, its block tables."""

from __future__ import annotations

import torch

from flashinfer._core.checks import require
from flashinfer.ops.attention.engine import flat_integers, integers
from flashinfer.ops.attention.options import PlanOptions, tile_rows
from flashinfer.ops.attention.replaced import ReplaceableWrapper
from flashinfer.ops.attention.split import Limits
from flashinfer.ops.attention.tables import Table, block_table, graph_buffers
from flashinfer.ops.attention.variants import AttentionVariant

_TABLES = ("qo_indptr", "kv_indptr", "kv_len_arr", "kv_indices")
_FIELDS = ("qo_indptr", "kv_indptr", "kv_lens", "kv_indices")
# What block tables and their lengths are called.
_BLOCKS = ("cum_seq_lens_q", "kv_indptr", "seq_lens", "block_tables")


class LatentWrapper(ReplaceableWrapper):
    """Tables as latent attention has them: keys per request in a tensor of their own, one cache for keys and values."""

    _in_tokens = True
    _names = _TABLES

    def __init__(
        self, float_workspace_buffer: torch.Tensor, backend: str, fixed: tuple[torch.Tensor | None, ...] | None,
        variant: AttentionVariant | None = None,
    ):  # fmt: skip
        """`fixed` are the buffers of CUDA-graph mode: qo_indptr, kv_indptr, kv_len_arr, kv_indices."""
        buffers = None
        if fixed is not None:
            given = dict(zip(_FIELDS, fixed, strict=True))
            buffers = graph_buffers(float_workspace_buffer.device, dict(zip(_FIELDS, _TABLES)), **given)
        super().__init__(float_workspace_buffer, "NHD", backend, buffers, variant)

    def _plan_blocks(self, asked: PlanOptions, block_tables, seq_lens, cum_seq_lens_q, longest_q: int) -> None:
        """Plan a batch of a rectangular block table on the device; it is read where it is, at every run."""
        if self._on_gpu and torch._C._cuda_getDevice() != self._index:
            with torch.cuda.device(self.device):
                return self._plan_blocks(asked, block_tables, seq_lens, cum_seq_lens_q, longest_q)
        table = latent_blocks(block_tables, seq_lens, cum_seq_lens_q, longest_q, self.device)
        table.rows = table.batch_size * table.q_len if table.q_len else -1
        limits = Limits(table.batch_size, table.rows, table.kv_indices.shape[0] * asked.page_size, table.q_len)
        old = self._base if self._use_cuda_graph else None
        tile = tile_rows(longest_q, asked.num_qo_heads) if old is None else old.kernels.problem.rows
        kernels = self._kernels_of(asked, tile, False, self._backend)
        if old is not None:
            kernels, limits = self._captured(kernels, table.each_q, limits)
        self._take_up(kernels, table, limits, self._look_at_stream(()))


def latent_blocks(block_tables, seq_lens, cum_seq_lens_q, q_len: int, device: torch.device) -> Table:
    """The Table of block tables [batch, max_pages] and lengths [batch].

    Queries of each request are in cum_seq_lens_q [batch + 1], or all are `q_len` long.
    """
    for name, t in (("block_tables", block_tables), ("seq_lens", seq_lens)):
        require(t is not None, name, None, "a tensor")
    tables = integers(block_tables, "block_tables", device, (None, None))
    batch = tables.shape[0]
    lens = flat_integers(seq_lens, "seq_lens", device, batch)
    check_entries("block_tables", tables)
    if cum_seq_lens_q is None:
        return block_table(tables, lens, q_len=max(q_len, 1), names=_BLOCKS)
    indptr = integers(cum_seq_lens_q, "cum_seq_lens_q", device, (batch + 1,))
    return block_table(tables, lens, qo_indptr=indptr, names=_BLOCKS)


def check_entries(name: str, table: torch.Tensor) -> None:
    """Work lists count entries of a table in int32."""
    entries = table.shape[0] * max(table.stride(0), table.shape[1])
    require(entries < 1 << 31, name, f"{entries} entries", "fewer than 2^31")
