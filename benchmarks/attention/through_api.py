"""The rows through FlashInfer's API: this package's and, in its own process, the original's. Both import as flashinfer.

A runner plans at its first call, so that a refusal is an error of the call and stands in the row.
"""

from __future__ import annotations

from functools import cached_property

import flashinfer
import torch
from rows import HOST_KV_LEN, Host
from workload import Attention, Tensors, dtype, poisoned_out, tensors

_WORKSPACE = 512 << 20


class Runner:
    """A planned wrapper as a function of (q, *keys, out)."""

    def __init__(self, a: Attention, t: Tensors, backend: str, tensor_cores: bool = True):
        self.a, self.t, self.backend, self.tensor_cores = a, t, backend, tensor_cores
        self.inputs = (t.q, *t.keys, poisoned_out(a, t.q.device))
        # the original takes float8 queries with scales only, one a head
        heads = (a.qo_heads, a.kv_heads, a.kv_heads) if "float8" in a.q_dtype else ()
        self.scales = [torch.ones(count, device=t.q.device) for count in heads]

    def __call__(self, *inputs):
        *given, out = inputs
        return self.wrapper.run(*given, *self.scales, out=out)

    def plan(self) -> None:
        a, t = self.a, self.t
        heads = (a.qo_heads, a.kv_heads, a.head_dim_qk)
        types = dict(q_data_type=dtype(a.q_dtype), kv_data_type=dtype(a.kv_dtype), o_data_type=torch.bfloat16)
        mask = dict(causal=a.causal, window_left=a.window_left)
        if a.is_decode:
            tables = (t.kv_indptr, t.kv_indices, t.last_page_len)
            more = {"q_len_per_req": a.q_len} if a.q_len > 1 else {}
            self._new_wrapper.plan(*tables, *heads, a.page_size, **types, **more)
        elif a.page_size:
            tables = (t.qo_indptr, t.kv_indptr, t.kv_indices, t.last_page_len)
            self._new_wrapper.plan(*tables, *heads, a.page_size, **mask, **types)
        else:
            dims = {"head_dim_vo": a.head_dim_vo}
            self._new_wrapper.plan(t.qo_indptr, t.kv_indptr, *heads, **dims, **mask, **types)

    @cached_property
    def wrapper(self):
        self.plan()
        return self._new_wrapper

    @cached_property
    def _new_wrapper(self):
        device = self.t.q.device
        workspace = torch.zeros(_WORKSPACE if device.type == "cuda" else 1 << 20, dtype=torch.uint8, device=device)
        if self.a.is_decode:
            options = dict(use_tensor_cores=self.tensor_cores, backend=self.backend)
            return flashinfer.BatchDecodeWithPagedKVCacheWrapper(workspace, "NHD", **options)
        if self.a.page_size:
            return flashinfer.BatchPrefillWithPagedKVCacheWrapper(workspace, "NHD", backend=self.backend)
        return flashinfer.BatchPrefillWithRaggedKVCacheWrapper(workspace, "NHD", backend=self.backend)


def host_call(h: Host, device: torch.device, backend: str, tensor_cores: bool = True):
    """plan() or run() of a decode batch as a call without arguments; indptrs come from the host, as engines' do."""
    a = Attention(h.name, h.batch, 1, HOST_KV_LEN, page_size=16)
    runner = Runner(a, tensors(a, device), backend, tensor_cores)
    if h.what == "plan":
        return runner.plan
    wrapper, (q, cache, out) = runner.wrapper, runner.inputs
    return lambda: wrapper.run(q, cache, out=out)
