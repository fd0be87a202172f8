"""The k largest values of each row, without sorting, and the transforms of sparse attention on their indices."""

from __future__ import annotations

import warnings
from enum import IntEnum
from typing import Any

import torch

from flashinfer._core.arguments import checked, named
from flashinfer._core.checks import (
    check_values,
    dtype_name,
    is_aligned,
    number,
    require,
    require_fit,
    rows_of,
    same_device,
)
from flashinfer._core.custom_op import custom_op
from flashinfer._core.replay import replayed
from flashinfer.compat.queries import answering
from flashinfer.ops import topk as room

__all__ = [
    "TopKTieBreak",
    "can_implement_filtered_topk",
    "top_k",
    "top_k_page_table_transform",
    "top_k_ragged_transform",
    "top_k_varlen",
    "topk",
]

# Upstream's implementations of `top_k_varlen`; ours answers to each name.
_VARLEN_BACKENDS = ("auto", "radix", "gvr", "gvr_2", "radix_cutlass", "radix_filter")
_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


class TopKTieBreak(IntEnum):
    """Which of equal values are taken where not all of them are: those at the lowest or at the highest indices.

    NONE leaves the choice to us; it is that of SMALL.
    """

    NONE = 0
    SMALL = 1
    LARGE = 2

    def __str__(self) -> str:
        return self.name.lower()

    def __repr__(self) -> str:
        return f"TopKTieBreak.{self.name}"

    def __format__(self, format_spec: str) -> str:
        return format(str(self), format_spec)


# Made here, because torch.compile cannot trace tuple() of an Enum (torch 2.11).
_TIE_BREAKS = tuple(TopKTieBreak)


