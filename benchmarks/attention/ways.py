"""The ways through FlashInfer that a row is measured in, in the process that has FlashInfer's package."""

from __future__ import annotations

import functools

import composed
import processes
import torch
import workload
from composed import Mixed, Shared
from rows import Host
from through_api import Runner, host_call

from flashinfer.testing.bench import Work, host_clock, reported

# Its name for a way -> backend, and whether its decode wrapper uses tensor cores. FA3 has no decode of several tokens.
WAYS = {"fa2": ("fa2", True), "fa3": ("fa3", True), "fa2 without tensor cores": ("fa2", False)}

# One process serves the rows of all first calls.
_first_call = functools.cache(processes.first_call)


def backends(a: workload.Attention) -> dict[str, tuple[str, bool]]:
    """Backends that a row is tried on. On Hopper FA3 is the faster prefill; FA2 is tried where it may not be."""
    if a.is_decode:
        if a.q_len > 1 or a.kv_dtype != a.q_dtype:
            return {name: way for name, way in WAYS.items() if way[0] == "fa2" and (way[1] or a.q_len == 1)}
        return WAYS
    plain = (a.head_dim_qk, a.head_dim_vo, a.q_dtype) == (128, 128, "bfloat16")
    return {name: way for name, way in WAYS.items() if way[1] and (plain or name == "fa3")}


def builds(what: workload.Attention | Shared | Mixed | Host) -> str:
    """What a kernel of FlashInfer is compiled for."""
    if isinstance(what, workload.Attention):
        several = what.is_decode and what.q_len > 1
        dims = what.head_dim_qk, what.head_dim_vo, what.q_dtype, what.kv_dtype
        return str((what.is_decode, several, what.page_size > 0, what.window_left >= 0, *dims))
    if isinstance(what, Host):
        return f"host: {what.what}"
    return what.name


def ways(what: workload.Attention | Shared | Mixed | Host, device: torch.device) -> dict[str, Work]:
    """Works of one row, by the name of the way. What is planned is planned at the first call."""
    if isinstance(what, Host):
        return _host(what, device)
    if isinstance(what, (Shared, Mixed)):
        run = composed.runner(what, device)
        return {"auto": Work(run, run.inputs, check=run.check)}
    t = workload.tensors(what, device)
    check = functools.partial(workload.check, what, workload.truth(what, t))
    runs = {name: Runner(what, t, *way) for name, way in backends(what).items()}
    return {name: Work(run, run.inputs, check=check) for name, run in runs.items()}


def _host(h: Host, device: torch.device) -> dict[str, Work]:
    if h.what in ("plan", "run"):
        return {name: Work(host_call, (h, device, *way), clock=host_clock) for name, way in WAYS.items()}
    if h.cold:
        # its kernels were built before, all at once: a time of their own would cost minutes
        return {}
    return {"auto": Work(lambda: _first_call(device)[h.what], clock=reported)}
