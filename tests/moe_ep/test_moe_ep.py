"""Expert-parallel communication: ranks as processes against a plain layer, one rank alone, and bad input."""

import re

import pytest
import torch

from flashinfer.fused_moe import QuantFormat
from flashinfer.moe_ep import (
    BootstrapConfig,
    MoEEpCommParams,
    NVLinkOneSidedAlltoAll,
    NVLinkOneSidedConfig,
    available_communication_backends,
    create_communication,
)
from tests.moe_ep import ranks
from tests.ops.comm import processes

LAYERS = "tests.moe_ep.ranks:layers"


@pytest.mark.matrix
def test_layers_over_processes(tmp_path):
    processes.run(3, LAYERS, tmp_path)


@pytest.mark.gpu
@pytest.mark.parametrize("world", [2, 4])
def test_layers_over_processes_that_share_a_gpu(tmp_path, world):
    processes.run(world, LAYERS, tmp_path, device="cuda:0")


def alone(dispatch_format=None, config=None, **sizes):
    sizes = {"num_experts": 4, "top_k": 2, "max_tokens_per_rank": 8, "hidden_size": 128} | sizes
    params = MoEEpCommParams(**sizes, dispatch_format=dispatch_format)
    return create_communication(BootstrapConfig(1, 0), params, config or "nvlink_one_sided")


def test_what_vllm_reads():
    sizes = {
        None: 256, "BF16": 256, "FP16": 256, "FP8PerTensor": 128, "DeepSeekFp8": 132, "MXFP8": 132, "NVFP4": 72,
        "MXFP4": 68,
    }  # fmt: skip
    for name, nbytes in sizes.items():
        number_format = None if name is None else QuantFormat[name]
        assert MoEEpCommParams(4, 2, 8, 128, None, number_format).dispatch_bytes_per_token == nbytes
    # Blocks that are not whole count as whole.
    for name, nbytes in {"DeepSeekFp8": 104, "MXFP8": 104, "NVFP4": 57, "MXFP4": 54}.items():
        assert MoEEpCommParams(4, 2, 8, 100, None, QuantFormat[name]).dispatch_bytes_per_token == nbytes
    assert MoEEpCommParams(4, 2, 8, 100, torch.float32).dispatch_bytes_per_token == 400
    assert hasattr(MoEEpCommParams, "dispatch_format") and NVLinkOneSidedAlltoAll.is_platform_supported()
    assert available_communication_backends() == ["nvlink_one_sided"]
    ep = alone(config=NVLinkOneSidedConfig(extra_payload_bytes_per_token=16))
    assert isinstance(ep, NVLinkOneSidedAlltoAll) and ep.params.top_k == 2
    assert ep.config.extra_payload_bytes_per_token == 16 and ep.num_local_experts == 4
    assert ep.is_workload_feasible(8) and not ep.is_workload_feasible(9)
    by_option = create_communication(BootstrapConfig(1, 0), ep.params, "nvlink_one_sided", config=ep.config)
    assert by_option.config is ep.config


@pytest.mark.parametrize("name", ["DeepSeekFp8", "MXFP8", "NVFP4", "FP8PerTensor"])
def test_rows_that_the_caller_has_quantised(device, name):
    """They travel as they are, codes and scales, and need no global scale."""
    if device.type == "cuda":
        torch.cuda.set_device(device)
    x, ids, weights = ranks.inputs(0, 1, 5, 0, device)
    ep = alone(QuantFormat[name], num_experts=2, top_k=ranks.TOP_K - 1)
    global_scale = ranks.FORMATS[name][0]
    got = ep.dispatch(x, ids[:, :2], weights[:, :2].contiguous(), global_scale=global_scale)
    real = (got.topk_ids != -1).any(1)
    codes = got.hidden_states[real].clone()
    scale = None if got.hidden_states_scale is None else got.hidden_states_scale[real].clone()
    ep.combine(torch.zeros(8, 128, dtype=torch.bfloat16, device=device))
    kept = (ids[:, :2] >= 0).any(1)
    again = ep.dispatch(codes, ids[:, :2][kept], hidden_states_scale=scale)
    assert again.topk_weights is None
    assert torch.equal(again.hidden_states[: len(codes)].view(torch.uint8), codes.view(torch.uint8))
    if scale is not None:
        assert torch.equal(again.hidden_states_scale[: len(codes)], scale)


