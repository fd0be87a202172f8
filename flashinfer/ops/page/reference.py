"""The paged KV cache's operations in torch."""

import torch
from torch.nn.functional import pad

from flashinfer._core.implementation import Implementation
from flashinfer.ops import narrow
from flashinfer.ops.formats import KV_FORMATS
from flashinfer.ops.page import Append, Positions, SeqLens


def append(problem, rows, caches, table, quantised=None):
    """Write rows (key, value) to the slots of caches (k, v); a token with a negative index goes nowhere.

    table : PageTable, or slots [tokens] where the problem has them. quantised : Quantised, where it has formats; caches
    are bytes then.
    """
    num_pages, page_size = caches[0].shape[:2]
    if problem.slots:
        rows = [x[: len(table)] for x in rows]
        kept = (table >= 0) & (table < num_pages * page_size)
        page, slot = table[kept] // page_size, table[kept] % page_size
    else:
        kept = (table.batch_indices >= 0) & (table.positions >= 0)
        request, position = table.batch_indices[kept], table.positions[kept]
        page, slot = table.kv_indices[table.kv_indptr[request] + position // page_size], position % page_size
    rows = [x[kept] for x in rows]
    if quantised is None:
        for x, cache in zip(rows, caches):
            cache[page, slot] = x
        return
    for number_format, x, scale, cache, factors in (
        (problem.key_format, rows[0], quantised.k_scale, caches[0], quantised.k_factors),
        (problem.value_format, rows[1], quantised.v_scale, caches[1], quantised.v_factors),
    ):
        known = KV_FORMATS.get(number_format)
        if known and known.factor == "fp32":
            cache[page, slot], factors[page, slot] = narrow.quantize_rows(x.float(), known)
            continue
        inverse = 1 / torch.as_tensor(scale, dtype=torch.float32, device=x.device)
        if number_format == "nvfp4":
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


# One module for three ops: two of them are a few lines.
IMPLEMENTATION = Implementation({Append: append, Positions: positions, SeqLens: seq_lens})
