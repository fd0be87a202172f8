"""merge_state, merge_state_in_place and merge_states, by reference and by kernel, against their formulas in float64."""

import functools
import math

import pytest
import torch

import flashinfer
from flashinfer._core.checks import UnsupportedConfig
from flashinfer.cascade import merge_state, merge_state_in_place, merge_states
from flashinfer.ops.attention import merge as room
from flashinfer.testing.compare import assert_bitwise, assert_close
from flashinfer.testing.generate import Guarded, randn, strided

INF, NAN = math.inf, math.nan


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request):
    return torch.device(request.param)


@pytest.fixture(params=["reference", "portable"])
def variant(request, monkeypatch):
    """The public functions run on this variant: on a CPU, `portable` is the kernel under Triton's interpreter."""
    for name in ("merge_pair", "merge_stack"):
        monkeypatch.setattr(room, name, functools.partial(getattr(room, name), backend=request.param))
    return request.param


def states(tokens, count, heads, dim, dtype, device):
    """v [tokens, count, heads, dim] and s [tokens, count, heads], some states empty with NaN as their v."""
    v = randn(tokens, count, heads, dim, dtype=dtype, device=device)
    s = 4 * randn(tokens, count, heads, device=device)
    empty = torch.rand(tokens, count, heads, device=device) < 0.25
    s[empty] = -INF
    v[empty] = NAN
    if tokens and count:
        s[0], v[0] = -INF, NAN
    return v, s


def formula(v, s, dtype):
    """The merged state, written from its definition and computed in `dtype` (its log-sum-exp at least in float32)."""
    seen = (s != -INF)[..., None]
    wide = torch.promote_types(dtype, torch.float32)
    s = s.to(wide) * math.log(2)
    merged = torch.logsumexp(s, 1) if s.shape[1] else s.new_full(s[:, 0:1].sum(1).shape, -INF)
    weight = torch.where(seen[..., 0], (s - merged[:, None]).exp(), 0).to(dtype)
    out = (weight[..., None] * torch.where(seen, v, 0).to(dtype)).sum(1, dtype=dtype)
    return out, merged / math.log(2)


def check(result, v, s):
    out, lse = result
    truth, truth_lse = formula(v, s, torch.float64)
    same, same_lse = formula(v, s, v.dtype)
    assert_close(out, same, truth, "v")
    assert_close(lse, same_lse, truth_lse, "s")


def pair_of(v, s):
    return v[:, 0], s[:, 0], v[:, 1], s[:, 1]


@pytest.mark.parametrize("dtype", (torch.float16, torch.bfloat16, torch.float32), ids=str)
@pytest.mark.parametrize("dim", (16, 72, 128, 192, 512, 576))
def test_merge_state(dtype, dim, variant, device):
    v, s = states(5, 2, 3, dim, dtype, device)
    check(merge_state(*pair_of(v, s)), v, s)


@pytest.mark.parametrize("dtype", (torch.float16, torch.bfloat16, torch.float32), ids=str)
@pytest.mark.parametrize("dim", (24, 128, 256, 1032))
def test_merge_states(dtype, dim, variant, device):
    v, s = states(4, 5, 3, dim, dtype, device)
    check(merge_states(v, s), v, s)


@pytest.mark.parametrize("count", (0, 1, 2, 3, 4, 16, 17, 100))
def test_merge_states_takes_any_number_of_states(count, variant, device):
    v, s = states(3, count, 2, 64, torch.float16, device)
    out, lse = merge_states(v, s)
    if count:
        check((out, lse), v, s)
    else:
        assert_bitwise(out, torch.zeros(3, 2, 64, dtype=torch.float16, device=device))
        assert_bitwise(lse, torch.full((3, 2), -INF, device=device))


