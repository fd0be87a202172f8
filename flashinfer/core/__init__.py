"""A paged KV cache that keeps its own page tables, and attention over it.

    cache = flashinfer.PagedKVCache(num_layers=1, num_kv_heads=32, head_dim=128, page_size=16, max_num_pages=128,
                                    device="cuda", data_type=torch.float16)
    decode = flashinfer.BatchDecodeWithPagedKVCache(cache, 32, 32, 128, sm_scale=128**-0.5, dtype=torch.float16)
    sequence = cache.begin_forward(50)                  # room for 50 tokens
    cache.append(k, v, layer_idx=0)                     # their keys and values, layer by layer
    cache.end_forward(sequence, 50)                     # they are now part of the sequence
    out = decode.decode(q)                              # q: [1, 1, 32, 128]

Pages are shared by counting their users, and copied when one of them writes (Kwon et al., PagedAttention,
arXiv:2309.06180, section 4.4). The tables are those that the wrappers of `flashinfer.decode`, `flashinfer.prefill` and
`flashinfer.page` take; the cache tensor is theirs too, layout NHD, with no copy.
"""

from .attention import BatchDecodeWithPagedKVCache, BatchPrefillWithRaggedKVCache
from .kv_cache import PagedKVCache
from .sequences import OutOfPages, Sequence, Tables

__all__ = [
    "BatchDecodeWithPagedKVCache",
    "BatchPrefillWithRaggedKVCache",
    "OutOfPages",
    "PagedKVCache",
    "Sequence",
    "Tables",
]
