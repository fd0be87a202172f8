"""Small calls of every room under compute-sanitizer; without a GPU, that each is a call that runs."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from flashinfer.ops import _ROOMS
from tests import rooms
from tests.sanitizer import small_cases

PROGRAM = Path(small_cases.__file__)
SANITIZER = shutil.which("compute-sanitizer")
OPS = PROGRAM.parents[2] / "flashinfer" / "ops"

# What racecheck is shown. It does not follow the mbarriers by which copies and wgmma take turns at shared memory, and
# calls each such pair in attend_sm90 a hazard; nor does it know of ranks that write each other's memory.
BY_CHIP = {room for room in _ROOMS if any((OPS / room.replace(".", "/")).glob("sm*.py"))} | {"moe.finalize"}
WITHOUT_MBARRIERS = ("decode, odd pages and dim", "merge", "tokens", "wide rows", "quantisation")
WITHOUT_MBARRIERS += tuple(sorted(rooms.CALLS.keys() - BY_CHIP))


def test_every_room_has_a_case():
    assert set(_ROOMS) <= set(small_cases.CASES)


@pytest.mark.skipif(torch.cuda.is_available(), reason="for a machine without a GPU, which runs all of them")
@pytest.mark.parametrize(
    "case",
    ["comm.allreduce_fusion", "comm.alltoall", "decode, odd pages and dim", "merge", "quantisation", "tokens",
     "wide rows"],
)
def test_cases_beside_the_rooms_run(case, monkeypatch):
    monkeypatch.setattr(small_cases, "DEVICE", torch.device("cpu"))
    with rooms.by("portable"):
        small_cases.CASES[case]()


@pytest.mark.gpu
@pytest.mark.skipif(SANITIZER is None, reason="needs a GPU, and compute-sanitizer on the PATH")
@pytest.mark.parametrize(
    ("tool", "options", "cases"),
    [("memcheck", ("--report-api-errors", "no"), ()), ("racecheck", (), WITHOUT_MBARRIERS)],
)
def test_finds_nothing(tool, options, cases, tmp_path):
    environment = os.environ | {
        # Each tensor is an allocation of its own, so that what lies past its end is nobody's.
        "PYTORCH_NO_CUDA_MEMORY_CACHING": "1",
        "FLASHINFER_WORKSPACE_BASE": str(tmp_path),
        "PYTHONPATH": os.pathsep.join([os.getcwd(), os.environ.get("PYTHONPATH", "")]),
    }
    program = [sys.executable, str(PROGRAM), *cases]
    # Compiled before, as ptxas need not be watched.
    subprocess.run(program, env=environment, check=True, timeout=600)
    command = [SANITIZER, "--tool", tool, *options, "--error-exitcode", "9", *program]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
