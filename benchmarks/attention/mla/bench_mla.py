"""Latent attention against copy bandwidth and the tensor cores: decode of DeepSeek's shapes, dense and sparse."""

from collections.abc import Iterator
from functools import cached_property, partial

import torch

from flashinfer.mla import BatchMLAPagedAttentionWrapper, trtllm_batch_decode_with_kv_cache_mla
from flashinfer.testing.bench import Case, Target, Work

CKV, KPE, PAGE = 512, 64, 64
SCALE = 192**-0.5
# Largest error of a row over its norm. Probabilities rounded to bfloat16 give 0.003.
_LIMIT = 0.02
# What FlashMLA publishes of an H800: where operations bound it, and where bytes do.
_OPERATIONS, _BYTES = Target("TFLOP/s", 660), Target("TB/s", 3.0)


def cases(device: torch.device) -> Iterator[Case]:
    """(requests, keys, heads, query tokens), and top-k of sparse ones; small ones on a CPU."""
    if device.type != "cuda":
        yield _row(2, 130, 4, 1)
        yield _row(2, 130, 4, 2)
        yield Case("MLA top 40, 4 queries, 4 heads", partial(_sparse, 4, 40, 4), problem="mla sparse")
        return
    for requests, keys, heads, tokens, targets in (
        (64, 4096, 128, 1, [_OPERATIONS]), (128, 8192, 128, 1, [_OPERATIONS]), (64, 4096, 128, 2, [_OPERATIONS]),
        (128, 8192, 16, 1, [_BYTES]), (64, 4096, 16, 1, []), (64, 4096, 16, 4, []), (16, 1024, 16, 1, []),
        (1, 65536, 128, 1, []),
    ):  # fmt: skip
        headline = (requests, tokens) == (128, 1)
        yield _row(requests, keys, heads, tokens, targets=(Target("peers", 1.0), *targets), headline=headline)
    for heads in (128, 16):
        yield _row(128, 8192, heads, 1, torch.float8_e4m3fn)
    for queries, heads in ((64, 128), (2048, 128), (64, 16)):
        name = f"MLA top 2048, {queries} queries, {heads} heads"
        yield Case(name, partial(_sparse, queries, 2048, heads), builds="sparse", problem="mla sparse")


def _row(requests: int, keys: int, heads: int, tokens: int, kv_dtype=torch.bfloat16, **row) -> Case:
    kind = "" if kv_dtype == torch.bfloat16 else ", FP8"
    name = f"MLA decode {requests}x{keys}, {heads} heads, {tokens} tokens{kind}"
    at = (requests, keys, heads, tokens, kv_dtype)
    return Case(name, partial(_dense, *at), ways=partial(_ways, *at), builds=f"dense{kind}", problem="mla", **row)


