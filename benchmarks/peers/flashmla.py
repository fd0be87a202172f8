"""FlashMLA: decode of latent attention, dense over pages of 64, and sparse by indices of tokens."""

import peer_flashmla as peer
import torch


def dense(given: dict) -> dict:
    """Its plan is made before. Over an FP8 cache it wants queries in FP8 as well."""
    q, cache, table, lengths = _operands(given)
    more = {"scale": given["scale"], "causal": q.shape[1] > 1}
    if cache.dtype == torch.bfloat16:
        *_, plan = peer.flashmla_decode(q, cache, table, lengths, **more)
        return {"dense": lambda: peer.flashmla_decode(q, cache, table, lengths, plan=plan, **more)[0]}
    one = torch.ones(1, device=q.device)
    q, more = q.to(cache.dtype), more | {"descale_q": one, "descale_k": one}
    *_, plan = peer.flashmla_decode_fp8(q, cache, table, lengths, **more)
    return {"queries in FP8": lambda: peer.flashmla_decode_fp8(q, cache, table, lengths, plan=plan, **more)[0]}


def _operands(given):
    (requests, keys, heads, tokens), cache = given["sizes"], given["cache"]
    q = torch.cat([given["q_nope"], given["q_pe"]], -1).view(requests, tokens, heads, -1)
    lengths = torch.full((requests,), keys, dtype=torch.int32, device=q.device)
    return q, cache[:, :, None], given["pages"].view(requests, -1), lengths


def sparse(given: dict) -> dict:
    """Its kernel of prefill is the one that reads a cache in bfloat16."""
    q, keys = given["q"].squeeze(1), given["cache"].flatten(0, 1)[:, None]
    return {
        "sparse prefill": lambda: peer.flashmla_sparse_prefill(q, keys, given["chosen"], given["scale"])[0]
    }


PROBLEMS = {"mla": dense, "mla sparse": sparse}
