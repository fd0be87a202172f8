"""PTX that Triton's assembler for Hopper assembles wrongly goes to the newer one beside it, and so does a kernel whose
warps are to yield; nothing else does."""

from dataclasses import replace
from pathlib import Path
from unittest.mock import patch

import pytest
from triton.backends.nvidia.compiler import get_ptxas

from flashinfer._core.assembler import registers_of_two_layouts


def test_what_is_looked_for():
    rows_of_128 = "or.b64 \t%rd3, %rd2, 4611686293305294848;\nadd.s64 \t%rd4, %rd2, 4611686293305294850;"
    rows_of_64 = "or.b64 \t%rd5, %rd2, -9223371899415822336;"
    assert registers_of_two_layouts(rows_of_128) == []
    assert registers_of_two_layouts(f"{rows_of_128}\n{rows_of_64}") == ["%rd2"]
    assert registers_of_two_layouts(f"{rows_of_128}\n{rows_of_64.replace('%rd2', '%rd9')}") == []


def kernel_of(rows):
    """A scan of GDN whose rows are not aligned. With 32 rows corrections lie where queries of another layout were."""
    from flashinfer._core.target import named
    from flashinfer.ops.recurrent.delta import Chunks, chunks, config

    gates = {"gate": "linear", "gate_dtype": "fp32", "beta": "value", "beta_dtype": "fp32"}
    states = {"source_dtype": "fp32", "state_dtype": "fp32"}
    problem = Chunks(40, 32, "bf16", "bf16", **gates, **states, aligned=False)
    return chunks.launch_scan.build(problem, replace(config.chunks(problem, named("90a")), rows=rows))


def assembled(rows, yields=False, **tools):
    """(assemblers that ran and their options, whether there is a cubin or its error), with others in place of
    Triton's."""
    from triton import knobs

    from flashinfer._core import assembler
    from flashinfer._core.compiler import CompileError, compile_kernel

    with knobs.nvidia.scope(), patch.object(assembler.subprocess, "run", wraps=assembler.subprocess.run) as run:
        for name, other in tools.items():
            setattr(knobs.nvidia, name, getattr(knobs.nvidia, other).path)
        try:
            result = isinstance(compile_kernel(replace(kernel_of(rows), yields=yields), "90a")[0], bytes)
        except CompileError as error:
            result = str(error)
    commands = [call.args[0] for call in run.call_args_list]
    # -v prints what the kernel takes.
    ran = [
        (Path(tool).name, sorted(option for option in given if option[0] == "-" and option not in ("-o", "-v")))
        for tool, *given in commands
        if "-o" in given
    ]
    return ran, result


def outcomes():
    return {
        "two layouts": assembled(32),
        "one layout": assembled(64),
        "by Triton": assembled(32, ptxas="ptxas_blackwell"),
        "without a newer": assembled(32, ptxas_blackwell="ptxas"),
        "yields": assembled(64, yields=True),
        "yields, without a newer": assembled(64, yields=True, ptxas_blackwell="ptxas"),
    }


def test_two_layouts_go_to_the_newer_assembler(in_triton):
    if get_ptxas(90).version != "12.8":
        pytest.skip("this Triton's own assembler for Hopper is right")
    found = in_triton(outcomes)
    ran, results = ({name: each[i] for name, each in found.items()} for i in (0, 1))
    assert {name: [tool for tool, _ in each] for name, each in ran.items()} == {
        "two layouts": ["ptxas-blackwell"], "one layout": ["ptxas"], "by Triton": ["ptxas-blackwell"],
        "without a newer": [], "yields": ["ptxas-blackwell"], "yields, without a newer": ["ptxas"],
    }  # fmt: skip
    # The newer assembler gets the options that Triton gives it.
    assert ran["two layouts"] == ran["by Triton"] and any("sm_90a" in option for option in ran["by Triton"][0][1])
    error = results.pop("without a newer")
    assert "two layouts" in error and "(12.8)" in error and "TRITON_PTXAS_BLACKWELL_PATH" in error
    assert set(results.values()) == {True}
