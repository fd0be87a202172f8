"""Collectives between the GPUs of one machine, in CUDA graphs, beside NCCL and torch's symmetric memory.

    python benchmarks/comm/between_gpus.py [--gpus N] [--json FILE]

A row's time is the slowest rank's, the median of replays of a graph of the same call, after which every rank starts
again together. Sums are compared with float32 sums in rank order before they are timed.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile

import torch
import torch.distributed as dist

from flashinfer import comm
from flashinfer.comm import AllReduceFusionPattern as Pattern

SIZES = (8 << 10, 128 << 10, 1 << 20, 8 << 20, 64 << 20)
NORMS = ((6, 8192), (128, 8192), (1024, 8192))
# tokens of a rank, hidden, top-k, experts of a rank
LAYERS = ((128, 7168, 8, 32), (4096, 7168, 8, 32))


def replayed(call, calls: int, device) -> float:
    """Microseconds of one call, of the slowest rank."""
    call()
    torch.cuda.synchronize(device)
    dist.barrier()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(calls):
            call()
    times = []
    for turn in range(12):
        torch.cuda.synchronize(device)
        dist.barrier()
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize(device)
        if turn > 1:
            times.append(start.elapsed_time(end) * 1000 / calls)
    worst = torch.tensor([statistics.median(times)], device=device)
    dist.all_reduce(worst, dist.ReduceOp.MAX)
    return float(worst)


class Table:
    """Rows of name to microseconds; what fails has its error for a time."""

    def __init__(self, rank: int, device):
        self.rank, self.device, self.rows = rank, device, []

    def row(self, name: str, nbytes: int, **ways) -> None:
        """ways : callables, which every rank has alike."""
        row = {"name": name, "bytes": nbytes}
        calls = 20 if nbytes <= 8 << 20 else 5
        for way, call in ways.items():
            try:
                row[way] = round(replayed(call, calls, self.device), 2)
            except (RuntimeError, ValueError, TimeoutError) as error:
                row[way] = f"{type(error).__name__}: {str(error)[:80]}"
        self.rows.append(row)
        if self.rank == 0:
            print("  ".join(f"{k} {v}" for k, v in row.items()), flush=True)


def all_reduces(table: Table, rank: int, world: int, device) -> None:
    from torch.distributed import _symmetric_memory as symmetric

    ws = comm.create_allreduce_fusion_workspace(
        max_token_num=SIZES[-1] // 16384, hidden_dim=8192, dtype=torch.bfloat16, force_oneshot_support=True
    )
    if rank == 0:
        print(f"{world} x {torch.cuda.get_device_name(device)}; {ws.explain()}", flush=True)
    for nbytes in SIZES:
        x = torch.randn(nbytes // 2, device=device, dtype=torch.bfloat16)
        out, inplace = torch.empty_like(x), x.clone()
        everyone = [torch.empty_like(x) for _ in range(world)]
        dist.all_gather(everyone, x)
        truth = sum((e.float() for e in everyone[1:]), everyone[0].float()).bfloat16()

        def ours(one_shot, x=x, out=out):
            comm.allreduce_fusion(x, ws, Pattern.kAllReduce, output=out, use_oneshot=one_shot)

        for one_shot in (True, False):
            ours(one_shot)
            torch.cuda.synchronize(device)
            ws.check()
            assert torch.equal(out, truth), f"{nbytes} bytes, one_shot={one_shot}"
        shared = symmetric.empty(nbytes // 2, dtype=torch.bfloat16, device=device)
        group = dist.group.WORLD.group_name
        symmetric.rendezvous(shared, dist.group.WORLD)
        table.row(
            "all-reduce", nbytes,
            one_shot=lambda: ours(True),
            two_shot=lambda: ours(False),
            nccl=lambda y=inplace: dist.all_reduce(y),
            torch_one_shot=lambda s=shared: torch.ops.symm_mem.one_shot_all_reduce(s, "sum", group),
            torch_two_shot=lambda s=shared: torch.ops.symm_mem.two_shot_all_reduce_(s, "sum", group),
        )  # fmt: skip
    for shape in NORMS:
        x, residual = (torch.randn(shape, device=device, dtype=torch.bfloat16) for _ in range(2))
        weight, out, copied = torch.ones_like(x[0]), torch.empty_like(x), x.clone()

        def fused(x=x, residual=residual, weight=weight, out=out):
            comm.allreduce_fusion(
                x, ws, Pattern.kARResidualRMSNorm, residual_in=residual, residual_out=residual, rms_gamma=weight,
                norm_out=out,
            )  # fmt: skip

        def apart(x=copied, residual=residual, weight=weight):
            dist.all_reduce(x)
            torch.nn.functional.rms_norm(residual.add_(x), weight.shape, weight, 1e-6)

        def plain(x=x, out=out):
            comm.allreduce_fusion(x, ws, Pattern.kAllReduce, output=out)

        table.row(f"all-reduce, residual, RMSNorm {shape}", x.nbytes, fused=fused, plain=plain, nccl_and_torch=apart)
    torch.cuda.synchronize(device)
    ws.check()


def exchanges(table: Table, rank: int, world: int, device) -> None:
    for tokens, hidden, top_k, each in LAYERS:
        mapping = comm.Mapping(world_size=world, rank=rank, tp_size=world, moe_ep_size=world)
        a2a = comm.MoeAlltoAll(mapping, tokens, top_k, each * world, hidden_size=hidden)
        x = torch.randn(tokens, hidden, device=device, dtype=torch.bfloat16)
        ids = torch.rand(tokens, each * world, device=device).topk(top_k).indices.int()
        weights = torch.rand(tokens, top_k, device=device)
        received = a2a.dispatch(ids, [x, ids, weights], tokens)
        place = a2a.get_combine_payload_tensor_in_workspace(tokens, hidden, torch.bfloat16)
        place.copy_(received[0])
        out = a2a.combine(place, tokens, payload_in_workspace=True)
        torch.cuda.synchronize(device)
        a2a.check()
        ranks = torch.stack([((ids // each) == r).any(1) for r in range(world)], 1)
        same = sum((x.float() * ranks[:, r : r + 1] for r in range(world)), torch.zeros_like(x, dtype=torch.float32))
        assert torch.equal(out, same.bfloat16()), "the combined rows"
        away = int(ranks.sum() - ranks[:, rank].sum())
        kept = received[0].clone()

        def both(a2a=a2a, ids=ids, x=x, weights=weights, place=place, tokens=tokens, **how):
            a2a.dispatch(ids, [x, ids, weights], tokens)
            a2a.combine(how.get("rows", place), tokens, payload_in_workspace="rows" not in how)

        def sends(a2a=a2a, ids=ids, x=x, weights=weights, tokens=tokens):
            # Flags alone keep ranks in step, and what arrives is the same each time.
            a2a.dispatch(ids, [x, ids, weights], tokens)
            a2a._open_dispatch = None

        table.row(
            f"experts: {tokens} tokens a rank, top {top_k} of {each * world}, {away} rows away", away * hidden * 2,
            dispatch=sends, dispatch_and_combine=both, with_a_copy=lambda f=both, k=kept: f(rows=k),
        )  # fmt: skip
        torch.cuda.synchronize(device)
        a2a.check()
        del a2a, place, received
    near = torch.empty(64 << 20, dtype=torch.uint8, device=device)
    far = torch.empty(64 << 20, dtype=torch.uint8, device=f"cuda:{(rank + 1) % world}")
    table.row("copy to the next GPU", near.nbytes, copy=lambda: far.copy_(near))


def work(rank: int, world: int, folder: str, out: str) -> None:
    device = torch.device("cuda", rank)
    torch.cuda.set_device(device)
    dist.init_process_group("nccl", init_method=f"file://{folder}/store", rank=rank, world_size=world, device_id=device)
    table = Table(rank, device)
    all_reduces(table, rank, world, device)
    exchanges(table, rank, world, device)
    if rank == 0 and out:
        with open(out, "w") as file:
            about = {"device": torch.cuda.get_device_name(device), "gpus": world, "torch": torch.__version__}
            json.dump(about | {"rows": table.rows}, file, indent=1)
    dist.barrier()
    dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gpus", type=int, default=torch.cuda.device_count())
    parser.add_argument("--json", default="", help="where the table goes, as JSON")
    arguments = parser.parse_args()
    # Multicast addresses take resources of the whole machine; nothing here needs them.
    os.environ.setdefault("TORCH_SYMM_MEM_DISABLE_MULTICAST", "1")
    os.environ.setdefault("NCCL_NVLS_ENABLE", "0")
    with tempfile.TemporaryDirectory() as folder:
        torch.multiprocessing.spawn(
            work, (arguments.gpus, folder, arguments.json), nprocs=arguments.gpus, join=True
        )


if __name__ == "__main__":
    main()
