"""Ranks that stop or end: every wait ends by its deadline, with names, and results are NaN."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from flashinfer.ops.comm.collective import Collective
from tests.ops.comm.faults import DEADLINE

ROOT = Path(__file__).resolve().parents[2]
# Rank 0 hosts the store.
CASES = [
    f"{signal} {moment} {victim} 2"
    for signal in ("stop", "kill")
    for moment in ("set-up", "before", "during", "between", "reset", "destroy", "tuning", "barrier", "split")
    for victim in (0, 1)
] + ["stop during 2 3", "kill before 1 3"]
# Of a workspace: the others have nothing to do with a GPU.
ON_GPU = [case for case in CASES if case.split()[1] in ("set-up", "before", "between", "reset", "destroy")]


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
        if moment == "destroy":
            # Nobody is waited for.
            assert each["error"] == "none" and each["seconds"] < DEADLINE, each
            continue
        assert each["error"] == "TimeoutError", each
        calls = ("before", "during", "between")
        operation = "all-reduce" if moment in calls else moment if moment in ("reset", "tuning") else "set-up"
        assert each["words"].startswith(f"{operation}: rank {each['rank']} "), each
        assert f"rank {victim}" in each["words"].partition(":")[2].partition(f"rank {each['rank']} ")[2], each
        # A reset waits for three deadlines; a lost collective asks who else gave up.
        assert each["seconds"] < (3 if moment == "reset" else 2) * DEADLINE + 3, each
        if moment in calls:
            assert each["out"] == "nan" and each["later"] == ["TimeoutError"] * 3, each


class _Work:
    """A collective of NCCL, which says how far it is and waits for nothing on the host."""

    def __init__(self, done):
        self.is_completed = lambda: done

    def wait(self):
        pass


@pytest.mark.parametrize(("world", "named"), [(2, "rank 1"), (3, "one of the ranks 1, 2")])
def test_nccl_is_waited_for_by_the_deadline(world, named):
    """By its interface: the calls go to a stream, and `settle` looks at the last."""
    link = Collective(SimpleNamespace(rank=0, size=1, group=None), torch.device("cpu"), deadline=0.05)
    link.world = world
    link._call("all-reduce", 4, lambda: _Work(True))
    link.settle()
    link._call("all-reduce", 4, lambda: _Work(False))
    link.check()
    start = time.monotonic()
    with pytest.raises(TimeoutError, match=f"all-reduce: rank 0 waited 0.05 s for {named} in exchange 2.* under way"):
        link.settle()
    assert time.monotonic() - start < 1
    with pytest.raises(TimeoutError, match="exchange 2"):
        link._call("all-reduce", 4, lambda: _Work(True))
    link.settle()
