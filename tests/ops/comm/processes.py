"""Several ranks as processes over gloo: starts them, and gathers what they say."""

import faulthandler
import importlib
import os
import signal
import sys
import tempfile
import time
from pathlib import Path

from tests import forked

# Seconds that ranks have to end in, once another has failed.
AFTER_A_FAILURE = 5


def run(world, function, folder, *arguments, timeout=120, device="cpu", killed=()):
    """Run `function`, "module:name", with (rank, world, device, *arguments) on every rank; its printed lines, a list a
    rank. Fails if one exits with an error, unless it is in `killed`, or if they take longer than `timeout` seconds.

    device : "cuda" is a GPU for each rank, "cuda:0" one that all share, without NCCL, which refuses that."""
    # Of this run alone: ranks that read what those of another run left in the store wait for these for ever.
    folder = Path(tempfile.mkdtemp(dir=folder))
    variables = {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "TRITON_INTERPRET": "0"}
    outputs = [folder / f"rank{rank}" for rank in range(world)]
    children = [
        forked.start(main, function, world, str(device), folder / "store", rank, *arguments, out=out, **variables)
        for rank, out in enumerate(outputs)
    ]
    end = time.monotonic() + timeout
    try:
        while None in (codes := [child.exitcode for child in children]) and time.monotonic() < end:
            if any(code for rank, code in enumerate(codes) if rank not in killed):
                # The others may wait for it until their deadline.
                end = min(end, time.monotonic() + AFTER_A_FAILURE)
            time.sleep(0.02)
        for child in children:
            if child.exitcode is None:
                # It says where it stands.
                os.kill(child.pid, signal.SIGABRT)
                time.sleep(0.5)
    finally:
        for child in children:
            child.kill()
            child.join()
    said = [out.read_text() for out in outputs]
    ended = [child.exitcode for child in children]
    assert ended == [-signal.SIGKILL if rank in killed else 0 for rank in range(world)], f"{ended}\n" + "\n".join(said)
    return [text.splitlines() for text in said]


def main(function, world, device, store, rank, *arguments):
    import torch
    import torch.distributed as dist

    faulthandler.enable()
    own = device == "cuda"
    device = torch.device(device, rank) if own else torch.device(device)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    torch.set_num_threads(1)
    backend = "cpu:gloo,cuda:nccl" if own else "gloo"
    dist.init_process_group(backend, init_method=f"file://{store}", rank=rank, world_size=world)
    module, name = function.split(":")
    getattr(importlib.import_module(module), name)(rank, world, device, *arguments)
    sys.stdout.flush()
    # Without the teardown of groups, which waits for ranks that a test has killed.
    os._exit(0)
