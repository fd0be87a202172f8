"""Choosing experts and mapping tokens to them, against torch: softmax or sigmoid, topk, and a stable sort."""

from collections.abc import Iterator

import torch

from flashinfer import fused_moe
from flashinfer.testing.bench import Case, Work
from flashinfer.tllm_enums import RoutingMethodType

# name -> experts, top_k, method, groups, groups kept
_MODELS = {
    "Mixtral 8x7B": (8, 2, RoutingMethodType.Renormalize, None, None),
    "Qwen3-30B": (128, 8, RoutingMethodType.Renormalize, None, None),
    "DeepSeek-V3": (256, 8, RoutingMethodType.DeepSeekV3, 8, 4),
}


def cases(device: torch.device) -> Iterator[Case]:
    """Decode to prefill on a GPU; a few tokens on a CPU."""
    counts = (1, 64, 4096) if device.type == "cuda" else (64,)
    for name, model in _MODELS.items():
        ways = None if model[2] == RoutingMethodType.DeepSeekV3 else _no_way
        for tokens in counts:
            yield Case(f"route {name} {tokens}", lambda d, m=model, t=tokens: _route(*m, t, d), ways=ways)
            yield Case(f"token_map {name} {tokens}", lambda d, m=model, t=tokens: _map(*m[:2], t, d), ways=_no_way)


def _no_way(device) -> dict[str, Work]:
    """FlashInfer does this inside its layers."""
    return {}


def _route(experts, top_k, method, groups, kept, tokens, device) -> Work:
    logits, bias = torch.randn(tokens, experts, device=device), torch.zeros(experts, device=device)
    deepseek = method == RoutingMethodType.DeepSeekV3

    def run(logits, bias):
        if not deepseek:
            from flashinfer.fused_moe.routing import route

            return route(logits, None, method, top_k)
        weights, ids = logits.new_empty(tokens, top_k), logits.new_empty(tokens, top_k, dtype=torch.int32)
        fused_moe.fused_topk_deepseek(logits, bias, groups, kept, top_k, 1.0, weights, ids)
        return ids, weights

    def by_torch(logits, bias):
        if not deepseek:
            values, ids = logits.topk(top_k)
            return ids.int(), values.softmax(1)
        scores = logits.sigmoid()
        ranked = (scores + bias).unflatten(1, (groups, -1))
        best = ranked.topk(2, 2).values.sum(2).topk(kept, 1).indices
        inside = torch.zeros(tokens, groups, dtype=torch.bool, device=device).scatter_(1, best, True)
        ids = ranked.masked_fill(~inside[..., None], -torch.inf).flatten(1).topk(top_k).indices
        weights = scores.gather(1, ids)
        return ids.int(), weights / weights.sum(1, keepdim=True)

    def check(result):
        # Equal scores are ordered by torch as it likes; distinct ones are not, nor are their weights.
        torch.testing.assert_close(result[1], by_torch(logits, bias)[1], rtol=1e-4, atol=1e-6)

    moved = logits.nbytes + 8 * tokens * top_k
    return Work(run, (logits, bias), bytes=moved, peers={"torch": by_torch}, check=check)


def _map(experts, top_k, tokens, device) -> Work:
    ids = torch.rand(tokens, experts, device=device).topk(top_k).indices.int()
    from flashinfer.fused_moe.routing import token_map

    # The tile of an expert's product: of 16 rows where there are few to an expert, of 128 where there are many.
    tile = 128 if tokens * top_k >= 64 * experts else 16

    def by_torch(ids):
        """The order and the counts, without padding and tiles."""
        expert, pair = ids.flatten().sort(stable=True)
        return pair, torch.searchsorted(expert, torch.arange(experts + 1, device=device, dtype=torch.int32))

    return Work(lambda ids: token_map(ids, experts, 0, tile), (ids,), bytes=3 * ids.nbytes, peers={"torch": by_torch})