@pytest.mark.parametrize("name", [None, "BF16", "FP16", "MXFP8", "DeepSeekFp8"])
def test_layers_of_other_sizes_and_formats_share_the_buffers(device, name):
    """vLLM makes one communication for all layers, as large as the largest: what a dispatch is given travels as is."""
    if device.type == "cuda":
        torch.cuda.set_device(device)
    number_format = None if name is None else QuantFormat[name]
    ep = alone(number_format, NVLinkOneSidedConfig(extra_payload_bytes_per_token=256), hidden_size=256)
    ids = torch.tensor([[0, 3], [-1, -1], [2, 1]], device=device)
    codes = torch.randint(256, (3, 224), dtype=torch.uint8, device=device)
    for rows, scale in (
        (torch.randn(3, 128, device=device).bfloat16(), None),
        (torch.randn(3, 128, device=device).half(), None),
        (codes, torch.randint(256, (3, 8), dtype=torch.uint8, device=device)),  # rows and scales padded to 8 blocks
        (codes.view(torch.float8_e4m3fn), torch.rand(3, 2, device=device)),
        (codes, None),
    ):
        got = ep.dispatch(rows, ids, hidden_states_scale=scale, max_tokens_per_rank=3)
        real = (got.topk_ids != -1).any(1)
        assert real.sum() == 2 and got.hidden_states.dtype == rows.dtype
        assert torch.equal(got.hidden_states[real].view(torch.uint8), rows[[0, 2]].view(torch.uint8))
        assert (got.hidden_states_scale is None) == (scale is None)
        if scale is not None:
            assert torch.equal(got.hidden_states_scale[real], scale[[0, 2]])
        # A layer's results are as long as its own rows.
        back = torch.where(real[:, None], 2.0, torch.nan).bfloat16().expand(3, 96).contiguous()
        out = torch.full((3, 96), torch.nan, dtype=torch.float32, device=device)
        assert ep.combine(back, output=out) is out
        assert out.tolist() == [[2.0] * 96, [0.0] * 96, [2.0] * 96]


X, IDS = torch.zeros(4, 128, dtype=torch.bfloat16), torch.zeros(4, 2, dtype=torch.int32)
BAD = [
    (None, {"hidden_states": torch.zeros(4, 4096)}, "workspace: got 5248 bytes on each rank"),
    (None, {"hidden_states_scale": torch.zeros(3, 4)}, "input_payloads[1]: got (3, 4)"),
    (None, {"topk_ids": IDS.float()}, "topk_ids: got torch.float32"),
    (None, {"topk_ids": IDS[:3]}, "topk_ids: got (3, 2); allowed: (4, 2)"),
    (None, {"topk_weights": torch.zeros(4, 3)}, "topk_weights: got (4, 3)"),
    (None, {"max_tokens_per_rank": 9}, "max_tokens_per_rank: got 9; allowed: 1 to 8"),
    (None, {"active_rank_mask": IDS}, "active_rank_mask: got a mask"),
    (None, {"eplb_local_stats": IDS}, "eplb_local_stats: got a tensor"),
    (None, {"global_scale": 2.0}, "global_scale: got 2.0; allowed: None"),
    ("NVFP4", {}, "global_scale: got None"),
    ("MXFP8", {"global_scale": 2.0}, "global_scale: got 2.0; allowed: None"),
]


