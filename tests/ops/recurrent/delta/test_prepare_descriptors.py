"""What Hopper's preparation of chunks gives the assembler: one layout for each descriptor's address, and no spill."""

import os
import subprocess
import sys

import pytest


def problems():
    from flashinfer.ops.recurrent.delta import Chunks

    states = {"source_dtype": "fp32", "state_dtype": "fp32"}
    raw = {"gate_dtype": "bf16", "bias_dtype": "fp32", "beta": "logit", "beta_dtype": "bf16", "normalize": True}
    yield Chunks(128, 128, "bf16", "bf16", gate="softplus", **raw, **states)
    yield Chunks(128, 128, "bf16", "bf16", gate="bounded", **raw, **states, packed=False)
    yield Chunks(64, 64, "bf16", "bf16", gate="linear", gate_dtype="fp32", **states, index="i64")


def channel_problems():
    from flashinfer.ops.recurrent.delta import Chunks

    kda = {"source_dtype": "fp32", "state_dtype": "fp32", "channels": True, "bounded": True}
    raw = {"gate_dtype": "bf16", "bias_dtype": "fp32", "beta": "logit", "beta_dtype": "bf16", "normalize": True}
    yield Chunks(128, 128, "bf16", "bf16", gate="bounded", **raw, **kda)
    yield Chunks(64, 64, "bf16", "bf16", gate="log", gate_dtype="fp32", **kda, packed=False)


def main():
    from flashinfer._core.assembler import descriptor_sums, registers_of_two_layouts
    from flashinfer._core.compiler import compile_kernel
    from flashinfer.ops.recurrent.delta import sm90_prepare, sm90_prepare_channels
    from tests.meta.test_compile_matrix import ptx_given_to

    heads = [(sm90_prepare, problem, config) for problem in problems() for config in sm90_prepare.CONFIGS]
    channels = [(sm90_prepare_channels, problem, sm90_prepare_channels.CONFIGS[0]) for problem in channel_problems()]
    for module, problem, config in heads + channels:
        build = module.LAUNCHER.build(problem, config)
        seen = []
        with ptx_given_to(seen.append):
            stack = compile_kernel(build, "90a")[1]["stack_bytes"]
        (ptx,) = seen
        print(len(descriptor_sums(ptx)) > 0, len(registers_of_two_layouts(ptx)), stack, config, sep="; ")


@pytest.mark.matrix
def test_an_address_has_one_layout_and_nothing_spills():
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    environment["PYTHONPATH"] = os.pathsep.join([os.getcwd(), environment.get("PYTHONPATH", "")])
    command = [sys.executable, "-c", f"from {__name__} import main; main()"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    kernels = [line.split("; ", 3) for line in done.stdout.splitlines()]
    assert len(kernels) == 11 and all(line[:3] == ["True", "0", "0"] for line in kernels), done.stdout
