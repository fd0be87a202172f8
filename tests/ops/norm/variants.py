"""The variants that the tests of the rooms without a `backend` argument run: norm, rope, activation and page."""

from functools import partialmethod

import pytest

from flashinfer._core.dispatch import Op


@pytest.fixture(params=["reference", "portable", pytest.param("gpu", marks=pytest.mark.gpu)])
def variant(request, monkeypatch):
    """The reference and the Triton kernel under the interpreter, on the CPU; what is chosen by itself, on a GPU."""
    if request.param != "gpu":
        monkeypatch.setattr(Op, "__call__", partialmethod(Op.__call__, backend=request.param))
    return request.param
