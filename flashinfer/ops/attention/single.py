"""One request without a wrapper."""

from __future__ import annotations

from functools import lru_cache

import torch

from flashinfer._core.kv_layout import check_layout, ragged_views
from flashinfer.ops.attention.batch import Batch, Call, Request, custom_mask_table
from flashinfer.ops.attention.problem import Table


def run_single(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, kv_layout: str, backend: str, call: Call, **options):
    """Attention of one request: q [rows, heads, dim], k and v as `kv_layout` says; `options` are Request's fields.

    Returns out [rows, heads, dim], or (out, lse).
    """
    check_layout(kv_layout)
    k, v = ragged_views(k, v, kv_layout)
    request = Request(
        qo_indptr=_indptr(q.shape[0]),
        kv_indptr=_indptr(k.shape[0]),
        kv_indices=None,
        last_page_len=None,
        num_qo_heads=q.shape[1],
        num_kv_heads=k.shape[1],
        head_dim_qk=q.shape[2],
        head_dim_vo=v.shape[2],
        page_size=0,
        q_dtype=q.dtype,
        kv_dtype=k.dtype,
        **options,
    )
    request.check()
    table = Table(_indptr(q.shape[0], q.device), _indptr(k.shape[0], q.device))
    custom_mask_table(request, table)
    batch = Batch(request, table, backend, lambda count: torch.empty(count, dtype=torch.uint8, device=q.device))
    return batch.run(q, k, v, call)


@lru_cache(maxsize=256)
def _indptr(rows: int, device: torch.device = torch.device("cpu")) -> torch.Tensor:
    return torch.tensor([0, rows], dtype=torch.int32, device=device)
