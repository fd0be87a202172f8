"""The fused all-reduce: patterns against float64, ranks in one process and as processes, faults, bad input."""

import contextlib
import re

import pytest
import torch

from flashinfer import comm
from flashinfer.comm import AllReduceFusionPattern as P
from flashinfer.comm import _workspaces
from flashinfer.comm import allreduce as public
from flashinfer.ops.comm.allreduce_fusion import config
from tests.ops.comm import processes, simulate
from tests.ops.comm.allreduce_fusion import cases

RANKS = "tests.ops.comm.allreduce_fusion.ranks"


@pytest.fixture
def in_one_process(monkeypatch):
    """Makes workspaces of all ranks in this process, and runs their calls when all have been made."""
    recorder = simulate.Recorder(public.op)
    monkeypatch.setattr(public, "op", recorder)

    def make(world, most=(64, 512), dtype=torch.float32, one_shot=True):
        row = most[1] * dtype.itemsize
        monkeypatch.setattr(_workspaces, "connect", simulate.connector([]))
        made = [public.AllReduceFusionWorkspace(world, rank) for rank in range(world)]
        for rank, ws in enumerate(made):
            ws._open(simulate.Ranks(rank, world), most[0] * row, row, torch.device("cpu"), one_shot)
        return made

    make.run = recorder.run
    return make


# shape and dtype, ranks, one shot
HOW = {
    "plain": ((67, 96), torch.float32, 2, True),
    "norm": ((3, 200), torch.float16, 3, False),
    "fp8": ((2, 256), torch.float16, 2, True),
    "fp4 out": ((3, 160), torch.float32, 2, True),
    "group out": ((3, 384), torch.float16, 2, True),
    "row": ((2, 96), torch.float32, 3, False),
    "reduce fp4": ((2, 128), torch.float16, 2, False),
    "finalize fp8": ((3, 128), torch.float32, 2, True),
}


@pytest.mark.parametrize("case", HOW)
def test_kernels_in_one_process(in_one_process, case):
    shape, dtype, world, one_shot = HOW[case]
    workspaces = in_one_process(world)
    for seed, layout in ((0, 0), (1, 2)):
        everyone = [cases.inputs(case, rank, world, shape, dtype, seed=seed) for rank in range(world)]
        outs = [cases.results(case, shape, dtype, layout=layout) for _ in range(world)]
        returned = [
            comm.allreduce_fusion(workspace=w, **given, **out, use_oneshot=one_shot)
            for w, given, out in zip(workspaces, everyone, outs, strict=True)
        ]
        in_one_process.run()
        for w, out, back in zip(workspaces, outs, returned, strict=True):
            w.check()
            cases.check(case, everyone, out, back, not one_shot)
            assert torch.equal(back.view(torch.uint8), returned[0].view(torch.uint8))


def test_a_rank_that_does_not_come_is_named_once_for_all(in_one_process):
    first, second = in_one_process(2)
    x = torch.randn(3, 64)
    comm.allreduce_fusion(x, first, P.kAllReduce)
    in_one_process.run()
    with pytest.raises(TimeoutError, match=r"all-reduce: rank 0 waited 0.5 s for rank 1 in exchange 1"):
        comm.allreduce_fusion(x, first, P.kAllReduce)
    first.reset()
    second.reset()
    calls = [comm.allreduce_fusion(x, w, P.kAllReduce) for w in (first, second)]
    in_one_process.run()
    assert all(torch.equal(total, x + x) for total in calls)


@pytest.mark.parametrize("case", HOW)
def test_results_of_a_failed_call_are_nan(in_one_process, case):
    shape, dtype, world, one_shot = HOW[case]
    ws = in_one_process(world)[0]
    given, out = cases.inputs(case, 0, world, shape, dtype), cases.results(case, shape, dtype)
    if case == "plain":
        out["output"] = torch.full(shape, 777.0)
    comm.allreduce_fusion(workspace=ws, **given, **out, use_oneshot=one_shot)
    for tensor in out.values():
        if isinstance(tensor, torch.Tensor) and tensor.numel() > 1:
            tensor.copy_(torch.full(tensor.shape, 7, dtype=torch.uint8).to(tensor.dtype))
    in_one_process.run()
    for name in ("output", "residual_out", "norm_out"):
        assert out.get(name) is None or bool(out[name].isnan().all()), name
    for name in ("quant_out", "scale_out"):
        tensor = out.get(name)
        if tensor is not None and tensor.dtype == torch.float32:
            assert bool(tensor.isnan().all())
        elif tensor is not None and "fp4" not in case:
            assert bool((tensor.clone(memory_format=torch.contiguous_format).view(torch.uint8) == 0xFF).all())
        elif name == "scale_out" and tensor is not None:
            # The factors of real rows; those of padding are 0.
            codes = tensor.contiguous().view(torch.uint8)
            assert int((codes == 0xFF).sum()) >= shape[0] * shape[1] // 16 and set(codes.unique().tolist()) <= {0, 0xFF}
    with pytest.raises(TimeoutError, match="all-reduce: rank 0 waited 0.5 s for rank [12]"):
        ws.destroy()
    # It has raised, and is destroyed.
    ws.destroy()
    with pytest.raises(ValueError, match="destroyed"):
        ws.check()


