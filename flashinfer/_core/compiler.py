"""Compiles a Build for an architecture to a cubin and the data of a launch. Needs Triton, but no GPU and no driver.

Triton's stages run one after another in memory. `triton.compile` would run the same stages through Triton's own file
cache.
"""

from __future__ import annotations

import dis
import hashlib
import inspect
import os
import re
import subprocess
import sys
import threading
from collections import namedtuple
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import CodeType, ModuleType
from typing import Any

import triton
import triton.language as tl
from triton import knobs
from triton._C.libtriton import get_cache_invalidating_env_vars, ir
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.compiler.compiler import make_backend
from triton.compiler.errors import CompilationError
from triton.runtime.jit import JITCallable

from flashinfer._core import assembler, env
from flashinfer._core.cache_folders import find_temporary
from flashinfer._core.checks import CompileError
from flashinfer._core.kernel_cache import fields_of

# Raise when an entry's layout, the assembler or the code that it gets changes: older entries are then misses.
FORMAT = 4

_LOAD_GLOBAL = dis.opmap["LOAD_GLOBAL"]
# The flags of an LLVM instruction on vectors that promise that no lane overflows or loses bits. `or disjoint` promises
# something of single bits, which stay in their lane.
_FLAGS_OF_LANES = re.compile(r"(= \w+)(?: (?:nuw|nsw|exact|nneg))+(?= <\d+ x i)")
_SIZES = {"8": 1, "16": 2, "32": 4, "64": 8}
# Python's ast keeps one recursion depth for all threads, and raises SystemError if two threads build trees at once.
_parsing = threading.RLock()
_counting = threading.Lock()
_compiling: list[ExitStack] = []


def key_of(name: str, problem, config, build, arch: str) -> dict:
    """The compile key: everything that determines the generated code, as plain data that JSON keeps unchanged."""
    return {
        "format": FORMAT,
        "name": name,
        "arch": arch,
        "problem": fields_of(problem),
        "config": fields_of(config),
        "kernel": f"{build.kernel.__module__}.{build.kernel.__qualname__}",
        "types": dict(build.types),
        "constants": {parameter: _plain(parameter, value) for parameter, value in build.constants.items()},
        "options": _options(build) | {"line_info": env.LINE_INFO.is_on()},
        "triton": triton.__version__,
        "source": fingerprint(build.kernel),
        "environment": _environment(capability_of(arch)),
    }


def compile_kernel(build, arch: str) -> tuple[bytes, dict]:
    """The cubin, and the data of a launch: symbol, threads, shared bytes, parameters, tensor maps, resources."""
    return parsed(build, arch)()


def parsed(build, arch: str) -> Callable[[], tuple[bytes, dict]]:
    """Parse the kernel to Triton's IR. The returned function compiles the IR, once, on any thread, without parsing."""
    capability = capability_of(arch)
    target = GPUTarget("cuda", capability, 32)
    backend = make_backend(target)
    options = backend.parse_options(_options(build) | {"arch": f"sm{capability}"})
    context = ir.context()
    ir.load_dialects(context)
    backend.load_dialects(context)
    source = _source(build)
    stages: dict = {}
    backend.add_stages(stages, options, source.language)
    order = list(stages)
    with _lines_as_asked(), _parsing:
        try:
            first = source.make_ir(
                target, options, backend.get_codegen_implementation(options), backend.get_module_map(), context
            )
        except CompilationError as error:
            raise CompileError(_explained(error, build)) from error

    def compiled() -> tuple[bytes, dict]:
        find_temporary()
        metadata: dict = {}
        made = {}
        module = first
        with _lines_as_asked():
            for stage in order[order.index(source.ext) :]:
                if stage == "cubin" and assembler.takes_newer(made["ptx"], capability):
                    made[stage] = assembler.assemble(made["ptx"], options, arch)
                else:
                    module = made[stage] = stages[stage](module, metadata)
                if stage == "llir":
                    module = made[stage] = without_flags_of_lanes(module)
        return made["cubin"], _describe(arch, made["ptx"], made["cubin"], metadata)

    return compiled


