"""pyproject.toml, constraints.txt and .ci/run say what the code says."""

import ast
import os
import re
import shutil
import subprocess
import sys
import zipfile
from importlib import import_module, metadata
from pathlib import Path

import pytest

import flashinfer
from flashinfer.version import SUPPORTED, __version__, is_supported, supported_range
from tests.meta.test_laws import parsed, statements

ROOT = Path(__file__).resolve().parents[2]
PYPROJECT = (ROOT / "pyproject.toml").read_text()
PINS = dict(re.findall(r"^([a-z0-9-]+)==([^;\s]+)", (ROOT / "constraints.txt").read_text(), re.MULTILINE))
KEPT = {"flashinfer", "flashinfer_cubin", "pyproject.toml", "setup.py", "README.md", "LICENSE"}
BUILD = """
import os, sys
from setuptools.build_meta import build_wheel
os.makedirs(sys.argv[1], exist_ok=True)
build_wheel(sys.argv[1])
"""


def requirements(key):
    """Names in one list of requirements of pyproject.toml."""
    body = re.search(rf"^{key} = (\[.*?\])", PYPROJECT, re.MULTILINE | re.DOTALL)[1]
    return [re.match(r"[\w-]+", text)[0] for text in ast.literal_eval(body)]


@pytest.mark.parametrize("module", SUPPORTED)
def test_ranges_are_those_that_the_import_checks(module):
    assert f'"{module}{supported_range(module)}"' in PYPROJECT
    assert is_supported(module, PINS[module])


def test_version_answers_to_upstream():
    assert re.fullmatch(r"0\.7\.2\.post1\+py\.\d+", __version__)


def test_wheel_has_the_public_version_that_its_build_was_given(tmp_path):
    """As engines pin it: vLLM the one, SGLang the other."""
    for public, given in (("0.7.2.post1", ""), ("0.7.2", "0.7.2")):
        source, out = tmp_path / f"source{given}", tmp_path / f"out{given}"
        shutil.copytree(ROOT, source, ignore=lambda folder, names: set(names) - KEPT if Path(folder) == ROOT else [])
        command = [sys.executable, "-c", BUILD, str(out)]
        environment = os.environ | {"FLASHINFER_PUBLIC_VERSION": given}
        done = subprocess.run(command, cwd=source, env=environment, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        (wheel,) = out.glob("*.whl")
        assert wheel.name.startswith(f"flashinfer_python-{public}+py.")
        with zipfile.ZipFile(wheel) as archive:
            names = archive.namelist()
            assert {"flashinfer/py.typed", "flashinfer/__init__.pyi", "flashinfer_cubin/__init__.py"} <= set(names)
            written = [n for n in names if n == "flashinfer/_core/public_version.py"]
            assert [archive.read(n).decode() for n in written] == ([f'PUBLIC = "{public}"\n'] if given else [])
    bad = os.environ | {"FLASHINFER_PUBLIC_VERSION": "0.8"}
    done = subprocess.run(command, cwd=source, env=bad, capture_output=True, text=True)
    assert done.returncode and "FLASHINFER_PUBLIC_VERSION: got '0.8'; allowed: 0.7.2, 0.7.2.post1" in done.stderr


def test_stub_names_what_is_there():
    """Type checkers see the lazy names of the root, each from the module that has it."""
    tree = ast.parse((ROOT / "flashinfer" / "__init__.pyi").read_text())
    found = {}
    for node in tree.body:
        if isinstance(node, ast.ImportFrom):
            (alias,) = node.names
            assert node.level == 1 and alias.asname == alias.name
            found[alias.name] = f"flashinfer.{node.module or alias.name}"
    assert found.keys() | {"__version__"} == set(flashinfer.__all__)
    for name, module in found.items():
        here = import_module(module)
        # A module with a function of its own name stands for it once it is imported, and can be called.
        of_module, own = getattr(here, name, here), [here] if module.endswith(f".{name}") else []
        assert any(getattr(flashinfer, name) is x for x in (of_module, *own)), name


def test_the_cubin_module_has_our_version():
    import flashinfer_cubin

    assert flashinfer_cubin.__version__ == __version__


def test_everything_that_make_installs_is_pinned():
    wanted = [name for key in ("dependencies", "demo", "dev", "types", "docs") for name in requirements(key)]
    assert set(wanted) <= PINS.keys()


def test_ci_runs_all_that_make_checks():
    lines = (ROOT / ".ci" / "run").read_text().split("\n")
    goals = [f"make {goal}" for goal in ("test", "wheel", "types", "matrix", "docs")]
    assert lines[1:8] == ["set -e", 'cd "$(dirname "$0")/.."', *goals]


def test_imports_of_others_are_declared():
    provided = {name: dists for name, dists in metadata.packages_distributions().items()}
    declared = {name.lower().replace("_", "-") for name in requirements("dependencies")}
    # cuda-bindings comes with CUDA builds of torch, and is asked for only where there is a GPU; matplotlib is an extra;
    # engines are imported by integrations alone
    optional = {"cuda": "cuda-bindings", "matplotlib": "matplotlib", "transformers": "transformers", "vllm": "vllm"}
    optional["sglang"] = "sglang"
    for path in (ROOT / "flashinfer").rglob("*.py"):
        for node in statements(parsed(path.read_text())):
            names = [a.name for a in node.names] if isinstance(node, ast.Import) else []
            if isinstance(node, ast.ImportFrom) and not node.level:
                names = [node.module]
            for top in (
                {name.split(".")[0] for name in names} - sys.stdlib_module_names - {"flashinfer"} - optional.keys()
            ):
                owners = {d.lower().replace("_", "-") for d in provided.get(top, [top])}
                assert owners & declared, (
                    f"{path.relative_to(ROOT)} imports {top}, which pyproject.toml does not declare"
                )


def test_the_changelog_begins_with_the_version_that_is_built():
    versions = re.findall(r"^## (\S+)", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert versions[0] == __version__
