"""Latent attention without a plan: each call schedules on the device, and attends."""

from __future__ import annotations

import threading
from collections import OrderedDict
from functools import lru_cache, partial

import torch

from flashinfer._core import env, workspace
from flashinfer.ops.attention.mla.batch import Factors, LatentBatch, LatentKind, latent_kind
from flashinfer.ops.attention.options import PlanOptions, tile_rows
from flashinfer.ops.attention.problem import Table
from flashinfer.ops.attention.request import Request
from flashinfer.ops.attention.split import Limits

# Batches kept per thread: an engine's kinds on its streams.
_MOST_KEPT = 64

_kept = threading.local()


def run_latent(asked: PlanOptions, table: Table, q_nope, q_pe, ckv, kpe, factors: Factors, *, longest_q: int = 1,
               given: torch.Tensor | None = None, backend: str = "auto", **call):  # fmt: skip
    """Latent attention of a batch that only the device knows. Nothing waits for it, so a CUDA graph can capture it.

    Work lists and partial results are kept per thread and stream, and serve every call there whose batch fits; in a
    captured stream they are allocated in the graph's pool.

    Parameters
    ----------
    asked : PlanOptions
    table : Table
        On q's device; read at every call, and by a captured graph at every replay.
    q_nope, q_pe, ckv, kpe, factors
        As LatentBatch.run takes them.
    longest_q : int
        The longest query, or about: what tiles are chosen by.
    given : uint8 Tensor, optional
        A caller's workspace for partial results, used where it is large enough.
    backend : str
    call
        The other arguments of LatentBatch.run.

    Returns
    -------
    out, or (out, lse) with return_lse
    """
    device = q_nope.device
    if device.type == "cuda" and torch._C._cuda_getDevice() != device.index:
        with torch.cuda.device(device):
            return run_latent(asked, table, q_nope, q_pe, ckv, kpe, factors, longest_q=longest_q, given=given,
                              backend=backend, **call)  # fmt: skip
    kind = latent_kind(asked, tile_rows(max(longest_q, 1), asked.num_qo_heads), device, backend)
    batch = _batch_of(kind, given)
    rows = table.batch_size * table.q_len if table.q_len else q_nope.shape[0]
    keys = table.kv_indices.shape[0] * (1 if asked.sparse else asked.page_size)
    batch.fill(Request(asked, table.qo_indptr, table.kv_indptr, q_len=table.q_len), table,
               Limits(table.batch_size, rows, keys))  # fmt: skip
    return batch.run(q_nope, q_pe, ckv, kpe, factors, **call)


def _batch_of(kind: LatentKind, given: torch.Tensor | None) -> LatentBatch:
    """The batch of a kind that this thread keeps for the current stream; a new one in a captured stream."""
    device, stream = kind.device, None
    if device.type == "cuda":
        if torch.cuda.is_current_stream_capturing():
            own = partial(torch.empty, dtype=torch.uint8, device=device)
            return LatentBatch(kind, own if given is None else partial(_scratch, given, own), None, env.DEBUG.is_on())
        stream = torch._C._cuda_getCurrentRawStream(device.index)
    batches = _kept.__dict__.setdefault("batches", OrderedDict())
    key = kind, stream, None if given is None else (given.data_ptr(), given.numel())
    batch = batches.get(key)
    if batch is None:
        if len(batches) >= _MOST_KEPT:
            batches.popitem(last=False)
        own = partial(workspace.take, device)
        take = own if given is None else partial(_scratch, given, own)
        batch = batches[key] = LatentBatch(kind, take, None, env.DEBUG.is_on())
    return batch


def _scratch(given: torch.Tensor, own, count: int) -> torch.Tensor:
    if given.is_contiguous() and given.data_ptr() % 16 == 0 and given.numel() * given.element_size() >= count:
        return given.view(-1).view(torch.uint8)[:count]
    return own(count)


def ones_times(value: int, count: int, device: torch.device) -> torch.Tensor:
    """int32 [count] of one value, kept for other counts too."""
    if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        return torch.full((count,), value, dtype=torch.int32, device=device)
    return _constant(value, 1 << max(count - 1, 0).bit_length(), device)[:count]


@lru_cache(maxsize=64)
def _constant(value: int, count: int, device: torch.device) -> torch.Tensor:
    # From the host: this waits until it is there, so that work on any stream finds it.
    return torch.tensor([value], dtype=torch.int32, device="cpu").expand(count).contiguous().to(device)
