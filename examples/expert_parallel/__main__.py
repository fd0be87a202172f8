"""A mixture-of-experts layer over ranks: routing, dispatch to the ranks of the experts, their products, combine.

Each rank has tokens of its own, another number on each, and a slice of the experts. What it gets back is compared with
the whole layer computed by itself.

    torchrun --nproc-per-node 4 -m examples.expert_parallel     # a GPU a rank, or gloo without GPUs
    python -m examples.expert_parallel --ranks 4                # starts the ranks, on CPUs
"""

from __future__ import annotations

import argparse
import os
import tempfile

import torch
import torch.distributed as dist
from torch.multiprocessing.spawn import spawn

from examples.expert_parallel.layer import start, work


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m examples.expert_parallel", description=str(__doc__).split(":")[0])
    parser.add_argument("--ranks", type=int, default=2, help="processes to start, where torchrun has not")
    parser.add_argument("--tokens", type=int, default=33, help="tokens of the first rank; others have fewer")
    given = parser.parse_args(arguments)
    if "RANK" in os.environ:
        on_gpu = torch.cuda.is_available()
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if on_gpu else torch.device("cpu")
        if on_gpu:
            torch.cuda.set_device(device)
        dist.init_process_group("nccl" if on_gpu else "gloo")
        work(dist.get_rank(), dist.get_world_size(), given.tokens, device)
        dist.destroy_process_group()
    elif given.ranks == 1:
        work(0, 1, given.tokens, torch.device("cuda" if torch.cuda.is_available() else "cpu"))
    else:
        with tempfile.TemporaryDirectory() as folder:
            spawn(start, (given.ranks, given.tokens, folder), nprocs=given.ranks)


if __name__ == "__main__":
    main()
