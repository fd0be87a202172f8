"""Attention, KV-cache and token kernels for LLM serving, API-compatible with FlashInfer, written in Python.

Names are imported at first use: `import flashinfer` loads neither torch nor Triton and touches no GPU.
"""

from importlib import import_module

from flashinfer._core.env import api_level, traces_calls
from flashinfer.version import __version__, check_supported

check_supported()

# public module -> the names that it gives to the root
_ROOT_NAMES = {
    "activation": (
        "gelu_and_mul",
        "gelu_tanh_and_mul",
        "silu_and_mul",
        "silu_and_mul_scaled_nvfp4_experts_quantize",
        "silu_and_scaled_nvfp4_experts_quantize",
    ),
    "attention": (
        "BatchAttention",
        "BatchAttentionWithAttentionSinkWrapper",
        "BatchPrefillWithCausalBidirectionalRangesWrapper",
    ),
    "attn_scores": (
        "compute_paged_mqa_logits_schedule",
        "fp4_paged_mqa_logits",
        "fp8_paged_mqa_logits",
        "min_block_table_width",
        "padded_seq_len",
        "precompile_paged_mqa_logits",
    ),
    "autotune_cache": ("MeasurementPolicy", "autotune_v2", "autotune_v2_reload"),
    "autotuner": ("autotune",),
    "cascade": (
        "BatchDecodeWithSharedPrefixPagedKVCacheWrapper",
        "BatchPrefillWithSharedPrefixPagedKVCacheWrapper",
        "MultiLevelCascadeAttentionWrapper",
        "merge_state",
        "merge_state_in_place",
        "merge_states",
    ),
    "causal_conv1d": (),
    "comm": (),
    "concat_ops": (),
    "core": ("BatchDecodeWithPagedKVCache", "BatchPrefillWithRaggedKVCache", "PagedKVCache"),
    "cute_dsl": (),
    "cudnn": ("cudnn_batch_decode_with_kv_cache",),
    "diffusion_ops": (),
    "decode": (
        "BatchDecodeWithPagedKVCacheWrapper",
        "CUDAGraphBatchDecodeWithPagedKVCacheWrapper",
        "fast_decode_plan",
        "prepare_balanced_batch_decode_with_kv_cache",
        "single_decode_with_kv_cache",
    ),
    "gated_act_mxfp8": ("silu_and_mul_mxfp8_quantize", "silu_and_mul_mxfp8_quantize_backward"),
    "gdn2_prefill": ("chunk_gated_delta_rule2",),
    "gdn_decode": (),
    "gdn_kernels": ("gdn_fused_decode_step", "gdn_fused_decode_step_supported"),
    "gdn_prefill": ("chunk_gated_delta_rule",),
    "gdp_prefill": ("chunk_gated_delta_product",),
    "gemm": (
        "SegmentGEMMWrapper",
        "bmm_bf16",
        "bmm_fp8",
        "bmm_mxfp8",
        "mm_bf16",
        "mm_bf16_fp4",
        "mm_fp4",
        "mm_fp8",
        "mm_mxfp8",
        "mm_nvfp4_svdquant",
        "nvfp4_quantize_smooth",
        "prepare_bf16_fp4_weights",
        "svdquant_linear",
        "tgv_gemm_sm100",
    ),
    "jit": (),
    "grouped_mm": ("grouped_mm_bf16", "grouped_mm_fp4", "grouped_mm_fp8", "grouped_mm_mxfp8"),
    "mamba": (),
    "mhc": (),
    "kda": ("RecurrentKDAPrefillWrapper", "recurrent_kda"),
    "kda_decode": ("fused_kda_decode", "packed_fused_kda_decode", "packed_kda_decode"),
    "kda_prefill": (
        "KDAPrefillPlanCache",
        "RecurrentKDAPrefillWorkspace",
        "kda_prefill_supports_fp32_checkpoints",
        "prepare_bf16_kda_prefill",
        "prepare_tf32_kda_prefill",
    ),
    "mla_kv_pack": ("concat_mla_kv_quant_fp8",),
    "mla": ("BatchMLAPagedAttentionWrapper", "xqa_mla"),
    "msa_ops": (),
    "norm": (
        "add_rmsnorm_fp4quant",
        "fused_add_rmsnorm",
        "fused_add_rmsnorm_fp8_block_quant",
        "fused_add_rmsnorm_quant",
        "fused_dit_gate_residual_layernorm_gamma_beta",
        "fused_dit_gate_residual_layernorm_scale_shift",
        "fused_dit_residual_layernorm_scale_shift",
        "fused_qk_rmsnorm_rope",
        "fused_rmsnorm_silu",
        "gated_residual_next_rmsnorm",
        "gated_residual_rmsnorm",
        "gemma_fused_add_rmsnorm",
        "gemma_rmsnorm",
        "layernorm",
        "layernorm_quant",
        "rmsnorm",
        "rmsnorm_fp4quant",
        "rmsnorm_quant",
        "rmsnorm_sigmoid_gate",
        "supports_gated_residual_next_rmsnorm",
        "supports_gated_residual_rmsnorm",
        "supports_rmsnorm_sigmoid_gate",
    ),
    "page": (
        "append_paged_kv_cache",
        "append_paged_mla_kv_cache",
        "get_batch_indices_positions",
        "get_seq_lens",
        "nvfp4_quantize_append_paged_kv_cache",
        "nvfp4_quantize_append_paged_kv_cache_with_slot_mapping",
        "nvfp4_quantize_append_paged_mla_kv_cache",
    ),
    "fp4_quantization": (),
    "fp8_quantization": (),
    "fused_moe": (
        "CuteDslBf16MoEWrapper",
        "CuteDslMoEWrapper",
        "CuteDslMxfp8Mxfp4MoEWrapper",
        "cute_dsl_fused_moe",
        "cute_dsl_fused_moe_bf16",
        "cute_dsl_fused_moe_mxfp8_mxfp4",
        "cute_dsl_fused_moe_nvfp4",
        "cutlass_fused_moe",
        "reorder_rows_for_gated_act_gemm",
        "trtllm_bf16_moe",
        "trtllm_bf16_routed_moe",
        "trtllm_fp4_block_scale_moe",
        "trtllm_fp4_block_scale_routed_moe",
        "trtllm_fp8_block_scale_moe",
        "trtllm_fp8_block_scale_routed_moe",
        "trtllm_fp8_per_tensor_scale_moe",
        "trtllm_fp8_per_tensor_scale_routed_moe",
    ),
    "quantization": (
        "NVFP44Over6Config",
        "NVFP44Over6ErrMode",
        "block_scale_interleave",
        "e2m1_and_ufp8sf_scale_to_float",
        "fp4_quantize",
        "mxfp4_dequantize",
        "mxfp4_dequantize_host",
        "mxfp4_quantize",
        "make_nvfp4_global_scale",
        "mxfp8_dequantize_host",
        "mxfp8_grouped_quantize",
        "mxfp8_quantize",
        "nvfp4_batched_quantize",
        "nvfp4_block_scale_interleave",
        "nvfp4_kv_dequantize",
        "nvfp4_kv_dequantize_paged",
        "nvfp4_kv_quantize",
        "nvfp4_quantize",
        "nvfp4_quantize_paged_kv_cache",
        "packbits",
        "resolve_nvfp4_4over6",
        "scaled_fp4_grouped_quantize",
        "segment_packbits",
        "shuffle_matrix_a",
        "shuffle_matrix_sf_a",
        "silu_and_mul_nvfp4_quantize",
    ),
    "sampling": (
        "chain_speculative_sampling",
        "min_p_sampling_from_probs",
        "sampling_from_logits",
        "sampling_from_probs",
        "softmax",
        "top_k_mask_logits",
        "top_k_renorm_probs",
        "top_k_sampling_from_probs",
        "top_k_top_p_sampling_from_logits",
        "top_k_top_p_sampling_from_probs",
        "top_p_renorm_probs",
        "top_p_sampling_from_probs",
    ),
    "trtllm_low_latency_gemm": ("prepare_low_latency_gemm_weights",),
    "tllm_enums": ("ActivationType", "RoutingMethodType", "SfLayout", "is_gated_activation"),
    "topk": ("TopKTieBreak", "top_k", "top_k_page_table_transform", "top_k_ragged_transform", "top_k_varlen"),
    "utils": ("next_positive_power_of_2",),
    "pod": ("BatchPODWithPagedKVCacheWrapper", "PODWithPagedKVCacheWrapper"),
    "prefill": (
        "BatchPrefillWithPagedKVCacheWrapper",
        "BatchPrefillWithRaggedKVCacheWrapper",
        "single_prefill_with_kv_cache",
        "single_prefill_with_kv_cache_return_lse",
        "trtllm_fmha_v2_prefill",
        "trtllm_sage_attention_quantize",
    ),
    "rope": (
        "apply_llama31_rope",
        "apply_llama31_rope_inplace",
        "apply_llama31_rope_pos_ids",
        "apply_llama31_rope_pos_ids_inplace",
        "apply_rope",
        "apply_rope_inplace",
        "apply_rope_pos_ids",
        "apply_rope_pos_ids_inplace",
        "apply_rope_with_cos_sin_cache",
        "apply_rope_with_cos_sin_cache_inplace",
    ),
    "sparse": ("BlockSparseAttentionWrapper", "VariableBlockSparseAttentionWrapper"),
    "testing": (),
    "trace_apply": (),
    "xqa": ("xqa",),
}
_MODULE_OF = {name: module for module, names in _ROOT_NAMES.items() for name in names} | {
    "AttentionVariant": "ops.attention.variants",
    "explain": "_core.dispatch",
    "fi_trace": "fi_trace",
}

__all__ = ["__version__", *sorted({*_MODULE_OF, *_ROOT_NAMES})]


def __getattr__(name):
    if name in _MODULE_OF:
        value = getattr(import_module(f"{__name__}.{_MODULE_OF[name]}"), name)
    elif name in _ROOT_NAMES:
        value = import_module(f"{__name__}.{name}")
    else:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    globals()[name] = value
    return value


def __dir__():
    return sorted({*globals(), *__all__})


if api_level() or traces_calls():
    import_module(f"{__name__}.api_logging").install()