def test_nothing_is_sent_after_a_failure(in_one_process):
    first, second = in_one_process(2)
    x, out = torch.randn(3, 64), torch.full((3, 64), torch.nan)
    for _ in range(2):
        public._run(first, public.PATTERNS[P.kAllReduce], x, 0, *_plain(x, out), ("", ""), None)
        in_one_process.run()
    # The late rank is served what was sent for its first call, and its second waits in vain.
    sums = [comm.allreduce_fusion(2 * x, second, P.kAllReduce)]
    in_one_process.run()
    second.check()
    assert torch.equal(sums[0], x + 2 * x)
    comm.allreduce_fusion(x, second, P.kAllReduce)
    in_one_process.run()
    with pytest.raises(TimeoutError, match="rank 1 waited 0.5 s for rank 0 in exchange 2"):
        second.check()


def _plain(x, out):
    return public.Rows(x), public.Norm(), public.Results(out)


def test_ranks_with_other_sizes(in_one_process):
    workspaces = in_one_process(2)
    for elements, w in zip((4096, 4090), workspaces, strict=True):
        comm.allreduce_fusion(torch.randn(elements), w, P.kAllReduce)
    in_one_process.run()
    with pytest.raises(ValueError, match="all-reduce: rank 0 came to exchange 1 with other sizes than rank 1"):
        workspaces[1].check()


@pytest.mark.parametrize("case", cases.CASES)
@pytest.mark.parametrize("one_shot", [True, False])
def test_a_group_of_one(device, case, one_shot):
    given = cases.inputs(case, 0, 1, (5, 256), torch.bfloat16, device)
    out = cases.results(case, (5, 256), torch.bfloat16, device)
    with torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext():
        returned = comm.allreduce_fusion(workspace=alone(), use_oneshot=one_shot, **given, **out)
    cases.check(case, [given], out, returned)


def test_faults(tmp_path):
    said = processes.run(3, f"{RANKS}:faults", tmp_path, 1.0, killed=(2,))
    assert "rank 0 waited 1 s for rank 1" in said[0][0]
    assert re.search("rank 1 waited 1 s for rank [02] in exchange 2.*gave up", said[1][0])
    assert said[0][1].startswith("ValueError: all-reduce: rank 0 came to exchange")
    assert "rank 2" in said[0][2]
    assert float(said[0][3].split()[-1]) < 10


@pytest.mark.gpu
@pytest.mark.parametrize("world", [2, 4])
@pytest.mark.parametrize("what", ["every_pattern", "overridden"])
def test_processes_on_gpus(tmp_path, world, what):
    _needs(world)
    said = processes.run(world, f"{RANKS}:{what}", tmp_path, device="cuda")
    assert said[0][0].startswith("peer" if what == "every_pattern" else "collective (NCCL): refused for a test")


@pytest.mark.gpu
@pytest.mark.parametrize("world", [2, 4])
def test_faults_on_gpus(tmp_path, world):
    _needs(world)
    said = processes.run(world, f"{RANKS}:faults", tmp_path, 2.0, device="cuda", killed=(world - 1,))
    assert "rank 0 waited 2 s for rank 1" in said[0][0]


@pytest.mark.matrix
@pytest.mark.parametrize("world", [2, 3])
def test_many_calls(tmp_path, world):
    processes.run(world, f"{RANKS}:many_calls", tmp_path, 60)


@pytest.mark.gpu
@pytest.mark.parametrize("world", [2, 4])
def test_many_calls_on_gpus(tmp_path, world):
    _needs(world)
    processes.run(world, f"{RANKS}:many_calls", tmp_path, 10_000, device="cuda")


@pytest.mark.gpu
@pytest.mark.parametrize("world", [2, 4])
def test_processes_that_share_a_gpu(tmp_path, world):
    """Peers' memory by CUDA IPC, and waits for ranks that do not run at the same time."""
    said = processes.run(world, f"{RANKS}:every_pattern", tmp_path, device="cuda:0")
    assert said[0][0].startswith("peer")
    processes.run(world, f"{RANKS}:many_calls", tmp_path, 500, device="cuda:0")


@pytest.mark.gpu
def test_faults_on_a_shared_gpu(tmp_path):
    said = processes.run(3, f"{RANKS}:faults", tmp_path, 2.0, device="cuda:0", killed=(2,))
    assert "rank 0 waited 2 s for rank 1" in said[0][0]


