"""Sampling against distributions worked out in float64, row by row."""

from contextlib import contextmanager
from functools import partialmethod

import pytest
import torch

import flashinfer
from flashinfer import sampling
from flashinfer._core.dispatch import Op
from flashinfer._core.launch import Launcher
from flashinfer.ops import sampling as room
from flashinfer.ops._device import tiles as tile_sizes
from flashinfer.ops.sampling import portable
from flashinfer.testing import generate
from flashinfer.testing.compare import assert_bitwise, assert_close
from tests.ops.norm.variants import variant  # the fixture

ORDERS = ("joint", "top_k_first")
# Chi-square tests: the level at which a right sampler fails, and the draws that are counted.
LEVEL, DRAWS = 1e-4, 20000


@pytest.fixture(autouse=True)
def tiles(device, monkeypatch):
    """In the interpreter tiles of 64, so that short rows have several tiles and programs."""
    if device.type == "cpu":
        use_tiles(64, monkeypatch)


def use_tiles(size, monkeypatch):
    monkeypatch.setattr(tile_sizes, "TILE", size)
    choose_again(monkeypatch)


def choose_again(monkeypatch):
    """Calls are first ones of their problems: a choice expects its kernels once, and a launch replay makes none."""
    for op in (room.softmax, room.draw, room.prefix, room.chain):
        monkeypatch.setattr(op, "_choices", {})
    for function in vars(sampling).values():
        getattr(function, "calls", {}).clear()


@contextmanager
def backend(name, monkeypatch):
    choose_again(monkeypatch)
    with monkeypatch.context() as patch:
        patch.setattr(Op, "__call__", partialmethod(Op.__call__, backend=name))
        yield


def rows_of_probs(rows, columns, device="cpu", spread=3.0):
    return torch.softmax(torch.randn(rows, columns) * spread, -1).to(device)


def kept_columns(probs, k=None, p=None, order="joint"):
    """What the filters keep of one row, in float64: column indices, most probable first. Where one value is kept, all
    that equal it are: upstream asks how many are greater, or how much they weigh."""
    values = [float(x) for x in probs.double()]
    order_of = sorted(range(len(values)), key=lambda i: (-values[i], i))
    k = len(values) if k is None else k
    kept = [i for i in order_of if k > 0 and values[i] >= values[order_of[min(k, len(values)) - 1]]]
    if p is not None and p < 1:
        goal = p * sum(values[i] for i in kept) if order == "top_k_first" else p
        total, nucleus = 0.0, []
        for i in order_of:
            if nucleus and total >= goal and values[i] != values[nucleus[-1]]:
                break
            nucleus.append(i)
            total += values[i]
        kept = [i for i in kept if i in set(nucleus)]
    return kept


def distribution(probs, kept):
    """The kept columns' probabilities in float64, divided by their sum."""
    mask = torch.zeros_like(probs, dtype=torch.bool)
    mask[kept] = True
    shares = torch.where(mask, probs.double(), 0)
    return shares / shares.sum()


def p_value(tokens, expected):
    """Of Pearson's chi-square test, that counts this far from the expected come about; no token has none expected."""
    counts = torch.bincount(tokens.long().cpu(), minlength=len(expected)).double()
    expected = expected.cpu() * len(tokens)
    assert not counts[expected == 0].any(), "a token that has no probability"
    counts, expected = counts[expected > 0], expected[expected > 0]
    statistic = ((counts - expected) ** 2 / expected).sum()
    if len(expected) == 1:
        return 1.0
    return float(torch.special.gammaincc(torch.tensor((len(expected) - 1) / 2).double(), statistic / 2))


def every_function(probs, indices=None, **seeds):
    """(name, tokens, distribution) of every function that draws, for one row of probabilities."""
    logits = probs.log()
    k, p, share = 6, 0.8, 0.2
    row = probs[0]
    large = [i for i in range(len(row)) if row[i] >= share * row.max()]
    calls = {
        "sampling_from_probs": (lambda **a: sampling.sampling_from_probs(probs, **a), range(len(row))),
        "sampling_from_logits": (lambda **a: sampling.sampling_from_logits(logits, **a), range(len(row))),
        "top_k": (lambda **a: sampling.top_k_sampling_from_probs(probs, k, **a), kept_columns(row, k)),
        "top_p": (lambda **a: sampling.top_p_sampling_from_probs(probs, p, **a), kept_columns(row, p=p)),
        "min_p": (lambda **a: sampling.min_p_sampling_from_probs(probs, share, **a), large),
    }
    for order in ORDERS:
        for name, x in (("probs", probs), ("logits", logits)):
            function = getattr(sampling, f"top_k_top_p_sampling_from_{name}")
            calls[f"{order} {name}"] = (
                lambda f=function, x=x, o=order, **a: f(x, k, p, filter_apply_order=o, **a),
                kept_columns(row, k, p, order),
            )
    for name, (call, kept) in calls.items():
        yield name, call(indices=indices, **seeds), distribution(row, list(kept))


