"""The law of imports, the law of rooms and the budgets, read off the source without importing it."""

import ast
import functools
import json
from collections import defaultdict
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "flashinfer"
FOLDERS = ("flashinfer", "examples", "benchmarks")

HOST_FILE, DEVICE_FILE, HOST_FUNCTION, DEVICE_FUNCTION, POSITIONAL = 500, 800, 80, 200, 12
# Of device functions: a record (fields "p.x" of Build) is one parameter.
DEVICE_PARAMETERS = 30


def sources(*folders):
    return sorted(path for folder in folders for path in (ROOT / folder).rglob("*.py"))


def relative(path):
    return str(path.relative_to(ROOT))


def dotted(path):
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


@functools.cache
def parsed(text):
    """The tree of a file, which several laws read."""
    return ast.parse(text)


NAMES = {dotted(path) for path in sources("flashinfer")}
PACKAGES = {dotted(path) for path in sources("flashinfer") if path.name == "__init__.py"} | {
    ".".join(path.relative_to(ROOT).parts) for path in PACKAGE.rglob("*/") if any(path.glob("*.py"))
}

MODULES = NAMES | PACKAGES


def statements(tree):
    """All statements of a tree, and the branches that hold them; no expression, of which there are many more."""
    waiting = [tree]
    while waiting:
        node = waiting.pop()
        yield node
        for part in ("body", "orelse", "handlers", "finalbody", "cases"):
            waiting += getattr(node, part, ())


def imports(tree, module, is_package):
    """Dotted names of all modules that a tree imports, relative imports made absolute, wherever they stand."""
    for node in statements(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                parts = module.split(".")
                parts = parts[: len(parts) - node.level + (1 if is_package else 0)]
                base = ".".join(parts + ([node.module] if node.module else []))
            submodules = [f"{base}.{a.name}" for a in node.names if f"{base}.{a.name}" in MODULES]
            yield from submodules
            if len(submodules) < len(node.names):
                yield base


def room_of(module):
    """The room a module of flashinfer.ops is in, as a tuple of folders; () for what is at the top of ops."""
    parts = module.split(".")[2:]
    if module not in PACKAGES:
        parts = parts[:-1]
    room = []
    for part in parts:
        if part.startswith("_"):
            break
        room.append(part)
    return tuple(room)


def layer(module):
    parts = module.split(".")
    if len(parts) == 1 or parts[1] in ("version", "__main__"):
        return "root"
    return parts[1] if parts[1] in ("_core", "ops", "cli", "testing", "compat", "integrations") else "public"


# layer -> the layers of this package that it may import
MAY_IMPORT = {
    "root": {"root", "_core", "cli"},
    "_core": {"_core", "root"},
    "ops": {"ops", "_core"},
    "public": {"public", "ops", "_core", "compat"},
    "compat": {"compat", "public", "ops", "_core"},
    "testing": {"testing", "_core"},
    "cli": {"cli", "testing", "public", "ops", "_core", "root"},
    "integrations": {"public", "_core", "root"},
}


def faults_of_imports(module, is_package, tree):
    """Sentences on every import of `module` that breaks the law of imports or of rooms."""
    here, found = layer(module), set(imports(tree, module, is_package))
    faults = []
    for name in sorted(found):
        if name != "flashinfer" and not name.startswith("flashinfer."):
            continue
        if layer(name) not in MAY_IMPORT[here]:
            faults.append(f"{module} ({here}) imports {name} ({layer(name)})")
        elif here == "_core" and layer(name) == "root" and name != "flashinfer.version":
            faults.append(f"{module} imports {name}, above it")
        elif here == "ops" and layer(name) == "ops":
            mine, other = room_of(module), room_of(name)
            shared = min(len(mine), len(other))
            if mine[:shared] != other[:shared]:
                faults.append(f"{module} imports {name}: rooms do not import sibling rooms")
    if here == "ops" and "triton" in {name.split(".")[0] for name in found}:
        faults += [
            f"{module}: kernels do not import {name}"
            for name in sorted(found)
            if name.startswith("flashinfer.") and name.endswith(".reference")
        ]
    return faults


def test_law_of_imports():
    faults = {
        relative(path): faults_of_imports(dotted(path), path.name == "__init__.py", parsed(path.read_text()))
        for path in sources("flashinfer")
    }
    assert not {path: found for path, found in faults.items() if found}


def host_of_room(path):
    return path.name in ("__init__.py", "reference.py", "config.py", "problem.py") and "_device" not in path.parts


def test_doors_configs_and_references_import_no_gpu_code():
    for path in filter(host_of_room, sources("flashinfer/ops")):
        names = imports(parsed(path.read_text()), dotted(path), path.name == "__init__.py")
        assert not {name.split(".")[0] for name in names} & {"triton", "cuda"}, relative(path)


def test_every_room_has_its_files():
    doors = [p.parent for p in sources("flashinfer/ops") if p.name == "__init__.py" and "Op(" in p.read_text()]
    assert doors
    for room in doors:
        # rooms of one family may share files, and a test, in the room above them
        family = [room] if room.parent.name == "ops" else [room, room.parent]
        for name in ("reference.py", "config.py", "portable.py"):
            assert any((folder / name).exists() for folder in family), f"{relative(room)} has no {name}"
        tests = [ROOT / "tests" / f.relative_to(PACKAGE) / f"test_{f.name}.py" for f in family]
        assert any(test.exists() for test in tests), f"{relative(room)} has no {relative(tests[0])}"


def is_device(function):
    names = [ast.unparse(d).split("(")[0] for d in function.decorator_list]
    return any(name.split(".")[-1] == "jit" for name in names)


def functions(tree):
    """(qualified name, node) of every function, nested ones included."""

    def walk(node, prefix):
        for child in ast.iter_child_nodes(node):
            if isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef)):
                yield prefix + child.name, child
                yield from walk(child, f"{prefix}{child.name}.")
            elif isinstance(child, ast.ClassDef):
                yield from walk(child, f"{prefix}{child.name}.")
            else:
                yield from walk(child, prefix)

    return walk(tree, "")