def without_flags_of_lanes(llvm_ir: str) -> str:
    """LLVM IR whose instructions on vectors of integers promise nothing about overflow.

    LLVM's SLP vectorizer makes `(and x, 24), (shl y, 3)` an `and` and a `shl nuw nsw <2 x i32> (x, y), (24, 3)`, and
    uses lane 0 of the first and lane 1 of the second. The other lanes may overflow in spite of the flags. The backend
    for PTX joins both lanes of the shift in 64 bits and lets the flags stand for a clear upper half, so lane 0 runs
    over into lane 1. By Triton 3.6 a product of MXFP8 and MXFP4 had wrong factors in 6 of 8 warps for this reason.
    """
    return _FLAGS_OF_LANES.sub(r"\1", llvm_ir)


@contextmanager
def _lines_as_asked() -> Iterator[None]:
    """Set Triton's knob for source lines as this package's setting says. The knob is global to the process: the first
    concurrent compilation sets it, and the last one restores it."""
    with _counting:
        scope = ExitStack() if not _compiling else _compiling[0]
        if not _compiling:
            scope.enter_context(knobs.compilation.scope())
            knobs.compilation.disable_line_info = not env.LINE_INFO.is_on()
        _compiling.append(scope)
    try:
        yield
    finally:
        with _counting:
            if len(_compiling) == 1:
                scope.close()
            _compiling.pop()


def _explained(error: CompilationError, build) -> str:
    """The error's message with file and line of the innermost function that is not Triton's own."""
    functions = {f.src: f for f in _reached_from((build.kernel, *build.constants.values())) if hasattr(f, "src")}
    place, reason = "", str(error)
    while error is not None:
        if isinstance(error, CompilationError):
            if error.src in functions and hasattr(error.node, "lineno"):
                place = _place_of(functions[error.src], error)
            reason = error.error_message or reason
        else:
            reason = f"{type(error).__name__}: {error}"
        error = error.__cause__
    return f"{place}\n{reason}" if place else reason


def _place_of(function, error: CompilationError) -> str:
    """File, line, function and text of the line that `error` counts from the function's `def`."""
    lines, first = inspect.getsourcelines(function.fn)
    first += next(i for i, line in enumerate(lines) if line.lstrip().startswith("def "))
    text = error.src.splitlines()[error.node.lineno - 1].strip()
    file, name = function.fn.__code__.co_filename, function.fn.__name__
    return f"{file}:{first + error.node.lineno - 1}: in {name}: {text}"


def _reached_from(values) -> list:
    """The device functions among `values`, and those that they call; none of Triton's own."""
    found: dict[int, Any] = {}
    waiting = list(values)
    while waiting:
        value = waiting.pop()
        if is_device_function(value) and not _is_tritons(value.fn.__module__) and id(value) not in found:
            found[id(value)] = value
            waiting += _used_by(value).values()
    return list(found.values())


def check_names(*functions) -> None:
    """Raise TypeError if two functions that one kernel calls have the same name: the compiler keeps one for each
    name."""
    named: dict[str, Any] = {}
    for function in _reached_from(functions):
        name = f"{function.fn.__module__}.{function.fn.__qualname__}"
        other = named.setdefault(name, function)
        if other is not function and fingerprint(other, by_source=True) != fingerprint(function, by_source=True):
            raise TypeError(f"two functions are both called {name}: the compiler needs two names")


def capability_of(arch: str) -> int:
    """90 for "90a". Triton itself adds the suffix that gives an architecture's own instructions, from 90 on."""
    return int(arch.rstrip("a"))


def is_device_function(value) -> bool:
    """Whether `value` was made by `@triton.jit`: the function itself, or what stands for it under the interpreter."""
    # By the class's name, so that the interpreter's module need not be imported.
    return isinstance(value, JITCallable) or type(value).__name__ == "InterpretedFunction"


def fingerprint(kernel, by_source: bool = False) -> str:
    """Hash of a kernel's source and all that it uses: functions it calls, constants of its module, parameter defaults.

    Triton's own `cache_key` covers calls and module-level constexprs, but no constants read as attributes of a module
    and no parameter defaults; those are added here. The hash depends on the source only, not on paths, on the Python
    version or on the order of a dict. With `by_source` it does not depend on line numbers either, and is the same under
    the interpreter, whose functions have no `cache_key`.
    """
    reached: dict[str, str] = {}
    with _parsing:
        _reach(kernel, reached, _source_of if by_source else _cache_key_of)
    return hashlib.sha256("\n".join(f"{name}={reached[name]}" for name in sorted(reached)).encode()).hexdigest()


