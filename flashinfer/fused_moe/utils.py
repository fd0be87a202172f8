"""What callers set aside for mixtures of experts: numbers of tokens, and a workspace."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial

import torch

from flashinfer._core.arguments import checked
from flashinfer._core.checks import require
from flashinfer.tllm_enums import ActivationType
from flashinfer.utils import next_positive_power_of_2

__all__ = [
    "cutlass_fused_moe_workspace_size",
    "get_hybrid_num_tokens_buckets",
    "make_hybrid_bucket_mapper",
    "map_to_hybrid_bucket",
    "map_to_hybrid_bucket_uncapped",
]

# Doubling up to 256; after that up to the bound: the step; doubling again beyond the last.
_DOUBLED = 256
_PHASES = ((2048, 256), (4096, 512))


@checked
def get_hybrid_num_tokens_buckets(max_num_tokens: int, min_num_tokens: int = 1) -> tuple[int, ...]:
    """Numbers of tokens that are dense where the tiles of experts change.

    Parameters
    ----------
    max_num_tokens : int
        The last bucket.
    min_num_tokens : int
        The first bucket, from which on they double up to 256. Buckets from 512 on do not depend on it.

    Returns
    -------
    tuple of int
        Ascending: doubling up to 256, then every 256 up to 2048, every 512 up to 4096, doubling again from there.

    Raises
    ------
    ValueError
        A maximum of less than one token.

    Examples
    --------
    >>> from flashinfer.fused_moe.utils import get_hybrid_num_tokens_buckets
    >>> get_hybrid_num_tokens_buckets(1000, 64)
    (64, 128, 256, 512, 768, 1000)
    """
    require(max_num_tokens >= 1, "max_num_tokens", max_num_tokens, "1 or more")
    buckets, tokens = [], max(min_num_tokens, 1)
    while tokens <= _DOUBLED:
        buckets.append(tokens)
        tokens *= 2
    tokens = map_to_hybrid_bucket_uncapped(_DOUBLED + 1)
    while tokens < max_num_tokens:
        buckets.append(tokens)
        tokens = map_to_hybrid_bucket_uncapped(tokens + 1)
    return (*(n for n in buckets if n < max_num_tokens), max_num_tokens)


@checked
def map_to_hybrid_bucket(x: int, max_num_tokens: int) -> int:
    """The least bucket of `get_hybrid_num_tokens_buckets` that holds so many tokens.

    Parameters
    ----------
    x : int
        Tokens; less than one counts as one.
    max_num_tokens : int
        The last bucket, which more tokens have, too.

    Returns
    -------
    int

    Examples
    --------
    >>> from flashinfer.fused_moe.utils import map_to_hybrid_bucket
    >>> [map_to_hybrid_bucket(x, 1000) for x in (0, 3, 300, 900, 5000)]
    [1, 4, 512, 1000, 1000]
    """
    return 1 if x <= 0 else min(map_to_hybrid_bucket_uncapped(x), max_num_tokens)


@cache
def make_hybrid_bucket_mapper(max_num_tokens: int) -> Callable[[int], int]:
    """`map_to_hybrid_bucket` with that maximum: one object for each, as keys of a tuner's cache have to be.

    Parameters
    ----------
    max_num_tokens : int
        The last bucket.

    Returns
    -------
    callable
        Takes a number of tokens, returns its bucket.

    Examples
    --------
    >>> from flashinfer.fused_moe.utils import make_hybrid_bucket_mapper
    >>> make_hybrid_bucket_mapper(64)(33), make_hybrid_bucket_mapper(64) is make_hybrid_bucket_mapper(64)
    (64, True)
    """
    return partial(map_to_hybrid_bucket, max_num_tokens=max_num_tokens)


@checked
def map_to_hybrid_bucket_uncapped(x: int) -> int:
    """`map_to_hybrid_bucket` without a maximum.

    Parameters
    ----------
    x : int
        Tokens; less than one counts as one.

    Returns
    -------
    int

    Examples
    --------
    >>> from flashinfer.fused_moe.utils import map_to_hybrid_bucket_uncapped
    >>> [map_to_hybrid_bucket_uncapped(x) for x in (5, 257, 2049, 4097)]
    [8, 512, 2560, 8192]
    """
    for bound, step in _PHASES if x > _DOUBLED else ():
        if x <= bound:
            return -(-x // step) * step
    return next_positive_power_of_2(x)


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
