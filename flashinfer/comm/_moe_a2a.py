"""The functions of the MoE all-to-all, over a workspace that the caller passes along."""

from __future__ import annotations

import math

import torch

from flashinfer._core.arguments import checked, checked_late
from flashinfer._core.checks import require
from flashinfer.comm._exchange import combine_in, dispatch_in, gathered_stats, only, sanitize_in, space_of
from flashinfer.comm._exchange import metainfo as metainfo_of
from flashinfer.ops.comm.alltoall import MOST_PAYLOADS
from flashinfer.ops.comm.alltoall.space import ALIGNMENT, aligned
from flashinfer.tllm_enums import SfLayout


def check_stats(count) -> None:
    require(isinstance(count, int) and count >= 0, "eplb_stats_num_experts", count, "an int of at least 0")


@checked
def moe_a2a_get_workspace_size_per_rank(
    ep_size: int,
    max_num_tokens: int,
    total_dispatch_payload_size_per_token: int,
    combine_payload_size_per_token: int,
    eplb_stats_num_experts: int = 0,
    *,
    backend: str = "trtllm",
) -> int:
    """Bytes of workspace on each rank.

    Parameters
    ----------
    ep_size, max_num_tokens : int
        Ranks, and the most tokens of one of them.
    total_dispatch_payload_size_per_token, combine_payload_size_per_token : int
        Bytes of a token: of all its payloads together, and of the row that comes back.
    eplb_stats_num_experts : int
        Experts whose statistics a dispatch gathers from all ranks.
    backend : str
        "trtllm".

    Returns
    -------
    int
        Bytes.

    Raises
    ------
    ValueError
        An argument other than the above.

    Examples
    --------
    >>> from flashinfer.comm import moe_a2a_get_workspace_size_per_rank
    >>> moe_a2a_get_workspace_size_per_rank(2, 4, 256, 256)
    5120
    """
    check_stats(eplb_stats_num_experts)
    only("backend", backend, "trtllm")
    least = {"ep_size": (ep_size, 1), "max_num_tokens": (max_num_tokens, 0)}
    least["total_dispatch_payload_size_per_token"] = total_dispatch_payload_size_per_token, 0
    least["combine_payload_size_per_token"] = combine_payload_size_per_token, 0
    for name, (value, bound) in least.items():
        require(value >= bound, name, value, f"{bound} or more")
    rows = ep_size * max_num_tokens
    parts = rows * total_dispatch_payload_size_per_token + MOST_PAYLOADS * ALIGNMENT
    return (
        aligned(4 * ep_size * eplb_stats_num_experts) + aligned(parts) + aligned(rows * combine_payload_size_per_token)
    )


@checked_late
def moe_a2a_initialize(
    workspace: torch.Tensor,
    ep_rank: int,
    ep_size: int,
    max_num_tokens: int,
    eplb_stats_num_experts: int = 0,
    *,
    backend: str = "trtllm",
) -> torch.Tensor:
    """Check a workspace of `MoeAlltoAll.get_workspace`, and give the metainfo that goes with it.

    Parameters
    ----------
    workspace : torch.Tensor
        uint8 [ep_size, bytes]. Row ep_rank is this rank's memory; peers' are not mapped into a tensor, and the other
        rows show this rank's again.
    ep_rank, ep_size, max_num_tokens : int
        Those of the workspace.
    eplb_stats_num_experts : int
        As the workspace was allocated.
    backend : str
        "trtllm".

    Returns
    -------
    torch.Tensor
        int64 [3] on the CPU, to be passed on: the offset of the counts of arrived rows, max_num_tokens, and
        eplb_stats_num_experts.

    Raises
    ------
    ValueError
        An argument other than the above.
    """
    only("backend", backend, "trtllm")
    space = space_of(workspace, ep_rank, ep_size)
    require(max_num_tokens <= space.most, "max_num_tokens", max_num_tokens, f"at most {space.most}, as allocated")
    only("eplb_stats_num_experts", eplb_stats_num_experts, space.stats_experts)
    return metainfo_of(space, max_num_tokens)


