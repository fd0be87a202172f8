"""Decode: few query rows per request, bound by reading the keys and values once."""

from __future__ import annotations

from flashinfer._core.dispatch import Op, Variant
from flashinfer.ops.attention import config
from flashinfer.ops.attention.catalog import decode_problems
from flashinfer.ops.attention.problem import Problem

decode = Op(
    "decode",
    Problem,
    (
        Variant("portable", "flashinfer.ops.attention.portable", config.refuses, config.choose),
        Variant("reference", "flashinfer.ops.attention.reference"),
    ),
    decode_problems,
)
