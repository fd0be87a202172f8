"""Masks as bits."""

from __future__ import annotations

import torch

from flashinfer._core.arguments import checked
from flashinfer._core.checks import dtype_name, indptr_values, require, require_fit
from flashinfer._core.custom_op import custom_op
from flashinfer._core.literals import BitOrder
from flashinfer.ops import quantize as room


@checked
def packbits(x: torch.Tensor, bitorder: BitOrder = "big") -> torch.Tensor:
    """Pack the elements of an array into bits, as numpy.packbits does.

    Parameters
    ----------
    x : torch.Tensor
        [n], bool or integers, where what is not zero is a one.
    bitorder : str
        "big": the first of eight elements is the highest bit; "little": the lowest.

    Returns
    -------
    torch.Tensor
        uint8 [ceil(n / 8)]; missing elements of the last byte are zeros.

    Raises
    ------
    ValueError
        A shape, dtype or bit order other than the above: a float mask may be one that is added to logits.

    Examples
    --------
    >>> import torch, flashinfer
    >>> flashinfer.packbits(torch.tensor([True, False, True]), bitorder="little")
    tensor([5], dtype=torch.uint8)
    """
    _check(x, bitorder)
    return _packbits(x, bitorder)


@checked
def segment_packbits(
    x: torch.Tensor, indptr: torch.Tensor, bitorder: BitOrder = "big"
) -> tuple[torch.Tensor, torch.Tensor]:
    """Pack the elements of each segment into bits, each segment from a byte of its own on.

    Parameters
    ----------
    x : torch.Tensor
        [indptr[-1]], bool or integers, where what is not zero is a one.
    indptr : torch.Tensor
        int32 or int64 [batch + 1]: segment i is x[indptr[i]:indptr[i + 1]]. Its values are read by the host, which
        waits for the device.
    bitorder : str
        "big": the first of eight elements is the highest bit; "little": the lowest.

    Returns
    -------
    packed : torch.Tensor
        uint8 [new_indptr[-1]].
    new_indptr : torch.Tensor
        int32 [batch + 1], on the device of `indptr`: segment i is packed[new_indptr[i]:new_indptr[i + 1]].

    Raises
    ------
    ValueError
        A shape, dtype, device or bit order other than the above, or offsets that decrease or do not end at n.

    Examples
    --------
    >>> import torch, flashinfer
    >>> bits, indptr = torch.tensor([True, True, False, True]), torch.tensor([0, 3, 4])
    >>> flashinfer.segment_packbits(bits, indptr, bitorder="little")
    (tensor([3, 1], dtype=torch.uint8), tensor([0, 1, 2], dtype=torch.int32))
    """
    _check(x, bitorder)
    require_fit("indptr", indptr, indptr.dim() == 1 and len(indptr) > 0, "[batch + 1]", torch.int32, torch.int64)
    offsets = indptr_values("indptr", indptr, x.numel(), "the length of x")
    require(offsets[-1] == x.numel(), "indptr", f"{offsets[-1]} last", f"{x.numel()}, the length of x")
    starts = [0]
    for begin, end in zip(offsets, offsets[1:]):
        starts.append(starts[-1] + -(-(end - begin) // 8))
    new_indptr = torch.tensor(starts, dtype=torch.int32, device=indptr.device)
    out = torch.empty(starts[-1], dtype=torch.uint8, device=x.device)
    if out.numel():
        index = dtype_name(indptr.dtype)
        begins, ends = (t.to(x.device, indptr.dtype).contiguous() for t in (indptr, new_indptr))
        _run(x, begins, ends, out, bitorder, index)
    return out, new_indptr


def _check(x: torch.Tensor, bitorder: str) -> None:
    require(x.dim() == 1, "x", tuple(x.shape), "one dimension")
    integers = not x.dtype.is_floating_point and not x.dtype.is_complex
    require(integers, "x", x.dtype, "bool or integers")
    require(bitorder in ("big", "little"), "bitorder", repr(bitorder), "'big', 'little'")


def _fake(x, bitorder):
    return x.new_empty((x.shape[0] + 7) // 8, dtype=torch.uint8)


@custom_op("flashinfer::packbits", fake=_fake)
def _packbits(x: torch.Tensor, bitorder: str) -> torch.Tensor:
    out = torch.empty((x.numel() + 7) // 8, dtype=torch.uint8, device=x.device)
    if out.numel():
        _run(x, None, None, out, bitorder, "")
    return out


def _run(x, indptr, new_indptr, out, bitorder: str, index: str) -> None:
    x = (x if x.dtype in (torch.bool, torch.uint8) else x != 0).contiguous().view(torch.uint8)
    problem = room.Packbits(bitorder == "little", index, x.data_ptr() % 16 == 0)
    room.packbits(problem, x.device).run(x, indptr, new_indptr, out)
