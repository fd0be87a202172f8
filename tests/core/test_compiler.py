"""Compiling without a GPU: what the key covers, what the compiler needs of the machine, what it says of a kernel."""

import dis
import inspect
import json
import os
import re
import struct
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from flashinfer._core import compiler, kernel_cache
from flashinfer._core.target import GPU_ARCHS

ROOT = Path(__file__).resolve().parents[2]

SOURCE = """
import triton
import triton.language as tl

UNIT = tl.constexpr(4)
DEFAULT = tl.constexpr(7)


@triton.jit
def leaf(x, BY: tl.constexpr = DEFAULT):
    return x * BY


@triton.jit
def kernel(x, n, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    tl.store(x + at, leaf(at) * UNIT, at < n)


@triton.jit
def unused(x):
    return x + 1
"""


def fingerprint_of(folder, text):
    from importlib.util import module_from_spec, spec_from_file_location

    from flashinfer._core.compiler import begins_waiting, fingerprint

    Path(folder).mkdir()
    path = Path(folder) / "sample.py"
    path.write_text(text)
    spec = spec_from_file_location("sample", path)
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return fingerprint(module.kernel)


@pytest.mark.parametrize(
    "old, new",
    [
        ("at < n)", "at <= n)"),
        ("return x * BY", "return x + BY"),
        ("constexpr(4)", "constexpr(5)"),
        ("constexpr(7)", "constexpr(8)"),
        ("BY: tl.constexpr = DEFAULT", "BY: tl.constexpr = 9"),
    ],
)
def test_fingerprint_changes_with_all_that_a_kernel_reaches(old, new, tmp_path, in_triton):
    assert SOURCE.count(old) == 1
    before = in_triton(fingerprint_of, tmp_path / "before", SOURCE)
    assert in_triton(fingerprint_of, tmp_path / "after", SOURCE.replace(old, new)) != before


def test_fingerprint_does_not_change_with_the_rest(tmp_path, in_triton):
    before = in_triton(fingerprint_of, tmp_path / "before", SOURCE)
    assert in_triton(fingerprint_of, tmp_path / "elsewhere", SOURCE) == before
    assert in_triton(fingerprint_of, tmp_path / "after", SOURCE.replace("x + 1", "x + 2")) == before


def module_constant(folder):
    """A constant that a kernel reads as an attribute of another module, which Triton's own key does not cover."""
    from importlib import import_module, reload

    from flashinfer._core.compiler import fingerprint

    Path(folder).mkdir()
    sys.path.insert(0, str(folder))
    constants, user = Path(folder) / "constants_of_test.py", Path(folder) / "user_of_test.py"
    user.write_text(
        "import triton\nimport triton.language as tl\nimport constants_of_test\n\n\n@triton.jit\n"
        "def kernel(x):\n    tl.store(x, constants_of_test.VALUE)\n"
    )
    found = []
    for value in ("1", "23"):
        constants.write_text(f"import triton.language as tl\n\nVALUE = tl.constexpr({value})\n")
        reload(import_module("constants_of_test"))
        found.append(fingerprint(reload(import_module("user_of_test")).kernel))
    return found


def test_fingerprint_covers_constants_of_other_modules(tmp_path, in_triton):
    one, other = in_triton(module_constant, tmp_path / "modules")
    assert one != other


