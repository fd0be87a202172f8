"""A process with a card that is not there, for functions of tests."""

import hashlib
import multiprocessing
import os
import re
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager


@contextmanager
def card_process(base, machine_code=False):
    """Gives what calls a function of a test's module in such a process; the function gets the card.

    Nothing runs the kernels there. Unless `machine_code` is asked for they are PTX that nobody optimised or, of a
    kernel of Triton's without descriptors, no more than its entry, as its parameters are all that a launch is made of.
    What looks at a kernel's body is called with `whole`. Their cache is in `base`.
    """
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(1, mp_context=spawn, initializer=_insert, initargs=(base, machine_code)) as process:
        yield lambda function, *args, whole=False: process.submit(_with_card, function, args, whole).result()


def _insert(base, machine_code):
    os.environ.pop("TRITON_INTERPRET", None)
    os.environ["FLASHINFER_WORKSPACE_BASE"] = str(base)
    global CARD
    from tests.core import card

    CARD = card.insert()
    if not machine_code:
        from flashinfer._core import assembler, compiler

        os.environ["DISABLE_LLVM_OPT"] = "1"
        compiler._resources = lambda cubin: {"registers": 0, "stack_bytes": 0}
        assembler.assemble = lambda ptx, options, arch: ptx.encode()
        _end_with(_entry)


def _end_with(stages):
    from triton import knobs

    knobs.runtime.add_stages_inspection_hook = stages


def _ptx(backend, stages, *others):
    stages["cubin"] = lambda ptx, metadata: ptx.encode()


def _entry(backend, stages, options, language, capability):
    """Stages that write what a launch needs to know of a kernel, from its Triton IR."""
    _ptx(backend, stages)

    def unless_text(stage):
        return lambda module, metadata: module if isinstance(module, str) else stage(module, metadata)

    def ttgir(module, metadata, whole=stages["ttgir"]):
        name, parameters = re.search(r"tt\.func public @(\w+)\((.*?)\) attributes", str(module), re.DOTALL).groups()
        kinds = re.findall(r"%\w+: (!tt\.\w+|\w+)", parameters)
        if "!tt.tensordesc" in kinds:
            return whole(module, metadata)
        metadata |= {"name": name, "shared": 0}
        types = ["u64" if kind == "!tt.ptr" else kind.replace("i", "u") for kind in kinds] + ["u64", "u64"]
        waits = "griddepcontrol.wait;" if "griddepcontrol.wait" in str(module) else "ret;"
        entry = ",\n".join(f".param .{kind} {name}_param_{i}" for i, kind in enumerate(types))
        target = "90a" if capability == 90 else capability
        # Kernels that differ stay different.
        body = hashlib.sha256(f"{module} {options}".encode()).hexdigest()
        head = f"// {body}\n.target sm_{target}\n.entry {name}({entry})\n"
        return f"{head}.reqntid {32 * options.num_warps}\n{{{waits}}}\n"

    if "ttir" in stages:
        stages |= {"ttgir": ttgir, "llir": unless_text(stages["llir"]), "ptx": unless_text(stages["ptx"])}


def _with_card(function, args, whole):
    if not whole:
        return function(CARD, *args)
    _end_with(_ptx)
    try:
        return function(CARD, *args)
    finally:
        _end_with(_entry)
