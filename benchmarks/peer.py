"""Runs rows of benchmarks with the FlashInfer that is on PYTHONPATH: the process that `flashinfer bench --peer` starts.

A row is stated once, in its benchmark. FlashInfer has our names and parameters, so that the statement runs there as it
is. In this process the name `flashinfer` is the peer's, except `flashinfer.testing.bench` and
`flashinfer.testing.compare`: how a row is timed, and how near its result has to be, is ours.

From stdin: a request as JSON, {"device", "rows": [module, [names]] of each benchmark, "build", "tune"}. To stdout, a
JSON document a line: {"version"}, then, of each row, {"row": [module, name]} before it starts and with "ways" once it
is done: the name of each way through FlashInfer to {"us"} or {"error"}. With "build" one row of each kind runs once, so
that nvcc builds what it needs, and has {"built": seconds}; the others have nothing. With "tune" FlashInfer's tuner,
which chooses by measuring, has a row's first call.
"""

from __future__ import annotations

import gc
import importlib.util
import json
import os
import sys
import time
from concurrent.futures import ThreadPoolExecutor, as_completed
from functools import partial
from itertools import zip_longest
from pathlib import Path

import torch

# Rows that are built at a time. nvcc runs for many sources of each, and most of these rows are of different operators.
_THREADS = 6
# Bytes that are more than a row leaves, unless its objects refer to each other.
_LEFT_BEHIND = 1 << 30


def ours(name: str):
    """flashinfer/testing/<name>.py of this repository, as flashinfer.testing.<name>."""
    path = Path(__file__).resolve().parents[1] / "flashinfer" / "testing" / f"{name}.py"
    spec = importlib.util.spec_from_file_location(f"flashinfer.testing.{name}", path)
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def works(case, device: torch.device) -> dict:
    return {"": case.make(device)} if case.ways is None else case.ways(device)


def each_way(case, device: torch.device, timing, do) -> dict[str, dict]:
    """`do` of each way through FlashInfer, or its error: the peer may have no such function, or refuse the row."""
    found = {}
    try:
        for name, work in works(case, device).items():
            try:
                found[name] = do(work)
            except Exception as error:
                found[name] = timing.failed(error)
    except Exception as error:
        found[""] = timing.failed(error)
    return found


def built(work) -> dict:
    start = time.perf_counter()
    work.run(*work.inputs)
    return {"built": round(time.perf_counter() - start, 1)}


def measured(work, device: torch.device, timing, tune: bool) -> dict:
    if tune:
        from flashinfer import autotune

        with autotune():
            work.run(*work.inputs)
    return timing.checked_time(work, device)


def rows(request: dict, device: torch.device, timing, tell) -> list[list[tuple]]:
    """(module, case) of each row, of each module; a module that does not load here is reported with its rows."""
    wanted = []
    for module, names in request["rows"]:
        try:
            cases = {case.name: case for case in timing.load(Path(module))["cases"](device)}
            wanted.append([(module, cases[name]) for name in names])
        except Exception as error:
            for name in names:
                tell({"row": [module, name], "ways": {"": timing.failed(error)}})
    return wanted


def build_all(wanted: list[list[tuple]], device: torch.device, timing, tell) -> None:
    """Build, in threads, one row of each kind; benchmarks take turns, or the largest would hold up all others."""
    kinds: dict[tuple, tuple] = {}
    for row in (row for turn in zip_longest(*wanted) for row in turn if row):
        module, case = row
        if kinds.setdefault((module, case.kind), row) is not row:
            tell({"row": [module, case.name], "ways": {}})
    with ThreadPoolExecutor(_THREADS) as threads:
        runs = {threads.submit(each_way, row[1], device, timing, built): row for row in kinds.values()}
        for run in as_completed(runs):
            module, case = runs[run]
            tell({"row": [module, case.name], "ways": run.result()})


def main(request: dict, tell) -> None:
    import flashinfer

    folders = [Path(folder).resolve() for folder in os.environ["PYTHONPATH"].split(os.pathsep)]
    if Path(flashinfer.__file__).resolve().parents[1] not in folders:
        raise ImportError(f"the flashinfer that is found is {flashinfer.__file__}, not in {os.environ['PYTHONPATH']}")
    device = torch.device(request["device"])
    timing = ours("bench")
    ours("compare")
    tell({"version": flashinfer.__version__})
    wanted = rows(request, device, timing, tell)
    if request["build"]:
        build_all(wanted, device, timing, tell)
        return
    for module, case in (row for part in wanted for row in part):
        tell({"row": [module, case.name]})
        ways = each_way(case, device, timing, partial(measured, device=device, timing=timing, tune=request["tune"]))
        tell({"row": [module, case.name], "ways": ways})
        if device.type == "cuda":
            # a fault of the device stays with its process: this ends it, and another one runs the rows that are left
            torch.cuda.synchronize(device)
            if torch.cuda.memory_allocated(device) > _LEFT_BEHIND:
                gc.collect()


if __name__ == "__main__":
    # its compilers are in its group, and end with it
    os.setpgrp()
    # what the peer and its compilers print, from its import on, is not part of the answer
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    main(json.load(sys.stdin), lambda answer: print(json.dumps(answer), file=answers, flush=True))