@pytest.mark.parametrize(("name", "change", "message"), BAD, ids=[m[:40] for *_, m in BAD])
def test_bad_dispatches(name, change, message):
    if torch.cuda.is_available():
        pytest.skip("tensors of these calls are on the CPU; this machine has a GPU")
    ep = alone(None if name is None else QuantFormat[name])
    with pytest.raises(ValueError, match=re.escape(message)):
        ep.dispatch(**{"hidden_states": X, "topk_ids": IDS} | change)


PARAMS = MoEEpCommParams(4, 2, 8, 64)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: BootstrapConfig(2, 2), "rank: got 2"),
        (lambda: BootstrapConfig(0, 0), "world_size: got 0"),
        (lambda: BootstrapConfig(1, None), "rank: got None"),
        (lambda: BootstrapConfig(1.5, 0), "world_size: got 1.5"),
        (lambda: BootstrapConfig(1, 0, device="cuda"), "device: got 'cuda'"),
        (lambda: alone(top_k=5), "top_k: got 5"),
        (lambda: alone(invalid_expert_id=3), "invalid_expert_id: got 3"),
        (lambda: alone(dtype=torch.int8), "dtype: got torch.int8"),
        (lambda: alone(QuantFormat.INT4), "dispatch_format: got"),
        (lambda: alone(config="nixl"), "backend: got 'nixl'; allowed: 'nvlink_one_sided'"),
        (lambda: alone(config=NVLinkOneSidedConfig(enable_rank_mask=True)), "enable_rank_mask: got True"),
        (lambda: alone(config=NVLinkOneSidedConfig(extra_payload_bytes_per_token=-1)), "extra_payload_bytes"),
        (lambda: create_communication(BootstrapConfig(1, 0), PARAMS, "nvlink_one_sided", x=1), "options: got x"),
    ],
)  # fmt: skip
def test_bad_sizes(make, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        make()


@pytest.mark.parametrize("in_place", [False, True])
def test_rows_are_rounded_on_their_way_back(device, in_place):
    if device.type == "cuda":
        torch.cuda.set_device(device)
    ep = alone(config=NVLinkOneSidedConfig(use_low_precision_combine=True))
    ep.dispatch(X.to(device), IDS.to(device))
    rows = (torch.randn(8, 128, device=device) * 200).bfloat16()
    given = ep.get_combine_input_buffer(torch.bfloat16).copy_(rows) if in_place else rows
    out = ep.combine(given)
    rounded = rows.float().clamp(-448, 448).to(torch.float8_e4m3fn)[: len(X)].to(torch.bfloat16)
    assert out.dtype == torch.bfloat16 and torch.equal(out, rounded)


def test_calls_out_of_turn(device):
    if device.type == "cuda":
        torch.cuda.set_device(device)
    ep = alone()
    out = torch.zeros(8, 128, dtype=torch.bfloat16, device=device)
    for call in (lambda: ep.combine(out), lambda: ep.get_combine_input_buffer(torch.bfloat16)):
        with pytest.raises(RuntimeError, match="a combine comes after a dispatch"):
            call()
    ep.dispatch(X.to(device), IDS.to(device))
    with pytest.raises(RuntimeError, match="a dispatch waits for its combine"):
        ep.dispatch(X.to(device), IDS.to(device))
    with pytest.raises(ValueError, match="expert_output: got"):
        ep.combine(out[:7])
    with pytest.raises(ValueError, match="expert_output: got torch.float32"):
        ep.combine(out.float())
    ep.combine(out)
    ep.dispatch(X.to(device), IDS.to(device))
    ep.alltoall.reset()
    ep.dispatch(X.to(device), IDS.to(device))
    other = alone()
    other.dispatch(X.to(device), IDS.to(device))
    with pytest.raises(RuntimeError, match="a combine comes after a dispatch"):
        ep.combine(out)
    other.combine(out)
    ep.dispatch(X.to(device), IDS.to(device))
    ep.combine(out)
    ep.destroy()
    with pytest.raises(RuntimeError, match="destroyed"):
        ep.dispatch(X.to(device), IDS.to(device))
