"""The assembler of kernels for Hopper's tensor cores: ptxas 12.9, where Triton would take 12.8.

Triton 3.6 ships 12.8.93 for Hopper, and 12.9.86 for Blackwell. wgmma reads shared memory by descriptors, each a sum of
an address and a constant (PTX ISA, "Matrix Descriptor Format"). 12.8 keeps sums that it shares in uniform registers,
and where two branches, or products of two layouts, compute sums of one address, it may read such a register where only
the other branch has written it: the product then has other memory for an operand. 12.9 does not. On an H100 results of
`ssd_results` were wrong so for heads of 8 columns; tests/core/test_assembler.py finds such reads in machine code.

Of 36 kernels that were compared, the two write loops of the same instructions, but for float32 multiply-adds that add
up FP8 products: in a run of them every second one of 12.9's yields the issue slot to the other warpgroup, which has
wgmma to issue.
"""

from __future__ import annotations

import subprocess
import tempfile
from pathlib import Path

from triton import knobs
from triton.backends.nvidia.compiler import get_ptxas

from flashinfer._core.checks import CompileError

_FIRST_RIGHT = 12, 9


def tools_of(capability: int) -> list[knobs.NvidiaTool]:
    """The assemblers that may be used for a chip, Triton's own choice first."""
    others = (knobs.nvidia.ptxas, knobs.nvidia.ptxas_blackwell) if capability == 90 else ()
    return list({tool.path: tool for tool in (get_ptxas(capability), *others) if tool is not None}.values())


def takes_newer(ptx: str, capability: int) -> bool:
    """Whether Triton's assembler for the chip is one that may get this PTX wrong."""
    return capability == 90 and "wgmma" in ptx and _version(get_ptxas(capability)) < _FIRST_RIGHT


def assemble(ptx: str, options, arch: str) -> bytes:
    """Assemble a cubin with the first of Triton's assemblers that is new enough, with Triton's options.

    Parameters
    ----------
    options : CUDAOptions
        Triton's options of the kernel. The knobs for source lines and optimization are respected too.

    Raises
    ------
    CompileError
        No assembler is new enough, or it failed; the message has its output.
    """
    tools = tools_of(90)
    tool = next((tool for tool in tools if _version(tool) >= _FIRST_RIGHT), None)
    if tool is None:
        found = ", ".join(f"{tool.path} ({tool.version})" for tool in tools)
        raise CompileError(
            f"ptxas: got {found}; allowed: 12.9 or newer, named in TRITON_PTXAS_BLACKWELL_PATH; older ones assemble "
            "products of Hopper's tensor cores wrongly"
        )
    slow, quiet = knobs.nvidia.disable_ptxas_opt, knobs.compilation.disable_line_info
    flags = ["-g"] if slow and not quiet else ["-lineinfo"]
    flags += ["-suppress-debug-info"] * quiet + ["--fmad=false"] * (not options.enable_fp_fusion)
    # As Triton from 3.7 on does, for a bug of ptxas 13.
    flags += ["--opt-level", "0"] * slow + ["--regAllocOptLevel=2"] * (_version(tool) >= (13,))
    flags += (options.ptx_options or "").split()
    with tempfile.TemporaryDirectory() as folder:
        text, cubin = Path(folder, "kernel.ptx"), Path(folder, "kernel.cubin")
        text.write_text(ptx)
        command = [tool.path, *flags, f"--gpu-name=sm_{arch}", str(text), "-o", str(cubin)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            raise CompileError(f"{' '.join(command)} ended with status {done.returncode}\n{done.stderr}")
        return cubin.read_bytes()


def _version(tool) -> tuple[int, ...]:
    return tuple(map(int, tool.version.split(".")))
