"""Prefill and append attention: many query tokens per request, keys and values in a KV cache or in ragged rows."""

from flashinfer.prefill.paged import BatchPrefillWithPagedKVCacheWrapper
from flashinfer.prefill.ragged import BatchPrefillWithRaggedKVCacheWrapper
from flashinfer.prefill.single import single_prefill_with_kv_cache, single_prefill_with_kv_cache_return_lse

__all__ = [
    "BatchPrefillWithPagedKVCacheWrapper",
    "BatchPrefillWithRaggedKVCacheWrapper",
    "single_prefill_with_kv_cache",
    "single_prefill_with_kv_cache_return_lse",
]
