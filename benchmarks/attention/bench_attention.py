"""Attention against its ceilings and its peers: the rows are in rows.py, how a row is built in workload.py.

Peers in this process: torch's SDPA (sdpa.py). In its own: FlashInfer, by the ways of ways.py.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import composed
import processes
import sdpa
import torch
import workload
from rows import Host, rows
from through_api import Runner, host_call
from ways import builds, ways

from flashinfer.testing.bench import Case, Target, Work, host_clock, reported


def cases(device: torch.device) -> Iterator[Case]:
    """Prefill, decode and host rows; small ones on a CPU."""
    for row in rows(device.type == "cuda"):
        make = {Host: _host, workload.Attention: _attention}.get(type(row.what), _composed)
        targets = tuple(Target(*target) for target in row.targets)
        yield Case(
            row.name, partial(make, row.what), row.group, targets, row.headline, partial(ways, row.what),
            builds(row.what), "attention" if isinstance(row.what, workload.Attention) else "",
        )  # fmt: skip


def _attention(a: workload.Attention, device: torch.device) -> Work:
    t = workload.tensors(a, device)
    check = partial(workload.check, a, workload.truth(a, t))
    run = Runner(a, t, "auto")
    return Work(
        run, run.inputs, bytes=workload.moved_bytes(a), flops=workload.flops(a), check=check,
        peers=sdpa.works(a, t, check), operands="fp8" if "float8" in a.q_dtype else "bf16",
        given={"row": a, "tensors": t},
    )  # fmt: skip


def _composed(what, device: torch.device) -> Work:
    run = composed.runner(what, device)
    return Work(run, run.inputs, bytes=run.bytes, flops=run.flops, check=run.check)


def _host(h: Host, device: torch.device) -> Work:
    if h.what in ("plan", "run"):
        return Work(host_call, (h, device, "auto"), clock=host_clock)
    return Work(lambda: processes.first_calls(device)[h.cold][h.what], clock=reported)