@pytest.mark.parametrize("seeds", ["shared", "own"])
def test_distributions(device, seeds):
    """Each function draws in proportion: chi-square at LEVEL over DRAWS draws, and nothing that is filtered out."""
    probs = rows_of_probs(1, 12, device, spread=1.5)
    indices = torch.zeros(DRAWS, dtype=torch.int32, device=device)
    seed = 7 if seeds == "shared" else torch.arange(DRAWS, device=device) * 7919
    offset = 3 if seeds == "shared" else torch.tensor([3], device=device)
    for name, tokens, expected in every_function(probs, indices, seed=seed, offset=offset):
        assert tokens.dtype == torch.int32 and p_value(tokens, expected) > LEVEL, name


def test_numbers_of_neighbouring_offsets_and_columns_are_independent(device):
    """Pairs of draws of the same request at successive offsets: chi-square over the 9 pairs."""
    probs = torch.tensor([[0.5, 0.3, 0.2]], device=device)
    seeds, indices = torch.arange(DRAWS, device=device), torch.zeros(DRAWS, dtype=torch.int64, device=device)
    offsets = torch.tensor([[0], [1]], device=device)
    first, second = (sampling.sampling_from_probs(probs, indices, seed=seeds, offset=offset) for offset in offsets)
    assert first.dtype == torch.int64
    assert p_value(first * 3 + second, torch.outer(probs[0], probs[0]).double().flatten()) > LEVEL


@pytest.mark.parametrize("columns", [1, 193])
def test_kernels_draw_what_the_reference_draws(device, monkeypatch, columns):
    probs = rows_of_probs(3, columns, device)
    indices = torch.tensor([2, 0], device=device)
    seed, offset = torch.tensor([-3, 1 << 62], device=device), torch.tensor([5], device=device)
    with backend("reference", monkeypatch):
        expected = {name: tokens for name, tokens, _ in every_function(probs, indices, seed=seed, offset=offset)}
    with backend("portable", monkeypatch):
        tokens = {name: tokens for name, tokens, _ in every_function(probs, indices, seed=seed, offset=offset)}
    for name in expected:
        assert_bitwise(tokens[name], expected[name], name)


def test_a_call_launches_every_kernel_of_its_problem(device, monkeypatch):
    """What a first call has compiled at once is what it launches."""
    asked, probs = [], rows_of_probs(2, 1, device)
    monkeypatch.setattr(Launcher, "expect", lambda *kernel: asked.append(kernel))
    for launcher in portable.IMPLEMENTATION.launchers:
        monkeypatch.setattr(launcher, "_bound", {})
    with backend("portable", monkeypatch):
        list(every_function(probs, seed=0, offset=0))
        sampling.top_k_renorm_probs(probs, 1), sampling.top_p_renorm_probs(probs, 0.5)
        sampling.top_k_mask_logits(probs, 1), sampling.softmax(probs)
    for launcher, problem, config, _ in asked:
        assert (problem, config) in [key[:2] for key in launcher._bound], launcher.name
    assert {launcher.name for launcher, *_ in asked} == {x.name for x in portable.IMPLEMENTATION.launchers}


def filters_in_tensors(device):
    return torch.tensor([17, 1 << 20], device=device, dtype=torch.int32), torch.tensor([0.3, 0.999], device=device)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_renorm_and_mask(variant, device, dtype):
    probs = rows_of_probs(2, 150, device).to(dtype)
    ks, ps = filters_in_tensors(device)
    for name, k, p in (("top_k", 5, None), ("top_k", ks, None), ("top_p", None, 0.8), ("top_p", None, ps)):
        out = getattr(sampling, f"{name}_renorm_probs")(probs, k if p is None else p)
        kept = [
            kept_columns(row, None if k is None else int(ks[i]) if k is ks else k,
                         None if p is None else float(ps[i]) if p is ps else p)
            for i, row in enumerate(probs)
        ]  # fmt: skip
        truth = torch.stack([distribution(row, columns) for row, columns in zip(probs, kept)])
        mask = truth > 0
        # Of top-p the result is float32, as upstream has it.
        same = torch.where(mask, probs.float() if name == "top_p" else probs, 0)
        assert_close(out, same / same.sum(-1, keepdim=True, dtype=torch.float32).to(same.dtype), truth, name)
    logits = (torch.randn(2, 150, device=device) * 100).to(dtype)
    truth = torch.stack([
        torch.where(torch.zeros(150, dtype=torch.bool, device=device).index_fill(
            0, torch.tensor(kept_columns(row, int(k)), device=device), True), row, -torch.inf)
        for row, k in zip(logits, ks)
    ])  # fmt: skip
    assert_bitwise(sampling.top_k_mask_logits(logits, ks), truth)


