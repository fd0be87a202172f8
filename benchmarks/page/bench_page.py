"""Appending to a paged cache against copy bandwidth: keys and values are read once and written once."""

from collections.abc import Iterator

import torch

import flashinfer
from flashinfer.testing.bench import Case, Target, Work


def cases(device: torch.device) -> Iterator[Case]:
    """Prefill of 4 requests and decode of many on a GPU; those of a small model on a CPU."""
    on_gpu = device.type == "cuda"
    batches = ((4, 4096), (16, 4096), (128, 1), (8, 1)) if on_gpu else ((8, 1), (2, 256))
    heads = 8 if on_gpu else 1
    for requests, tokens in batches:
        goal = (Target("us", 2.5),) if requests * tokens <= 8 else (Target("copy", 0.97),) if tokens > 1 else ()
        for page_size, kv_layout in ((16, "NHD"), (16, "HND"), (1, "NHD")):
            yield Case(
                f"append {requests}x{tokens}, page {page_size} {kv_layout}",
                lambda d, at=(requests, tokens, page_size, kv_layout): _append(*at, heads, d),
                targets=goal,
            )
        yield Case(f"append MLA {requests}x{tokens}, page 64", lambda d, at=(requests, tokens): _append_mla(*at, d))
        yield Case(f"batch indices {requests}x{tokens}", lambda d, at=(requests, tokens): _positions(*at, d))


def _tables(requests, tokens, page_size, device):
    """Requests of 100 tokens more than are appended, on pages in random order."""
    pages = -(-(tokens + 100) // page_size)
    index = dict(dtype=torch.int32, device=device)
    table = torch.randperm(requests * pages, device=device).int()
    appended = torch.arange(requests + 1, **index) * tokens
    lengths = torch.full((requests,), tokens + 100, **index)
    rows = flashinfer.get_batch_indices_positions(appended, lengths, requests * tokens)
    return rows, (table, torch.arange(requests + 1, **index) * pages, lengths - (pages - 1) * page_size)


def _append(requests, tokens, page_size, kv_layout, heads, device) -> Work:
    rows, tables = _tables(requests, tokens, page_size, device)
    new = torch.randn(2, requests * tokens, heads, 128, device=device, dtype=torch.bfloat16).unbind()
    shape = (page_size, heads) if kv_layout == "NHD" else (heads, page_size)
    cache = torch.zeros(len(tables[0]), 2, *shape, 128, device=device, dtype=torch.bfloat16)
    return Work(
        run=lambda *given: flashinfer.append_paged_kv_cache(*given, kv_layout),
        inputs=(*new, *rows, cache, *tables),
        bytes=4 * new[0].nbytes,
    )


def _append_mla(requests, tokens, device) -> Work:
    rows, tables = _tables(requests, tokens, 64, device)
    new = [torch.randn(requests * tokens, dim, device=device, dtype=torch.bfloat16) for dim in (512, 64)]
    caches = [torch.zeros(len(tables[0]), 64, dim, device=device, dtype=torch.bfloat16) for dim in (512, 64)]
    return Work(
        run=flashinfer.append_paged_mla_kv_cache,
        inputs=(*new, *rows, *caches, *tables),
        bytes=2 * sum(x.nbytes for x in new),
    )


def _positions(requests, tokens, device) -> Work:
    indptr = torch.arange(requests + 1, dtype=torch.int32, device=device) * tokens
    lengths = torch.full((requests,), tokens + 100, dtype=torch.int32, device=device)
    return Work(
        run=lambda indptr, lengths: flashinfer.get_batch_indices_positions(indptr, lengths, requests * tokens),
        inputs=(indptr, lengths),
        bytes=8 * requests * tokens,
    )
