"""Low-rank adapters of experts: what each token's adapter adds to its experts' products, many adapters in one call."""

from __future__ import annotations

from typing import NamedTuple

import torch

from flashinfer._core.arguments import checked
from flashinfer._core.checks import check_apart, check_values, dtype_name, require, same_device
from flashinfer._core.custom_op import custom_op, one_op
from flashinfer.ops.moe import lora as room

__all__ = ["BGMVMoEPlan", "bgmv_moe", "bgmv_moe_expand", "bgmv_moe_shrink", "fill_w_ptr", "prepare_bgmv_moe"]

_HALVES = (torch.bfloat16, torch.float16)


@checked
def fill_w_ptr(w_ptr: torch.Tensor, weights: torch.Tensor, num_experts: int, slice_id: int) -> int:
    """Write the addresses of experts' matrices into a row of a table.

    Parameters
    ----------
    w_ptr : torch.Tensor
        int64 [slices, at least num_experts]; elements from num_experts on stay as they are.
    weights : torch.Tensor
        [adapters, at least num_experts, rows, columns], each matrix contiguous. The caller keeps it: the table has no
        hold on it.
    num_experts : int
        Experts of the table.
    slice_id : int
        The row to write.

    Returns
    -------
    int
        Elements from one adapter's matrices to the next one's.

    Raises
    ------
    ValueError
        A shape, dtype, stride or number other than the above.

    Examples
    --------
    >>> import torch
    >>> from flashinfer.fused_moe import fill_w_ptr
    >>> a, table = torch.ones(1, 4, 8, 64).bfloat16(), torch.empty(1, 4, dtype=torch.int64)  # of one adapter, 4 experts
    >>> stride = fill_w_ptr(table, a, 4, 0)
    >>> stride, (table[0, 1] - table[0, 0]).item()
    (2048, 1024)
    """
    fits = w_ptr.dim() == 2 and w_ptr.dtype == torch.int64
    require(fits, "w_ptr", f"{w_ptr.dtype} {tuple(w_ptr.shape)}", "int64 [slices, experts]")
    check_apart([("w_ptr", w_ptr)], [("weights", weights)])
    require(0 <= slice_id < len(w_ptr), "slice_id", slice_id, f"0 to {len(w_ptr) - 1}")
    _check_bank("weights", weights, num_experts)
    columns = w_ptr.shape[1]
    require(0 <= num_experts <= columns, "num_experts", num_experts, f"0 to {columns}, the columns of w_ptr")
    experts = torch.arange(num_experts, dtype=torch.int64, device=w_ptr.device)
    w_ptr[slice_id, :num_experts] = experts * (weights.stride(1) * weights.element_size()) + weights.data_ptr()
    return weights.stride(0)


@checked
def bgmv_moe_shrink(
    y: torch.Tensor,
    x: torch.Tensor,
    w_ptr: torch.Tensor,
    sorted_token_ids: torch.Tensor,
    expert_ids: torch.Tensor,
    lora_indices: torch.Tensor,
    lora_stride: int,
    *,
    per_pair_input: bool = False,
) -> None:
    """``y[s, p] += A[s, adapter, expert] @ x[token]`` for each slice s and pair p of a token and an expert.

    Parameters
    ----------
    y : torch.Tensor
        [slices, pairs, rank] in the dtype of x, contiguous rows; added to in place.
    x : torch.Tensor
        [tokens, hidden], or [pairs, hidden] with `per_pair_input`; bfloat16 or float16, contiguous rows.
    w_ptr : torch.Tensor
        int64 [slices, experts], contiguous rows: the address of adapter 0's matrix [rank, hidden] of each slice and
        expert, contiguous, in the dtype of x. `fill_w_ptr` writes it.
    sorted_token_ids, expert_ids : torch.Tensor
        int64 [pairs], in any order. A pair of no such token or expert is left out.
    lora_indices : torch.Tensor
        int64 [tokens]: each token's adapter; those of a negative one are left out. An adapter beyond the table's
        matrices is read from memory that is not theirs.
    lora_stride : int
        Elements from one adapter's matrices to the next one's.
    per_pair_input : bool
        x has a row for each pair.

    Raises
    ------
    ValueError
        A shape, dtype, stride or device other than the above.

    Notes
    -----
    Summed in float32, added to y in float32, and rounded once.

    References
    ----------
    Chen et al., Punica: Multi-Tenant LoRA Serving, 2023, https://arxiv.org/abs/2310.18547

    Examples
    --------
    >>> import torch
    >>> from flashinfer.fused_moe import bgmv_moe_shrink, fill_w_ptr
    >>> a, table = torch.ones(1, 4, 8, 64).bfloat16(), torch.empty(1, 4, dtype=torch.int64)  # of one adapter, 4 experts
    >>> stride = fill_w_ptr(table, a, 4, 0)
    >>> y, x, adapters = torch.zeros(1, 2, 8).bfloat16(), torch.ones(1, 64).bfloat16(), torch.tensor([0])
    >>> bgmv_moe_shrink(y, x, table, torch.tensor([0, 0]), torch.tensor([3, 1]), adapters, stride)
    >>> y[0, :, 0].tolist()
    [64.0, 64.0]
    """
    require(w_ptr.dim() == 2, "w_ptr", tuple(w_ptr.shape), "[slices, experts]")
    strides = [lora_stride] * len(w_ptr)
    _shrink(y, x, w_ptr, strides, sorted_token_ids, expert_ids, lora_indices, per_pair_input)


