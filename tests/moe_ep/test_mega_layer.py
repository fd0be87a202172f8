"""The layer of experts over ranks in one call: ranks as processes, one rank alone, memory, and what it refuses."""

import re

import pytest
import torch

from flashinfer.moe_ep import (
    Bf16MegaMoeConfig,
    BootstrapConfig,
    FleetParams,
    Fp8MegaMoeConfig,
    MegaConfig,
    MoEEpMegaLayer,
    MoEEpTensors,
    MoEWeightPack,
)
from flashinfer.testing.compare import assert_bitwise
from tests.moe_ep import mega
from tests.ops.comm import processes

LAYERS = "tests.moe_ep.mega:layers"


@pytest.mark.matrix
@pytest.mark.parametrize("world", [2, 4])
def test_layers_over_processes(tmp_path, world):
    processes.run(world, LAYERS, tmp_path)


@pytest.mark.gpu
@pytest.mark.parametrize("world", [2, 4])
def test_layers_over_processes_that_share_a_gpu(tmp_path, world):
    processes.run(world, LAYERS, tmp_path, device="cuda:0", timeout=300)


def given(kind, device, tokens=7, coded=False, clamp=None, **options):
    """A layer of one rank, its pack and the tensors of a call."""
    if device.type == "cuda":
        torch.cuda.set_device(device)
    pack = MoEWeightPack(*mega.weights_of(mega.PER, device))
    pack = mega.quantised(kind, pack.w13, pack.w2) if coded else pack
    layer = mega.layer_of(0, 1, kind, pack, clamp, **options)
    return layer, pack, mega.inputs(0, mega.PER, tokens, 3, device)


CASES = [(kind, coded) for kind in mega.KINDS for coded in (False, True) if kind != "bf16" or not coded]


@pytest.mark.parametrize("clamp", [None, mega.CLAMP])
@pytest.mark.parametrize(("kind", "coded"), CASES)
def test_one_rank(device, kind, coded, clamp):
    layer, pack, (x, ids, weights) = given(kind, device, coded=coded, clamp=clamp)
    out = layer(MoEEpTensors(x, ids, weights))
    mega.check(kind, out, x, ids, weights, pack, clamp)
    assert layer(MoEEpTensors(x[:0], ids[:0], weights[:0])).shape == (0, mega.HIDDEN)
    # The same weights, as the layer has arranged them.
    other = MegaConfig(mega.kernel(kind, clamp), True, False, layer.transformed_weights)
    fleet = FleetParams(mega.PER, mega.MOST, mega.HIDDEN)
    second = MoEEpMegaLayer(BootstrapConfig(1, 0), fleet, None, other)
    assert_bitwise(second(MoEEpTensors(x, ids, weights)), out)
    assert second.transformed_weights[0][0] is layer.transformed_weights[0][0]


@pytest.mark.parametrize("kind", ["blockwise", "per_tensor"])
def test_rows_that_the_caller_has_quantised(device, kind):
    layer, pack, (x, ids, weights) = given(kind, device, coded=True)
    out = layer(MoEEpTensors(x, ids, weights))
    coded, _, _ = given(kind, device, coded=True, quantize_input=False)
    if kind == "blockwise":
        codes, scales = mega.blocks(x, 1)
    else:
        scale = mega.STATIC["fc1_activation_dequant_scale"]
        codes, scales = (x.float() * (1 / scale)).clamp(-448, 448).to(mega.E4M3), None
    again = coded(MoEEpTensors(codes, ids, weights, scales))
    for result in (out, again):
        mega.check(kind, result, x, ids, weights, pack, None)
    coded.warmup()


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_weights_of_other_dtypes_are_quantised(device, dtype):
    _, pack, (x, ids, weights) = given("blockwise", device)
    wide = MoEWeightPack(pack.w13.to(dtype), pack.w2.to(dtype))
    out = mega.layer_of(0, 1, "blockwise", wide)(MoEEpTensors(x, ids, weights))
    assert_bitwise(out, mega.layer_of(0, 1, "blockwise", pack)(MoEEpTensors(x, ids, weights)))


