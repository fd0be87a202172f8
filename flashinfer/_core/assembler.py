"""Which PTX is assembled by ptxas 12.9 instead of 12.8. Triton 3.6 ships 12.8 for Hopper, and 12.9 for Blackwell.

The first reason is a bug of 12.8. wgmma reads shared memory by descriptors: an address in the low bits, and a layout,
which is a constant (PTX ISA, "Matrix Descriptor Format"). If descriptors of several layouts are computed from one
register, ptxas 12.8.93 adds the offsets within a tile to an uninitialized register; 12.9.86 does not.

The second is speed, where a kernel asks for it. In a run of float32 multiply-adds every second one of 12.9's yields the
issue slot to another warp, if that has an instruction ready; none of 12.8's does. A warp that scales and adds sums
would otherwise hold up the warp of the other warpgroup that has wgmma to issue.
"""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections import defaultdict
from pathlib import Path

from triton import knobs
from triton.backends.nvidia.compiler import get_ptxas

from flashinfer._core.checks import CompileError

# The sum of a register and a constant: the offset within the tile in the low bits; row stride and swizzle from bit 32
# on.
_SUM = re.compile(r"(?:or\.b64|add\.s64)\s+%\w+, (%\w+), (-?\d{18,});")
_FIRST_RIGHT = 12, 9


def descriptor_sums(ptx: str) -> dict[str, set[int]]:
    """{register: layouts of the descriptors that are computed from it}."""
    layouts = defaultdict(set)
    for register, constant in _SUM.findall(ptx):
        layouts[register].add(int(constant) >> 32)
    return layouts


def registers_of_two_layouts(ptx: str) -> list[str]:
    """Registers from which descriptors with different row strides or swizzles are computed."""
    return [register for register, its in descriptor_sums(ptx).items() if len(its) > 1]


def tools_of(capability: int) -> list[knobs.NvidiaTool]:
    """The assemblers that may be used for a chip, Triton's own choice first."""
    others = (knobs.nvidia.ptxas, knobs.nvidia.ptxas_blackwell) if capability == 90 else ()
    return list({tool.path: tool for tool in (get_ptxas(capability), *others) if tool is not None}.values())


def takes_newer(ptx: str, capability: int, yields: bool) -> bool:
    """Whether PTX is not for the assembler that Triton uses for a chip: its code would be wrong; or slower, as the
    kernel's `yields` says, and a newer assembler is there."""
    if capability != 90 or _version(get_ptxas(capability)) >= _FIRST_RIGHT:
        return False
    if "wgmma" in ptx and registers_of_two_layouts(ptx):
        return True
    return yields and any(_version(tool) >= _FIRST_RIGHT for tool in tools_of(capability))


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
            f"descriptors of two layouts are made of {', '.join(registers_of_two_layouts(ptx))}, which ptxas before "
            f"12.9 assembles wrongly; got {found}; allowed: a newer one, named in TRITON_PTXAS_BLACKWELL_PATH, or "
            "tiles of one layout (docs/rooms/recurrent.md, Descriptors)"
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