def _shrink(y, x, w_ptr, strides, sorted_token_ids, expert_ids, lora_indices, per_pair_input) -> None:
    """strides : of the adapters of each slice."""
    _check_indices(sorted_token_ids=sorted_token_ids, expert_ids=expert_ids, lora_indices=lora_indices)
    tokens, pairs = len(lora_indices), len(sorted_token_ids)
    _check_rows("x", x, (pairs if per_pair_input else tokens, None), _HALVES)
    _check_rows("y", y, (len(w_ptr), pairs, None), (x.dtype,))
    _check_pairs(y, x, w_ptr, sorted_token_ids, expert_ids, lora_indices)
    routed = room.Pairs(sorted_token_ids.contiguous(), expert_ids.contiguous(), lora_indices.contiguous())
    for out, table, stride in zip(y, w_ptr, strides, strict=True):
        _run(_Call(x, room.Matrices(table, stride, y.shape[2]), routed, None, not per_pair_input, True), out)


@checked
def bgmv_moe_expand(
    y: torch.Tensor,
    x: torch.Tensor,
    w_ptr: torch.Tensor,
    sorted_token_ids: torch.Tensor,
    expert_ids: torch.Tensor,
    topk_weights: torch.Tensor,
    lora_indices: torch.Tensor,
    slice_start_loc: torch.Tensor,
    output_slices: list[int],
    lora_stride: int,
    *,
    finalize: bool = True,
) -> None:
    """``y[token, slice s] += topk_weights[p] * B[s, adapter, expert] @ x[s, p]`` for each slice s and pair p.

    Parameters
    ----------
    y : torch.Tensor
        float32 [tokens, columns], contiguous rows; added to in place. Without `finalize` [pairs, columns]: each pair's
        product without its weight is stored, and rows of pairs that are left out stay as they are.
    x : torch.Tensor
        [slices, pairs, rank], what `bgmv_moe_shrink` gave; bfloat16 or float16, contiguous rows.
    w_ptr, lora_stride
        As in `bgmv_moe_shrink`, of matrices [output_slices[s], rank].
    sorted_token_ids, expert_ids, lora_indices
        As in `bgmv_moe_shrink`.
    topk_weights : torch.Tensor
        float32 [pairs]. Without `finalize` its values have no effect.
    slice_start_loc : torch.Tensor
        int64 [slices], on the device: the column of y where each slice begins. Columns outside y are left out.
    output_slices : list of int
        Columns of each slice.
    finalize : bool
        Sum over a token's pairs; else store each pair's.

    Raises
    ------
    ValueError
        A shape, dtype, stride or device other than the above.

    Notes
    -----
    A token's pairs are summed in their order, in float32, so results repeat bit for bit.

    Examples
    --------
    >>> import torch
    >>> from flashinfer.fused_moe import bgmv_moe_expand, fill_w_ptr
    >>> a, table = torch.ones(1, 4, 8, 64).bfloat16(), torch.empty(1, 4, dtype=torch.int64)  # of one adapter, 4 experts
    >>> stride = fill_w_ptr(table, a, 4, 0)
    >>> y, x, adapters = torch.zeros(1, 8), torch.ones(1, 2, 64).bfloat16(), torch.tensor([0])
    >>> pairs, weights = (torch.tensor([0, 0]), torch.tensor([3, 1])), torch.tensor([0.5, 0.25])
    >>> bgmv_moe_expand(y, x, table, *pairs, weights, adapters, torch.tensor([0]), [8], stride)
    >>> y[0, :2].tolist()
    [48.0, 48.0]
    """
    require(w_ptr.dim() == 2, "w_ptr", tuple(w_ptr.shape), "[slices, experts]")
    strides, weights = [lora_stride] * len(w_ptr), topk_weights
    _expand(y, x, w_ptr, strides, sorted_token_ids, expert_ids, weights, lora_indices, slice_start_loc, output_slices,
            finalize)  # fmt: skip