def upstream_names():
    """Qualified names of the functions and methods whose signatures are upstream's."""
    surface = json.loads((ROOT / "tests" / "api" / "surface.json").read_text())
    for entry in surface["entries"].values():
        for leaf in {path.rsplit(".", 1)[-1] for path in entry["paths"]}:
            yield leaf
            yield from (f"{leaf}.{method}" for method in entry.get("methods", {}))


UPSTREAM = set(upstream_names())


def length(node, lines):
    """Lines of a function, its docstring, comments and blank lines not counted."""
    start, end = node.body[0].lineno, node.end_lineno
    if ast.get_docstring(node) is not None:
        start = node.body[0].end_lineno + 1
    return sum(1 for line in lines[start - 1 : end] if line.strip() and not line.strip().startswith("#"))


def faults_of_budgets(text, public):
    """Sentences on everything in a file that is larger than its budget."""
    tree, lines = parsed(text), text.splitlines()
    found = list(functions(tree))
    device = any(is_device(node) for _, node in found)
    faults = []
    if len(lines) > (DEVICE_FILE if device else HOST_FILE):
        faults.append(f"{len(lines)} lines")
    for name, node in found:
        if length(node, lines) > (DEVICE_FUNCTION if is_device(node) else HOST_FUNCTION):
            faults.append(f"{name}: {length(node, lines)} lines")
        positional = [a.arg for a in node.args.posonlyargs + node.args.args if a.arg not in ("self", "cls")]
        if is_device(node) and len(positional) > DEVICE_PARAMETERS:
            faults.append(f"{name}: {len(positional)} parameters of a device function")
        if len(positional) > POSITIONAL and not is_device(node) and not (public and name in UPSTREAM):
            faults.append(f"{name}: {len(positional)} positional parameters")
    return faults


def test_budgets():
    for path in sources(*FOLDERS):
        public = PACKAGE in path.parents and layer(dotted(path)) in ("public", "testing")
        assert faults_of_budgets(path.read_text(), public) == [], relative(path)


# What the first docstring of a file with kernels states, beside what they compute.
HEADER = ("Grid:", "Warps:", "Shared memory:", "Inputs:", "Outputs:", "Method:")


def missing_in_header(text):
    """Of a file that has a kernel, a device function named so, what its docstring does not state."""
    tree = parsed(text)
    if not any(is_device(node) and name.endswith("_kernel") for name, node in functions(tree)):
        return []
    stated = " ".join((ast.get_docstring(tree) or "").split())
    return [label for label in HEADER if label not in stated]


def test_files_of_kernels_begin_with_what_they_are():
    missing = {relative(path): missing_in_header(path.read_text()) for path in sources("flashinfer")}
    assert not {path: headers for path, headers in missing.items() if headers}


def test_a_header_is_read_as_it_is_written():
    kernel = "@triton.jit\ndef add_kernel(x): ...\n"
    assert missing_in_header('"""Adds. Grid: one. Warps: one."""\n' + kernel) == list(HEADER[2:])
    assert missing_in_header(f'"""{" none. ".join(HEADER)}"""\n' + kernel) == []
    assert missing_in_header(kernel) == list(HEADER) and missing_in_header("@triton.jit\ndef add(x): ...\n") == []


