"""The machine code of Hopper's preparation of chunks: no spill, and no register that is read before it is written."""

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
    from flashinfer._core.compiler import compile_kernel
    from flashinfer.ops.recurrent.delta import sm90_prepare, sm90_prepare_channels
    from tests.core.sass import unwritten

    heads = [(sm90_prepare, problem, config) for problem in problems() for config in sm90_prepare.CONFIGS]
    channels = [(sm90_prepare_channels, problem, sm90_prepare_channels.CONFIGS[0]) for problem in channel_problems()]
    for module, problem, config in heads + channels:
        cubin, made = compile_kernel(module.LAUNCHER.build(problem, config), "90a")
        print(made["stack_bytes"], unwritten(cubin), config, sep="; ")


@pytest.mark.matrix
def test_nothing_spills_and_nothing_is_read_before_it_is_written():
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    environment["PYTHONPATH"] = os.pathsep.join([os.getcwd(), environment.get("PYTHONPATH", "")])
    command = [sys.executable, "-c", f"from {__name__} import main; main()"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    kernels = [line.split("; ", 2) for line in done.stdout.splitlines()]
    assert len(kernels) == 11 and all(line[:2] == ["0", "[]"] for line in kernels), done.stdout
