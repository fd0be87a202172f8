"""Latent attention from its definition, K = [ckv, kpe] and V = ckv, request by request; and batches to try it on."""

from dataclasses import dataclass

import torch

from flashinfer.testing import generate
from flashinfer.testing.compare import assert_close
from tests.ops.attention.oracle import scores, weigh

LOG2E = 1.4426950408889634


@dataclass
class Latents:
    """Queries, and latents in pages in random order; free pages and slots past a request's end are NaN.

    q [rows, heads, ckv + kpe]; cache [pages, page_size, ckv + kpe]; keys: those of each request, [len, ckv + kpe].
    """

    q: torch.Tensor
    cache: torch.Tensor
    keys: list
    qo_indptr: torch.Tensor
    kv_indptr: torch.Tensor
    kv_indices: torch.Tensor
    kv_lens: torch.Tensor
    ckv: int

    @property
    def tables(self):
        return self.qo_indptr, self.kv_indptr, self.kv_indices, self.kv_lens

    def parts(self):
        """q_nope, q_pe, ckv_cache, kpe_cache."""
        n = self.ckv
        return self.q[..., :n], self.q[..., n:], self.cache[..., :n], self.cache[..., n:]

    def blocks(self, gap=0):
        """The table as a rectangle, what is not used -1."""
        if self.kv_indices is None:
            return None
        starts = self.kv_indptr.tolist()
        most = max([b - a for a, b in zip(starts, starts[1:])] + [1])
        table = torch.full((len(starts) - 1, most + gap), -1, dtype=torch.int32, device=self.q.device)
        for row, a, b in zip(table, starts, starts[1:]):
            row[: b - a] = self.kv_indices[a:b]
        return table[:, :most]


def latents(q_lens, kv_lens, heads, ckv=64, kpe=16, page=8, dtype=torch.float16, kv_dtype=None, device="cpu"):
    x = generate.ragged_batch(q_lens, kv_lens, heads, 1, ckv + kpe, dtype=dtype, kv_dtype=kv_dtype, device=device)
    paged = generate.paged(x, page)
    keys = [x.request(i)[1][:, 0] for i in range(len(kv_lens))]
    lens = torch.tensor(kv_lens, dtype=torch.int32, device=device)
    cache = paged.caches[0][:, :, 0]
    return Latents(x.q, cache, keys, x.qo_indptr, paged.indptr, paged.indices, lens, ckv)


def attend(q, keys, ckv, sm_scale, dtype, causal=False, sinks=None, pe_scale=1.0):
    """One request: q [rows, heads, dim] over keys [len, dim]. Returns out in `dtype`, and lse in base e.

    A 16-bit dtype is that of the products: logits, softmax and sums are in float32.
    """
    # FP8 is multiplied in float16.
    given = torch.float16 if q.dtype.itemsize == 1 else q.dtype
    wide = torch.promote_types(dtype, torch.float32)
    q, keys = q.to(dtype).to(wide), keys.to(dtype).to(wide)
    flat = q.flatten(0, 1)
    s = pe_scale * scores(flat[:, ckv:], keys[:, ckv:], given)
    s = scores(flat[:, :ckv], keys[:, :ckv], given, s).view(*q.shape[:2], keys.shape[0]) * sm_scale
    if causal:
        row, key = torch.arange(q.shape[0], device=q.device), torch.arange(keys.shape[0], device=q.device)
        s = s.masked_fill((key > row[:, None] + keys.shape[0] - q.shape[0])[:, None], -torch.inf)
    extra = torch.full((*s.shape[:2], 1), -torch.inf, dtype=wide, device=q.device)
    if sinks is not None:
        extra[:] = sinks.to(wide)[None, :, None]
    # A column that has no value; without sinks it is -inf, and a row of nothing else gives 0.
    s = torch.cat((s, extra), -1)
    p, total = weigh(s, dtype)
    out = torch.einsum("qhk,kd->qhd", p[..., :-1], keys[:, :ckv]) / total
    return out.to(dtype), torch.logsumexp(s, -1)


def expected(x: Latents, sm_scale, dtype, **options):
    """Of all requests, in `dtype`."""
    ends = x.qo_indptr.tolist()
    each = [attend(x.q[a:b], keys, x.ckv, sm_scale, dtype, **options) for a, b, keys in zip(ends, ends[1:], x.keys)]
    return torch.cat([out for out, _ in each]), torch.cat([lse for _, lse in each])


def check(result, x: Latents, sm_scale, base_e=False, out_scale=1.0, **options):
    """Assert out and lse of `result` against float64, by the rule of testing/compare.py."""
    out, lse = result
    truth, truth_lse = expected(x, sm_scale, torch.float64, **options)
    # Products of float8 are exact in float16, so that is what a computation in their place rounds to.
    compute = x.q.dtype if x.q.dtype in (torch.float16, torch.bfloat16, torch.float32) else torch.float16
    same, _ = expected(x, sm_scale, compute, **options)
    _, same_lse = expected(x, sm_scale, torch.float32, **options)
    unit = 1.0 if base_e else LOG2E
    assert_close(out, (same * out_scale).to(out.dtype), truth * out_scale, "out")
    assert_close(lse, same_lse * unit, truth_lse * unit, "lse")
