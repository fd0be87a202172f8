"""Small calls of every kind of kernel under compute-sanitizer."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = Path(__file__).with_name("small_cases.py")
SANITIZER = shutil.which("compute-sanitizer")

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(SANITIZER is None, reason="needs compute-sanitizer on the PATH")]


# What racecheck is shown. It does not follow the mbarriers by which copies and wgmma take turns at shared memory, and
# calls each such pair in attend_sm90 a hazard.
WITHOUT_MBARRIERS = ("decode, odd pages and dim", "merge", "tokens", "sampling", "quantisation")


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
