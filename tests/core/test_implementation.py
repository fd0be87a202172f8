"""What every variant's module offers."""

import pytest
import torch

import flashinfer
from flashinfer._core.dispatch import Variant
from flashinfer._core.implementation import Implementation
from flashinfer._core.launch import Launcher
from flashinfer._core.target import GPU_ARCHS, named
from flashinfer.ops import all_ops

VARIANTS = [(name, op, variant) for name, op in all_ops().items() for variant in op.variants]


@pytest.mark.parametrize(("name", "op", "variant"), VARIANTS, ids=[f"{n}-{v.name}" for n, _, v in VARIANTS])
def test_every_variant_has_an_implementation_and_kernels_from_its_launchers(name, op, variant):
    implementation = variant.load()
    assert isinstance(implementation, Implementation) and callable(implementation.run)
    if variant.name == "reference":
        assert implementation.launchers == ()
        return
    assert implementation.launchers and all(isinstance(x, Launcher) for x in implementation.launchers)
    taken = ((p, t) for p in op.catalog() for t in map(named, GPU_ARCHS) if not variant.refuses(p, t))
    problem, target = next(taken)
    kernels = list(implementation.kernels(problem, variant.config(problem, target)))
    assert kernels and {launcher for launcher, *_ in kernels} <= set(implementation.launchers)


def test_what_an_implementation_leaves_out():
    plain = Implementation(lambda problem, config, x: (problem, config, x), ("one", "two"))
    assert list(plain.kernels("problem", "config")) == [("one", "problem", "config"), ("two", "problem", "config")]
    assert plain.bind("problem", "config", None)("x") == ("problem", "config", "x")
    assert not plain.compile_together and plain.stack_budget == 0


def test_a_reference_is_as_exact_under_autocast():
    """torch would make bfloat16 of its operands."""
    a, b = torch.randn(5, 96), torch.randn(24, 96)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = flashinfer.gemm.gemm_alpha_beta(a, b, torch.empty(5, 24))
        assert (a @ b.T).dtype == torch.bfloat16
    torch.testing.assert_close(out, a @ b.T)


def test_a_module_without_an_implementation_is_an_error():
    with pytest.raises(AttributeError, match="IMPLEMENTATION"):
        Variant("portable", "flashinfer._core.alike").load()
