"""The paged KV cache's operations in torch."""

import torch
from torch.nn.functional import pad

from flashinfer._core.implementation import Implementation
from flashinfer.ops import narrow
from flashinfer.ops.page import Append, Positions, SeqLens


def append(problem, key, value, batch_indices, positions, k_cache, v_cache, kv_indices, kv_indptr, quantised=None):
    """Token t goes to slot positions[t] of request batch_indices[t]; one with a negative index goes nowhere.

    quantised : Quantised, where the problem has forms; caches are bytes then.
    """
    kept = (batch_indices >= 0) & (positions >= 0)
    if not kept.all():
        key, value, batch_indices, positions = key[kept], value[kept], batch_indices[kept], positions[kept]
    page_size = k_cache.shape[1]
    page = kv_indices[kv_indptr[batch_indices] + positions // page_size]
    slot = positions % page_size
    if quantised is None:
        k_cache[page, slot] = key
        v_cache[page, slot] = value
        return
    k_scale, v_scale, k_factors, v_factors = quantised
    for form, x, scale, cache, factors in (
        (problem.key_form, key, k_scale, k_cache, k_factors),
        (problem.value_form, value, v_scale, v_cache, v_factors),
    ):
        inverse = 1 / torch.tensor(scale, dtype=torch.float32, device=x.device)
        if form == "nvfp4":
            codes, found = narrow.quantize_nvfp4(x.float(), inverse)
            factors[page, slot] = found.view(torch.uint8)
        else:
            codes = narrow.to_fp8(x.float() * inverse, torch.float8_e4m3fn).view(torch.uint8)
        cache[page, slot] = codes


def positions(problem, append_indptr, seq_lens, batch_indices, positions):
    """A request's new tokens are its last ones; tokens past the last request are padding."""
    token = torch.arange(len(positions), dtype=torch.int32, device=positions.device)
    ends = append_indptr[1:]
    request = torch.searchsorted(ends, token, right=True)
    inside = (request < len(ends)) & (token >= append_indptr[0])
    shift = pad(seq_lens - ends, (0, 1))
    batch_indices.copy_(torch.where(inside, request, -1))
    positions.copy_(torch.where(inside, token + shift[request], 0))


def seq_lens(problem, kv_indptr, kv_last_page_len, out, page_size):
    """All pages of a request are full but the last."""
    pages = kv_indptr.diff()
    out.copy_(torch.where(pages > 0, (pages - 1) * page_size + kv_last_page_len, 0))


_RUN = {Append: append, Positions: positions, SeqLens: seq_lens}


def run(problem, config, *args):
    _RUN[type(problem)](problem, *args)


IMPLEMENTATION = Implementation(run)