@pytest.mark.parametrize("lengths", ([40], [1, 39], [0, 40, 0], [13, 1, 0, 26], [2] * 20))
def test_states_of_parts_of_the_keys_give_attention_over_all(lengths, variant, device):
    q, k, v = (torch.randn(n, 2, 32, dtype=torch.float64, device=device) for n in (3, 40, 40))

    def attend(keys, dtype=torch.float64):
        logits = torch.einsum("qhd,khd->qhk", q.to(dtype), k[keys].to(dtype))
        lse = torch.logsumexp(logits, -1)
        p = torch.where(lse.isfinite()[..., None], (logits - lse[..., None]).exp(), 0)
        return torch.einsum("qhk,khd->qhd", p, v[keys].to(dtype)), lse / math.log(2)

    parts = [attend(keys) for keys in torch.arange(40, device=device).split(lengths)]
    out, lse = merge_states(
        torch.stack([p[0] for p in parts], 1).float(), torch.stack([p[1] for p in parts], 1).float()
    )
    everything = torch.arange(40, device=device)
    (truth, truth_lse), (same, same_lse) = attend(everything), attend(everything, torch.float32)
    assert_close(out, same, truth)
    assert_close(lse, same_lse, truth_lse)


@pytest.mark.parametrize("masked", (False, True))
@pytest.mark.parametrize("dtype", (torch.bfloat16, torch.float32), ids=str)
def test_merge_in_place(dtype, masked, variant, device):
    v, s = states(9, 2, 5, 40, dtype, device)
    mask = torch.rand(9, device=device) < 0.5 if masked else None
    guards = Guarded((9, 5, 40), dtype, device), Guarded((9, 5), torch.float32, device)
    own, own_s = (g.out.copy_(x[:, 0]) for g, x in zip(guards, (v, s)))
    assert merge_state_in_place(own, own_s, v[:, 1], s[:, 1], mask) is None
    for guard in guards:
        guard.check()
    chosen = torch.ones(9, dtype=torch.bool, device=device) if mask is None else mask
    check((own[chosen], own_s[chosen]), v[chosen], s[chosen])
    assert_bitwise(own[~chosen], v[~chosen, 0])
    assert_bitwise(own_s[~chosen], s[~chosen, 0])


@pytest.mark.parametrize("dtype", (torch.float16, torch.bfloat16, torch.float64), ids=str)
def test_log_sum_exps_of_other_types(dtype, variant, device):
    v, s = states(9, 2, 5, 40, torch.float16, device)
    given = s.to(dtype)
    rounded = given.float()
    check(merge_state(*pair_of(v, given)), v, rounded)
    check(merge_states(v, given), v, rounded)
    own, own_s, mask = v[:, 0].clone(), rounded[:, 0].clone(), torch.arange(9, dtype=torch.uint8, device=device) % 3
    merge_state_in_place(own, own_s, v[:, 1], given[:, 1], mask)
    chosen = mask > 0
    check((own[chosen], own_s[chosen]), v[chosen], rounded[chosen])
    assert_bitwise(own[~chosen], v[~chosen, 0])


def test_an_empty_state_is_the_identity(variant, device):
    v, s = randn(6, 3, 48, dtype=torch.bfloat16, device=device), 9 * randn(6, 3, device=device)
    nothing, empty = torch.full_like(v, NAN), torch.full_like(s, -INF)
    stack = torch.stack((nothing, v, nothing), 1), torch.stack((empty, s, empty), 1)
    own = v.clone(), s.clone()
    merge_state_in_place(*own, nothing, empty)
    for out, lse in (merge_state(v, s, nothing, empty), merge_state(nothing, empty, v, s), merge_states(*stack), own):
        assert_bitwise(out, v)
        assert_bitwise(lse, s)


def test_empty_states_merge_to_an_empty_state(variant, device):
    v, s = torch.full((4, 3, 2, 16), NAN, device=device), torch.full((4, 3, 2), -INF, device=device)
    for out, lse in (merge_states(v, s), merge_state(*pair_of(v, s))):
        assert_bitwise(out, torch.zeros(4, 2, 16, device=device))
        assert_bitwise(lse, torch.full((4, 2), -INF, device=device))


