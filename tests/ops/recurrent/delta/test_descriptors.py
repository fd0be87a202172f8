"""What prefill's kernels for Hopper give the assembler: descriptors of shared memory that ptxas 12.8 sums rightly."""

import os
import re
import subprocess
import sys
from collections import defaultdict
from dataclasses import replace
from types import SimpleNamespace

import pytest

# From the address of a tile, and the rest of a descriptor, which is a constant: its step within the tile below, and
# from bit 32 on the distance of rows and (bits 62, 63) the swizzle. PTX ISA, "Matrix Descriptor Format".
SUM = re.compile(r"(?:or\.b64|add\.s64)\s+%\w+, (%\w+), (-?\d{18,});")


def twofold(ptx):
    """Registers with the address of a tile, of which descriptors with different distances or swizzles are made."""
    layouts = defaultdict(set)
    for register, constant in SUM.findall(ptx):
        layouts[register].add(int(constant) >> 32)
    return [register for register, its in layouts.items() if len(its) > 1]


def test_what_is_looked_for():
    rows_of_128 = "or.b64 \t%rd3, %rd2, 4611686293305294848;\nadd.s64 \t%rd4, %rd2, 4611686293305294850;"
    rows_of_64 = "or.b64 \t%rd5, %rd2, -9223371899415822336;"
    assert twofold(rows_of_128) == []
    assert twofold(f"{rows_of_128}\n{rows_of_64}") == ["%rd2"]
    assert twofold(f"{rows_of_128}\n{rows_of_64.replace('%rd2', '%rd9')}") == []


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
    from flashinfer._core.target import named
    from flashinfer.ops.recurrent.delta import chunks, config
    from tests.meta.test_compile_matrix import ptx_of

    for problem in problems():
        chosen = config.chunks(problem, named("90a"))
        for launcher in (chunks.launch_map,) * problem.segments + (chunks.launch_scan,):
            job = SimpleNamespace(
                module=chunks.__name__, launcher=launcher.name, problem=problem, config=chosen, arch="90a"
            )
            ptx = ptx_of(job)
            print(launcher.name, len(SUM.findall(ptx)) > 0, len(twofold(ptx)), problem, sep="; ")


@pytest.mark.matrix
def test_an_address_has_one_layout():
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    environment["PYTHONPATH"] = os.pathsep.join([os.getcwd(), environment.get("PYTHONPATH", "")])
    command = [sys.executable, "-c", f"from {__name__} import main; main()"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    kernels = [line.split("; ", 3) for line in done.stdout.splitlines()]
    assert len(kernels) == 20 and all(has == "True" for _, has, *_ in kernels), done.stdout
    assert not [line for line in kernels if line[2] != "0"]
