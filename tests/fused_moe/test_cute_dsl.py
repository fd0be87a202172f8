"""Experts by the names of CuTe DSL's kernels against token-by-token float64, operands taken as they are stored."""

from functools import partial

import pytest
import torch

import flashinfer
from flashinfer._core.dispatch import Op
from flashinfer._core.target import target_of
from flashinfer.cute_dsl.utils import convert_sf_to_mma_layout
from flashinfer.fused_moe import ActivationType
from flashinfer.fused_moe.cute_dsl.fused_moe import CuteDslMoEWrapper, cute_dsl_fused_moe
from flashinfer.testing.compare import assert_bitwise, assert_close
from flashinfer.testing.generate import Guarded

from tests.ops.moe.experts.layers import E2M1, WIDTH, between, mixture, nibbles, random, situ, swiglu, tiled, weights

K, E = 2, 3
H, M = 64, 64
BF16, FP16 = torch.bfloat16, torch.float16
MODES = {"w4a4": ("nvfp4", "nvfp4"), "w4a8": ("mxfp8", "mxfp4"), "w4a16": ("bf16", "nvfp4")}


@pytest.fixture(params=["reference", "portable"])
def way(request, monkeypatch, device):
    """Every op of a call by one variant: the public calls have no backend to name."""
    select = Op.select
    monkeypatch.setattr(Op, "__call__", lambda op, problem, on, backend=None: select(op, problem, target_of(on),
                                                                                    request.param))  # fmt: skip


def tokens(device):
    """Few in Triton's interpreter; on a GPU enough for errors of quantising to have statistics."""
    return 3 if torch.device(device).type == "cpu" else 48


def chosen(device):
    """Experts of each token, one of them left out, and weights."""
    ids = torch.rand(tokens(device), E).topk(K).indices.int()
    ids[2, 0] = -1
    return ids.to(device), torch.rand(tokens(device), K, device=device) + 0.1


