"""Mixtures of experts: routing, and the experts' products with all that stands between them in one call."""

from flashinfer.fused_moe import core as core, fused_routing_dsv3 as fused_routing_dsv3
from flashinfer.fused_moe.api import QuantFormat
from flashinfer.fused_moe.bgmv_moe import (
    bgmv_moe,
    bgmv_moe_expand,
    bgmv_moe_shrink,
    fill_w_ptr,
    prepare_bgmv_moe,
)
from flashinfer.fused_moe.cute_dsl import (
    CuteDslBf16MoEWrapper,
    CuteDslMoEWrapper,
    CuteDslMxfp8Mxfp4MoEWrapper,
    cute_dsl_fused_moe,
    cute_dsl_fused_moe_bf16,
    cute_dsl_fused_moe_mxfp8_mxfp4,
    cute_dsl_fused_moe_nvfp4,
)
from flashinfer.fused_moe.cutlass import cutlass_fused_moe
from flashinfer.fused_moe.hash_topk import hash_topk
from flashinfer.fused_moe.layouts import (
    convert_to_block_layout,
    interleave_moe_scales_for_sm90_mixed_gemm,
    interleave_moe_weights_for_sm90_mixed_gemm,
    preprocess_moe_weights_for_sm90_mixed_gemm_humming,
    reorder_rows_for_gated_act_gemm,
)
from flashinfer.fused_moe.moe_lora_delta import bgmv_moe_gemm1_lora_delta, bgmv_moe_gemm2_lora_delta
from flashinfer.fused_moe.monomoe import (
    alloc_scratchpad,
    get_scratchpad_size_bytes,
    has_monomoe,
    interleave_for_tma_wgmma_up,
    mono_moe,
)
from flashinfer.fused_moe.routing import fused_topk_deepseek
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
from flashinfer.fused_moe.trtllm_gen_routing import TrtllmGenRoutingResult, trtllm_gen_routing
from flashinfer.fused_moe.trtllm_mxint4 import trtllm_mxint4_block_scale_moe, trtllm_mxint4_block_scale_routed_moe
from flashinfer.fused_moe.trtllm_w4 import trtllm_fp4_block_scale_moe, trtllm_fp4_block_scale_routed_moe
from flashinfer.fused_moe.utils import cutlass_fused_moe_workspace_size
from flashinfer.quantization.nvfp4_quantization_utils import NVFP44Over6Config, NVFP44Over6ErrMode
from flashinfer.tllm_enums import ActivationType, Fp8QuantizationType, RoutingMethodType, WeightLayout

__all__ = [
    "ActivationType",
    "CuteDslBf16MoEWrapper",
    "CuteDslMoEWrapper",
    "CuteDslMxfp8Mxfp4MoEWrapper",
    "Fp8QuantizationType",
    "NVFP44Over6Config",
    "NVFP44Over6ErrMode",
    "QuantFormat",
    "RoutingMethodType",
    "TrtllmGenRoutingResult",
    "WeightLayout",
    "alloc_scratchpad",
    "bgmv_moe",
    "bgmv_moe_expand",
    "bgmv_moe_gemm1_lora_delta",
    "bgmv_moe_gemm2_lora_delta",
    "bgmv_moe_shrink",
    "convert_to_block_layout",
    "cute_dsl_fused_moe",
    "cute_dsl_fused_moe_bf16",
    "cute_dsl_fused_moe_mxfp8_mxfp4",
    "cute_dsl_fused_moe_nvfp4",
    "cutlass_fused_moe",
    "cutlass_fused_moe_workspace_size",
    "fill_w_ptr",
    "fused_topk_deepseek",
    "get_scratchpad_size_bytes",
    "has_monomoe",
    "hash_topk",
    "interleave_for_tma_wgmma_up",
    "interleave_moe_scales_for_sm90_mixed_gemm",
    "interleave_moe_weights_for_sm90_mixed_gemm",
    "mono_moe",
    "prepare_bgmv_moe",
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
    "trtllm_gen_routing",
    "trtllm_mxint4_block_scale_moe",
    "trtllm_mxint4_block_scale_routed_moe",
]