def _needs(world):
    if torch.cuda.device_count() < world:
        pytest.skip(f"needs {world} GPUs, and there are {torch.cuda.device_count()}")


def alone(**options):
    return comm.create_allreduce_fusion_workspace(
        **{"world_size": 1, "rank": 0, "max_token_num": 8, "hidden_dim": 256, "dtype": torch.float32} | options
    )


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"backend": "nccl"}, "backend: got 'nccl'"),
        ({"world_size": 2}, "world_size: got 2; allowed: 1, the size without a group"),
        ({"rank": 1}, "rank: got 1"),
        ({"max_token_num": 0}, "max_token_num: got 0"),
        ({"hidden_dim": None}, "hidden_dim: got None"),
        ({"dtype": torch.int8}, "dtype: got torch.int8"),
        ({"top_k": 8}, "top_k: got 8; allowed: None"),
    ],
)
def test_bad_workspaces(options, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        alone(**options)


BAD = [
    ("plain", {"pattern": 13}, "pattern: got 13"),
    ("plain", {"input": torch.ones(8, 256, dtype=torch.int32)}, "input: got torch.int32"),
    ("plain", {"input": torch.ones(9, 512)}, "input: got 18432 bytes; allowed: what the workspace was made for"),
    ("plain", {"norm_out": torch.ones(2, 128)}, "norm_out: got a tensor; allowed: None"),
    ("norm", {"residual_in": None}, "residual_in: got None"),
    ("norm", {"rms_gamma": torch.ones(127)}, "rms_gamma: got (127,)"),
    ("norm", {"residual_in": torch.ones(128, 2).T}, "residual_in: got (2, 128); allowed: (2, 128), contiguous"),
    ("norm", {"quant_out": torch.ones(2, 128)}, "quant_out: got a tensor"),
    ("norm", {"layout_code": 3}, "layout_code: got 3"),
    ("norm", {"expert_scale_factor": torch.ones(2, 2)}, "expert_scale_factor: got a value"),
    ("fp8", {"quant_out": None}, "quant_out: got None"),
    ("fp8", {"scale_factor": torch.ones(2)}, "scale_factor: got torch.float32 (2,)"),
    ("fp4", {"layout_code": 3}, "layout_code: got 3"),
    ("fp4", {"scale_out": torch.ones(3)}, "scale_out: got torch.float32 (3,)"),
    ("group", {"block_quant_group_size": 64}, "block_quant_group_size: got 64"),
    ("row", {"scale_out": torch.ones(2)}, "scale_out: got (2,)"),
    ("reduce", {"moe_reduction_device_num_experts": 3}, "moe_reduction_active_experts_token_input: got (2, 2, 128)"),
    ("finalize", {"expanded_idx_to_permuted_idx": torch.ones(2, 3)}, "expanded_idx_to_permuted_idx: got torch.float32"),
]


@pytest.mark.parametrize(("case", "change", "message"), BAD, ids=[f"{c} {next(iter(a))}" for c, a, _ in BAD])
def test_bad_calls(case, change, message):
    given = cases.inputs(case, 0, 1, (2, 128), torch.float32) | cases.results(case, (2, 128), torch.float32)
    with pytest.raises(ValueError, match=re.escape(message)):
        comm.allreduce_fusion(**{"workspace": alone()} | given | change)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"input": None}, "input: got None; allowed: a torch.Tensor"),
        ({"residual_in": [1.0]}, "residual_in: got a list; allowed: a torch.Tensor"),
        ({"norm_out": 3}, "norm_out: got 3; allowed: a torch.Tensor"),
        ({"rms_eps": [1e-5]}, "rms_eps: got a list; allowed: a number"),
    ],
)
def test_values_of_other_kinds(change, message):
    given = cases.inputs("norm", 0, 1, (5, 256), torch.bfloat16)
    with pytest.raises(ValueError, match=f"^{message}") as raised:
        comm.allreduce_fusion(workspace=alone(), **given | cases.results("norm", (5, 256), torch.bfloat16) | change)
    assert isinstance(raised.value, TypeError)


def test_rows_that_experts_have_not():
    given = cases.inputs("finalize", 0, 1, (5, 256), torch.bfloat16)
    given["expanded_idx_to_permuted_idx"][2, 1] = len(given["input"])
    with pytest.raises(ValueError, match="^expanded_idx_to_permuted_idx: got .* 20; allowed: .* 19"):
        comm.allreduce_fusion(workspace=alone(), **given | cases.results("finalize", (5, 256), torch.bfloat16))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda g: {"output": g["residual_in"]}, "output: got the memory of residual_in"),
        (lambda g: {"weight_bias": torch.zeros(2)}, r"weight_bias: got a tensor \(2,\); allowed: a number"),
        (lambda g: {"rms_eps": torch.zeros(2)}, r"rms_eps: got a tensor \(2,\); allowed: a number"),
    ],
)
def test_a_sum_in_the_residuals_place_and_numbers_that_are_several(change, message):
    given = cases.inputs("norm", 0, 1, (5, 256), torch.bfloat16)
    given |= cases.results("norm", (5, 256), torch.bfloat16)
    with pytest.raises(ValueError, match=f"^{message}"):
        comm.allreduce_fusion(workspace=alone(), **given | change(given))


