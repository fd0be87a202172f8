"""Ranks that stop or end, at every moment of a workspace's life: processes over gloo, forked from one that has torch.

    python -m tests.ops.comm.faults DEVICE CASE...     a line of JSON for each rank that survives

A CASE is "signal moment victim world": the rank `victim` of `world` gets the signal, "stop" or "kill", at "set-up", or
"before", "during", "between" calls, or at "reset", "destroy", "tuning" (times of candidates), "barrier" or "split" (of
a TorchDistBackend). Rank 0 hosts the store. All cases run at once, for they only wait.
On a DEVICE "cuda:0" all ranks share it, cases run one by one, and nothing can stop "during" a call.
"""

import importlib
import json
import os
import select
import signal
import socket
import sys
import time

SIGNALS = {"stop": signal.SIGSTOP, "kill": signal.SIGKILL}
DEADLINE = 1.0


def of_rank(device, rank, world, port, signal_name, moment, victim):
    """What a rank does, and what it says at the end."""
    import torch
    import torch.distributed as dist

    from flashinfer import comm
    from flashinfer.comm import AllReduceFusionPattern as P

    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=world)
    group, device = dist.group.WORLD, torch.device(device)
    comm.set_setup_deadline(10)
    # Connections of gloo, which are made at the first collective.
    dist.barrier()

    def here(name):
        if rank == victim and moment == name:
            os.kill(os.getpid(), SIGNALS[signal_name])

    def make():
        return comm.create_allreduce_fusion_workspace(
            world_size=world, rank=rank, max_token_num=8, hidden_dim=64, dtype=torch.float32, group=group
        )

    x = torch.full((4, 64), rank + 1.0, device=device)
    if device.type == "cuda":
        # Compiles the kernel, which ranks do at different speeds.
        warm = make()
        comm.allreduce_fusion(x, warm, P.kAllReduce)
        warm.check()
        dist.barrier()
    said = {"rank": rank, "moment": moment, "error": "none"}
    start = time.monotonic()
    try:
        if moment in ("tuning", "barrier", "split"):
            meet = meetings(moment, group)
            meet()
            dist.barrier()
            here(moment)
            start = time.monotonic()
            meet()
            said["seconds"] = time.monotonic() - start
            return said
        here("set-up")
        comm.set_setup_deadline(DEADLINE if moment == "set-up" else 10)
        ws = make()
        ws.deadline = DEADLINE
        dist.barrier()
        if moment == "reset":
            # A failure that every rank sees, for there is something to reset.
            try:
                comm.allreduce_fusion(x[: rank + 1], ws, P.kAllReduce)
                ws.check()
            except ValueError:
                dist.barrier()
                here("reset")
            start = time.monotonic()
            ws.reset()
        elif moment == "destroy":
            comm.allreduce_fusion(x, ws, P.kAllReduce)
            dist.barrier()
            here("destroy")
            start = time.monotonic()
            ws.destroy()
            said["seconds"] = time.monotonic() - start
        else:
            here("before")
            if rank == victim and moment == "during":
                meet = ws.link._meet
                ws.link._meet = lambda *given: (meet(*given), here("during"))
            if moment == "between":
                assert bool((comm.allreduce_fusion(x, ws, P.kAllReduce) == world * (world + 1) / 2).all())
                dist.barrier()
                here("between")
            start = time.monotonic()
            out = torch.full_like(x, 777.0)
            said["out"] = "untouched"
            try:
                comm.allreduce_fusion(x, ws, P.kAllReduce, output=out)
                ws.check()
            finally:
                said["out"] = "nan" if bool(out.isnan().all()) else out.unique().tolist()
    except Exception as error:
        said |= {"error": type(error).__name__, "words": str(error), "seconds": time.monotonic() - start}
        if "out" in said:
            said["later"] = _later(ws, x)
    return said


def meetings(moment, group):
    """What ranks meet for beside a workspace, by the deadline."""
    from flashinfer import comm
    from flashinfer.autotuner import ranks, set_autotune_process_group

    comm.set_setup_deadline(DEADLINE)
    if moment == "tuning":
        ranks.DEADLINE = DEADLINE
        set_autotune_process_group(group)
        return lambda: ranks.agreed([1.0, float("inf")])
    backend = comm.TorchDistBackend()
    return backend.barrier if moment == "barrier" else lambda: backend.Split(0, 0)


def _later(ws, x):
    """What a call, a check, and a checkpoint after the failure raise."""
    from flashinfer import comm

    raised = []
    for call in (
        lambda: comm.allreduce_fusion(x, ws, comm.AllReduceFusionPattern.kAllReduce), ws.check, ws.checkpoint_prepare
    ):  # fmt: skip
        try:
            call()
            raised.append("nothing")
        except Exception as error:
            raised.append(type(error).__name__)
    ws.destroy()
    return raised


def main(device, *cases):
    # What every child starts with.
    for name in ("torch", "torch.distributed", "flashinfer.comm"):
        importlib.import_module(name)
    sys.modules["torch"].set_num_threads(1)
    together = [cases] if device == "cpu" else [[case] for case in cases]
    for some in together:
        run(device, some)


def run(device, cases):
    children, pipes = [], {}
    for case in cases:
        signal_name, moment, victim, world = case.split()
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        for rank in range(int(world)):
            read, write = os.pipe()
            child = os.fork()
            if child == 0:
                os.close(read)
                said = of_rank(device, rank, int(world), port, signal_name, moment, int(victim))
                os.write(write, json.dumps(said).encode())
                # The store of rank 0 stays while others still wait.
                signal.pause()
            os.close(write)
            children.append(child)
            if rank == int(victim):
                os.close(read)
            else:
                pipes[read] = case, rank
    end = time.monotonic() + 60
    while pipes and time.monotonic() < end:
        for read in select.select(list(pipes), [], [], 1)[0]:
            case, rank = pipes.pop(read)
            words = os.read(read, 1 << 16)
            os.close(read)
            print(json.dumps({"case": case} | (json.loads(words) if words else {"rank": rank, "error": "it ended"})))
    for case, rank in pipes.values():
        print(json.dumps({"case": case, "rank": rank, "error": "it hangs"}))
    for child in children:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)


if __name__ == "__main__":
    main(*sys.argv[1:])
