"""Products of Hopper's tensor cores go to an assembler that does not read registers which nothing has written."""

from dataclasses import replace
from pathlib import Path
from unittest.mock import patch

import pytest
from triton.backends.nvidia.compiler import get_ptxas

from tests.core.sass import unwritten


def kernel_of(name):
    from flashinfer._core.target import named
    from flashinfer.ops.recurrent.delta import Chunks, chunks
    from flashinfer.ops.recurrent.delta import config as delta
    from flashinfer.ops.recurrent.ssd import Prefill, config, portable

    chip = named("90a")
    if name == "layouts":
        # With 32 rows corrections lie where queries of another layout were.
        gates = {"gate": "linear", "gate_dtype": "fp32", "beta": "value", "beta_dtype": "fp32"}
        states = {"source_dtype": "fp32", "state_dtype": "fp32"}
        problem = Chunks(40, 32, "bf16", "bf16", **gates, **states, aligned=False)
        return chunks.launch_scan.build(problem, replace(delta.chunks(problem, chip), rows=32))
    # y of a tile with one in front of it, and of one without: both multiply x from one address.
    problem = Prefill(8, 16, "bf16", "bf16", "fp32", "fp32", "fp32", state_dtype="fp32", gated=True, packed=True)
    launcher = portable.launch_results if name == "branches" else portable.launch_steps
    return launcher.build(problem, config.portable(problem, chip))


def assembled(name, **tools):
    """(assemblers that ran and their options, unwritten registers or the error), with others in place of Triton's."""
    from triton import knobs

    from flashinfer._core import assembler
    from flashinfer._core.compiler import CompileError, compile_kernel

    with knobs.nvidia.scope(), patch.object(assembler.subprocess, "run", wraps=assembler.subprocess.run) as run:
        for tool, other in tools.items():
            setattr(knobs.nvidia, tool, getattr(knobs.nvidia, other).path)
        try:
            cubin, _ = compile_kernel(kernel_of(name), "90a")
        except CompileError as error:
            cubin, result = None, str(error)
    commands = [call.args[0] for call in run.call_args_list]
    # -v prints what the kernel takes.
    ran = [
        (Path(tool).name, sorted(option for option in given if option[0] == "-" and option not in ("-o", "-v")))
        for tool, *given in commands
        if "-o" in given
    ]
    return ran, result if cubin is None else unwritten(cubin)


def without_the_rule(name):
    from flashinfer._core import assembler

    with patch.object(assembler, "takes_newer", lambda ptx, capability: False):
        return assembled(name)[1]


def outcomes():
    made = {name: assembled(name) for name in ("branches", "layouts", "no product")}
    made["by Triton"] = assembled("branches", ptxas="ptxas_blackwell")
    made["without a newer"] = assembled("branches", ptxas_blackwell="ptxas")
    return made, {name: without_the_rule(name) for name in ("branches", "layouts")}


def test_products_go_to_the_newer_assembler(in_triton):
    if get_ptxas(90).version != "12.8":
        pytest.skip("this Triton's own assembler for Hopper is right")
    made, wrong = in_triton(outcomes)
    assert all(wrong.values()), wrong
    ran, results = ({name: each[i] for name, each in made.items()} for i in (0, 1))
    assert {name: [tool for tool, _ in each] for name, each in ran.items()} == {
        "branches": ["ptxas-blackwell"], "layouts": ["ptxas-blackwell"], "no product": ["ptxas"],
        "by Triton": ["ptxas-blackwell"], "without a newer": [],
    }  # fmt: skip
    # The newer assembler gets the options that Triton gives it.
    assert ran["branches"] == ran["by Triton"] and any("sm_90a" in option for option in ran["by Triton"][0][1])
    error = results.pop("without a newer")
    assert "(12.8)" in error and "TRITON_PTXAS_BLACKWELL_PATH" in error
    assert results == dict.fromkeys(results, [])
