"""Finding a token's place in a paged cache."""

import triton
import triton.language as tl


@triton.jit
def slot_of(batch_indices, positions, kv_indices, kv_indptr, token, inside, batch, entries, num_pages, page_size):
    """For each of a block of tokens: its page and its slot there, 64 bits, and whether it has one.

    Token t is at positions[t] of request batch_indices[t]; kv_indices holds `entries` pages of `batch` requests. A
    token that is not `inside`, of no request, or outside its request's pages or the cache, has no place.
    """
    request = tl.load(batch_indices + token, inside, other=-1)
    position = tl.load(positions + token, inside, other=-1)
    kept = (request >= 0) & (request < batch) & (position >= 0)
    entry = tl.load(kv_indptr + request, kept, other=0) + position // page_size
    kept &= (entry < tl.load(kv_indptr + request + 1, kept, other=0)) & (entry < entries)
    page = tl.load(kv_indices + entry, kept, other=-1)
    kept &= (page >= 0) & (page < num_pages)
    return page.to(tl.int64), (position % page_size).to(tl.int64), kept
