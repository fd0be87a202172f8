"""Rows at the ends of the float range, infinite temperatures, the last column, and how often a draft is accepted."""

import pytest
import torch

from flashinfer import sampling
from flashinfer.testing.compare import assert_bitwise, assert_close
from tests.ops.norm.variants import variant  # the fixture
from tests.ops.sampling.test_sampling import ORDERS, distribution, kept_columns, tiles

INF = torch.inf


def tiny_rows(columns, device):
    """Rows of denormals alone, of denormals beside normal values, and of values whose unit float32 does not hold."""
    x = torch.stack([
        torch.randint(0, 40, (columns,)) * 2.0**-149,
        torch.rand(columns) * 2.0**-130,
        torch.rand(columns) * 2.0 ** torch.randint(-149, -110, (columns,)),
        torch.rand(columns) * 2.0**-90,
        torch.rand(columns) * 2.0**-62,
        torch.zeros(columns).index_fill(0, torch.tensor(columns - 2), 2.0**-149),
    ])  # fmt: skip
    return x.to(device)


@pytest.mark.parametrize("filtered", ["top_k", "top_p", "top_p of all"])
def test_renorm_of_tiny_rows(variant, device, filtered):
    probs = tiny_rows(130, device)
    if filtered == "top_k":
        out, kept = sampling.top_k_renorm_probs(probs, 9), [kept_columns(row, 9) for row in probs]
    elif filtered == "top_p":
        # A share of each row's sum, rounded up to a denormal.
        ps = (probs.double().sum(-1) * 0.4).float().clamp(min=2.0**-149)
        out = sampling.top_p_renorm_probs(probs, ps)
        kept = [kept_columns(row, p=float(p)) for row, p in zip(probs, ps)]
    else:
        out, kept = sampling.top_p_renorm_probs(probs, 0.5), [kept_columns(row, p=0.5) for row in probs]
    truth = torch.stack([distribution(row, columns) for row, columns in zip(probs, kept)])
    same = probs.where(truth > 0, 0)
    assert_close(out, same / same.sum(-1, keepdim=True), truth)


@pytest.mark.parametrize("order", ORDERS)
def test_draws_from_tiny_rows(variant, device, order):
    probs = tiny_rows(130, device)[:3]
    rows = torch.arange(9, device=device) % 3
    p = 0.3 if order == "top_k_first" else float(probs[0].double().sum() * 0.2)
    tokens, valid = sampling.top_k_top_p_sampling_from_probs(
        probs, 20, p, indices=rows, filter_apply_order=order, seed=1, offset=2, return_valid=True
    )
    assert valid.all()
    for row, token in zip(rows.tolist(), tokens.tolist()):
        assert token in kept_columns(probs[row], 20, p, order)


@pytest.mark.parametrize("columns", [130, 131])
def test_draws_from_logits_far_below_zero(variant, device, columns):
    """Below every bin's end: all elements are listed, from the lowest key on."""
    logits = torch.randn(3, columns, device=device).sub_(1e5)
    rows = torch.arange(24, device=device) % 3
    tokens = sampling.top_k_top_p_sampling_from_logits(logits, columns, 0.3, indices=rows, seed=1, offset=2)
    probs = logits.double().softmax(-1)
    for row, token in zip(rows.tolist(), tokens.tolist()):
        assert token in kept_columns(probs[row], p=0.3)


def test_softmax_at_extreme_temperatures(variant, device):
    """A masked column stays at 0 however hot; a row of masked columns alone has no distribution."""
    logits = torch.randn(7, 130, device=device) * 5
    logits[:, ::4] = -INF
    logits[6] = -INF
    temperatures = torch.tensor([INF, 3e38, 1e-30, 2.0**-149, 1.0, 0.0, INF], device=device)
    out = sampling.softmax(logits, temperatures)
    below = (logits.double() - logits.double().amax(-1, keepdim=True)) / temperatures.double()[:, None]
    below = below.where(logits != -INF, -INF).where(logits != logits.amax(-1, keepdim=True), 0)
    truth = torch.softmax(below, -1)
    assert out[6].isnan().all()
    assert_close(out[:5], torch.softmax(below.float(), -1)[:5], truth[:5])
    hot = sampling.softmax(logits[:5], INF)
    finite = logits[:5] != -INF
    truth = finite.double() / finite.sum(-1, keepdim=True)
    assert_close(hot, truth.float(), truth)
    for cold in (out[5:6], sampling.softmax(logits[:5], 0.0), sampling.softmax(logits[:5], 0)):
        assert_bitwise(cold, hot[5 - len(cold) :])


@pytest.mark.parametrize("columns", [1, 64, 65, 130])
def test_the_last_column_is_drawn(variant, device, columns):
    """All of a row's weight is there, or nearly all."""
    probs = torch.zeros(2, columns, device=device)
    probs[1] = 1e-12
    probs[:, -1] = 1
    seeds = {"seed": 7, "offset": 9}
    k = min(3, columns)
    for tokens in (
        sampling.sampling_from_probs(probs, **seeds),
        sampling.sampling_from_logits(probs.log(), **seeds),
        sampling.top_k_sampling_from_probs(probs, k, **seeds),
        sampling.top_p_sampling_from_probs(probs, 0.9, **seeds),
        sampling.min_p_sampling_from_probs(probs, 0.5, **seeds),
        sampling.top_k_top_p_sampling_from_probs(probs, k, 0.9, **seeds),
        sampling.top_k_top_p_sampling_from_logits(probs.log(), k, 0.9, **seeds),
    ):
        assert tokens.tolist() == [columns - 1] * 2
    draft = torch.full((2, 1, columns), 1 / columns, device=device)
    ids = torch.zeros(2, 1, dtype=torch.int32, device=device)
    tokens, _, emitted = sampling.chain_speculative_sampling(draft, ids, probs[:, None].repeat(1, 2, 1), **seeds)
    assert tokens[torch.arange(2), emitted.long()].tolist() == [columns - 1] * 2


@pytest.mark.parametrize("ratio", [0.9, 0.5, 0.05])
def test_drafts_are_accepted_as_often_as_the_target_says(variant, device, ratio):
    """min(1, target / draft), counted over independent tokens: within five standard deviations."""
    count = 4000
    draft = torch.full((1, count, 2), 0.5, device=device)
    target = torch.full((1, count + 1, 2), 0.5, device=device)
    target[..., 0] *= ratio
    ids = torch.zeros(1, count, dtype=torch.int64, device=device)
    _, accepted, _ = sampling.chain_speculative_sampling(draft, ids, target, seed=11, offset=3)
    assert abs(int(accepted) / count - ratio) < 5 * (ratio * (1 - ratio) / count) ** 0.5