@pytest.mark.parametrize("bad", (NAN, INF))
def test_what_no_attention_yields_becomes_nan(bad, variant, device):
    v, s = randn(2, 3, 1, 16, device=device), randn(2, 3, 1, device=device)
    s[0, 1] = bad
    for result in (merge_states(v, s), merge_state(*pair_of(v, s)), merge_state(*pair_of(v.flip(1), s.flip(1)))):
        assert result[0][0].isnan().all() and result[1][0].isnan().all()
        assert result[0][1].isfinite().all() and result[1][1].isfinite().all()


def test_far_apart_and_large_log_sum_exps(variant, device):
    s = torch.tensor([[3e4, -3e4], [3e4, 3e4], [-3e4, -3e4], [1e-3, 0.0]], device=device)[..., None]
    v = randn(4, 2, 1, 32, device=device)
    check(merge_states(v, s), v, s)
    check(merge_state(*pair_of(v, s)), v, s)


@pytest.mark.parametrize("axis", (0, 1, 2, 3))
@pytest.mark.parametrize("gap", (1, 8))
def test_strides(axis, gap, variant, device):
    v, s = states(5, 3, 4, 24, torch.float16, device)
    v_strided, s_strided = strided(v, axis, gap), strided(s, min(axis, 2), gap)
    assert not v_strided.is_contiguous()
    check(merge_states(v_strided, s_strided), v, s)
    check(merge_state(*pair_of(v_strided, s_strided)), v[:, :2], s[:, :2])
    merge_state_in_place(*pair_of(v_strided, s_strided))
    check((v_strided[:, 0], s_strided[:, 0]), v[:, :2], s[:, :2])


def test_states_that_were_written_one_after_another(variant, device):
    v, s = states(5, 3, 4, 32, torch.float16, device)
    apart = v.transpose(0, 1).contiguous(), s.transpose(0, 1).contiguous()
    check(merge_states(apart[0].transpose(0, 1), apart[1].transpose(0, 1)), v, s)


def test_expanded_inputs(variant, device):
    v, s = randn(1, 3, 1, 16, device=device), randn(1, 3, 1, device=device)
    wide = v.expand(5, 3, 4, 16), s.expand(5, 3, 4)
    check(merge_states(*wide), *wide)
    check(merge_state(*pair_of(*wide)), wide[0][:, :2], wide[1][:, :2])


def test_nothing_to_merge(variant, device):
    for tokens, heads in ((0, 4), (3, 0)):
        v, s = torch.empty(tokens, 2, heads, 64, device=device), torch.empty(tokens, 2, heads, device=device)
        assert merge_states(v, s)[0].shape == merge_state(*pair_of(v, s))[0].shape == (tokens, heads, 64)
        merge_state_in_place(*pair_of(v, s))


@pytest.mark.parametrize("tokens", (1, 33))
def test_kernels_write_their_output_and_nothing_else(tokens, device):
    v, s = states(tokens, 3, 5, 72, torch.float16, device)
    runs = {
        "pair": lambda out, lse: _portable(room.PairProblem("fp16", 72, False, True), device).run(
            *pair_of(v, s), None, out, lse
        ),
        "stack": lambda out, lse: _portable(room.StackProblem("fp16", 72, 4, True), device).run(v, s, out, lse),
    }
    for run, count in zip(runs.values(), (2, 3)):
        out, lse = Guarded((tokens, 5, 72), torch.float16, device), Guarded((tokens, 5), torch.float32, device)
        run(out.out, lse.out)
        out.check()
        lse.check()
        check((out.out, lse.out), v[:, :count], s[:, :count])


def _portable(problem, device):
    op = room.merge_pair if isinstance(problem, room.PairProblem) else room.merge_stack
    return op(problem, device, backend="portable")