def _expand(
    y, x, w_ptr, strides, sorted_token_ids, expert_ids, topk_weights, lora_indices, slice_start_loc, output_slices,
    finalize, /,
) -> None:  # fmt: skip
    """strides : of the adapters of each slice."""
    _check_indices(sorted_token_ids=sorted_token_ids, expert_ids=expert_ids, lora_indices=lora_indices)
    tokens, pairs, slices = len(lora_indices), len(sorted_token_ids), len(w_ptr)
    _check_rows("x", x, (slices, pairs, None), _HALVES)
    _check_rows("y", y, (tokens if finalize else pairs, None), (torch.float32,))
    require(len(output_slices) == slices, "output_slices", output_slices, f"{slices} numbers, one a slice")
    require(min(output_slices, default=1) > 0, "output_slices", output_slices, "positive numbers")
    fits = slice_start_loc.shape == (slices,) and slice_start_loc.dtype == torch.int64
    require(fits, "slice_start_loc", f"{slice_start_loc.dtype} {tuple(slice_start_loc.shape)}", f"int64 [{slices}]")
    fits = topk_weights.shape == (pairs,) and topk_weights.dtype == torch.float32
    require(fits, "topk_weights", f"{topk_weights.dtype} {tuple(topk_weights.shape)}", f"float32 [{pairs}]")
    _check_pairs(y, x, w_ptr, sorted_token_ids, expert_ids, lora_indices)
    same_device(x=x, topk_weights=topk_weights, slice_start_loc=slice_start_loc)
    routed = room.Pairs(sorted_token_ids.contiguous(), expert_ids.contiguous(), lora_indices.contiguous())
    if finalize:
        ordered, order = torch.sort(sorted_token_ids, stable=True)
        begin = torch.searchsorted(ordered, torch.arange(tokens + 1, dtype=torch.int64, device=x.device))
        routed = routed._replace(weights=topk_weights.contiguous(), order=order, begin=begin)
    for s, (columns, table, stride) in enumerate(zip(output_slices, w_ptr, strides, strict=True)):
        matrices = room.Matrices(table, stride, columns)
        _run(_Call(x[s], matrices, routed, slice_start_loc[s : s + 1], False, finalize), y)


def _sums(its: dict) -> torch.Tensor:
    return _accumulator(its["x"], its["lora_b_weights"], its["output_dim"]).to(its["x"].dtype)