def test_the_weights_scales_are_of_the_gate_first(device):
    """A pack whose halves differ: in rows, in scales."""
    _, pack, (x, ids, weights) = given("blockwise", device)
    wide = pack.w13.clone()
    wide[:, : mega.MIDDLE] *= 0.01
    coded = mega.quantised("blockwise", wide, pack.w2)
    out = mega.layer_of(0, 1, "blockwise", coded)(MoEEpTensors(x, ids, weights))
    mega.check("blockwise", out, x, ids, weights, coded, None)


def test_results_in_memory_that_is_kept(device):
    layer, _, (x, ids, weights) = given("bf16", device)
    t = MoEEpTensors(x, ids, weights)
    layer.warmup()
    out = layer(t)
    view = layer.forward(t, return_workspace_view=True)
    assert layer.supports_output_view and view.data_ptr() == layer.output_buffer.data_ptr()
    assert layer.output_buffer.shape == (mega.MOST, mega.HIDDEN) and len(view) == len(x)
    assert_bitwise(view, out)
    assert layer(t).data_ptr() != view.data_ptr()
    t.output = torch.full((8, mega.HIDDEN), torch.nan, dtype=torch.bfloat16, device=device)
    got = layer(t)
    assert got.data_ptr() == t.output.data_ptr() and t.output[7:].isnan().all()
    assert_bitwise(got, out)
    t.output = x
    assert layer(t) is x
    assert_bitwise(x, out)
    t.output = None
    layer.stage_inputs(MoEEpTensors(x, ids, weights), compile_tokens_per_rank=7)
    assert layer.compute_staged(output=None).data_ptr() == layer.output_buffer.data_ptr()


def test_workspaces(device):
    layer, pack, (x, ids, weights) = given("blockwise", device)
    out = layer(MoEEpTensors(x, ids, weights))
    short = layer.create_workspace(3)
    assert short.max_tokens_per_rank == 3 and not short.is_destroyed
    layer.warmup(workspace=short)
    few = MoEEpTensors(x[4:], ids[4:], weights[4:])
    assert_bitwise(layer(few, workspace=short), out[4:])
    with pytest.raises(ValueError, match=re.escape("hidden_states: got (7, 256); allowed: [0 to 3, 256]")):
        layer(MoEEpTensors(x, ids, weights), workspace=short)
    other = mega.layer_of(0, 1, "blockwise", pack)
    with pytest.raises(ValueError, match="workspace: got"):
        other(few, workspace=short)
    layer.stage_inputs(few, workspace=short)
    short.destroy()
    short.destroy()
    assert short.is_destroyed
    with pytest.raises(ValueError, match="workspace: got"):
        layer(few, workspace=short)
    with pytest.raises(RuntimeError, match="comes after this layer's stage_inputs"):
        layer.compute_staged(output=None)
    assert_bitwise(layer(few), out[4:])
    layer.destroy()
    for call in (lambda: layer(few), lambda: layer.create_workspace(2), lambda: layer.compute_staged(output=None)):
        with pytest.raises(RuntimeError, match="it is destroyed"):
            call()


def test_memory_is_freed_by_a_destroy_that_raises(device, monkeypatch):
    layer, _, _ = given("bf16", device)
    several = [layer.create_workspace(most) for most in (2, 3, 4)]

    def late():
        raise TimeoutError("dispatch: rank 1")

    monkeypatch.setattr(several[1].ep.alltoall._space.link, "settle", late)
    with pytest.raises(TimeoutError, match="rank 1"):
        layer.destroy()
    assert all(workspace.is_destroyed for workspace in several)


def test_layers_take_turns(device):
    """Layers of the same sizes have one memory: what one has staged is not the other's."""
    one, _, (x, ids, weights) = given("bf16", device)
    two, _, _ = given("bf16", device)
    t = MoEEpTensors(x, ids, weights)
    with pytest.raises(RuntimeError, match="comes after this layer's stage_inputs"):
        one.compute_staged(output=None)
    one.stage_inputs(t)
    out = one.compute_staged(output=torch.empty_like(x))
    two.stage_inputs(MoEEpTensors(x[:2], ids[:2], weights[:2]))
    assert one.output_buffer.data_ptr() == two.output_buffer.data_ptr()
    with pytest.raises(RuntimeError, match="comes after this layer's stage_inputs"):
        one.compute_staged(output=None)
    assert_bitwise(two.compute_staged(output=None), out[:2])
    # A call in between leaves what is staged.
    assert_bitwise(one(t), out)
    assert_bitwise(two.compute_staged(output=None), out[:2])


