"""Batches of two kinds of requests: a prefix that all share, and chunks of prefill beside decodes.

Like through_api.py it goes by FlashInfer's API alone and runs in the peer's process too.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import flashinfer
import torch
from workload import Attention, check, moved_bytes, flops, tensors, truth

_WORKSPACE = 512 << 20


@dataclass(frozen=True)
class Shared:
    """Requests of one query over a prefix that all share and keys of their own; flat, each request reads it all."""

    name: str
    cascade: bool
    requests: int = 256
    prefix: int = 32768
    unique: int = 128
    heads: int = 32
    head_dim: int = 128
    page_size: int = 16


@dataclass(frozen=True)
class Mixed:
    """Chunks of prefill and decodes over one paged cache. `way`: "in turn" (two wrappers, one after the other),
    "BatchAttention" or "POD" (BatchPODWithPagedKVCacheWrapper)."""

    name: str
    way: str
    chunks: Attention
    decodes: Attention


class SharedRunner:
    """A planned wrapper as a function of (q, cache)."""

    def __init__(self, s: Shared, device: torch.device):
        generator = torch.Generator(device).manual_seed(0)
        self.s = s
        own = s.requests * s.unique // s.page_size
        self.pages = torch.randperm(s.prefix // s.page_size + own, generator=generator, device=device).int()
        shape = (len(self.pages), 2, s.page_size, s.heads, s.head_dim)
        cache = torch.randn(shape, generator=generator, device=device, dtype=torch.bfloat16)
        q = torch.randn(s.requests, s.heads, s.head_dim, generator=generator, device=device, dtype=torch.bfloat16)
        self.inputs = q, cache

    def __call__(self, q, cache):
        return self.wrapper.run(q, cache)

    @cached_property
    def wrapper(self):
        s, device = self.s, self.pages.device
        workspace = torch.zeros(_WORKSPACE if device.type == "cuda" else 1 << 20, dtype=torch.uint8, device=device)
        batch = torch.arange(s.requests + 1, dtype=torch.int32)
        each, shared = s.unique // s.page_size, s.prefix // s.page_size
        last = torch.full((s.requests,), s.page_size, dtype=torch.int32)
        heads = (s.heads, s.heads, s.head_dim, s.page_size)
        prefix, own = self.pages[:shared], self.pages[shared:]
        types = dict(q_data_type=torch.bfloat16, kv_data_type=torch.bfloat16)
        if not s.cascade:
            wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(workspace, "NHD", use_tensor_cores=True)
            indices = torch.cat([prefix.expand(s.requests, -1), own.view(s.requests, each)], dim=1).flatten()
            wrapper.plan(batch * (shared + each), indices, last, *heads, **types)
            return wrapper
        wrapper = flashinfer.MultiLevelCascadeAttentionWrapper(2, workspace, "NHD")
        ends = torch.tensor([0, s.requests], dtype=torch.int32), torch.tensor([0, shared], dtype=torch.int32)
        wrapper.plan([ends[0], batch], [ends[1], batch * each], [prefix, own], [last[:1], last], *heads, **types)
        return wrapper

    def check(self, out: torch.Tensor) -> None:
        """AssertionError unless the first and the last request are right in every head."""
        s, (q, cache) = self.s, self.inputs
        each, shared = s.unique // s.page_size, s.prefix // s.page_size
        for request in (0, s.requests - 1):
            begin = shared + request * each
            pages = torch.cat([self.pages[:shared], self.pages[begin : begin + each]]).long()
            k, v = (cache[pages, part].flatten(0, 1).transpose(0, 1).float() for part in (0, 1))
            weights = ((q[request, :, None].float() * s.head_dim**-0.5) @ k.transpose(1, 2)).softmax(-1)
            expected = (weights @ v)[:, 0]
            error = ((out[request].float() - expected).norm(dim=-1) / expected.norm(dim=-1)).nan_to_num(torch.inf).max()
            assert error <= 0.02, f"wrong result: error {error:.3g} of a row's norm, allowed 0.02"

    @property
    def bytes(self) -> int:
        """The prefix and each request's keys read once."""
        return sum(x.nbytes for x in self.inputs) + self.inputs[0].nbytes

    @property
    def flops(self) -> int:
        s = self.s
        return 4 * s.requests * (s.prefix + s.unique) * s.heads * s.head_dim