@pytest.mark.parametrize(
    "of, given", [("top_k_renorm_probs", 5), ("top_p_renorm_probs", 0.8), ("top_k_mask_logits", 5)]
)
def test_columns_that_are_contiguous(variant, device, of, given):
    """The result's rows are, whatever the memory of its input."""
    probs = rows_of_probs(3, 150, device)
    out = getattr(sampling, of)(probs.T.contiguous().T, given)
    assert_bitwise(out, getattr(sampling, of)(probs, given))
    assert out.is_contiguous()


@pytest.mark.parametrize("temperature", ["none", "scalar", "tensor"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_softmax(variant, device, dtype, temperature):
    logits = (torch.randn(4, 301, device=device) * 5).to(dtype)
    logits[1, ::3] = -torch.inf
    value = {"none": None, "scalar": 0.7, "tensor": torch.tensor([0.1, 1, 2.5, 30], device=device)}[temperature]
    divisor = 1 if value is None else value if temperature == "scalar" else value[:, None]
    out = sampling.softmax(logits, value, enable_pdl=True)
    truth = torch.softmax(logits.double() / torch.as_tensor(divisor, device=device).float().double(), -1)
    assert_close(out, torch.softmax(logits.float() / divisor, -1), truth)


def test_softmax_of_rows_without_a_distribution(variant, device):
    logits = torch.randn(5, 130, device=device)
    logits[0, 3], logits[1, 100], logits[2], logits[3, 7] = torch.nan, torch.inf, -torch.inf, -torch.inf
    out = sampling.softmax(logits)
    assert out[:3].isnan().all() and out[3, 7] == 0
    assert_close(out[3:], torch.softmax(logits[3:], -1), torch.softmax(logits[3:].double(), -1))
    temperatures = torch.tensor([1.0, 0.0, -1.0, float("nan"), 1.0], device=device)
    assert sampling.softmax(torch.randn(5, 130, device=device), temperatures).isnan().all(1).tolist() == [0, 0, 1, 1, 0]


def test_equal_values_are_kept_together(variant, device):
    """As upstream has it: what is greater than a value counts, and not what equals it."""
    probs = torch.full((3, 140), 1 / 140, device=device)
    probs[1, 100:] = 2 / 140
    probs[2] = 0
    probs[2, [9, 71, 133]] = 1 / 3
    whole, equal = list(range(140)), [list(range(140)), list(range(100, 140)), [9, 71, 133]]
    for out in (
        sampling.top_k_renorm_probs(probs, 2), sampling.top_k_renorm_probs(probs, torch.full((3,), 2, device=device)),
        sampling.top_p_renorm_probs(probs, 0.25),
    ):  # fmt: skip
        assert [row.nonzero().flatten().tolist() for row in out] == equal
        torch.testing.assert_close(out.sum(1), torch.ones(3, device=device))
    kept = sampling.top_k_renorm_probs(probs, 41) > 0
    assert [row.nonzero().flatten().tolist() for row in kept] == [whole, whole, [9, 71, 133]]
    masked = sampling.top_k_mask_logits(torch.tensor([[0.0, -0.0, -1.0, 0.0]], device=device), 2)
    assert masked.isfinite().tolist() == [[True, True, False, True]]
    half = torch.randn(2, 300, device=device).mul(4).round().half()
    for k in (1, 20, 299):
        least = half.sort(1, descending=True).values[:, k - 1 : k]
        assert_bitwise(sampling.top_k_mask_logits(half, k), half.where(half >= least, -torch.inf))


def test_a_flat_row_has_more_in_between_than_the_list_holds(variant, device, monkeypatch):
    use_tiles(2048, monkeypatch)
    probs = torch.full((1, 5000), 1 / 5000, device=device)
    probs[0, 4999], probs[0, 17] = 2 / 5000, 0.5 / 5000
    functions = [lambda x: sampling.top_p_renorm_probs(x, 0.5001), lambda x: sampling.top_k_renorm_probs(x, 2500)]
    # The search by masses does all that the search by counts does, and the interpreter takes seconds for each.
    for function in functions[: 1 if device.type == "cpu" else 2]:
        assert (function(probs) == 0).nonzero()[:, 1].tolist() == [17]


@pytest.mark.parametrize("columns", [150, pytest.param(9001, marks=pytest.mark.gpu)])
def test_draws_from_equal_values(variant, device, columns):
    """More are equal to the k-th than a list holds, on a GPU; the same where k is in a tensor."""
    probs = torch.full((66, columns), 1 / columns, device=device)
    probs[:, 3], probs[-1, -1] = 0, 0.5
    seeds = dict(seed=torch.arange(66, device=device), offset=torch.tensor([3], device=device))
    tokens = sampling.top_k_top_p_sampling_from_probs(probs, 8, 0.2, **seeds)
    assert tokens[-1] == columns - 1 and not (tokens == 3).any()
    # Any of a flat row's may be drawn: 65 draws reach past its first eight.
    assert tokens[:-1].max() > columns // 2
    ks = torch.full((66,), 8, device=device)
    ks[-1] = columns - 1
    assert_bitwise(sampling.top_k_top_p_sampling_from_probs(probs, ks, 0.2, **seeds), tokens)


def test_rows_that_cannot_be_drawn_from(variant, device):
    """`valid` marks them, and leave the other rows' tokens alone."""
    good = rows_of_probs(1, 70, device)
    probs = good.repeat(6, 1)
    probs[1, 68], probs[2], probs[3, 3], probs[4] = torch.nan, 0, torch.inf, -probs[4]
    alive = [True, False, False, False, False, True]
    offset = torch.tensor([4], device=device)
    seeds = dict(seed=torch.full((6,), 11, device=device), offset=offset, return_valid=True)
    for call in (
        lambda **a: sampling.sampling_from_probs(probs, **a),
        lambda **a: sampling.min_p_sampling_from_probs(probs, 0.1, **a),
        lambda **a: sampling.top_p_sampling_from_probs(probs, 0.9, **a),
        lambda **a: sampling.top_k_top_p_sampling_from_probs(probs, 5, 0.9, **a),
    ):
        samples, valid = call(**seeds)
        assert valid.tolist() == alive and samples[1:5].tolist() == [0] * 4
        assert samples[0] == samples[5]
    assert sampling.top_k_renorm_probs(probs, 3).isnan().all(1).tolist() == [0, 1, 0, 1, 0, 0]
    # What is negative counts as 0, -inf too.
    low, zero = good.clone(), good.clone()
    low[0, 7], zero[0, 7] = -torch.inf, 0
    for renorm in (sampling.top_k_renorm_probs, sampling.top_p_renorm_probs):
        assert_bitwise(renorm(low, 1), renorm(zero, 1))
    assert sampling.sampling_from_probs(low, seed=11, offset=4, return_valid=True)[1].all()
    logits = torch.stack([good[0].log(), torch.full_like(good[0], -torch.inf), good[0].log()])
    assert sampling.sampling_from_logits(logits, seed=11, offset=4)[1] == 0


def test_impossible_parameters(variant, device):
    probs = rows_of_probs(4, 70, device)
    seeds = dict(seed=1, offset=1, return_valid=True)
    ks = torch.tensor([1, 0, -3, 70], device=device)
    ps = torch.tensor([0.5, 0.0, float("nan"), 7.0], device=device)
    shares = torch.tensor([0.5, -0.1, float("nan"), 1.0], device=device)
    expected = [True, False, False, True]
    assert sampling.min_p_sampling_from_probs(probs, shares, **seeds)[1].tolist() == expected
    samples, valid = sampling.top_k_top_p_sampling_from_probs(probs, ks, 0.5, **seeds)
    assert valid.tolist() == expected and samples[1:3].tolist() == [0, 0]
    assert sampling.top_p_sampling_from_probs(probs, ps, **seeds)[1].tolist() == expected
    assert not sampling.top_k_sampling_from_probs(probs[:1], 0, **seeds)[1].any()
    assert not sampling.top_p_sampling_from_probs(probs[:1], 0.0, **seeds)[1].any()
    assert not sampling.top_k_renorm_probs(probs, ks)[1].any()


@pytest.mark.parametrize("shape", [(), (1,), (3, 1), (1, 3), (2,)])
def test_a_tensor_has_a_parameter_for_each_row(shape, device):
    """As upstream has it: what holds for all rows is a number, and no tensor of one element or of more axes."""
    probs = rows_of_probs(3, 70, device)
    k, p = torch.full(shape, 4, device=device), torch.full(shape, 0.5, device=device)
    for name, call in (
        ("top_k", lambda: sampling.top_k_sampling_from_probs(probs, k)),
        ("top_p", lambda: sampling.top_p_sampling_from_probs(probs, p)),
        ("min_p", lambda: sampling.min_p_sampling_from_probs(probs, p)),
        ("top_k", lambda: sampling.top_k_top_p_sampling_from_probs(probs, k, 0.5)),
        ("top_p", lambda: sampling.top_k_top_p_sampling_from_logits(probs, 4, p, filter_apply_order="joint")),
        ("top_k", lambda: sampling.top_k_renorm_probs(probs, k)),
        ("top_p", lambda: sampling.top_p_renorm_probs(probs, p)),
        ("top_k", lambda: sampling.top_k_mask_logits(probs, k)),
    ):
        with pytest.raises(ValueError, match=rf"^{name}: got a tensor .*allowed: a tensor \[3\], or a number"):
            call()
    if shape != (1,):
        with pytest.raises(ValueError, match=r"^seed: got .*allowed: a number, \[1\] or \[3\]"):
            sampling.sampling_from_probs(probs, seed=k, offset=k)


def test_renormalised_dtypes(device):
    """Of top-p float32, whatever the probabilities come in, as upstream has it; of top-k theirs."""
    probs = rows_of_probs(3, 70, device)
    for dtype in (torch.float16, torch.bfloat16):
        got = sampling.top_p_renorm_probs(probs.to(dtype), 0.5)
        assert_bitwise(got, sampling.top_p_renorm_probs(probs.to(dtype).float(), 0.5))
        assert sampling.top_k_renorm_probs(probs.to(dtype), 4).dtype == dtype


def test_parameters_of_other_dtypes(variant, device):
    """Any dtype whose values are a k or a p, as upstream converts them."""
    probs = rows_of_probs(3, 70, device)
    ks, ps = torch.tensor([1, 4, 70], device=device), torch.tensor([1, 1, 1], device=device)
    expected = sampling.top_k_renorm_probs(probs, ks)
    for dtype in (torch.int16, torch.uint8, torch.float32, torch.float64):
        assert_bitwise(sampling.top_k_renorm_probs(probs, ks.to(dtype)), expected)
    assert_bitwise(sampling.top_p_renorm_probs(probs, ps), sampling.top_p_renorm_probs(probs, 1.0))


def test_rows_of_float64(variant, device):
    """They are rounded to float32; so are the results, and a token is drawn as from rows of float32."""
    probs = torch.softmax(torch.randn(3, 70, dtype=torch.float64) * 3, -1).to(device)
    logits, seeds = probs.log(), dict(seed=5, offset=7)
    out = sampling.softmax(logits, 0.5)
    assert_close(out, torch.softmax(logits.float() / 0.5, -1), torch.softmax(logits / 0.5, -1))
    for name, k, p in (("top_k", 5, None), ("top_p", None, 0.8)):
        truth = torch.stack([distribution(row, kept_columns(row, k, p)) for row in probs])
        same = torch.where(truth > 0, probs, 0).float()
        out = getattr(sampling, f"{name}_renorm_probs")(probs, k or p)
        assert_close(out, same / same.sum(-1, keepdim=True), truth, name)
    kept = torch.stack([torch.isin(torch.arange(70), torch.tensor(kept_columns(row, 5))) for row in logits])
    truth = torch.where(kept.to(device), logits, -torch.inf).float()
    assert_bitwise(sampling.top_k_mask_logits(logits, 5), truth)
    for function, given, x in (
        (sampling.sampling_from_probs, (), probs),
        (sampling.sampling_from_logits, (), logits),
        (sampling.top_k_sampling_from_probs, (6,), probs),
        (sampling.top_p_sampling_from_probs, (0.8,), probs),
        (sampling.min_p_sampling_from_probs, (0.1,), probs),
        (sampling.top_k_top_p_sampling_from_probs, (6, 0.8), probs),
        (sampling.top_k_top_p_sampling_from_logits, (6, 0.8), logits),
    ):
        assert_bitwise(function(x, *given, **seeds), function(x.float(), *given, **seeds))
    assert_bitwise(sampling.top_k_sampling_from_probs(probs, 1, **seeds), probs.argmax(1).int())
    ids = probs.argmax(1, keepdim=True).int()
    draft, target = (torch.nn.functional.one_hot(ids.long().repeat(1, n), 70).double() for n in (1, 2))
    tokens, accepted, emitted = sampling.chain_speculative_sampling(draft, ids, target, **seeds)
    assert_bitwise(tokens, ids.repeat(1, 2))
    assert accepted.tolist() == emitted.tolist() == [1, 1, 1]


def test_parameters_of_rows_that_are_drawn_from_several_times(variant, device):
    """Where rows and outputs differ in number, one for each row stands for those of the outputs."""
    probs, indices = rows_of_probs(3, 70, device), torch.tensor([2, 0, 2, 1, 0], device=device)
    ks, ps = torch.tensor([1, 4, 9], device=device), torch.tensor([0.2, 0.9, 1e-6], device=device)
    seeds = dict(indices=indices, seed=5, offset=7)
    for function, given in (
        (sampling.top_k_sampling_from_probs, (ks,)),
        (sampling.top_p_sampling_from_probs, (ps,)),
        (sampling.min_p_sampling_from_probs, (ps,)),
        (sampling.top_k_top_p_sampling_from_probs, (ks, ps)),
        (sampling.top_k_top_p_sampling_from_logits, (ks, ps)),
    ):
        expected = function(probs, *(x[indices] for x in given), **seeds)
        assert_bitwise(function(probs, *given, **seeds), expected)
    only_one = sampling.top_k_sampling_from_probs(probs, torch.ones_like(ks), **seeds)
    assert_bitwise(only_one, probs.argmax(1)[indices])


def test_parameters_where_there_are_as_many_outputs_as_rows(variant, device):
    """Those of top-p, and of top-k beside it, are the rows' own; those of top-k alone and min-p are the outputs'."""
    probs, indices = rows_of_probs(3, 70, device), torch.tensor([2, 0, 0], dtype=torch.int32, device=device)
    ks, ps = torch.tensor([1, 4, 9], device=device), torch.tensor([0.2, 0.9, 1e-6], device=device)
    drawn, joint = probs[indices], dict(filter_apply_order="joint")
    for function, given, by_row, options in (
        (sampling.top_k_sampling_from_probs, (ks,), False, {}),
        (sampling.min_p_sampling_from_probs, (ps,), False, {}),
        (sampling.top_p_sampling_from_probs, (ps,), True, {}),
        (sampling.top_k_top_p_sampling_from_probs, (ks, ps), True, {}),
        (sampling.top_k_top_p_sampling_from_probs, (ks, ps), True, joint),
        (sampling.top_k_top_p_sampling_from_logits, (ks, ps), True, {}),
        (sampling.top_k_top_p_sampling_from_logits, (ks, ps), True, joint),
    ):
        for seed in range(4):
            options |= dict(seed=seed, offset=7)
            expected = function(drawn, *(x[indices] if by_row else x for x in given), **options)
            assert_bitwise(function(probs, *given, indices=indices, **options), expected)


def test_a_rows_own_seed_makes_it_independent_of_its_place(variant, device):
    probs = rows_of_probs(3, 100, device)
    seeds, offsets = torch.tensor([9, 8, 7], device=device), torch.tensor([0, 1, 2], device=device)
    order = torch.tensor([2, 0], device=device)
    for call in (
        lambda x, **a: sampling.sampling_from_probs(x, **a),
        lambda x, **a: sampling.top_k_top_p_sampling_from_probs(x, 30, 0.95, **a),
    ):
        tokens = call(probs, seed=seeds, offset=offsets)
        assert_bitwise(call(probs[order], seed=seeds[order], offset=offsets[order]), tokens[order])
        assert_bitwise(call(probs[1:2], seed=8, offset=1), tokens[1:2])


def test_seeds(device):
    probs = torch.full((1, 1 << 16), 2.0**-16, device=device).expand(3, -1)
    draw = sampling.sampling_from_probs
    shared = draw(probs, seed=5, offset=6)
    assert len(set(shared.tolist())) == 3  # rows that share a seed draw numbers of their own
    assert_bitwise(draw(probs, seed=torch.tensor([5], device=device), offset=torch.tensor([6], device=device)), shared)
    # Offsets of their own are no seeds of their own.
    seed, offsets = torch.tensor([5], device=device), torch.full((3,), 6, device=device)
    assert_bitwise(draw(probs, seed=seed, offset=offsets), shared)
    for other in (dict(seed=6, offset=6), dict(seed=5, offset=7), dict(seed=5 + (1 << 40), offset=6),
                  dict(seed=5, offset=6 + (1 << 40))):  # fmt: skip
        assert not (draw(probs, **other) == shared).any()
    assert_bitwise(draw(probs, seed=-1, offset=6), draw(probs, seed=(1 << 64) - 1, offset=6))
    generator = torch.Generator(device)
    first, second = (draw(probs, generator=generator.manual_seed(3)) for _ in range(2))
    assert_bitwise(first, second)
    assert not (draw(probs, generator=generator) == first).any()  # it advances
    torch.manual_seed(1)
    default = draw(probs)
    torch.manual_seed(1)
    assert_bitwise(draw(probs), default)
    assert_bitwise(draw(probs, seed=5, offset=6, deterministic=False), shared)


def test_strides(variant, device):
    """Rows apart, columns apart, an unaligned base: the same as contiguous."""
    probs = rows_of_probs(3, 90, device)
    wide = torch.full((3, 2, 101), torch.nan, device=device)
    wide[:, 0, 1:91] = probs
    columns = torch.full((3, 180), torch.nan, device=device)
    columns[:, ::2] = probs
    ks = torch.tensor([[4, 0], [7, 0], [90, 0]], device=device)[:, 0]
    expected = sampling.top_k_renorm_probs(probs, ks)
    token = sampling.top_k_sampling_from_probs(probs, ks, seed=1, offset=1)
    for x in (wide[:, 0, 1:91], columns[:, ::2]):
        assert_bitwise(sampling.top_k_renorm_probs(x, ks), expected)
        assert_bitwise(sampling.top_k_sampling_from_probs(x, ks, seed=1, offset=1), token)
    assert_bitwise(sampling.softmax(wide[:, 0, 1:91]), sampling.softmax(probs))


def test_no_rows(variant, device):
    empty = torch.empty(0, 50, device=device)
    samples, valid = sampling.top_k_top_p_sampling_from_probs(empty, 5, 0.5, return_valid=True)
    assert samples.shape == valid.shape == (0,)
    assert sampling.softmax(empty).shape == sampling.top_p_renorm_probs(empty, 0.5).shape == (0, 50)
    none = torch.empty(0, dtype=torch.int32, device=device)
    assert sampling.sampling_from_probs(rows_of_probs(2, 50, device), none).shape == (0,)


BAD = {
    "probs of one dimension": (dict(probs=torch.ones(8)), "probs"),
    "probs of integers": (dict(probs=torch.ones(2, 8, dtype=torch.int32)), "probs"),
    "no classes": (dict(probs=torch.ones(2, 0)), "probs"),
    "NaN": (dict(probs=torch.full((2, 8), torch.nan), check_nan=True), "probs"),
    "top_k of 0": (dict(top_k=0), "top_k"),
    "top_k of another length": (dict(top_k=torch.ones(3, dtype=torch.int32)), "top_k"),
    "top_k of bools": (dict(top_k=torch.ones(2, dtype=torch.bool)), "top_k"),
    "top_p of 0": (dict(top_p=0.0), "top_p"),
    "top_p of NaN": (dict(top_p=float("nan")), "top_p"),
    "top_p of another length": (dict(top_p=torch.ones(3)), "top_p"),
    "top_p of bools": (dict(top_p=torch.ones(2, dtype=torch.bool)), "top_p"),
    "top_p elsewhere": (dict(top_p=torch.ones(2, device="meta")), "top_p"),
    "an order": (dict(filter_apply_order="top_p_first"), "filter_apply_order"),
    "indices of floats": (dict(indices=torch.ones(2)), "indices"),
    "indices of two dimensions": (dict(indices=torch.ones(2, 1, dtype=torch.int32)), "indices"),
    "a seed without an offset": (dict(seed=1), "offset"),
    "an offset without a seed": (dict(offset=1), "seed"),
    "a seed of a kind and an offset of another": (dict(seed=torch.ones(1, dtype=torch.int64), offset=1), "offset"),
    "an offset of a kind and a seed of another": (dict(seed=1, offset=torch.ones(1, dtype=torch.int64)), "offset"),
    "seeds of another length": (dict(seed=torch.ones(3, dtype=torch.int64), offset=1), "seed"),
    "seeds of another dtype": (dict(seed=torch.ones(2), offset=1), "seed"),
    "offsets elsewhere": (dict(seed=1, offset=torch.ones(2, dtype=torch.int64, device="meta")), "offset"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_input(name):
    changed, argument = BAD[name]
    good = dict(probs=torch.ones(2, 8), top_k=2, top_p=0.5)
    with pytest.raises(ValueError, match=f"^{argument}: got .*allowed: "):
        sampling.top_k_top_p_sampling_from_probs(**(good | changed))


def test_bad_input_of_the_others():
    probs = torch.ones(2, 8)
    for call, argument in (
        (lambda: sampling.min_p_sampling_from_probs(probs, 1.5), "min_p"),
        (lambda: sampling.softmax(probs, -1), "temperature"),
        (lambda: sampling.softmax(probs, torch.ones(3)), "temperature"),
        (lambda: sampling.softmax(probs, torch.ones(1)), "temperature"),
        (lambda: sampling.softmax(probs, torch.ones(2, 1)), "temperature"),
        (lambda: sampling.softmax(probs, torch.ones(2, dtype=torch.int32)), "temperature"),
        (lambda: sampling.softmax(probs, True), "temperature"),
        (lambda: sampling.softmax(probs, "1"), "temperature"),
        (lambda: sampling.softmax(torch.ones(8)), "logits"),
        (lambda: sampling.top_k_mask_logits(torch.ones(8), 2), "logits"),
        (lambda: sampling.top_k_mask_logits(probs, -1), "top_k"),
        (lambda: sampling.top_p_renorm_probs(probs, -0.5), "top_p"),
        (lambda: sampling.sampling_from_logits(probs * torch.nan, check_nan=True), "logits"),
    ):
        with pytest.raises(ValueError, match=f"^{argument}: got .*allowed: "):
            call()


def test_are_registered_ops():
    """torch.compile sees ops that write what they say they write, and no break between them."""
    from flashinfer.sampling import _launches, filters

    probs, ks = rows_of_probs(3, 20), torch.tensor([2, 3, 4])
    drawn = [0, 5], torch.tensor([1]), None, None, torch.empty(3, dtype=torch.int32), torch.empty(3, dtype=torch.bool)
    torch.library.opcheck(filters._softmax.op, (probs, 0.5, None, torch.empty_like(probs)))
    torch.library.opcheck(filters._write_prefix.op, (probs, False, None, ks, None, None, torch.empty_like(probs)))
    torch.library.opcheck(_launches.draw.op, (probs, "probs", None, torch.ones(3), *drawn))
    torch.library.opcheck(_launches.draw_prefix.op, (probs, "probs joint", None, ks, 0.5, None, *drawn))

    def sample(logits, seed, offset):
        probs = sampling.softmax(logits, 0.8)
        return sampling.top_k_top_p_sampling_from_probs(probs, ks, 0.9, seed=seed, offset=offset)

    logits, seed, offset = torch.randn(3, 20), torch.tensor([4]), torch.tensor([5])
    compiled = torch.compile(sample, fullgraph=True, backend="aot_eager")
    assert_bitwise(compiled(logits, seed, offset), sample(logits, seed, offset))


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [1, 7, 64, 300])
def test_large_vocabularies_on_a_gpu(device, monkeypatch, rows):
    """Kernels against the reference. Its logarithm differs in the last bit, which may turn a race in a million."""
    for spread in (0.0, 1.0, 5.0):
        logits = generate.randn(rows, 128256, device=device) * spread
        probs = torch.softmax(logits, -1)
        ks = torch.randint(1, 200, (rows,), device=device)
        ps = torch.rand(rows, device=device).clamp(0.01)
        seeds = dict(seed=torch.arange(rows, device=device), offset=torch.tensor([1], device=device))
        results = {}
        for name in ("reference", "portable"):
            with backend(name, monkeypatch):
                results[name] = (
                    sampling.top_k_top_p_sampling_from_probs(probs, ks, ps, **seeds),
                    sampling.top_p_sampling_from_probs(probs, ps, **seeds),
                    sampling.sampling_from_logits(logits, **seeds),
                    sampling.top_k_top_p_sampling_from_logits(logits, ks, ps, filter_apply_order="joint", **seeds),
                )
                kept = sampling.top_k_mask_logits(logits, ks).isfinite()
                results[name] += (kept,)
        for ours, theirs in zip(*results.values()):
            assert (ours == theirs).float().mean() > 0.99


@pytest.mark.gpu
def test_graph_reads_seeds_and_filters_again(device):
    probs = rows_of_probs(8, 5000, device)
    seed, offset = torch.tensor([3], device=device), torch.tensor([4], device=device)
    ks, ps = torch.full((8,), 50, device=device), torch.full((8,), 0.9, device=device)

    def sample():
        return sampling.top_k_top_p_sampling_from_probs(probs, ks, ps, seed=seed, offset=offset)

    sample()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        tokens = sample()
    for value in (4, 5):
        offset.fill_(value)
        graph.replay()
        assert_bitwise(tokens, sample())


def test_root_names():
    assert flashinfer.softmax is sampling.softmax and flashinfer.top_p_renorm_probs is sampling.top_p_renorm_probs