@pytest.mark.parametrize("case", ["fp8", "fp4", "row", "group"])
def test_codes_in_a_flat_tensor(case, device):
    given = cases.inputs(case, 0, 1, (5, 256), torch.bfloat16, device)
    with torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext():
        first, second = (cases.results(case, (5, 256), torch.bfloat16, device) for _ in range(2))
        expected = comm.allreduce_fusion(workspace=alone(), **given, **first)
        second["quant_out"] = second["quant_out"].view(-1)
        flat = comm.allreduce_fusion(workspace=alone(), **given, **second)
    assert flat is second["quant_out"] and torch.equal(flat.view(torch.uint8), expected.view(torch.uint8).view(-1))


def test_no_bias_of_the_weight():
    given = cases.inputs("norm", 0, 1, (5, 256), torch.bfloat16)
    out = cases.results("norm", (5, 256), torch.bfloat16)
    expected = comm.allreduce_fusion(workspace=alone(), **given | out | {"weight_bias": 0.0}).clone()
    assert torch.equal(comm.allreduce_fusion(workspace=alone(), **given | out | {"weight_bias": None}), expected)


@pytest.mark.parametrize("case", cases.CASES)
def test_options_that_a_pattern_does_not_use_change_nothing(case):
    """vLLM names a layout of FP4 scales with every pattern; upstream ignores it, scales, groups and biases so."""
    given = cases.inputs(case, 0, 1, (5, 256), torch.bfloat16)
    out = cases.results(case, (5, 256), torch.bfloat16)
    unused = {"layout_code": comm.QuantizationSFLayout.SWIZZLED_128x4, "block_quant_group_size": 128, "fp32_acc": True}
    unused["scale_factor" if not cases.CASES[case][1] else "launch_with_pdl"] = torch.ones(1)
    if case == "plain":
        unused["weight_bias"] = 1.0
    scales = torch.full((5,), 777.0)
    if cases.CASES[case][1] == "fp8":
        unused["scale_out"] = scales
    back = comm.allreduce_fusion(workspace=alone(max_token_num=32), **{**given, **unused, **out})
    cases.check(case, [given], out, back, False)
    assert (scales == 777).all()


def test_sizes_of_a_workspace():
    ws = alone()
    assert ws.is_buffer_size_sufficient(1, 8, 256, torch.float32)
    assert ws.is_buffer_size_sufficient(tp_size=1, num_tokens=16, hidden_dim=256, dtype=torch.bfloat16)
    assert not ws.is_buffer_size_sufficient(1, 9, 256, torch.float32)
    assert not ws.is_buffer_size_sufficient(2, 1, 256, torch.float32)


@pytest.mark.parametrize("world", [1, 2, 8])
@pytest.mark.parametrize("one_shot", [True, False])
def test_an_area_holds_any_shape_of_its_bytes(world, one_shot):
    nbytes = 2048 * 4096 * 2
    area = config.area(nbytes, 4096 * 2, world, one_shot)
    for row in (2, 1024, 8192, 16384, 32768):
        for rows in (1, 7, 64, 65, nbytes // row):
            assert config.needed_area(min(rows * row, nbytes), row, world, one_shot) <= area


def test_a_destroyed_workspace_is_refused():
    ws = alone()
    ws.destroy()
    ws.destroy()
    with pytest.raises(ValueError, match="workspace: got one that is destroyed"):
        comm.allreduce_fusion(torch.ones(4), ws, P.kAllReduce)


def test_a_workspace_that_gives_its_memory_up_and_takes_it_again():
    ws, x = alone(), torch.ones(4)
    ws.deadline = 3.0
    with pytest.raises(ValueError, match="workspace: got one in use"):
        ws.checkpoint_restore()
    ws.checkpoint_prepare()
    with pytest.raises(ValueError, match="workspace: got one that is given up by checkpoint_prepare"):
        comm.allreduce_fusion(x, ws, P.kAllReduce)
    ws.checkpoint_restore()
    assert ws.deadline == 3.0 and torch.equal(comm.allreduce_fusion(x, ws, P.kAllReduce), x)
    ws.checkpoint_prepare()
    ws.destroy()
    with pytest.raises(ValueError, match="workspace: got one that is destroyed"):
        ws.checkpoint_restore()