@checked
def moe_a2a_wrap_payload_tensor_in_workspace(
    workspace: torch.Tensor, leading_shape: list[int], slice_start: int, slice_end: int, dtype: torch.dtype
) -> torch.Tensor:
    """Bytes `slice_start` to `slice_end` of a workspace, as a tensor [*leading_shape, rest].

    Parameters
    ----------
    workspace : torch.Tensor
        [ep_size, .], of `MoeAlltoAll.get_workspace`, or one row of it; any dtype, rows contiguous.
    leading_shape : list of int
        Of the result, without its last dimension.
    slice_start, slice_end : int
        Bytes from the workspace's begin on, all in one row: from a multiple of an element's size on, as many as fill
        the shape. All rows of a workspace that stands for ranks show the first.
    dtype : torch.dtype
        Of the result.

    Returns
    -------
    torch.Tensor
        [*leading_shape, rest], the workspace's memory.

    Raises
    ------
    ValueError
        An argument other than the above.

    Examples
    --------
    >>> import torch
    >>> from flashinfer.comm import moe_a2a_wrap_payload_tensor_in_workspace
    >>> workspace = torch.zeros(1, 256, dtype=torch.uint8)
    >>> moe_a2a_wrap_payload_tensor_in_workspace(workspace, [1, 4], 0, 64, torch.float32).shape
    torch.Size([1, 4, 4])
    """
    fits = workspace.dim() in (1, 2) and workspace.shape[0] > 0 and workspace.stride(-1) == 1
    got = f"{workspace.dtype} {tuple(workspace.shape)}, strides {workspace.stride()}"
    require(fits, "workspace", got, "[ep_size, bytes], or one row of it, bytes side by side")
    rows = workspace.view(torch.uint8).view(-1, workspace.shape[-1] * workspace.element_size())
    which = slice_start // rows.stride(0) if len(rows) > 1 and rows.stride(0) else 0
    require(0 <= which < len(rows), "slice_start", slice_start, f"a byte of the {len(rows)} rows")
    row, start = rows[which], slice_start - which * rows.stride(0)
    size, item = slice_end - slice_start, dtype.itemsize
    fits = start >= 0 <= size <= row.numel() - start and start % item == 0 and size % item == 0
    require(fits, "slice_end", slice_end, f"a byte of that row, whole elements of {dtype} from slice_start")
    count = math.prod(leading_shape)
    require(count > 0 and size // item % count == 0, "leading_shape", leading_shape,
            f"a shape that {size // item} elements fill")  # fmt: skip
    return row[start : start + size].view(dtype).view(*leading_shape, -1)


@checked_late
def moe_a2a_dispatch(
    token_selected_experts: torch.Tensor,
    input_payloads: list[torch.Tensor],
    workspace: torch.Tensor,
    metainfo: torch.Tensor,
    runtime_max_tokens_per_rank: int,
    ep_rank: int,
    ep_size: int,
    top_k: int,
    num_experts: int,
    enable_pdl: bool | None = None,
    eplb_local_stats: torch.Tensor | None = None,
    enable_rank_mask: bool = False,
    active_rank_mask: torch.Tensor | None = None,
    *,
    backend: str = "trtllm",
    recv_view_cache: dict | None = None,
) -> tuple[list[torch.Tensor], int, torch.Tensor | None]:
    """Send each token's payloads to every rank that has an expert of it, once to each.

    Expert e is on rank ``e // (num_experts / ep_size)``. A collective call, with the same payload shapes behind the
    first dimension, runtime_max_tokens_per_rank and top_k on every rank. A combine stands between two dispatches.

    Parameters
    ----------
    token_selected_experts : torch.Tensor
        int32 [tokens, top_k], contiguous; an id may come twice, and what is not from 0 to num_experts - 1 goes nowhere.
    input_payloads : list of torch.Tensor
        Up to 8, [tokens, ...] of any dtype, contiguous.
    workspace, metainfo : torch.Tensor
        Of `MoeAlltoAll.get_workspace` and `moe_a2a_initialize`. The second is not read: the workspace is known.
    runtime_max_tokens_per_rank : int
        At least the tokens of any rank; rows of the results.
    ep_rank, ep_size, top_k, num_experts : int
    enable_pdl : bool, optional
        Programmatic dependent launch. It has no effect on results, and none on the launch yet.
    eplb_local_stats : torch.Tensor, optional
        int32 [eplb_stats_num_experts], contiguous: this rank's statistics. All ranks give some, or none does.
    enable_rank_mask, active_rank_mask
        Only False and None: all ranks take part.
    backend : str
        "trtllm".
    recv_view_cache : dict, optional
        Upstream keeps views in it; it stays as it is.

    Returns
    -------
    (list of torch.Tensor, int, torch.Tensor or None)
        For each payload [ep_size, runtime_max_tokens_per_rank, ...]: what came from each rank, in the order of its
        tokens. Rows beyond those that came are undefined; `moe_a2a_sanitize_expert_ids` marks them. They are the
        workspace's memory, and hold until the dispatch after the next combine. The number is where the rows to combine
        go in this rank's row of the workspace. Last, int32 [ep_size, eplb_stats_num_experts]: the statistics of every
        rank, if there are any.

    Raises
    ------
    ValueError
        An argument other than the above, or payloads that the workspace has no room for.
    TimeoutError
        An earlier call waited in vain for a rank.
    """
    only("backend", backend, "trtllm")
    only("enable_rank_mask", enable_rank_mask, False)
    only("active_rank_mask", active_rank_mask, None)
    space = space_of(workspace, ep_rank, ep_size)
    received, at = dispatch_in(
        space, token_selected_experts, input_payloads, runtime_max_tokens_per_rank, top_k, num_experts,
        local_stats=eplb_local_stats,
    )  # fmt: skip
    return received, at - space.counts_at, None if eplb_local_stats is None else gathered_stats(space)


