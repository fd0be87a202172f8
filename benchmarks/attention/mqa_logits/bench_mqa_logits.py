"""An indexer's scores against copy bandwidth: every key and its scale is read once."""

from collections.abc import Iterator
from functools import partial

import torch

from flashinfer.paged_mqa import fp8_paged_mqa_logits
from flashinfer.testing.bench import Case, Work

DIM, PAGE = 128, 64


def cases(device: torch.device) -> Iterator[Case]:
    """(requests, keys, heads, query tokens); small ones on a CPU."""
    sizes = ((64, 65536, 64, 1), (16, 8192, 64, 1), (64, 65536, 64, 2), (1, 131072, 64, 1))
    for size in sizes if device.type == "cuda" else ((2, 130, 8, 1),):
        requests, keys, heads, tokens = size
        yield Case(f"{requests}x{keys} keys, {heads} heads, {tokens} tokens", partial(_logits, *size))


def _logits(requests: int, keys: int, heads: int, tokens: int, device) -> Work:
    pages = -(-keys // PAGE)
    cache = torch.zeros(requests * pages, PAGE, 1, DIM + 4, dtype=torch.uint8, device=device)
    body = torch.randn(requests * pages, PAGE * DIM, device=device).to(torch.float8_e4m3fn)
    cache.flatten(1)[:, : PAGE * DIM] = body.view(torch.uint8)
    cache.flatten(1)[:, PAGE * DIM :] = torch.rand(requests * pages, PAGE, device=device).view(torch.uint8)
    tables = torch.randperm(requests * pages, device=device).to(torch.int32).view(requests, pages)
    lens = torch.full((requests,), keys, dtype=torch.int32, device=device)
    q = torch.randn(requests, tokens, heads, DIM, device=device).to(torch.float8_e4m3fn)
    weights = torch.randn(requests * tokens, heads, device=device)
    return Work(
        run=lambda q, cache, weights, lens, tables: fp8_paged_mqa_logits(q, cache, weights, lens, tables, None, keys),
        inputs=(q, cache, weights, lens, tables),
        bytes=requests * keys * (DIM + 4) + q.nbytes + weights.nbytes + requests * tokens * keys * 4,
        flops=2 * requests * tokens * keys * heads * (DIM + 1),
    )