@pytest.mark.gpu
@pytest.mark.parametrize("kind", mega.KINDS)
def test_graphs(device, kind):
    layer, pack, (x, ids, weights) = given(kind, device)
    t = MoEEpTensors(x, ids, weights)
    layer.warmup()
    layer.stage_inputs(t)
    graph, staged = torch.cuda.CUDAGraph(), torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = layer(t)
    with torch.cuda.graph(staged):
        layer.stage_inputs(t)
        view = layer.compute_staged(output=None)
    for seed in (8, 9):
        for kept, new in zip((x, ids, weights), mega.inputs(0, mega.PER, len(x), seed, device), strict=True):
            kept.copy_(new)
        graph.replay()
        staged.replay()
        mega.check(kind, out, x, ids, weights, pack, None)
        assert_bitwise(view, out)
    fresh, _, _ = given(kind, device)
    with pytest.raises(RuntimeError, match="memory is made before a graph is captured"):
        with torch.cuda.graph(torch.cuda.CUDAGraph()):
            fresh(t)


X, IDS, S = torch.zeros(4, 256, dtype=torch.bfloat16), torch.zeros(4, 2, dtype=torch.int32), torch.zeros(4, 2)
E4M3 = torch.zeros(4, 256, dtype=torch.uint8).view(torch.float8_e4m3fn)
CALLS = [
    ("bf16", {"hidden_states": X[:, :128]}, "hidden_states: got (4, 128); allowed: [0 to 9, 256]"),
    ("bf16", {"hidden_states": X.half()}, "hidden_states: got torch.float16; allowed: torch.bfloat16"),
    ("blockwise", {"hidden_states": E4M3}, "hidden_states: got torch.float8_e4m3fn; allowed: torch.bfloat16"),
    ("bf16", {"hidden_states": X.repeat(3, 1)}, "hidden_states: got (12, 256); allowed: [0 to 9, 256]"),
    ("bf16", {"hidden_states": None}, "hidden_states: got None"),
    ("bf16", {"topk_ids": IDS.float()}, "topk_ids: got torch.float32; allowed: int32, int64"),
    ("bf16", {"topk_ids": IDS[:, :1]}, "topk_ids: got (4, 1); allowed: (4, 2)"),
    ("bf16", {"topk_weights": S[:3]}, "topk_weights: got (3, 2); allowed: (4, 2)"),
    ("bf16", {"topk_weights": IDS}, "topk_weights: got torch.int32; allowed: torch.float32"),
    ("bf16", {"topk_weights": None}, "topk_weights: got None"),
    ("bf16", {"scales": S}, "scales: got a tensor; allowed: None with torch.bfloat16 rows of bf16 experts"),
    ("blockwise", {"scales": S}, "scales: got a tensor; allowed: None with torch.bfloat16 rows of fp8_block"),
    ("bf16", {"fc1_alpha": S}, "fc1_alpha: got a tensor; allowed: None"),
    ("bf16", {"num_tokens_per_expert": IDS}, "num_tokens_per_expert: got a tensor; allowed: None"),
    ("bf16", {"output": X[:3]}, "output: got (3, 256); allowed: [4 or more, 256], contiguous"),
    ("bf16", {"output": X.float()}, "output: got torch.float32; allowed: bfloat16"),
    ("bf16", {"output": X.repeat(1, 2)[:, ::2]}, "output: got (4, 256); allowed: [4 or more, 256], contiguous"),
]  # fmt: skip


@pytest.mark.parametrize(("kind", "change", "message"), CALLS, ids=[m[:40] for *_, m in CALLS])
def test_bad_calls(device, kind, change, message):
    layer, _, _ = given(kind, device)
    call = {"hidden_states": X, "topk_ids": IDS, "topk_weights": S} | change
    call = {name: None if value is None else as_it_lies(value, device) for name, value in call.items()}
    with pytest.raises(ValueError, match="^" + re.escape(message)):
        layer(MoEEpTensors(**call))


def as_it_lies(value, device):
    """On another device with the same strides, which a plain copy packs."""
    return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=device).copy_(value)


