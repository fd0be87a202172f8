"""Prefill and append attention: many query tokens per request, keys and values in a KV cache or in ragged rows."""

from flashinfer._direct.fmha_v2 import fmha_v2_prefill_deepseek, trtllm_fmha_v2_prefill
from flashinfer._direct.sage import trtllm_sage_attention_quantize
from flashinfer._direct.trtllm_prefill import trtllm_batch_context_with_kv_cache, trtllm_ragged_attention_deepseek
from flashinfer.cudnn.prefill import cudnn_batch_prefill_with_kv_cache
from flashinfer.prefill.paged import BatchPrefillWithPagedKVCacheWrapper
from flashinfer.prefill.ragged import BatchPrefillWithRaggedKVCacheWrapper
from flashinfer.prefill.single import (
    single_prefill_with_kv_cache, single_prefill_with_kv_cache_return_lse,
    single_prefill_with_kv_cache_with_jit_module,
)  # fmt: skip
from flashinfer.trace.wrappers import describe_run

__all__ = [
    "BatchPrefillWithPagedKVCacheWrapper",
    "BatchPrefillWithRaggedKVCacheWrapper",
    "cudnn_batch_prefill_with_kv_cache",
    "fmha_v2_prefill_deepseek",
    "single_prefill_with_kv_cache",
    "single_prefill_with_kv_cache_return_lse",
    "single_prefill_with_kv_cache_with_jit_module",
    "trtllm_batch_context_with_kv_cache",
    "trtllm_fmha_v2_prefill",
    "trtllm_ragged_attention_deepseek",
    "trtllm_sage_attention_quantize",
]

describe_run(__name__, BatchPrefillWithPagedKVCacheWrapper)
describe_run(__name__, BatchPrefillWithRaggedKVCacheWrapper)