@checked_late
def moe_a2a_sanitize_expert_ids(
    expert_ids: torch.Tensor,
    workspace: torch.Tensor,
    metainfo: torch.Tensor,
    ep_rank: int,
    invalid_expert_id: int,
    enable_pdl: bool | None = None,
    *,
    backend: str = "trtllm",
) -> None:
    """Set the expert ids of rows that no token became to `invalid_expert_id`, in place.

    Parameters
    ----------
    expert_ids : torch.Tensor
        int32 [ep_size, runtime_max_tokens_per_rank, top_k], contiguous: ids that were a payload.
    workspace, metainfo, ep_rank, enable_pdl, backend
        As in `moe_a2a_dispatch`.
    invalid_expert_id : int
        What they become.

    Raises
    ------
    ValueError
        An argument other than the above.
    """
    only("backend", backend, "trtllm")
    space = space_of(workspace, ep_rank, expert_ids.shape[0])
    sanitize_in(space, expert_ids, invalid_expert_id)


@checked_late
def moe_a2a_combine(
    payload: torch.Tensor,
    local_num_tokens: int,
    workspace: torch.Tensor,
    metainfo: torch.Tensor,
    runtime_max_tokens_per_rank: int,
    ep_rank: int,
    ep_size: int,
    top_k: int,
    combine_payload_offset: int,
    payload_in_workspace: bool = False,
    output_dtype: torch.dtype | None = None,
    output_scales: torch.Tensor | None = None,
    output_scalar_scale: float = 1.0,
    sf_layout: SfLayout = SfLayout.layout_linear,
    output: torch.Tensor | None = None,
    *,
    use_low_precision: bool = False,
    enable_pdl: bool | None = None,
    enable_rank_mask: bool = False,
    active_rank_mask: torch.Tensor | None = None,
    backend: str = "trtllm",
) -> torch.Tensor:
    """Give each token the sum of its rows on the ranks that it was sent to, in float32 and rank order.

    A collective call, after `moe_a2a_dispatch`.

    Parameters
    ----------
    payload : torch.Tensor
        [ep_size, runtime_max_tokens_per_rank, hidden], bfloat16, float16 or float32, contiguous: for each row that
        came, what this rank's experts made of it. Other rows are not read.
    local_num_tokens : int
        Tokens of this rank in the dispatch.
    workspace, metainfo, runtime_max_tokens_per_rank, ep_rank, ep_size, enable_pdl, backend
        As in `moe_a2a_dispatch`.
    top_k : int
        It has no effect: the dispatch had it.
    combine_payload_offset : int
        What the dispatch returned.
    payload_in_workspace : bool
        `payload` is that place of the workspace, and needs no copy.
    output_dtype : torch.dtype, optional
        Of the result: bfloat16, float16 or float32; by default that of `payload`.
    output_scales, output_scalar_scale, sf_layout, enable_rank_mask, active_rank_mask
        Only None, 1, linear, False and None: results are not quantised, and all ranks take part.
    output : torch.Tensor, optional
        Receives the result, contiguous.
    use_low_precision : bool
        Round rows to e4m3, without a scale, before they are added; the result has the dtype it has without. The same on
        every rank. They travel as wide as they are.

    Returns
    -------
    torch.Tensor
        [local_num_tokens, hidden]; 0 for a token that went nowhere.

    Raises
    ------
    ValueError
        An argument other than the above.
    TimeoutError
        As `moe_a2a_dispatch` raises it.
    """
    only("backend", backend, "trtllm")
    only("output_scales", output_scales, None)
    only("output_scalar_scale", output_scalar_scale, 1.0)
    only("sf_layout", sf_layout, SfLayout.layout_linear)
    only("enable_rank_mask", enable_rank_mask, False)
    only("active_rank_mask", active_rank_mask, None)
    space = space_of(workspace, ep_rank, ep_size)
    at = combine_payload_offset + space.counts_at
    return combine_in(
        space, payload, local_num_tokens, runtime_max_tokens_per_rank, at, payload_in_workspace, output_dtype, output,
        bool(use_low_precision),
    )  # fmt: skip
