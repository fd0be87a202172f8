"""The op of products with block-scaled operands, as compilers see it."""

from __future__ import annotations

import torch

from flashinfer._core.checks import dtype_name, is_aligned, same_device
from flashinfer._core.custom_op import custom_op
from flashinfer.gemm._operands import choose, form_of
from flashinfer.ops.gemm import blockscaled as room
from flashinfer.ops.gemm.operands import PER_BYTE, bucket


@custom_op("flashinfer::gemm_blockscaled", mutates_args=("out",))
def gemm(
    a: torch.Tensor,
    b: torch.Tensor,
    a_scale: torch.Tensor | None,
    b_scale: torch.Tensor,
    alpha: torch.Tensor | None,
    out: torch.Tensor,
    scale: str,
    a_layout: str,
    b_layout: str,
    *,
    width: int,
    rows: int = 1,
    columns: int = 1,
    shuffled: bool = False,
    backend: str = "auto",
) -> None:
    same_device(a=a, b=b, a_scale=a_scale, b_scale=b_scale, alpha=alpha, out=out)
    if out.numel() == 0:
        return
    K = a.shape[2] * PER_BYTE[form_of(a)]
    problem = room.Problem(
        a=form_of(a),
        b=form_of(b),
        scale=scale,
        width=width,
        out=dtype_name(out.dtype),
        tokens=bucket(a.shape[1]),
        rows=rows,
        columns=columns,
        a_layout=a_layout,
        b_layout=b_layout,
        alpha=alpha is not None,
        shuffled=shuffled,
        aligned=_aligned(a, b, out, K // width, (a_scale, a_layout), (b_scale, b_layout)),
        whole=K % 128 == 0,
    )
    choose(room.blockscaled, problem, a.device, backend).run(a, b, a_scale, b_scale, alpha, out)


def _aligned(a, b, out, blocks: int, *factors) -> bool:
    """Whether the accesses are as wide as the Problem says."""
    if not is_aligned(a, b, out) or out.shape[2] % 8 or any(x.shape[2] * x.element_size() % 16 for x in (a, b)):
        return False
    for flat, layout in factors:
        if layout and (flat.data_ptr() % 4 or (layout == "linear" and blocks % 4)):
            return False
    return True
