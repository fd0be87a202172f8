"""Measures collectives between ranks of one machine, beside the process group and torch's symmetric memory.

    python benchmarks/comm/between_gpus.py cuda

One rank a GPU; with "cpu" two, over gloo. What it prints last is JSON: `rows`, name -> {"ours", "peers", "link"}, with
{"us"} or {"error"} of each way and the bytes that a rank has to send; `link_gb_s`, what a copy to the next rank
reaches; `explain`, how the ranks are connected; `error`, why rows are missing.

A time is the slowest rank's, the median of replays of a CUDA graph of several calls, after which every rank starts
again together. Sums are compared with float32 sums in rank order before they are timed.
"""

from __future__ import annotations

import contextlib
import json
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path

import torch
import torch.distributed as dist

from flashinfer import comm
from flashinfer.comm import AllReduceFusionPattern as Pattern

# By whether ranks are GPUs. Bytes; tokens and hidden; tokens of a rank, hidden, top-k, experts of a rank.
SIZES = {True: (8 << 10, 128 << 10, 1 << 20, 8 << 20, 64 << 20), False: (1 << 10, 8 << 10)}
NORMS = {True: ((6, 8192), (128, 8192), (1024, 8192)), False: ((6, 256),)}
LAYERS = {True: ((128, 7168, 8, 32), (4096, 7168, 8, 32)), False: ((8, 64, 2, 4),)}
# Clocks of a device, some 2 ms.
_BUSY = 4_000_000


def ranks(device: torch.device) -> int:
    return torch.cuda.device_count() if device.type == "cuda" else 2


def size(nbytes: int) -> str:
    return f"{nbytes >> 20} MiB" if nbytes >= 1 << 20 else f"{nbytes >> 10} KiB"


