"""The ops of products with scaled operands and in groups, as compilers see them."""

from __future__ import annotations

import torch

from flashinfer._core.checks import check_values, dtype_name, indptr_values, is_aligned, same_device
from flashinfer._core.custom_op import custom_op
from flashinfer._core.replay import replayed
from flashinfer._core.target import target_of
from flashinfer.gemm._operands import choice_of, encoding_of
from flashinfer.gemm.dense import multiply
from flashinfer.ops.gemm import blockscaled as room
from flashinfer.ops.gemm import grouped as groups_room
from flashinfer.ops.gemm.blockscaled.config import is_small, widens_first
from flashinfer.ops.gemm.operands import PER_BYTE, bucket


@custom_op("flashinfer::gemm_blockscaled", mutates_args=("out",), in_place=())
@replayed
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
    K = a.shape[2] * PER_BYTE[encoding_of(a)]
    problem = room.Problem(
        a=encoding_of(a),
        b=encoding_of(b),
        scale=scale,
        width=width,
        out=dtype_name(out.dtype),
        tokens=bucket(a.shape[1]),
        rows=rows,
        columns=columns,
        a_layout=a_layout,
        b_layout=b_layout,
        alpha="" if alpha is None else "one" if alpha.numel() == 1 else "rows",
        shuffled=shuffled,
        aligned=_aligned(a, b, out, K // width, (a_scale, a_layout), (b_scale, b_layout)),
        whole=K % 128 == 0,
    )
    choice = choice_of(room.blockscaled, problem, a.device, backend)
    alone = choice.variant.name == "sm90_widened"
    if backend == "auto" and alone and is_small(a.shape[1], b.shape[0] * b.shape[1] * K):
        choice = choice_of(room.blockscaled, problem, a.device, "portable")
    if backend == "auto" and K and widens_first(problem, a.shape[1], target_of(a.device), alone):
        a = _widened(problem, a, a_scale, problem.a, a_layout) if a_layout else a
        # Rows of a shuffled weight are put in order on the way.
        wide = _widened(problem, b, b_scale, problem.b, b_layout, shuffled)
        if alpha is not None and problem.alpha == "rows":
            sums = torch.empty_like(out, dtype=torch.float32)
            multiply(a, wide.mT, sums)
            out.copy_(sums * alpha[:, None])
        else:
            multiply(a, wide.mT, out, a_scale=alpha)
        return
    choice.run(a, b, a_scale, b_scale, alpha, out)


def _widened(problem, codes, scale, encoding: str, layout: str, shuffled: bool = False) -> torch.Tensor:
    """An operand of `problem` as a bfloat16 matrix [batch, rows, K]."""
    K = codes.shape[2] * PER_BYTE[encoding]
    out = torch.empty(*codes.shape[:2], K, dtype=torch.bfloat16, device=codes.device)
    words = _words_aligned(scale) and not (layout == "linear" and K // problem.width % 4)
    aligned = words and is_aligned(codes) and codes.shape[2] * codes.element_size() % 16 == 0
    of_operand = room.Widen(encoding, problem.scale, problem.width, layout, shuffled, aligned, K % 256 == 0)
    room.widen(of_operand, codes.device).run(codes, scale, out)
    return out


def _aligned(a, b, out, blocks: int, *factors) -> bool:
    """Whether the accesses are as wide as the Problem says."""
    if any(layout == "linear" and blocks % 4 for _, layout in factors):
        return False
    return _rows_aligned(a, b, out) and _words_aligned(*(flat for flat, layout in factors if layout))


@custom_op("flashinfer::gemm_grouped", mutates_args=("out",), in_place=())
@replayed
def grouped(
    a: torch.Tensor,
    b: torch.Tensor,
    a_scale: torch.Tensor | None,
    b_scale: torch.Tensor | None,
    alpha: torch.Tensor | None,
    out: torch.Tensor,
    groups: torch.Tensor,
    weights: torch.Tensor | None,
    kind: str,
    scale: str = "",
    *,
    width: int = 1,
    rows: int = 1,
    columns: int = 1,
    padded: bool = False,
    columns_first: bool = False,
    expected: int = 1,
    backend: str = "auto",
) -> None:
    """As the Problem of `flashinfer/ops/gemm/grouped/__init__.py` has it. expected : rows of a group, about."""
    same_device(a=a, b=b, a_scale=a_scale, b_scale=b_scale, alpha=alpha, out=out, groups=groups, weights=weights)
    _check_groups(groups, kind, a.shape[-2])
    if out.numel() == 0 or groups.numel() == 0 or len(b) == 0:
        return
    K = a.shape[-1] * PER_BYTE[encoding_of(a)]
    problem = groups_room.Problem(
        kind=kind,
        a=encoding_of(a),
        b=encoding_of(b),
        scale=scale,
        width=width,
        out=dtype_name(out.dtype),
        tokens=bucket(expected),
        index=dtype_name(groups.dtype),
        rows=rows,
        columns=columns,
        alpha="" if alpha is None else "one" if alpha.numel() == 1 and not padded and kind != "counts" else "groups",
        weights="" if weights is None else dtype_name(weights.dtype),
        padded=padded,
        columns_first=columns_first,
        aligned=_rows_aligned(a, b, out) and (scale in ("", "fp32") or _words_aligned(a_scale, b_scale)),
        whole=K % 128 == 0,
    )
    groups, weights = groups.contiguous(), None if weights is None else weights.contiguous()
    choice = choice_of(groups_room.grouped, problem, a.device, backend)
    choice.run(a, b, a_scale, b_scale, alpha, out, groups, weights)


def _check_groups(groups: torch.Tensor, kind: str, rows: int) -> None:
    """Refuse offsets and counts on the host that reach beyond the rows of a. An index of no group leaves out a row."""
    if groups.device.type == "cpu" and kind == "offsets":
        indptr_values("m_indptr", groups, rows, "the rows of a", sliced=True)
    elif kind == "counts":
        check_values("masked_m", groups, 0, rows)


def _rows_aligned(a, b, out) -> bool:
    """Whether rows are read and written 16 bytes at a time, in boxes: no tensor map steps by 0 elements."""
    if not is_aligned(a, b, out) or out.shape[-1] % 8:
        return False
    if any(size > 1 and not step for x in (a, b) for size, step in zip(x.shape, x.stride(), strict=True)):
        return False
    # Rows of nothing cannot be copied in boxes.
    return all(x.shape[-1] and x.shape[-1] * x.element_size() % 16 == 0 for x in (a, b))


def _words_aligned(*factors) -> bool:
    return all(x is None or x.data_ptr() % 4 == 0 for x in factors)
