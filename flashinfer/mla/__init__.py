"""Multi-head latent attention (MLA) over a paged cache of latents, with absorbed projections."""

from flashinfer.mla.batch import BatchMLAPagedAttentionWrapper
from flashinfer.mla.decode import trtllm_batch_decode_with_kv_cache_mla, xqa_batch_decode_with_kv_cache_mla, xqa_mla
from flashinfer.mla.sparse import trtllm_batch_decode_sparse_mla_dsv4
from flashinfer.trace.wrappers import describe_run

# Upstream has both under a second name.
batch_decode_sparse_mla_dsv4 = trtllm_batch_decode_sparse_mla_dsv4
trtllm_prefill_with_kv_cache_mla = trtllm_batch_decode_with_kv_cache_mla

__all__ = [
    "BatchMLAPagedAttentionWrapper",
    "batch_decode_sparse_mla_dsv4",
    "trtllm_batch_decode_sparse_mla_dsv4",
    "trtllm_batch_decode_with_kv_cache_mla",
    "trtllm_prefill_with_kv_cache_mla",
    "xqa_batch_decode_with_kv_cache_mla",
    "xqa_mla",
]

describe_run(__name__, BatchMLAPagedAttentionWrapper)
