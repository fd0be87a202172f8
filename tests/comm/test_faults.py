"""Ranks that stop or end: every wait ends by its deadline, with names, and results are NaN."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.ops.comm.faults import DEADLINE

ROOT = Path(__file__).resolve().parents[2]
# Rank 0 hosts the store.
CASES = [
    f"{signal} {moment} {victim} 2"
    for signal in ("stop", "kill")
    for moment in ("set-up", "before", "during", "between", "reset")
    for victim in (0, 1)
] + ["stop during 2 3", "kill before 1 3"]
ON_GPU = [case for case in CASES if " during " not in case]


def said_by(device, cases):
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    environment |= {"TRITON_INTERPRET": "0", "TORCH_CPP_LOG_LEVEL": "ERROR"}
    command = [sys.executable, "-m", "tests.ops.comm.faults", device, *cases]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


@pytest.fixture(scope="module")
def on_cpu():
    return said_by("cpu", CASES)


@pytest.mark.parametrize("case", CASES)
def test_every_wait_ends_and_names(on_cpu, case):
    check(case, on_cpu)


@pytest.mark.gpu
def test_every_wait_ends_and_names_on_a_shared_gpu():
    said = said_by("cuda:0", ON_GPU)
    for case in ON_GPU:
        check(case, said)


def check(case, said):
    _, moment, victim, world = case.split()
    of_case = [each for each in said if each["case"] == case]
    assert len(of_case) == int(world) - 1
    for each in of_case:
        assert each["error"] == "TimeoutError", each
        operation = {"set-up": "set-up", "reset": "reset"}.get(moment, "all-reduce")
        assert each["words"].startswith(f"{operation}: rank {each['rank']} "), each
        assert f"rank {victim}" in each["words"].partition(":")[2].partition(f"rank {each['rank']} ")[2], each
        # A reset waits for three deadlines; a lost collective asks who else gave up.
        assert each["seconds"] < (3 if moment == "reset" else 2) * DEADLINE + 3, each
        if moment not in ("set-up", "reset"):
            assert each["out"] == "nan" and each["later"] == ["TimeoutError"] * 3, each
