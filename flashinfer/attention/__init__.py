"""Attention of mixed batches: prefill, append and decode in one launch."""

from flashinfer.attention._core import BatchAttention, BatchAttentionWithAttentionSinkWrapper

__all__ = ["BatchAttention", "BatchAttentionWithAttentionSinkWrapper"]
