"""FlashAttention-3: ragged and paged attention, in bfloat16 and FP8."""

import peer_fa3 as peer
import torch


def attention(given: dict) -> dict:
    a, t = given["row"], given["tensors"]
    device, more = t.q.device, {}
    if a.window_left >= 0:
        more = {"window_size_left": a.window_left, "window_size_right": 0}
    if "float8" in a.q_dtype:
        one = torch.ones(a.requests, a.kv_heads, device=device)
        more["descale"] = one, one, one
    cu_q = t.qo_indptr.to(device)
    if not a.page_size:
        cu_k = t.kv_indptr.to(device)
        return {
            "varlen": lambda: peer.fa3_varlen(
                t.q, *t.keys, cu_q, cu_k, a.q_len, a.kv_len, causal=a.causal, **more
            )[0]
        }
    k, v = t.keys[0].unbind(1)
    lengths = torch.full((a.requests,), a.kv_len, dtype=torch.int32, device=device)
    table = t.kv_indices.view(a.requests, -1)
    return {
        "paged": lambda: peer.fa3_paged(
            t.q, k, v, cu_q, lengths, table, a.q_len, a.kv_len, causal=a.causal, **more
        )[0]
    }


PROBLEMS = {"attention": attention}