def test_nine_files_of_ten_have_at_most_400_lines():
    lengths = sorted(len(path.read_text().splitlines()) for path in sources("flashinfer"))
    assert lengths[len(lengths) * 9 // 10] <= 400


def repeated(texts, window=12):
    """The share of lines that stand in a run of `window` lines which occurs twice; blank lines and indents apart."""
    places, count = defaultdict(list), 0
    for i, text in enumerate(texts):
        lines = [line.strip() for line in text.splitlines() if line.strip()]
        count += len(lines)
        for at in range(len(lines) - window + 1):
            places[tuple(lines[at : at + window])].append((i, at))
    twice = {(i, at + k) for found in places.values() if len(found) > 1 for i, at in found for k in range(window)}
    return len(twice) / count


def without_interfaces(text):
    """Code without docstrings and parameters: those of upstream's functions that are alike are written out for each."""
    lines = text.splitlines()
    for node in ast.walk(parsed(text)):
        parts = []
        if isinstance(node, (ast.FunctionDef, ast.ClassDef, ast.Module)) and ast.get_docstring(node, clean=False):
            parts.append(node.body[0])
        if isinstance(node, ast.FunctionDef):
            parts += [*ast.walk(node.args)]
        for part in parts:
            if first := getattr(part, "lineno", 0):
                lines[first - 1 : part.end_lineno] = [""] * (part.end_lineno - first + 1)
    return "\n".join(lines)


def test_little_is_written_twice():
    assert repeated([without_interfaces(path.read_text()) for path in sources("flashinfer")]) < 0.005


def test_an_interface_is_docstrings_and_parameters():
    text = '"""M."""\nx = "a"\ndef f(\n    x, y=3,\n    z=4,\n):\n    """Of f,\n    in two."""\n    return """z"""'
    kept = ["", 'x = "a"', "def f(", "", "", "):", "", "", '    return """z"""']
    assert without_interfaces(text).split("\n") == kept


def test_what_is_written_twice_is_counted():
    lines = [f"x = {i}" for i in range(24)]
    assert repeated(["\n".join(lines)]) == 0
    assert repeated(["\n".join(lines), "\n\n  ".join(lines[:12])]) == 24 / 36
    assert repeated(["\n".join(lines), "\n".join(lines[:11])]) == 0


def test_lines_are_at_most_120_characters():
    paths = sources(*FOLDERS, "tests", "tools")
    lines = [(relative(path), n, line) for path in paths for n, line in enumerate(path.read_text().splitlines(), 1)]
    assert not [(path, n) for path, n, line in lines if len(line) > 120]


@pytest.mark.parametrize(
    ("module", "line", "breaks"),
    [
        ("flashinfer._core.launch", "from flashinfer.ops import norm", True),
        ("flashinfer._core.launch", "from flashinfer.version import __version__", False),
        ("flashinfer._core.launch", "from flashinfer.testing import bench", True),
        ("flashinfer.ops.norm.portable", "from flashinfer.ops.rope import config", True),
        ("flashinfer.ops.norm.portable", "from ..rope import config", True),
        ("flashinfer.ops.norm.portable", "from flashinfer.ops._device.rows import unit", False),
        ("flashinfer.ops.norm.portable", "from flashinfer.norm import rmsnorm", True),
        ("flashinfer.ops.norm.portable", "import triton\nfrom flashinfer.ops.norm import reference", True),
        ("flashinfer.ops.attention.decode.config", "from flashinfer.ops.attention.problem import Problem", False),
        ("flashinfer.ops.attention.decode.config", "from flashinfer.ops.attention.prefill import prefill", True),
        ("flashinfer.norm", "from flashinfer.cli import main", True),
        ("flashinfer.norm", "from flashinfer.ops import norm", False),
    ],
)
def test_the_law_is_read_as_it_is_written(module, line, breaks):
    assert bool(faults_of_imports(module, False, ast.parse(line))) is breaks


def test_the_budgets_are_read_as_they_are_written():
    long = "def f():\n" + "    x = 1\n" * (HOST_FUNCTION + 1)
    wide = f"def f({', '.join(f'a{i}' for i in range(POSITIONAL + 1))}): ..."
    assert faults_of_budgets(long, True) and not faults_of_budgets("@triton.jit\n" + long, True)
    assert faults_of_budgets(wide, True) and not faults_of_budgets("@triton.jit\n" + wide, True)
    narrow = f"@triton.jit\ndef f({', '.join(f'a{i}' for i in range(DEVICE_PARAMETERS))}): ..."
    assert not faults_of_budgets(narrow, True) and faults_of_budgets(narrow.replace("a0", "a0, a"), True)
    assert faults_of_budgets("x = 1\n" * (HOST_FILE + 1), True)
    assert not faults_of_budgets("x = 1\n" * HOST_FILE, True)