def test_wide_and_narrow_accesses_agree_bitwise(device):
    v, s = states(7, 5, 3, 40, torch.bfloat16, device)
    narrow, wide = [torch.full((7, 3, 40), NAN, dtype=torch.bfloat16, device=device) for _ in range(2)]
    lse = torch.empty(7, 3, device=device)
    _portable(room.StackProblem("bf16", 40, 8, False), device).run(v, s, narrow, lse)
    _portable(room.StackProblem("bf16", 40, 8, True), device).run(v, s, wide, lse)
    assert_bitwise(narrow, wide)


def test_torch_compile_sees_opaque_ops(device):
    v, s = states(6, 3, 2, 16, torch.float32, device)
    mask = torch.tensor([True, False] * 3, device=device)

    @torch.compile(fullgraph=True, backend="aot_eager")
    def merged(v, s, mask):
        v, s = v * 1.0, s * 1.0
        first = merge_state(*pair_of(v, s))
        own = v[:, 0].clone(), s[:, 0].clone()
        merge_state_in_place(*own, v[:, 1], s[:, 1], mask)
        return *first, *own, *merge_states(v, s)

    own = v[:, 0].clone(), s[:, 0].clone()
    merge_state_in_place(*own, v[:, 1], s[:, 1], mask)
    for out, expected in zip(merged(v, s, mask), (*merge_state(*pair_of(v, s)), *own, *merge_states(v, s))):
        assert_bitwise(out.nan_to_num(7.0), expected.nan_to_num(7.0))


def good():
    return dict(v_a=torch.ones(3, 2, 16), s_a=torch.ones(3, 2), v_b=torch.ones(3, 2, 16), s_b=torch.ones(3, 2))


BAD_PAIRS = {
    "rank": ("v_a", dict(v_a=torch.ones(3, 32))),
    "no head_dim": ("v_a", dict(v_a=torch.ones(3, 2, 0))),
    "dtype": ("v_a", dict(v_a=torch.ones(3, 2, 16, dtype=torch.float64))),
    "integers": ("v_b", dict(v_b=torch.ones(3, 2, 16, dtype=torch.int32))),
    "shape of s_a": ("s_a", dict(s_a=torch.ones(3, 1))),
    "dtype of s_b": ("s_b", dict(s_b=torch.ones(3, 2, dtype=torch.int32))),
    "other shape": ("v_b", dict(v_b=torch.ones(4, 2, 16), s_b=torch.ones(4, 2))),
    "other dtype": ("v_b", dict(v_b=torch.ones(3, 2, 16, dtype=torch.float16))),
    "other device": ("s_b", dict(s_b=torch.ones(3, 2, device="meta"))),
}


@pytest.mark.parametrize("name", BAD_PAIRS)
def test_bad_pairs_are_refused_by_name(name):
    argument, change = BAD_PAIRS[name]
    arguments = good() | change
    with pytest.raises(ValueError, match=f"^{argument}: got .*; allowed: "):
        merge_state(**arguments)
    in_place = dict(v_a="v", s_a="s", v_b="v_other", s_b="s_other")
    with pytest.raises(ValueError, match=f"^{in_place[argument]}: got .*; allowed: "):
        merge_state_in_place(**{in_place[key]: value for key, value in arguments.items()})


@pytest.mark.parametrize(
    ("argument", "change"),
    [
        ("mask", dict(mask=torch.ones(4, dtype=torch.bool))),
        ("mask", dict(mask=torch.ones(3))),
        ("mask", dict(mask=torch.ones(3, dtype=torch.bool, device="meta"))),
        ("v", dict(v=torch.ones(3, 1, 16).expand(3, 2, 16))),
        ("s", dict(s=torch.ones(1, 2).expand(3, 2))),
        ("s", dict(s=torch.ones(3, 2, dtype=torch.float64))),
    ],
)
def test_bad_arguments_of_the_in_place_function(argument, change):
    arguments = dict(v=torch.ones(3, 2, 16), s=torch.ones(3, 2), v_other=torch.ones(3, 2, 16), s_other=torch.ones(3, 2))
    with pytest.raises(ValueError, match=f"^{argument}: got .*; allowed: "):
        merge_state_in_place(**arguments | change)


