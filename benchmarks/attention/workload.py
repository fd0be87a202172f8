"""One batch of attention to measure: its tensors, its floor in bytes and operations, and its true result.

It imports torch alone: the process of a peer builds the same tensors from the same seed.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

# Query rows of a request that are compared with the truth: enough that every tile of a kernel holds one.
_SAMPLES = 512
# Largest error of a row (of one head) over its norm. Probabilities rounded to bfloat16 give 0.003, to e4m3 0.03.
_LIMIT = {"bfloat16": 0.02, "float8_e4m3fn": 0.1}


@dataclass(frozen=True)
class Attention:
    """Requests of equal length; `page_size` 0 has keys and values in ragged rows. Types are torch's names.

    A query sees `window_left` keys before its own at most, all of them if -1; a window comes with `causal`.
    """

    name: str
    requests: int
    q_len: int
    kv_len: int
    qo_heads: int = 32
    kv_heads: int = 8
    head_dim_qk: int = 128
    head_dim_vo: int = 128
    page_size: int = 0
    causal: bool = False
    window_left: int = -1
    q_dtype: str = "bfloat16"
    kv_dtype: str = "bfloat16"

    @property
    def is_decode(self) -> bool:
        """Whether it goes through the decode API: a few query tokens of each request over a paged cache."""
        return self.page_size > 0 and self.q_len <= 16

    @property
    def pages(self) -> int:
        """Pages of one request."""
        return -(-self.kv_len // self.page_size)


def visible_pairs(a: Attention) -> int:
    """Pairs of a query and a key that it sees, of one head, over the batch; the last query stands at the last key."""
    if a.window_left >= 0:
        seen = sum(min(a.window_left, a.kv_len - a.q_len + row) + 1 for row in range(a.q_len))
        return a.requests * seen
    unseen = a.q_len * (a.q_len - 1) // 2 if a.causal else 0
    return a.requests * (a.q_len * a.kv_len - unseen)


def flops(a: Attention) -> int:
    """Operations of q k^T and p v over visible pairs."""
    return 2 * visible_pairs(a) * a.qo_heads * (a.head_dim_qk + a.head_dim_vo)


def moved_bytes(a: Attention) -> int:
    """Keys and values read once, queries read, outputs written."""
    size = {name: dtype(name).itemsize for name in (a.q_dtype, a.kv_dtype)}
    keys = a.requests * a.kv_len * a.kv_heads * (a.head_dim_qk + a.head_dim_vo) * size[a.kv_dtype]
    rows = a.requests * a.q_len * a.qo_heads
    return keys + rows * (a.head_dim_qk * size[a.q_dtype] + a.head_dim_vo * dtype("bfloat16").itemsize)


def dtype(name: str) -> torch.dtype:
    return getattr(torch, name)


@dataclass
class Tensors:
    """`keys` is (k, v) in ragged rows or (cache,) in pages, NHD. Indptrs are on the host, `kv_indices` beside the keys.

    `kv_indptr` counts rows or pages.
    """

    q: torch.Tensor
    keys: tuple[torch.Tensor, ...]
    qo_indptr: torch.Tensor
    kv_indptr: torch.Tensor
    kv_indices: torch.Tensor | None = None
    last_page_len: torch.Tensor | None = None


def tensors(a: Attention, device: torch.device) -> Tensors:
    """Normal values from a fixed seed, pages in random order."""
    generator = torch.Generator(device).manual_seed(0)

    def normal(shape, name):
        values = torch.randn(shape, generator=generator, device=device, dtype=torch.bfloat16)
        return values.to(dtype(name))

    batch = torch.arange(a.requests + 1, dtype=torch.int32)
    q = normal((a.requests * a.q_len, a.qo_heads, a.head_dim_qk), a.q_dtype)
    if not a.page_size:
        dims = (a.head_dim_qk, a.head_dim_vo)
        keys = tuple(normal((a.requests * a.kv_len, a.kv_heads, dim), a.kv_dtype) for dim in dims)
        return Tensors(q, keys, batch * a.q_len, batch * a.kv_len)
    count = a.requests * a.pages
    cache = normal((count, 2, a.page_size, a.kv_heads, a.head_dim_qk), a.kv_dtype)
    indices = torch.randperm(count, generator=generator, device=device).int()
    last = torch.full((a.requests,), a.kv_len - (a.pages - 1) * a.page_size, dtype=torch.int32)
    return Tensors(q, (cache,), batch * a.q_len, batch * a.pages, indices, last)


def poisoned_out(a: Attention, device: torch.device) -> torch.Tensor:
    """Where a result goes: bfloat16, NaN until it is written, so that what another kernel left is not taken for it."""
    shape = (a.requests * a.q_len, a.qo_heads, a.head_dim_vo)
    return torch.full(shape, torch.nan, dtype=torch.bfloat16, device=device)


def rows_of_keys(a: Attention, t: Tensors, request: int) -> tuple[torch.Tensor, torch.Tensor]:
    """k and v of a request as rows [kv_len, kv_heads, head_dim]."""
    if not a.page_size:
        return tuple(x[request * a.kv_len : (request + 1) * a.kv_len] for x in t.keys)
    (cache,) = t.keys
    # as bytes: not every torch gathers float8
    pages = cache.view(torch.uint8)[t.kv_indices[request * a.pages : (request + 1) * a.pages].long()].view(cache.dtype)
    return tuple(pages[:, part].flatten(0, 1)[: a.kv_len] for part in (0, 1))


def sampled_rows(a: Attention) -> torch.Tensor:
    """Query rows of every request that are checked, the first and the last among them."""
    return torch.linspace(0, a.q_len - 1, min(a.q_len, _SAMPLES)).round().long()


def truth(a: Attention, t: Tensors) -> torch.Tensor:
    """float32 attention of the sampled rows: [requests, rows, qo_heads, head_dim_vo]."""
    rows = sampled_rows(a).to(t.q.device)
    group = a.qo_heads // a.kv_heads
    expected = torch.empty(a.requests, len(rows), a.qo_heads, a.head_dim_vo, device=t.q.device)
    keys, stands = torch.arange(a.kv_len, device=t.q.device), rows[:, None] + (a.kv_len - a.q_len)
    seen = keys <= stands
    if a.window_left >= 0:
        seen &= keys >= stands - a.window_left
    for request in range(a.requests):
        k, v = rows_of_keys(a, t, request)
        q = t.q[request * a.q_len : (request + 1) * a.q_len].float()[rows] * a.head_dim_qk**-0.5
        for head in range(a.kv_heads):
            heads = slice(head * group, (head + 1) * group)
            logits = q[:, heads].transpose(0, 1) @ k[:, head].float().T
            if a.causal:
                logits.masked_fill_(~seen, -torch.inf)
            expected[request, :, heads] = (logits.softmax(-1) @ v[:, head].float()).transpose(0, 1)
    return expected


def check(a: Attention, expected: torch.Tensor, out: torch.Tensor) -> None:
    """AssertionError unless every sampled row of every head of `out` is the truth, up to the rounding of its types."""
    rows = sampled_rows(a).to(out.device)
    got = out.view(a.requests, a.q_len, a.qo_heads, a.head_dim_vo)[:, rows].float()
    error = (got - expected).norm(dim=-1) / expected.norm(dim=-1)
    worst, limit = error.nan_to_num(torch.inf).max().item(), _LIMIT[a.q_dtype]
    assert worst <= limit, f"wrong result: error {worst:.3g} of a row's norm, allowed {limit}"
