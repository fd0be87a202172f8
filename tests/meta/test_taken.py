"""The check that what the reference takes has a kernel on every chip can fail."""

from dataclasses import dataclass

import pytest
import torch

from flashinfer._core.dispatch import Op, Variant


@dataclass(frozen=True)
class Rows:
    count: int


def op(why):
    refuses = lambda problem, target: why if problem.count > 8 and not target.is_cpu else ""
    return Op("rows", Rows, (Variant("portable", "", refuses), Variant("reference", "")), tuple)


def test_a_problem_without_a_kernel_is_found():
    cpu = torch.device("cpu")
    assert op("more than 8 rows")(Rows(8), cpu).variant.name == "reference"
    with pytest.raises(AssertionError, match="no variant takes .*more than 8 rows"):
        op("more than 8 rows")(Rows(9), cpu)
    assert op("rows of more than 8 do not fit in registers")(Rows(9), cpu).variant.name == "reference"
