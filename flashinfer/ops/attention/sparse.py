"""Block-sparse attention as a batch: a block row is a request, and its block columns are pages."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache, partial

import torch

from flashinfer._core import env, workspace
from flashinfer._core.checks import indptr_values, require
from flashinfer.ops.attention.kernels import kernels_of
from flashinfer.ops.attention.masks import custom_mask_table
from flashinfer.ops.attention.options import PlanOptions, tile_rows
from flashinfer.ops.attention.plan import Plan
from flashinfer.ops.attention.split import Limits
from flashinfer.ops.attention.tables import Table
from flashinfer.ops.attention.variants import AttentionVariant


@lru_cache(maxsize=1)
def causal_variant() -> AttentionVariant:
    """The causal mask of gathered blocks. It loads Triton."""
    from flashinfer.ops.attention._device.masks import causal_blocks

    names = ("kv_indptr", "kv_indices", "first_keys", "first_queries", "q_lens")
    params = {name: "*i32" for name in names} | {"page_size": "i32", "ahead": "i32"}
    return AttentionVariant(mask=causal_blocks, params=params)


@dataclass
class Blocks:
    """Block rows and the pages that their queries see.

    Attributes
    ----------
    table : Table
        A request for each block row.
    page_size : int
    q_rows, longest_q : int
        Queries of all requests, and of the longest.
    params : dict
        What the functions of `causal_variant` are given.
    """

    table: Table
    page_size: int
    q_rows: int
    longest_q: int
    params: dict

    @property
    def kv_tokens(self) -> int:
        return self.table.kv_indices.shape[0] * self.page_size


def uniform_blocks(indptr: torch.Tensor, indices: torch.Tensor, rows: int, columns: int, queries: int,
                   keys: int) -> Blocks:  # fmt: skip
    """Of a BSR matrix [queries, keys] with blocks of rows x columns, the last row of which may have fewer queries.

    Its `indptr` and `indices` are int32 on the device.
    """
    count, device = indptr.shape[0] - 1, indptr.device
    full = torch.full((max(count, 1),), columns, dtype=torch.int32, device=device)[:count]
    qo_indptr = torch.arange(0, (count + 1) * rows, rows, dtype=torch.int32, device=device).clamp_(max=queries)
    table, firsts = Table(qo_indptr, indptr, full, indices), qo_indptr[:-1]
    params = dict(
        kv_indptr=indptr, kv_indices=indices, first_keys=torch.zeros_like(firsts), first_queries=firsts,
        q_lens=qo_indptr.diff(), page_size=columns, ahead=keys - queries,
    )  # fmt: skip
    return Blocks(table, columns, queries, rows, params)


def per_head_blocks(
    chosen: torch.Tensor, row_sizes: torch.Tensor, column_sizes: torch.Tensor, group: int, device: torch.device
) -> Blocks:
    """Of a map for each KV head, with blocks of any sizes. A request for each (KV head, block row).

    Query rows are counted in heads laid one after another: row m of KV head h, for the first query head of its group,
    is row h * group * qo_len + m.

    Parameters
    ----------
    chosen : bool Tensor [kv_heads, block_rows, block_columns]
    row_sizes, column_sizes : int Tensor [kv_heads, block_rows] and [kv_heads, block_columns]
        On the host, as `chosen`.
    group : int
        Query heads per KV head.
    device : torch.device
    """
    kv_heads, block_rows = row_sizes.shape
    on_host = dict(dtype=torch.int64, device="cpu")
    qo_len, kv_len = int(row_sizes[0].sum()), int(column_sizes[0].sum())
    # Pages as large as lets every block begin on one.
    divisor = math.gcd(*column_sizes.flatten().tolist()) or 1
    boxed = math.gcd(divisor, 128)
    page_size = boxed if boxed >= 16 else divisor
    pages = column_sizes // page_size
    first_page = pages.cumsum(1) - pages + torch.arange(kv_heads, **on_host)[:, None] * (kv_len // page_size)
    head, row, column = chosen.nonzero(as_tuple=True)
    counts, starts = pages[head, column], first_page[head, column]
    ends = counts.cumsum(0)
    within = torch.arange(int(ends[-1]) if len(ends) else 0, **on_host) - (ends - counts).repeat_interleave(counts)
    indices = starts.repeat_interleave(counts) + within
    of_row = torch.zeros(kv_heads * block_rows, **on_host).index_add_(0, head * block_rows + row, counts)
    first_query = row_sizes.cumsum(1) - row_sizes
    heads = torch.arange(kv_heads, **on_host)[:, None]
    on_device = lambda x: x.flatten().to(torch.int32).to(device)
    indptr = on_device(torch.nn.functional.pad(of_row.cumsum(0), (1, 0)))
    q_lens, indices = on_device(row_sizes), on_device(indices)
    table = Table(
        on_device(first_query + heads * (group * qo_len)), indptr, kv_indices=indices, q_lens=q_lens,
        last_page_len=torch.full_like(q_lens, page_size),
    )  # fmt: skip
    params = dict(
        kv_indptr=indptr, kv_indices=indices, first_queries=on_device(first_query), q_lens=q_lens,
        first_keys=on_device((heads * kv_len).expand(kv_heads, block_rows)), page_size=page_size, ahead=kv_len - qo_len,
    )  # fmt: skip
    longest = int(row_sizes.max()) if row_sizes.numel() else 0
    return Blocks(table, page_size, int(row_sizes.sum()), longest, params)


def block_mask_bits(mask: torch.Tensor, indptr: torch.Tensor) -> torch.Tensor:
    """Masks of blocks [blocks, rows, columns] as those of block rows, flat: [rows, keys of the row] each."""
    count, rows, columns = mask.shape
    indptr = indptr.long()
    block = torch.arange(count, dtype=torch.int64, device=mask.device)
    row = torch.searchsorted(indptr, block, right=True) - 1
    keys = (indptr[row + 1] - indptr[row]) * columns
    number = block - indptr[row]
    r, c = (torch.arange(n, dtype=torch.int64, device=mask.device) for n in (rows, columns))
    at = (indptr[row] * rows * columns + number * columns)[:, None, None] + (keys[:, None] * r)[:, :, None] + c
    flat = torch.empty(mask.numel(), dtype=mask.dtype, device=mask.device)
    flat[at.flatten()] = mask.flatten()
    return flat


def plan_blocks(asked: PlanOptions, blocks: Blocks, device: torch.device, backend: str, given: torch.Tensor,
                custom_mask=None, packed_custom_mask=None) -> Plan:  # fmt: skip
    """The plan of block rows.

    `given` is a caller's workspace for partial results; a small one is replaced by our own.
    """
    table, masked = blocks.table, custom_mask is not None or packed_custom_mask is not None
    custom_mask_table(table, asked.page_size, custom_mask, packed_custom_mask)
    kernels = kernels_of(asked, tile_rows(blocks.longest_q, asked.group), masked, device, backend)
    plan = Plan(kernels, partial(_scratch, given, device), None, env.DEBUG.is_on())
    plan.fill(table, Limits(table.batch_size, blocks.q_rows, blocks.kv_tokens))
    return plan


def _scratch(given: torch.Tensor, device: torch.device, count: int) -> torch.Tensor:
    fits = given.is_contiguous() and given.data_ptr() % 16 == 0
    return workspace.take(device, count, given if fits else None)


def as_pages(x: torch.Tensor, page_size: int) -> torch.Tensor:
    """Keys of each head [kv_heads, kv_len, dim] as the pages of one head [pages, page_size, 1, dim]."""
    heads, rows, dim = x.shape
    step = page_size * x.stride(1)
    if x.stride(2) != 1 or (heads > 1 and x.stride(0) != rows // page_size * step):
        x = x.contiguous()
        step = page_size * dim
    shape = heads * rows // page_size, page_size, 1, dim
    return x.as_strided(shape, (step, x.stride(1), dim, 1))


def as_rows(x: torch.Tensor, kv_heads: int) -> torch.Tensor | None:
    """Rows of each head [heads, rows, dim] as `per_head_blocks` counts them: [all rows, group, dim], a view.

    None where strides make none.
    """
    heads, rows, dim = x.shape
    group = heads // kv_heads
    if not x.numel():
        return x.new_empty(max((heads - group + 1) * rows, 0), group, dim)
    # Of one row, the stride from row to row is any number.
    step = x.stride(0) if rows == 1 else x.stride(1)
    if x.stride(2) != 1 or (heads > 1 and x.stride(0) != rows * step):
        return None
    return x.as_strided(((heads - group + 1) * rows, group, dim), (step, rows * step, 1))


def per_head_lse(lse: torch.Tensor, kv_heads: int, rows: int) -> torch.Tensor:
    """The log-sum-exp [all rows, group] of such rows as [heads, rows]."""
    group = lse.shape[1]
    shape, strides = (kv_heads, group, rows), (group * rows * group, 1, group)
    return lse.as_strided(shape, strides).reshape(kv_heads * group, rows)


def check_sizes(name: str, sizes: torch.Tensor, shape: tuple[int, int]) -> torch.Tensor:
    """Block sizes of each head, as int64 on the host; every head has as many rows. Waits for a device."""
    require(tuple(sizes.shape) == shape, name, tuple(sizes.shape), str(shape))
    sizes = sizes.to("cpu", torch.int64)
    require(bool((sizes >= 0).all()), name, f"{int(sizes.min())}" if sizes.numel() else "none", "0 or more")
    totals = sizes.sum(1).tolist()
    require(len(set(totals)) <= 1, name, f"sums {totals}", "the same sum for every head")
    return sizes


def check_blocks(indptr: torch.Tensor, indices: torch.Tensor, columns: int) -> int:
    """Check maps on the host. Returns the first offset; 0 where only the device knows."""
    if indptr.is_cuda or not indptr.numel():
        return 0
    offsets = indptr_values("indptr", indptr, indices.shape[0], "the length of indices", sliced=True)
    used = indices[offsets[0] : offsets[-1]]
    if not indices.is_cuda and used.numel():
        low, high = (int(x) for x in used.aminmax())
        require(low >= 0 and high < columns, "indices", f"block columns {low} ... {high}", f"0 ... {columns - 1}")
    return offsets[0]


def of_groups(block_mask: torch.Tensor, group: int) -> torch.Tensor:
    """Maps of each KV head, from those of its query heads."""
    by_head = block_mask.unflatten(0, (-1, group))
    alike = bool((by_head == by_head[:, :1]).all())
    require(alike, "block_mask", "query heads of one KV head that differ", "the same blocks for each of them")
    return by_head[:, 0]


def convert_bsr_mask_layout(mask: torch.Tensor, indptr: torch.Tensor) -> torch.Tensor:
    """The masks of blocks as those of block rows, which `BlockSparseAttentionWrapper.plan` takes in bits.

    Parameters
    ----------
    mask : Tensor [blocks, R, C]
        Of each block, as in `BlockSparseAttentionWrapper.plan`.
    indptr : int Tensor [block rows + 1]
        Where the blocks of each block row begin.

    Returns
    -------
    Tensor [blocks * R * C]
        Of each block row [R, keys of its blocks], row-major, one block row after the other; mask's dtype.

    Raises
    ------
    ValueError
        A mask of another number of axes, or of another number of blocks than indptr ends with.

    Examples
    --------
    >>> import torch, flashinfer
    >>> mask = torch.tensor([[[1, 2], [3, 4]], [[5, 6], [7, 8]]])
    >>> flashinfer.sparse.convert_bsr_mask_layout(mask, torch.tensor([0, 2])).tolist()
    [1, 2, 5, 6, 3, 4, 7, 8]
    """
    require(mask.dim() == 3, "mask", tuple(mask.shape), "[blocks, R, C]")
    require(indptr.dim() == 1 and indptr.numel() > 0, "indptr", tuple(indptr.shape), "[block rows + 1]")
    require(int(indptr[-1]) == len(mask), "mask", f"{len(mask)} blocks", f"{int(indptr[-1])}, as indptr has")
    return block_mask_bits(mask, indptr.to(mask.device))
