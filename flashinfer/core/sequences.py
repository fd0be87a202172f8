"""What a paged KV cache hands out: sequences, the tables of a batch of them, and the error of too few pages."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch


class OutOfPages(ValueError):
    """Fewer pages are free than `PagedKVCache.begin_forward` needs; the cache is as it was.

    Attributes
    ----------
    needed, free, total : int
        Pages that the call needs, that are free, and that the cache has.
    """

    def __init__(self, needed: int, free: int, total: int):
        super().__init__(f"length: needs {needed} pages; allowed: up to the {free} free ones of {total}")
        self.needed, self.free, self.total = needed, free, total


class Sequence:
    """The tokens of one request in a `PagedKVCache`; made by its `begin_forward` and `fork`, ended by its `free`.

    Attributes
    ----------
    id : int
        Unique in the cache, growing in the order of creation.
    length : int
        Tokens the sequence has.
    reserved : int
        Tokens that the open `begin_forward` made room for; 0 after `end_forward`.
    """

    __slots__ = ("id", "length", "reserved", "_open", "_count", "_table")

    def __init__(self, id: int):
        self.id = id
        self.length = self.reserved = 0
        self._open = False
        # The first _count entries are pages; the rest is room to grow without copying at each step.
        self._count = 0
        self._table = np.empty(8, np.int32)

    @property
    def pages(self) -> tuple[int, ...]:
        """Page numbers, in the order of tokens."""
        return tuple(self._table[: self._count].tolist())

    def __repr__(self):
        return f"sequence {self.id} ({self.length} tokens, {self.reserved} reserved)"

    def _extend(self, pages) -> None:
        count = self._count + len(pages)
        if count > len(self._table):
            grown = np.empty(max(count, 2 * len(self._table)), np.int32)
            grown[: self._count] = self._table[: self._count]
            self._table = grown
        self._table[self._count : count] = pages
        self._count = count


@dataclass(frozen=True)
class Tables:
    """Page tables of a batch of sequences: int32 tensors on the cache's device. Reserved tokens count as present.

    Attributes
    ----------
    kv_indptr, kv_indices : torch.Tensor
        [batch + 1] and [pages]: sequence i has the pages kv_indices[kv_indptr[i]:kv_indptr[i + 1]].
    last_page_len, seq_lens : torch.Tensor
        [batch]: tokens in the last page (1 to page_size; 0 where a sequence has none), and in all.
    qo_indptr : torch.Tensor
        [batch + 1]: the reserved tokens of sequence i are rows qo_indptr[i] to qo_indptr[i + 1] of q, k and v.
    batch_indices, positions : torch.Tensor
        [num_reserved]: of each reserved token, its sequence's place in the batch, and its position there.
    num_reserved, max_reserved : int
        Reserved tokens: all sequences together, and the most of one. With max_reserved as `max_token_per_sequence` of
        a prefill plan, its tiles fit short queries though qo_indptr is on the device.
    """

    kv_indptr: torch.Tensor
    kv_indices: torch.Tensor
    last_page_len: torch.Tensor
    seq_lens: torch.Tensor
    qo_indptr: torch.Tensor
    batch_indices: torch.Tensor
    positions: torch.Tensor
    num_reserved: int
    max_reserved: int
