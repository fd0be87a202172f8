"""What is measured in a process of its own: first calls, and the peer that shares our import name."""

from __future__ import annotations

import functools
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import flashinfer
import torch

HERE = Path(__file__).resolve().parent


def python(script: str, *words: str, path: str, send: str = "", **environment: str):
    """Run a script of this folder with `path` as PYTHONPATH; the JSON document that it prints last."""
    settings = os.environ | {"PYTHONPATH": path} | environment
    command = [sys.executable, str(HERE / script), *words]
    done = subprocess.run(command, input=send, stdout=subprocess.PIPE, text=True, env=settings)
    if done.returncode:
        raise RuntimeError(f"{script} ended with status {done.returncode}; what it says stands above")
    return json.loads(done.stdout.splitlines()[-1])


@functools.cache
def first_calls(device: torch.device) -> dict[bool, dict[str, float]]:
    """Microseconds of import and of first calls; True: with an empty kernel cache, False: with what that left.

    Bytecode is kept from one process to the next, as pip keeps it.
    """
    with tempfile.TemporaryDirectory() as base:
        caches = {"FLASHINFER_WORKSPACE_BASE": base, "TRITON_CACHE_DIR": str(Path(base) / "triton")}
        caches["PYTHONDONTWRITEBYTECODE"] = ""
        return {cold: first_call(device, **caches) for cold in (True, False)}


def first_call(device: torch.device, **environment: str) -> dict[str, float]:
    """The same of one new process, with the `flashinfer` of this one."""
    package = Path(flashinfer.__file__).resolve().parents[1]
    path = os.pathsep.join([str(package), os.environ.get("PYTHONPATH", "")])
    return python("first_call.py", str(device), path=path, **environment)
