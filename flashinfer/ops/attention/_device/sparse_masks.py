"""The causal mask where keys are gathered blocks, as a function of a variant."""

import triton
import triton.language as tl


@triton.jit
def causal_blocks(logits, batch, q_pos, kv_pos, head, params):
    """A query sees keys at its position and before: positions in the matrix, not among the keys that are gathered."""
    begin = tl.load(params.kv_indptr + batch)
    keys = (tl.load(params.kv_indptr + batch + 1) - begin) * params.page_size
    page = tl.load(params.kv_indices + begin + kv_pos // params.page_size, mask=kv_pos < keys, other=0)
    key = page * params.page_size + kv_pos % params.page_size - tl.load(params.first_keys + batch)
    query = tl.load(params.first_queries + batch) + q_pos - keys + tl.load(params.q_lens + batch)
    return key <= query + params.ahead
