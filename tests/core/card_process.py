"""A process with a card that is not there, for functions of tests."""

import hashlib
import os
from contextlib import contextmanager

from tests import forked


@contextmanager
def card_process(base, machine_code=False):
    """Gives what calls a function of a test's module in such a process; the function gets the card.

    Nothing runs the kernels there. Unless `machine_code` is asked for they are not compiled: what a launch is made of
    is what their launcher says of them. What looks at a kernel's body is called with `whole`, and gets PTX that nobody
    optimised. Their cache is in `base`.
    """
    with forked.process(_insert, base, machine_code) as call:
        yield lambda function, *args, whole=False: call(_with_card, function, args, whole)


def _insert(base, machine_code):
    os.environ.pop("TRITON_INTERPRET", None)
    os.environ["FLASHINFER_WORKSPACE_BASE"] = str(base)
    global CARD, PARSED
    from flashinfer._core import assembler, compiler
    from tests.core import card

    CARD, PARSED = card.insert(), compiler.parsed
    if not machine_code:
        os.environ["DISABLE_LLVM_OPT"] = "1"
        compiler._resources = lambda cubin: {"registers": 0, "stack_bytes": 0}
        assembler.assemble = lambda ptx, options, arch: ptx.encode()
        compiler.parsed = _stated


def _stated(build, arch):
    """In place of `compiler.parsed`: a kernel with parameters and no body, whose every thread waits if it may be early.

    Build's own checks have its types and constants agree with the kernel. That compiled kernels take what is written
    here is for tests/core/test_compiler.py, tests/core/test_gluon_compat.py and tests/meta/test_compile_matrix.py.
    """
    from flashinfer._core import compiler

    name, (kinds, maps) = build.kernel.__name__, _parameters(build.types)
    entry = ",\n".join(f".param {kind.replace('NAME', f'{name}_param_{i}')}" for i, kind in enumerate(kinds))
    # Kernels that differ stay different.
    body = hashlib.sha256(str(compiler.key_of(name, None, None, build, arch)).encode()).hexdigest()
    begin = "griddepcontrol.wait;" if build.constants.get("PDL") else "ret;"
    ptx = f"// {body}\n.target sm_{arch}\n.entry {name}({entry})\n.reqntid {32 * build.num_warps}\n{{{begin}}}\n"
    metadata = {"name": name, "shared": 0, "tensordesc_meta": maps}
    return lambda: (ptx.encode(), compiler._describe(arch, ptx, b"", metadata))


def _parameters(types):
    """(PTX of each parameter, metadata of each tensor map), as Triton writes them."""
    from flashinfer._core import compiler, parameters
    from flashinfer._core.checks import torch_dtype

    kinds, maps = [], []
    for kind in types.values():
        if match := parameters._MAP.match(kind):
            block = [int(size) for size in match[2].split(",")]
            kinds += [".align 64 .b8 NAME[128]", *[".u32 NAME"] * len(block), *[".u64 NAME"] * len(block)]
            size = torch_dtype(match[1]).itemsize
            maps.append({"elem_size": size, "block_size": block, "swizzle": 0, "fp4_padded": False})
        else:
            bare = "u64" if kind[0] == "*" else parameters.SCALARS[compiler.promise_of(kind)[0]][1]
            kinds.append(f".{bare} NAME")
    # Two addresses of scratch memory.
    return [*kinds, ".u64 NAME", ".u64 NAME"], maps


def _ptx(backend, stages, *others):
    stages["cubin"] = lambda ptx, metadata: ptx.encode()


def _with_card(function, args, whole):
    if not whole:
        return function(CARD, *args)
    from triton import knobs

    from flashinfer._core import compiler

    knobs.runtime.add_stages_inspection_hook, compiler.parsed = _ptx, PARSED
    try:
        return function(CARD, *args)
    finally:
        knobs.runtime.add_stages_inspection_hook, compiler.parsed = None, _stated
