"""Where the tokens of a sequence lie, in rows or packed."""

import triton
import triton.language as tl


@triton.jit
def span_of(offsets, n, of):
    """Row, first token and length of sequence n: a row of its own, or a part of the one row that offsets divide."""
    if offsets is None:
        row = tl.full([], 0, tl.int64) + n
        first = tl.full([], 0, tl.int64)
        length = of.tokens
    else:
        row = tl.full([], 0, tl.int64)
        first = tl.load(offsets + n).to(tl.int64)
        length = (tl.load(offsets + n + 1) - first).to(tl.int32)
    return row, first, length
