"""The path by which callers of upstream reach the names of `flashinfer.fused_moe`."""

from flashinfer.fused_moe.layouts import (
    convert_to_block_layout,
    get_reorder_rows_for_gated_act_gemm_row_indices,
    get_w2_permute_indices_with_cache,
    get_w3_w1_permute_indices_with_cache,
    reorder_rows_for_gated_act_gemm,
)
from flashinfer.tllm_enums import ActivationType, Fp8QuantizationType, RoutingMethodType, WeightLayout

__all__ = [
    "ActivationType",
    "Fp8QuantizationType",
    "RoutingMethodType",
    "WeightLayout",
    "convert_to_block_layout",
    "get_reorder_rows_for_gated_act_gemm_row_indices",
    "get_w2_permute_indices_with_cache",
    "reorder_rows_for_gated_act_gemm",
]

# Engines import it by this name.
_maybe_get_cached_w3_w1_permute_indices = get_w3_w1_permute_indices_with_cache
