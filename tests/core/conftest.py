"""A process whose Triton compiles: in the suite's own it interprets."""

import os

import pytest

from tests import forked


def forget_interpreter():
    os.environ.pop("TRITON_INTERPRET", None)


@pytest.fixture(scope="session")
def in_triton():
    """Calls a module-level function with picklable arguments in a process where kernels are compiled."""
    with forked.process(forget_interpreter) as call:
        yield call


@pytest.fixture(scope="session")
def run_python():
    """Runs a program with the environment variables given, where torch is imported already."""
    with forked.python_with_torch() as run:
        yield run


@pytest.fixture(autouse=True)
def base(tmp_path, monkeypatch):
    """A cache of the test's own; the variables that change where kernels come from are unset."""
    for name in ("PRECOMPILED_DIR", "FROZEN", "DEBUG", "LINE_INFO"):
        monkeypatch.delenv(f"FLASHINFER_{name}", raising=False)
    folder = tmp_path / "base"
    monkeypatch.setenv("FLASHINFER_WORKSPACE_BASE", str(folder))
    return folder
