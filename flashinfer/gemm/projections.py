"""Linear layers of FP8 and of NVFP4, and what follows them: a bias, SwiGLU, or the norms and rotations of Q and K."""

from __future__ import annotations

import torch

from flashinfer._core.arguments import checked
from flashinfer._core.checks import require
from flashinfer.compat.queries import answering
from flashinfer.gemm._epilogues import Rotation, check_heads, finished, fp4_product, fp8_product, gated, rotated


@checked
@answering()
def fp8_linear(
    a: torch.Tensor,
    weight: torch.Tensor,
    a_scale: torch.Tensor,
    weight_scale: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    qkv_scale: torch.Tensor | None = None,
    config=None,
    out_dtype: torch.dtype = torch.bfloat16,
    output_quant_scale: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """``out = (a @ weight.T) * a_scale[:, None] * weight_scale + bias`` of FP8 matrices.

    Parameters
    ----------
    a : torch.Tensor
        [M, K] float8_e4m3fn.
    weight : torch.Tensor
        [N, K] float8_e4m3fn.
    a_scale, weight_scale : torch.Tensor
        [M] and [N] float32.
    bias : torch.Tensor, optional
        [N] bfloat16.
    qkv_scale : torch.Tensor, optional
        [3] float32: factors of the thirds of columns, N / 3 a multiple of 32, after the bias.
    config : PrimsTsGemmConfig, optional
        Has no effect on results; one with separate_qkv_output is refused.
    out_dtype : torch.dtype
        bfloat16 or float8_e4m3fn.
    output_quant_scale : torch.Tensor, optional
        One float32, a factor of what is rounded to FP8; 1 by default. Only with FP8.
    out : torch.Tensor, optional
        [M, N] of `out_dtype`, any strides.

    Returns
    -------
    torch.Tensor or (torch.Tensor, torch.Tensor)
        `out`, or a new tensor: summed in float32, and rounded once, FP8 to at most 448. Of FP8 without an
        output_quant_scale, that scale too: a new tensor of 1.

    Raises
    ------
    ValueError
        A shape, dtype or device other than the above.

    Examples
    --------
    >>> import torch
    >>> from flashinfer.gemm import fp8_linear
    >>> a, weight = torch.ones(2, 128).to(torch.float8_e4m3fn), torch.ones(3, 128).to(torch.float8_e4m3fn)
    >>> fp8_linear(a, weight, torch.tensor([1.0, 0.5]), torch.ones(3))[:, 0]
    tensor([128.,  64.], dtype=torch.bfloat16)
    """
    y = fp8_product(a, weight, a_scale, weight_scale, bias, qkv_scale, config)
    return finished(y, out_dtype, output_quant_scale, out)


@checked
@answering()
def fp8_linear_swiglu(
    a: torch.Tensor,
    weight: torch.Tensor,
    a_scale: torch.Tensor,
    weight_scale: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    config=None,
    out_dtype: torch.dtype = torch.bfloat16,
    output_quant_scale: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """`fp8_linear` with SwiGLU: ``y[:, 0::2] * silu(y[:, 1::2])`` of its result y.

    Parameters
    ----------
    a, weight, a_scale, weight_scale, bias
        As in `fp8_linear`; N is even.
    config, out_dtype, output_quant_scale
        As in `fp8_linear`.
    out : torch.Tensor, optional
        [M, N / 2] of `out_dtype`, any strides.

    Returns
    -------
    torch.Tensor or (torch.Tensor, torch.Tensor)
        As of `fp8_linear`: y is not rounded before SwiGLU.

    Raises
    ------
    ValueError
        A shape, dtype or device other than the above.

    Examples
    --------
    >>> import torch
    >>> from flashinfer.gemm import fp8_linear_swiglu
    >>> a, weight = torch.ones(2, 128).to(torch.float8_e4m3fn), torch.ones(4, 128).to(torch.float8_e4m3fn)
    >>> fp8_linear_swiglu(a, weight, torch.ones(2), torch.ones(4) / 16).shape
    torch.Size([2, 2])
    """
    y = fp8_product(a, weight, a_scale, weight_scale, bias, None, config)
    return finished(gated("weight", y), out_dtype, output_quant_scale, out)


@checked
@answering()
def fp8_qkv_qknorm_rope(
    a: torch.Tensor,
    qkv_weight: torch.Tensor,
    a_scale: torch.Tensor,
    qkv_weight_scale: torch.Tensor,
    q_norm_weight: torch.Tensor,
    k_norm_weight: torch.Tensor,
    cos_sin: torch.Tensor,
    positions: torch.Tensor,
    *,
    num_q_heads: int,
    num_kv_heads: int,
    head_dim: int,
    is_neox: bool = False,
    qkv_scale: torch.Tensor | None = None,
    config=None,
    out_dtype: torch.dtype = torch.bfloat16,
    output_quant_scale: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Q, K and V of FP8 rows: `fp8_linear`, then RMSNorm of each head of Q and K, and their rotation.

    Parameters
    ----------
    a, a_scale, qkv_scale, config, out_dtype, output_quant_scale, out
        As in `fp8_linear`.
    qkv_weight, qkv_weight_scale : torch.Tensor
        As weight and weight_scale there, with N = 3 * num_q_heads * head_dim: rows of Q, of K, of V.
    q_norm_weight, k_norm_weight : torch.Tensor
        [head_dim] bfloat16.
    cos_sin : torch.Tensor
        [M, head_dim] float32: cosines of the pairs, then their sines.
    positions : torch.Tensor
        [M] int64: the row of `cos_sin` of each token. One that does not exist counts as 0.
    num_q_heads, num_kv_heads : int
        The same number.
    head_dim : int
        128.
    is_neox : bool
        False: neighbours are pairs.

    Returns
    -------
    torch.Tensor or (torch.Tensor, torch.Tensor)
        As of `fp8_linear`. Q and K are rounded to `out_dtype` before their norms too.

    Raises
    ------
    ValueError
        A shape, dtype, device or number other than the above.

    Examples
    --------
    >>> import torch
    >>> from flashinfer.gemm import fp8_qkv_qknorm_rope
    >>> a, weight = torch.ones(2, 128).to(torch.float8_e4m3fn), torch.ones(384, 128).to(torch.float8_e4m3fn)
    >>> one, table = torch.ones(128).bfloat16(), torch.cat((torch.ones(2, 64), torch.zeros(2, 64)), 1)
    >>> out = fp8_qkv_qknorm_rope(a, weight, torch.ones(2), torch.ones(384), one, one, table, torch.arange(2),
    ...                           num_q_heads=1, num_kv_heads=1, head_dim=128)
    >>> out[0, ::128]
    tensor([  1.,   1., 128.], dtype=torch.bfloat16)
    """
    check_heads("qkv_weight", qkv_weight, num_q_heads, num_kv_heads, head_dim)
    y = fp8_product(a, qkv_weight, a_scale, qkv_weight_scale, None, qkv_scale, config, "qkv_weight")
    rotated(y, Rotation(q_norm_weight, k_norm_weight, cos_sin, positions), is_neox, out_dtype)
    return finished(y, out_dtype, output_quant_scale, out)


@checked
@answering()
def fp4_linear(
    a_packed: torch.Tensor,
    a_block_scale: torch.Tensor,
    a_global_scale: float,
    weight_packed: torch.Tensor,
    weight_block_scale: torch.Tensor,
    weight_global_scale: float,
    bias: torch.Tensor | None = None,
    *,
    out_dtype: torch.dtype = torch.bfloat16,
    output_quant_scale: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """``out = (a @ weight.T + bias) * a_global_scale * weight_global_scale`` of NVFP4 matrices.

    The bias is scaled, too, as upstream has it: a caller divides it by both scales first.

    Parameters
    ----------
    a_packed : torch.Tensor
        [M, K / 2] uint8, two e2m1 in a byte.
    a_block_scale, weight_block_scale : torch.Tensor
        Factors of 16 elements in e4m3, uint8 or float8_e4m3fn, in 128x4 tiles, contiguous.
    a_global_scale, weight_global_scale : float
        Factors of the product.
    weight_packed : torch.Tensor
        [N, K / 2]; the same.
    bias, out_dtype, output_quant_scale, out
        As in `fp8_linear`.

    Returns
    -------
    torch.Tensor or (torch.Tensor, torch.Tensor)
        As of `fp8_linear`.

    Raises
    ------
    ValueError
        A shape, dtype or device other than the above.

    Examples
    --------
    >>> import torch, flashinfer
    >>> codes, factors = flashinfer.nvfp4_quantize(torch.full((128, 64), 6.0).bfloat16(), torch.ones(1))
    >>> flashinfer.gemm.fp4_linear(codes, factors, 0.5, codes, factors, 1.0)[0, 0]  # 64 x 36 / 2
    tensor(1152., dtype=torch.bfloat16)
    """
    y = fp4_product(
        a_packed, a_block_scale, weight_packed, weight_block_scale, a_global_scale * weight_global_scale, bias
    )
    return finished(y, out_dtype, output_quant_scale, out)


@checked
@answering()
def fp4_linear_swiglu(
    a_packed: torch.Tensor,
    a_block_scale: torch.Tensor,
    a_global_scale: float,
    weight_packed: torch.Tensor,
    weight_block_scale: torch.Tensor,
    weight_global_scale: float,
    bias: torch.Tensor | None = None,
    *,
    out_dtype: torch.dtype = torch.bfloat16,
    output_quant_scale: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
) -> torch.Tensor | tuple[torch.Tensor, ...]:
    """`fp4_linear` with SwiGLU: ``y[:, 0::2] * silu(y[:, 1::2])`` of its result y.

    Parameters
    ----------
    a_packed, a_block_scale, a_global_scale, weight_packed, weight_block_scale, weight_global_scale, bias
        As in `fp4_linear`; N is even.
    out_dtype : torch.dtype
        bfloat16, float8_e4m3fn, or uint8 for NVFP4, with N / 2 a multiple of 16.
    output_quant_scale : torch.Tensor, optional
        One float32, a factor of what is rounded to FP8 or NVFP4; 1 by default. Only with those.
    out : torch.Tensor, optional
        [M, N / 2] of `out_dtype`, or [M, N / 4] of NVFP4, any strides.

    Returns
    -------
    torch.Tensor or tuple of torch.Tensor
        As of `fp8_linear`: y is not rounded before SwiGLU. Of NVFP4 after `out` its block factors, bytes of e4m3 in
        128x4 tiles, and then the scale where none was given.

    Raises
    ------
    ValueError
        A shape, dtype or device other than the above.

    Examples
    --------
    >>> import torch, flashinfer
    >>> codes, factors = flashinfer.nvfp4_quantize(torch.full((128, 64), 6.0).bfloat16(), torch.ones(1))
    >>> out = flashinfer.gemm.fp4_linear_swiglu(codes, factors, 0.1, codes, factors, 0.1, out_dtype=torch.uint8)
    >>> [x.shape for x in out]
    [torch.Size([128, 32]), torch.Size([512]), torch.Size([1])]
    """
    scale = a_global_scale * weight_global_scale
    y = fp4_product(a_packed, a_block_scale, weight_packed, weight_block_scale, scale, bias)
    return finished(gated("weight_packed", y), out_dtype, output_quant_scale, out, narrow=True)


@checked
@answering()
def fp4_qkv_qknorm_rope(
    a_packed: torch.Tensor,
    a_block_scale: torch.Tensor,
    a_global_scale: float,
    qkv_weight_packed: torch.Tensor,
    qkv_weight_block_scale: torch.Tensor,
    qkv_weight_global_scale: float,
    q_norm_weight: torch.Tensor,
    k_norm_weight: torch.Tensor,
    cos_sin: torch.Tensor,
    positions: torch.Tensor,
    *,
    num_q_heads: int,
    num_kv_heads: int,
    head_dim: int,
    is_neox: bool = False,
    qkv_scale: torch.Tensor | None = None,
    out_dtype: torch.dtype = torch.bfloat16,
    output_quant_scale: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Q, K and V of NVFP4 rows: `fp4_linear`, then RMSNorm of each head of Q and K, and their rotation.

    Parameters
    ----------
    a_packed, a_block_scale, a_global_scale
        As in `fp4_linear`.
    qkv_weight_packed, qkv_weight_block_scale, qkv_weight_global_scale
        As the weight there, with N = 3 * num_q_heads * head_dim: rows of Q, of K, of V.
    q_norm_weight, k_norm_weight, cos_sin, positions, num_q_heads, num_kv_heads, head_dim, is_neox
        As in `fp8_qkv_qknorm_rope`.
    qkv_scale : torch.Tensor, optional
        [3] float32: factors of Q, K and V in the place of the product of both global scales.
    out_dtype : torch.dtype
        bfloat16.
    output_quant_scale : torch.Tensor, optional
        None.
    out : torch.Tensor, optional
        [M, N] bfloat16, any strides.

    Returns
    -------
    torch.Tensor
        `out`, or a new tensor. Q and K are rounded to bfloat16 before their norms too.

    Raises
    ------
    ValueError
        A shape, dtype, device or number other than the above.

    Examples
    --------
    >>> import torch, flashinfer
    >>> codes, factors = flashinfer.nvfp4_quantize(torch.full((384, 64), 6.0).bfloat16(), torch.ones(1))
    >>> one, table = torch.ones(128).bfloat16(), torch.cat((torch.ones(128, 64), torch.zeros(128, 64)), 1)
    >>> out = flashinfer.gemm.fp4_qkv_qknorm_rope(codes[:128], factors[:128], 0.5, codes, factors, 1.0, one, one, table,
    ...     torch.arange(128), num_q_heads=1, num_kv_heads=1, head_dim=128)
    >>> out[0, ::128]
    tensor([1.0000e+00, 1.0000e+00, 1.1520e+03], dtype=torch.bfloat16)
    """
    require(out_dtype == torch.bfloat16, "out_dtype", out_dtype, "bfloat16")
    check_heads("qkv_weight_packed", qkv_weight_packed, num_q_heads, num_kv_heads, head_dim)
    scale = a_global_scale * qkv_weight_global_scale
    weight = (qkv_weight_packed, qkv_weight_block_scale)
    y = fp4_product(a_packed, a_block_scale, *weight, scale, None, qkv_scale, "qkv_weight")
    rotated(y, Rotation(q_norm_weight, k_norm_weight, cos_sin, positions), is_neox, out_dtype)
    return finished(y, out_dtype, output_quant_scale, out)
