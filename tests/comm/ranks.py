"""What each rank of the tests of upstream's other functions does."""

import pytest
import torch
import torch.distributed as dist

from flashinfer import comm
from flashinfer.comm import trtllm_mnnvl_ar as mnnvl
from flashinfer.comm.pcie_ipc_profile import PcieIpcProfileDecision
from flashinfer.comm.quantized_allreduce import quantized_all_reduce
from tests.ops.comm.allreduce_fusion import cases
from tests.ops.comm.allreduce_fusion.cases import BIAS, EPS

SHAPE = (5, 256)


def of_ranks(world, shape, device, seed=0, dtype=torch.bfloat16):
    made = [torch.randn(shape, generator=torch.Generator().manual_seed(10 * seed + r)) for r in range(world)]
    return [x.to(device, dtype) for x in made]


def calls(rank, world, device):
    trtllm(rank, world, device)
    mnnvl_calls(rank, world, device)
    pcie(rank, world, device)
    ulysses(rank, world, device)
    lse_reduce(rank, world, device)
    quantised(rank, world, device)


def trtllm(rank, world, device):
    """Every pattern, by the older calls; results as those of `allreduce_fusion` are checked."""
    handles, pointers, metadata = comm.trtllm_create_ipc_workspace_for_all_reduce_fusion(
        rank, world, 16, 256, group=dist.group.WORLD, create_metadata=True
    )
    tokens, hidden = SHAPE
    for seed, case in enumerate(cases.CASES):
        everyone = [cases.inputs(case, r, world, SHAPE, torch.bfloat16, device, seed) for r in range(world)]
        out, given = cases.results(case, SHAPE, torch.bfloat16, device), everyone[rank]
        of_norm = (given.get("residual_in"), out.get("residual_out"), out.get("norm_out"))
        if case.startswith("finalize"):
            if case != "finalize":
                continue
            comm.trtllm_moe_finalize_allreduce_fusion(
                given["input"], given["residual_in"], given["rms_gamma"], given["expanded_idx_to_permuted_idx"],
                out["norm_out"], out["residual_out"], None, None, pointers, False, rank, world, EPS,
                given["shared_expert_output"], given["expert_scale_factor"] / 2, 2.0, BIAS,
            )  # fmt: skip
            out.pop("output")
        elif case.startswith("reduce"):
            comm.trtllm_moe_allreduce_fusion(
                world, rank, tokens, hidden, pointers, False, given["residual_in"], given["rms_gamma"], EPS,
                out.get("scale_factor"), cases.EXPERTS, given["moe_reduction_scale_input"],
                given["moe_reduction_active_experts_token_input"], given["moe_reduction_token_input"].view(-1),
                out.get("layout_code"), out["output"], out["residual_out"], out["norm_out"], out.get("quant_out"),
                out.get("scale_out"), BIAS,
            )  # fmt: skip
        else:
            total = out.setdefault("output", torch.empty(SHAPE, dtype=torch.bfloat16, device=device))
            comm.trtllm_allreduce_fusion(
                given["input"].view(-1), world, rank, tokens, hidden, pointers, False, True, True, out["pattern"], None,
                total, *of_norm, out.get("quant_out"), out.get("scale_out"), given.get("rms_gamma"), EPS,
                out.get("scale_factor"), out.get("layout_code", 0), metadata, None, BIAS,
            )  # fmt: skip
        kind = cases.CASES[case][0]
        returned = out.get("output") if case == "plain" else _returned(kind, out)
        cases.check(case, everyone, out, returned, False)
    def sent(rows, metadata):
        total = torch.empty_like(rows)
        comm.trtllm_allreduce_fusion(
            rows, world, rank, *rows.shape, pointers, False, True, True, 0, None, total, *[None] * 9, metadata
        )  # fmt: skip
        return total

    # Rows of another length are as good, as long as there are no more elements.
    xs = of_ranks(world, (32, 128), device, 5)
    torch.testing.assert_close(sent(xs[rank], metadata).double(), sum(x.double() for x in xs), rtol=2.0**-7, atol=1e-2)
    for rows, changed, name in (
        (xs[rank].new_zeros(33, 128), {}, "max_token_num"),
        (xs[rank], {"tp_size": world + 1}, "tp_size"),
        (xs[rank], {"use_fp32_lamport": True}, "use_fp32_lamport"),
        (xs[rank].float(), {}, "use_fp32_lamport"),
    ):
        with pytest.raises(ValueError, match=name):
            sent(rows, metadata | changed)
    with pytest.raises(ValueError, match="metadata: got no tp_size"):
        sent(xs[rank], {name: value for name, value in metadata.items() if name != "tp_size"})
    with pytest.raises(ValueError, match="use_symm_dev_mem"):
        comm.trtllm_create_ipc_workspace_for_all_reduce_fusion(rank, world, 16, 256, use_symm_dev_mem=True)
    comm.trtllm_destroy_ipc_workspace_for_all_reduce_fusion(handles)


