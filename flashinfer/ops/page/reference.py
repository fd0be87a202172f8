"""The paged KV cache's operations in torch."""

import torch
from torch.nn.functional import pad

from flashinfer.ops.page import Append, Positions, SeqLens


def append(key, value, batch_indices, positions, k_cache, v_cache, kv_indices, kv_indptr):
    """Token t goes to slot positions[t] of request batch_indices[t]; one with a negative index goes nowhere."""
    kept = (batch_indices >= 0) & (positions >= 0)
    if not kept.all():
        key, value, batch_indices, positions = key[kept], value[kept], batch_indices[kept], positions[kept]
    page_size = k_cache.shape[1]
    page = kv_indices[kv_indptr[batch_indices] + positions // page_size]
    slot = positions % page_size
    k_cache[page, slot] = key
    v_cache[page, slot] = value


def positions(append_indptr, seq_lens, batch_indices, positions):
    """A request's new tokens are its last ones; tokens past the last request are padding."""
    token = torch.arange(len(positions), dtype=torch.int32, device=positions.device)
    ends = append_indptr[1:]
    request = torch.searchsorted(ends, token, right=True)
    inside = request < len(ends)
    shift = pad(seq_lens - ends, (0, 1))
    batch_indices.copy_(torch.where(inside, request, -1))
    positions.copy_(torch.where(inside, token + shift[request], 0))


def seq_lens(kv_indptr, kv_last_page_len, out, page_size):
    """All pages of a request are full but the last."""
    pages = kv_indptr.diff()
    out.copy_(torch.where(pages > 0, (pages - 1) * page_size + kv_last_page_len, 0))


_RUN = {Append: append, Positions: positions, SeqLens: seq_lens}


def run(problem, config, *args):
    _RUN[type(problem)](*args)
