"""What each rank of the multi-process tests does."""

import dataclasses
import os
import signal
import time

import torch
import torch.distributed as dist

from flashinfer import comm
from tests.ops.comm.alltoall import cases

# tokens of each rank, by the rank modulo their number, and the runtime maximum
TURNS = [((5, 0, 9, 1), 9), ((0, 0), 4), ((1, 7), 16), ((16,), 16)]


def exchange(rank, world, device, most=16):
    mapping = comm.Mapping(world_size=world, rank=rank, tp_size=world, moe_ep_size=world)
    config = comm.MnnvlConfig(comm_backend=comm.TorchDistBackend(dist.group.WORLD))
    return comm.MoeAlltoAll(
        mapping, most, cases.TOP_K, world * cases.PER, hidden_size=2 * cases.HIDDEN, mnnvl_config=config,
        eplb_stats_num_experts=3,
    )  # fmt: skip


def layers(rank, world, device):
    """Dispatches and combines with tokens that are uneven, none, or many; blocks; the process's own graph."""
    both = [exchange(rank, world, device) for _ in range(2)]
    assert both[0].workspace.data_ptr() == both[1].workspace.data_ptr()
    print(both[0].capability.transport)
    for seed, (counts, most) in enumerate(TURNS):
        a2a = both[seed // 2]
        dtype = (torch.bfloat16, torch.float32)[seed % 2]
        everyone = [cases.inputs(r, world, counts[r % len(counts)], dtype, device, seed) for r in range(world)]
        x, ids, weights = everyone[rank]
        stats = torch.tensor([seed, rank, 7], dtype=torch.int32, device=device) if seed % 2 else None
        received = a2a.dispatch(ids, cases.payloads(x, ids, weights), most, cases.INVALID, 1, eplb_local_stats=stats)
        gathered = a2a.eplb_gathered_stats
        truth = [[seed, r, 7] for r in range(world)] if seed % 2 else None
        assert (None if gathered is None else gathered.tolist()) == truth
        cases.check_received(received, rank, everyone)
        y = cases.compute(received, rank).to(dtype)
        in_place = seed % 2 == 0
        if in_place:
            place = a2a.get_combine_payload_tensor_in_workspace(most, cases.HIDDEN, dtype)
            y = place.copy_(y)
        out = a2a.combine(y, most, payload_in_workspace=in_place)
        cases.check(out, rank, everyone, world)
    forgotten(rank, world, device)
    blocks(rank, world, device)
    older(rank, world, device)


def forgotten(rank, world, device):
    """A workspace that some ranks have no more is not what the next layer gets."""
    before = exchange(rank, world, device, most=4)
    if rank:
        del before
    a2a = exchange(rank, world, device, most=4)
    assert rank or a2a.workspace.data_ptr() != before.workspace.data_ptr()
    everyone = [cases.inputs(r, world, 3, torch.float32, device) for r in range(world)]
    received = a2a.dispatch(everyone[rank][1], cases.payloads(*everyone[rank]), 4, cases.INVALID, 1)
    cases.check_received(received, rank, everyone)
    cases.check(a2a.combine(cases.compute(received, rank), 4), rank, everyone, world)


def blocks(rank, world, device):
    mapping = comm.Mapping(world_size=world, rank=rank, cp_size=world)
    config = comm.MnnvlConfig(comm_backend=comm.TorchDistBackend(dist.group.WORLD))
    ws = comm.decode_cp_a2a_allocate_mnnvl_workspace(mapping, mnnvl_config=config)
    comm.decode_cp_a2a_init_workspace(ws, rank, world)
    for batch, d in (((3, 2), 64), ((), 8), ((700,), 512), ((0, 4), 16)):
        o = [torch.randn(*batch, world, d, generator=torch.Generator().manual_seed(r)).half() for r in range(world)]
        s = [torch.randn(*batch, world, 2, generator=torch.Generator().manual_seed(9 + r)) for r in range(world)]
        got = comm.decode_cp_a2a_alltoall(o[rank].to(device), s[rank].to(device), ws, rank, world)
        for result, sent in zip(got, (o, s), strict=True):
            assert torch.equal(result.cpu(), torch.stack([each[..., rank, :] for each in sent], -2))


def older(rank, world, device, group=None):
    """The number_format with a preparation and a call a tensor; its gathered preparation says the same."""
    # As vLLM says it: nothing of experts, and a function in place of a number.
    mapping = comm.Mapping(world, rank, torch.accelerator.device_count, tp_size=world)
    assert mapping.moe_ep_size == 1 and mapping.gpus_per_node >= 1
    config = comm.MnnvlConfig(comm_backend=comm.TorchDistBackend(dist.group.WORLD) if world > 1 else None)
    ws = comm.MnnvlMoe.get_moe_workspaces(mapping, config)
    assert comm.MnnvlMoe.get_moe_prepare_workspace(mapping, config).moe is ws.moe
    count = world * cases.PER
    for seed, (counts, most) in enumerate(((((3, 0, 8, 1), 8)), ((2, 5), 16))):
        everyone = [cases.inputs(r, world, counts[r % len(counts)], torch.float32, device, seed) for r in range(world)]
        x, ids, weights = everyone[rank]
        statics = torch.arange(4, dtype=torch.int32, device=device) + 10 * rank if seed == 0 else None
        info, got_ids, got_weights, gathered = comm.MnnvlMoe.mnnvl_moe_alltoallv_prepare_without_allgather(
            ids, weights, statics, ws, most, rank, world, count, count, cases.TOP_K
        )
        if seed == 0:
            assert gathered.tolist() == [[10 * r + i for i in range(4)] for r in range(world)]
        y = comm.MnnvlMoe.mnnvl_moe_alltoallv(x, info, ws, rank, world)
        tags = comm.MnnvlMoe.mnnvl_moe_alltoallv(cases.payloads(x, ids, weights)[3], info, ws, rank, world)
        marked = torch.where((got_ids == count).all(1, keepdim=True), cases.INVALID, got_ids)
        blocks = [t.view(world, most, -1) for t in (y, marked, got_weights, tags)]
        cases.check_received(blocks, rank, everyone)
        made = cases.compute(blocks, rank).view(world * most, -1)
        out = comm.MnnvlMoe.mnnvl_moe_alltoallv_combine(made, info, ws, rank, world, cases.TOP_K, len(x))
        cases.check(out, rank, everyone, world)
        ends = torch.tensor([len(each[0]) for each in everyone], device=device).cumsum(0).int()
        together = [torch.cat(parts) for parts in zip(*everyone, strict=True)]
        to = comm.MnnvlMoe.compute_target_rank_id(together[1], count, world)
        again, ids2, weights2 = comm.MnnvlMoe.mnnvl_moe_alltoallv_prepare(
            to, ends, together[1], together[2], most, count, cases.TOP_K, rank, world
        )
        assert torch.equal(ids2, got_ids)
        real = (got_ids != count).any(1)
        assert torch.equal(weights2[real], got_weights[real])
        for name in ("local_gather_indices", "send_rank_count_cumsum", "recv_rank_count_cumsum"):
            assert torch.equal(getattr(again, name), getattr(info, name)), name
        assert torch.equal(again.send_rank_local_indices[: len(x)], info.send_rank_local_indices)
        # What upstream's fields alone say is enough to send.
        fields = list(dataclasses.fields(comm.MoEAlltoallInfo))[:7]
        for way in (again, comm.MoEAlltoallInfo(*(getattr(info, field.name) for field in fields))):
            y2 = comm.MnnvlMoe.mnnvl_moe_alltoallv(x, way, ws, rank, world)
            assert torch.equal(y2[real], y[real])


def killed(rank, world, device, deadline):
    """The last rank dies inside a dispatch; the others fail in time."""
    a2a = exchange(rank, world, device)
    x, ids, weights = cases.inputs(rank, world, 4, torch.float32, device)
    a2a.dispatch(ids, [x], 4)
    a2a.combine(torch.zeros(world, 4, cases.HIDDEN, device=device), 4)
    a2a.deadline = float(deadline)
    dist.barrier()
    if rank == world - 1:
        os.kill(os.getpid(), signal.SIGKILL)
    after_a_death(a2a, rank, world, device)


def after_a_death(a2a, rank, world, device):
    """A dispatch to a rank that is no more fails in time, and stays failed."""
    x, ids, _ = cases.inputs(rank, world, 4, torch.float32, device)
    start = time.monotonic()
    try:
        a2a.dispatch(ids, [x], 4)
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        a2a.check()
    except (TimeoutError, ConnectionError) as error:
        print(f"{type(error).__name__}: {error}")
    assert time.monotonic() - start < 10
    try:
        a2a.combine(torch.zeros(world, 4, cases.HIDDEN, device=device), 4)
    except (TimeoutError, ConnectionError, RuntimeError):
        return
    raise AssertionError("nothing was raised")
