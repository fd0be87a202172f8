"""First calls, each in a process of its own."""

from __future__ import annotations

import functools
import tempfile
from pathlib import Path

import child
import torch


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
    """The same of one new process."""
    return child.python(Path(__file__).with_name("first_call.py"), str(device), **environment)
