"""Multi-head latent attention with absorbed projections: all heads share keys that are their own values."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from flashinfer._core.dispatch import Op, Variant
from flashinfer.ops.attention.mla import config
from flashinfer.ops.attention.mla.problem import Problem


def _catalog() -> Iterator[Problem]:
    base = Problem("bf16", "bf16", "bf16", 16, rows=16)
    yield base
    yield replace(base, num_heads=128, mask="causal", lse=True, rows=64)
    yield replace(base, q_dtype="fp8e4nv", kv_dtype="fp8e4nv", num_heads=128, rows=128, page_size=1, scales=True)
    yield replace(base, kv_dtype="fp8e4nv", num_heads=128, rows=64, sparse=True, sinks=True, lse=True, base_e=True)
    yield replace(base, num_heads=64, head_dim_kpe=0, sparse=True, first=128, first_page=256, rows=64, split=False)
    yield replace(base, num_heads=128, sparse=True, scales=True, rows=128)
    yield replace(base, q_dtype="fp16", kv_dtype="fp8e5", o_dtype="fp16", num_heads=21, head_dim_ckv=80,
                  head_dim_kpe=24, page_size=5, rows=32, aligned=False)  # fmt: skip


mla = Op(
    "mla",
    Problem,
    (
        Variant("sm90", "flashinfer.ops.attention.mla.sm90", config.refuses_sm90, config.choose_sm90),
        Variant("portable", "flashinfer.ops.attention.mla.portable", config.refuses, config.choose),
        Variant("reference", "flashinfer.ops.attention.mla.reference", config.refuses_everywhere),
    ),
    _catalog,
)
