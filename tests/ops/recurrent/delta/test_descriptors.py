"""What prefill's kernels for Hopper give the assembler: descriptors of shared memory that ptxas 12.8 sums rightly."""

import os
import subprocess
import sys
from dataclasses import replace
from types import SimpleNamespace

import pytest


def problems():
    from flashinfer.ops.recurrent.delta import Chunks

    states = {"source_dtype": "fp32", "state_dtype": "fp32"}
    gates = {"gate": "linear", "gate_dtype": "fp32", "beta": "value", "beta_dtype": "fp32"}
    for dims in ((12, 32), (24, 16), (72, 64), (128, 128)):
        head = Chunks(*dims, "bf16", "bf16", **gates, **states, normalize=True, segments=True)
        yield head
        yield replace(head, segments=False, normalize=False, index="i64")
        yield replace(head, segments=False, marks_dtype="fp32", aligned=False)
        yield replace(head, segments=False, normalize=False, channels=True, gate="log")


def main():
    from flashinfer._core.assembler import descriptor_sums, registers_of_two_layouts
    from flashinfer._core.target import named
    from flashinfer.ops.recurrent.delta import chunks, config, sm90
    from tests.meta.test_compile_matrix import ptx_of

    for problem in problems():
        target = named("90a")
        kernels = [(chunks, x, config.chunks) for x in (chunks.launch_map,) * problem.segments + (chunks.launch_scan,)]
        if not config.refuses_chunks_sm90(problem, target):
            kernels.append((sm90, sm90.launch_scan_sm90, config.chunks_sm90))
        for module, launcher, choose in kernels:
            job = SimpleNamespace(
                module=module.__name__, launcher=launcher.name, problem=problem, config=choose(problem, target),
                arch="90a",
            )  # fmt: skip
            ptx = ptx_of(job)
            two = len(registers_of_two_layouts(ptx))
            print(launcher.name, len(descriptor_sums(ptx)) > 0, two, problem, sep="; ")


@pytest.mark.matrix
def test_an_address_has_one_layout():
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    environment["PYTHONPATH"] = os.pathsep.join([os.getcwd(), environment.get("PYTHONPATH", "")])
    command = [sys.executable, "-c", f"from {__name__} import main; main()"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    kernels = [line.split("; ", 3) for line in done.stdout.splitlines()]
    assert len(kernels) == 22 and all(has == "True" for _, has, *_ in kernels), done.stdout
    assert not [line for line in kernels if line[2] != "0"]
