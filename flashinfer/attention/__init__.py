"""Attention of mixed batches: prefill, append and decode in one launch."""

from flashinfer.attention._core import BatchAttention, BatchAttentionWithAttentionSinkWrapper
from flashinfer.prefill.spans import BatchPrefillWithCausalBidirectionalRangesWrapper

__all__ = [
    "BatchAttention",
    "BatchAttentionWithAttentionSinkWrapper",
    "BatchPrefillWithCausalBidirectionalRangesWrapper",
]
