"""The path by which callers of upstream reach the names of `flashinfer.fused_moe`, and the orders of weights' rows."""

from __future__ import annotations

from typing import Any

from flashinfer.compat.paths import named
from flashinfer.fused_moe.layouts import (
    get_reorder_rows_for_gated_act_gemm_row_indices as get_reorder_rows_for_gated_act_gemm_row_indices,
    get_w2_permute_indices_with_cache as get_w2_permute_indices_with_cache,
    get_w3_w1_permute_indices_with_cache as get_w3_w1_permute_indices_with_cache,
)

# Engines import it by this name.
_maybe_get_cached_w3_w1_permute_indices = get_w3_w1_permute_indices_with_cache


def __getattr__(name: str) -> Any:
    return named(name, "flashinfer.fused_moe", __name__)
