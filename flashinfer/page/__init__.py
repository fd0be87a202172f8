"""The paged KV cache: appending tokens, as they are or quantised, and the index arithmetic of page tables."""

from flashinfer.page.append import append_paged_kv_cache, append_paged_mla_kv_cache
from flashinfer.page.quantised import (
    nvfp4_quantize_append_paged_kv_cache,
    nvfp4_quantize_append_paged_kv_cache_with_slot_mapping,
    nvfp4_quantize_append_paged_mla_kv_cache,
    quantize_append_paged_kv_cache,
    quantize_append_paged_kv_cache_with_slot_mapping,
)
from flashinfer.page.tables import get_batch_indices_positions, get_seq_lens
from flashinfer.trace.templates import describe

__all__ = [
    "append_paged_kv_cache",
    "append_paged_mla_kv_cache",
    "get_batch_indices_positions",
    "get_seq_lens",
    "nvfp4_quantize_append_paged_kv_cache",
    "nvfp4_quantize_append_paged_kv_cache_with_slot_mapping",
    "nvfp4_quantize_append_paged_mla_kv_cache",
    "quantize_append_paged_kv_cache",
    "quantize_append_paged_kv_cache_with_slot_mapping",
]

describe(__name__, globals())
