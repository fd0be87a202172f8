"""Prefill and append: many query rows per request, bound by the tensor cores."""

from __future__ import annotations

from flashinfer._core.dispatch import Op, Variant
from flashinfer.ops.attention import config
from flashinfer.ops.attention.catalog import prefill_problems
from flashinfer.ops.attention.problem import Problem

prefill = Op(
    "prefill",
    Problem,
    (
        Variant("portable", "flashinfer.ops.attention.portable", config.refuses, config.choose),
        Variant("reference", "flashinfer.ops.attention.reference"),
    ),
    prefill_problems,
)
