"""Decode: few query rows per request, bound by reading the keys and values once."""

from __future__ import annotations

from flashinfer._core.dispatch import Op, Variant
from flashinfer.ops.attention import config as portable
from flashinfer.ops.attention.catalog import decode_problems
from flashinfer.ops.attention.decode import config
from flashinfer.ops.attention.problem import Problem

decode = Op(
    "decode",
    Problem,
    (
        Variant("sm80", "flashinfer.ops.attention.decode.sm80", config.refuses, config.choose),
        Variant("portable", "flashinfer.ops.attention.portable", portable.refuses, portable.choose),
        Variant("reference", "flashinfer.ops.attention.reference", portable.refuses_everywhere),
    ),
    decode_problems,
)
