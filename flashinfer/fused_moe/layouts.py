"""Arranging experts' weights and scale factors as the calls of `flashinfer.fused_moe` take them."""

from __future__ import annotations

import torch

from flashinfer._core.arguments import checked, named
from flashinfer._core.checks import require, require_fit
from flashinfer.ops.moe.experts import fragments
from flashinfer.utils import get_shuffle_matrix_a_row_indices, get_shuffle_matrix_sf_a_row_indices

__all__ = [
    "convert_to_block_layout",
    "get_reorder_rows_for_gated_act_gemm_row_indices",
    "get_w2_permute_indices_with_cache",
    "get_w3_w1_permute_indices_with_cache",
    "interleave_moe_scales_for_sm90_mixed_gemm",
    "interleave_moe_weights_for_sm90_mixed_gemm",
    "preprocess_moe_weights_for_sm90_mixed_gemm_humming",
    "reorder_rows_for_gated_act_gemm",
]


@checked
def get_reorder_rows_for_gated_act_gemm_row_indices(x: torch.Tensor) -> torch.Tensor:
    """The order that takes rows of the first and of the second half by turns: 0, n / 2, 1, n / 2 + 1 and so on.

    Parameters
    ----------
    x : torch.Tensor
        [n, .]; n even.

    Returns
    -------
    torch.Tensor
        int64 [n], on the CPU: row i of the reordered weight is this row of x.

    Raises
    ------
    ValueError
        A shape other than the above.
    """
    require(x.dim() >= 1 and x.shape[0] % 2 == 0, "x", tuple(x.shape), "an even number of rows")
    return torch.arange(x.shape[0], device="cpu").view(2, -1).T.flatten()


@checked
def reorder_rows_for_gated_act_gemm(x: torch.Tensor) -> torch.Tensor:
    """Rows of the first and of the second half by turns, so that a gate stands beside what it gates.

    Parameters
    ----------
    x : torch.Tensor
        [n, .], any dtype; n even: the up-projection's rows, then the gate's.

    Returns
    -------
    torch.Tensor
        A new tensor like x, in the order of `get_reorder_rows_for_gated_act_gemm_row_indices`.

    Raises
    ------
    ValueError
        Another number of axes, or an odd n.

    Examples
    --------
    >>> import torch, flashinfer
    >>> flashinfer.reorder_rows_for_gated_act_gemm(torch.arange(8)[:, None])[:, 0]
    tensor([0, 4, 1, 5, 2, 6, 3, 7])
    """
    return x[get_reorder_rows_for_gated_act_gemm_row_indices(x).to(x.device)]


@checked
@named(input_tensor="dst_w3_w1_weight")
def get_w3_w1_permute_indices_with_cache(
    _cache_permute_indices: dict,
    dst_w3_w1_weight: torch.Tensor,
    epilogue_tile_m: int,
    num_elts_per_sf: int | None = None,
    is_gated_act_gemm: bool = True,
) -> torch.Tensor:
    """The order of the rows of an expert's first weight: by turns as `reorder_rows_for_gated_act_gemm` has them, then
    shuffled as `flashinfer.shuffle_matrix_a` does.

    Parameters
    ----------
    _cache_permute_indices : dict
        The caller's; keeps orders that were worked out.
    dst_w3_w1_weight : torch.Tensor
        [rows, .], one expert's weight or its scale factors.
    epilogue_tile_m : int
        As in `flashinfer.shuffle_matrix_a`.
    num_elts_per_sf : int, optional
        16 or 32: `dst_w3_w1_weight` are scale factors of so many elements each.
    is_gated_act_gemm : bool
        Whether there is a gate; without one, rows are shuffled only.

    Returns
    -------
    torch.Tensor
        int64 [rows], on the device of the weight.
    """
    what = ("w3_w1", is_gated_act_gemm)
    return _order(_cache_permute_indices, what, dst_w3_w1_weight, epilogue_tile_m, num_elts_per_sf)


