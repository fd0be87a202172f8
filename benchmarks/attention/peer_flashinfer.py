"""Measures the FlashInfer that is on PYTHONPATH: rows by name from stdin, times as JSON on stdout.

    echo '{"device": "cuda", "names": ["ragged prefill 4x4096, causal"]}' | python peer_flashinfer.py
    echo '{"device": "cuda"}' | python peer_flashinfer.py --build

`--build` only builds the kernels of the rows, which nvcc does on first use; without `names`, of all rows.

Kernels are built in parallel threads before anything is timed. The clock is that of flashinfer/testing/bench.py, loaded
by its path: the name `flashinfer` belongs to the peer here.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import json
import os
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import composed
import flashinfer
import processes
import torch
import workload
from composed import Mixed, Shared
from rows import Host, rows
from through_api import Runner, host_call

# Its name for a way -> backend, and whether its decode wrapper uses tensor cores. FA3 has no decode of several tokens.
WAYS = {"fa2": ("fa2", True), "fa3": ("fa3", True), "fa2 without tensor cores": ("fa2", False)}

# One process serves the rows of all first calls.
_first_call = functools.cache(processes.first_call)


def load_timing():
    """flashinfer/testing/bench.py of this repository."""
    path = Path(__file__).resolve().parents[2] / "flashinfer" / "testing" / "bench.py"
    spec = importlib.util.spec_from_file_location("timing", path)
    module = sys.modules["timing"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def ways(what: workload.Attention) -> dict[str, tuple[str, bool]]:
    """Backends that a row is tried on. On Hopper FA3 is the faster prefill; FA2 is tried where it may not be."""
    if what.is_decode:
        if what.q_len > 1 or what.kv_dtype != what.q_dtype:
            return {name: way for name, way in WAYS.items() if way[0] == "fa2" and (way[1] or what.q_len == 1)}
        return WAYS
    plain = (what.head_dim_qk, what.head_dim_vo, what.q_dtype) == (128, 128, "bfloat16")
    return {name: way for name, way in WAYS.items() if way[1] and (plain or name == "fa3")}


def build(whats, device: torch.device) -> dict[str, str]:
    """Plan one small batch of every kernel, in threads: planning builds it. Returns the errors, by kernel."""
    kernels = {}
    for what in whats:
        if not isinstance(what, workload.Attention):
            continue
        for way in ways(what).values():
            small = dict(name="", requests=1, q_len=1 if what.is_decode else 64, kv_len=64, qo_heads=1, kv_heads=1)
            one = replace(what, **small, page_size=min(what.page_size, 16), causal=False)
            kernels[one, way] = Runner(one, workload.tensors(one, device), *way)

    def plan(item):
        (what, way), runner = item
        try:
            runner.plan()
        except Exception as error:
            # shown by the rows that need the kernel
            return f"{what} {way}", f"{type(error).__name__}: {error}"

    # nvcc runs for each of the five or so sources of a kernel
    with ThreadPoolExecutor(max(1, os.cpu_count() // 5)) as threads:
        return dict(filter(None, threads.map(plan, kernels.items())))


def measured(what, device: torch.device, timing) -> dict[str, dict]:
    """Peer name -> {"us"} or {"error"} for one row."""
    if isinstance(what, Host):
        works = host_works(what, device, timing)
    elif isinstance(what, (Shared, Mixed)):
        run = composed.runner(what, device)
        works = {"auto": timing.Work(run, run.inputs, check=run.check)}
    else:
        t = workload.tensors(what, device)
        check = functools.partial(workload.check, what, workload.truth(what, t))
        runs = {name: Runner(what, t, *way) for name, way in ways(what).items()}
        works = {name: timing.Work(run, run.inputs, check=check) for name, run in runs.items()}
    found = {f"flashinfer/{name}": timing.checked_time(work, device) for name, work in works.items()}
    print(what.name, found)
    return found


def host_works(h: Host, device: torch.device, timing) -> dict:
    if h.what in ("plan", "run"):
        return {
            name: timing.Work(host_call, (h, device, *way), clock=timing.host_clock) for name, way in WAYS.items()
        }
    if h.cold:
        # its kernels were built before, all at once: a time of their own would cost minutes
        return {}
    return {"auto": timing.Work(lambda: _first_call(device)[h.what], clock=timing.reported)}


def main(only_build: bool) -> dict:
    request = json.load(sys.stdin)
    device = torch.device(request["device"])
    names = request.get("names")
    wanted = [row.what for row in rows(device.type == "cuda") if names is None or row.name in names]
    errors = build(wanted, device)
    if only_build:
        return errors
    timing = load_timing()
    found = {what.name: measured(what, device, timing) for what in wanted}
    return {"versions": {"flashinfer (peer)": flashinfer.__version__}, "rows": found}


if __name__ == "__main__":
    # progress, and what the peer and its compiler print, is not part of the answer
    with contextlib.redirect_stdout(sys.stderr):
        answer = main("--build" in sys.argv[1:])
    print(json.dumps(answer))