@replayed
def top_k(
    input: torch.Tensor,
    k: int,
    sorted: bool = False,
    deterministic: bool = False,
    tie_break: TopKTieBreak = TopKTieBreak.NONE,
    dsa_graph_safe: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The `k` largest values of each row, and where they are.

    Parameters
    ----------
    input : torch.Tensor
        [rows, columns]; float32, bfloat16 or float16, any strides. NaN counts as the largest; 0 and -0 are equal.
    k : int
        1 to columns.
    sorted : bool
        Largest first, of equal ones the one that `tie_break` prefers. Otherwise in the order of their indices.
    deterministic : bool
        Results depend on nothing but the arguments in either case.
    tie_break : TopKTieBreak
        Which of equal values are taken, and in which order they are sorted.
    dsa_graph_safe : bool
        A CUDA graph can capture the call in either case.

    Returns
    -------
    values : torch.Tensor
        [rows, k]; dtype of `input`.
    indices : torch.Tensor
        int64 [rows, k].

    Raises
    ------
    ValueError
        A shape, dtype or value other than the above.

    References
    ----------
    Radix selection: Alabi et al., Fast k-selection algorithms for graphics processing units, 2012.

    Examples
    --------
    >>> import torch, flashinfer
    >>> values, indices = flashinfer.top_k(torch.tensor([[1.0, 3.0, 2.0]]), 2, sorted=True)
    >>> values, indices
    (tensor([[3., 2.]]), tensor([[1, 2]]))
    """
    _check_scores(input)
    k = number("k", k)
    require(1 <= k <= input.shape[1], "k", k, f"1 to {input.shape[1]}, the columns of input")
    values = torch.empty((len(input), k), dtype=input.dtype, device=input.device)
    indices = torch.empty((len(input), k), dtype=torch.int64, device=input.device)
    _top_k(input, k, sorted, _is_last(tie_break), values, indices)
    return values, indices


@replayed
@named(raw="out_raw_indices")
def top_k_page_table_transform(
    input: torch.Tensor,
    src_page_table: torch.Tensor,
    lengths: torch.Tensor,
    k: int,
    row_to_batch: torch.Tensor | None = None,
    deterministic: bool = False,
    tie_break: TopKTieBreak = TopKTieBreak.NONE,
    dsa_graph_safe: bool = False,
    row_starts: torch.Tensor | None = None,
    page_table_row_starts: torch.Tensor | None = None,
    *,
    page_size: int = 1,
    out: torch.Tensor | None = None,
    out_raw_indices: torch.Tensor | None = None,
) -> torch.Tensor:
    """The `k` largest scores of each row, as slots of a paged cache.

    A row's scores are the `lengths` columns from its start on. Column i from there is in slot ``src_page_table[request,
    first + i // page_size] * page_size + i % page_size`` of the request that `row_to_batch` names.

    Parameters
    ----------
    input : torch.Tensor
        [rows, max_len]; float32, bfloat16 or float16, any strides.
    src_page_table : torch.Tensor
        int32 [requests, pages], contiguous columns.
    lengths : torch.Tensor
        int32 or int64 [rows]: scores of each row, as far as the row goes. 0 and less: none.
    k : int
        1 or more.
    row_to_batch : torch.Tensor, optional
        int32 or int64 [rows]: the row of the page table; by default row i's is i.
    deterministic, tie_break, dsa_graph_safe
        As those of `top_k`.
    row_starts : torch.Tensor, optional
        int32 or int64 [rows]: the column where a row's scores begin; by default 0.
    page_table_row_starts : torch.Tensor, optional
        int32 or int64 [rows]: `first`, the entry of the page table where a row's scores begin. By default
        `row_starts`, or 0; `row_starts` with pages of more than one score need it, for they count scores.
    page_size : int
        Scores that an entry of the page table stands for, a power of two up to 2**30.
    out, out_raw_indices : torch.Tensor, optional
        int32 [rows, k], contiguous columns, apart from each other: receive the slots, and the columns from the row's
        start on.

    Returns
    -------
    torch.Tensor
        `out`, or a new int32 [rows, k]: slots in the order of their columns, then -1. -1 as well where a score is
        past the page table's row or its entry is negative.

    Raises
    ------
    ValueError
        A shape, dtype or device other than the above.

    Examples
    --------
    >>> import torch, flashinfer
    >>> scores, pages = torch.tensor([[1.0, 3.0, 2.0]]), torch.tensor([[10, 11, 12]]).int()
    >>> flashinfer.top_k_page_table_transform(scores, pages, torch.tensor([3]).int(), 2)
    tensor([[11, 12]], dtype=torch.int32)
    """
    _check_scores(input)
    rows, k, page_size = len(input), number("k", k), number("page_size", page_size)
    require(k >= 1, "k", k, "1 or more")
    require(page_size in {1 << i for i in range(31)}, "page_size", page_size, "a power of two up to 2**30")
    known = page_size == 1 or row_starts is None or page_table_row_starts is not None
    require(known, "page_table_row_starts", None, "a tensor, with row_starts and pages of more than one score")
    require_fit("src_page_table", src_page_table, src_page_table.dim() == 2, "[requests, pages]", torch.int32)
    one = src_page_table.stride(1) == 1 or src_page_table.shape[1] <= 1
    require(one, "src_page_table", src_page_table.stride(), "contiguous columns")
    if row_to_batch is None:
        require(len(src_page_table) >= rows, "src_page_table", len(src_page_table), f"{rows} rows, or row_to_batch")
    vectors = {"lengths": lengths, "row_to_batch": row_to_batch, "row_starts": row_starts}
    vectors = _check_vectors(rows, vectors | {"page_table_row_starts": page_table_row_starts})
    if row_to_batch is not None:
        check_values("row_to_batch", row_to_batch, 0, len(src_page_table) - 1)
    for name, tensor in (("out", out), ("out_raw_indices", out_raw_indices)):
        if tensor is not None:
            _check_out(name, tensor, rows, k)
    same_device(input=input, src_page_table=src_page_table, out=out, out_raw_indices=out_raw_indices, **vectors)
    if out is None:
        out = torch.empty((rows, k), dtype=torch.int32, device=input.device)
    lengths, row_to_batch, row_starts, page_table_row_starts = vectors.values()
    _top_k_pages(input, k, _is_last(tie_break), src_page_table, page_size, lengths, row_to_batch, row_starts,
                 page_table_row_starts, out, out_raw_indices)  # fmt: skip
    return out


@replayed
def top_k_ragged_transform(
    input: torch.Tensor,
    offsets: torch.Tensor,
    lengths: torch.Tensor,
    k: int,
    deterministic: bool = False,
    tie_break: TopKTieBreak = TopKTieBreak.NONE,
    dsa_graph_safe: bool = False,
    row_starts: torch.Tensor | None = None,
) -> torch.Tensor:
    """The `k` largest scores of each row, as rows of a ragged cache: column i of a row's scores becomes ``offset + i``.

    Parameters
    ----------
    input, lengths, k, row_starts
        As in `top_k_page_table_transform`.
    offsets : torch.Tensor
        int32 or int64 [rows]: added to the columns of each row.
    deterministic, tie_break, dsa_graph_safe
        As those of `top_k`.

    Raises
    ------
    ValueError
        A shape, dtype or device other than the above.

    Returns
    -------
    torch.Tensor
        int32 [rows, k]: in the order of their columns, then -1.

    Examples
    --------
    >>> import torch, flashinfer
    >>> scores, offsets = torch.tensor([[1.0, 3.0, 2.0]]), torch.tensor([100]).int()
    >>> flashinfer.top_k_ragged_transform(scores, offsets, torch.tensor([3]).int(), 2)
    tensor([[101, 102]], dtype=torch.int32)
    """
    _check_scores(input)
    k = number("k", k)
    require(k >= 1, "k", k, "1 or more")
    vectors = _check_vectors(len(input), {"offsets": offsets, "lengths": lengths, "row_starts": row_starts})
    same_device(input=input, **vectors)
    out = torch.empty((len(input), k), dtype=torch.int32, device=input.device)
    offsets, lengths, row_starts = vectors.values()
    _top_k_ragged(input, k, _is_last(tie_break), offsets, lengths, row_starts, out)
    return out


# Upstream's alias.
topk = top_k


def can_implement_filtered_topk() -> bool:
    """Whether the chip has the shared memory that one of upstream's kernels wants: True, for ours run on every chip.

    Returns
    -------
    bool
        True.

    Examples
    --------
    >>> from flashinfer.topk import can_implement_filtered_topk
    >>> can_implement_filtered_topk()
    True
    """
    return True


@checked
@answering("auto", "radix", "gvr", "gvr_2", "radix_cutlass", "radix_filter")
def top_k_varlen(
    logits: torch.Tensor,
    seq_lens: torch.Tensor,
    top_k: int,
    pre_idx: torch.Tensor | None = None,
    compress_ratio: int = 1,
    next_n: int = 1,
    return_values: bool = False,
    out_indices: torch.Tensor | None = None,
    out_values: torch.Tensor | None = None,
    backend: str = "auto",
    load_balance: bool = True,
    workspace: dict | None = None,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """The `top_k` largest logits of each row of a decoding batch, as far as its request goes.

    Row ``i * next_n + t`` is token t of request i; its first ``(seq_lens[i] - next_n + t + 1) // compress_ratio``
    columns count, none where that is negative, and no more than there are.

    Parameters
    ----------
    logits : torch.Tensor
        [requests * next_n, columns]; float32, bfloat16 or float16, any strides. NaN counts as the largest.
    seq_lens : torch.Tensor
        int32 or int64 [requests]: keys of each request, the drafted ones included, before they are compressed.
    top_k : int
        1 or more.
    pre_idx : torch.Tensor, optional
        int32 [requests, top_k]: what the step before chose. It is a hint that no result depends on, and is not read.
    compress_ratio : int
        Keys that a column stands for, 1 or more.
    next_n : int
        Rows of a request, 1 or more.
    return_values : bool
        Return the logits as well.
    out_indices, out_values : torch.Tensor, optional
        Receive the results: [rows, top_k], or as many elements in one dimension; contiguous; int32, and the dtype of
        `logits`. `out_values` is left alone without `return_values`.
    backend : str
        Upstream's names ("auto", "radix", "gvr", "gvr_2", "radix_cutlass", "radix_filter"), which all mean ours, or a
        variant's name.
    load_balance : bool
        No result depends on it; rows are always shared between programs.
    workspace : dict, optional
        Not needed.

    Returns
    -------
    indices : torch.Tensor
        int32 [rows, top_k]: columns in their order, of equal logits the first ones; then -1. `out_indices` itself
        if given, in its own shape.
    values : torch.Tensor or None
        The logits there, then 0; None without `return_values`. `out_values` itself if given.

    Raises
    ------
    ValueError
        A shape, dtype, device or value other than the above.

    Warns
    -----
    RuntimeWarning
        A `pre_idx` of another shape, dtype or device.

    Examples
    --------
    >>> import torch, flashinfer
    >>> logits = torch.tensor([[0.0, 3.0, 1.0, 9.0]])
    >>> flashinfer.top_k_varlen(logits, torch.tensor([3], dtype=torch.int32), 2)[0]
    tensor([[1, 2]], dtype=torch.int32)
    """
    _check_scores(logits, "logits")
    counts = {"top_k": top_k, "compress_ratio": compress_ratio, "next_n": next_n}
    top_k, compress_ratio, next_n = (_count(name, value) for name, value in counts.items())
    rows = len(logits)
    grouped = seq_lens.dim() == 1 and len(seq_lens) * next_n == rows
    require(grouped, "seq_lens", tuple(seq_lens.shape), f"[requests], which times next_n {next_n} are {rows} rows")
    require(seq_lens.dtype in (torch.int32, torch.int64), "seq_lens", seq_lens.dtype, "int32, int64")
    require(workspace is None or isinstance(workspace, dict), "workspace", type(workspace).__name__, "None, a dict")
    if pre_idx is not None:
        fits = pre_idx.shape == (len(seq_lens), top_k) and pre_idx.dtype == torch.int32
        if not fits or pre_idx.device != logits.device:
            wanted = f"int32 [{len(seq_lens)}, {top_k}] on {logits.device}"
            warnings.warn(f"pre_idx: a hint that is no {wanted} is not used", RuntimeWarning, stacklevel=2)
    indices = _flat_out("out_indices", out_indices, torch.int32, rows, top_k, logits.device)
    values = None
    if return_values:
        values = _flat_out("out_values", out_values, logits.dtype, rows, top_k, logits.device)
    same_device(logits=logits, seq_lens=seq_lens)
    _top_k_varlen(logits, seq_lens, top_k, compress_ratio, next_n, indices, values, backend)
    if return_values and out_values is not None:
        values = out_values
    return indices if out_indices is None else out_indices, values


def _count(name, value) -> int:
    value = number(name, value)
    require(value >= 1, name, value, "1 or more")
    return value


def _flat_out(name, given, dtype, rows, k, device) -> torch.Tensor:
    """A result [rows, k], in what the caller gave if anything."""
    if given is None:
        return torch.empty((rows, k), dtype=dtype, device=device)
    fits = given.shape in ((rows, k), (rows * k,)) and given.is_contiguous()
    require(fits, name, tuple(given.shape), f"[{rows}, {k}] or [{rows * k}], contiguous")
    require(given.dtype == dtype, name, given.dtype, str(dtype))
    require(given.device == device, name, f"a tensor on {given.device}", f"{device}, where logits is")
    return given if given.dim() == 2 else given.view(rows, k)


def _is_last(tie_break) -> bool:
    require(isinstance(tie_break, int) and tie_break in _TIE_BREAKS, "tie_break", tie_break, "a TopKTieBreak")
    return tie_break == TopKTieBreak.LARGE


def _check_scores(x, name="input"):
    require_fit(name, x, x.dim() == 2, "[rows, columns]", *_DTYPES)
    require(0 < x.shape[1] < 1 << 30, name, tuple(x.shape), "1 to 2^30 columns")


def _check_vectors(rows, vectors) -> dict[str, Any]:
    """The [rows] arguments as int32, contiguous."""
    for name, vector in vectors.items():
        if vector is None:
            continue
        require_fit(name, vector, vector.shape == (rows,), f"[{rows}]", torch.int32, torch.int64)
    return {name: None if vector is None else _narrow(vector).contiguous() for name, vector in vectors.items()}


def _narrow(vector: torch.Tensor) -> torch.Tensor:
    """As int32; what is beyond it is its end, and beyond any row."""
    if vector.dtype == torch.int32:
        return vector
    return vector.clamp(-(1 << 31), (1 << 31) - 1).to(torch.int32)


def _check_out(name, tensor, rows, k):
    require_fit(name, tensor, tensor.shape == (rows, k), f"[{rows}, {k}]", torch.int32)
    require(tensor.stride(1) == 1 or k == 1, name, tensor.stride(), "contiguous columns")


@custom_op("flashinfer::top_k", mutates_args=("values", "indices"))
def _top_k(
    input: torch.Tensor, k: int, sorted: bool, last: bool, values: torch.Tensor, indices: torch.Tensor
) -> None:
    if not len(input):
        return
    x = rows_of(input)
    problem = room.TopK("sorted" if sorted else "values", dtype_name(x.dtype), last, aligned=is_aligned(x))
    room.top_k(problem, x.device).run(x, k, None, None, (), (values, indices))


@custom_op("flashinfer::top_k_page_table_transform", mutates_args=("out", "raw"))
def _top_k_pages(
    input: torch.Tensor, k: int, last: bool, page_table: torch.Tensor, page_size: int, lengths: torch.Tensor,
    row_to_batch: torch.Tensor | None, starts: torch.Tensor | None, page_starts: torch.Tensor | None,
    out: torch.Tensor, raw: torch.Tensor | None,
) -> None:  # fmt: skip
    if not len(input):
        return
    x = rows_of(input)
    problem = room.TopK(
        "pages",
        dtype_name(x.dtype),
        last,
        starts=starts is not None,
        lengths=True,
        mapped=row_to_batch is not None,
        page_starts=page_starts is not None,
        raw=raw is not None,
        aligned=starts is None and is_aligned(x),
    )
    places = page_table, row_to_batch, page_starts, page_size
    room.top_k(problem, x.device).run(x, k, starts, lengths, places, (out, raw))


@custom_op("flashinfer::top_k_ragged_transform", mutates_args=("out",))
def _top_k_ragged(
    input: torch.Tensor, k: int, last: bool, offsets: torch.Tensor, lengths: torch.Tensor,
    starts: torch.Tensor | None, out: torch.Tensor,
) -> None:  # fmt: skip
    if not len(input):
        return
    x = rows_of(input)
    aligned = starts is None and is_aligned(x)
    problem = room.TopK("ragged", dtype_name(x.dtype), last, starts=starts is not None, lengths=True, aligned=aligned)
    room.top_k(problem, x.device).run(x, k, starts, lengths, (offsets,), (out, None))


@custom_op("flashinfer::top_k_varlen", mutates_args=("indices", "values"))
def _top_k_varlen(
    logits: torch.Tensor, seq_lens: torch.Tensor, k: int, compress_ratio: int, next_n: int, indices: torch.Tensor,
    values: torch.Tensor | None, backend: str,
) -> None:  # fmt: skip
    x = rows_of(logits)
    problem = room.TopK("columns", dtype_name(x.dtype), lengths=True, aligned=is_aligned(x), valued=values is not None)
    pinned = () if backend in _VARLEN_BACKENDS else (backend,)
    choice = room.top_k(problem, x.device, *pinned)
    if not len(x):
        return
    lengths = seq_lens
    if next_n > 1 or compress_ratio > 1 or seq_lens.dtype != torch.int32:
        steps = torch.arange(1 - next_n, 1, dtype=torch.int64, device=x.device)
        lengths = (seq_lens[:, None] + steps).flatten() // compress_ratio
        lengths = lengths.clamp(0, x.shape[1]).to(torch.int32)
    choice.run(x, k, None, lengths.contiguous(), (), (values, indices))
