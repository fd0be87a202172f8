"""The programs of a sequence, its tokens, in rows or packed, and the slot of its state."""

import triton
import triton.language as tl

# Programs along the second axis of a grid, at most.
MOST = tl.constexpr(65535)


def states_grid(sequences: int, heads: int, blocks: int) -> tuple[int, int, int]:
    """A program for each block of rows of each head of each sequence, in the order of states in memory.

    Programs start in the order of the grid, so those that run at a time read and write memory side by side. Behind the
    last sequence there may be programs without one.
    """
    most = MOST.value
    return blocks * heads, min(sequences, most), -(-sequences // most)


@triton.jit
def program_of(BLOCKS: tl.constexpr):
    """Sequence, head and block of this program of `states_grid`."""
    n = tl.program_id(1) + tl.program_id(2) * MOST
    return n, tl.program_id(0) // BLOCKS, tl.program_id(0) % BLOCKS


@triton.jit
def span_of(offsets, n, of):
    """Row, first token and length of sequence n. Without offsets it is row n; with offsets all are in row 0."""
    if offsets is None:
        row = n.to(tl.int64)
        first = row * 0
        length = of.tokens
    else:
        first = tl.load(offsets + n).to(tl.int64)
        row = first * 0
        length = (tl.load(offsets + n + 1) - first).to(tl.int32)
    return row, first, length


@triton.jit
def head_of(head, share):
    """head // group of a float32 share = 1 / group, in three instructions. Exact up to 2^21 heads."""
    return ((head.to(tl.float32) + 0.5) * share).to(tl.int32)


@triton.jit
def place_of(p, offsets, of, stride):
    """Sequence and part of place p. A part has `stride` tokens; sequence i has the places from offsets[i] // stride + i
    on, which leaves room for a partial last part of each sequence.

    With stride 64 and offsets 0, 100, 230 sequence 0 has places 0 and 1, and sequence 1 places 2 to 4 (100 // 64 + 1 =
    2). A place may be unused: for offsets 0, 64, 128 they are 0, 2, and place 1 is an empty part of sequence 0.
    """
    low = p * 0
    high = low + of.sequences - 1
    while low < high:
        middle = (low + high + 1) // 2
        begins = tl.load(offsets + middle).to(tl.int32) // stride + middle <= p
        low = tl.where(begins, middle, low)
        high = tl.where(begins, high, middle - 1)
    return low, p - tl.load(offsets + low).to(tl.int32) // stride - low


@triton.jit
def chunk_of(p, offsets, of, stride):
    """Sequence and chunk of place p: each row has of.chunks places, and packed sequences those of `place_of`."""
    if offsets is None:
        n = p // of.chunks
        chunk = p % of.chunks
    else:
        n, chunk = place_of(p, offsets, of, stride)
    return n, chunk


@triton.jit
def slot_of(read, accepted, n, read_by, of):
    """The slot of sequence n's initial state: n, or the table's entry. With `accepted` the column is accepted[n] -
    1."""
    slot = tl.full([], 0, tl.int64) + n
    if read is not None:
        entry = slot * read_by.sequence
        if accepted is not None:
            taken = tl.load(accepted + n).to(tl.int64) - 1
            entry += tl.minimum(tl.maximum(taken, 0), of.columns - 1) * read_by.column
        slot = tl.load(read + entry).to(tl.int64)
    return slot


@triton.jit
def zero_tokens(out, out_by, origin, first, end, head, row, step, in_rows):
    """Store zeros in the outputs of tokens first to end - 1, whose rows are `step` apart."""
    for token in range(first, end):
        at = origin * out_by.row + token * out_by.token + head * out_by.head
        tl.store(out + (at + row * step), tl.zeros_like(row).to(out.dtype.element_ty), in_rows)


@triton.jit
def tokens_of(offsets, n, out, out_by, head, row, step, in_rows, of):
    """(sequence, row of tokens, first token, length) of program n. With offsets there is one program more than
    sequences. It has no tokens, and zeroes the outputs of those in front of the first sequence and behind the last."""
    sequence = tl.minimum(n, of.sequences - 1)
    origin, first, length = span_of(offsets, sequence, of)
    if offsets is not None:
        if n == of.sequences:
            zero_tokens(out, out_by, origin, 0, tl.load(offsets).to(tl.int32), head, row, step, in_rows)
            zero_tokens(out, out_by, origin, (first + length).to(tl.int32), of.tokens, head, row, step, in_rows)
            length = 0
    return sequence, origin, first, length
