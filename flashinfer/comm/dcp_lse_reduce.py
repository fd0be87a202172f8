"""Decode context parallelism in one call: partial results go to the ranks of their heads, and are merged there."""

from __future__ import annotations

import torch

from flashinfer._core.arguments import checked_late
from flashinfer._core.checks import require
from flashinfer.comm._workspaces import own_device
from flashinfer.comm.dcp_alltoall import adopt, blocks_link, decode_cp_a2a_alltoall
from flashinfer.ops.comm.meeting import Ranks


def decode_cp_a2a_lse_reduce_create_workspace(
    max_tokens: int, local_heads: int, cp_size: int, head_dim: int, dtype: torch.dtype, group
) -> torch.Tensor:
    """Allocate what `decode_cp_a2a_lse_reduce` exchanges through. A collective call.

    Parameters
    ----------
    max_tokens, local_heads, head_dim : int
        The most tokens of a call, heads that a rank keeps, and elements of one. Rows go in rounds, so that any number
        fits.
    cp_size : int
        The ranks of `group`.
    dtype : torch.dtype
        bfloat16, float16 or float32.
    group : ProcessGroup

    Returns
    -------
    torch.Tensor
        To be passed on.

    Raises
    ------
    ValueError
        An argument other than the above.
    TimeoutError
        A rank did not come within the deadline of set-ups.
    """
    for name, value in (("max_tokens", max_tokens), ("local_heads", local_heads), ("head_dim", head_dim)):
        require(isinstance(value, int) and value > 0, name, value, "an int of at least 1")
    floating = dtype in (torch.bfloat16, torch.float16, torch.float32)
    require(floating, "dtype", dtype, "bfloat16, float16, float32")
    ranks = Ranks(group)
    require(cp_size == ranks.size, "cp_size", cp_size, f"{ranks.size}, the size of the group")
    return adopt(blocks_link(ranks, own_device()))


@checked_late
def decode_cp_a2a_lse_reduce(
    partial_o: torch.Tensor,
    partial_lse: torch.Tensor,
    workspace: torch.Tensor,
    cp_rank: int,
    cp_size: int,
    lse_mode: str = "base2",
) -> torch.Tensor:
    """Send ``partial_o[..., peer, :]`` to each peer, and merge what arrives by its log-sum-exp. A collective call.

    With o_r and l_r of rank r, the result is ``sum_r w_r o_r / sum_r w_r``, ``w_r = b ** (l_r - max l)``, in float32. A
    row whose l_r are all -inf has no keys, and is 0.

    Parameters
    ----------
    partial_o : torch.Tensor
        [..., cp_size, D], bfloat16, float16 or float32, contiguous: attention over this rank's keys.
    partial_lse : torch.Tensor
        float32 [..., cp_size], contiguous.
    workspace : torch.Tensor
        Of `decode_cp_a2a_lse_reduce_create_workspace` or `decode_cp_a2a_allocate_mnnvl_workspace`.
    cp_rank, cp_size : int
        Those of the group.
    lse_mode : str
        "base2" or "basee": the base b of partial_lse.

    Returns
    -------
    torch.Tensor
        [..., D] in the dtype of partial_o.

    Raises
    ------
    ValueError
        An argument other than the above.
    TimeoutError
        As `decode_cp_a2a_alltoall` raises it.
    """
    require(lse_mode in ("base2", "basee"), "lse_mode", repr(lse_mode), "'base2', 'basee'")
    fits = partial_lse.is_contiguous() and partial_lse.dim() > 0
    require(fits, "partial_lse", tuple(partial_lse.shape), f"[..., {cp_size}], contiguous")
    o, lse = decode_cp_a2a_alltoall(partial_o, partial_lse[..., None], workspace, cp_rank, cp_size)
    most = lse.amax(-2, keepdim=True)
    # If no rank has keys, all weights are 0; -inf - -inf would be NaN.
    difference = lse - torch.where(most == -torch.inf, 0, most)
    weight = torch.exp2(difference) if lse_mode == "base2" else torch.exp(difference)
    # A rank without keys may have anything for its rows.
    weighted = torch.where(weight == 0, 0, weight * o.float())
    total = weight.sum(-2)
    return torch.where(total == 0, 0, weighted.sum(-2) / total).to(partial_o.dtype)
