"""Measures the FlashInfer that is on PYTHONPATH: rows by name from stdin, times as JSON on stdout.

    echo '{"device": "cuda", "names": ["rmsnorm 4096x8192"]}' | python peer_flashinfer.py
    echo '{"device": "cuda"}' | python peer_flashinfer.py --build

`--build` runs each row once and times none, so that nvcc builds what they need; without `names`, all rows.

The name `flashinfer` belongs to the peer here, and `flashinfer.testing.bench`, which the rows import, to our clock.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import flashinfer
import torch


def load_timing():
    """flashinfer/testing/bench.py of this repository, as flashinfer.testing.bench."""
    path = Path(__file__).resolve().parents[2] / "flashinfer" / "testing" / "bench.py"
    name = "flashinfer.testing.bench"
    spec = importlib.util.spec_from_file_location(name, path)
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def built(case, device: torch.device) -> dict:
    """Run a row once."""
    try:
        work = case.make(device)
        work.run(*work.inputs)
        torch.cuda.synchronize(device)
    except Exception as error:
        # shown with the row
        return {"error": f"{type(error).__name__}: {str(error).strip()[:300]}"}
    return {}


def main(only_build: bool) -> dict:
    request = json.load(sys.stdin)
    device = torch.device(request["device"])
    timing = load_timing()
    from table import selected

    names = request.get("names")
    cases = [case for _, case in selected(device) if names is None or case.name in names]
    if only_build:
        # a row waits for nvcc, and most rows share an operator: few threads build them all
        with ThreadPoolExecutor(8) as threads:
            return dict(zip((case.name for case in cases), threads.map(lambda case: built(case, device), cases)))
    found = {}
    for case in cases:
        found[case.name] = {"flashinfer": measured(case, device, timing)}
        print(case.name, found[case.name])
    return {"versions": {"flashinfer (peer)": flashinfer.__version__}, "rows": found}


def measured(case, device: torch.device, timing) -> dict:
    try:
        work = case.make(device)
    except Exception as error:
        # the peer has no such function, or refuses the row
        return {"error": f"{type(error).__name__}: {str(error).strip()[:300]}"}
    return timing.checked_time(work, device)


if __name__ == "__main__":
    # progress, and what the peer and its compiler print, is not part of the answer
    with contextlib.redirect_stdout(sys.stderr):
        answer = main("--build" in sys.argv[1:])
    print(json.dumps(answer))
