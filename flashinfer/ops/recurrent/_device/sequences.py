"""Where the tokens of a sequence lie, in rows or packed, and which slot its state is in."""

import triton
import triton.language as tl


@triton.jit
def span_of(offsets, n, of):
    """Row, first token and length of sequence n: a row of its own, or a part of the one row that offsets divide."""
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
def place_of(p, offsets, of, stride):
    """Sequence and part of place p, of `stride` tokens each. Sequence i has places from offsets[i] / stride + i on."""
    low = p * 0
    high = low + of.sequences - 1
    while low < high:
        middle = (low + high + 1) // 2
        begins = tl.load(offsets + middle).to(tl.int32) // stride + middle <= p
        low = tl.where(begins, middle, low)
        high = tl.where(begins, high, middle - 1)
    return low, p - tl.load(offsets + low).to(tl.int32) // stride - low


@triton.jit
def slot_of(read, accepted, n, read_by, of):
    """The slot that sequence n begins with: its number, or its entry in a table, whose column `accepted` names."""
    slot = tl.full([], 0, tl.int64) + n
    if read is not None:
        entry = slot * read_by.sequence
        if accepted is not None:
            taken = tl.load(accepted + n).to(tl.int64) - 1
            entry += tl.minimum(tl.maximum(taken, 0), of.columns - 1) * read_by.column
        slot = tl.load(read + entry).to(tl.int64)
    return slot


@triton.jit
def zero_tokens(out, out_by, origin, first, end, head, row, in_rows):
    for token in range(first, end):
        at = origin * out_by.row + token * out_by.token + head * out_by.head
        tl.store(out + at + row, tl.zeros_like(row).to(out.dtype.element_ty), in_rows)
