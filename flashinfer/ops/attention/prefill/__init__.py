"""Prefill and append: many query rows per request, bound by the tensor cores."""

from __future__ import annotations

from flashinfer._core.dispatch import Op, Variant
from flashinfer.ops.attention import config as portable
from flashinfer.ops.attention.catalog import prefill_problems
from flashinfer.ops.attention.prefill import config
from flashinfer.ops.attention.problem import Problem

prefill = Op(
    "prefill",
    Problem,
    (
        Variant("sm90", "flashinfer.ops.attention.prefill.sm90", config.refuses, config.choose),
        Variant("portable", "flashinfer.ops.attention.portable", portable.refuses, portable.choose),
        Variant("reference", "flashinfer.ops.attention.reference", portable.refuses_everywhere),
    ),
    prefill_problems,
)