def test_bad_calls_of_rows_that_are_quantised(device):
    layer, _, _ = given("blockwise", device, coded=True, quantize_input=False)
    ids, weights, rows = IDS.to(device), S.to(device), E4M3.to(device)
    for change, message in (
        ((X.to(device), None), "hidden_states: got torch.bfloat16; allowed: torch.float8_e4m3fn"),
        ((rows, None), "scales: got None"),
        ((rows, weights[:, :1]), "scales: got torch.float32 (4, 1); allowed: float32 (4, 2)"),
        ((rows, weights.half()), "scales: got torch.float16 (4, 2); allowed: float32 (4, 2)"),
    ):
        with pytest.raises(ValueError, match="^" + re.escape(message)):
            layer(MoEEpTensors(change[0], ids, weights, change[1]))


def test_bad_options(device):
    layer, _, (x, ids, weights) = given("bf16", device)
    t = MoEEpTensors(x, ids, weights)
    for most in (6, 10, True, 7.0):
        with pytest.raises(ValueError, match=f"^compile_tokens_per_rank: got {most}"):
            layer.stage_inputs(t, compile_tokens_per_rank=most)
    for most in (0, "3"):
        with pytest.raises(ValueError, match=f"^max_tokens_per_rank: got {most}"):
            layer.create_workspace(most)
    t.output = torch.empty_like(x)
    with pytest.raises(ValueError, match="^return_workspace_view: got True; allowed: False, with an output"):
        layer.forward(t, return_workspace_view=True)
    layer.stage_inputs(t)
    with pytest.raises(ValueError, match="^output: got"):
        layer.compute_staged(output=t.output[:6])


W13, W2 = torch.zeros(3, 256, 256).bfloat16(), torch.zeros(3, 256, 128).bfloat16()
C13, C2 = (torch.zeros(w.shape, dtype=torch.uint8).view(torch.float8_e4m3fn) for w in (W13, W2))
S13, S2 = torch.ones(3, 2, 2), torch.ones(3, 2, 1)


