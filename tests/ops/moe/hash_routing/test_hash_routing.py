"""Routing by token id against its formula in float64."""

import pytest
import torch

from flashinfer.fused_moe import hash_topk
from flashinfer.testing import generate
from flashinfer.testing.compare import assert_close
from tests.ops.norm.variants import variant  # the fixture


@pytest.mark.parametrize("tokens", [1, 7, 0])
@pytest.mark.parametrize("top_k, shared", [(6, 0), (6, 1), (1, 1), (8, 0)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_against_float64(variant, device, tokens, top_k, shared, dtype):
    experts, vocabulary = 40, 13
    logits = (generate.randn(tokens, experts, device=device) * 8).to(dtype)
    table = torch.stack([torch.randperm(experts)[:top_k] for _ in range(vocabulary)]).int().to(device)
    ids = torch.randint(vocabulary, (tokens,), device=device)
    weights, chosen = hash_topk(logits, ids, table, shared, 2.5)
    assert chosen.dtype == torch.int32 and torch.equal(chosen[:, :top_k], table[ids])
    assert (chosen[:, top_k:] == experts).all() and (weights[:, top_k:] == torch.tensor(0.4)).all()
    results = []
    for wide in (torch.float64, torch.float32):
        mine = logits.to(wide).gather(1, table[ids].long())
        score = (torch.log1p(torch.exp(-mine.abs())) + mine.clamp(min=0)).sqrt()
        results.append(score / score.sum(1, keepdim=True))
    assert_close(weights[:, :top_k], results[1], results[0])


def test_far_below_zero(variant, device):
    """softplus(-60) is exp(-60), not 0: weights are still those of the formula."""
    logits = torch.tensor([[-60.0, -62.0, -80.0]], device=device)
    token, table = torch.zeros(1, dtype=torch.int64, device=device), torch.tensor([[0, 1, 2]], device=device)
    weights, _ = hash_topk(logits, token, table)
    score = torch.exp(logits.double() / 2)
    truth = score / score.sum()
    assert (weights - truth).abs().max() < 1e-6 and weights[0, 2] > 0


def test_what_does_not_exist(variant, device):
    """Ids outside the table, and experts outside the logits, have id -1 and weight 0; nothing else is read."""
    logits, table = torch.zeros(4, 3, device=device), torch.tensor([[0, 1], [2, 7], [-1, 0]], device=device)
    weights, ids = hash_topk(logits, torch.tensor([0, 1, 2, 99], dtype=torch.int32, device=device), table)
    assert ids.tolist() == [[0, 1], [2, -1], [-1, 0], [-1, -1]]
    assert weights.tolist() == [[0.5, 0.5], [1, 0], [0, 1], [0, 0]]


@pytest.mark.parametrize(
    "changed, name",
    [
        (dict(router_logits=torch.zeros(2, 4, dtype=torch.int32)), "router_logits"),
        (dict(input_ids=torch.zeros(3, dtype=torch.int64)), "input_ids"), (dict(input_ids=torch.zeros(2)), "input_ids"),
        (dict(tid2eid=torch.zeros(4, 33, dtype=torch.int32)), "tid2eid"), (dict(tid2eid=torch.zeros(4, 2)), "tid2eid"),
        (dict(num_fused_shared_experts=2), "num_fused_shared_experts"),
        (dict(routed_scaling_factor=0.0), "routed_scaling_factor"),
    ],
)  # fmt: skip
def test_bad_input(changed, name):
    given = dict(router_logits=torch.zeros(2, 4), input_ids=torch.zeros(2, dtype=torch.int64))
    given |= dict(tid2eid=torch.zeros(4, 2, dtype=torch.int32))
    with pytest.raises(ValueError, match=f"^{name}: got "):
        hash_topk(**given | changed)
