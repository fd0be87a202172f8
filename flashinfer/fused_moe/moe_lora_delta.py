"""What adapters add to both products of gated experts, in the layouts of the calls by TensorRT-LLM's names."""

from __future__ import annotations

import torch

from flashinfer._core.arguments import checked
from flashinfer._core.checks import require, same_device
from flashinfer.fused_moe.bgmv_moe import bgmv_moe_expand, bgmv_moe_shrink


@checked
def bgmv_moe_gemm1_lora_delta(
    hidden_states: torch.Tensor,
    w_ptr_a: torch.Tensor,
    lora_stride_a: int,
    w_ptr_b: torch.Tensor,
    lora_stride_b: int,
    topk_ids: torch.Tensor,
    lora_ids: torch.Tensor,
    rank: int,
    intermediate_size: int,
    *,
    lora_dtype: torch.dtype = torch.bfloat16,
    scale: float = 1.0,
    out_dtype: torch.dtype = torch.bfloat16,
) -> torch.Tensor:
    """``scale * B @ (A @ hidden_states[t])`` of each choice of each token t: what is added before the activation.

    Parameters
    ----------
    hidden_states : torch.Tensor
        [tokens, hidden], any float dtype; it is converted to `lora_dtype`.
    w_ptr_a : torch.Tensor
        int64 [2, experts], as `flashinfer.fused_moe.fill_w_ptr` writes it: the matrices [rank, hidden] of the gate and
        of the up-projection. Or [experts], one for both.
    lora_stride_a, lora_stride_b : int
        Elements from one adapter's matrices to the next one's.
    w_ptr_b : torch.Tensor
        int64 [2, experts], of matrices [intermediate_size, rank]; with w_ptr_a [experts] that too, of matrices
        [2 * intermediate_size, rank].
    topk_ids : torch.Tensor
        int32 or int64 [tokens, top_k]: experts. A choice of no such expert has zeros.
    lora_ids : torch.Tensor
        int32 or int64 [tokens]: adapters; a token of a negative one has zeros.
    rank : int
        Of the adapters.
    intermediate_size : int
        Rows of the gate.
    lora_dtype : torch.dtype
        Of the matrices: bfloat16 or float16. What A gives is rounded to it.
    scale : float
        A factor of the result.
    out_dtype : torch.dtype
        Of the result.

    Returns
    -------
    torch.Tensor
        [tokens, top_k, 2 * intermediate_size], the gate's columns first.

    Raises
    ------
    ValueError
        A shape, dtype, stride or device other than the above.

    References
    ----------
    Hu et al., LoRA: Low-Rank Adaptation of Large Language Models, 2021, https://arxiv.org/abs/2106.09685

    Examples
    --------
    >>> import torch
    >>> from flashinfer.fused_moe import bgmv_moe_gemm1_lora_delta, fill_w_ptr
    >>> a, b = torch.ones(1, 4, 8, 64).bfloat16(), torch.ones(1, 4, 2 * 16, 8).bfloat16()  # A for both, and B of both
    >>> of_a, of_b = torch.empty(1, 4, dtype=torch.int64), torch.empty(1, 4, dtype=torch.int64)
    >>> strides = fill_w_ptr(of_a, a, 4, 0), fill_w_ptr(of_b, b, 4, 0)
    >>> ids, adapters = torch.tensor([[3, 1], [0, 2]]), torch.tensor([0, -1])
    >>> given = of_a[0], strides[0], of_b[0], strides[1], ids, adapters
    >>> bgmv_moe_gemm1_lora_delta(torch.ones(2, 64), *given, 8, 16)[:, 1, 0].tolist()
    [512.0, 0.0]
    """
    require(w_ptr_a.dim() in (1, 2), "w_ptr_a", tuple(w_ptr_a.shape), "[2, experts] or [experts]")
    shared = w_ptr_a.dim() == 1
    require(shared or len(w_ptr_a) == 2, "w_ptr_a", tuple(w_ptr_a.shape), "[2, experts] or [experts]")
    require(w_ptr_b.shape == w_ptr_a.shape, "w_ptr_b", tuple(w_ptr_b.shape), f"{tuple(w_ptr_a.shape)}, as w_ptr_a")
    require(hidden_states.dim() == 2, "hidden_states", tuple(hidden_states.shape), "[tokens, hidden]")
    _check_numbers(lora_dtype, rank, "intermediate_size", intermediate_size)
    pairs = _pairs(topk_ids, lora_ids, len(hidden_states))
    same_device(hidden_states=hidden_states, topk_ids=topk_ids, lora_ids=lora_ids)
    device, rows = hidden_states.device, topk_ids.numel()
    tables = (w_ptr_a[None], w_ptr_b[None]) if shared else (w_ptr_a, w_ptr_b)
    columns = [2 * intermediate_size] if shared else [intermediate_size] * 2
    between = torch.zeros(len(columns), rows, rank, dtype=lora_dtype, device=device)
    bgmv_moe_shrink(between, hidden_states.to(lora_dtype).contiguous(), tables[0], *pairs, lora_stride_a)
    starts = torch.arange(len(columns), dtype=torch.int64, device=device) * intermediate_size
    y = torch.zeros(rows, 2 * intermediate_size, dtype=torch.float32, device=device)
    unread = torch.ones(rows, dtype=torch.float32, device=device)
    token, expert, adapter = pairs
    bgmv_moe_expand(
        y, between, tables[1], token, expert, unread, adapter, starts, columns, lora_stride_b, finalize=False
    )  # fmt: skip
    return (y * scale).view(*topk_ids.shape, -1).to(out_dtype)


