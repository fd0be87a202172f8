"""Fills the outputs of a failed exchange with bytes 0xFF: NaN in every floating-point format and in ue8m0, -1 in
integers. Kernels write the same."""

from __future__ import annotations

import contextlib

import torch


def spoil(*tensors: torch.Tensor | None) -> None:
    """Fill tensors with NaN, or -1."""
    for tensor in tensors:
        if tensor is None or tensor.numel() == 0:
            continue
        if tensor.dtype.is_floating_point and tensor.element_size() > 1:
            tensor.fill_(torch.nan)
        elif tensor.element_size() == 1:
            tensor.view(torch.uint8).fill_(0xFF)
        else:
            tensor.fill_(-1)


@contextlib.contextmanager
def spoiled(*outputs: torch.Tensor | None):
    """A context in which an exchange writes `outputs`: if it raises, they are filled with NaN or -1."""
    try:
        yield
    except Exception:
        spoil(*outputs)
        raise