def _reach(function, reached: dict[str, str], key_of: Callable) -> None:
    name = f"{function.fn.__module__}.{function.fn.__qualname__}"
    if name in reached:
        return
    reached[name] = key_of(function)
    for used, value in _used_by(function).items():
        _note(f"{name}:{used}", value, reached, key_of)


def _used_by(function) -> dict:
    """{name: value} of a function's globals, closure variables and parameter defaults; "m.n" for attribute n of module
    m."""
    scope = function.fn.__globals__ | inspect.getclosurevars(function.fn).nonlocals
    values = {p.name: p.default for p in inspect.signature(function.fn).parameters.values() if p.default is not p.empty}
    read, attributes = set(), set()
    for code in _codes(function.fn.__code__):
        read.update(_globals_of(code), code.co_freevars)
        attributes.update(code.co_names)
    for used in read & scope.keys():
        values[used] = scope[used]
        if isinstance(scope[used], ModuleType) and not _is_tritons(scope[used].__name__):
            values |= {f"{used}.{n}": getattr(scope[used], n) for n in attributes if hasattr(scope[used], n)}
    return values


def _globals_of(code: CodeType) -> set[str]:
    """The names that a code object reads as globals. `dis` takes ten times as long, and this runs in every first
    call."""
    names, high = set(), 0
    for operation, argument in zip(code.co_code[::2], code.co_code[1::2]):
        argument |= high
        high = argument << 8 if operation == dis.EXTENDED_ARG else 0
        if operation == _LOAD_GLOBAL:
            # From Python 3.11 on, the lowest bit says that the name is called.
            names.add(code.co_names[argument >> 1 if sys.version_info >= (3, 11) else argument])
    return names


def _cache_key_of(function) -> str:
    return function.cache_key if isinstance(function, JITCallable) else _source_of(function)


def _source_of(function) -> str:
    # Triton's copy of the source at the time of the function's definition, if it has one.
    kept = getattr(function, "raw_src", None)
    text = "".join(kept) if kept else inspect.getsource(getattr(function, "fn", function))
    return hashlib.sha256(text.encode()).hexdigest()


def _note(name: str, value, reached: dict[str, str], key_of: Callable) -> None:
    if is_device_function(value):
        if not _is_tritons(value.fn.__module__):
            _reach(value, reached, key_of)
    elif isinstance(value, tuple):
        for place, item in enumerate(value):
            _note(f"{name}.{place}", item, reached, key_of)
    elif getattr(value, "__triton_aggregate__", False):
        for place, method in enumerate(value.hash_attrs):
            reached[f"{name}.{place}"] = _source_of(method)
    elif isinstance(value, (tl.constexpr, tl.dtype, bool, int, float, str)):
        reached[name] = repr(value)


def _codes(code: CodeType) -> Iterator[CodeType]:
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _codes(constant)


def _is_tritons(module: str) -> bool:
    return module.split(".")[0] == "triton"


def _plain(parameter: str, value):
    value = value.value if isinstance(value, tl.constexpr) else value
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, (tuple, list)):
        return [_plain(parameter, item) for item in value]
    if is_device_function(value):
        return {"function": f"{value.fn.__module__}.{value.fn.__qualname__}", "source": fingerprint(value)}
    text = repr(value)
    if " at 0x" in text:
        raise TypeError(f"constant {parameter}: {text} has no stable text to make a compile key of")
    return {type(value).__name__: text}


def _options(build) -> dict:
    return {
        "num_warps": build.num_warps,
        "num_stages": build.num_stages,
        "maxnreg": build.maxnreg,
        # Triton 3.10 changes the default. An explicit value gives the same arithmetic under all versions.
        "enable_fp_fusion": True,
    }


