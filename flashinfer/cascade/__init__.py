"""Merging of attention states, and attention over shared prefixes built on it.

A batch whose requests share a prefix reads the prefix's keys once for all of them, each request's own keys apart, and
merges the two (Ye et al., Cascade Inference, 2024, and FlashInfer, arXiv:2501.01005, section 3.2).
"""

from .merge import merge_state, merge_state_in_place, merge_states
from .multi_level import MultiLevelCascadeAttentionWrapper
from .shared_prefix import (
    BatchDecodeWithSharedPrefixPagedKVCacheWrapper,
    BatchPrefillWithSharedPrefixPagedKVCacheWrapper,
)
from flashinfer.trace.templates import describe

__all__ = [
    "BatchDecodeWithSharedPrefixPagedKVCacheWrapper",
    "BatchPrefillWithSharedPrefixPagedKVCacheWrapper",
    "MultiLevelCascadeAttentionWrapper",
    "merge_state",
    "merge_state_in_place",
    "merge_states",
]

describe(__name__, globals())