class Runner:
    """A planned wrapper as a function of (q_nope, q_pe, cache, out); planned at the first call."""

    def __init__(self, requests, keys, heads, tokens, kv_dtype, device, backend):
        self.sizes, self.backend = (requests, keys, heads, tokens), backend
        pages = -(-keys // PAGE)
        cache = torch.randn(requests * pages, PAGE, CKV + KPE, device=device, dtype=torch.bfloat16).to(kv_dtype)
        self.pages = torch.randperm(requests * pages, device=device).to(torch.int32)
        shape, settings = (requests * tokens, heads), dict(device=device, dtype=torch.bfloat16)
        q = torch.randn(*shape, CKV, **settings), torch.randn(*shape, KPE, **settings)
        # the original takes a float8 cache with scales only
        self.scales = {} if kv_dtype == torch.bfloat16 else dict(ckv_scale=1.0, kpe_scale=1.0)
        # NaN until it is written, so that what another kernel left is not taken for it
        self.inputs = *q, cache, torch.full((*shape, CKV), torch.nan, **settings)

    def __call__(self, q_nope, q_pe, cache, out):
        self.wrapper.run(q_nope, q_pe, cache[..., :CKV], cache[..., CKV:], out=out, **self.scales)
        return out

    @cached_property
    def wrapper(self):
        (requests, keys, heads, tokens), (q, _, cache, _) = self.sizes, self.inputs
        workspace = torch.zeros(128 << 20 if q.is_cuda else 1 << 20, dtype=torch.uint8, device=q.device)
        wrapper = BatchMLAPagedAttentionWrapper(workspace, backend=self.backend)
        batch = torch.arange(requests + 1, dtype=torch.int32, device=q.device)
        lens = torch.full((requests,), keys, dtype=torch.int32, device=q.device)
        tables = batch * tokens, batch * (len(self.pages) // requests), self.pages, lens
        wrapper.plan(*tables, heads, CKV, KPE, PAGE, tokens > 1, SCALE, q.dtype, cache.dtype)
        return wrapper

    def check(self, out: torch.Tensor) -> None:
        """AssertionError unless the first and the last request are right in every head."""
        (requests, keys, heads, tokens), (q_nope, q_pe, cache, _) = self.sizes, self.inputs
        q = torch.cat([q_nope, q_pe], -1).view(requests, tokens, heads, -1).float()
        hidden = torch.ones(tokens, keys, dtype=torch.bool, device=q.device).triu(keys - tokens + 1)
        for request in (0, requests - 1):
            # as bytes: not every torch gathers float8
            chosen = self.pages.view(requests, -1)[request].long()
            rows = cache.view(torch.uint8)[chosen].view(cache.dtype).flatten(0, 1)[:keys].float()
            logits = (q[request] @ rows.T * SCALE).masked_fill(hidden[:, None], -torch.inf)
            expected = logits.softmax(-1) @ rows[:, :CKV]
            error = (out.view(requests, tokens, heads, CKV)[request].float() - expected).norm(dim=-1)
            worst = (error / expected.norm(dim=-1)).nan_to_num(torch.inf).max().item()
            assert worst <= _LIMIT, f"wrong result: error {worst:.3g} of a row's norm, allowed {_LIMIT}"


def _dense(requests: int, keys: int, heads: int, tokens: int, kv_dtype, device) -> Work:
    run = Runner(requests, keys, heads, tokens, kv_dtype, device, "auto")
    q_nope, q_pe, cache, out = run.inputs
    pairs = requests * tokens * heads * (keys - (tokens - 1) / 2)
    plain = tokens == 1 and kv_dtype == torch.bfloat16
    return Work(
        run,
        run.inputs,
        bytes=requests * keys * (CKV + KPE) * cache.element_size() + q_nope.nbytes + q_pe.nbytes + out.nbytes,
        flops=int(2 * pairs * (2 * CKV + KPE)),
        peers={"torch": partial(_by_torch, run.pages.view(requests, -1))} if plain else {},
        check=run.check,
        given={
            "sizes": run.sizes, "q_nope": q_nope, "q_pe": q_pe, "cache": cache, "pages": run.pages, "scale": SCALE,
        },
    )  # fmt: skip


def _ways(*at) -> dict[str, Work]:
    """FlashInfer's backends for Hopper."""
    runs = {name: Runner(*at, name) for name in ("fa2", "fa3")}
    return {name: Work(run, run.inputs, check=run.check) for name, run in runs.items()}


def _by_torch(tables, q_nope, q_pe, cache, out):
    """Gathered, then scaled_dot_product_attention with one KV head for all; keys are whole pages."""
    keys = cache[tables.long()].flatten(1, 2)[:, None]
    rows = torch.cat([q_nope, q_pe], -1)[:, None]
    return torch.nn.functional.scaled_dot_product_attention(rows, keys, keys[..., :CKV], scale=SCALE)


def _sparse(queries: int, top_k: int, heads: int, device) -> Work:
    """By the function that takes indices of tokens."""
    tokens = max(65536, 2 * top_k)
    cache = torch.randn(tokens // PAGE, PAGE, CKV + KPE, device=device, dtype=torch.bfloat16)
    chosen = torch.randint(tokens, (queries, 1, top_k), device=device, dtype=torch.int32)
    lens = torch.full((queries,), top_k, dtype=torch.int32, device=device)
    q = torch.randn(queries, 1, heads, CKV + KPE, device=device, dtype=torch.bfloat16)
    out = torch.full((queries, 1, heads, CKV), torch.nan, device=device, dtype=q.dtype)
    workspace = torch.zeros(128 << 20 if q.is_cuda else 1, dtype=torch.uint8, device=device)

    def run(q, cache, chosen, lens, out):
        sizes = (128, CKV, KPE)
        return trtllm_batch_decode_with_kv_cache_mla(
            q, cache, workspace, *sizes, chosen, lens, top_k, top_k, out, SCALE
        )

    def check(result):
        for query in (0, queries - 1):
            rows = cache.flatten(0, 1)[chosen[query, 0].long()].float()
            expected = (q[query, 0].float() @ rows.T * SCALE).softmax(-1) @ rows[:, :CKV]
            error = (result.view(queries, heads, CKV)[query].float() - expected).norm(dim=-1) / expected.norm(dim=-1)
            worst = error.nan_to_num(torch.inf).max().item()
            assert worst <= _LIMIT, f"wrong result: error {worst:.3g} of a row's norm, allowed {_LIMIT}"

    return Work(
        run,
        inputs=(q, cache, chosen, lens, out),
        bytes=min(queries * top_k, tokens) * (CKV + KPE) * 2 + q.nbytes + out.nbytes,
        flops=2 * queries * top_k * heads * (2 * CKV + KPE),
        check=check,
        given={"q": q, "cache": cache, "chosen": chosen, "scale": SCALE},
    )