class Table:
    """Measures ways of doing something, all ranks together, and keeps their times in a file."""

    def __init__(self, rank: int, world: int, device: torch.device, file: Path):
        self.rank, self.world, self.device, self.file = rank, world, device, file
        self.report = {"rows": {}}

    def tell(self, **found) -> None:
        self.report |= found
        if self.rank == 0:
            self.file.write_text(json.dumps(self.report))

    def row(self, name: str, call, link: float = 0, calls: int = 20, **peers) -> None:
        """call, peers : callables, which every rank has alike. link : bytes that a rank sends."""
        row = {"ours": self.time(call, calls), "link": link}
        row["peers"] = {way.replace("__", "/"): self.time(peer, calls) for way, peer in peers.items()}
        self.report["rows"][name] = row
        self.tell()
        if self.rank == 0:
            print(name, row, file=sys.stderr, flush=True)

    def beyond(self, name: str, whole: str, part: str, link: float = 0) -> None:
        """A row of the time by which one row is longer than another."""
        first, second = (self.report["rows"][row]["ours"] for row in (whole, part))
        apart = {"us": first["us"] - second["us"]} if "us" in first and "us" in second else {**second, **first}
        self.report["rows"][name] = {"ours": apart, "link": link, "peers": {}}
        self.tell()

    def time(self, call, calls: int, graph: bool = True) -> dict:
        """Microseconds of one call, of the slowest rank."""
        try:
            call()
            self.wait()
            spans = self._spans(call, calls, graph) if self.device.type == "cuda" else self._wall(call, calls)
            worst = torch.tensor([statistics.median(spans)], device=self.device)
            dist.all_reduce(worst, dist.ReduceOp.MAX)
            return {"us": float(worst)}
        except (RuntimeError, ValueError, TimeoutError) as error:
            return {"error": f"{type(error).__name__}: {str(error)[:300]}"}

    def wait(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        dist.barrier()

    def _spans(self, call, calls: int, graph: bool):
        def several():
            for _ in range(calls):
                call()

        if graph:
            captured = torch.cuda.CUDAGraph()
            with torch.cuda.graph(captured):
                several()
            several = captured.replay
        token = torch.zeros(1, device=self.device)
        for turn in range(12):
            self.wait()
            # A host is late by more than a collective takes. Devices are busy until all hosts have launched, and then
            # start together.
            torch.cuda._sleep(_BUSY)
            dist.all_reduce(token)
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            several()
            end.record()
            torch.cuda.synchronize(self.device)
            if turn > 1:
                yield start.elapsed_time(end) * 1000 / calls

    def _wall(self, call, calls: int):
        for _ in range(3):
            self.wait()
            start = time.perf_counter()
            for _ in range(calls):
                call()
            yield (time.perf_counter() - start) * 1e6 / calls


def link(table: Table) -> None:
    """A copy to the next rank; on CPUs, a message of the process group."""
    if table.device.type == "cuda":
        near = torch.empty(64 << 20, dtype=torch.uint8, device=table.device)
        far = torch.empty(64 << 20, dtype=torch.uint8, device=f"cuda:{(table.rank + 1) % table.world}")
        took = table.time(lambda: far.copy_(near), 20, graph=False)
    else:
        near, far = (torch.zeros(1 << 20, dtype=torch.uint8) for _ in range(2))

        def swap():
            sent = dist.isend(near, (table.rank + 1) % table.world)
            dist.recv(far, (table.rank - 1) % table.world)
            sent.wait()

        took = table.time(swap, 5)
    if "us" in took:
        table.tell(link_gb_s=near.nbytes / took["us"] / 1e3)


def symmetric_peers(nbytes: int, device: torch.device) -> dict:
    """torch's all-reduces over symmetric memory; none on CPUs."""
    if device.type != "cuda":
        return {}
    from torch.distributed import _symmetric_memory as symmetric

    shared, group = symmetric.empty(nbytes // 2, dtype=torch.bfloat16, device=device), dist.group.WORLD.group_name
    symmetric.rendezvous(shared, dist.group.WORLD)
    return {
        "torch__one_shot": lambda: torch.ops.symm_mem.one_shot_all_reduce(shared, "sum", group),
        "torch__two_shot": lambda: torch.ops.symm_mem.two_shot_all_reduce_(shared, "sum", group),
    }


def all_reduces(table: Table) -> None:
    device, world, on_gpu = table.device, table.world, table.device.type == "cuda"
    most, group = SIZES[on_gpu][-1], dist.get_backend()
    widest = max(hidden for _, hidden in NORMS[on_gpu])
    ws = comm.create_allreduce_fusion_workspace(
        world_size=world, rank=table.rank, max_token_num=max(most // 2 // widest, *(n for n, _ in NORMS[on_gpu])),
        hidden_dim=widest, dtype=torch.bfloat16, force_oneshot_support=True,
    )  # fmt: skip
    table.tell(explain=str(ws.explain()))
    for nbytes in SIZES[on_gpu]:
        x = torch.randn(nbytes // 2, device=device, dtype=torch.bfloat16)
        out, inplace = torch.empty_like(x), x.clone()
        everyone = [torch.empty_like(x) for _ in range(world)]
        dist.all_gather(everyone, x)
        truth = sum((e.float() for e in everyone[1:]), everyone[0].float()).bfloat16()
        peers = symmetric_peers(nbytes, device) | {group: lambda y=inplace: dist.all_reduce(y)}
        sent = 2 * nbytes * (world - 1) / world
        calls = (20 if nbytes <= 8 << 20 else 5) if on_gpu else 2
        for name, one_shot in (("one shot", True), ("two shots", False)):

            def ours(one_shot=one_shot, x=x, out=out):
                comm.allreduce_fusion(x, ws, Pattern.kAllReduce, output=out, use_oneshot=one_shot)

            ours()
            table.wait()
            ws.check()
            assert torch.equal(out, truth), f"{nbytes} bytes in {name}: not the sum"
            table.row(f"all-reduce, {name}, {size(nbytes)}", ours, sent, calls, **peers)
    for shape in NORMS[on_gpu]:
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

        of, calls = "x".join(map(str, shape)), 20 if on_gpu else 2
        sent = 2 * x.nbytes * (world - 1) / world
        table.row(f"all-reduce, residual, RMSNorm {of}", fused, sent, calls, **{f"{group} and torch": apart})
        table.row(f"all-reduce {of}", plain, sent, calls, **{group: lambda x=copied: dist.all_reduce(x)})
        table.beyond(f"residual, RMSNorm {of}, added", f"all-reduce, residual, RMSNorm {of}", f"all-reduce {of}")
    table.wait()
    ws.check()


def exchanges(table: Table) -> None:
    device, world, rank, on_gpu = table.device, table.world, table.rank, table.device.type == "cuda"
    for tokens, hidden, top_k, each in LAYERS[on_gpu]:
        mapping = comm.Mapping(world_size=world, rank=rank, tp_size=world, moe_ep_size=world)
        a2a = comm.MoeAlltoAll(mapping, tokens, top_k, each * world, hidden_size=hidden)
        x = torch.randn(tokens, hidden, device=device, dtype=torch.bfloat16)
        ids = torch.rand(tokens, each * world, device=device).topk(top_k).indices.int()
        weights = torch.rand(tokens, top_k, device=device)
        received = a2a.dispatch(ids, [x, ids, weights], tokens)
        place = a2a.get_combine_payload_tensor_in_workspace(tokens, hidden, torch.bfloat16)
        place.copy_(received[0])
        out = a2a.combine(place, tokens, payload_in_workspace=True)
        table.wait()
        a2a.check()
        chosen = torch.stack([((ids // each) == r).any(1) for r in range(world)], 1)
        same = sum((x.float() * chosen[:, r : r + 1] for r in range(world)), torch.zeros_like(x, dtype=torch.float32))
        assert torch.equal(out, same.bfloat16()), f"{tokens} tokens: not the combined rows"
        sent = int(chosen.sum() - chosen[:, rank].sum()) * hidden * 2

        def both(a2a=a2a, ids=ids, x=x, weights=weights, place=place, tokens=tokens):
            a2a.dispatch(ids, [x, ids, weights], tokens)
            a2a.combine(place, tokens, payload_in_workspace=True)

        def sends(a2a=a2a, ids=ids, x=x, weights=weights, tokens=tokens):
            # Flags alone keep ranks in step, and what arrives is the same each time.
            a2a.dispatch(ids, [x, ids, weights], tokens)
            a2a._shared.opened = None

        of, calls = f"{tokens} tokens a rank", (20 if tokens <= 1024 else 5) if on_gpu else 2
        table.row(f"dispatch and combine, {of}", both, 2 * sent, calls)
        table.row(f"dispatch, {of}", sends, sent, calls)
        table.beyond(f"combine, {of}", f"dispatch and combine, {of}", f"dispatch, {of}", sent)
        table.wait()
        a2a.check()
        del a2a, place, received


def work(rank: int, world: int, kind: str, folder: str) -> None:
    device = torch.device(kind, rank) if kind == "cuda" else torch.device(kind)
    more = {}
    if kind == "cuda":
        torch.cuda.set_device(device)
        more["device_id"] = device
    store = f"file://{folder}/store"
    dist.init_process_group("nccl" if more else "gloo", init_method=store, rank=rank, world_size=world, **more)
    table = Table(rank, world, device, Path(folder) / "table")
    for part in (link, all_reduces, exchanges):
        part(table)
    dist.barrier()
    dist.destroy_process_group()


def main(kind: str) -> dict:
    # Multicast addresses take resources of the whole machine; nothing here needs them.
    os.environ.setdefault("TORCH_SYMM_MEM_DISABLE_MULTICAST", "1")
    os.environ.setdefault("NCCL_NVLS_ENABLE", "0")
    world, report = ranks(torch.device(kind)), {}
    with tempfile.TemporaryDirectory() as folder:
        try:
            torch.multiprocessing.spawn(work, (world, kind, folder), nprocs=world, join=True)
        except Exception as error:
            # the rows before it are measured
            report["error"] = f"{type(error).__name__}: {str(error).strip()[-300:]}"
        with contextlib.suppress(FileNotFoundError):
            report |= json.loads((Path(folder) / "table").read_text())
    return {"rows": {}, "error": "no such row"} | report


if __name__ == "__main__":
    print(json.dumps(main(sys.argv[1])))
