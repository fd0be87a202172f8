"""`import flashinfer` is quick, loads nothing heavy, touches no GPU, and refuses unsupported versions."""

import os
import subprocess
import sys

import pytest

from flashinfer.version import SUPPORTED, is_supported


def python(code, *, path=None, **environment):
    """Run code in a new interpreter; `path` stands before everything else on its module path."""
    env = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"} | environment
    if path is not None:
        env["PYTHONPATH"] = os.pathsep.join([str(path), *sys.path])
    else:
        env["PYTHONPATH"] = os.pathsep.join(sys.path)
    return subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True)


def test_import_loads_neither_torch_nor_triton():
    done = python("import flashinfer, sys; print(sorted({'torch', 'triton', 'cuda'} & sys.modules.keys()))")
    assert done.stdout.strip() == "[]", done.stderr


def test_every_public_name_is_imported_without_triton_or_a_cuda_context():
    done = python(
        "import flashinfer, sys, torch\n"
        "for name in flashinfer.__all__: getattr(flashinfer, name)\n"
        "print('triton' in sys.modules, torch.cuda.is_initialized())"
    )
    assert done.stdout.strip() == "False False", done.stderr


def test_import_is_a_small_part_of_an_import_of_torch():
    """Every public name, 0.5 s where torch takes 2. A share of it, for the seconds are those of an idle machine. A full
    pass of the garbage collector takes 0.1 s, and falls on one or on the other: there is none."""
    code = (
        "import gc, time; gc.disable(); start = time.process_time(); import torch\n"
        "between = time.process_time(); import flashinfer\n"
        "for name in flashinfer.__all__: getattr(flashinfer, name)\n"
        "print((time.process_time() - between) / (between - start))"
    )
    # An installed package has its bytecode: the first run leaves it there.
    shares = []
    while len(shares) < 5 and min(shares, default=1) >= 0.3:
        shares.append(float(python(code, PYTHONDONTWRITEBYTECODE="").stdout))
    assert min(shares) < 0.3, shares


@pytest.mark.parametrize(
    ("module", "version", "good"),
    [
        ("torch", "2.9.1", False),
        ("torch", "2.10.0", True),
        ("torch", "2.10.0a0+145a3a7bda.nv25.10", True),
        ("torch", "2.13.0+cpu", True),
        ("torch", "3.0", True),
        ("torch", "", False),
        ("triton", "3.5.1", False),
        ("triton", "3.6.0", True),
        ("triton", "3.9.9", True),
        ("triton", "3.10.0", False),
        ("triton", "", False),
    ],
)
def test_supported_versions(module, version, good):
    assert is_supported(module, version) is good


@pytest.mark.parametrize(("name", "version"), [("torch", "2.8.0"), ("triton", "3.5.1"), ("triton", "3.10.0")])
def test_unsupported_versions_are_one_clear_import_error(tmp_path, name, version):
    folder = tmp_path / f"{name}-{version}.dist-info"
    folder.mkdir()
    (folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    done = python("import flashinfer", path=tmp_path)
    last = done.stderr.strip().splitlines()[-1]
    assert done.returncode == 1 and last.startswith("ImportError: ")
    for module in SUPPORTED:
        assert f"{module} >=" in last
    assert f"{name} {version}" in last and "FLASHINFER_DISABLE_VERSION_CHECK=1" in last
    for anything in ("1", "yes"):
        done = python(
            "import flashinfer; print(flashinfer.__version__)", path=tmp_path, FLASHINFER_DISABLE_VERSION_CHECK=anything
        )
        assert done.returncode == 0 and f"{name} {version}" in done.stderr and "RuntimeWarning" in done.stderr
