"""pyproject.toml, constraints.txt and .ci/run say what the code says."""

import ast
import re
import sys
from importlib import metadata
from pathlib import Path

import pytest

from flashinfer.version import SUPPORTED, __version__, is_supported, supported_range

ROOT = Path(__file__).resolve().parents[2]
PYPROJECT = (ROOT / "pyproject.toml").read_text()
PINS = dict(re.findall(r"^([a-z0-9-]+)==([^;\s]+)", (ROOT / "constraints.txt").read_text(), re.MULTILINE))


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


def test_everything_that_make_installs_is_pinned():
    wanted = [name for key in ("dependencies", "demo", "dev", "docs") for name in requirements(key)]
    assert set(wanted) <= PINS.keys()


def test_ci_runs_the_tests_the_matrix_and_the_site():
    lines = (ROOT / ".ci" / "run").read_text().split("\n")
    assert lines[1:6] == ["set -e", 'cd "$(dirname "$0")/.."', "make test", "make matrix", "make docs"]


def test_imports_of_others_are_declared():
    provided = {name: dists for name, dists in metadata.packages_distributions().items()}
    declared = {name.lower().replace("_", "-") for name in requirements("dependencies")}
    # cuda-bindings comes with CUDA builds of torch, and is asked for only where there is a GPU; matplotlib is an extra
    optional = {"cuda": "cuda-bindings", "matplotlib": "matplotlib"}
    for path in (ROOT / "flashinfer").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
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