@one_op(("sums",), {"sums": _sums}, returned=lambda its: its["sums"], made=lambda x: {"sums": x})
def bgmv_moe(
    x: torch.Tensor,
    lora_a_weights: list[torch.Tensor],
    lora_b_weights: list[torch.Tensor],
    sorted_token_ids: torch.Tensor,
    expert_ids: torch.Tensor,
    lora_indices: torch.Tensor,
    topk_weights: torch.Tensor,
    num_experts: int,
    output_dim: int | None = None,
) -> torch.Tensor:
    """What adapters add to a mixture of experts: the sum over a token's pairs p of ``weight[p] * B @ (A @ x[token])``.

    Parameters
    ----------
    x : torch.Tensor
        [tokens, hidden]; bfloat16 or float16, contiguous rows.
    lora_a_weights : list of torch.Tensor
        For each slice [adapters, experts, rank, hidden] in the dtype of x, each matrix contiguous; one rank.
    lora_b_weights : list of torch.Tensor
        For each slice [adapters, experts, columns of the slice, rank], the same. Slices follow one another in the
        result.
    sorted_token_ids, expert_ids, lora_indices
        As in `bgmv_moe_shrink`.
    topk_weights : torch.Tensor
        float32 [pairs].
    num_experts : int
        Experts that pairs may have.
    output_dim : int, optional
        Columns of the result, by default those of all slices together; columns past these are 0.

    Returns
    -------
    torch.Tensor
        [tokens, output_dim] in the dtype of x; what A gives is rounded to that dtype too.

    Raises
    ------
    ValueError
        A shape, dtype, stride or device other than the above.

    References
    ----------
    Chen et al., Punica: Multi-Tenant LoRA Serving, 2023, https://arxiv.org/abs/2310.18547

    Examples
    --------
    >>> import torch, flashinfer
    >>> x = torch.ones(2, 64, dtype=torch.bfloat16)
    >>> a = torch.ones(1, 4, 8, 64, dtype=torch.bfloat16)  # one adapter, 4 experts, rank 8
    >>> b = torch.ones(1, 4, 32, 8, dtype=torch.bfloat16)
    >>> token, expert = torch.tensor([0, 0, 1]), torch.tensor([3, 1, 2])
    >>> adapter, weight = torch.tensor([0, -1]), torch.tensor([0.25, 0.5, 1.0])
    >>> flashinfer.fused_moe.bgmv_moe(x, [a], [b], token, expert, adapter, weight, 4)[:, 0].tolist()
    [384.0, 0.0]
    """
    for bank in lora_b_weights:
        require(bank.dim() == 4, "lora_b_weights", tuple(bank.shape), "[adapters, experts, rows, columns]")
    plan = prepare_bgmv_moe(
        x, lora_a_weights, lora_b_weights, sorted_token_ids, expert_ids, lora_indices, topk_weights, num_experts,
        y_accum=_accumulator(x, lora_b_weights, output_dim),
    )  # fmt: skip
    return plan.run().to(x.dtype)


class BGMVMoEPlan:
    """A call of `bgmv_moe` whose tensors are chosen; `prepare_bgmv_moe` makes it.

    Attributes
    ----------
    backend_used : str
        "portable".
    y_accum : torch.Tensor
        float32 [tokens, columns], the result.
    shrink_out : torch.Tensor
        [slices, pairs, rank], what A gives.
    """

    backend_used = "portable"

    @checked
    def __init__(self, given: tuple, banks: tuple, tables: tuple, shrink_out: torch.Tensor, y_accum: torch.Tensor):
        # The tables have no hold on the weights.
        self._given, self._banks, self._tables = given, banks, tables
        self.shrink_out, self.y_accum = shrink_out, y_accum

    def run(self) -> torch.Tensor:
        """Compute from what the tensors hold now.

        Returns
        -------
        torch.Tensor
            `y_accum`, overwritten. Launches alone, so that it may be captured in a CUDA graph.
        """
        x, tokens, experts, adapters, weights = self._given
        (a, a_strides), (b, b_strides), starts, columns = self._tables
        self.shrink_out.zero_()
        self.y_accum.zero_()
        _shrink(self.shrink_out, x, a, a_strides, tokens, experts, adapters, False)
        _expand(self.y_accum, self.shrink_out, b, b_strides, tokens, experts, weights, adapters, starts, columns, True)
        return self.y_accum

    def close(self) -> None:
        """Upstream releases its graph; there is none here."""


