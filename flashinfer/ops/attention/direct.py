"""Batches that are run without a plan: each call schedules on the device, and attends."""

from __future__ import annotations

import threading
from collections import OrderedDict
from functools import lru_cache, partial

import torch

from flashinfer._core import env, workspace
from flashinfer.ops.attention.batch import Batch
from flashinfer.ops.attention.kind import Kind, kind_of
from flashinfer.ops.attention.options import PlanOptions, tile_rows
from flashinfer.ops.attention.problem import Table, alibi_slopes
from flashinfer.ops.attention.request import Request
from flashinfer.ops.attention.split import Limits

# Batches kept per thread: an engine's kinds (prefill, decode, with and without a window) on its streams.
_MOST_KEPT = 64

# What errors call the tables, in the order of `tables.NAMES`.
_NAMES = "qo_indptr", "kv_indptr", "kv_lens", "kv_indices"

_kept = threading.local()


def run_direct(asked: PlanOptions, table: Table, q: torch.Tensor, kv, views, *, kv_tokens: int, longest_q: int = 0,
               backend: str = "auto", names: tuple[str, ...] = _NAMES, **call):  # fmt: skip
    """Attention of a batch that only the device knows. Nothing waits for it, so that a CUDA graph can capture it.

    Work lists and partial results are kept per thread and stream, and serve every call there whose batch fits; in a
    captured stream they are allocated in the graph's pool.

    Parameters
    ----------
    asked : PlanOptions
    table : Table
        On q's device; read at every call, and by a captured graph at every replay.
    q : Tensor [rows, num_qo_heads, head_dim_qk]
    kv, views
        As Batch.run takes them.
    kv_tokens : int
        A bound on the keys of all requests.
    longest_q : int
        The longest query, or about: what tiles are chosen by. 0 where it is unknown.
    backend : str
    names : tuple of str
        What the caller calls its tables.
    call
        The other arguments of Batch.run.

    Returns
    -------
    out, or (out, lse) with return_lse
    """
    device = q.device
    if device.type == "cuda" and torch._C._cuda_getDevice() != device.index:
        with torch.cuda.device(device):
            return run_direct(asked, table, q, kv, views, kv_tokens=kv_tokens, longest_q=longest_q, backend=backend,
                              names=names, **call)  # fmt: skip
    rows = tile_rows(table.q_len or longest_q, asked.group)
    batch = _batch_of(kind_of(asked, rows, table.mask is not None, device, backend))
    request = Request(asked, table.qo_indptr, table.kv_indptr, q_len=table.q_len, names=names)
    batch.fill(request, table, Limits(table.batch_size, q.shape[0], kv_tokens))
    return batch.run(q, kv, views, **call)


def _batch_of(kind: Kind) -> Batch:
    """The batch of a kind that this thread keeps for the current stream; a new one in a captured stream."""
    device, stream, debug = kind.device, None, env.DEBUG.is_on()
    alibi = kind.options.pos_encoding_mode == "ALIBI"
    slopes = _slopes(kind.options.num_qo_heads, device) if alibi else None
    if device.type == "cuda":
        if torch.cuda.is_current_stream_capturing():
            return Batch(kind, partial(torch.empty, dtype=torch.uint8, device=device), slopes, debug)
        stream = torch._C._cuda_getCurrentRawStream(device.index)
    batches = _kept.__dict__.setdefault("batches", OrderedDict())
    key = kind, stream, debug
    batch = batches.get(key)
    if batch is None:
        if len(batches) >= _MOST_KEPT:
            batches.popitem(last=False)
        batch = batches[key] = Batch(kind, partial(workspace.take, device), slopes, debug)
    return batch


@lru_cache(maxsize=64)
def _slopes(num_heads: int, device: torch.device) -> torch.Tensor:
    # From the host: this waits until they are there, so that work on any stream finds them.
    return torch.tensor(alibi_slopes(num_heads), dtype=torch.float32, device=device)


def block_table(tables: torch.Tensor, kv_lens: torch.Tensor, **queries) -> Table:
    """A Table of a rectangular block table.

    Parameters
    ----------
    tables : int32 Tensor [batch, max_pages]
        Page ids of each request; entries past its pages are not read. Rows may have any stride.
    kv_lens : int32 Tensor [batch]
        Keys of each request.
    queries
        qo_indptr, q_lens or q_len of Table.
    """
    batch, pages = tables.shape
    if batch > 1 and not tables.stride(0):
        # One row for all: a stride of 0 stands for no stride.
        tables = tables.contiguous()
    stride = tables.stride(0) if batch > 1 else pages
    flat = tables.as_strided(((batch - 1) * stride + pages if batch and pages else 0,), (1,))
    return Table(kv_indices=flat, kv_lens=kv_lens, kv_stride=max(stride, 1), **queries)
