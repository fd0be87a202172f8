"""Memory layouts of tensors, as fields of Problems."""

from __future__ import annotations

import torch


def whole_rows(*tensors: torch.Tensor | None) -> bool:
    """Whether 16-byte accesses of rows are aligned: base addresses, and strides of dimensions of more than one element.

    The row is the last dimension, or the one before it if the last is not contiguous.
    """
    for x in tensors:
        if x is None:
            continue
        if x.data_ptr() % 16:
            return False
        row = x.dim() - (1 if x.shape[-1] == 1 or x.stride(-1) == 1 else 2)
        for dim, (size, stride) in enumerate(zip(x.shape, x.stride(), strict=True)):
            if size > 1 and stride * x.element_size() % 16 and not (dim == row and stride == 1):
                return False
    return True


def spans(offsets: torch.Tensor | None, rows: int, length: int) -> list[tuple[int, int, int]]:
    """Row, first token and end of each sequence: a row each, or with offsets all in row 0."""
    if offsets is None:
        return [(row, 0, length) for row in range(rows)]
    ends = offsets.tolist()
    return [(0, begin, end) for begin, end in zip(ends, ends[1:])]


def state_layout(*states: torch.Tensor | None) -> str:
    """The dimension of states [.., V, K] that is contiguous in all of them: "k", "v", or "" for neither."""
    given = [x for x in states if x is not None]
    if all(x.stride(-1) == 1 or x.shape[-1] == 1 for x in given):
        return "k"
    return "v" if all(x.stride(-2) == 1 or x.shape[-2] == 1 for x in given) else ""


def dense_rows(*states: torch.Tensor | None) -> bool:
    """Whether rows of all states [.., V, K] lie one after another without gaps, and K is a power of two of 16 at
    least."""
    for x in states:
        if x is not None and (x.shape[-1] < 16 or x.shape[-1] & x.shape[-1] - 1 or x.stride()[-2:] != (x.shape[-1], 1)):
            return False
    return True
