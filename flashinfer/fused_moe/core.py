"""The path by which callers of upstream reach the names of `flashinfer.fused_moe`."""

from flashinfer.fused_moe.cutlass import cutlass_fused_moe
from flashinfer.fused_moe.layouts import (
    convert_to_block_layout,
    get_reorder_rows_for_gated_act_gemm_row_indices,
    get_w2_permute_indices_with_cache,
    get_w3_w1_permute_indices_with_cache,
    interleave_moe_scales_for_sm90_mixed_gemm,
    interleave_moe_weights_for_sm90_mixed_gemm,
    preprocess_moe_weights_for_sm90_mixed_gemm_humming,
    reorder_rows_for_gated_act_gemm,
)
from flashinfer.fused_moe.trtllm import trtllm_bf16_moe, trtllm_bf16_routed_moe
from flashinfer.fused_moe.trtllm_fp8 import (
    trtllm_fp8_block_scale_moe,
    trtllm_fp8_block_scale_routed_moe,
    trtllm_fp8_per_tensor_scale_moe,
    trtllm_fp8_per_tensor_scale_routed_moe,
)
from flashinfer.fused_moe.trtllm_fp8_channels import (
    trtllm_fp8_per_channel_scale_moe,
    trtllm_fp8_per_channel_scale_routed_moe,
)
from flashinfer.fused_moe.trtllm_mxint4 import trtllm_mxint4_block_scale_moe, trtllm_mxint4_block_scale_routed_moe
from flashinfer.fused_moe.trtllm_w4 import trtllm_fp4_block_scale_moe, trtllm_fp4_block_scale_routed_moe
from flashinfer.fused_moe.utils import cutlass_fused_moe_workspace_size
from flashinfer.tllm_enums import ActivationType, Fp8QuantizationType, RoutingMethodType, WeightLayout

__all__ = [
    "ActivationType",
    "Fp8QuantizationType",
    "RoutingMethodType",
    "WeightLayout",
    "convert_to_block_layout",
    "cutlass_fused_moe",
    "cutlass_fused_moe_workspace_size",
    "get_reorder_rows_for_gated_act_gemm_row_indices",
    "get_w2_permute_indices_with_cache",
    "interleave_moe_scales_for_sm90_mixed_gemm",
    "interleave_moe_weights_for_sm90_mixed_gemm",
    "preprocess_moe_weights_for_sm90_mixed_gemm_humming",
    "reorder_rows_for_gated_act_gemm",
    "trtllm_bf16_moe",
    "trtllm_bf16_routed_moe",
    "trtllm_fp4_block_scale_moe",
    "trtllm_fp4_block_scale_routed_moe",
    "trtllm_fp8_block_scale_moe",
    "trtllm_fp8_block_scale_routed_moe",
    "trtllm_fp8_per_channel_scale_moe",
    "trtllm_fp8_per_channel_scale_routed_moe",
    "trtllm_fp8_per_tensor_scale_moe",
    "trtllm_fp8_per_tensor_scale_routed_moe",
    "trtllm_mxint4_block_scale_moe",
    "trtllm_mxint4_block_scale_routed_moe",
]

# Engines import it by this name.
_maybe_get_cached_w3_w1_permute_indices = get_w3_w1_permute_indices_with_cache