def keys():
    from dataclasses import replace

    import triton.language as tl

    from flashinfer._core.compiler import key_of
    from tests.core.samples import Config, Problem, build_scale, shift

    problem, config = Problem("bf16"), Config()
    build = build_scale(problem, config)

    def digest(build=build, problem=problem, config=config, arch="90a", name="scale"):
        return kernel_cache.digest_of(key_of(name, problem, config, build, arch))

    def constant(value):
        return digest(replace(build, constants=build.constants | {"OFFSET": value}))

    found = {
        "itself": digest(),
        "name": digest(name="other"),
        "arch": digest(arch="100a"),
        "problem": digest(problem=Problem("bf16", offset=1)),
        "config": digest(config=Config(256)),
        "types": digest(replace(build, types=build.types | {"n": "i64"})),
        "alignment": digest(replace(build, types=build.types | {"n": "i32:16"})),
        "num_warps": digest(replace(build, num_warps=8)),
        "num_stages": digest(replace(build, num_stages=2)),
        "maxnreg": digest(replace(build, maxnreg=64)),
    }
    constants = (1, 2.0, True, False, None, "1", (1, 2), tl.float16, tl.bfloat16, shift)
    found |= {f"constant {value!r}": constant(value) for value in constants}
    names = (
        "DISABLE_PTXAS_OPT", "TRITON_F32_DEFAULT", "PTXAS_OPTIONS", "FLASHINFER_LINE_INFO", "TRITON_OVERRIDE_ARCH",
        "TRITON_DEFAULT_PTXAS_OPTIONS", "TRITON_INSTRUMENTATION_MODE", "TRITON_DEFAULT_FP_FUSION", "USE_IR_LOC",
        "TRITON_MOCK_PTX_VERSION", "TRITON_ENABLE_ASAN", "DISABLE_LLVM_OPT",
    )  # fmt: skip
    for name in names:
        os.environ[name] = "1"
        found[name] = digest()
        del os.environ[name]
    with tempfile.NamedTemporaryFile() as plugin:
        for content in (b"one", b"two"):
            plugin.write(content)
            plugin.flush()
            for name in ("TRITON_PASS_PLUGIN_PATH", "LLVM_PASS_PLUGIN_PATH"):
                os.environ[name] = plugin.name
                found[f"{name} {content}"] = digest()
                del os.environ[name]
    from triton import knobs

    for group, knob, value in ((knobs.nvidia, "ptxas_options", "-O1"), (knobs.language, "default_fp_fusion", False)):
        with group.scope():
            setattr(group, knob, value)
            found[f"{knob} by call"] = digest()
    os.environ["TRITON_CACHE_DIR"] = os.environ["TRITON_KERNEL_DUMP"] = "1"
    assert digest() == found["itself"]
    del os.environ["TRITON_CACHE_DIR"], os.environ["TRITON_KERNEL_DUMP"]
    same = [digest(replace(build, constants=dict(reversed(build.constants.items())))), constant(tl.constexpr(0))]
    assert same == [found["itself"]] * 2
    return found


def test_key_changes_with_everything_that_decides_the_code(in_triton):
    found = in_triton(keys)
    assert len(set(found.values())) == len(found), found


def unstable_constant():
    from dataclasses import replace

    from flashinfer._core.compiler import key_of
    from tests.core.samples import Config, Problem, build_scale

    build = build_scale(Problem("bf16"), Config())
    build = replace(build, constants=build.constants | {"OFFSET": object()})
    try:
        key_of("scale", Problem("bf16"), Config(), build, "90a")
    except TypeError as error:
        return str(error)


def test_constant_without_a_stable_text_is_refused(in_triton):
    assert "OFFSET" in in_triton(unstable_constant)


BARE = """
import json, sys
import torch
from triton.runtime import driver


def untouched(config):
    raise AssertionError("the active driver was asked for")


assert {"active", "default"} <= vars(type(driver)).keys()
type(driver).active = type(driver).default = property(untouched)
ran = []
sys.addaudithook(lambda event, args: ran.append(str(args[0])) if event in ("subprocess.Popen", "os.exec") else None)
from flashinfer._core import kernel_cache
from tests.core.samples import Config, Problem, scale, tile

entries = [scale.entry(Problem("bf16"), Config(), arch) for arch in ("80", "90a", "100a")]
entries.append(tile.entry(Problem("bf16"), Config(64), "90a"))
print(json.dumps({"ran": ran, "paths": [str(entry.path) for entry in entries]}))
"""