@checked
@named(input_tensor="dst_w2_weight")
def get_w2_permute_indices_with_cache(
    _cache_permute_indices: dict,
    dst_w2_weight: torch.Tensor,
    epilogue_tile_m: int,
    num_elts_per_sf: int | None = None,
    is_gated_act_gemm: bool | None = None,
) -> torch.Tensor:
    """The order of the rows of an expert's second weight: shuffled as `flashinfer.shuffle_matrix_a` does.

    Parameters
    ----------
    _cache_permute_indices : dict
        The caller's; keeps orders that were worked out.
    dst_w2_weight : torch.Tensor
        [rows, .], one expert's weight or its scale factors.
    epilogue_tile_m : int
        As in `flashinfer.shuffle_matrix_a`.
    num_elts_per_sf : int, optional
        16 or 32: `dst_w2_weight` are scale factors of so many elements each.
    is_gated_act_gemm : bool, optional
        Changes nothing: only the first weight has a gate.

    Returns
    -------
    torch.Tensor
        int64 [rows], on the device of the weight.
    """
    return _order(_cache_permute_indices, ("w2", False), dst_w2_weight, epilogue_tile_m, num_elts_per_sf)


def _order(cache, what, weight, epilogue_tile_m, num_elts_per_sf) -> torch.Tensor:
    key = (*what, tuple(weight.shape), epilogue_tile_m, num_elts_per_sf, weight.device)
    if key not in cache:
        if num_elts_per_sf is None:
            order = get_shuffle_matrix_a_row_indices(weight, epilogue_tile_m)
        else:
            order = get_shuffle_matrix_sf_a_row_indices(weight, epilogue_tile_m, num_elts_per_sf)
        _, gated = what
        if gated:
            order = get_reorder_rows_for_gated_act_gemm_row_indices(weight)[order]
        cache[key] = order.to(weight.device)
    return cache[key]


@checked
def convert_to_block_layout(input_tensor: torch.Tensor, blockK: int) -> torch.Tensor:
    """Blocks of columns one after another, as `WeightLayout.BlockMajorK` has them.

    Parameters
    ----------
    input_tensor : torch.Tensor
        [rows, columns]; any dtype.
    blockK : int
        Columns of a block: a divisor.

    Returns
    -------
    torch.Tensor
        New, [columns / blockK, rows, blockK].

    Raises
    ------
    ValueError
        A shape or block other than the above.

    Examples
    --------
    >>> import torch, flashinfer
    >>> flashinfer.fused_moe.convert_to_block_layout(torch.arange(8).view(2, 4), 2).tolist()
    [[[0, 1], [4, 5]], [[2, 3], [6, 7]]]
    """
    shape = tuple(input_tensor.shape)
    require(len(shape) == 2, "input_tensor", shape, "[rows, columns]")
    require(blockK >= 1 and shape[1] % blockK == 0, "blockK", blockK, f"a divisor of {shape[1]} columns")
    return input_tensor.unflatten(1, (-1, blockK)).transpose(0, 1).contiguous()


