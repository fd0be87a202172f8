"""Attention over a PagedKVCache, without index arithmetic in the caller."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from flashinfer._core.arguments import checked, named
from flashinfer._core.checks import as_dtype, require
from flashinfer.decode import BatchDecodeWithPagedKVCacheWrapper
from flashinfer.prefill import BatchPrefillWithRaggedKVCacheWrapper

from .kv_cache import PagedKVCache, Sequence


class _OverCache:
    """What the two attention classes share: the model's sizes, checked against the cache's."""

    def __init__(self, kv_cache: PagedKVCache, num_heads, kv_heads, head_dim, sm_scale, dtype):
        require(kv_heads == kv_cache.num_kv_heads, "kv_heads", kv_heads, f"{kv_cache.num_kv_heads}, as the cache has")
        require(head_dim == kv_cache.head_dim, "head_dim", head_dim, f"{kv_cache.head_dim}, as the cache has")
        require(num_heads >= 1 and num_heads % kv_heads == 0, "num_heads", num_heads, f"a multiple of {kv_heads}")
        self.kv_cache = kv_cache
        self.num_heads, self.kv_heads, self.head_dim = num_heads, kv_heads, head_dim
        self.sm_scale, self.dtype = sm_scale, as_dtype(dtype, kv_cache.data_type)

    def _workspace(self) -> torch.Tensor:
        # Wrappers allocate what a batch needs when the workspace they are given is smaller.
        return torch.empty(0, dtype=torch.uint8, device=self.kv_cache.device)


class BatchDecodeWithPagedKVCache(_OverCache):
    """Decode attention of one new token per sequence over a `PagedKVCache`.

    Parameters
    ----------
    kv_cache : PagedKVCache
    num_heads, kv_heads, head_dim : int
        Query heads, KV heads and head size; the last two have to be the cache's.
    sm_scale : float, optional
        Factor of the logits; None is 1 / sqrt(head_dim).
    dtype : torch.dtype or str, optional
        Of q; None is the cache's.

    Examples
    --------
    >>> import torch, flashinfer
    >>> cache = flashinfer.PagedKVCache(1, 2, 64, page_size=16, max_num_pages=8, device="cpu", data_type="float32")
    >>> sequence = cache.begin_forward(20)
    >>> cache.append(torch.randn(20, 2, 64), torch.randn(20, 2, 64))
    >>> decode = flashinfer.BatchDecodeWithPagedKVCache(cache, 8, 2, 64, dtype=torch.float32)
    >>> decode.decode(torch.randn(1, 1, 8, 64)).shape
    torch.Size([1, 1, 8, 64])
    """

    @checked
    def __init__(
        self,
        kv_cache: PagedKVCache,
        num_heads: int,
        kv_heads: int,
        head_dim: int,
        sm_scale: float | None = None,
        dtype: torch.dtype | str | None = None,
    ):
        super().__init__(kv_cache, num_heads, kv_heads, head_dim, sm_scale, dtype)
        self._wrapper = BatchDecodeWithPagedKVCacheWrapper(self._workspace(), kv_cache.kv_layout)
        self._planned = None

    @checked
    @named(sequence="sequences", append_key="k", append_value="v")
    def decode(
        self, q: torch.Tensor, layer_idx: int = 0, sequences: Sequence | Iterable[Sequence] | None = None
    ) -> torch.Tensor:
        """Attend from the last token of each sequence to all its tokens, reserved ones included, in one layer.

        Planned when the cache or the batch has changed, not for every layer.

        Parameters
        ----------
        q : torch.Tensor
            [batch, 1, num_heads, head_dim].
        layer_idx : int
        sequences : Sequence or iterable of Sequence, optional
            The batch; None takes all live sequences of the cache in the order of creation.

        Returns
        -------
        torch.Tensor
            Shape and dtype of q.

        Raises
        ------
        ValueError
            q of another shape or dtype; another number of sequences; a sequence that was freed or comes twice.
        """
        tables = self.kv_cache.tables(sequences)
        shape = (tables.seq_lens.shape[0], 1, self.num_heads, self.head_dim)
        require(tuple(q.shape) == shape, "q", f"shape {tuple(q.shape)}", f"{shape}, one token of each sequence")
        layer = self.kv_cache.layer(layer_idx)
        if tables is not self._planned:
            sizes = (self.num_heads, self.kv_heads, self.head_dim, self.kv_cache.page_size)
            table = (tables.kv_indptr, tables.kv_indices, tables.last_page_len)
            types: dict[str, Any] = dict(q_data_type=self.dtype, kv_data_type=self.kv_cache.data_type)
            self._wrapper.plan(*table, *sizes, **types, sm_scale=self.sm_scale)
            self._planned = tables
        return self._wrapper.run(q.squeeze(1), layer).unsqueeze(1)


class BatchPrefillWithRaggedKVCache(_OverCache):
    """Attention of prompts over keys and values that stand one request after another, not in pages.

    Parameters
    ----------
    kv_cache : PagedKVCache
        Gives the device, the KV heads and the head size; its pages are neither read nor written.
    num_heads, kv_heads, head_dim, sm_scale, dtype
        As in `BatchDecodeWithPagedKVCache`.

    Examples
    --------
    >>> import torch, flashinfer
    >>> cache = flashinfer.PagedKVCache(1, 2, 64, page_size=16, max_num_pages=8, device="cpu", data_type="float32")
    >>> prefill, indptr = flashinfer.BatchPrefillWithRaggedKVCache(cache, 8, 2, 64), torch.tensor([0, 3, 5]).int()
    >>> prefill.prefill(torch.randn(5, 8, 64), torch.randn(5, 2, 64), torch.randn(5, 2, 64), indptr).shape
    torch.Size([5, 8, 64])
    """

    @checked
    def __init__(
        self,
        kv_cache: PagedKVCache,
        num_heads: int,
        kv_heads: int,
        head_dim: int,
        sm_scale: float | None = None,
        dtype: torch.dtype | str | None = None,
    ):
        super().__init__(kv_cache, num_heads, kv_heads, head_dim, sm_scale, dtype)
        self._wrapper = BatchPrefillWithRaggedKVCacheWrapper(self._workspace(), kv_cache.kv_layout)

    @checked
    @named(sequence="sequences", append_key="k", append_value="v")
    def prefill(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        qo_indptr: torch.Tensor,
        kv_indptr: torch.Tensor | None = None,
        causal: bool = True,
    ) -> torch.Tensor:
        """Attend from each request's queries to its own keys.

        Parameters
        ----------
        q : torch.Tensor
            [tokens, num_heads, head_dim].
        k, v : torch.Tensor
            [keys, kv_heads, head_dim].
        qo_indptr, kv_indptr : torch.Tensor
            int32 [batch + 1]: rows of q, and of k and v, of each request. kv_indptr None is qo_indptr.
        causal : bool
            Each query sees keys up to its own position, the last query being at the last key.

        Returns
        -------
        torch.Tensor
            Shape and dtype of q.

        Raises
        ------
        ValueError
            A tensor of another shape, dtype or device; an indptr that decreases.
        """
        kv_indptr = qo_indptr if kv_indptr is None else kv_indptr
        sizes = (self.num_heads, self.kv_heads, self.head_dim)
        types: dict[str, Any] = dict(q_data_type=self.dtype, kv_data_type=k.dtype)
        self._wrapper.plan(qo_indptr, kv_indptr, *sizes, causal=causal, **types, sm_scale=self.sm_scale)
        return self._wrapper.run(q, k, v)
