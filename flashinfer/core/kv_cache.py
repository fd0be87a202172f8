"""The paged KV cache: its pages, the sequences that share them, and their tables."""

from __future__ import annotations

import math
from collections.abc import Iterable
from numbers import Integral

import numpy as np
import torch

from flashinfer._core.arguments import checked, named
from flashinfer._core.checks import as_dtype, require
from flashinfer._core.literals import KvLayout
from flashinfer.core.sequences import OutOfPages, Sequence, Tables
from flashinfer.page import append_paged_kv_cache

# Bytes: 4 TiB, more than a device has. What torch raises for more depends on the allocator.
_MOST_BYTES = 1 << 42


class PagedKVCache:
    """Keys and values of many sequences in pages of one size, and the allocator of those pages.

    A step of a serving loop is: `begin_forward` for each sequence that gets tokens, `append` of their keys and values
    and attention over `tables` in each layer, `end_forward`. Work on the cache is enqueued on the current stream; use
    one stream for all of it. Every method that takes sequences raises ValueError for one that was freed or that another
    cache made; any error leaves the cache as it was.

    Parameters
    ----------
    num_layers, num_kv_heads, head_dim : int
        Of the model.
    page_size, max_num_pages : int
        Tokens of a page, and pages of the cache; a page holds its tokens in every layer.
    device : torch.device or str
    data_type : torch.dtype or str
        Of the stored keys and values.

    Attributes
    ----------
    data : torch.Tensor
        [num_layers, max_num_pages, 2, page_size, num_kv_heads, head_dim], zero at first; `layer` gives one layer's.
    kv_layout : str
        "NHD".
    num_free_pages, num_used_pages, num_shared_pages : int
        Pages that no sequence has, that some sequence has, and that two or more have.
    sequences : tuple of Sequence
        The live sequences, in the order of creation.

    Raises
    ------
    ValueError
        A size below 1, or a cache of more than 4 TiB.

    Examples
    --------
    >>> import torch, flashinfer
    >>> cache = flashinfer.PagedKVCache(1, 2, 64, page_size=16, max_num_pages=8, device="cpu", data_type="float32")
    >>> sequence = cache.begin_forward(20)
    >>> cache.append(torch.randn(20, 2, 64), torch.randn(20, 2, 64))
    >>> cache.end_forward(sequence)
    >>> cache.num_free_pages, cache.tables().seq_lens
    (6, tensor([20], dtype=torch.int32))
    """

    kv_layout: KvLayout = "NHD"

    @checked
    @named(dtype="data_type")
    def __init__(
        self,
        num_layers: int,
        num_kv_heads: int,
        head_dim: int,
        page_size: int,
        max_num_pages: int,
        device: torch.device | str = "cuda",
        data_type: torch.dtype | str = torch.float16,
    ):
        names = ("num_layers", "num_kv_heads", "head_dim", "page_size", "max_num_pages")
        sizes = num_layers, num_kv_heads, head_dim, page_size, max_num_pages
        for name, size in zip(names, sizes):
            require(isinstance(size, (int, Integral)) and size >= 1, name, size, "an int of 1 or more")
        self.num_layers, self.num_kv_heads, self.head_dim = num_layers, num_kv_heads, head_dim
        self.page_size, self.max_num_pages = page_size, max_num_pages
        self.data_type = as_dtype(data_type, torch.float16)
        shape = (num_layers, max_num_pages, 2, page_size, num_kv_heads, head_dim)
        fits = math.prod(map(int, shape)) * self.data_type.itemsize <= _MOST_BYTES
        require(fits, *max(zip(names, sizes), key=lambda named: named[1]), "a cache of 4 TiB at most")
        self.data = torch.zeros(shape, dtype=self.data_type, device=device)
        self.device = self.data.device
        self._free = list(range(max_num_pages))[::-1]
        self._users = np.zeros(max_num_pages, np.int32)
        self._live: dict[int, Sequence] = {}
        self._next_id = 0
        # Of the batches asked for since the cache last changed.
        self._tables: dict[tuple[Sequence, ...], Tables] = {}

    @property
    def num_free_pages(self) -> int:
        """Pages that no sequence has."""
        return len(self._free)

    @property
    def num_used_pages(self) -> int:
        """Pages that some sequence has."""
        return self.max_num_pages - len(self._free)

    @property
    def num_shared_pages(self) -> int:
        """Pages that two sequences or more have."""
        return int((self._users > 1).sum())

    @property
    def sequences(self) -> tuple[Sequence, ...]:
        """The live sequences, in the order of creation."""
        return tuple(self._live.values())

    @checked
    def layer(self, layer_idx: int) -> torch.Tensor:
        """One layer of `data`, as the wrappers take it.

        Parameters
        ----------
        layer_idx : int
            0 to num_layers - 1.

        Returns
        -------
        torch.Tensor
            [max_num_pages, 2, page_size, num_kv_heads, head_dim]: a view, not a copy.

        Raises
        ------
        ValueError
            There is no such layer.
        """
        require(0 <= layer_idx < self.num_layers, "layer_idx", layer_idx, f"0 to {self.num_layers - 1}")
        return self.data[layer_idx]

    @checked
    def pages_needed(self, length: int, sequence: Sequence | None = None) -> int:
        """Free pages that `begin_forward(length, sequence)` would take, a copy of a shared last page included.

        Parameters
        ----------
        length : int
            Tokens to make room for, 0 or more.
        sequence : Sequence, optional
            The sequence that would grow; None is a new one.

        Returns
        -------
        int
            Pages.

        Raises
        ------
        ValueError
            A sequence that was freed, or of another cache.
        """
        if sequence is None:
            return self._pages_for(length)
        self._require_live(sequence)
        pages = self._pages_for(sequence.length + length) - sequence._count
        return pages + (length > 0 and self._writes_shared(sequence))

    def begin_forward(self, length: int, sequence: Sequence | None = None) -> Sequence:
        """Reserve room for more tokens of a sequence.

        Until `end_forward`, the sequence's tables count the reserved tokens as present, so that attention in this step
        sees the keys that `append` writes. A last page that is partly filled and shared is copied first.

        Parameters
        ----------
        length : int
            Tokens to make room for, 0 or more.
        sequence : Sequence, optional
            The sequence that grows; None makes a new one.

        Returns
        -------
        Sequence
            The one given, or the new one.

        Raises
        ------
        OutOfPages
            Too few pages are free.
        ValueError
            A negative length; a sequence with a reservation open.
        """
        length = _count("length", length)
        if sequence is not None:
            self._require_closed(sequence)
        needed = self.pages_needed(length, sequence)
        if needed > len(self._free):
            raise OutOfPages(needed, len(self._free), self.max_num_pages)
        if sequence is None:
            sequence = self._new()
        if needed:
            pages = self._take(needed)
            if self._writes_shared(sequence):
                self._replace_last(sequence, pages.pop())
            sequence._extend(pages)
        sequence.reserved, sequence._open = length, True
        self._tables.clear()
        return sequence

    def end_forward(self, sequence: Sequence, length: int | None = None) -> None:
        """Make the first `length` reserved tokens part of the sequence, and give back the room of the others.

        Parameters
        ----------
        sequence : Sequence
        length : int, optional
            Tokens to keep; None keeps all. A speculative step keeps those accepted.

        Raises
        ------
        ValueError
            No reservation is open; more tokens than reserved.
        """
        self._require_live(sequence)
        require(sequence._open, "sequence", sequence, "one between begin_forward and end_forward")
        length = sequence.reserved if length is None else length
        sequence.length += _count("length", length, sequence.reserved, "the tokens reserved")
        sequence.reserved, sequence._open = 0, False
        self._shrink(sequence)

    @checked
    @named(append_key="k", append_value="v", sequence="sequences")
    def append(
        self,
        k: torch.Tensor,
        v: torch.Tensor,
        layer_idx: int = 0,
        sequences: Sequence | Iterable[Sequence] | None = None,
    ) -> None:
        """Write the keys and values of all reserved tokens of some sequences, in one layer.

        Parameters
        ----------
        k, v : torch.Tensor
            [reserved tokens, num_kv_heads, head_dim] in the cache's dtype: the sequences' rows one after another.
        layer_idx : int
        sequences : Sequence or iterable of Sequence, optional
            None takes all live sequences in the order of creation; those without a reservation have no rows.

        Raises
        ------
        ValueError
            More or fewer rows than reserved; another shape, dtype, device or layer than the cache's.
        """
        tables = self.tables(sequences)
        layer = self.layer(layer_idx)
        for name, x in (("k", k), ("v", v)):
            shape = (tables.num_reserved, self.num_kv_heads, self.head_dim)
            allowed = f"{shape}: one row for each token reserved by begin_forward"
            require(tuple(x.shape) == shape, name, f"shape {tuple(x.shape)}", allowed)
        at = (tables.batch_indices, tables.positions)
        table = (tables.kv_indices, tables.kv_indptr, tables.last_page_len)
        append_paged_kv_cache(k, v, *at, layer, *table, kv_layout=self.kv_layout)

    def fork(self, sequence: Sequence, length: int | None = None) -> Sequence:
        """A new sequence of the first tokens of another, sharing its pages.

        Whichever of the two appends to a shared, partly filled page gets a copy of it first, at `begin_forward`. With
        a length that is a multiple of page_size no page is ever copied: this is how requests share a prompt's start.

        Parameters
        ----------
        sequence : Sequence
        length : int, optional
            Tokens to share; None shares all. Reserved tokens are not shared.

        Returns
        -------
        Sequence
            The new one, of `length` tokens and without a reservation.

        Raises
        ------
        ValueError
            More tokens than the sequence has.
        """
        self._require_live(sequence)
        length = sequence.length if length is None else length
        length = _count("length", length, sequence.length, "the tokens of the sequence")
        child = self._new()
        shared = sequence._table[: self._pages_for(length)]
        self._users[shared] += 1
        child._extend(shared)
        child.length = length
        return child

    def truncate(self, sequence: Sequence, length: int) -> None:
        """Keep the first `length` tokens of a sequence, and the pages they need.

        Parameters
        ----------
        sequence : Sequence
            Without an open reservation.
        length : int
            Tokens to keep, 0 or more.

        Raises
        ------
        ValueError
            More tokens than the sequence has; a reservation is open.
        """
        self._require_closed(sequence)
        sequence.length = _count("length", length, sequence.length, "the tokens of the sequence")
        self._shrink(sequence)

    def free(self, sequence: Sequence) -> None:
        """End a sequence, an open reservation of it included. Pages that no other sequence has become free.

        Parameters
        ----------
        sequence : Sequence
            Of this cache, and live.

        Raises
        ------
        ValueError
            It was freed before, or belongs to another cache.
        """
        self._require_live(sequence)
        del self._live[sequence.id]
        sequence.length = sequence.reserved = 0
        self._shrink(sequence)

    @named(sequence="sequences")
    def tables(self, sequences: Sequence | Iterable[Sequence] | None = None) -> Tables:
        """The page tables of some sequences, as one batch.

        They hold good until the cache changes, and are built once until then, so every layer of a step may ask for
        them. On a GPU they come in one asynchronous copy from pinned memory.

        Parameters
        ----------
        sequences : Sequence or iterable of Sequence, optional
            None takes all live sequences in the order of creation.

        Returns
        -------
        Tables
            int32 tensors on the cache's device, for `plan` of a wrapper.

        Raises
        ------
        ValueError
            A sequence that comes twice.
        """
        if sequences is None:
            batch = self.sequences
        else:
            some = isinstance(sequences, (Sequence, Iterable)) and not isinstance(sequences, torch.Tensor)
            require(some, "sequences", repr(sequences), "a Sequence, or an iterable of Sequence")
            batch = (sequences,) if isinstance(sequences, Sequence) else tuple(sequences)
        tables = self._tables.get(batch)
        if tables is None:
            for sequence in batch:
                self._require_live(sequence)
            require(len(set(batch)) == len(batch), "sequences", list(batch), "each sequence once")
            tables = self._tables[batch] = self._build_tables(batch)
        return tables

    def _build_tables(self, batch) -> Tables:
        n = len(batch)
        count = np.array([s._count for s in batch], np.int32)
        length = np.array([s.length for s in batch], np.int32)
        reserved = np.array([s.reserved for s in batch], np.int32)
        rows, present = int(reserved.sum()), length + reserved
        # All tables in one buffer, each on a 128-byte border: one copy to the device.
        parts, total = [], 0
        for size in (n + 1, int(count.sum()), n, n, n + 1, rows, rows):
            parts.append(slice(total, total + size))
            total += -(-size // 32) * 32
        host = torch.empty(total, dtype=torch.int32, device="cpu", pin_memory=self.device.type == "cuda")
        buffer = host.numpy()
        kv_indptr, kv_indices, last, seq_lens, qo_indptr, batch_indices, positions = (buffer[part] for part in parts)
        kv_indptr[0] = qo_indptr[0] = 0
        count.cumsum(out=kv_indptr[1:])
        reserved.cumsum(out=qo_indptr[1:])
        if n:
            np.concatenate([s._table[: s._count] for s in batch], out=kv_indices)
        last[:] = present - np.maximum(count - 1, 0) * self.page_size
        seq_lens[:] = present
        if rows:
            batch_indices[:] = np.arange(n, dtype=np.int32).repeat(reserved)
            positions[:] = np.arange(rows, dtype=np.int32) + (length - qo_indptr[:-1]).repeat(reserved)
        device = host.to(self.device, non_blocking=True)
        most = int(reserved.max()) if n else 0
        return Tables(*[device[part] for part in parts], num_reserved=rows, max_reserved=most)

    def _pages_for(self, tokens: int) -> int:
        return -(-tokens // self.page_size)

    def _require_live(self, sequence) -> None:
        if not isinstance(sequence, Sequence) or self._live.get(sequence.id) is not sequence:
            require(False, "sequence", sequence, "a live sequence of this cache, neither freed nor another cache's")

    def _require_closed(self, sequence) -> None:
        self._require_live(sequence)
        require(not sequence._open, "sequence", sequence, "one whose begin_forward was ended by end_forward")

    def _writes_shared(self, sequence) -> bool:
        """Whether the sequence's next token goes into a page that another sequence has too."""
        partly = sequence.length % self.page_size > 0
        return partly and bool(self._users[sequence._table[sequence._count - 1]] > 1)

    def _new(self) -> Sequence:
        sequence = self._live[self._next_id] = Sequence(self._next_id)
        self._next_id += 1
        self._tables.clear()
        return sequence

    def _take(self, count: int) -> list[int]:
        pages = self._free[: -count - 1 : -1]
        del self._free[-count:]
        self._users[pages] = 1
        return pages

    def _replace_last(self, sequence, page: int) -> None:
        shared = int(sequence._table[sequence._count - 1])
        self.data[:, page].copy_(self.data[:, shared])
        self._users[shared] -= 1
        sequence._table[sequence._count - 1] = page

    def _shrink(self, sequence) -> None:
        """Give back the pages past the sequence's tokens."""
        keep = self._pages_for(sequence.length + sequence.reserved)
        if keep < sequence._count:
            dropped = sequence._table[keep : sequence._count]
            self._users[dropped] -= 1
            # Last page first: taken again from the end, pages come in the order they had.
            self._free.extend(dropped[self._users[dropped] == 0].tolist()[::-1])
            sequence._count = keep
        self._tables.clear()


def _count(name: str, value, most: int | None = None, of: str = "") -> int:
    if not isinstance(value, Integral) or int(value) < 0 or (most is not None and int(value) > most):
        allowed = "an int of 0 or more" if most is None else f"an int from 0 to {most}, {of}"
        require(False, name, value, allowed)
    return int(value)