def _returned(pattern, out):
    from flashinfer.comm._patterns import PATTERNS

    return out["norm_out"] if PATTERNS[pattern].normed else out["quant_out"]


def mnnvl_calls(rank, world, device):
    mapping = comm.Mapping(world, rank, tp_size=world)
    ws, flags, count = mnnvl.get_allreduce_mnnvl_workspace(mapping, torch.bfloat16, None, 64 << 10)
    assert count == 32 << 10
    mnnvl.mpi_barrier()
    xs, (residual,) = of_ranks(world, SHAPE, device, 1), of_ranks(1, SHAPE, device, 2)
    gamma = torch.linspace(0.5, 1.5, SHAPE[1], device=device).bfloat16()
    total = sum(x.double() for x in xs)
    added = total + residual.double()
    norm = added * torch.rsqrt(added.square().mean(-1, keepdim=True) + 1e-5) * (gamma.double() + 1)
    near = {"rtol": 2.0**-7, "atol": 1e-6}
    for strategy in mnnvl.MNNVLAllreduceFusionStrategy:
        got = mnnvl.trtllm_mnnvl_allreduce(xs[rank], ws, False, None, strategy)
        torch.testing.assert_close(got.double(), total, **near)
    out, kept = mnnvl.trtllm_mnnvl_fused_allreduce_add_rmsnorm(xs[rank], residual, gamma, ws, 1e-5, weight_bias=1.0)
    torch.testing.assert_close(out.double(), norm, **near)
    torch.testing.assert_close(kept.double(), added, **near)
    old, older, plain = (torch.empty_like(xs[rank]) for _ in range(3))
    where = (0, 0, 0, flags, world, rank)
    mnnvl.trtllm_mnnvl_all_reduce(xs[rank], *where[:3], flags, world, rank, True, False, plain)
    mnnvl.trtllm_mnnvl_fused_allreduce_rmsnorm(
        old, older, xs[rank], 0, 0, 0, 0, flags, world, rank, gamma + 1, 1e-5, residual, False
    )  # fmt: skip
    torch.testing.assert_close(plain.double(), total, **near)
    torch.testing.assert_close(older.double(), norm, rtol=2.0**-6, atol=1e-6)
    kinds = mnnvl.MNNVLQuantType
    fp8 = mnnvl.trtllm_mnnvl_fused_allreduce_add_rmsnorm_quant(
        xs[rank], residual, gamma, ws, 1e-5, quant_type=kinds.FP8, output_scale=0.02, weight_bias=1.0
    )
    assert fp8[1] is None and fp8[3] is None
    torch.testing.assert_close(fp8[0].double() * 0.02, norm.clamp(-448 * 0.02, 448 * 0.02), rtol=2.0**-3, atol=1e-3)
    rows, scale, _, both = mnnvl.trtllm_mnnvl_fused_allreduce_add_rmsnorm_quant(
        xs[rank], residual, gamma, ws, 1e-5, torch.empty_like(residual), quant_type=kinds.DYNAMIC_FP8, weight_bias=1.0
    )
    torch.testing.assert_close(rows.double() * scale.double(), norm, rtol=2.0**-3, atol=1e-2)
    torch.testing.assert_close(both.double(), norm, **near)
    for layout, shape in ((comm.QuantizationSFLayout.LINEAR, (5, 16)), (0, (128, 16))):
        four = mnnvl.trtllm_mnnvl_fused_allreduce_add_rmsnorm_quant(
            xs[rank], residual, gamma, ws, 1e-5, quant_type=kinds.NVFP4, layout_code=layout, weight_bias=1.0
        )
        assert four[0].shape == (5, 128) and tuple(four[1].shape) == shape
    ws.destroy()


def pcie(rank, world, device):
    group = dist.group.WORLD
    pairs, alone = "pcieswitch-pairs", "rootcplx-noswitch"
    for asked, profile in ((pairs, pairs), ("pcieswitch", pairs), ("RootCplx", alone), (alone, alone)):
        assert comm.resolve_pcie_ipc_profile(group, asked) == PcieIpcProfileDecision(profile, "requested")
    with pytest.raises(ValueError, match="requested: got 'x'"):
        comm.resolve_pcie_ipc_profile(group, "x")
    with comm.PcieIpcAllReduceWorkspace(group, 4096) as ws:
        for seed, shape in enumerate(((4, 256), (2048,))):
            xs = of_ranks(world, shape, device, seed)
            assert ws.supports(xs[rank])
            total = sum(x.double() for x in xs)
            out = torch.empty_like(xs[rank])
            assert ws.all_reduce(xs[rank], out=out) is out
            staged = ws.launch_config(xs[rank])
            staged = type(staged)(staged.blocks, staged.threads, comm.PcieIpcVariant.STAGED)
            for result in (out, ws.all_reduce(xs[rank], config=staged)):
                torch.testing.assert_close(result.double(), total, rtol=2.0**-7, atol=1e-6)
            assert torch.equal(ws.all_gather(xs[rank]), torch.stack(xs))
            parts = of_ranks(world, (world, *shape), device, 7 + seed)
            kept = torch.empty_like(xs[rank])
            assert ws.reduce_scatter(parts[rank], out=kept) is kept
            truth = sum(x.double() for x in parts)[rank]
            torch.testing.assert_close(kept.double(), truth, rtol=2.0**-7, atol=1e-6)
        nothing = torch.zeros(world, 0, 5, dtype=torch.bfloat16, device=device)
        assert ws.all_gather(nothing[0]).shape == (world, 0, 5) and ws.reduce_scatter(nothing).shape == (0, 5)
        assert not ws.supports(torch.zeros(3, dtype=torch.bfloat16, device=device))
        assert not ws.supports(torch.zeros(8192, dtype=torch.bfloat16, device=device))
        assert ws.prepare([(4, 256), (1, 3)])[1, 3] is None and (256, 16) in ws.tune([256])
        ws.check()
        ws.reset()