@checked
def prepare_bgmv_moe(
    x: torch.Tensor,
    lora_a_weights: list[torch.Tensor],
    lora_b_weights: list[torch.Tensor],
    sorted_token_ids: torch.Tensor,
    expert_ids: torch.Tensor,
    lora_indices: torch.Tensor,
    topk_weights: torch.Tensor,
    num_experts: int,
    *,
    backend: str = "cake",
    fallback: bool = True,
    shrink_out: torch.Tensor | None = None,
    y_accum: torch.Tensor | None = None,
    grouped: bool | None = None,
    order_remap: bool | None = None,
) -> BGMVMoEPlan:
    """Choose the tensors of a `bgmv_moe`, to run it many times; it reads what they hold at each run.

    Parameters
    ----------
    x, lora_a_weights, lora_b_weights, sorted_token_ids, expert_ids, lora_indices, topk_weights, num_experts
        As in `bgmv_moe`.
    backend : str
        "cake" or "auto": one result.
    fallback : bool
        Upstream's leave to take its other kernel; it has no effect, for there is one.
    shrink_out : torch.Tensor, optional
        [slices, pairs, rank] in the dtype of x, contiguous rows; overwritten by each run.
    y_accum : torch.Tensor, optional
        float32 [tokens, at least the columns of all slices], contiguous rows; overwritten by each run.
    grouped, order_remap : bool, optional
        How upstream orders its work; they have no effect on results.

    Returns
    -------
    BGMVMoEPlan
        Its `run()` gives float32 [tokens, columns].

    Raises
    ------
    ValueError
        A shape, dtype, stride, device or number other than the above.

    Examples
    --------
    >>> import torch
    >>> from flashinfer.fused_moe import prepare_bgmv_moe
    >>> a, b = torch.ones(1, 4, 8, 64).bfloat16(), torch.ones(1, 4, 16, 8).bfloat16()
    >>> pairs, adapters = torch.tensor([[0, 0], [3, 1]]), torch.tensor([0])
    >>> prepare_bgmv_moe(torch.ones(1, 64).bfloat16(), [a], [b], *pairs, adapters, torch.ones(2), 4).run()[0, 0].item()
    1024.0
    """
    require(backend in ("cake", "auto"), "backend", repr(backend), "'cake', 'auto'")
    require(num_experts >= 0, "num_experts", num_experts, "at least 0")
    _check_indices(sorted_token_ids=sorted_token_ids, expert_ids=expert_ids, lora_indices=lora_indices)
    slices, pairs = len(lora_a_weights), len(sorted_token_ids)
    require(slices > 0, "lora_a_weights", "an empty list", "a tensor for each slice")
    require(len(lora_b_weights) == slices, "lora_b_weights", f"{len(lora_b_weights)} tensors", f"{slices}, one a slice")
    _check_rows("x", x, (len(lora_indices), None), _HALVES)
    tables = []
    for name, banks in (("lora_a_weights", lora_a_weights), ("lora_b_weights", lora_b_weights)):
        for bank in banks:
            _check_bank(name, bank, num_experts)
    rank, adapters = lora_a_weights[0].shape[2], len(lora_a_weights[0])
    for name, banks in (("lora_a_weights", lora_a_weights), ("lora_b_weights", lora_b_weights)):
        table = torch.empty(slices, num_experts, dtype=torch.int64, device=x.device)
        for bank in banks:
            require(bank.dtype == x.dtype, name, bank.dtype, f"{x.dtype}, as x has")
            require(len(bank) == adapters, name, tuple(bank.shape), f"{adapters} adapters, as the first has")
            require(bank.shape[2] > 0, name, tuple(bank.shape), "matrices with rows")
            expected = (rank, x.shape[1]) if name == "lora_a_weights" else (bank.shape[2], rank)
            require(bank.shape[2:] == expected, name, tuple(bank.shape), f"matrices {expected}")
            require(bank.device == x.device, name, bank.device, f"{x.device}, where x is")
        tables.append((table, [fill_w_ptr(table, bank, num_experts, s) for s, bank in enumerate(banks)]))
    columns = [bank.shape[2] for bank in lora_b_weights]
    starts = [sum(columns[:s]) for s in range(slices)]
    starts = torch.tensor(starts, dtype=torch.int64, device=x.device)
    if shrink_out is None:
        shrink_out = torch.empty(slices, pairs, rank, dtype=x.dtype, device=x.device)
    _check_rows("shrink_out", shrink_out, (slices, pairs, rank), (x.dtype,))
    y_accum = _accumulator(x, lora_b_weights, None) if y_accum is None else y_accum
    _check_rows("y_accum", y_accum, (len(x), None), (torch.float32,))
    require(y_accum.shape[1] >= sum(columns), "y_accum", tuple(y_accum.shape), f"at least {sum(columns)} columns")
    check_values("lora_indices", lora_indices.clamp(min=-1), -1, adapters - 1)
    given = (x, sorted_token_ids, expert_ids, lora_indices, topk_weights)
    return BGMVMoEPlan(given, (lora_a_weights, lora_b_weights), (*tables, starts, columns), shrink_out, y_accum)


