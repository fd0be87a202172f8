"""The mask of bidirectional spans in a causal prompt, as a function of a variant."""

import triton
import triton.language as tl


@triton.jit
def causal_or_in_span(logits, batch, q_pos, kv_pos, head, params):
    """A query sees the keys up to its own, and those of its span, each within a window of its own.

    The tables of the plan tell which row of q a query is, so that a captured launch follows later plans.
    """
    first = tl.load(params.kv_indptr + batch)
    pages = tl.load(params.kv_indptr + batch + 1) - first
    kv_len = tl.maximum((pages - 1) * params.page_size + tl.load(params.last_page_len + batch), 0)
    end = tl.load(params.qo_indptr + batch + 1)
    # Positions of no query, which kernels ask for, too, read a row of the request, or of the one before it.
    row = tl.maximum(tl.minimum(end - kv_len + q_pos, end - 1), 0)
    begin = tl.load(params.ranges + 2 * row)
    last = tl.load(params.ranges + 2 * row + 1)
    behind = q_pos - kv_pos
    causal = (behind >= 0) & ((params.causal_window < 0) | (behind <= params.causal_window))
    span = (kv_pos >= begin) & (kv_pos <= last) & ((params.range_window <= 0) | (behind < params.range_window))
    return causal | span