# Environment variables of Triton that do not change the code: folders, dumps, inspection tools. Source lines are part
# of the options; the assembler and libdevice are handled below.
_NO_CODE = frozenset(
    {
        "NVPTX_ENABLE_DUMP", "TRITON_ALWAYS_COMPILE", "TRITON_CUOBJDUMP_PATH", "TRITON_DISABLE_LINE_INFO",
        "TRITON_DUMP_PTXAS_LOG", "TRITON_FRONT_END_DEBUGGING", "TRITON_INTERPRET", "TRITON_KERNEL_DUMP",
        "TRITON_KERNEL_OVERRIDE", "TRITON_LIBCUDA_PATH", "TRITON_LIBDEVICE_PATH", "TRITON_NVDISASM_PATH",
        "TRITON_PTXAS_BLACKWELL_PATH", "TRITON_PTXAS_PATH", "TRITON_STORE_BINARY_ONLY",
    }
)  # fmt: skip
# Variables that Triton's C++ reads, and its Python outside of the knobs. Triton's own list, which differs by version,
# is used too.
_UNLISTED = (
    "ALLOW_LHS_TMEM_LAYOUT_CONVERSION", "DISABLE_LLVM_OPT", "DISABLE_MMA_V3", "DISABLE_MMA_V5", "PTXAS_OPTIONS",
    "TRITON_DEBUG", "TRITON_DEFAULT_PTXAS_OPTIONS", "TRITON_ENABLE_EXPERIMENTAL_CONSAN", "TRITON_INSTRUMENTATION_MODE",
)  # fmt: skip
# Files whose content is part of the code.
_CONTENTS = ("LLVM_PASS_PLUGIN_PATH", "TRITON_LIBDEVICE_PATH", "TRITON_PASS_PLUGIN_PATH", "TRITON_PLUGIN_PATHS")


def _environment(capability: int) -> dict[str, str]:
    """Settings beside source and options that change the code: Triton's variables and knobs, and replaced tools."""
    found = {name: str(value) for name, value in get_cache_invalidating_env_vars().items()}
    found |= {name: os.environ[name] for name in _UNLISTED if os.environ.get(name)}
    for group in (knobs.compilation, knobs.language, knobs.nvidia, knobs.runtime):
        found |= _settings(group)
    for name in _CONTENTS:
        for place in filter(None, os.environ.get(name, "").split(os.pathsep)):
            found[f"{name} {place}"] = hashlib.sha256(Path(place).read_bytes()).hexdigest()
    if os.environ.get("TRITON_PTXAS_PATH") or os.environ.get("TRITON_PTXAS_BLACKWELL_PATH"):
        commands = [[tool.path, "--version"] for tool in assembler.tools_of(capability)]
        said = [subprocess.run(command, capture_output=True, text=True, check=True).stdout for command in commands]
        found["ptxas"] = "\n".join(said).strip()
    return {name: value for name, value in found.items() if name not in _NO_CODE}


def _settings(group) -> dict[str, str]:
    """The knobs of a group that a variable or this process has set, by their variables' names."""
    found = {}
    for attribute, knob in group.knob_descriptors.items():
        if os.environ.get(knob.key) or attribute in vars(group):
            if knob.key not in _NO_CODE:
                found[knob.key] = str(getattr(group, attribute))
    # Plain attributes, which Triton reads once.
    mode, hook = getattr(group, "instrumentation_mode", ""), getattr(group, "add_stages_inspection_hook", None)
    if mode:
        found["TRITON_INSTRUMENTATION_MODE"] = str(mode)
    if hook is not None:
        found["add_stages_inspection_hook"] = f"{hook.__module__}.{hook.__qualname__}"
    return found


def promise_of(kind: str) -> tuple[str, int]:
    """A parameter's bare type, and the divisor of its address or value: "i64:8" gives ("i64", 8), "i64" ("i64", 1)."""
    match = re.fullmatch(r"(.*):(\d+)", kind)
    return (match[1], int(match[2])) if match else (kind, 1)


def grouped(values: dict) -> dict:
    """Group entries "p.x", "p.y", ... to a named tuple (x, y, ...) under "p"; other entries are unchanged, in order."""
    groups: dict = {}
    for name, value in values.items():
        group, _, field = name.partition(".")
        if field:
            groups.setdefault(group, {})[field] = value
        else:
            groups[name] = value
    return {
        name: namedtuple(name, value)(**value) if isinstance(value, dict) else value for name, value in groups.items()
    }


