"""Latent attention against copy bandwidth and the tensor cores: decode of DeepSeek's shapes, dense and sparse."""

from collections.abc import Iterator
from functools import partial

import torch

from flashinfer.mla import trtllm_batch_decode_with_kv_cache_mla
from flashinfer.testing.bench import Case, Work

CKV, KPE, PAGE = 512, 64, 64
SCALE = 192**-0.5


def cases(device: torch.device) -> Iterator[Case]:
    """(requests, keys, heads, query tokens), and top-k of sparse ones; small ones on a CPU."""
    if device.type != "cuda":
        yield Case("2x130 keys, 4 heads", partial(_dense, 2, 130, 4, 1))
        yield Case("top 40, 4 queries, 4 heads", partial(_sparse, 4, 40, 4))
        return
    for requests, keys, heads, tokens in (
        (64, 4096, 16, 1), (64, 4096, 128, 1), (64, 4096, 16, 4), (128, 8192, 16, 1), (16, 1024, 16, 1),
        (1, 65536, 128, 1), (64, 16384, 128, 1), (64, 4096, 128, 2),
    ):  # fmt: skip
        name = f"{requests}x{keys} keys, {heads} heads, {tokens} tokens"
        yield Case(name, partial(_dense, requests, keys, heads, tokens))
        if tokens == 1:
            yield Case(f"{name}, FP8", partial(_dense, requests, keys, heads, tokens, torch.float8_e4m3fn))
    for queries, heads in ((64, 128), (2048, 128), (64, 16)):
        yield Case(f"top 2048, {queries} queries, {heads} heads", partial(_sparse, queries, 2048, heads))


def _dense(requests: int, keys: int, heads: int, tokens: int, device, kv_dtype=torch.bfloat16) -> Work:
    pages = -(-keys // PAGE)
    cache = torch.randn(requests * pages, PAGE, CKV + KPE, device=device).to(kv_dtype)
    tables = torch.randperm(requests * pages, device=device).to(torch.int32).view(requests, pages)
    lens = torch.full((requests,), keys, dtype=torch.int32, device=device)
    q = torch.randn(requests, tokens, heads, CKV + KPE, device=device, dtype=torch.bfloat16)
    out = torch.empty(*q.shape[:3], CKV, device=device, dtype=q.dtype)
    pairs = requests * tokens * heads * (keys - (tokens - 1) / 2)
    return Work(
        run=lambda q, cache, tables, lens, out: _attend(q, cache, tables, lens, out, 0),
        inputs=(q, cache, tables, lens, out),
        bytes=requests * keys * (CKV + KPE) * cache.element_size() + q.nbytes + out.nbytes,
        flops=int(2 * pairs * (2 * CKV + KPE)),
        peers={"torch": partial(_by_torch, heads=heads)} if tokens == 1 and kv_dtype == torch.bfloat16 else {},
    )


def _sparse(queries: int, top_k: int, heads: int, device) -> Work:
    tokens = max(65536, 2 * top_k)
    cache = torch.randn(tokens // PAGE, PAGE, CKV + KPE, device=device, dtype=torch.bfloat16)
    chosen = torch.randint(tokens, (queries, 1, top_k), device=device, dtype=torch.int32)
    lens = torch.full((queries,), top_k, dtype=torch.int32, device=device)
    q = torch.randn(queries, 1, heads, CKV + KPE, device=device, dtype=torch.bfloat16)
    out = torch.empty(queries, 1, heads, CKV, device=device, dtype=q.dtype)
    return Work(
        run=lambda q, cache, chosen, lens, out: _attend(q, cache, chosen, lens, out, top_k),
        inputs=(q, cache, chosen, lens, out),
        bytes=min(queries * top_k, tokens) * (CKV + KPE) * 2 + q.nbytes + out.nbytes,
        flops=2 * queries * top_k * heads * (2 * CKV + KPE),
    )


def _attend(q, cache, tables, lens, out, top_k):
    workspace = torch.empty(0, dtype=torch.uint8, device=q.device)
    return trtllm_batch_decode_with_kv_cache_mla(
        q, cache, workspace, 128, CKV, KPE, tables, lens, 0, top_k, out, SCALE
    )


def _by_torch(q, cache, tables, lens, out, heads: int):
    """Gathered, then scaled_dot_product_attention with one KV head for all."""
    keys = cache[tables.long()].flatten(1, 2)[:, None]
    values = keys[..., :CKV]
    rows = q.transpose(1, 2).reshape(q.shape[0], 1, heads, -1)
    return torch.nn.functional.scaled_dot_product_attention(rows, keys, values, scale=SCALE)