@pytest.mark.parametrize(
    ("argument", "v", "s"),
    [
        ("v", torch.ones(3, 2, 16), torch.ones(3, 2)),
        ("v", torch.ones(3, 4, 2, 16, dtype=torch.int8), torch.ones(3, 4, 2)),
        ("s", torch.ones(3, 4, 2, 16), torch.ones(4, 3, 2)),
        ("s", torch.ones(3, 4, 2, 16), torch.ones(3, 4, 2, dtype=torch.int32)),
        ("s", torch.ones(3, 4, 2, 16), torch.ones(3, 4, 2, device="meta")),
    ],
)
def test_bad_stacks_are_refused_by_name(argument, v, s):
    with pytest.raises(ValueError, match=f"^{argument}: got .*; allowed: "):
        merge_states(v, s)


def test_refusals_and_choices_are_explained():
    with pytest.raises(UnsupportedConfig, match="dtype fp8e4nv is not one of bf16, fp16, fp32"):
        room.merge_pair(room.PairProblem("fp8e4nv", 64, False, True), torch.device("cpu"))
    choice = room.merge_pair(room.PairProblem("bf16", 64, False, True), torch.device("cpu"))
    assert choice.variant.name == "reference"
    assert flashinfer.merge_state is merge_state


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", (torch.float16, torch.bfloat16, torch.float32), ids=str)
@pytest.mark.parametrize(("tokens", "heads", "dim"), [(4097, 32, 128), (1023, 8, 256), (1, 128, 512), (511, 7, 80)])
def test_shapes_of_serving(dtype, tokens, heads, dim, device):
    v, s = states(tokens, 4, heads, dim, dtype, device)
    check(merge_states(v, s), v, s)
    check(merge_state(*pair_of(v, s)), v[:, :2], s[:, :2])
    merge_state_in_place(*pair_of(v, s))
    check((v[:, 0], s[:, 0]), *_again(tokens, 4, heads, dim, dtype, device))


def _again(*shape):
    torch.manual_seed(0)
    v, s = states(*shape)
    return v[:, :2], s[:, :2]


@pytest.mark.gpu
def test_offsets_beyond_2_to_the_31(device):
    stride = 2**31 + 64
    buffer = torch.empty(stride + 4 * 2 * 64, dtype=torch.float16, device=device)
    far = buffer.as_strided((2, 2, 64), (stride, 64, 1))
    v, s = states(2, 2, 2, 64, torch.float16, device)
    s.clamp_(min=-4)
    v.nan_to_num_(0.5)
    far.copy_(v[:, 0])
    check(merge_state(far, s[:, 0], v[:, 1], s[:, 1]), v, s)
    merge_state_in_place(far, s[:, 0].clone(), v[:, 1], s[:, 1])
    assert_close(far, formula(v, s, v.dtype)[0], formula(v, s, torch.float64)[0])


@pytest.mark.gpu
def test_a_captured_graph_obeys_new_inputs_and_masks(device):
    v, s = states(65, 2, 8, 128, torch.bfloat16, device)
    v_next, s_next = states(65, 2, 8, 128, torch.bfloat16, device)
    mask = torch.zeros(65, dtype=torch.bool, device=device)
    own, own_s = v[:, 0].clone(), s[:, 0].clone()
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        merge_state_in_place(own, own_s, v[:, 1], s[:, 1], mask)
        merge_states(v, s)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        merge_state_in_place(own, own_s, v[:, 1], s[:, 1], mask)
        out, lse = merge_states(v, s)
    v.copy_(v_next)
    s.copy_(s_next)
    own.copy_(v[:, 0])
    own_s.copy_(s[:, 0])
    mask[::2] = True
    graph.replay()
    check((out, lse), v, s)
    check((own[::2], own_s[::2]), v[::2], s[::2])
    assert_bitwise(own[1::2], v[1::2, 0])