def _source(build):
    names = build.kernel.arg_names
    bare = {name: promise_of(text) for name, text in build.types.items()}
    kinds = {name: base for name, (base, _) in bare.items()} | dict.fromkeys(build.constants, "constexpr")
    groups = grouped(kinds)
    signature = {name: groups[name] for name in names}

    def path(name: str) -> tuple[int, ...]:
        group, _, field = name.partition(".")
        return (names.index(group), signature[group]._fields.index(field)) if field else (names.index(name),)

    divisible = {path(name): [["tt.divisibility", divisor]] for name, (_, divisor) in bare.items() if divisor > 1}
    kind = ASTSource
    if build.kernel.is_gluon():
        from flashinfer._core.gluon_compat import GluonASTSource as kind
    return kind(build.kernel, signature, {path(name): value for name, value in build.constants.items()}, divisible)


def _describe(arch: str, ptx: str, cubin: bytes, metadata: dict) -> dict:
    target = re.search(r"^\.target (\S+)", ptx, re.MULTILINE)[1]
    if target != f"sm_{arch}":
        raise RuntimeError(f"Triton {triton.__version__} compiled for {target}, asked for sm_{arch}")
    return {
        "symbol": metadata["name"],
        "threads": int(re.search(r"\.reqntid (\d+)", ptx)[1]),
        "shared": metadata["shared"],
        "waits": begins_waiting(ptx),
        "parameters": parameters_of(ptx),
        "tensor_maps": metadata.get("tensordesc_meta") or [],
        "global_scratch": metadata.get("global_scratch_size") or 0,
        "profile_scratch": metadata.get("profile_scratch_size") or 0,
        **_resources(cubin),
    }


def parameters_of(ptx: str) -> list[list]:
    """[type, bytes, alignment] of each parameter of the one .entry of a PTX text, in order.

    PTX ISA, "Kernel Function Parameters": `.param [.align N] .type [.ptr ...] name[[bytes]]`; a parameter is aligned
    to its size unless .align says otherwise.
    """
    start = ptx.index("(", ptx.index(".entry"))
    found = []
    for line in ptx[start + 1 : ptx.index(")", start)].split(","):
        match = re.match(r"\s*\.param\s+(?:\.align\s+(\d+)\s+)?\.([bsuf])(8|16|32|64)\b[^\[]*(?:\[(\d+)\])?", line)
        if match is None:
            raise RuntimeError(f"PTX parameter not understood: {line.strip()!r}")
        align, kind, bits, count = match.groups()
        size = _SIZES[bits]
        found.append([f"{kind}{bits}", size * int(count or 1), int(align or size)])
    return found


# PTX instructions that use registers and parameters only (PTX ISA).
_ARITHMETIC = re.compile(
    r"(mov|ld\.param|cvt|cvta|add|addc|sub|mul|mad|fma|div|rem|neg|abs|min|max|and|or|xor|not|cnot|shl|shr|shf|bfe|bfi|"
    r"prmt|lop3|setp|set|selp|slct|popc|clz|ex2|lg2|rcp|sqrt|rsqrt|tanh)\."
)


def begins_waiting(ptx: str) -> bool:
    """Whether all threads of a kernel wait for the kernels before it (griddepcontrol.wait) before anything else.

    Such a kernel may be launched before those end. Before the wait it only computes on its own parameters, so it reads
    no memory that they may still write, and writes none that they may still read. No thread ends without waiting, so a
    kernel that waits for this one's end also waits for theirs.
    """
    body = ptx[ptx.index("{", ptx.index(".entry")) + 1 :]
    for line in re.sub(r"//.*", "", body).splitlines():
        # Labels and directives do nothing.
        for statement in re.sub(r"^\s*(\$\w+:|\.\w+ .*)", "", line).split(";"):
            if statement.strip() == "griddepcontrol.wait":
                return True
            if statement.strip() and not _ARITHMETIC.match(statement.strip()):
                return False
    return False


def _resources(cubin: bytes) -> dict[str, int]:
    """Registers and stack bytes of a thread. The stack holds spills, and the arrays of some libdevice slow paths."""
    tool = knobs.nvidia.cuobjdump.path
    # The tool needs a seekable file. It is in memory, because there may be no writable folder.
    handle = os.memfd_create("cubin")
    try:
        os.write(handle, cubin)
        command = [tool, "--dump-resource-usage", f"/proc/self/fd/{handle}"]
        text = subprocess.run(command, capture_output=True, text=True, check=True, pass_fds=(handle,)).stdout
    finally:
        os.close(handle)
    registers, stack = re.search(r"REG:(\d+) STACK:(\d+)", text).groups()
    return {"registers": int(registers), "stack_bytes": int(stack)}
