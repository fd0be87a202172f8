"""What each rank of the multi-process tests does."""

import os
import signal
import time

import torch
import torch.distributed as dist

from flashinfer import comm
from flashinfer.comm import AllReduceFusionPattern as P
from flashinfer.ops.comm import capability
from tests.ops.comm.allreduce_fusion import cases
from tests.ops.comm.alltoall.ranks import after_a_death, exchange

SHAPES = [(7, 256), (1, 128), (0, 128)]


def workspace(rank, world, dtype=torch.bfloat16, most=(64, 512), group=None, **options):
    return comm.create_allreduce_fusion_workspace(
        world_size=world, rank=rank, max_token_num=most[0], hidden_dim=most[1], dtype=dtype,
        group=group or dist.group.WORLD, **options,
    )  # fmt: skip


def one(ws, case, rank, world, shape, dtype, device, seed, use_oneshot=None):
    everyone = [cases.inputs(case, r, world, shape, dtype, device, seed) for r in range(world)]
    out = cases.results(case, shape, dtype, device)
    returned = comm.allreduce_fusion(workspace=ws, **everyone[rank], **out, use_oneshot=use_oneshot)
    cases.check(case, everyone, out, returned, two_shot=use_oneshot is False)
    return returned


def every_pattern(rank, world, device):
    """All patterns; the same bits on every rank; then a workspace for larger rows."""
    ws = workspace(rank, world, force_oneshot_support=True)
    print(ws.explain())
    for seed, case in enumerate(cases.CASES):
        if world > 2 and seed % 3 and device.type == "cpu":
            continue
        for shape in SHAPES if case in ("plain", "norm") else SHAPES[:1]:
            for one_shot in (True, False):
                dtype = torch.float32 if seed % 4 == 1 else torch.bfloat16
                mine = one(ws, case, rank, world, shape, dtype, device, seed, one_shot)
                if mine.numel():
                    bits = mine.view(torch.uint8).cpu()
                    assert all(torch.equal(bits, other) for other in _gathered(bits, world))
    # Any shape is a plain all-reduce's.
    for shape in ((), (1,), (3, 5, 7), (5001,)):
        x = torch.full(shape, float(rank + 1), device=device)
        total = comm.allreduce_fusion(x, ws, P.kAllReduce, output=x)
        assert total is x and bool((x == world * (world + 1) // 2).all())
    # Memory that is given up and taken again.
    _settle(device)
    dist.barrier()
    ws.checkpoint_prepare()
    ws.checkpoint_restore(comm.TorchDistBackend(dist.group.WORLD))
    one(ws, "norm", rank, world, SHAPES[0], torch.bfloat16, device, 3)
    ws.destroy()


def _gathered(bits, world):
    parts = [torch.empty_like(bits) for _ in range(world)]
    dist.all_gather(parts, bits)
    return parts


def overridden(rank, world, device):
    """Peer access refused on one rank: all go through the process group, and say so."""
    if rank == 1:
        with capability.without_peer_access("refused for a test"):
            ws = workspace(rank, world)
    else:
        ws = workspace(rank, world)
    print(ws.explain())
    one(ws, "norm", rank, world, (5, 128), torch.bfloat16, device, 3)


def many_calls(rank, world, device, count):
    """Calls of random sizes over two groups, each on a stream of its own; on GPUs replays of a graph among them."""
    on_gpu = device.type == "cuda"
    groups = dist.group.WORLD, dist.new_group(list(range(world)))
    workspaces = [workspace(rank, world, torch.float32, (256, 512), group=group) for group in groups]
    sizes = torch.Generator().manual_seed(0)
    streams = [torch.cuda.Stream(device) for _ in groups] if on_gpu else [None, None]
    # Whole numbers that float32 adds exactly, whatever the order.
    values = (torch.arange(1 << 17, device=device) % 1000).float()
    total = world * (world + 1) // 2
    wrong = torch.zeros(2, dtype=torch.int64, device=device)
    _settle(device)
    replays = [_captured(w, stream, rank, values[:5000]) for w, stream in zip(workspaces, streams, strict=True)]
    for call in range(int(count)):
        turn, exponent, part = call % 2, *torch.rand(2, generator=sizes, dtype=torch.float64).tolist()
        size = int(2 ** (17 * exponent))
        at = int(part * ((1 << 17) - size))
        x = values[at : at + size]
        with torch.cuda.stream(streams[turn]):
            if on_gpu and call % 5 < 2:
                wrong[turn] += (replays[turn]() != total * values[:5000]).sum()
            out = comm.allreduce_fusion((rank + 1) * x, workspaces[turn], P.kAllReduce)
            wrong[turn] += (out != total * x).sum()
    _settle(device)
    assert wrong.tolist() == [0, 0]
    # 256 MiB
    large = torch.full((65536 if on_gpu else 512, 1024), rank + 1.0, device=device)
    workspaces.append(workspace(rank, world, torch.float32, large.shape))
    comm.allreduce_fusion(large, workspaces[2], P.kAllReduce, output=large)
    assert bool((large == total).all())
    for w in workspaces:
        w.check()


def _captured(ws, stream, rank, values):
    """A graph that adds `values` over the ranks, on a GPU: a function that replays it."""
    if stream is None:
        return None
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.stream(stream):
        x = (rank + 1) * values
        out = comm.allreduce_fusion(x, ws, P.kAllReduce)
        stream.synchronize()
        with torch.cuda.graph(graph, stream=stream):
            comm.allreduce_fusion(x, ws, P.kAllReduce, output=out)

    def replay():
        out.fill_(-1)
        torch.mul(values, rank + 1, out=x)
        graph.replay()
        return out

    return replay


def faults(rank, world, device, deadline):
    """A rank that comes too late, one with other sizes, one that is killed: errors, a reset, and a fresh workspace."""
    deadline = float(deadline)
    ws, other = workspace(rank, world), workspace(rank, world)
    x = torch.ones(4, 256, device=device)
    comm.allreduce_fusion(x, ws, P.kAllReduce)
    _settle(device)
    ws.deadline = deadline
    dist.barrier()
    # Rank 1 enters when the others have given up. Through the process group it reads so; in memory it finds what they
    # sent, and its next call waits in vain.
    if rank == 1:
        time.sleep(1.5 * deadline)
        if ws.link.transport == "peer":
            assert bool((comm.allreduce_fusion(x, ws, P.kAllReduce) == world).all())
    _raises(TimeoutError, ws, x, device)
    # Another workspace of the same group is not concerned.
    dist.barrier()
    assert bool((comm.allreduce_fusion(x, other, P.kAllReduce) == world).all())
    ws.reset()
    ws.deadline = 10.0
    assert bool((comm.allreduce_fusion(x, ws, P.kAllReduce) == world).all())
    _settle(device)
    _raises(ValueError, ws, torch.ones(4 + rank, 256, device=device), device)
    dist.barrier()
    ws.reset()
    assert bool((comm.allreduce_fusion(x, ws, P.kAllReduce) == world).all())
    _settle(device)
    # The last rank is killed; the others fail within the deadline, and go on in a group of their own.
    rest, a2a = dist.new_group(list(range(world - 1))), exchange(rank, world, device)
    a2a.deadline = deadline
    dist.barrier()
    ws.deadline = deadline
    if rank == world - 1:
        os.kill(os.getpid(), signal.SIGKILL)
    start = time.monotonic()
    _raises((TimeoutError, ConnectionError), ws, x, device)
    print(f"survived in {time.monotonic() - start:.1f}")
    after_a_death(a2a, rank, world, device)
    again = comm.create_allreduce_fusion_workspace(
        max_token_num=64, hidden_dim=512, dtype=torch.bfloat16, group=rest, world_size=world - 1, rank=rank
    )
    assert bool((comm.allreduce_fusion(x, again, P.kAllReduce) == world - 1).all())
    _settle(device)
    again.check()


def _settle(device):
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _raises(kinds, ws, x, device):
    try:
        comm.allreduce_fusion(x, ws, P.kAllReduce)
        _settle(device)
        ws.check()
    except kinds as error:
        print(f"{type(error).__name__}: {error}")
    else:
        raise AssertionError("nothing was raised")
    # It stays failed until the reset.
    try:
        ws.check()
    except kinds:
        return
    raise AssertionError("the failure was forgotten")
