"""Attention and gated delta rules with the signatures of upstream's cuDNN bindings."""

from flashinfer.cudnn.decode import cudnn_batch_decode_with_kv_cache
from flashinfer.cudnn.linear_attention import (
    cudnn_chunk_gated_delta_product,
    cudnn_chunk_gated_delta_rule,
    cudnn_chunk_gated_delta_rule2,
    cudnn_recurrent_kda,
)
from flashinfer.cudnn.prefill import cudnn_batch_prefill_with_kv_cache

__all__ = [
    "cudnn_batch_decode_with_kv_cache",
    "cudnn_batch_prefill_with_kv_cache",
    "cudnn_chunk_gated_delta_product",
    "cudnn_chunk_gated_delta_rule",
    "cudnn_chunk_gated_delta_rule2",
    "cudnn_recurrent_kda",
]
