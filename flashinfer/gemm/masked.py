"""The masked product of batches with block scale factors, as callers of upstream's CuTe DSL kernel write it."""

from __future__ import annotations

import torch

from flashinfer._core.arguments import checked
from flashinfer._core.checks import require, require_fit
from flashinfer.compat.queries import answering
from flashinfer.gemm import _operands as given
from flashinfer.gemm._launch import grouped

_CODES = {
    "float4_e2m1fn": (torch.uint8, getattr(torch, "float4_e2m1fn_x2", torch.uint8)),
    "float8_e4m3fn": (torch.float8_e4m3fn, torch.uint8),
    "float8_e5m2": (torch.float8_e5m2, torch.uint8),
}
_FACTORS = {"float8_e8m0fnu": "ue8m0", "float8_e4m3fn": "ue4m3"}
_RESULTS = {"float16": torch.float16, "bfloat16": torch.bfloat16, "float32": torch.float32}
# Choices of upstream's kernel that change no result.
_TILING = ("mma_tiler_mn", "cluster_shape_mn", "sm_count")


@checked
@answering()
def grouped_gemm_nt_masked(
    lhs: tuple[torch.Tensor, torch.Tensor],
    rhs: tuple[torch.Tensor, torch.Tensor],
    out: torch.Tensor,
    masked_m: torch.Tensor,
    *,
    ab_dtype: str,
    sf_dtype: str,
    c_dtype: str,
    sf_vec_size: int,
    topk_weights: torch.Tensor | None = None,
    idx_src_info: torch.Tensor | None = None,
    rank_src_info: torch.Tensor | None = None,
    out_ptrs: torch.Tensor | None = None,
    num_ranks: int = 0,
    dst_signals: torch.Tensor | None = None,
    sm_count: int | None = None,
    barrier_flag_local: torch.Tensor | None = None,
    barrier_flag_multicast: torch.Tensor | None = None,
    is_combine_fusion: bool = False,
    is_swap_ab: bool = False,
    **kwargs,
) -> torch.Tensor:
    """``out[:, :, e] = alpha[e] * A[:, :, e] @ B[:, :, e].T`` in the first ``masked_m[e]`` rows, for each expert e.

    Parameters
    ----------
    lhs : tuple of torch.Tensor
        (A, its scale factors). A is [m, k, experts], or [m, k / 2, experts] of e2m1 with two values in a byte, a view
        of contiguous [experts, m, k]. The factors are 8-bit, either the view of `convert_sf_to_mma_layout`,
        [32, 4, m / 128, 4, k / (4 * sf_vec_size), experts], or contiguous with the same bytes: for each expert its
        factors in 128x4 tiles.
    rhs : tuple of torch.Tensor
        (B, its scale factors): [n, k, experts], the same.
    out : torch.Tensor
        [m, n, experts], a view of contiguous [experts, m, n]; that tensor itself is taken too. Rows from
        ``masked_m[e]`` on are not written.
    masked_m : torch.Tensor
        [experts] int32, on the device; read by the kernel alone.
    ab_dtype : str
        "float4_e2m1fn", "float8_e4m3fn" or "float8_e5m2".
    sf_dtype : str
        "float8_e8m0fnu" or "float8_e4m3fn".
    c_dtype : str
        Of out: "bfloat16", "float16" or "float32".
    sf_vec_size : int
        Elements of k to a factor: 16 or 32.
    topk_weights, idx_src_info, rank_src_info, out_ptrs, num_ranks, barrier_flag_local, barrier_flag_multicast,
    is_combine_fusion, dst_signals
        Upstream's fusion with the combination across ranks; refused.
    is_swap_ab : bool
        Upstream's exchange of lhs and rhs; refused.
    sm_count : int, optional
        Multiprocessors upstream's kernel may use. It has no effect on results, nor on the grid here.
    **kwargs
        alpha : float32, `experts` elements, a factor of each result. alpha_dtype : "float32". c_major : "n".
        mma_tiler_mn, cluster_shape_mn : upstream's tiles; they have no effect here.

    Returns
    -------
    torch.Tensor
        `out`. Summed in float32 and rounded once.

    Raises
    ------
    ValueError
        A shape, dtype, stride or device other than the above, or an argument of the fusion.

    Examples
    --------
    >>> import torch
    >>> from flashinfer.gemm import grouped_gemm_nt_masked
    >>> a = torch.ones(2, 4, 128).to(torch.float8_e4m3fn)  # experts, m, k
    >>> b = torch.ones(2, 8, 128).to(torch.float8_e4m3fn)
    >>> one = torch.full((2, 128, 4), 127, dtype=torch.uint8)  # 2 ** 0, one tile of factors for each expert
    >>> out = torch.zeros(2, 4, 8, dtype=torch.bfloat16).permute(1, 2, 0)
    >>> counts = torch.tensor([3, 0], dtype=torch.int32)
    >>> kinds = dict(ab_dtype="float8_e4m3fn", sf_dtype="float8_e8m0fnu", c_dtype="bfloat16", sf_vec_size=32)
    >>> _ = grouped_gemm_nt_masked((a.permute(1, 2, 0), one), (b.permute(1, 2, 0), one), out, counts, **kinds)
    >>> out[:, 0, 0].tolist()
    [128.0, 128.0, 128.0, 0.0]
    """
    refused = {
        "topk_weights": topk_weights,
        "idx_src_info": idx_src_info,
        "rank_src_info": rank_src_info,
        "out_ptrs": out_ptrs,
        "num_ranks": num_ranks or None,
        "dst_signals": dst_signals,
        "barrier_flag_local": barrier_flag_local,
        "barrier_flag_multicast": barrier_flag_multicast,
        "is_combine_fusion": is_combine_fusion or None,
        "is_swap_ab": is_swap_ab or None,
    }
    for name, value in refused.items():
        require(value is None, name, "given", "its default: products are not fused with an exchange here")
    alpha, alpha_dtype = kwargs.pop("alpha", None), kwargs.pop("alpha_dtype", "float32")
    c_major = kwargs.pop("c_major", "n")
    unknown = sorted(set(kwargs) - set(_TILING))
    require(not unknown, "kwargs", ", ".join(unknown), "alpha, alpha_dtype, c_major, " + ", ".join(_TILING))
    require(c_major == "n", "c_major", repr(c_major), "'n'")
    require(alpha_dtype == "float32", "alpha_dtype", repr(alpha_dtype), "'float32'")
    for name, value, known in (("ab_dtype", ab_dtype, _CODES), ("sf_dtype", sf_dtype, _FACTORS)):
        require(value in known, name, repr(value), ", ".join(map(repr, known)))
    require(c_dtype in _RESULTS, "c_dtype", repr(c_dtype), ", ".join(map(repr, _RESULTS)))
    require(sf_vec_size in (16, 32), "sf_vec_size", sf_vec_size, "16, 32")

    a, b = (_codes(name, x[0], ab_dtype) for name, x in (("lhs", lhs), ("rhs", rhs)))
    (experts, m, _), n = a.shape, b.shape[1]
    given.same("rhs", b.shape[0], "lhs", experts, "experts")
    given.same("rhs", b.shape[2], "lhs", a.shape[2], "k")
    require_fit("masked_m", masked_m, masked_m.shape == (experts,), f"[{experts}], the experts", torch.int32)
    blocks = given.blocks_of("lhs", a.shape[2] * (2 if ab_dtype == "float4_e2m1fn" else 1), sf_vec_size)
    factors = [_factors(x, s[1], rows, blocks, experts) for x, s, rows in (("lhs", lhs, m), ("rhs", rhs, n))]
    if alpha is not None:
        alpha = given.alpha_of(alpha.to(a.device, non_blocking=True), a, experts)
    grouped(
        a, b, *factors, alpha, _result(out, (experts, m, n), _RESULTS[c_dtype]), masked_m, None, "counts",
        _FACTORS[sf_dtype], width=sf_vec_size, expected=m,
    )  # fmt: skip
    return out


