"""Attention over one prefix shared by all requests, its keys contiguous, and their own keys in pages."""

from __future__ import annotations

from typing import Any

import torch

from flashinfer._core.arguments import checked, named
from flashinfer._core.checks import require
from flashinfer._core.literals import KvLayout
from flashinfer.decode import BatchDecodeWithPagedKVCacheWrapper
from flashinfer.ops.attention.copies import OneWorkspace
from flashinfer.prefill import BatchPrefillWithPagedKVCacheWrapper, single_prefill_with_kv_cache

from .merge import merge_state_in_place

# What the wrappers behind these call their arguments.
_TABLES = {
    "indptr": "unique_kv_indptr", "indices": "unique_kv_indices", "last_page_len": "unique_kv_last_page_len",
    "paged_kv_indptr": "unique_kv_indptr", "paged_kv_indices": "unique_kv_indices",
    "paged_kv_last_page_len": "unique_kv_last_page_len", "head_dim_qk": "head_dim", "head_dim_vo": "head_dim",
}  # fmt: skip
_OPERANDS = {
    "k": "unique_kv_cache", "v": "unique_kv_cache", "paged_kv_cache": "unique_kv_cache", "indices": "unique_kv_cache",
    "paged_kv_indices": "unique_kv_cache", "q_data_type": "q", "kv_data_type": "unique_kv_cache",
}  # fmt: skip


class BatchDecodeWithSharedPrefixPagedKVCacheWrapper(OneWorkspace):
    """Decode attention of requests that share one prefix: its keys contiguous, each request's own keys paged.

    Parameters
    ----------
    float_workspace_buffer : torch.Tensor
        uint8 scratch on the compute device.
    kv_layout : str
        "NHD" or "HND", of the shared keys and of the pages.

    Examples
    --------
    >>> import torch, flashinfer
    >>> wrapper = flashinfer.BatchDecodeWithSharedPrefixPagedKVCacheWrapper(torch.empty(0, dtype=torch.uint8))
    >>> indptr, pages, last = torch.tensor([0, 1, 2]).int(), torch.tensor([3, 1]).int(), torch.tensor([4, 7]).int()
    >>> wrapper.begin_forward(indptr, pages, last, 8, 2, 64, 16, "float32")
    >>> k, v, cache = torch.randn(20, 2, 64), torch.randn(20, 2, 64), torch.randn(4, 2, 16, 2, 64)
    >>> wrapper.forward(torch.randn(2, 8, 64), k, v, cache).shape
    torch.Size([2, 8, 64])
    """

    _workspace_of = "_unique"

    def __init__(self, float_workspace_buffer: torch.Tensor, kv_layout: KvLayout = "NHD"):
        self._unique = BatchDecodeWithPagedKVCacheWrapper(float_workspace_buffer, kv_layout)
        self._kv_layout = kv_layout

    @checked
    @named(**_TABLES, q_data_type="data_type", kv_data_type="data_type")
    def begin_forward(
        self,
        unique_kv_indptr: torch.Tensor,
        unique_kv_indices: torch.Tensor,
        unique_kv_last_page_len: torch.Tensor,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim: int,
        page_size: int,
        data_type: str | torch.dtype = "float16",
    ) -> None:
        """Describe a batch; every later `forward` uses it.

        Parameters
        ----------
        unique_kv_indptr, unique_kv_indices, unique_kv_last_page_len : torch.Tensor
            Page table of the requests' own keys, as of `BatchDecodeWithPagedKVCacheWrapper.plan`.
        num_qo_heads, num_kv_heads, head_dim, page_size : int
        data_type : torch.dtype or str
            Of q, keys and values.

        Raises
        ------
        ValueError
            Whatever `BatchDecodeWithPagedKVCacheWrapper.plan` refuses.
        """
        table = (unique_kv_indptr, unique_kv_indices, unique_kv_last_page_len)
        self._unique.plan(*table, num_qo_heads, num_kv_heads, head_dim, page_size, data_type=data_type)

    @checked
    @named(**_OPERANDS)
    def forward(
        self,
        q: torch.Tensor,
        k_shared: torch.Tensor,
        v_shared: torch.Tensor,
        unique_kv_cache: torch.Tensor | tuple[torch.Tensor, torch.Tensor],
    ) -> torch.Tensor:
        """Attend from one token of each request to the shared keys and to its own.

        Parameters
        ----------
        q : torch.Tensor
            [batch, num_qo_heads, head_dim].
        k_shared, v_shared : torch.Tensor
            [shared_len, num_kv_heads, head_dim] (NHD) or [num_kv_heads, shared_len, head_dim] (HND); shared_len may
            be 0.
        unique_kv_cache : torch.Tensor or (torch.Tensor, torch.Tensor)
            As of `BatchDecodeWithPagedKVCacheWrapper.run`.

        Returns
        -------
        torch.Tensor
            Shape of q.

        Raises
        ------
        ValueError
            Before `begin_forward`; tensors other than planned, or shared ones of another shape.
        """
        v, s = self._unique.run(q, unique_kv_cache, return_lse=True)
        merge_state_in_place(v, s, *_shared_part(q, k_shared, v_shared, self._kv_layout))
        return v