@checked
def interleave_moe_weights_for_sm90_mixed_gemm(weight: torch.Tensor, quant_type: str = "fp4") -> torch.Tensor:
    """Weights of 4 bits as `flashinfer.fused_moe.cutlass_fused_moe` with `use_w4_group_scaling` takes them.

    Codes of fp4, n and k multiples of 64, are put in the order in which threads of Hopper hold the first operand of a
    product: `flashinfer/ops/moe/experts/fragments.py` has it. Every device reads that order. Others stay as they are.

    Parameters
    ----------
    weight : torch.Tensor
        uint8 [experts, n, k / 2]: two codes a byte, the first in the low half.
    quant_type : str
        "fp4", "fp4_fp8" or "int4".

    Returns
    -------
    torch.Tensor
        New, like `weight`, contiguous.

    Raises
    ------
    ValueError
        A shape, dtype or type other than the above.

    Examples
    --------
    >>> import torch, flashinfer
    >>> weight = torch.randint(256, (2, 128, 64), dtype=torch.uint8)
    >>> flashinfer.fused_moe.interleave_moe_weights_for_sm90_mixed_gemm(weight).shape
    torch.Size([2, 128, 64])

    References
    ----------
    PTX ISA, wgmma.mma_async, register fragments of matrix A
    """
    require_fit("weight", weight, weight.dim() == 3, "[experts, n, k / 2]", torch.uint8)
    known = quant_type in ("fp4", "fp4_fp8", "int4")
    require(known, "quant_type", repr(quant_type), "'fp4', 'fp4_fp8', 'int4'")
    _, n, half = weight.shape
    if quant_type != "int4" and fragments.fits(n, 2 * half):
        return fragments.arrange(weight)
    return weight.clone(memory_format=torch.contiguous_format)


@checked
def interleave_moe_scales_for_sm90_mixed_gemm(scales: torch.Tensor, group_size: int = 32) -> torch.Tensor:
    """Scale factors of 128 columns of each row beside each other, as `flashinfer.fused_moe.cutlass_fused_moe` with
    `use_w4_group_scaling` takes them.

    Parameters
    ----------
    scales : torch.Tensor
        [experts, rows, k / group_size], k a multiple of 128; uint8 of MXFP4, bfloat16 of INT4, or its bytes as float16.
    group_size : int
        Elements to a factor: a divisor of 128.

    Returns
    -------
    torch.Tensor
        [experts, k / 128, rows * 128 / group_size] of that dtype, contiguous: [e, b, r * f + i] is
        scales[e, r, b * f + i], with f = 128 / group_size.

    Raises
    ------
    ValueError
        A shape, dtype or size other than the above.

    Examples
    --------
    >>> import torch, flashinfer
    >>> scales = torch.arange(16, dtype=torch.uint8).view(1, 2, 8)  # of 2 rows with 256 columns
    >>> flashinfer.fused_moe.interleave_moe_scales_for_sm90_mixed_gemm(scales).tolist()
    [[[0, 1, 2, 3, 8, 9, 10, 11], [4, 5, 6, 7, 12, 13, 14, 15]]]
    """
    require(group_size >= 1 and 128 % group_size == 0, "group_size", group_size, "a divisor of 128")
    factors = 128 // group_size
    shape = tuple(scales.shape)
    fits = len(shape) == 3 and shape[2] % factors == 0
    require(fits, "scales", shape, f"[experts, rows, a multiple of {factors}]")
    dtypes = (torch.uint8, torch.bfloat16, torch.float16)
    require(scales.dtype in dtypes, "scales", scales.dtype, "uint8, bfloat16, float16")
    return scales.unflatten(2, (-1, factors)).transpose(1, 2).flatten(2).contiguous()


