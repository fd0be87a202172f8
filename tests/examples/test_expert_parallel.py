"""The expert-parallel layer gives what one rank gives."""

import os
import subprocess
import sys

import pytest

from examples.expert_parallel import layer as example


@pytest.mark.matrix
def test_two_ranks():
    environment = {k: v for k, v in os.environ.items() if k not in ("TRITON_INTERPRET", "RANK")}
    environment["OMP_NUM_THREADS"] = "1"
    command = [sys.executable, "-m", "examples.expert_parallel", "--ranks", "2", "--tokens", "9"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    assert "2 ranks on cpu, through collective (gloo): off by" in done.stdout


def test_one_rank_on_a_device(device):
    assert example.work(0, 1, 20, device) < (1e-5 if device.type == "cpu" else 2e-2)
