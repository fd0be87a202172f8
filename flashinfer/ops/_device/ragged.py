"""Finding a token's place in a ragged batch."""

import triton
import triton.language as tl


@triton.jit
def request_of(indptr, batch, token):
    """The request of each of a block of tokens: the number of requests that end at or before it.

    Request i has the tokens indptr[i] to indptr[i + 1] - 1. With indptr 0 3 3 5, token 3 is of request 2. A token past
    the last request gives `batch`.
    """
    low = tl.zeros_like(token)
    high = low + batch
    # A binary search over 0 ... batch takes as many steps as batch has bits.
    span = batch
    while span > 0:
        middle = (low + high) // 2
        searching = low < high
        ended = searching & (tl.load(indptr + middle + 1, searching, other=0) <= token)
        low = tl.where(ended, middle + 1, low)
        high = tl.where(searching & (ended == 0), middle, high)
        span = span // 2
    return low
