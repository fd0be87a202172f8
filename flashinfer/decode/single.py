"""Decode attention of one request."""

from __future__ import annotations

import torch

from flashinfer._core.arguments import checked
from flashinfer._core.checks import require
from flashinfer._core.literals import KvLayout, PosEncodingMode
from flashinfer.ops.attention.single import run_single
from flashinfer.ops.attention.variants import AttentionVariant, as_module


@checked
def single_decode_with_kv_cache(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    kv_layout: KvLayout = "NHD",
    pos_encoding_mode: PosEncodingMode = "NONE",
    use_tensor_cores: bool = False,
    q_scale: float | torch.Tensor | None = None,
    k_scale: float | torch.Tensor | None = None,
    v_scale: float | torch.Tensor | None = None,
    window_left: int = -1,
    logits_soft_cap: float | None = None,
    sm_scale: float | None = None,
    rope_scale: float | None = None,
    rope_theta: float | None = None,
    return_lse: bool = False,
    variant: AttentionVariant | None = None,
    params: dict | None = None,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Attention of one query token over a contiguous KV cache.

    Parameters
    ----------
    q, kv_layout, pos_encoding_mode, logits_soft_cap, rope_scale, rope_theta, return_lse, variant, params
        As in `flashinfer.single_prefill_with_kv_cache`.
    k, v : Tensor
        [kv_len, num_kv_heads, head_dim] (NHD) or [num_kv_heads, kv_len, head_dim] (HND); q's dtype, or fp8.
    use_tensor_cores : bool
        Upstream's hint between two kernels. One kernel serves both here; the hint changes nothing.
    q_scale, k_scale, v_scale : float or Tensor, optional
        Scales of quantised q, k and v; a tensor has 1, num_kv_heads or num_qo_heads elements.
    window_left : int
        The query sees itself and this many keys before it; -1 for all.
    sm_scale : float, optional
        Default 1 / sqrt(head_dim).

    Returns
    -------
    out : Tensor [num_qo_heads, head_dim]
    lse : float32 Tensor [num_qo_heads], with return_lse
        Base 2.

    Raises
    ------
    ValueError
        An argument out of its range, by name.

    Examples
    --------
    >>> import torch, flashinfer
    >>> q, k, v = torch.randn(8, 64), torch.randn(20, 2, 64), torch.randn(20, 2, 64)
    >>> flashinfer.single_decode_with_kv_cache(q, k, v).shape
    torch.Size([8, 64])
    """
    require(k.dtype != torch.uint8, "k", k.dtype, "q's dtype, or fp8: nvfp4 needs factors, which a batch takes")
    require(q.dim() == 2, "q", tuple(q.shape), "2 axes: num_qo_heads, head_dim")
    call = dict(q_scale=q_scale, k_scale=k_scale, v_scale=v_scale, return_lse=return_lse, params=params)
    result = run_single(
        q[None], k, v, kv_layout, "auto", call, window_left=window_left, logits_soft_cap=logits_soft_cap,
        sm_scale=sm_scale, pos_encoding_mode=pos_encoding_mode, rope_scale=rope_scale, rope_theta=rope_theta,
        variant=variant,
    )  # fmt: skip
    return (result[0][0], result[1][0]) if return_lse else result[0]


@checked
def single_decode_with_kv_cache_with_jit_module(
    jit_module: AttentionVariant,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *args,
    kv_layout: KvLayout = "NHD",
    window_left: int = -1,
    return_lse: bool = False,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """`single_decode_with_kv_cache` with a user's variant in the place of upstream's compiled module.

    Parameters
    ----------
    jit_module : AttentionVariant
        Modules built from CUDA C++ are refused.
    q, k, v, kv_layout, window_left, return_lse
        As in `single_decode_with_kv_cache`.
    *args
        The variant's parameters, in its order.

    Returns
    -------
    As `single_decode_with_kv_cache`.

    Raises
    ------
    UnsupportedConfig
        jit_module is no AttentionVariant.

    Examples
    --------
    >>> import torch, flashinfer
    >>> q, k, v = torch.randn(8, 64), torch.randn(20, 2, 64), torch.randn(20, 2, 64)
    >>> flashinfer.decode.single_decode_with_kv_cache_with_jit_module("a compiled module", q, k, v)
    Traceback (most recent call last):
    flashinfer._core.checks.UnsupportedConfig: ...
    """
    variant = as_module(jit_module)
    return single_decode_with_kv_cache(
        q, k, v, kv_layout, window_left=window_left, return_lse=return_lse, variant=variant,
        params=variant.named(args, None),
    )  # fmt: skip
