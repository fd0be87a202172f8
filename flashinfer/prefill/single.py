"""Prefill and append attention of one request."""

from __future__ import annotations

from functools import partial

import torch

from flashinfer._core.arguments import checked, named
from flashinfer._core.checks import require
from flashinfer._core.literals import Backend, KvLayout, PosEncodingMode
from flashinfer.ops.attention.single import run_single
from flashinfer.ops.attention.variants import AttentionVariant, as_module


@checked
@named(kv_block_scales="kv_cache_sf")
def single_prefill_with_kv_cache(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    scale_q: torch.Tensor | None = None,
    scale_k: torch.Tensor | None = None,
    scale_v: torch.Tensor | None = None,
    o_dtype: torch.dtype | None = None,
    custom_mask: torch.Tensor | None = None,
    packed_custom_mask: torch.Tensor | None = None,
    causal: bool = False,
    kv_layout: KvLayout = "NHD",
    pos_encoding_mode: PosEncodingMode = "NONE",
    use_fp16_qk_reduction: bool = False,
    sm_scale: float | None = None,
    window_left: int = -1,
    logits_soft_cap: float | None = None,
    rope_scale: float | None = None,
    rope_theta: float | None = None,
    backend: Backend = "auto",
    return_lse: bool = False,
    kv_cache_sf=None,
    k_scale: float | torch.Tensor | None = None,
    v_scale: float | torch.Tensor | None = None,
    variant: AttentionVariant | None = None,
    params: dict | None = None,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Attention of one request: prefill, or append to a longer KV cache.

    Query row r of q_len stands at the position of key kv_len - q_len + r.

    Parameters
    ----------
    q : Tensor [q_len, num_qo_heads, head_dim_qk]
        bf16, fp16, fp32, or fp8.
    k, v : Tensor
        [kv_len, num_kv_heads, head_dim] (NHD) or [num_kv_heads, kv_len, head_dim] (HND); q's dtype, or fp8. v may have
        another head_dim than k.
    scale_q, scale_k, scale_v : Tensor, optional
        Scales of quantised q, k and v: 1, num_kv_heads or num_qo_heads elements.
    o_dtype : torch.dtype, optional
        Default q's dtype (bfloat16 for fp8 q).
    custom_mask : bool Tensor [q_len, kv_len], optional
        True where a query sees a key; stands in the place of `causal`.
    packed_custom_mask : uint8 Tensor [ceil(q_len * kv_len / 8)], optional
        The same in bits, row-major, low bit first; takes precedence.
    causal : bool
        A query sees keys at its position and before.
    kv_layout : str
        "NHD" or "HND".
    pos_encoding_mode : str
        "NONE", "ROPE_LLAMA" (rotary embedding applied to q and k here) or "ALIBI".
    use_fp16_qk_reduction : bool
        Upstream's permission to sum q . k in float16; sums here are float32 with and without it.
    sm_scale : float, optional
        Default 1 / sqrt(head_dim_qk).
    window_left : int
        A query sees itself and this many keys before it; -1 for all.
    logits_soft_cap : float, optional
        Logits become cap * tanh(logits / cap).
    rope_scale, rope_theta : float, optional
        For ROPE_LLAMA; default 1 and 1e4.
    backend : str
        "auto", or one of upstream's names (see flashinfer/_core/backends.py).
    return_lse : bool
        Whether to return the log-sum-exp too.
    kv_cache_sf : (Tensor, Tensor) or Tensor, optional
        Of nvfp4 k and v, uint8 with head_dim / 2 last, two e2m1 a byte, the first in the low half: their factors,
        float8_e4m3fn or uint8, laid out as k and v with head_dim / 16 last. A value is code * factor * scale. Both in
        one tensor have 2 as its second axis.
    k_scale, v_scale : float or Tensor, optional
        Further scales of k and v, as floats.
    variant : AttentionVariant, optional
        Functions that change logits or hide keys (docs/variants.md).
    params : dict, optional
        What they are given.

    Returns
    -------
    out : Tensor [q_len, num_qo_heads, head_dim_vo]
    lse : float32 Tensor [q_len, num_qo_heads], with return_lse
        Base 2; -inf for a row that sees no key, whose out is 0.

    Raises
    ------
    ValueError
        An argument out of its range, by name.
    UnsupportedConfig
        No variant takes the problem, or the named backend's does not; it says why.

    Examples
    --------
    >>> import torch, flashinfer
    >>> q, k, v = torch.randn(5, 8, 64), torch.randn(20, 2, 64), torch.randn(20, 2, 64)
    >>> out, lse = flashinfer.single_prefill_with_kv_cache(q, k, v, causal=True, return_lse=True)
    >>> out.shape, lse.shape
    (torch.Size([5, 8, 64]), torch.Size([5, 8]))
    """
    require(q.dim() == 3, "q", tuple(q.shape), "3 axes: q_len, num_qo_heads, head_dim")
    if custom_mask is not None and packed_custom_mask is None:
        require(k.dim() == 3, "k", tuple(k.shape), "3 axes: kv_len, num_kv_heads, head_dim")
        rows = k.shape[0 if kv_layout == "NHD" else 1]
        shape = (q.shape[0], rows)
        require(custom_mask.shape in (shape, (shape[0] * rows,)), "custom_mask", tuple(custom_mask.shape), f"{shape}")
        custom_mask = custom_mask.reshape(-1)
    for name, one, other in (("k_scale", scale_k, k_scale), ("v_scale", scale_v, v_scale)):
        require(one is None or other is None, name, other, f"None where scale_{name[0]} is given")
    call = dict(
        q_scale=scale_q, k_scale=k_scale if scale_k is None else scale_k,
        v_scale=v_scale if scale_v is None else scale_v, return_lse=return_lse, params=params,
    )  # fmt: skip
    return run_single(
        q, k, v, kv_layout, backend, call, o_dtype=o_dtype, causal=causal, custom_mask=custom_mask,
        packed_custom_mask=packed_custom_mask, kv_cache_sf=kv_cache_sf, window_left=window_left,
        logits_soft_cap=logits_soft_cap, sm_scale=sm_scale, pos_encoding_mode=pos_encoding_mode, rope_scale=rope_scale,
        rope_theta=rope_theta, variant=variant,
    )  # fmt: skip


single_prefill_with_kv_cache_return_lse = partial(single_prefill_with_kv_cache, return_lse=True)


@checked
def single_prefill_with_kv_cache_with_jit_module(
    jit_module: AttentionVariant,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *args,
    kv_layout: KvLayout = "NHD",
    mask_mode: int = 0,
    window_left: int = -1,
    return_lse: bool = False,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """`single_prefill_with_kv_cache` with a user's variant in the place of upstream's compiled module.

    Parameters
    ----------
    jit_module : AttentionVariant
        Modules built from CUDA C++ are refused.
    q, k, v, kv_layout, window_left, return_lse
        As in `single_prefill_with_kv_cache`.
    *args
        The variant's parameters, in its order.
    mask_mode : int
        0 for none, 1 for causal; the variant's own mask takes part in both.

    Returns
    -------
    As `single_prefill_with_kv_cache`.

    Raises
    ------
    ValueError
        Another mask_mode.
    UnsupportedConfig
        jit_module is no AttentionVariant.

    Examples
    --------
    >>> import torch, flashinfer
    >>> q, k, v = torch.randn(5, 8, 64), torch.randn(20, 2, 64), torch.randn(20, 2, 64)
    >>> flashinfer.prefill.single_prefill_with_kv_cache_with_jit_module("a compiled module", q, k, v)
    Traceback (most recent call last):
    flashinfer._core.checks.UnsupportedConfig: ...
    """
    variant = as_module(jit_module)
    require(mask_mode in (0, 1), "mask_mode", mask_mode, "0 (none) or 1 (causal): other masks are the variant's")
    return single_prefill_with_kv_cache(
        q, k, v, kv_layout=kv_layout, causal=mask_mode == 1, window_left=window_left, return_lse=return_lse,
        variant=variant, params=variant.named(args, None),
    )  # fmt: skip