def test_compiles_with_an_empty_path_and_no_home(tmp_path, base):
    """No gcc, nvcc or driver is looked for; nothing is written but the cache and the system's temporary folder."""
    (tmp_path / "home").write_text("a file, so nothing can be made below it")
    (tmp_path / "bin").mkdir()
    environment = {
        "PATH": str(tmp_path / "bin"),
        "HOME": str(tmp_path / "home"),
        "FLASHINFER_WORKSPACE_BASE": str(base),
        "PYTHONPATH": os.pathsep.join(path for path in sys.path if path),
        "PYTHONDONTWRITEBYTECODE": "1",
        "TMPDIR": str(tmp_path / "tmp"),
    }
    (tmp_path / "tmp").mkdir()
    run = subprocess.run([sys.executable, "-c", BARE], env=environment, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    said = json.loads(run.stdout.splitlines()[-1])
    tools = {Path(tool.strip("'[]").split("'")[0]).name for tool in said["ran"]}
    assert tools <= {"ptxas", "ptxas-blackwell", "cuobjdump"}
    assert len(said["paths"]) == 4 and all(path.startswith(str(base)) for path in said["paths"])
    assert not list((tmp_path / "tmp").iterdir())
    assert sorted(path.name for path in tmp_path.iterdir()) == ["base", "bin", "home", "tmp"]


def compiled(arch):
    """(entry, dump of the cubin by NVIDIA's tool, layout, Build) of each sample."""
    from triton import knobs

    from flashinfer._core.launch import Layout
    from tests.core import samples

    found = []
    for launcher in (samples.scale, samples.kinds, samples.tile):
        problem, config = samples.Problem("bf16"), samples.Config(64)
        entry = launcher.entry(problem, config, arch)
        build = launcher.build(problem, config)
        layout = Layout(launcher.name, build, entry.kernel)
        tool = [knobs.nvidia.cuobjdump.path, "-elf", str(entry.path.with_suffix(".cubin"))]
        dump = subprocess.run(tool, capture_output=True, text=True, check=True).stdout
        found.append((entry, dump, layout.offsets, layout.struct.format, list(build.types.values())))
    return found


CODES = {"*": ("Q", 8), "i1": ("?", 1), "i8": ("b", 1), "u8": ("B", 1), "i16": ("h", 2), "i32": ("i", 4)}
CODES |= {"i64": ("q", 8), "fp32": ("f", 4), "fp64": ("d", 8)}


@pytest.mark.parametrize("arch", ["80", "90a", "120a"])
def test_layout_is_what_the_assembler_made(arch, in_triton):
    """Offsets and sizes against the parameter list that ptxas writes into the cubin; values against their types."""
    for entry, dump, offsets, packing, types in in_triton(compiled, arch):
        truth = {}
        for ordinal, offset, size in re.findall(
            r"EIATTR_KPARAM_INFO.*?Ordinal\s*:\s*(0x\w+)\s*Offset\s*:\s*(0x\w+)\s*Size\s*:\s*(0x\w+)", dump, re.DOTALL
        ):
            truth[int(ordinal, 16)] = (int(offset, 16), int(size, 16))
        assert len(truth) == len(offsets) == len(entry.kernel["parameters"])
        assert [truth[i] for i in range(len(truth))] == [
            (offset, size) for offset, (_, size, _) in zip(offsets, entry.kernel["parameters"], strict=True)
        ]
        codes = [CODES["*" if kind.startswith("*") else kind.split(":")[0]] for kind in types]
        values = [1.5 if code in "fd" else i % 2 if code == "?" else i + 3 for i, (code, _) in enumerate(codes)]
        packed = struct.pack(packing, *values)
        for value, (code, size), offset in zip(values, codes, offsets, strict=False):
            assert struct.unpack_from(f"<{code}", packed, offset)[0] == value
        after = offsets[len(types)] if len(offsets) > len(types) else len(packed)
        assert not any(packed[after:])


@pytest.mark.parametrize("arch", GPU_ARCHS)
def test_every_architecture_compiles_for_itself(arch, in_triton):
    for entry, dump, *_ in in_triton(compiled, arch):
        assert re.search(r"\bsm[=_](\w+)", dump)[1] == arch
        assert entry.kernel["threads"] == (256 if entry.key["name"] == "tile" else 128)
        assert 0 < entry.kernel["registers"] <= 255 and entry.kernel["stack_bytes"] == 0
        assert not entry.kernel["global_scratch"]


def compile_side_by_side():
    from triton import knobs

    from flashinfer._core import compiler
    from tests.core.samples import Config, Problem, scale

    builds = [scale.build(Problem("bf16", offset=i), Config(128)) for i in range(4)]
    # Triton's first kernel in a process may come out otherwise.
    compiler.compile_kernel(builds[0], "90a")
    in_turn = [compiler.compile_kernel(build, "90a") for build in builds]
    with ThreadPoolExecutor(4) as threads:
        beside = list(threads.map(lambda build: compiler.compile_kernel(build, "90a"), builds))
    assert beside == in_turn and len({cubin for cubin, _ in beside}) == 4
    assert not knobs.compilation.disable_line_info and not compiler._compiling


def test_threads_compile_side_by_side(in_triton):
    in_triton(compile_side_by_side)


def line_info(on):
    from triton import knobs

    from tests.core.samples import Config, Problem, scale

    os.environ["FLASHINFER_LINE_INFO"] = on
    try:
        entry = scale.entry(Problem("bf16"), Config(), "90a")
    finally:
        del os.environ["FLASHINFER_LINE_INFO"]
    assert "TRITON_DISABLE_LINE_INFO" not in os.environ and not knobs.compilation.disable_line_info
    return entry.cubin


def test_cubin_names_no_source_file_unless_asked_to(in_triton):
    assert b"samples.py" not in in_triton(line_info, "0") and str(ROOT).encode() not in in_triton(line_info, "0")
    assert b"samples.py" in in_triton(line_info, "1")


def test_parameters_of_a_ptx_text():
    """The syntaxes that the PTX ISA gives a kernel parameter."""
    from flashinfer._core.compiler import parameters_of

    text = """.version 8.7
.visible .entry k(
	.param .align 64 .b8 k_param_0[128],
	.param .u32 k_param_1,
	.param .u64 .ptr .global .align 16 k_param_2,
	.param .f64 k_param_3,
	.param .u8 k_param_4
)
.reqntid 128
{"""
    assert parameters_of(text) == [["b8", 128, 64], ["u32", 4, 4], ["u64", 8, 8], ["f64", 8, 8], ["u8", 1, 1]]
    with pytest.raises(RuntimeError, match="not understood"):
        parameters_of(".entry k(.param .v4 .u32 a)")


WAITING = """
.visible .entry k(.param .u64 .ptr .global .align 1 k_param_0, .param .u32 k_param_1) .reqntid 128
{
	.reg .pred %p<2>;
	.reg .b32 %r<5>;
	.loc 1 7 0
$L__func_begin0:
// %bb.0:
	ld.param.b64 %rd1, [k_param_0];
	mov.u32 %r1, %ctaid.x;	// begin
	shl.b32 %r2, %r1, 7;
	setp.lt.s32 %p1, %r2, 9;
	mov.b64 %rd2, {%r1, %r2};
	// begin inline asm
	griddepcontrol.wait; // dummy %r3
	// end inline asm
	griddepcontrol.launch_dependents;
	@%p1 ld.global.b32 { %r4 }, [ %rd1 + 0 ];
	ret;
}
"""


@pytest.mark.parametrize(
    "before",
    [
        "ld.global.b32 %r4, [%rd1];", "@%p1 ld.global.b32 { %r4 }, [ %rd1 + 0 ];", "st.global.b32 [%rd1], %r2;",
        "st.shared.b32 [%r1], %r2;", "atom.global.add.u32 %r4, [%rd1], 1;", "red.global.add.u32 [%rd1], 1;",
        "bra $L__BB0_2;", "@%p1 bra $L__BB0_2;", "@%p1 ret;", "ret;", "exit;", "bar.sync 0;",
        "{ ld.global.b32 %r4, [%rd1]; }", "prefetch.global.L2 [%rd1];", "call.uni f, (%r1);",
        "cp.async.cg.shared.global [%r1], [%rd1], 16;", "ld.const.b32 %r4, [c];",
    ],
)  # fmt: skip
def test_only_arithmetic_stands_before_a_wait(before):
    assert compiler.begins_waiting(WAITING)
    assert not compiler.begins_waiting(WAITING.replace("shl.b32", f"{before}\n\tshl.b32"))


@pytest.mark.parametrize("wait", ["", "@%p1 griddepcontrol.wait;", "griddepcontrol.launch_dependents;"])
def test_all_threads_wait(wait):
    assert not compiler.begins_waiting(WAITING.replace("griddepcontrol.wait;", wait))


def test_globals_of_a_code_are_those_of_its_instructions():
    """Of every function of the module itself, and of one with more names than a byte numbers."""
    scope = {}
    exec("def many():\n    return [" + ", ".join(f"name_{i}(other.name_{i})" for i in range(300)) + "]", scope)
    functions = [f for f in vars(compiler).values() if inspect.isfunction(f)]
    for function in (*functions, scope["many"]):
        steps = dis.get_instructions(function.__code__)
        wanted = {step.argval for step in steps if step.opname == "LOAD_GLOBAL"}
        assert compiler._globals_of(function.__code__) == wanted
