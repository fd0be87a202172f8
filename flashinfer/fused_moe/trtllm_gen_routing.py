"""`trtllm_gen_routing`: the choice of experts, and the rows that they compute, without the experts."""

from __future__ import annotations

from typing import NamedTuple

import torch

from flashinfer._core.arguments import checked, named
from flashinfer._core.checks import require
from flashinfer.fused_moe.routing import route, token_map
from flashinfer.fused_moe.trtllm import check_local
from flashinfer.ops.moe.token_map import most_tiles
from flashinfer.tllm_enums import RoutingMethodType

__all__ = ["TrtllmGenRoutingResult", "max_num_padded_tokens", "trtllm_gen_routing"]


@checked
def max_num_padded_tokens(num_tokens: int, top_k: int, num_experts: int, tile_tokens_dim: int) -> int:
    """The most rows that any choice of experts has, padding included.

    Parameters
    ----------
    num_tokens, top_k : int
        Tokens, and choices of each.
    num_experts : int
        Experts of this rank.
    tile_tokens_dim : int
        Rows of a tile.

    Returns
    -------
    int

    Raises
    ------
    ValueError
        A number below 0, or a tile without rows.

    Examples
    --------
    >>> from flashinfer.fused_moe.trtllm_gen_routing import max_num_padded_tokens
    >>> max_num_padded_tokens(4, 2, 3, 8)
    24
    """
    for name, x, least in (("num_tokens", num_tokens, 0), ("top_k", top_k, 0), ("num_experts", num_experts, 0),
                           ("tile_tokens_dim", tile_tokens_dim, 1)):  # fmt: skip
        require(x >= least, name, x, f"{least} or more")
    return most_tiles(num_tokens * top_k, num_experts, tile_tokens_dim) * tile_tokens_dim


class TrtllmGenRoutingResult(NamedTuple):
    """Experts of each token, and rows grouped by expert, each expert's padded to whole tiles.

    Experts below are this rank's, counted from its first. Rows follow one another expert by expert, an expert's in the
    order of its tokens. A pair is a token and one of its choices. Indices are int32. What is past the last tile has no
    meaning.

    Attributes
    ----------
    topk_ids : torch.Tensor
        int32 [tokens, choices]: experts among all ranks', best-ranked first, shared ones last; -1 for an expert of
        another rank.
    topk_weights : torch.Tensor
        bfloat16, of the same shape.
    total_num_padded_tokens : torch.Tensor
        [1]: rows, padding included.
    expanded_idx_to_permuted_idx : torch.Tensor
        [tokens, choices]: the row of each pair; -1 for an expert of another rank.
    permuted_idx_to_token_idx : torch.Tensor
        [most rows]: the token of each row; -1 in padding.
    cta_idx_xy_to_batch_idx : torch.Tensor
        [most tiles]: the expert of each tile.
    cta_idx_xy_to_mn_limit : torch.Tensor
        [most tiles]: the row where the padding of a tile's expert begins, or the end of the tile if that is before it.
    num_non_exiting_ctas : torch.Tensor
        [1]: tiles.
    """

    topk_ids: torch.Tensor
    topk_weights: torch.Tensor
    total_num_padded_tokens: torch.Tensor
    expanded_idx_to_permuted_idx: torch.Tensor
    permuted_idx_to_token_idx: torch.Tensor
    cta_idx_xy_to_batch_idx: torch.Tensor
    cta_idx_xy_to_mn_limit: torch.Tensor
    num_non_exiting_ctas: torch.Tensor


@checked
@named(routing_method_type="routing_method", tile="tile_tokens_dim")
def trtllm_gen_routing(
    routing_logits: torch.Tensor,
    routing_bias: torch.Tensor | None,
    routing_method: RoutingMethodType | int,
    top_k: int,
    *,
    num_fused_shared_experts: int = 0,
    n_group: int = 0,
    topk_group: int = 0,
    local_expert_offset: int = 0,
    local_num_experts: int | None = None,
    routed_scaling_factor: float = 1.0,
    tile_tokens_dim: int = 8,
    norm_topk_prob: bool = True,
    enable_pdl: bool | None = None,
) -> TrtllmGenRoutingResult:
    """The routing of the functions that are named trtllm: experts and weights of each token, and the experts' rows.

    Parameters
    ----------
    routing_logits, routing_bias, routing_method, top_k, num_fused_shared_experts, routed_scaling_factor, norm_topk_prob
        As of `flashinfer.fused_moe.routing.route`.
    n_group, topk_group : int
        For DeepSeekV3: groups of consecutive experts, and how many are chosen from. 0 and 1 are no groups.
    local_expert_offset, local_num_experts : int
        This rank's experts are so many from the offset on; None: all from there. Shared experts follow the last expert,
        on the rank that has it.
    tile_tokens_dim : int
        Rows of a tile, 1 or more.
    enable_pdl : bool, optional
        Programmatic dependent launch. It has no effect on results, and none on the launch yet.

    Returns
    -------
    TrtllmGenRoutingResult

    Raises
    ------
    ValueError
        A method, shape, dtype, device or number other than the above.

    Examples
    --------
    >>> import torch
    >>> from flashinfer.fused_moe import RoutingMethodType, trtllm_gen_routing
    >>> logits = torch.tensor([[3.0, 0.0, 2.0], [0.0, 3.0, 1.0]])
    >>> routed = trtllm_gen_routing(logits, None, RoutingMethodType.Renormalize, 2, tile_tokens_dim=4)
    >>> routed.topk_ids.tolist(), routed.expanded_idx_to_permuted_idx.tolist()
    ([[0, 2], [1, 2]], [[0, 8], [4, 9]])
    >>> routed.permuted_idx_to_token_idx.tolist()
    [0, -1, -1, -1, 1, -1, -1, -1, 0, 1, -1, -1]
    """
    require(routing_logits.dim() == 2, "routing_logits", tuple(routing_logits.shape), "[tokens, experts]")
    require(tile_tokens_dim >= 1, "tile_tokens_dim", tile_tokens_dim, "1 or more")
    experts, shared = routing_logits.shape[1], num_fused_shared_experts
    local = experts - local_expert_offset if local_num_experts is None else local_num_experts
    check_local(local_expert_offset, local, experts)
    ids, weights = route(
        routing_logits, routing_bias, routing_method, top_k, n_group=n_group, topk_group=topk_group,
        routed_scaling_factor=routed_scaling_factor, norm_topk_prob=norm_topk_prob, num_fused_shared_experts=shared,
    )  # fmt: skip
    local += shared if local_expert_offset + local == experts else 0
    rows, _ = token_map(ids, local, local_expert_offset, tile_tokens_dim)
    tiles = torch.arange(1, len(rows.tile_end) + 1, dtype=torch.int32, device=ids.device)
    return TrtllmGenRoutingResult(
        topk_ids=ids.masked_fill_(rows.pair_row < 0, -1),
        topk_weights=weights.to(torch.bfloat16),
        total_num_padded_tokens=rows.first[-1:],
        expanded_idx_to_permuted_idx=rows.pair_row,
        permuted_idx_to_token_idx=rows.row_pair // ids.shape[1],
        cta_idx_xy_to_batch_idx=rows.tile_expert,
        cta_idx_xy_to_mn_limit=torch.minimum(rows.tile_end, tiles * tile_tokens_dim),
        num_non_exiting_ctas=rows.tiles,
    )
