"""Decode attention: one query token per request (or a few), keys and values in a KV cache."""

from flashinfer._direct.balanced_decode import prepare_balanced_batch_decode_with_kv_cache
from flashinfer._direct.trtllm_decode import trtllm_batch_decode_with_kv_cache, xqa_batch_decode_with_kv_cache
from flashinfer.compat.cached_module import offsets as _get_range_buf  # by which name older SGLang takes it
from flashinfer.cudnn.decode import cudnn_batch_decode_with_kv_cache
from flashinfer.decode.batch import BatchDecodeWithPagedKVCacheWrapper, CUDAGraphBatchDecodeWithPagedKVCacheWrapper
from flashinfer.decode.fast_plan import fast_decode_plan
from flashinfer.decode.single import single_decode_with_kv_cache, single_decode_with_kv_cache_with_jit_module
from flashinfer.mla.decode import trtllm_batch_decode_with_kv_cache_mla, xqa_batch_decode_with_kv_cache_mla, xqa_mla
from flashinfer.mla.sparse import trtllm_batch_decode_sparse_mla_dsv4
from flashinfer.page import get_seq_lens
from flashinfer.trace.wrappers import describe_run
from flashinfer.xqa import xqa

__all__ = [
    "BatchDecodeWithPagedKVCacheWrapper",
    "CUDAGraphBatchDecodeWithPagedKVCacheWrapper",
    "cudnn_batch_decode_with_kv_cache",
    "fast_decode_plan",
    "get_seq_lens",
    "prepare_balanced_batch_decode_with_kv_cache",
    "single_decode_with_kv_cache",
    "single_decode_with_kv_cache_with_jit_module",
    "trtllm_batch_decode_sparse_mla_dsv4",
    "trtllm_batch_decode_with_kv_cache",
    "trtllm_batch_decode_with_kv_cache_mla",
    "xqa",
    "xqa_batch_decode_with_kv_cache",
    "xqa_batch_decode_with_kv_cache_mla",
    "xqa_mla",
]

describe_run(__name__, BatchDecodeWithPagedKVCacheWrapper)