def _accumulator(x, lora_b_weights, output_dim: int | None) -> torch.Tensor:
    least = sum(bank.shape[-2] for bank in lora_b_weights)
    columns = least if output_dim is None else output_dim
    require(columns >= least, "output_dim", output_dim, f"at least {least}, the columns of all slices")
    return torch.empty(len(x), columns, dtype=torch.float32, device=x.device)


def _check_bank(name: str, bank: torch.Tensor, experts: int) -> None:
    require(bank.dim() == 4, name, tuple(bank.shape), "[adapters, experts, rows, columns]")
    require(bank.shape[1] >= experts, name, tuple(bank.shape), f"at least {experts} experts")
    contiguous = bank.shape[2:].numel() == 0 or bank[:1, :1].is_contiguous()
    require(contiguous, name, f"strides {bank.stride()}", "contiguous matrices")


def _check_rows(name: str, x: torch.Tensor, shape: tuple, dtypes: tuple[torch.dtype, ...]) -> None:
    """shape : its sizes; None is any."""
    known = len(x.shape) == len(shape) and all(e in (None, n) for n, e in zip(x.shape, shape, strict=True))
    words = "[" + ", ".join("any" if size is None else str(size) for size in shape) + "]"
    require(known, name, tuple(x.shape), words)
    require(x.dtype in dtypes, name, x.dtype, ", ".join(map(str, dtypes)))
    require(x.stride(-1) == 1 or x.shape[-1] <= 1, name, f"strides {x.stride()}", "contiguous rows")


def _check_indices(**tensors: torch.Tensor) -> None:
    for name, tensor in tensors.items():
        require(tensor.dtype == torch.int64, name, tensor.dtype, "int64")
        require(tensor.dim() == 1, name, tuple(tensor.shape), "one dimension")


def _check_pairs(y, x, w_ptr, sorted_token_ids, expert_ids, lora_indices) -> None:
    require(w_ptr.stride(1) == 1 or w_ptr.shape[1] <= 1, "w_ptr", f"strides {w_ptr.stride()}", "contiguous rows")
    require(w_ptr.dtype == torch.int64, "w_ptr", w_ptr.dtype, "int64")
    pairs = len(sorted_token_ids)
    require(len(expert_ids) == pairs, "expert_ids", tuple(expert_ids.shape), f"[{pairs}], as sorted_token_ids")
    same_device(x=x, y=y, w_ptr=w_ptr, sorted_token_ids=sorted_token_ids, expert_ids=expert_ids,
                lora_indices=lora_indices)  # fmt: skip


class _Call(NamedTuple):
    """Of a slice, as the room's Problem has it."""

    x: torch.Tensor
    matrices: room.Matrices
    pairs: room.Pairs
    offset: torch.Tensor | None
    by_token: bool
    adds: bool


@custom_op("flashinfer::moe_lora", mutates_args=("out",))
def _run(call: _Call, out: torch.Tensor) -> None:
    x, pairs = call.x, call.pairs
    if out.numel() == 0 or len(pairs.tokens) == 0 or call.matrices.rows == 0:
        return
    problem = room.Problem(
        dtype=dtype_name(x.dtype),
        out=dtype_name(out.dtype),
        together=min(max(16, 1 << (x.shape[1] - 1).bit_length()), room.MOST_TOGETHER),
        by_token=call.by_token,
        weighted=pairs.weights is not None,
        combined=pairs.order is not None,
        placed=call.offset is not None,
        adds=call.adds,
    )
    room.lora(problem, x.device).run(x, call.matrices, pairs, out, call.offset)