class BatchPrefillWithSharedPrefixPagedKVCacheWrapper(OneWorkspace):
    """Prefill and append attention of requests that share one prefix: its keys contiguous, each one's own paged.

    Parameters
    ----------
    float_workspace_buffer, kv_layout
        As in `BatchDecodeWithSharedPrefixPagedKVCacheWrapper`.

    Examples
    --------
    >>> import torch, flashinfer
    >>> wrapper = flashinfer.BatchPrefillWithSharedPrefixPagedKVCacheWrapper(torch.empty(0, dtype=torch.uint8))
    >>> qo_indptr, indptr = torch.tensor([0, 2, 5]).int(), torch.tensor([0, 1, 2]).int()
    >>> pages, last = torch.tensor([3, 1]).int(), torch.tensor([4, 7]).int()
    >>> wrapper.begin_forward(qo_indptr, indptr, pages, last, 8, 2, 64, 16)
    >>> k, v, cache = torch.randn(20, 2, 64), torch.randn(20, 2, 64), torch.randn(4, 2, 16, 2, 64)
    >>> wrapper.forward(torch.randn(5, 8, 64), k, v, cache, causal=True).shape
    torch.Size([5, 8, 64])
    """

    _workspace_of = "_unique"

    def __init__(self, float_workspace_buffer: torch.Tensor, kv_layout: KvLayout = "NHD"):
        self._unique = BatchPrefillWithPagedKVCacheWrapper(float_workspace_buffer, kv_layout)
        self._kv_layout = kv_layout
        # Tables and sizes of the batch, and the options that it was planned with.
        self._batch: tuple[Any, ...] = ()
        self._planned: dict[str, Any] | None = None

    @checked
    def begin_forward(
        self,
        qo_indptr: torch.Tensor,
        paged_kv_indptr: torch.Tensor,
        paged_kv_indices: torch.Tensor,
        paged_kv_last_page_len: torch.Tensor,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim: int,
        page_size: int,
    ) -> None:
        """Describe a batch; every later `forward` uses it. The first one plans it, since it knows the dtypes.

        Parameters
        ----------
        qo_indptr, paged_kv_indptr, paged_kv_indices, paged_kv_last_page_len : torch.Tensor
            Rows of q of each request and the page table of its own keys, as of
            `BatchPrefillWithPagedKVCacheWrapper.plan`.
        num_qo_heads, num_kv_heads, head_dim, page_size : int

        Raises
        ------
        ValueError
            A table that is not a tensor; what tables hold is checked by `forward`, which plans.

        Notes
        -----
        Tables are copied, since `forward` may plan again. Page ids on the wrapper's device are kept by reference.
        """
        there = paged_kv_indices.device == self._unique.device
        indices = paged_kv_indices if there else paged_kv_indices.clone()
        table = qo_indptr.clone(), paged_kv_indptr.clone(), indices, paged_kv_last_page_len.clone()
        self._batch = (*table, num_qo_heads, num_kv_heads, head_dim, page_size)
        self._planned = None

    def prewarm_paged_kv_stride_variant(self, variant: str = "independent") -> None:
        """Do nothing: strides are arguments of kernels here, and no variant of them needs warming.

        Parameters
        ----------
        variant : str
            Not read.
        """
        self._unique.prewarm_paged_kv_stride_variant(variant)

    @checked
    @named(**_OPERANDS)
    def forward(
        self,
        q: torch.Tensor,
        k_shared: torch.Tensor,
        v_shared: torch.Tensor,
        unique_kv_cache: torch.Tensor | tuple[torch.Tensor, torch.Tensor],
        causal: bool = False,
        use_fp16_qk_reduction: bool = False,
        sm_scale: float | None = None,
        rope_scale: float | None = None,
        rope_theta: float | None = None,
    ) -> torch.Tensor:
        """Attend from each request's rows to the shared keys and to its own.

        Parameters
        ----------
        q : torch.Tensor
            [rows, num_qo_heads, head_dim].
        k_shared, v_shared : torch.Tensor
            [shared_len, num_kv_heads, head_dim] (NHD) or [num_kv_heads, shared_len, head_dim] (HND); shared_len may
            be 0. Seen whole by every row.
        unique_kv_cache : torch.Tensor or (torch.Tensor, torch.Tensor)
            As of `BatchPrefillWithPagedKVCacheWrapper.run`.
        causal : bool
            Applies to a request's own keys: its last row stands at the last of them.
        use_fp16_qk_reduction, sm_scale, rope_scale, rope_theta
            As of `single_prefill_with_kv_cache`, without position encoding.

        Returns
        -------
        torch.Tensor
            Shape of q.

        Raises
        ------
        ValueError
            Before `begin_forward`; whatever `BatchPrefillWithPagedKVCacheWrapper.plan` refuses; tensors other than
            planned, or shared ones of another shape.
        """
        require(bool(self._batch), "forward", "no batch", "after begin_forward")
        cache = unique_kv_cache[0] if isinstance(unique_kv_cache, (tuple, list)) else unique_kv_cache
        options: dict[str, Any] = dict(
            use_fp16_qk_reduction=use_fp16_qk_reduction, sm_scale=sm_scale, rope_scale=rope_scale, rope_theta=rope_theta
        )
        plan = dict(options, causal=causal, q_data_type=q.dtype, kv_data_type=cache.dtype)
        if plan != self._planned:
            self._unique.plan(*self._batch, **plan)
            self._planned = plan
        v, s = self._unique.run(q, unique_kv_cache, return_lse=True)
        merge_state_in_place(v, s, *_shared_part(q, k_shared, v_shared, self._kv_layout, **options))
        return v


@named(k="k_shared", v="v_shared")
def _shared_part(q, k_shared, v_shared, kv_layout, **options) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention of all rows to the shared keys, and its log-sum-exp."""
    fits = v_shared.dim() == 3 and v_shared.shape[-1] == q.shape[-1]
    require(fits, "v_shared", tuple(v_shared.shape), f"3 axes, the last of {q.shape[-1]} elements, as q")
    return single_prefill_with_kv_cache(q, k_shared, v_shared, kv_layout=kv_layout, return_lse=True, **options)
