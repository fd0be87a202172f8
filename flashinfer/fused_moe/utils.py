"""What callers set aside for mixtures of experts: numbers of tokens, and a workspace."""

from __future__ import annotations

import torch

from flashinfer._core.arguments import checked
from flashinfer._core.checks import require
from flashinfer.tllm_enums import ActivationType

__all__ = ["cutlass_fused_moe_workspace_size", "get_hybrid_num_tokens_buckets"]

# Up to the bound: the step, or 0 for doubling.
_PHASES = ((256, 0), (2048, 256), (4096, 512))


@checked
def get_hybrid_num_tokens_buckets(max_num_tokens: int, min_num_tokens: int = 1) -> tuple[int, ...]:
    """Numbers of tokens that are dense where the tiles of experts change.

    Parameters
    ----------
    max_num_tokens : int
        The last bucket.
    min_num_tokens : int
        The first bucket, from which on they double up to 256.

    Returns
    -------
    tuple of int
        Ascending: doubling up to 256, then every 256 up to 2048, every 512 up to 4096, doubling again from there.

    Raises
    ------
    ValueError
        Less than one token, or a maximum below the minimum.
    """
    require(min_num_tokens >= 1, "min_num_tokens", min_num_tokens, "1 or more")
    require(max_num_tokens >= min_num_tokens, "max_num_tokens", max_num_tokens, f"{min_num_tokens} or more")
    buckets, tokens = [], min_num_tokens
    while tokens < max_num_tokens:
        buckets.append(tokens)
        step = next((step for bound, step in _PHASES if tokens < bound), 0)
        tokens = (tokens // step + 1) * step if step else 2 * tokens
    return (*buckets, max_num_tokens)


@checked
def cutlass_fused_moe_workspace_size(
    max_num_tokens: int,
    hidden_size: int,
    intermediate_size: int,
    num_experts_total: int,
    top_k: int,
    *,
    x_dtype: torch.dtype,
    weight_dtype: torch.dtype,
    output_dtype: torch.dtype = torch.bfloat16,
    activation_type: ActivationType = ActivationType.Swiglu,
    tp_size: int = 1,
    tp_rank: int = 0,
    ep_size: int = 1,
    ep_rank: int = 0,
    min_latency_mode: bool = False,
    use_deepseek_fp8_block_scale: bool = False,
    use_w4_group_scaling: bool = False,
    use_mxfp8_act_scaling: bool = False,
    use_fused_finalize: bool = True,
    use_packed_weights: bool = False,
    use_wfp4afp8_humming: bool = False,
    device: torch.device | str | int | None = None,
    backend: str = "cutlass",
) -> int:
    """Bytes of a `workspace_buffer` that `cutlass_fused_moe` takes: 128 for any call, which are left alone.

    Memory between the launches is torch's own.

    Parameters
    ----------
    max_num_tokens, hidden_size, intermediate_size, num_experts_total, top_k : int
        Sizes of a layer and of its largest call, 1 or more.
    x_dtype, weight_dtype, output_dtype : torch.dtype
        Not read, as are all below: upstream's workspace depends on them.
    activation_type : ActivationType
    tp_size, tp_rank, ep_size, ep_rank : int
    min_latency_mode, use_deepseek_fp8_block_scale, use_w4_group_scaling, use_mxfp8_act_scaling : bool
    use_fused_finalize, use_packed_weights, use_wfp4afp8_humming : bool
    device : torch.device, str or int, optional
    backend : str
        "cutlass" or "auto".

    Returns
    -------
    int
        128.

    Raises
    ------
    ValueError
        One of the first five that is less than 1, or another backend.

    Examples
    --------
    >>> import torch
    >>> from flashinfer.fused_moe import cutlass_fused_moe_workspace_size
    >>> cutlass_fused_moe_workspace_size(64, 4096, 1024, 8, 2, x_dtype=torch.bfloat16, weight_dtype=torch.bfloat16)
    128
    """
    sizes = {"max_num_tokens": max_num_tokens, "hidden_size": hidden_size, "intermediate_size": intermediate_size,
             "num_experts_total": num_experts_total, "top_k": top_k}  # fmt: skip
    for name, value in sizes.items():
        require(value >= 1, name, value, "1 or more")
    require(backend in ("cutlass", "auto"), "backend", repr(backend), "'cutlass', 'auto'")
    return 128
