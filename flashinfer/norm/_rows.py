"""What the norms have in common: checks of rows and weights, and the Problem of a call."""

from __future__ import annotations

import torch

from flashinfer._core.checks import dtype_name, is_aligned, require, require_fit
from flashinfer._core.sizes import power_of_two
from flashinfer.ops import norm as room

ROW_DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def launch(
    op, x, weight, out, eps, *, residual=None, bias=None, gemma=False, after="", quantised=None, least=1, **fields
) -> None:
    """Run `op` on the rows of x. fields : the Problem's other ones. least : of the block."""
    if x.numel() == 0:
        return
    hidden = x.shape[-1]
    weight = None if weight is None else weight.contiguous()
    bias = None if bias is None else bias.contiguous()
    normed = None if quantised is None else quantised.normed
    given = [t for t in (x, residual, weight, bias, out, normed) if t is not None]
    problem = room.Problem(
        kind=op.name,
        dtype=dtype_name(x.dtype),
        weight_dtype=dtype_name((x if weight is None else weight).dtype),
        block=power_of_two(hidden, least),
        gemma=gemma,
        aligned=hidden * x.element_size() % 16 == 0 and is_aligned(*given),
        after=after,
        **fields,
    )
    extra = () if quantised is None else (quantised,)
    op(problem, x.device).run(x, residual, weight, bias, out, eps, *extra)


def check_rows(input, **others) -> None:
    require_fit("input", input, input.dim() in (2, 3), "[rows, hidden] or [batch, heads, hidden]", *ROW_DTYPES)
    for name, tensor in others.items():
        require(tensor.shape == input.shape, name, tuple(tensor.shape), f"{tuple(input.shape)}, the shape of input")
        require(tensor.dtype == input.dtype, name, tensor.dtype, f"{input.dtype}, the dtype of input")


def check_weights(input, **weights) -> None:
    hidden = input.shape[-1]
    for name, weight in weights.items():
        require_fit(name, weight, weight.shape == (hidden,), f"[{hidden}], the last dimension of input", *ROW_DTYPES)
