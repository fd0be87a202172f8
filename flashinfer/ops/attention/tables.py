"""Where the requests of a batch lie: page tables, offsets and lengths on the compute device."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from flashinfer._core.checks import require
from flashinfer.ops.attention.split import Limits

# The order of a plan's tables: qo_indptr, kv_indptr, last_page_len or kv_len_arr, kv_indices. A caller may have other
# names for them.
NAMES = ("qo_indptr", "kv_indptr", "last_page_len", "kv_indices")
BLOCK_NAMES = ("qo_indptr", "kv_indptr", "kv_lens", "kv_indices")
QO_INDPTR, KV_INDPTR, LENGTHS, KV_INDICES = range(4)


@dataclass
class Table:
    """The ragged description of a batch, int32 on the compute device, and what the host knows of it.

    Queries of a request are given by `qo_indptr`, by `q_lens` (beginning where `qo_indptr` says, or `q_len` rows apart,
    or following one another), or by `q_len` where all are alike; its keys by `kv_indptr` (with `last_page_len` if
    paged), or by `kv_lens` (beginning where `kv_indptr` says, or `kv_stride` apart, or following one another).

    Attributes
    ----------
    qo_indptr : Tensor [batch + 1], optional
        Query rows of each request.
    kv_indptr : Tensor [batch + 1], optional
        Paged: entries of kv_indices of each request. Ragged: rows of k and v.
    last_page_len : Tensor [batch], optional
        Tokens in the last page of each request.
    kv_indices : Tensor [pages used], optional
        Page ids.
    mask : uint8 Tensor, optional
        Custom mask, one bit per (query, key), row-major by request, each request starting on a byte, low bit first.
    mask_indptr : Tensor [batch + 1], optional
        First byte of each request in `mask`.
    q_len : int
        Rows of q from one request to the next, all of them its queries unless `q_lens` says less; 0 for none.
    q_lens : Tensor [batch], optional
        Query rows of each request.
    kv_lens : Tensor [batch], optional
        Keys of each request.
    kv_stride : int
        Entries of kv_indices, or rows of k and v, from one request to the next, as in a rectangular block table; 0 for
        none.
    uniform_q_len : int
        Queries of every request where the host knows that `qo_indptr` gives each as many; 0 for none.
    each_kv : int
        Keys of every request where the host knows that `kv_lens` gives each as many; 0 for none.
    longest_q : int
        A bound on query lengths, as the caller has it; 0 where it is unknown.
    rows, kv_entries : int
        The last offsets of qo_indptr and kv_indptr; -1 where only the device knows. The first may be any: what lies
        before is of no request.
    first_row : int
        The first offset of qo_indptr; 0 where only the device knows.
    names, operands : tuple of str
        What the caller calls the first four tables; and queries, keys and values.
    """

    qo_indptr: torch.Tensor | None = None
    kv_indptr: torch.Tensor | None = None
    last_page_len: torch.Tensor | None = None
    kv_indices: torch.Tensor | None = None
    mask: torch.Tensor | None = None
    mask_indptr: torch.Tensor | None = None
    q_len: int = 0
    q_lens: torch.Tensor | None = None
    kv_lens: torch.Tensor | None = None
    kv_stride: int = 0
    uniform_q_len: int = 0
    each_kv: int = 0
    longest_q: int = 0
    rows: int = -1
    kv_entries: int = -1
    first_row: int = 0
    names: tuple[str, ...] = NAMES
    operands: tuple[str, ...] = ("q", "k", "v")

    def copy(self) -> Table:
        """Another Table of the same tensors, in a quarter of the time of dataclasses.replace."""
        new = object.__new__(Table)
        new.__dict__.update(self.__dict__)
        return new

    @property
    def each_q(self) -> int:
        """Rows of q that every request has; 0 where they differ."""
        return self.q_len or self.uniform_q_len

    def limits(self, page_size: int) -> Limits:
        """Bounds of the batch that cost no wait for the device; `page_size` 0 for ragged."""
        batch, each = self.batch_size, self.each_q
        rows = batch * each if each else self.rows
        if rows < 0 and self.longest_q:
            rows = batch * self.longest_q
        keys = self.kv_indices.shape[0] * page_size if page_size else self.kv_entries
        return Limits(batch, rows, keys, each)

    @property
    def batch_size(self) -> int:
        for lens in (self.kv_lens, self.q_lens):
            if lens is not None:
                return lens.shape[0]
        return (self.kv_indptr if self.qo_indptr is None else self.qo_indptr).shape[0] - 1

    @property
    def encoding(self) -> tuple[str, str]:
        """Where lengths of queries and of keys are: what the scheduling kernel is compiled for."""
        if self.q_lens is None:
            q = "uniform" if self.q_len else "indptr"
        else:
            q = "padded" if self.q_len else "packed" if self.qo_indptr is None else "lens"
        if self.kv_lens is None:
            return q, "indptr" if self.last_page_len is None else "pages"
        return q, "padded" if self.kv_stride else "packed" if self.kv_indptr is None else "lens"

    def lengths(self) -> tuple[torch.Tensor | None, ...]:
        """Where queries begin, their number, where keys begin, their number; None for what no tensor has."""
        indptr = None if self.q_len else self.qo_indptr
        return indptr, self.q_lens, self.kv_indptr, self.last_page_len if self.kv_lens is None else self.kv_lens

    def addresses(self) -> list[int]:
        """Of `lengths`, 0 for None."""
        return [0 if t is None else t.data_ptr() for t in self.lengths()]

    def q_spans(self) -> tuple[torch.Tensor, torch.Tensor]:
        """First query row, and number of query rows, of each request; int64."""
        indptr, lens, *_ = (None if t is None else t.long() for t in self.lengths())
        if lens is None:
            if indptr is not None:
                return indptr[:-1], indptr[1:] - indptr[:-1]
            given = self.kv_indptr if self.kv_lens is None else self.kv_lens
            lens = torch.full((self.batch_size,), self.q_len, dtype=torch.int64, device=given.device)
        if self.q_len:
            return torch.arange(self.batch_size, device=lens.device) * self.q_len, lens
        return _starts(lens) if indptr is None else indptr[: self.batch_size], lens

    def kv_spans(self, page_size: int) -> tuple[torch.Tensor, torch.Tensor]:
        """First row, or entry of kv_indices, and number of keys, of each request; int64. `page_size` 0 for ragged."""
        lens = None if self.kv_lens is None else self.kv_lens.long().clamp(min=0)
        if self.kv_stride:
            return torch.arange(self.batch_size, device=lens.device) * self.kv_stride, lens
        if self.kv_indptr is None:
            return _starts(lens), lens
        indptr = self.kv_indptr.long()
        if lens is None:
            entries = indptr[1:] - indptr[:-1]
            lens = ((entries - 1) * page_size + self.last_page_len).clamp(min=0) if page_size else entries
        return indptr[: self.batch_size], lens


def _starts(lens: torch.Tensor) -> torch.Tensor:
    return lens.cumsum(0) - lens


def graph_buffers(device: torch.device, names: dict[str, str], **buffers: torch.Tensor | None) -> Table:
    """The fixed buffers of a wrapper in CUDA-graph mode, by their fields of Table.

    Parameters
    ----------
    device : torch.device
    names : dict
        What the caller calls the fields that are needed.
    """
    for field, name in names.items():
        tensor = buffers[field]
        given = isinstance(tensor, torch.Tensor)
        require(given, name, None if tensor is None else f"a {type(tensor).__name__}",
                "a buffer, with use_cuda_graph=True")  # fmt: skip
        require(tensor.device == device, name, f"a buffer on {tensor.device}", str(device))
        wide = torch.uint8 if field == "mask" else torch.int32
        require(tensor.dtype == wide, name, tensor.dtype, str(wide))
        require(tensor.dim() == 1, name, tuple(tensor.shape), "one dimension")
        require(tensor.is_contiguous(), name, f"strides {tensor.stride()}", "contiguous")
    return Table(**buffers)


# Of masks, by their fields of Table.
MASK_BUFFERS = dict(mask="custom_mask_buf", mask_indptr="mask_indptr_buf")


def block_table(tables: torch.Tensor, kv_lens: torch.Tensor, **queries) -> Table:
    """A Table of a rectangular block table.

    Parameters
    ----------
    tables : int32 Tensor [batch, max_pages]
        Page ids of each request; entries past its pages are not read. Rows may have any stride.
    kv_lens : int32 Tensor [batch]
        Keys of each request.
    queries
        qo_indptr, q_lens or q_len of Table, and what the caller calls them.
    """
    batch, pages = tables.shape
    if batch > 1 and not tables.stride(0):
        # One row for all: a stride of 0 stands for no stride.
        tables = tables.contiguous()
    stride = tables.stride(0) if batch > 1 else pages
    flat = tables.as_strided(((batch - 1) * stride + pages if batch and pages else 0,), (1,))
    given = {"names": BLOCK_NAMES} | queries
    return Table(kv_indices=flat, kv_lens=kv_lens, kv_stride=max(stride, 1), **given)
