"""torch's scaled_dot_product_attention by its cuDNN and flash backends, as peers of the rows that it can state.

Keys are dense rows: it reads no pages. GQA is asked for by `enable_gqa`, and by keys expanded to all query heads before
the clock starts; the faster of the two stands for the backend. "naive" is the formula in torch's operations, with all
logits in memory, where these are no more than 8 GiB.
"""

from __future__ import annotations

from functools import partial

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.bias import causal_lower_right
from torch.nn.functional import scaled_dot_product_attention
from workload import Attention, Tensors, rows_of_keys

from flashinfer.testing.bench import Work

# Logits, of 2 bytes first and then 4.
_NAIVE = 1 << 31
_BACKENDS = {"cudnn": SDPBackend.CUDNN_ATTENTION, "flash": SDPBackend.FLASH_ATTENTION}


def works(a: Attention, t: Tensors, check) -> dict[str, Work]:
    """Peers of a row by name; none for float8, for pages read by several requests, or for a mask no backend has."""
    gathered = a.page_size and not (a.is_decode and a.requests == 1)
    if a.window_left >= 0 or "float8" in a.q_dtype + a.kv_dtype or gathered:
        return {}
    k, v = rows_of_keys(a, t, 0) if a.page_size else t.keys
    group = a.qo_heads // a.kv_heads
    operands = {"gqa": (k, v)} if group == 1 else {
        "gqa": (k, v),
        "expanded": tuple(x.repeat_interleave(group, dim=1) for x in (k, v)),
    }  # fmt: skip
    found = {}
    for backend in _BACKENDS:
        if backend == "cudnn" and a.causal and a.q_len != a.kv_len:
            # its causal mask starts at the first key; a chunk stands at the last
            continue
        for heads, keys in operands.items():
            name = backend if group == 1 else f"{backend}/{heads}"
            run = partial(_attention, a, _BACKENDS[backend])
            found[name] = Work(run, (t.q, *keys), check=lambda out: check(out.transpose(1, 2).flatten(0, 1)))
    if a.requests * a.qo_heads * a.q_len * a.kv_len <= _NAIVE:
        found["naive"] = Work(partial(_naive, a), (t.q, k, v), check=check)
    return found


def _naive(a: Attention, q, k, v):
    """softmax(mask(scale q k^T)) v, [tokens, heads, dim]; logits in the dtype of q, their softmax in float32."""
    q, k, v = (x.view(a.requests, -1, *x.shape[1:]).transpose(1, 2) for x in (q, k, v))
    group = a.qo_heads // a.kv_heads
    k, v = (x.repeat_interleave(group, dim=1) for x in (k, v))
    logits = (q @ k.mT) * a.head_dim_qk**-0.5
    if a.causal:
        stands = torch.arange(a.kv_len - a.q_len, a.kv_len, device=q.device)
        logits.masked_fill_(torch.arange(a.kv_len, device=q.device) > stands[:, None], float("-inf"))
    weights = logits.softmax(-1, dtype=torch.float32).to(q.dtype)
    return (weights @ v).transpose(1, 2).flatten(0, 1)


def _attention(a: Attention, backend: SDPBackend, q, k, v):
    """[requests, heads, q_len, dim]; the views of the inputs are what a model would pass."""
    q, k, v = (x.view(a.requests, -1, *x.shape[1:]).transpose(1, 2) for x in (q, k, v))
    square = a.q_len == a.kv_len
    mask = None if square or not a.causal else causal_lower_right(a.q_len, a.kv_len)
    gqa = k.shape[1] != q.shape[1]
    with sdpa_kernel(backend):
        return scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=a.causal and square, enable_gqa=gqa)
