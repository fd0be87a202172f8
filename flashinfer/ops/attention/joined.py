"""Two batches as one: their offsets one behind the other, and whether they read one cache."""

from __future__ import annotations

import torch

from flashinfer._core.checks import check_indptr

# What the wrappers of both parts call their tables.
PREFILL_NAMES = "qo_indptr", "paged_kv_indptr", "paged_kv_last_page_len", "paged_kv_indices"


def check_offsets(*tables: torch.Tensor) -> None:
    for name, indptr in zip(PREFILL_NAMES, tables, strict=False):
        if not indptr.is_cuda and indptr.numel():
            check_indptr(name, indptr.numpy(), sliced=True)


def from_zero(indptr: torch.Tensor) -> torch.Tensor:
    """Checked offsets on the host, from 0 on."""
    check_indptr("kv_indptr", indptr.numpy(), sliced=True)
    return indptr - indptr[:1]


def joined_offsets(p: torch.Tensor, d: torch.Tensor) -> torch.Tensor:
    """The offsets of two batches, one behind the other."""
    return torch.cat([p, d[1:].to(p.device) + p[-1:]])


def same_cache(p, d) -> bool:
    """Whether two caches, tensors or pairs of them, are one."""
    if isinstance(p, torch.Tensor) and isinstance(d, torch.Tensor):
        facts = [(x.data_ptr(), x.shape, x.stride(), x.dtype, x.device) for x in (p, d)]
        return facts[0] == facts[1]
    pairs = not isinstance(p, torch.Tensor) and not isinstance(d, torch.Tensor)
    return pairs and len(p) == len(d) and all(map(same_cache, p, d))
