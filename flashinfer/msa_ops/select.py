"""The blocks that a query chooses by their scores."""

from __future__ import annotations

import torch

from flashinfer._core.arguments import checked
from flashinfer._core.checks import require, require_fit
from flashinfer._direct.given import whole


@checked
def msa_topk_select(
    max_score: torch.Tensor,
    topk: int,
    num_valid_pages: int | torch.Tensor | None = None,
    output: torch.Tensor | None = None,
    force_begin_blocks: int = 0,
    force_end_blocks: int = 0,
) -> torch.Tensor:
    """The topk blocks of the largest scores for each query and head, in ascending order.

    Of equal scores the lower block is taken; NaN counts as -inf. Nothing waits for the device.

    Parameters
    ----------
    max_score : float32 Tensor [heads, blocks, tokens]
        Of `msa_proxy_score`. Blocks without a key that a query sees are -inf.
    topk : int
        Blocks to take, at least 1.
    num_valid_pages : int, or int32 Tensor [tokens] or of one element, optional
        Blocks there are, for all queries or for each; clamped to 0 ... blocks. Others are not taken.
    output : int32 Tensor [tokens, heads, topk], optional
        Where to write.
    force_begin_blocks, force_end_blocks : int
        So many of the first, and of the last, blocks there are are taken before others.

    Returns
    -------
    int32 Tensor [tokens, heads, topk]
        -1 behind those that are taken, where there are fewer blocks.

    Raises
    ------
    ValueError
        A shape, dtype or number other than the above.

    Examples
    --------
    >>> import torch
    >>> from flashinfer.msa_ops import msa_topk_select
    >>> scores = torch.tensor([1.0, 5.0, 3.0, 4.0]).view(1, 4, 1)
    >>> msa_topk_select(scores, 2).tolist(), msa_topk_select(scores, 2, force_begin_blocks=1).tolist()
    ([[[1, 3]]], [[[0, 1]]])
    """
    require_fit("max_score", max_score, max_score.dim() == 3, "[heads, blocks, tokens]", torch.float32)
    heads, blocks, tokens = max_score.shape
    topk, device = whole("topk", topk, 1), max_score.device
    first = whole("force_begin_blocks", force_begin_blocks, 0)
    last = whole("force_end_blocks", force_end_blocks, 0)
    require(first + last <= topk, "force_begin_blocks", f"{first}, and {last} at the end", f"at most topk = {topk}")
    if isinstance(num_valid_pages, torch.Tensor):
        # A single number stays on the device, too: nothing waits for it.
        fits = num_valid_pages.numel() == 1 or tuple(num_valid_pages.shape) == (tokens,)
        fits = fits and num_valid_pages.dtype in (torch.int32, torch.int64)
        require(fits, "num_valid_pages", f"{num_valid_pages.dtype} {tuple(num_valid_pages.shape)}", f"int32 [{tokens}]")
        count = num_valid_pages.to(device).long().clamp(0, blocks).reshape(-1).expand(tokens)[:, None, None]
    else:
        given = blocks if num_valid_pages is None else whole("num_valid_pages", num_valid_pages, 0)
        count = torch.full((tokens, 1, 1), min(given, blocks), dtype=torch.int64, device=device)
    shape = tokens, heads, topk
    if output is None:
        output = torch.empty(shape, dtype=torch.int32, device=device)
    require(tuple(output.shape) == shape and output.dtype == torch.int32, "output",
            f"{output.dtype} {tuple(output.shape)}", f"int32 {shape}")  # fmt: skip
    block = torch.arange(blocks, dtype=torch.int64, device=device)
    score = max_score.permute(2, 0, 1)
    score = torch.where(score.isnan(), -torch.inf, score)
    # Three stable sorts: by score; then forced blocks first; then absent blocks last. Each keeps the order of the sort
    # before it among equals, and the first that of blocks.
    order = score.sort(dim=-1, descending=True, stable=True).indices
    forced = (block < first) | (block >= count - last)
    rank = torch.where(block >= count, 2, torch.where(forced, 0, 1)).expand(tokens, heads, blocks)
    order = order.gather(-1, rank.gather(-1, order).sort(dim=-1, stable=True).indices)[..., :topk]
    taken = torch.where(order < count, order, blocks).sort(-1).values
    output[..., : taken.shape[-1]] = torch.where(taken < blocks, taken, -1).int()
    output[..., taken.shape[-1] :] = -1
    return output
