"""Collectives between the GPUs of one machine, beside NCCL and torch's symmetric memory: the rows of between_gpus.py.

It starts its ranks itself, one a GPU, and all rows are measured at once; on a CPU there are two ranks, over gloo. The
ceiling is what a copy from one rank to the next reaches.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from pathlib import Path

import between_gpus
import child
import torch

from flashinfer.testing.bench import Case, Target, Work, reported


def cases(device: torch.device) -> Iterator[Case]:
    """None where there is one GPU."""
    on_gpu, world = device.type == "cuda", between_gpus.ranks(device)
    if world < 2:
        return
    for nbytes in between_gpus.SIZES[on_gpu]:
        size = between_gpus.size(nbytes)
        # three quarters of the time
        targets = (Target("torch", 4 / 3),) if nbytes <= 1 << 20 else ()
        yield _row(f"all-reduce, one shot, {size}", "all-reduce", targets, nbytes == 128 << 10)
        yield _row(f"all-reduce, two shots, {size}", "all-reduce", headline=nbytes == 64 << 20)
    for shape in between_gpus.NORMS[on_gpu]:
        of = "x".join(map(str, shape))
        yield _row(f"all-reduce, residual, RMSNorm {of}", "all-reduce and norm", headline=shape[0] == 6)
        yield _row(f"all-reduce {of}", "all-reduce and norm")
        yield _row(f"residual, RMSNorm {of}, added", "all-reduce and norm", (Target("us", 0.5),))
    for tokens, *_ in between_gpus.LAYERS[on_gpu]:
        of = f"{tokens} tokens a rank"
        targets = (Target("us", 25),) if tokens <= 128 else (Target("link", 0.9),)
        yield _row(f"dispatch, {of}", "all-to-all", targets, headline=True)
        yield _row(f"combine, {of}", "all-to-all", targets, headline=True)
        yield _row(f"dispatch and combine, {of}", "all-to-all")


def ceilings(device: torch.device) -> dict[str, float]:
    table = measured(device.type)
    return {key: table[key] for key in ("link_gb_s",) if key in table}


def versions(device: torch.device) -> dict:
    """How many ranks there were, and through what they exchanged."""
    return {"ranks": between_gpus.ranks(device), "exchange": measured(device.type).get("explain", "")}


@functools.cache
def measured(kind: str) -> dict:
    """The table of between_gpus.py, from its own processes."""
    return child.python(Path(between_gpus.__file__), kind)


def _row(name: str, group: str, targets=(), headline=False) -> Case:
    def make(device: torch.device) -> Work:
        table = measured(device.type)
        row = table["rows"].get(name, {"ours": {"error": table["error"]}, "link": 0, "peers": {}})
        peers = {way: _given(answer) for way, answer in row["peers"].items()}
        return _given(row["ours"], link=row["link"], peers=peers)

    # Ranks of FlashInfer are not started.
    return Case(name, make, group, targets, headline, ways=lambda device: {})


def _given(answer: dict, **more) -> Work:
    def run():
        if "error" in answer:
            raise RuntimeError(answer["error"])
        return answer["us"]

    return Work(run, clock=reported, **more)