def _codes(name: str, x: torch.Tensor, encoding: str) -> torch.Tensor:
    """[rows, k, experts] as [experts, rows, k], in the dtype of its format."""
    require(x.dim() == 3, name, tuple(x.shape), "[rows, k, experts]")
    require(x.dtype in _CODES[encoding], name, x.dtype, f"{_CODES[encoding][0]}, as ab_dtype={encoding!r} has it")
    rows = x.permute(2, 0, 1)
    contiguous = rows.stride(2) == 1 or rows.shape[2] <= 1
    require(contiguous, name, f"strides {x.stride()}", "a view of [experts, rows, k] with contiguous rows")
    return rows.view(_CODES[encoding][0])


def _factors(name: str, scale: torch.Tensor, rows: int, blocks: int, experts: int) -> torch.Tensor:
    """Factors of each expert in 128x4 tiles, uint8 [experts, bytes]."""
    if scale.dim() == 6:
        # As convert_sf_to_mma_layout sees them.
        scale = scale.permute(5, 2, 4, 0, 1, 3)
    return given.factors(f"{name}[1]", scale, rows, blocks, "128x4", experts)


def _result(out: torch.Tensor, shape: tuple[int, int, int], dtype: torch.dtype) -> torch.Tensor:
    """out as [experts, m, n]. Where both layouts have one shape, strides tell them apart."""
    experts, m, n = shape
    require(out.dtype == dtype, "out", out.dtype, f"{dtype}, the c_dtype")
    moved = out.permute(2, 0, 1) if tuple(out.shape) == (m, n, experts) else out
    if tuple(out.shape) == shape and (out.stride(2) == 1 or n == 1):
        moved = out
    require(tuple(moved.shape) == shape, "out", tuple(out.shape), f"{(m, n, experts)} or {shape}")
    require(moved.stride(2) == 1 or n <= 1, "out", f"strides {out.stride()}", "contiguous rows of n")
    return moved