def ulysses(rank, world, device):
    assert comm.resolve_ulysses_backend("auto", device=None).backend in ("nccl", "nvlink")
    batch, local, heads, dim = 2, 3, 2 * world, 8
    for backend in ("auto", "nccl"):
        made = comm.UlyssesCommunicator(max_elems=1 << 12, dtype=torch.float16, backend=backend)
        xs = of_ranks(world, (batch, local, heads, dim), device, 3, torch.float16)
        whole = torch.cat(xs, 1)
        mine = slice(2 * rank, 2 * rank + 2)
        got = made.scatter_heads(xs[rank], workspace=made.create_workspace())
        assert torch.equal(got, whole[:, :, mine])
        assert torch.equal(made.gather_heads(got), xs[rank])
        query, key, value = (of_ranks(world, (batch, local, heads, dim), device, s, torch.float16) for s in (4, 5, 6))
        out = torch.zeros_like(xs[rank])
        for head in range(2):
            band = made.scatter_qkv_head_chunk(
                query[rank], key[rank].transpose(1, 2).contiguous().transpose(1, 2), value[rank], head_offset=head,
                head_count=1,
            )  # fmt: skip
            truth = [torch.cat(x, 1)[:, :, 2 * rank + head, :] for x in (query, key, value)]
            assert torch.equal(band[:, :, 0], torch.cat(truth, -1))
            made.gather_output_head_chunk(
                band[..., -dim:].contiguous(), local_heads=2, head_offset=head, out=out
            )  # fmt: skip
        assert torch.equal(out, value[rank])
        made.check()
        assert made.decision.backend == made.backend
        assert made.fallback_reason == (made.decision.reason if (backend, made.backend) == ("auto", "nccl") else None)
        assert made.create_workspace(max_elems=5).max_elems == 5 and made.create_workspace().device == made.device
        for count in (0, (1 << 12) + 1):
            with pytest.raises(ValueError, match="max_elems: got"):
                made.create_workspace(max_elems=count)
        with made as same:
            assert same is made
        for call in (made.create_workspace, lambda m=made: m.scatter_heads(xs[rank])):
            with pytest.raises(RuntimeError, match="closed"):
                call()


def lse_reduce(rank, world, device):
    ws = comm.decode_cp_a2a_lse_reduce_create_workspace(8, 4, world, 16, torch.bfloat16, dist.group.WORLD)
    o = of_ranks(world, (3, 4, world, 16), device, 8)
    lse = of_ranks(world, (3, 4, world), device, 9, torch.float32)
    for r in range(world):
        # A rank without keys, which has left anything; and a row without any.
        lse[r][0, r % 4] = -torch.inf
        o[r][0, r % 4] = torch.nan
        lse[r][2, 3] = -torch.inf
    for mode, base in (("base2", 2.0), ("basee", torch.e)):
        got = comm.decode_cp_a2a_lse_reduce(o[rank], lse[rank], ws, rank, world, mode)
        values = torch.stack([x[:, :, rank].double() for x in o])
        logs = torch.stack([x[:, :, rank].double() for x in lse])
        weights = base**logs
        truth = torch.where(weights[..., None] > 0, weights[..., None] * values, 0).sum(0)
        total = weights.sum(0)[..., None]
        truth = torch.where(total > 0, truth / total, 0)
        torch.testing.assert_close(got.double(), truth, rtol=2.0**-7, atol=1e-6)


def quantised(rank, world, device):
    for shape in ((1000,), (3, 512), (0,)):
        xs = of_ranks(world, shape, device, 11)
        total = sum(x.double() for x in xs)
        out = quantized_all_reduce(xs[rank], dist.group.WORLD, scale_group=128)
        assert out.shape == shape and out.dtype == torch.bfloat16
        if out.numel():
            # Half a step of e4m3 for each rank's rows, and one for the sum.
            largest = sum(x.double().abs().max() for x in xs)
            assert float((out.double() - total).abs().max()) <= 2.0**-4 * float(largest + total.abs().max())
            assert float((out.double() - total).norm() / total.norm()) < 0.05
            same = [torch.empty_like(out) for _ in range(world)]
            dist.all_gather(same, out)
            assert all(torch.equal(each, out) for each in same)