@checked
def preprocess_moe_weights_for_sm90_mixed_gemm_humming(
    weight: torch.Tensor, raw_scale: torch.Tensor, max_range: int = 11, *, interleave: bool = True
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """MXFP4 weights with scale factors that FP8 codes can hold, by Humming's factorisation.

    Of each expert one factor is taken out of all its e8m0 factors, so that the exponents left are 1 to `max_range` + 1:
    weight = e2m1(code) * 2^offset * residual. Where an expert's factors lie further apart than that, the smallest are
    raised, and their codes divided accordingly, rounded to the nearest e2m1, ties to even; all else is exact.

    Parameters
    ----------
    weight : torch.Tensor
        uint8 [experts, rows, k / 2]: two e2m1 codes a byte, the first in the low half.
    raw_scale : torch.Tensor
        uint8 [experts, rows, k / 32]: e8m0 factors, of numbers only (255 is NaN); k a multiple of 128.
    max_range : int
        How many powers of two an expert's factors may span: 0 to 14.
    interleave : bool
        Whether codes and offsets are arranged as `interleave_moe_weights_for_sm90_mixed_gemm` and
        `interleave_moe_scales_for_sm90_mixed_gemm` do; else they lie as they came.

    Returns
    -------
    weight_out : torch.Tensor
        uint8, codes.
    scale_out : torch.Tensor
        uint8, offsets: 1 to `max_range` + 1.
    residual : torch.Tensor
        float32 [experts]: a power of two each. Callers of `flashinfer.fused_moe.cutlass_fused_moe` pass it times 2^6,
        for an e2m1 code in the bits of an e4m3 one is 2^-6 of its value.

    Raises
    ------
    ValueError
        A shape, dtype or number other than the above.

    References
    ----------
    Humming, https://github.com/inclusionAI/humming

    Examples
    --------
    >>> import torch
    >>> from flashinfer.fused_moe import preprocess_moe_weights_for_sm90_mixed_gemm_humming as preprocess
    >>> weight, scale = torch.zeros(1, 16, 64, dtype=torch.uint8), torch.full((1, 16, 4), 129, dtype=torch.uint8)
    >>> codes, offsets, residual = preprocess(weight, scale, interleave=False)
    >>> offsets.unique().tolist(), residual.tolist()  # 2^1 * 2 is 2^(129 - 127)
    ([1], [2.0])
    """
    shape = tuple(weight.shape)
    require(len(shape) == 3 and shape[2] % 64 == 0, "weight", shape, "[experts, rows, a multiple of 64]")
    require(weight.dtype == torch.uint8, "weight", weight.dtype, "uint8")
    wanted = (*shape[:2], shape[2] // 16)
    require(tuple(raw_scale.shape) == wanted, "raw_scale", tuple(raw_scale.shape), f"{wanted}, of 32 elements each")
    require(raw_scale.dtype == torch.uint8, "raw_scale", raw_scale.dtype, "uint8")
    require(0 <= max_range <= 14, "max_range", max_range, "0 to 14")
    require(not bool((raw_scale == 255).any()), "raw_scale", "a NaN", "factors that are numbers")
    scale = raw_scale.int()
    top = scale.flatten(1).amax(1) if scale.numel() else scale.new_zeros(shape[0])
    low = scale.flatten(1).amin(1) if scale.numel() else scale.new_zeros(shape[0])
    base = torch.maximum(low, top - max_range)[:, None, None]
    raised = torch.maximum(scale, base)
    codes = _divided(weight, raised - scale)
    offset = (raised - base + 1).to(torch.uint8)
    # base is the biased exponent of the smallest factor, whose offset is 1.
    base = base.flatten()
    residual = torch.ldexp(torch.ones_like(base, dtype=torch.float32), base - 128)
    if interleave:
        codes = interleave_moe_weights_for_sm90_mixed_gemm(codes)
        offset = interleave_moe_scales_for_sm90_mixed_gemm(offset)
    return codes, offset, residual


def _divided(weight: torch.Tensor, shift: torch.Tensor) -> torch.Tensor:
    """Packed e2m1 codes divided by 2^shift, one for each 32 of them, to the nearest code, ties to even."""
    code = torch.stack((weight & 15, weight >> 4), -1).flatten(2).unflatten(2, (-1, 32)).int()
    values = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6], dtype=torch.float32, device=weight.device)
    value = torch.ldexp(values[code & 7], -shift[..., None])
    # A code is passed where the value is above the middle of it and the next; in the middle, where the next is even.
    middle = (values[:-1] + values[1:]) / 2
    above, at = value[..., None] > middle, value[..., None] == middle
    odd = torch.arange(7, device=weight.device) % 2 == 1
    code = (code & 8) | (above | (at & odd)).sum(-1)
    low, high = code.flatten(2).unflatten(2, (-1, 2)).unbind(-1)
    return (low | (high << 4)).to(torch.uint8)