def by_turns(w):
    """Rows of halves, up and gate, as 64 of one, 64 of the other and so on, row by row."""
    middle = w.shape[1] // 2
    return torch.stack([w[:, gate * middle + 64 * group + i]
                        for group in range(middle // 64) for gate in range(2) for i in range(64)], 1)  # fmt: skip


def layer(device, mode="w4a4", gated=True, middle=M, q2=20.0):
    """What the calls take, by name, and the truth's operands, their halves up first."""
    rows, encoding = MODES[mode]
    x, x_sf, xd = random(rows, tokens(device), H, device=device)
    w1, s1, v1 = weights(encoding, E, (1 + gated) * middle, H, device)
    w2, s2, v2 = weights(encoding, E, H, middle, device)
    d1, d2 = torch.rand(E, device=device) + 0.5, (torch.rand(E, device=device) + 0.5) / q2
    if gated:
        w1, s1 = by_turns(w1), by_turns(s1)
    ids, s = chosen(device)
    call = {
        "x": x, "x_sf": x_sf, "token_selected_experts": ids, "token_final_scales": s, "w1_weight": w1,
        "w1_weight_sf": tiled(s1), "w1_alpha": d1, "fc2_input_scale": None, "w2_weight": w2, "w2_weight_sf": tiled(s2),
        "w2_alpha": d2,
    }  # fmt: skip
    if mode == "w4a4":
        call["fc2_input_scale"] = torch.full((1,), q2, device=device)
    return call, (xd, v1, v2, ids, s), {"d1": d1, "d2": d2}


def check(out, truth, dtype=FP16, **given):
    """Triton's interpreter truncates to bfloat16, and quantises another value then: most results are float16."""
    exact = mixture(*truth, **given)
    assert_close(out, mixture(*truth, dtype=dtype, **given).to(out.dtype), exact)


def run(call, **options):
    return cute_dsl_fused_moe(**call, num_experts=E, top_k=K, **{"output_dtype": FP16} | options)


@pytest.mark.parametrize("mode", ["w4a4", "w4a8", "w4a16"])
def test_modes(way, device, mode):
    """Factors in six dimensions, an output of the caller's; NVFP4 with two groups of each half."""
    middle = 128 if mode == "w4a4" else M
    call, truth, given = layer(device, mode, middle=middle)
    for name, n, k in (("w1_weight_sf", 2 * middle, H), ("w2_weight_sf", H, middle)):
        call[name] = convert_sf_to_mma_layout(call[name], n, k, E, WIDTH[MODES[mode][1]])
    if mode == "w4a4":
        call["x_sf"] = call["x_sf"].view(torch.float8_e4m3fn)[..., None]
    guard = Guarded((tokens(device), H), FP16, device)
    out = run(call, quant_mode=mode.upper(), moe_output=guard.out)
    assert out is guard.out
    guard.check()
    through = {"w4a4": between("nvfp4", 20.0, FP16), "w4a8": between("mxfp8", dtype=FP16)}.get(mode)
    check(out, truth, through=through, **given)


def situ_gate(y):
    up, gate = y.chunk(2)
    return 2 * torch.tanh(gate / 2) * torch.sigmoid(gate) * up


ACTS = {
    "limits": ({"swiglu_alpha": 1.702, "swiglu_beta": 1.0, "swiglu_limit": 0.5}, partial(swiglu, alpha=1.702, beta=1.0,
                                                                                       limit=0.5)),
    "limit": ({"swiglu_limit": 0.25}, partial(swiglu, limit=0.25)),
    "geglu": ({"activation_type": ActivationType.GegluTanh},
              lambda y: torch.nn.functional.gelu(y.chunk(2)[1], approximate="tanh") * y.chunk(2)[0]),
    "relu2": ({"activation_type": ActivationType.Relu2.value}, lambda y: y.relu().square()),
    "situ": ({"situ_beta": 2.0, "situ_linear_beta": 3.0}, lambda y: situ(*y.chunk(2))),
    "situ of the gate": ({"situ_beta": 2.0}, situ_gate),
}  # fmt: skip


@pytest.mark.parametrize("name", ["limits", "situ of the gate"])
def test_activations_with_numbers(way, device, name):
    check_activation(device, name)


@pytest.mark.parametrize("name", ["limit", "geglu", "relu2", "situ"])
def test_activations(device, name):
    check_activation(device, name)


def check_activation(device, name):
    options, act = ACTS[name]
    call, truth, given = layer(device, "w4a16", gated=name != "relu2")
    out = run(call, quant_mode="w4a16", **options)
    check(out, truth, act=act, **given)


def row_scaled(base):
    """Rows between the products divided by scales of their own: base times the largest magnitude."""

    def through(h):
        h = h.to(FP16).double()
        scale = float(h.abs().max().float() * base)
        return between("nvfp4", 1 / scale, FP16)(h) * scale if scale else h

    return through


def test_scales_of_tokens(way, device):
    """Tokens of very different size, one of zeros, by scales of their own before and between the products."""
    base = 1 / (448 * 6)
    call, (xd, *truth), given = layer(device, q2=1.0)
    x = torch.randn(tokens(device), H, device=device).to(FP16)
    x *= 4.0 ** (torch.arange(len(x), device=device) % 5 - 2)[:, None]
    x[1] = 0
    codes, factors, p = flashinfer.nvfp4_quantize(
        x, torch.tensor([base], device=device), flashinfer.SfLayout.layout_linear, per_token_activation=True
    )
    call |= {"x": codes, "x_sf": factors, "fc2_input_scale": torch.tensor([base], device=device)}
    blocks = factors.view(torch.float8_e4m3fn).double().repeat_interleave(16, 1)
    xd = E2M1.to(device)[nibbles(codes)] * blocks * p.double()[:, None]
    out = run(call, per_token_scale=p[:, None])
    check(out, (xd, *truth), through=row_scaled(base), **given)
    assert not out[1].any()


def test_wrapper(device):
    call, truth, given = layer(device)
    moe = CuteDslMoEWrapper(E, K, H, M, True, 1, output_dtype=FP16, device=device, quant_mode="NVFP4")
    through = between("nvfp4", 20.0, FP16)
    out = moe.run(**call)
    assert_bitwise(out, run(call))
    check(out, truth, through=through, **given)


def test_tactics(way, device):
    call, truth, given = layer(device, "w4a16")
    moe = CuteDslMoEWrapper(E, K, H, M, output_dtype=FP16, device=device, quant_mode="w4a16")
    assert moe.get_valid_tactics() == [(16,), (32,), (64,), (128,)]
    out = moe.run(**call, tactic=(32,))
    check(out, truth, **given)
    assert_bitwise(run(call, quant_mode="w4a16", tactic=(32,)), out)


def test_ranks_of_experts_and_no_tokens(device):
    call, (xd, v1, v2, ids, s), given = layer(device)
    for first, count in ((0, 1), (1, 2)):
        mine = slice(first, first + count)
        part = {name: t[mine] if name.startswith("w") else t for name, t in call.items()}
        part |= {"token_selected_experts": ids.long(), "token_final_scales": s.to(BF16)}
        part["fc2_input_scale"] = torch.full((count,), 20.0, device=device)
        out = run(part, num_local_experts=count, local_expert_offset=first)
        rank = {name: d[mine] for name, d in given.items()}
        truth, through = (xd, v1[mine], v2[mine], ids, s.to(BF16)), between("nvfp4", 20.0, FP16)
        check(out, truth, through=through, offset=first, **rank)
    names = ("x", "x_sf", "token_selected_experts", "token_final_scales")
    out = run(call | {name: call[name][:0] for name in names}, output_dtype=BF16)
    assert out.shape == (0, H) and out.dtype == BF16


def test_six_dimensions_are_where_the_tiles_are():
    factors = torch.randint(256, (3, 200, 5), dtype=torch.uint8)
    seen = convert_sf_to_mma_layout(tiled(factors), 200, 80, num_groups=3)
    assert seen.shape == (32, 4, 2, 4, 2, 3)
    for group, r, b in ((0, 0, 0), (1, 37, 4), (2, 199, 3), (1, 130, 1)):
        assert seen[r % 32, r % 128 // 32, r // 128, b % 4, b // 4, group] == factors[group, r, b]
    for name, bad in (("sf", (factors, 200, 80, 3)), ("sf", (seen, 200, 80, 3)), ("m", (factors, 0, 80))):
        with pytest.raises(ValueError, match=f"^{name}: got .*allowed: "):
            convert_sf_to_mma_layout(*bad)


BAD = [
    ("x", {"x": lambda t: t.float()}),
    ("x", {"x": lambda t: t[:, ::2]}),
    ("x_sf", {"x_sf": lambda t: t[:, :2]}),
    ("x_sf", {"x_sf": lambda t: t.mT.contiguous()}),
    ("x_sf", {"x_sf": lambda t: None}),
    ("token_selected_experts", {"token_selected_experts": lambda t: t[:, :1]}),
    ("token_selected_experts", {"token_selected_experts": lambda t: t.short()}),
    ("token_final_scales", {"token_final_scales": lambda t: t.double()}),
    ("token_final_scales", {"token_final_scales": lambda t: None}),
    ("w1_weight", {"w1_weight": lambda t: t[:2]}),
    ("w1_weight", {"w1_weight": lambda t: t[:, :64]}),
    ("w1_weight", {"w1_weight": lambda t: t[..., :16]}),
    ("w1_weight_sf", {"w1_weight_sf": lambda t: t[:, :64]}),
    ("w1_weight_sf", {"w1_weight_sf": lambda t: t.float()}),
    ("w1_weight_sf", {"w1_weight_sf": lambda t: convert_sf_to_mma_layout(t, 128, 64, E).contiguous()}),
    ("w2_weight_sf", {"w2_weight_sf": lambda t: t.view(4, 32, 1, 4, 1, E)}),
    ("w1_alpha", {"w1_alpha": lambda t: t[:2]}),
    ("w2_alpha", {"w2_alpha": lambda t: t.half()}),
    ("fc2_input_scale", {"fc2_input_scale": lambda t: None}),
    ("fc2_input_scale", {"fc2_input_scale": lambda t: t.expand(2)}),
]  # fmt: skip


@pytest.mark.parametrize("name, change", BAD)
def test_bad_tensors(name, change):
    call, _, _ = layer("cpu")
    with pytest.raises(ValueError, match=f"^{name}: got .*allowed: "):
        run(call | {key: value(call[key]) for key, value in change.items()})


ONE = torch.ones(1)
OPTIONS = [
    {"num_experts": 4}, {"top_k": 3}, {"num_local_experts": 0}, {"num_local_experts": 4}, {"local_expert_offset": 1},
    {"output_dtype": torch.int8}, {"moe_output": torch.empty(3, H)}, {"moe_output": torch.empty(4, H, dtype=FP16)},
    {"activation_type": ActivationType.Geglu}, {"activation_type": 99}, {"swiglu_alpha": float("nan")},
    {"swiglu_limit": 0.0}, {"swiglu_limit": None}, {"situ_beta": 0.0}, {"situ_linear_beta": 1.0},
    {"swiglu_alpha": 2.0, "situ_beta": 1.0}, {"swiglu_beta": 2.0, "activation_type": ActivationType.GegluTanh},
    {"situ_beta": 1.0, "activation_type": ActivationType.GegluTanh}, {"quant_mode": "w8a8"}, {"per_token_scale": ONE},
    {"per_token_scale": torch.ones(3).double()}, {"localized_weights": [ONE]}, {"localized_streams": [None]},
    {"localized_sm_count": 4}, {"localized_memset_stream": ONE}, {"tactic": (256,)},
]  # fmt: skip
NAMED = {"num_experts": "w1_weight", "top_k": "token_selected_experts"}


@pytest.mark.parametrize("options", OPTIONS, ids=lambda o: ", ".join(o))
def test_bad_options(options):
    call, _, _ = layer("cpu")
    name = next(iter(options))
    with pytest.raises(ValueError, match=f"^{NAMED.get(name, name)}: got .*allowed: "):
        cute_dsl_fused_moe(**call, **{"num_experts": E, "top_k": K, "output_dtype": FP16} | options)


@pytest.mark.parametrize("mode, name", [("w4a8", "fc2_input_scale"), ("w4a16", "x_sf"), ("w4a8", "per_token_scale")])
def test_bad_in_a_mode(mode, name):
    call, _, _ = layer("cpu", mode)
    options = {"per_token_scale": ONE} if name == "per_token_scale" else {}
    with pytest.raises(ValueError, match=f"^{name}: got a tensor; allowed: None with {mode}"):
        run(call | ({} if options else {name: ONE}), quant_mode=mode, **options)


@pytest.mark.parametrize(
    "name, arguments, options",
    [("w1_weight", (E, K, H, 2 * M), {}), ("w2_weight", (E, K, 2 * H, M), {}), ("sf_vec_size", (E, K, H, M), {
        "sf_vec_size": 32}), ("hidden_size", (E, K, 0, M), {}), ("tactic", (E, K, H, M), {"tactic": (256,)}),
     ("x", (E, K, H, M), {"device": "cuda"})],
)  # fmt: skip
def test_bad_wrapper(name, arguments, options):
    call, _, _ = layer("cpu")
    tactic = {"tactic": options.pop("tactic")} if "tactic" in options else {}
    with pytest.raises(ValueError, match=f"^{name}: got .*allowed: "):
        CuteDslMoEWrapper(*arguments, **{"device": "cpu"} | options).run(**call, **tactic)


@pytest.mark.gpu
def test_a_graph_stays_valid_for_other_experts(device):
    call, truth, given = layer(device)
    moe = CuteDslMoEWrapper(E, K, H, M, use_cuda_graph=True, output_dtype=FP16, device=device)
    p = torch.rand(tokens(device), device=device) + 0.5
    call["fc2_input_scale"] = torch.tensor([1 / (448 * 6)], device=device)
    moe.run(**call, per_token_scale=p)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = moe.run(**call, per_token_scale=p)
    for _ in range(2):
        ids, s = chosen(device)
        call["token_selected_experts"].copy_(ids)
        call["token_final_scales"].copy_(s)
        graph.replay()
        torch.cuda.synchronize()
        assert_bitwise(out, moe.run(**call, per_token_scale=p))


def test_compiled_calls_are_one_op(device):
    call, _, _ = layer(device)

    def once(x, ids):
        return run(call | {"x": x, "token_selected_experts": ids})

    given = call["x"], call["token_selected_experts"]
    assert_bitwise(torch.compile(once, backend="eager", fullgraph=True)(*given), once(*given))


def by_turns_of_32(w):
    """Rows of halves, up and gate, as 32 of one, 32 of the other and so on."""
    up, gate = w.chunk(2, dim=1)
    groups = zip(up.split(32, dim=1), gate.split(32, dim=1), strict=True)
    return torch.cat([rows for pair in groups for rows in pair], 1)


@pytest.mark.parametrize("name", ["swiglu", *ACTS])
def test_experts_in_16_bits(way, device, name):
    """Rows of the up-projection and of the gate by turns of 32; an output of the caller's, and ranks of experts."""
    options, act = ACTS.get(name, ({}, swiglu))
    x, _, xd = random("fp16", tokens(device), H, device=device)
    high = M if name == "relu2" else 2 * M
    (w1, _, v1), (w2, _, v2) = (weights("fp16", E, n, k, device) for n, k in ((high, H), (H, M)))
    ids, s = chosen(device)
    stored = w1 if name == "relu2" else by_turns_of_32(w1)
    guard = Guarded((tokens(device), H), FP16, device)
    out = flashinfer.cute_dsl_fused_moe_bf16(
        x, ids, s, stored, w2, E, K, moe_output=guard.out, tactic=(128, (128, 64), (128, 64)), **options
    )
    assert out is guard.out
    guard.check()
    check(out, (xd, v1, v2, ids, s), act=act)
    wrapper = flashinfer.CuteDslBf16MoEWrapper(E, K, H, M, output_dtype=FP16, **options)
    assert_bitwise(wrapper.run(x, ids, s, stored, w2), out)
    part = flashinfer.cute_dsl_fused_moe_bf16(x, ids, s, stored[1:], w2[1:], E, K, E - 1, 1, **options)
    check(part, (xd, v1[1:], v2[1:], ids, s), act=act, offset=1)


def test_experts_in_16_bits_of_no_tokens(device):
    x, w1, w2 = (torch.zeros(shape, dtype=BF16, device=device) for shape in ((0, H), (E, 2 * M, H), (E, H, M)))
    ids, s = torch.zeros(0, K, dtype=torch.int32, device=device), torch.zeros(0, K, device=device)
    assert flashinfer.cute_dsl_fused_moe_bf16(x, ids, s, w1, w2, E, K).shape == (0, H)


@pytest.mark.parametrize(
    "change",
    [
        {"x": torch.zeros(3, H)}, {"w1_weight": torch.zeros(E, 96, H, dtype=BF16)}, {"num_local_experts": E + 1},
        {"w2_weight": torch.zeros(E, H, M)}, {"token_selected_experts": torch.zeros(3, 1, dtype=torch.int32)},
        {"token_final_scales": torch.zeros(3, K, dtype=torch.int32)}, {"activation_type": ActivationType.Gelu},
        {"local_expert_offset": 1}, {"moe_output": torch.zeros(3, H)}, {"situ_linear_beta": 1.0},
        {"swiglu_limit": 0.0},
    ],
    ids=lambda change: next(iter(change)),
)  # fmt: skip
def test_bad_input_of_experts_in_16_bits(change):
    call = {"x": torch.zeros(3, H, dtype=BF16), "token_selected_experts": torch.zeros(3, K, dtype=torch.int32)}
    call |= {"token_final_scales": torch.ones(3, K), "w1_weight": torch.zeros(E, 2 * M, H, dtype=BF16)}
    call |= {"w2_weight": torch.zeros(E, H, M, dtype=BF16), "num_experts": E, "top_k": K}
    (name,) = change
    with pytest.raises(ValueError, match=f"^{name}: got .*allowed: "):
        flashinfer.cute_dsl_fused_moe_bf16(**call | change)


def test_bad_input_of_the_wrapper_of_16_bits():
    with pytest.raises(ValueError, match="^output_dtype: got torch.float32"):
        flashinfer.CuteDslBf16MoEWrapper(E, K, H, M, output_dtype=torch.float32)
    wrapper = flashinfer.CuteDslBf16MoEWrapper(E, K, H, M)
    x, w1, w2 = (torch.zeros(shape, dtype=BF16) for shape in ((3, H), (E, 2 * M, H), (E, H, M)))
    ids, s = torch.zeros(3, K, dtype=torch.int32), torch.ones(3, K)
    with pytest.raises(ValueError, match="^x: got torch.float16"):
        wrapper.run(x.half(), ids, s, w1, w2)
    with pytest.raises(ValueError, match="^w1_weight: got"):
        wrapper.run(x, ids, s, w1[:, :M], w2)


def test_older_names_of_mxfp8_with_mxfp4(device):
    call, truth, given = layer(device, "w4a8")
    expected = run(call, quant_mode="w4a8", output_dtype=BF16, swiglu_limit=2.0)
    call.pop("fc2_input_scale")
    again = flashinfer.cute_dsl_fused_moe_mxfp8_mxfp4(**call, num_experts=E, top_k=K, swiglu_limit=2.0)
    assert again.dtype == BF16
    assert_bitwise(again, expected)
    wrapper = flashinfer.CuteDslMxfp8Mxfp4MoEWrapper(E, K, H, M, 99, device=device, swiglu_limit=2.0)
    assert_bitwise(wrapper.run(**call), expected)
