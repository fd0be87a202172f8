"""What Hopper's preparation of chunks gives the assembler: one layout for each descriptor's address, and no spill."""

import os
import subprocess
import sys

import pytest

from tests.ops.recurrent.delta.test_descriptors import SUM, twofold


def problems():
    from flashinfer.ops.recurrent.delta import Chunks

    states = {"source_dtype": "fp32", "state_dtype": "fp32"}
    raw = {"gate_dtype": "bf16", "bias_dtype": "fp32", "beta": "logit", "beta_dtype": "bf16", "normalize": True}
    yield Chunks(128, 128, "bf16", "bf16", gate="softplus", **raw, **states)
    yield Chunks(128, 128, "bf16", "bf16", gate="bounded", **raw, **states, packed=False)
    yield Chunks(64, 64, "bf16", "bf16", gate="linear", gate_dtype="fp32", **states, index="i64")


def main():
    from flashinfer._core.compiler import compile_kernel
    from flashinfer.ops.recurrent.delta import sm90_prepare
    from tests.meta.test_compile_matrix import ptx_of_build

    for problem in problems():
        for config in sm90_prepare.CONFIGS:
            build = sm90_prepare.launch_prepare_heads.build(problem, config)
            ptx = ptx_of_build(build, "90a")
            stack = compile_kernel(build, "90a")[1]["stack_bytes"]
            print(len(SUM.findall(ptx)) > 0, len(twofold(ptx)), stack, config, sep="; ")


@pytest.mark.matrix
def test_an_address_has_one_layout_and_nothing_spills():
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    environment["PYTHONPATH"] = os.pathsep.join([os.getcwd(), environment.get("PYTHONPATH", "")])
    command = [sys.executable, "-c", f"from {__name__} import main; main()"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    kernels = [line.split("; ", 3) for line in done.stdout.splitlines()]
    assert len(kernels) == 9 and all(line[:3] == ["True", "0", "0"] for line in kernels), done.stdout