class MixedRunner:
    """Planned wrappers as a function of (q of the chunks, q of the decodes, cache)."""

    def __init__(self, m: Mixed, device: torch.device):
        self.m = m
        self.parts = [tensors(a, device) for a in (m.chunks, m.decodes)]
        first = self.parts[0].keys[0]
        self.shift = first.shape[0]
        # One cache, as a server has; q in one tensor too, since BatchAttention takes one.
        self.cache = torch.cat([first, self.parts[1].keys[0]])
        self.q = torch.cat([t.q for t in self.parts])
        self.split = len(self.parts[0].q)
        self.inputs = self.q, self.cache

    def __call__(self, q, cache):
        way, (chunks, decodes) = self.m.way, (q[: self.split], q[self.split :])
        if way == "BatchAttention":
            return self.wrapper.run(q, cache)[0]
        if way == "POD":
            return self.wrapper.run(chunks, cache, decodes, cache, causal_p=True)
        prefill, decode = self.wrapper
        return prefill.run(chunks, cache), decode.run(decodes, cache)

    @cached_property
    def wrapper(self):
        m, (a, b) = self.m, (self.m.chunks, self.m.decodes)
        (p, d), device = self.parts, self.q.device
        heads = (a.qo_heads, a.kv_heads, a.head_dim_qk)
        types = dict(q_data_type=torch.bfloat16, kv_data_type=torch.bfloat16)
        size = _WORKSPACE if device.type == "cuda" else 1 << 20
        workspaces = [torch.zeros(size, dtype=torch.uint8, device=device) for _ in range(2)]
        moved = d.kv_indices + self.shift
        if m.way == "BatchAttention":
            wrapper = flashinfer.BatchAttention("NHD", device)
            tables = [torch.cat([x, y[1:] + x[-1]]) for x, y in
                      ((p.qo_indptr, d.qo_indptr), (p.kv_indptr, d.kv_indptr))]  # fmt: skip
            lens = torch.tensor([a.kv_len] * a.requests + [b.kv_len] * b.requests, dtype=torch.int32)
            indices = torch.cat([p.kv_indices, moved])
            # The original's plan() asks for tables on the device.
            tables, lens = [t.to(device) for t in tables], lens.to(device)
            wrapper.plan(*tables, indices, lens, *heads, a.head_dim_vo, a.page_size, causal=True, **types)
            return wrapper
        if m.way == "POD":
            wrapper = flashinfer.BatchPODWithPagedKVCacheWrapper(workspaces[0], "NHD")
            wrapper.plan(
                p.qo_indptr, p.kv_indptr, p.kv_indices, p.last_page_len, d.qo_indptr, d.kv_indptr, moved,
                d.last_page_len, *heads, a.page_size, **types,
            )  # fmt: skip
            return wrapper
        prefill = flashinfer.BatchPrefillWithPagedKVCacheWrapper(workspaces[0], "NHD")
        prefill.plan(p.qo_indptr, p.kv_indptr, p.kv_indices, p.last_page_len, *heads, a.page_size, causal=True, **types)
        decode = flashinfer.BatchDecodeWithPagedKVCacheWrapper(workspaces[1], "NHD", use_tensor_cores=True)
        decode.plan(d.kv_indptr, moved, d.last_page_len, *heads, b.page_size, **types)
        return prefill, decode

    def check(self, out) -> None:
        """AssertionError unless both parts are right."""
        parts = (out[: self.split], out[self.split :]) if isinstance(out, torch.Tensor) else out
        for a, t, part in zip((self.m.chunks, self.m.decodes), self.parts, parts):
            check(a, truth(a, t), part)

    @property
    def bytes(self) -> int:
        return moved_bytes(self.m.chunks) + moved_bytes(self.m.decodes)

    @property
    def flops(self) -> int:
        return flops(self.m.chunks) + flops(self.m.decodes)


def runner(what: Shared | Mixed, device: torch.device) -> SharedRunner | MixedRunner:
    return (SharedRunner if isinstance(what, Shared) else MixedRunner)(what, device)
