"""What an engine runs per token: rows of several rooms' benchmarks in one table, with FlashInfer beside each.

A row is stated once, in its room's benchmark. FlashInfer has our names and parameters, so its process
(peer_flashinfer.py; `flashinfer bench tokens --peer PATH` says where it is installed) runs that same statement.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch
from table import HEADLINES, selected

from flashinfer.testing.bench import Case, Work


def cases(device: torch.device) -> Iterator[Case]:
    """Prefill and decode batches on a GPU; those of a small model on a CPU."""
    for room, case in selected(device):
        make = partial(_beside_a_copy, case.make)
        yield replace(case, make=make, group=room, headline=case.name in HEADLINES)


def _beside_a_copy(make, device: torch.device) -> Work:
    """The work of a row, and where bandwidth counts a copy of as many bytes: the ceiling is that of a far larger one,
    in which launch and last wave do not show.
    """
    work = make(device)
    if work.bytes < 1 << 26:
        return work
    source = torch.empty(work.bytes // 2, dtype=torch.uint8, device=device)
    copy = Work(lambda source, target: target.copy_(source), (source, torch.empty_like(source)))
    return replace(work, peers=work.peers | {"copy of its bytes": copy})


def outside(names: list[str], device: torch.device, peer: str | None) -> dict:
    """Rows of the FlashInfer that is installed in the folders `peer` (joined as in PYTHONPATH).

    Returns
    -------
    dict
        `versions` of what ran, and `rows`: case name to {peer name: {"us"} or {"error"}}.
    """
    if peer is None:
        return {"versions": {}, "rows": {name: {"flashinfer": {"error": "not installed"}} for name in names}}
    if device.type == "cuda":
        torch.cuda.empty_cache()
    command = [sys.executable, str(Path(__file__).with_name("peer_flashinfer.py"))]
    settings = os.environ | {"PYTHONPATH": peer, "FLASHINFER_DISABLE_VERSION_CHECK": "1"}
    request = json.dumps({"device": str(device), "names": names})
    done = subprocess.run(command, input=request, stdout=subprocess.PIPE, text=True, env=settings)
    if done.returncode:
        raise RuntimeError(f"{command[1]} ended with status {done.returncode}; what it says stands above")
    return json.loads(done.stdout.splitlines()[-1])