def made(kind="bf16", pack=(W13, W2), ranks=1, experts=3, hidden=256, top_k=2, transformed=None, **options):
    backend = MegaConfig(mega.kernel(kind, top_k=top_k), transformed_weights=transformed, **options)
    weights = MoEWeightPack(*pack) if isinstance(pack, tuple) else pack
    return MoEEpMegaLayer(BootstrapConfig(ranks, 0), FleetParams(experts, 9, hidden), weights, backend)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: made(pack=None), "weights: got None; allowed: a MoEWeightPack, without transformed_weights"),
        (lambda: made(pack=[W13, W2]), "weights: got list; allowed: a MoEWeightPack"),
        (lambda: made(pack=(W13, None)), "w2: got None"),
        (lambda: made("blockwise", (C13, C2, S13)), "w2_scale: got None; allowed: a tensor, as w13_scale is given"),
        (lambda: made("blockwise", (C13, C2, None, S2)), "w13_scale: got None; allowed: a tensor, as w2_scale is"),
        (lambda: made(pack=(W13[:2], W2)), "w13: got (2, 256, 256); allowed: (3, 256, 256)"),
        (lambda: made(pack=(W13, W2.mT)), "w2: got (3, 128, 256); allowed: (3, 256, 128)"),
        (lambda: made(pack=(W13, W2.float())), "w2: got torch.float32; allowed: torch.bfloat16, as w13"),
        (lambda: made(pack=(W13.half(), W2.half())), "w13: got torch.float16; allowed: bfloat16"),
        (lambda: made(pack=(W13, W2, S13, S2)), "w13_scale: got a tensor; allowed: None with bfloat16"),
        (lambda: made("blockwise", (W13, W2, S13, S2)), "w13_scale: got a tensor; allowed: None with torch.bfloat16"),
        (lambda: made("blockwise", (C13, C2)), "w13_scale: got None"),
        (lambda: made("blockwise", (C13, C2, S13[0], S2)), "w13_scale: got torch.float32 (2, 2); allowed: float32 (3"),
        (lambda: made("per_tensor", (C13, C2, S13, S2)), "w13_scale: got torch.float32 (3, 2, 2); allowed: float32 (3"),
        (lambda: made("blockwise", (W13.int(), W2.int())), "w13: got torch.int32"),
        (lambda: made("blockwise", (W13, W2), hidden=192), "token_hidden_size: got 192; allowed: a multiple of 128"),
        (lambda: made(ranks=2), "num_experts: got 3; allowed: a multiple of 2, the ranks"),
        (lambda: made(top_k=4), "top_k: got 4; allowed: at most 3, the experts"),
        (lambda: made(preprocess_weights=False), "transformed_weights: got None; allowed: a layer's, without"),
        (lambda: made(transformed=(W13, W2)), "transformed_weights: got tuple; allowed: ((w13, w13_scale)"),
        (lambda: made("blockwise", transformed=((W13, None), (W2, None))), "transformed_weights: w13: got torch.bfl"),
        (lambda: made(transformed=((W2, None), (W2, None))), "transformed_weights: w13: got (3, 256, 128)"),
        (lambda: FleetParams(0, 9, 256), "num_experts: got 0; allowed: an int of at least 1"),
        (lambda: FleetParams(3, True, 256), "max_tokens_per_rank: got True"),
        (lambda: FleetParams(3, 9, 256.0), "token_hidden_size: got 256.0"),
        (lambda: FleetParams(3, 9, 256, 1), "dtype_bytes: got 1; allowed: 2"),
        (lambda: FleetParams(3, 9, 256, algorithm="low latency"), "algorithm: got low latency; allowed: None"),
        (lambda: FleetParams(3, 9, 256, layout=1), "layout: got 1; allowed: None"),
        (lambda: MegaConfig("bf16"), "megakernel: got bf16; allowed: Bf16MegaMoeConfig or Fp8MegaMoeConfig"),
        (lambda: Bf16MegaMoeConfig(0, 2), "intermediate_size: got 0"),
        (lambda: Bf16MegaMoeConfig(128, 2, float("nan")), "gate_up_clamp: got nan"),
        (lambda: Bf16MegaMoeConfig(128, 2, "1"), "gate_up_clamp: got 1"),
        (lambda: Fp8MegaMoeConfig(128, 2, gate_up_clamp=-1), "gate_up_clamp: got -1; allowed: None, or a number above"),
        (lambda: Fp8MegaMoeConfig(128, 0), "top_k: got 0"),
        (lambda: Fp8MegaMoeConfig(128, 2, "tensor"), "fp8_scale_mode: got 'tensor'; allowed: 'blockwise', 'per_te"),
        (lambda: Fp8MegaMoeConfig(192, 2), "intermediate_size: got 192; allowed: a multiple of 128, for blockwise"),
        (
            lambda: Fp8MegaMoeConfig(128, 2, fc2_activation_dequant_scale=2.0),
            "fc2_activation_dequant_scale: got 2.0; allowed: 1, as blockwise rows",
        ),
        (
            lambda: Fp8MegaMoeConfig(128, 2, "per_tensor", fc1_activation_dequant_scale=0.0),
            "fc1_activation_dequant_scale: got 0.0; allowed: a number above 0",
        ),
    ],
)  # fmt: skip
def test_bad_sizes(make, message):
    with pytest.raises(ValueError, match="^" + re.escape(message)):
        make()


def test_other_things_in_place_of_records():
    fleet, backend = FleetParams(3, 9, 256), MegaConfig(mega.kernel("bf16"))
    pack, bootstrap = MoEWeightPack(W13, W2), BootstrapConfig(1, 0)
    for arguments, name in (
        ((1, fleet, pack, backend), "bootstrap"),
        ((bootstrap, 3, pack, backend), "fleet_params"),
        ((bootstrap, fleet, pack, backend.megakernel), "backend"),
    ):
        with pytest.raises(ValueError, match=f"^{name}: got"):
            MoEEpMegaLayer(*arguments)


def test_sizes_of_per_tensor_experts_are_any(device):
    """Hidden and intermediate sizes that are no multiples of 128."""
    if device.type == "cuda":
        torch.cuda.set_device(device)
    w13, w2 = (w.bfloat16().to(device) for w in (torch.randn(3, 96, 80) / 9, torch.randn(3, 80, 48) / 7))
    config, pack = Fp8MegaMoeConfig(48, 1, "per_tensor", **mega.STATIC), MoEWeightPack(w13, w2)
    layer = MoEEpMegaLayer(BootstrapConfig(1, 0), FleetParams(3, 5, 80), pack, MegaConfig(config))
    x, ids = torch.randn(5, 80, device=device).bfloat16(), torch.tensor([[0], [1], [2], [0], [0]], device=device)
    weights = torch.rand(5, 1, device=device)
    mega.check("per_tensor", layer(MoEEpTensors(x, ids, weights)), x, ids, weights, pack, None)
