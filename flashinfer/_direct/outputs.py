"""Outputs of the engines' functions: the caller's tensors, in shapes of the caller's, nvfp4, and log-sum-exps."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch

from flashinfer._core.checks import as_dtype, require
from flashinfer._core.custom_op import one_op
from flashinfer.ops import layouts
from flashinfer.ops.attention.engine import output_of, value_dim
from flashinfer.quantization import _rows
from flashinfer.utils import FP4Tensor

# Elements of an nvfp4 block.
_BLOCK = 16


def attention_op(shape_of: Callable, outputs: tuple[str, ...] = ("out", "lse"), returned: Callable | None = None,
                 **others) -> Callable:  # fmt: skip
    """`one_op` of a function that writes `out` and `lse`; torch's compiler calls it between two graphs.

    Parameters
    ----------
    shape_of : callable
        Of the arguments by name: the shape of the output, its dtype where no `out_dtype` says it, and its device.
    outputs : tuple of str
        "out", and "lse" where the function has it.
    returned : callable, optional
        As of `one_op`; by default `out`, with `return_lse` and `lse`.
    others
        Further arguments of `one_op`; those of "given" are of arguments that are no output.
    """

    def out_of(its: dict) -> torch.Tensor:
        out, dtype = its["out"], its.get("out_dtype")
        fp4 = dtype == "nvfp4" or not isinstance(out, torch.Tensor | None)
        require(not fp4, "out_dtype", "nvfp4 without memory, as under fake tensors", "another dtype")
        shape, default, device = shape_of(its)
        return torch.empty(shape, dtype=as_dtype(dtype, default, "out_dtype"), device=device) if out is None else out

    def lse_of(its: dict) -> torch.Tensor | None:
        if its["lse"] is not None or not its["return_lse"]:
            return its["lse"]
        shape, _, device = shape_of(its)
        return torch.empty((math.prod(shape[:-2]), shape[-2]), dtype=torch.float32, device=device)

    def results(its: dict):
        return (its["out"], its["lse"]) if its.get("return_lse") else its["out"]

    given = {**others.pop("given", {}), "out": out_of, **({"lse": lse_of} if "lse" in outputs else {})}
    written = (*outputs, *others.pop("written", ()))
    return one_op(written, given, returned or results, between=True, **others)


def like_query(its: dict) -> tuple:
    """`shape_of` of a paged cache."""
    query = its["query"]
    return (*query.shape[:2], value_dim(its["kv_cache"])), query.dtype, query.device


class Output:
    """Where a call writes, and what it returns.

    Attributes
    ----------
    rows : Tensor, optional
        Of the shape that attention writes; None for a new one.
    dtype : torch.dtype
    lse : float32 Tensor [tokens, heads], optional
        A log-sum-exp that the caller gave is written, whether it is returned or not.
    """

    def __init__(self, q: torch.Tensor, shape: tuple, out=None, out_dtype=None, o_sf_scale=None, o_sf_vec_size=None,
                 lse: torch.Tensor | None = None, return_lse: bool = False):  # fmt: skip
        self._out, self._lse, self._returns, self._fp4 = out, lse, return_lse, None
        packed = out is not None and not isinstance(out, torch.Tensor)
        if packed or out_dtype == "nvfp4":
            self._fp4 = _Nvfp4(q, shape, out, out_dtype, o_sf_scale, o_sf_vec_size)
            self.rows, self.dtype = None, self._fp4.dtype
        else:
            self.rows, self.dtype = output_of(q, shape, out, out_dtype, o_sf_scale, o_sf_vec_size)
        self.lse = None
        if lse is not None:
            fits = lse.numel() == math.prod(shape[:2]) and lse.dtype == torch.float32 and lse.is_contiguous()
            require(fits, "lse", f"{lse.dtype} {tuple(lse.shape)}", f"float32 {tuple(shape[:2])}, contiguous")
            self.lse = lse if lse.shape == shape[:2] else lse.view(shape[:2])

    @property
    def call(self) -> dict[str, Any]:
        """out, lse and return_lse, as Plan.run takes them."""
        return dict(out=self.rows, lse=self.lse, return_lse=self._returns or self.lse is not None)

    def finish(self, result: torch.Tensor | tuple[torch.Tensor, torch.Tensor]) -> Any:
        """What the function returns of what Plan.run returned: the caller's own tensors, where it gave some.

        A tensor or an FP4Tensor, and with return_lse a pair of it and the log-sum-exp.
        """
        out, lse = result if isinstance(result, tuple) else (result, self._lse)
        if self._fp4 is not None:
            out = self._fp4.write(out)
        elif self._out is not None:
            out = self._out
        if not self._returns or lse is None:
            return out
        return out, lse if self._lse is None else self._lse


class _Nvfp4:
    """An nvfp4 output: codes, and e4m3 factors of 16 elements in the 128x4 layout; a value is code * factor / scale."""

    def __init__(self, q, shape, out, out_dtype, scale, vec_size):
        require(out is None or isinstance(out, FP4Tensor), "out", type(out).__name__, "a tensor, or an FP4Tensor")
        named = out_dtype in (None, "nvfp4")
        require(named, "out_dtype", repr(out_dtype), "'nvfp4', the type of out")
        require(vec_size in (None, _BLOCK), "o_sf_vec_size", vec_size, f"{_BLOCK}, the block of nvfp4")
        if isinstance(scale, torch.Tensor):
            self.scale = _rows.scale_tensor("o_sf_scale", scale, q)
        else:
            value = 1.0 if scale is None else float(scale)
            require(math.isfinite(value) and value > 0, "o_sf_scale", scale, "a positive number")
            self.scale = torch.full((1,), value, dtype=torch.float32, device=q.device)
        require(shape[2] % _BLOCK == 0, "out_dtype", "nvfp4", f"a head_dim that is a multiple of {_BLOCK}")
        self.shape, self.blocks = shape, shape[1] * shape[2] // _BLOCK
        self.dtype = q.dtype if q.dtype == torch.float16 else torch.bfloat16
        if out is not None:
            codes = (*shape[:2], shape[2] // 2)
            fits = out.data.numel() == math.prod(codes) and out.data.is_contiguous()
            require(fits, "out", tuple(out.data.shape), f"{codes} codes, contiguous")
            wide = layouts.padded(1, self.blocks, "128x4")[1]
            fits = out.scale.shape[1] == wide and out.scale.is_contiguous()
            require(fits, "out", f"factors {tuple(out.scale.shape)}", f"{wide} columns, contiguous")
            require(out.data.device == q.device, "out", f"a tensor on {out.data.device}", str(q.device))
        self.out = out

    def write(self, rows: torch.Tensor) -> FP4Tensor:
        tokens = self.shape[0]
        rows = rows.reshape(1, tokens, self.shape[1] * self.shape[2])
        codes, factors, _ = _rows.quantize("out", rows, "nvfp4", "linear", self.scale)
        factors, out = factors.view(tokens, self.blocks), self.out
        if out is None:
            high, wide = layouts.padded(max(tokens, 1), self.blocks, "128x4")
            scale = torch.zeros((high, wide), dtype=torch.uint8, device=rows.device).view(torch.float8_e4m3fn)
            out = FP4Tensor(codes.view(*self.shape[:2], self.shape[2] // 2), scale)
        else:
            out.data.view(-1).copy_(codes.view(-1))
        begin, flat = out.scale_start_index, out.scale.view(torch.uint8).view(-1)
        at = layouts.offsets(out.scale.shape[0], self.blocks, "128x4", rows.device)[begin : begin + tokens]
        flat[at.reshape(-1)] = factors.reshape(-1)
        return out
