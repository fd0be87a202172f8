"""What the tests of norm, rope, activation and page share: the variants that they run, and which cases a CPU runs."""

from functools import partialmethod

import pytest

from flashinfer._core.dispatch import Op


@pytest.fixture(params=["reference", "portable", pytest.param("gpu", marks=pytest.mark.gpu)])
def variant(request, monkeypatch):
    """The reference and the Triton kernel under the interpreter, on the CPU; what is chosen by itself, on a GPU."""
    if request.param != "gpu":
        monkeypatch.setattr(Op, "__call__", partialmethod(Op.__call__, backend=request.param))
    return request.param


def in_turn(first, second, large=()):
    """Pairs of both lists. A GPU runs each; a CPU each of `first` with one of `second`, in turn, none of `large`."""
    cases = []
    for i, a in enumerate([*first, *large]):
        for j, b in enumerate(second):
            on_cpu = i < len(first) and i % len(second) == j
            cases.append(pytest.param(a, b, marks=() if on_cpu else pytest.mark.gpu))
    return cases
