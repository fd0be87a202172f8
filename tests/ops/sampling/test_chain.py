"""Speculative sampling of chains: accepted tokens and the one drawn, against the target's own distribution."""

import pytest
import torch

import flashinfer
from flashinfer import sampling
from flashinfer.testing.compare import assert_bitwise
from tests.ops.norm.variants import variant  # the fixture
from tests.ops.sampling.test_sampling import DRAWS, LEVEL, backend, p_value, rows_of_probs, tiles


def chain(draft, ids, target, **options):
    return sampling.chain_speculative_sampling(draft, ids, target, **{"seed": 3, "offset": 5} | options)


def test_tokens_are_distributed_as_the_targets(device):
    """Draft tokens drawn from the draft, then verified: chi-square at LEVEL over DRAWS requests, of the first token,
    and of the next ones where those before were accepted."""
    draft, target = rows_of_probs(2, 7, device, 1.0), rows_of_probs(3, 7, device, 1.0)
    ids = torch.multinomial(draft.repeat(DRAWS, 1), 1).view(DRAWS, 2)
    tokens, accepted, emitted = chain(draft.expand(DRAWS, 2, 7), ids, target.expand(DRAWS, 3, 7))
    assert p_value(tokens[:, 0], target[0].double() / target[0].double().sum()) > LEVEL
    second = tokens[emitted >= 1, 1]
    assert p_value(second, target[1].double() / target[1].double().sum()) > LEVEL
    third = tokens[emitted == 2, 2]
    assert p_value(third, target[2].double() / target[2].double().sum()) > LEVEL
    overlap = torch.minimum(draft.double(), target[:2].double()).sum(1)
    for count, chance in ((accepted.double().mean(), overlap.sum()), ((emitted >= 1).double().mean(), overlap[0])):
        assert abs(count - chance) < 5 * DRAWS**-0.5  # five standard deviations or more
    steps = torch.arange(3, device=device)
    assert tokens.dtype == torch.int32
    ids = ids.int()
    assert_bitwise(tokens[:, :2].where(steps[:2] < emitted[:, None], -1), ids.where(steps[:2] < emitted[:, None], -1))
    assert ((tokens == -1) == (steps > emitted[:, None])).all() and (accepted >= emitted).all()


@pytest.mark.parametrize("count, columns", [(3, 150), (1, 5), (0, 70)])
def test_kernels_draw_what_the_reference_draws(device, monkeypatch, count, columns):
    draft, target = rows_of_probs(2 * count, columns, device, 1.0), rows_of_probs(2 * count + 2, columns, device, 1.0)
    draft, target = draft.view(2, count, columns), target.view(2, count + 1, columns)
    ids = torch.randint(columns, (2, count), device=device)
    results, offset = [], torch.tensor([5], device=device)
    for name in ("reference", "portable"):
        with backend(name, monkeypatch):
            results.append(chain(draft, ids, target, seed=torch.tensor([4, 9], device=device), offset=offset))
    for ours, theirs in zip(*results):
        assert_bitwise(ours, theirs)


def test_certain_cases(variant, device):
    """Equal models accept all; a token that the target excludes, or that does not exist, is refused; counts add up."""
    rows = rows_of_probs(3, 70, device)
    draft, target = rows[:2].repeat(5, 1, 1), rows.repeat(5, 1, 1)
    ids = torch.tensor([[1, 2], [1, 2], [1, -1], [99, 2], [1, 2]], dtype=torch.int32, device=device)
    target[1, 1, 2] = 0
    target[4, 2] = torch.nan
    accepted, emitted = (torch.full((5,), 10, dtype=torch.int32, device=device) for _ in range(2))
    given = dict(maybe_output_accepted_token_num=accepted, maybe_output_emitted_draft_token_num=emitted)
    tokens, same, also = chain(draft, ids, target, deterministic=False, **given)
    assert same is accepted and also is emitted and tokens.dtype == torch.int32
    assert accepted.tolist() == [12, 11, 11, 11, 12] and emitted.tolist() == [12, 11, 11, 10, 12]
    assert tokens[0, :2].tolist() == [1, 2] and tokens[0, 2] >= 0
    assert tokens[1:3, 0].tolist() == [1, 1] and tokens[1:3, 2].tolist() == [-1, -1] and (tokens[1:3, 1] >= 0).all()
    assert tokens[3, 1:].tolist() == [-1, -1] and tokens[4].tolist() == [1, 2, -1]
    # Where the two are equal nothing is beyond the draft: the target stands in for a token that does not exist.
    assert target[2, 1, tokens[2, 1]] > 0
    assert chain(draft[:0], ids[:0], target[:0])[0].shape == (0, 3)


def test_strides_and_graph_safe_seeds(variant, device):
    draft, target = rows_of_probs(4, 90, device).view(2, 2, 90), rows_of_probs(6, 90, device).view(2, 3, 90)
    ids = torch.randint(90, (2, 2), device=device)
    wide = torch.full((2, 3, 97), torch.nan, device=device)
    wide[:, :, 5:95] = target
    expected = chain(draft, ids, target)
    seeds = dict(seed=torch.tensor([3], device=device), offset=torch.tensor([5], device=device))
    turned = draft.transpose(1, 2).contiguous().transpose(1, 2)
    for ours, theirs in zip(chain(turned, ids.t().contiguous().t(), wide[:, :, 5:95], **seeds), expected):
        assert_bitwise(ours, theirs)


def test_bad_input():
    draft, ids, target = torch.ones(2, 3, 8), torch.ones(2, 3, dtype=torch.int32), torch.ones(2, 4, 8)
    for call, argument in (
        (lambda: chain(draft[0], ids, target), "draft_probs"),
        (lambda: chain(draft.int(), ids, target), "draft_probs"),
        (lambda: chain(draft, ids, target[:, :3]), "target_probs"),
        (lambda: chain(draft, ids, target.int()), "target_probs"),
        (lambda: chain(draft, ids[:1], target), "draft_token_ids"),
        (lambda: chain(draft, ids.float(), target), "draft_token_ids"),
        (lambda: chain(draft, ids, target, maybe_output_accepted_token_num=ids), "maybe_output_accepted_token_num"),
        (lambda: chain(draft, ids, target, maybe_output_emitted_draft_token_num=torch.ones(2)), "maybe_output_emitted"),
        (lambda: chain(draft, ids, target, offset=None), "offset"),
    ):
        with pytest.raises(ValueError, match=f"^{argument}.*: got .*allowed: "):
            call()


def test_is_a_registered_op():
    from flashinfer.sampling import speculative

    counters = torch.zeros(2, 2, dtype=torch.int32)
    results = torch.empty(2, 4, dtype=torch.int32), counters[0].clone(), counters[1].clone()
    inputs = rows_of_probs(6, 8).view(2, 3, 8), torch.ones(2, 3, dtype=torch.int32), rows_of_probs(8, 8).view(2, 4, 8)
    torch.library.opcheck(speculative._chain.op, (*inputs, [1, 2], None, None, *results))
    assert flashinfer.chain_speculative_sampling is sampling.chain_speculative_sampling


def test_models_of_different_dtypes(variant, device):
    """Both are read as float32: tokens of a bfloat16 draft and a float32 target are those of both in float32."""
    draft, target = rows_of_probs(4, 90, device).view(2, 2, 90), rows_of_probs(6, 90, device).view(2, 3, 90)
    ids = torch.randint(90, (2, 2), device=device)
    narrow = draft.bfloat16()
    for ours, theirs in zip(chain(narrow, ids, target), chain(narrow.float(), ids, target), strict=True):
        assert_bitwise(ours, theirs)
