"""Finding a token's place in a ragged batch."""

import triton
import triton.language as tl


@triton.jit
def request_of(indptr, batch, token):
    """For each of a block of tokens, how many of the requests end at or before it: its request's index.

    Request i is the tokens from indptr[i] to indptr[i + 1]. A token past the last request gives `batch`.
    """
    low = tl.zeros_like(token)
    high = low + batch
    # A search among 0 ... batch ends after as many halvings as batch has bits.
    span = batch
    while span > 0:
        middle = (low + high) // 2
        open = low < high
        ended = open & (tl.load(indptr + middle + 1, open, other=0) <= token)
        low = tl.where(ended, middle + 1, low)
        high = tl.where(open & (ended == 0), middle, high)
        span = span // 2
    return low