@checked
def bgmv_moe_gemm2_lora_delta(
    gemm1_activation_output: torch.Tensor,
    expanded_idx_to_permuted_idx: torch.Tensor,
    w_ptr_a: torch.Tensor,
    lora_stride_a: int,
    w_ptr_b: torch.Tensor,
    lora_stride_b: int,
    topk_ids: torch.Tensor,
    topk_weights: torch.Tensor,
    lora_ids: torch.Tensor,
    rank: int,
    hidden_size: int,
    *,
    lora_dtype: torch.dtype = torch.bfloat16,
    scale: float = 1.0,
    out_dtype: torch.dtype = torch.bfloat16,
) -> torch.Tensor:
    """The sum over a token's choices of ``scale * weight * B @ (A @ row)``: what is added to the mixture's result.

    Parameters
    ----------
    gemm1_activation_output : torch.Tensor
        [rows, intermediate_size], any float dtype: what the activation gave, converted to `lora_dtype`.
    expanded_idx_to_permuted_idx : torch.Tensor
        int32 or int64, tokens * top_k elements: the row of each choice. A choice without such a row gives nothing.
    w_ptr_a, w_ptr_b : torch.Tensor
        int64 [1, experts], of matrices [rank, intermediate_size] and [hidden_size, rank].
    lora_stride_a, lora_stride_b, topk_ids, lora_ids, rank, lora_dtype, scale, out_dtype
        As in `bgmv_moe_gemm1_lora_delta`.
    topk_weights : torch.Tensor
        [tokens, top_k], any float dtype.
    hidden_size : int
        Columns of the result.

    Returns
    -------
    torch.Tensor
        [tokens, hidden_size]. Summed in float32, choices in their order.

    Raises
    ------
    ValueError
        A shape, dtype, stride or device other than the above.

    Examples
    --------
    >>> import torch
    >>> from flashinfer.fused_moe import bgmv_moe_gemm2_lora_delta, fill_w_ptr
    >>> a, b = torch.ones(1, 4, 8, 16).bfloat16(), torch.ones(1, 4, 64, 8).bfloat16()
    >>> of_a, of_b = torch.empty(1, 4, dtype=torch.int64), torch.empty(1, 4, dtype=torch.int64)
    >>> strides = fill_w_ptr(of_a, a, 4, 0), fill_w_ptr(of_b, b, 4, 0)
    >>> ids, weights, adapters = torch.tensor([[3, 1]]), torch.tensor([[0.5, 0.25]]), torch.tensor([0])
    >>> given = torch.ones(2, 16), torch.tensor([0, 1]), of_a, strides[0], of_b, strides[1], ids, weights, adapters
    >>> bgmv_moe_gemm2_lora_delta(*given, 8, 64)[0, 0].item()
    96.0
    """
    x = gemm1_activation_output
    require(x.dim() == 2, "gemm1_activation_output", tuple(x.shape), "[rows, intermediate_size]")
    for name, table in (("w_ptr_a", w_ptr_a), ("w_ptr_b", w_ptr_b)):
        require(table.dim() == 2 and len(table) == 1, name, tuple(table.shape), "[1, experts]")
    _check_numbers(lora_dtype, rank, "hidden_size", hidden_size)
    token, expert, adapter = _pairs(topk_ids, lora_ids, len(topk_ids))
    row = expanded_idx_to_permuted_idx
    require(row.numel() == len(token), "expanded_idx_to_permuted_idx", tuple(row.shape), f"{len(token)} elements")
    fits = topk_weights.shape == topk_ids.shape
    require(fits, "topk_weights", tuple(topk_weights.shape), f"{tuple(topk_ids.shape)}, as topk_ids")
    same_device(gemm1_activation_output=x, expanded_idx_to_permuted_idx=row, topk_ids=topk_ids,
                topk_weights=topk_weights, lora_ids=lora_ids)  # fmt: skip
    y = torch.zeros(len(topk_ids), hidden_size, dtype=torch.float32, device=x.device)
    if len(x) and len(token):
        row = row.reshape(-1).long()
        expert = expert.masked_fill((row < 0) | (row >= len(x)), -1)
        rows = x[row.clamp(0, len(x) - 1)].to(lora_dtype)
        between = torch.zeros(1, len(token), rank, dtype=lora_dtype, device=x.device)
        bgmv_moe_shrink(between, rows, w_ptr_a, token, expert, adapter, lora_stride_a, per_pair_input=True)
        weights, start = topk_weights.reshape(-1).float(), torch.zeros(1, dtype=torch.int64, device=x.device)
        bgmv_moe_expand(y, between, w_ptr_b, token, expert, weights, adapter, start, [hidden_size], lora_stride_b)
    return (y * scale).to(out_dtype)


def _pairs(topk_ids, lora_ids, tokens: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Token and expert of each choice, and the adapter of each token, int64."""
    for name, ids, dims in (("topk_ids", topk_ids, 2), ("lora_ids", lora_ids, 1)):
        require(ids.dtype in (torch.int32, torch.int64), name, ids.dtype, "int32, int64")
        fits = ids.dim() == dims and len(ids) == tokens
        require(fits, name, tuple(ids.shape), f"[{tokens}, top_k]" if dims == 2 else f"[{tokens}]")
    top_k = topk_ids.shape[1]
    token = torch.arange(tokens * top_k, dtype=torch.int64, device=topk_ids.device) // max(top_k, 1)
    return token, topk_ids.reshape(-1).long(), lora_ids.long()


def _check_numbers(lora_dtype: torch.dtype, rank: int, name: str, columns: int) -> None:
    halves = (torch.bfloat16, torch.float16)
    require(lora_dtype in halves, "lora_dtype", lora_dtype, "bfloat16, float16")
    require(rank > 0, "rank", rank, "1 or more")
    require(columns > 0, name, columns, "1 or more")
