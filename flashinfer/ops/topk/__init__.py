"""The k largest values of each row, with their indices, or slots of a page table, or indices plus an offset."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from flashinfer._core.dispatch import Op, portable_only
from flashinfer.ops.topk import config


@dataclass(frozen=True)
class TopK:
    """Which values are selected, and which results are written.

    Attributes
    ----------
    result : str
        "values" and their indices; "sorted", the same in the order (value descending, index ascending); "pages", slots
        of a page table; "ragged", indices plus an offset; or "columns", int32 indices. In all but "sorted" indices
        ascend.
    dtype : str
        Of the values.
    last : bool
        Of equal values those at the highest indices are taken, not those at the lowest.
    starts, lengths : bool
        Rows are windows of the input's rows.
    mapped, page_starts, raw : bool
        Of "pages": rows have a map to the page table's rows; windows of the page table begin elsewhere than those of
        the values; indices are written as well.
    aligned : bool
        Rows can be read 16 bytes at a time.
    valued : bool
        Of "columns": values are written as well, 0 past a short row.
    """

    result: str
    dtype: str
    last: bool = False
    starts: bool = False
    lengths: bool = False
    mapped: bool = False
    page_starts: bool = False
    raw: bool = False
    aligned: bool = True
    valued: bool = False

    @property
    def with_values(self) -> bool:
        return self.valued or self.result in ("values", "sorted")

    @property
    def index(self) -> str:
        """The dtype of indices and slots."""
        return "i64" if self.result in ("values", "sorted") else "i32"


def _catalog() -> Iterator[TopK]:
    yield TopK("sorted", "fp32")
    yield TopK("values", "bf16", last=True)
    yield TopK("pages", "fp32", lengths=True, mapped=True, raw=True)
    yield TopK("pages", "fp32", starts=True, lengths=True, page_starts=True, aligned=False)
    yield TopK("ragged", "fp16", lengths=True)
    yield TopK("columns", "fp32", lengths=True)
    yield TopK("columns", "bf16", lengths=True, valued=True)


top_k = Op("top_k", TopK, portable_only(__name__, config.portable), _catalog)
