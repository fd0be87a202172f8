"""An indexer's scores, of paged keys in decode and of dense keys in prefill: DeepSeek-V3.2's 64 heads of 128."""

from collections.abc import Iterator
from functools import partial

import torch

from flashinfer.dense_mqa import fp8_mqa_logits
from flashinfer.paged_mqa import fp8_paged_mqa_logits
from flashinfer.testing.bench import Case, Work

DIM, PAGE = 128, 64


# Of the norm. Hopper's tensor cores accumulate products of e4m3 with about 14 bits.
_LIMIT = 1e-3


def cases(device: torch.device) -> Iterator[Case]:
    """(requests, keys, heads, query tokens) of decode, (query tokens, keys, heads) of prefill; small ones on a CPU."""
    gpu = device.type == "cuda"
    sizes = ((64, 65536, 64, 1), (16, 8192, 64, 1), (64, 65536, 64, 2), (1, 131072, 64, 1))
    for size in sizes if gpu else ((2, 130, 8, 1),):
        requests, keys, heads, tokens = size
        name = f"{requests}x{keys} keys, {heads} heads, {tokens} tokens"
        yield Case(name, partial(_paged, *size), problem="mqa logits paged")
    for size in ((4096, 4096, 64), (2048, 65536, 64)) if gpu else ((5, 70, 8),):
        tokens, keys, heads = size
        yield Case(
            f"prefill {tokens} of {keys} keys, {heads} heads", partial(_dense, *size), problem="mqa logits dense",
            headline=gpu,
        )  # fmt: skip


def _keys(rows: int, device) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(rows, DIM, device=device).to(torch.float8_e4m3fn), torch.rand(rows, device=device)


def _check_scores(scores, q, weights, keys, factors) -> None:
    """scores [keys] of one query [heads, DIM] against float64."""
    products = (q.double() @ keys.double().T * factors.double()).relu()
    expected = weights.double() @ products
    error = ((scores.double() - expected).norm() / expected.norm()).nan_to_num(torch.inf)
    assert error < _LIMIT, f"wrong result: errs by {error:.3g} of the norm"


def _paged(requests: int, keys: int, heads: int, tokens: int, device) -> Work:
    pages = -(-keys // PAGE)
    cache = torch.zeros(requests * pages, PAGE, 1, DIM + 4, dtype=torch.uint8, device=device)
    codes, factors = _keys(requests * pages * PAGE, device)
    cache.flatten(1)[:, : PAGE * DIM] = codes.view(torch.uint8).view(requests * pages, -1)
    cache.flatten(1)[:, PAGE * DIM :] = factors.view(torch.uint8).view(requests * pages, -1)
    tables = torch.randperm(requests * pages, device=device).to(torch.int32).view(requests, pages)
    lens = torch.full((requests,), keys, dtype=torch.int32, device=device)
    q = torch.randn(requests, tokens, heads, DIM, device=device).to(torch.float8_e4m3fn)
    weights = torch.randn(requests * tokens, heads, device=device)

    def check(scores):
        for request in {0, requests - 1}:
            rows = (tables[request, :, None].long() * PAGE + torch.arange(PAGE, device=device)).flatten()[:keys]
            for token in range(tokens):
                at, end = request * tokens + token, keys - tokens + 1 + token
                _check_scores(scores[at, :end], q[request, token], weights[at], codes[rows[:end]], factors[rows[:end]])

    return Work(
        run=lambda q, cache, weights, lens, tables: fp8_paged_mqa_logits(q, cache, weights, lens, tables, None, keys),
        inputs=(q, cache, weights, lens, tables),
        bytes=requests * keys * (DIM + 4) + q.nbytes + weights.nbytes + requests * tokens * keys * 4,
        flops=2 * requests * tokens * keys * heads * (DIM + 1),
        operands="fp8",
        check=check,
        given={"q": q, "cache": cache, "weights": weights, "lens": lens, "tables": tables, "most": keys},
    )


def _dense(tokens: int, keys: int, heads: int, device) -> Work:
    """The last `tokens` of a sequence of `keys`: each sees the keys up to its own."""
    q = torch.randn(tokens, heads, DIM, device=device).to(torch.float8_e4m3fn)
    codes, factors = _keys(keys, device)
    weights = torch.randn(tokens, heads, device=device)
    begin = torch.zeros(tokens, dtype=torch.int32, device=device)
    end = torch.arange(keys - tokens + 1, keys + 1, dtype=torch.int32, device=device)

    def check(scores):
        for token in (0, tokens // 2, tokens - 1):
            n = int(end[token])
            _check_scores(scores[token, :n], q[token], weights[token], codes[:n], factors[:n])

    pairs = int(end.sum())
    return Work(
        run=lambda q, codes, factors, weights, begin, end: fp8_mqa_logits(q, (codes, factors), weights, begin, end),
        inputs=(q, codes, factors, weights, begin, end),
        bytes=q.nbytes + codes.nbytes + factors.nbytes + weights.nbytes + pairs * 4,
        flops=2 * pairs * heads * (DIM + 1),
        operands="fp8",
        check=check,
        given={"q": q, "keys": (codes, factors), "weights": weights, "begin": begin, "end": end, "most": keys},
    )
