"""The rows of `trtllm_gen_routing` against the definition of its fields, pair by pair."""

import pytest
import torch

from flashinfer.fused_moe import RoutingMethodType, trtllm_gen_routing
from flashinfer.fused_moe.routing import route
from flashinfer.fused_moe.trtllm_gen_routing import max_num_padded_tokens

BF16 = torch.bfloat16


@pytest.mark.parametrize(
    "method, tokens, tile, offset, count, shared",
    [
        (RoutingMethodType.Renormalize, 37, 8, 0, None, 0),
        (RoutingMethodType.SigmoidRenorm, 5, 3, 6, 4, 0),
        (RoutingMethodType.DeepSeekV3, 9, 4, 12, None, 1),
        (RoutingMethodType.DeepSeekV3, 9, 4, 0, 6, 1),
        (RoutingMethodType.Default, 0, 8, 0, None, 0),
    ],
)
def test_rows(method, tokens, tile, offset, count, shared, device):
    experts, top_k = 18, 4
    logits = torch.randn(tokens, experts, device=device)
    groups = {"n_group": 3, "topk_group": 2} if method == RoutingMethodType.DeepSeekV3 else {}
    routed = trtllm_gen_routing(
        logits, None, method, top_k, num_fused_shared_experts=shared, local_expert_offset=offset,
        local_num_experts=count, routed_scaling_factor=2.0, tile_tokens_dim=tile, **groups,
    )  # fmt: skip
    chosen, weights = route(
        logits, None, method, top_k, num_fused_shared_experts=shared, routed_scaling_factor=2.0,
        **groups,
    )  # fmt: skip
    ids = chosen.tolist()
    assert all(row[top_k:] == [experts] * shared for row in ids)
    assert routed.topk_weights.dtype == BF16 and torch.equal(routed.topk_weights, weights.to(BF16))
    if method not in (RoutingMethodType.Default, RoutingMethodType.Renormalize):
        sums = weights[:, :top_k].double().sum(1)
        scale = 2.0 if method == RoutingMethodType.DeepSeekV3 else 1.0
        torch.testing.assert_close(sums, torch.full_like(sums, scale), rtol=1e-6, atol=0)
    last = experts + shared if count is None else offset + count
    rows, tiles, limits = [], [], []
    expected = [[-1] * len(row) for row in ids]
    for expert in range(offset, last):
        pairs = [(t, c) for t, row in enumerate(ids) for c, chosen in enumerate(row) if chosen == expert]
        end = len(rows) + len(pairs)
        for token, choice in pairs:
            expected[token][choice] = len(rows)
            rows.append(token)
        while len(rows) % tile:
            rows.append(-1)
        while len(tiles) * tile < len(rows):
            tiles.append(expert - offset)
            limits.append(min(len(tiles) * tile, end))
    assert routed.total_num_padded_tokens.tolist() == [len(rows)]
    assert routed.num_non_exiting_ctas.tolist() == [len(tiles)]
    assert routed.expanded_idx_to_permuted_idx.tolist() == expected
    seen = [[e if row >= 0 else -1 for e, row in zip(*pair, strict=True)] for pair in zip(ids, expected, strict=True)]
    assert routed.topk_ids.tolist() == seen and routed.topk_ids.shape == (tokens, top_k + shared)
    local = last - offset
    most = max_num_padded_tokens(tokens, top_k + shared, local, tile)
    assert len(rows) <= most == len(routed.permuted_idx_to_token_idx)
    assert routed.permuted_idx_to_token_idx[: len(rows)].tolist() == rows
    assert routed.cta_idx_xy_to_batch_idx[: len(tiles)].tolist() == tiles
    assert routed.cta_idx_xy_to_mn_limit[: len(tiles)].tolist() == limits


def test_ranges():
    logits = torch.randn(2, 8)
    with pytest.raises(ValueError, match="local_expert_offset, local_num_experts: got"):
        trtllm_gen_routing(logits, None, 1, 2, local_expert_offset=6, local_num_experts=4)
    with pytest.raises(ValueError, match="tile_tokens_dim: got 0"):
        trtllm_gen_routing(logits, None, 1, 2, tile_tokens_dim=0)
    for given, name in (((-1, 2, 3, 8), "num_tokens"), ((4, 2, 3, 0), "tile_tokens_dim")):
        with pytest.raises(ValueError, match=f"^{name}: got "):
            max_num_padded_tokens(*given)
