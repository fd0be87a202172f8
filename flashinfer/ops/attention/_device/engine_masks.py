"""Masks of the engine forms, as functions of a variant: of draft tokens, of keys dealt out to ranks, of chunks."""

import triton
import triton.language as tl


@triton.jit
def draft_of_uniform(logits, batch, q_pos, kv_pos, head, params):
    """A query sees all keys before its request's draft, and of the draft those whose bit is set in its row."""
    first = tl.load(params.kv_lens + batch) - params.q_len
    column = tl.maximum(kv_pos - first, 0)
    row = batch * params.q_len + q_pos - first
    bits = tl.load(params.bits + row * params.row_bytes + column // 8).to(tl.int32)
    return (kv_pos < first) | (((bits >> (column % 8)) & 1) != 0)


@triton.jit
def draft_of_ragged(logits, batch, q_pos, kv_pos, head, params):
    """The same for requests of different numbers of queries."""
    begin = tl.load(params.qo_indptr + batch)
    first = tl.load(params.kv_lens + batch) - (tl.load(params.qo_indptr + batch + 1) - begin)
    column = tl.maximum(kv_pos - first, 0)
    row = begin + q_pos - first
    bits = tl.load(params.bits + row * params.row_bytes + column // 8).to(tl.int32)
    return (kv_pos < first) | (((bits >> (column % 8)) & 1) != 0)


@triton.jit
def _in_shard(q_index, q_len, batch, kv_pos, params):
    position = tl.load(params.global_lens + batch) - q_len + q_index
    key = kv_pos * params.world + params.rank
    return (key <= position) & ((params.window_left < 0) | (key + params.window_left >= position))


@triton.jit
def shard_of_uniform(logits, batch, q_pos, kv_pos, head, params):
    """Causal, and perhaps within a window, where key c of this rank stands at c * world + rank of the request."""
    q_index = q_pos - tl.load(params.kv_lens + batch) + params.q_len
    return _in_shard(q_index, params.q_len, batch, kv_pos, params)


@triton.jit
def shard_of_ragged(logits, batch, q_pos, kv_pos, head, params):
    """The same for requests of different numbers of queries."""
    q_len = tl.load(params.qo_indptr + batch + 1) - tl.load(params.qo_indptr + batch)
    q_index = q_pos - tl.load(params.kv_lens + batch) + q_len
    return _in_shard(q_index, q_len, batch, kv_pos, params)


@triton.jit
def same_chunk(logits, batch, q_pos, kv_pos, head, params):
    """A query sees keys of its own chunk."""
    return kv_pos // params.size == q_pos // params.size
