"""This library's masks that are functions of a variant: draft trees, context shards, chunks, spans, block-sparse
columns.

Each takes (logits, batch, q_pos, kv_pos, head, params), as in `flashinfer.AttentionVariant`, and returns whether a
query sees a key, [queries, keys]. `params` is the variant's named tuple.
"""

import triton
import triton.language as tl


@triton.jit
def draft_of_uniform(logits, batch, q_pos, kv_pos, head, params):
    """A query sees all keys before its request's draft tokens, and those draft tokens whose bit is set in its row."""
    first = tl.load(params.kv_lens + batch) - params.q_len
    column = tl.maximum(kv_pos - first, 0)
    row = batch * params.q_len + q_pos - first
    bits = tl.load(params.bits + row * params.row_bytes + column // 8).to(tl.int32)
    return (kv_pos < first) | (((bits >> (column % 8)) & 1) != 0)


@triton.jit
def draft_of_ragged(logits, batch, q_pos, kv_pos, head, params):
    """draft_of_uniform for requests with different numbers of queries."""
    begin = tl.load(params.qo_indptr + batch)
    first = tl.load(params.kv_lens + batch) - (tl.load(params.qo_indptr + batch + 1) - begin)
    column = tl.maximum(kv_pos - first, 0)
    row = begin + q_pos - first
    bits = tl.load(params.bits + row * params.row_bytes + column // 8).to(tl.int32)
    return (kv_pos < first) | (((bits >> (column % 8)) & 1) != 0)


@triton.jit
def _in_shard(q_index, q_len, batch, kv_pos, params):
    """The mask of shard_of_uniform for query q_index of q_len."""
    position = tl.load(params.global_lens + batch) - q_len + q_index
    key = kv_pos * params.world + params.rank
    return (key <= position) & ((params.window_left < 0) | (key + params.window_left >= position))


@triton.jit
def shard_of_uniform(logits, batch, q_pos, kv_pos, head, params):
    """Causal, with a window if window_left >= 0, where key c of this rank has position c * world + rank of the
    request."""
    q_index = q_pos - tl.load(params.kv_lens + batch) + params.q_len
    return _in_shard(q_index, params.q_len, batch, kv_pos, params)


@triton.jit
def shard_of_ragged(logits, batch, q_pos, kv_pos, head, params):
    """shard_of_uniform for requests with different numbers of queries."""
    q_len = tl.load(params.qo_indptr + batch + 1) - tl.load(params.qo_indptr + batch)
    q_index = q_pos - tl.load(params.kv_lens + batch) + q_len
    return _in_shard(q_index, q_len, batch, kv_pos, params)


@triton.jit
def same_chunk(logits, batch, q_pos, kv_pos, head, params):
    """A query sees keys of its own chunk."""
    return kv_pos // params.size == q_pos // params.size


@triton.jit
def causal_or_in_span(logits, batch, q_pos, kv_pos, head, params):
    """A query sees the keys up to its own, within the causal window, and those of its span, within the range window.

    The query's row in q is computed from the plan's tables, so that a captured launch follows later plans.
    """
    first = tl.load(params.kv_indptr + batch)
    pages = tl.load(params.kv_indptr + batch + 1) - first
    kv_len = tl.maximum((pages - 1) * params.page_size + tl.load(params.last_page_len + batch), 0)
    end = tl.load(params.qo_indptr + batch + 1)
    # Kernels also evaluate positions without a query. These are clamped to a row of this request or the one before it.
    row = tl.maximum(tl.minimum(end - kv_len + q_pos, end - 1), 0)
    begin = tl.load(params.ranges + 2 * row)
    last = tl.load(params.ranges + 2 * row + 1)
    behind = q_pos - kv_pos
    causal = (behind >= 0) & ((params.causal_window < 0) | (behind <= params.causal_window))
    span = (kv_pos >= begin) & (kv_pos <= last) & ((params.range_window <= 0) | (behind < params.range_window))
    return causal | span


@triton.jit
def causal_blocks(logits, batch, q_pos, kv_pos, head, params):
    """Causal by positions in the block-sparse matrix, not by positions among the gathered keys."""
    begin = tl.load(params.kv_indptr + batch)
    keys = (tl.load(params.kv_indptr + batch + 1) - begin) * params.page_size
    page = tl.load(params.kv_indices + begin + kv_pos // params.page_size, mask=kv_pos < keys, other=0)
    key = page * params.page_size + kv_pos % params.page_size - tl.load(params.first_keys + batch)
    query = tl.load(params.first_queries + batch) + q_pos - keys + tl.load(params.q_lens + batch)
    return key <= query + params.ahead
