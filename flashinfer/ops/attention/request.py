"""What a plan() asks for: options, checked once for every distinct set, and tables, checked for every batch."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from functools import lru_cache
from numbers import Integral, Real

import torch

from flashinfer._core.checks import as_dtype, dtype_name, number, require
from flashinfer.ops.attention.problem import NARROW, POS_ENCODINGS, Q_DTYPES, wrong_dtype
from flashinfer.ops.attention.tables import KV_INDICES, KV_INDPTR, LENGTHS, NAMES, QO_INDPTR, Stage
from flashinfer.ops.attention.variants import AttentionVariant

_FP8 = (torch.float8_e4m3fn, torch.float8_e5m2)
# What nvfp4 is stored as: two e2m1 a byte.
NVFP4 = torch.uint8
_INTEGERS = (torch.int32, torch.int64)


@dataclass(frozen=True)
class Options:
    """What a batch is asked for beside its tables, in the names of the public API. Checked when it is made.

    `source` is "paged" or "ragged"; a ragged batch has page_size 0. `kv_dtype` uint8 is nvfp4; with `interleaved`, the
    factors of V lie in the page of each head as TensorRT-LLM's generated kernels read them: token 4 i + t's factor f
    is where token 4 i + (4 f + t) div (head_dim / 16) would have factor (4 f + t) mod (head_dim / 16). With `mixed`,
    prefills stand first in the batch and decodes last, and their tiles take turns.
    """

    source: str
    num_qo_heads: int
    num_kv_heads: int
    head_dim_qk: int
    head_dim_vo: int
    page_size: int
    q_dtype: torch.dtype
    kv_dtype: torch.dtype
    o_dtype: torch.dtype
    causal: bool = False
    window_left: int = -1
    logits_soft_cap: float | None = None
    sm_scale: float | None = None
    pos_encoding_mode: str = "NONE"
    rope_scale: float | None = None
    rope_theta: float | None = None
    fixed_split_size: int | None = None
    disable_split_kv: bool = False
    variant: AttentionVariant | None = None
    interleaved: bool = False
    mixed: bool = False

    def __post_init__(self):
        for name in ("num_qo_heads", "num_kv_heads", "head_dim_qk", "head_dim_vo", "page_size", "window_left"):
            value = getattr(self, name)
            require(isinstance(value, Integral) and not isinstance(value, bool), name, repr(value), "an int")
        require(self.causal in (True, False), "causal", repr(self.causal), "True or False")
        require(self.num_kv_heads > 0, "num_kv_heads", self.num_kv_heads, "at least 1")
        divides = self.num_qo_heads > 0 and self.num_qo_heads % self.num_kv_heads == 0
        require(divides, "num_qo_heads", self.num_qo_heads, f"a multiple of num_kv_heads = {self.num_kv_heads}")
        most = f"at most 128 x num_kv_heads = {self.num_kv_heads}"
        require(self.group <= 128, "num_qo_heads", self.num_qo_heads, most)
        require(self.head_dim_qk > 0, "head_dim_qk", self.head_dim_qk, "at least 1")
        require(self.head_dim_vo > 0, "head_dim_vo", self.head_dim_vo, "at least 1")
        require(self.source == "ragged" or self.page_size > 0, "page_size", self.page_size, "at least 1")
        known = self.pos_encoding_mode in POS_ENCODINGS
        require(known, "pos_encoding_mode", repr(self.pos_encoding_mode), ", ".join(POS_ENCODINGS))
        require(self.window_left >= -1, "window_left", self.window_left, "-1 (no window) or the keys before a query")
        self._check_dtypes()
        self._check_numbers()
        owned = self.variant is not None and self.variant.owns_mask
        require(not owned or self.window_left < 0, "window_left", self.window_left, "-1: the variant owns the mask")
        if self.kv_dtype == NVFP4:
            require(self.source == "paged", "kv_data_type", "nvfp4 (uint8)", "with paged keys and values")
            for name in ("head_dim_qk", "head_dim_vo"):
                dim = getattr(self, name)
                require(dim % 16 == 0, name, dim, "a multiple of 16, the block of nvfp4")
            fours = not self.interleaved or self.page_size % 4 == 0
            require(fours, "page_size", self.page_size, "a multiple of 4, with interleaved factors of V")

    def _check_dtypes(self) -> None:
        q_dtype, kv_dtype = dtype_name(self.q_dtype, "q_data_type"), dtype_name(self.kv_dtype, "kv_data_type")
        kv_dtype = "nvfp4" if self.kv_dtype == NVFP4 else kv_dtype
        wrong = wrong_dtype(q_dtype, kv_dtype, dtype_name(self.o_dtype, "o_data_type"), *self.dtypes)
        if wrong:
            require(False, *wrong)

    @property
    def dtypes(self) -> tuple[tuple[str, ...], ...]:
        """The types of queries, and of keys and values beside these, that its kernels take."""
        return Q_DTYPES, NARROW

    def _check_numbers(self) -> None:
        cap, scale, fixed = self.logits_soft_cap, self.sm_scale, self.fixed_split_size
        # Kernels take both as float32: past its ends they would be inf or 0.
        fits = cap is None or is_finite(cap) and (cap == 0 or 2.0**-126 <= cap < 2.0**128)
        require(fits, "logits_soft_cap", repr(cap), "None or 0 (no cap), or a positive number, normal in float32")
        fits = scale is None or is_finite(scale) and abs(scale) < 2.0**128
        require(fits, "sm_scale", repr(scale), "None (1 / sqrt(head_dim)), or a finite number, in float32, too")
        for name in ("rope_scale", "rope_theta"):
            value = getattr(self, name)
            require(value is None or is_finite(value) and value > 0, name, repr(value), "None, or a positive number")
        fits = fixed is None or isinstance(fixed, Integral) and (fixed > 0 or fixed == -1)
        require(fits, "fixed_split_size", repr(fixed), "None, -1, or a number of keys")

    @property
    def group(self) -> int:
        """Query heads per KV head."""
        return self.num_qo_heads // self.num_kv_heads


def is_finite(value) -> bool:
    """Whether it is a number, and neither NaN nor infinite."""
    return isinstance(value, Real) and math.isfinite(value)


# Typed: 24.0 is not the 24 of an earlier call.
@lru_cache(maxsize=1024, typed=True)
def options(source, num_qo_heads, num_kv_heads, head_dim_qk, head_dim_vo, page_size, q_data_type, kv_data_type=None,
            o_data_type=None, *rest, **others) -> Options:  # fmt: skip
    """Options of public arguments: dtypes or their names, kv defaulting to q's, head_dim_vo (None) to head_dim_qk.

    `rest` and `others` are the other fields of Options, by position from `causal` on and by name.
    """
    q_dtype = as_dtype(q_data_type, torch.float16)
    if kv_data_type == "nvfp4":
        kv_data_type = NVFP4
    return Options(
        source, num_qo_heads, num_kv_heads, head_dim_qk, head_dim_qk if head_dim_vo is None else head_dim_vo, page_size,
        q_dtype, as_dtype(kv_data_type, q_dtype), default_o_dtype(q_dtype, o_data_type), *rest, **others,
    )  # fmt: skip


_NAMES = tuple(field.name for field in fields(Options))


def plain(asked: tuple) -> tuple:
    """Arguments of `options` with the numbers of tensors of one element. Waits for those on a device."""
    return tuple(number(name, value) for name, value in zip(_NAMES, asked))


def default_o_dtype(q_dtype: torch.dtype, o_dtype: str | torch.dtype | None) -> torch.dtype:
    """Output type: as asked, else q's; bfloat16 for fp8 q, whose range an output has no scale for."""
    given = as_dtype(o_dtype)
    if given is not None:
        return given
    return torch.bfloat16 if q_dtype in _FP8 else q_dtype


@dataclass(eq=False)
class Request:
    """A batch that a plan() describes. Tables may be on the host or on the compute device.

    Attributes
    ----------
    options : Options
    qo_indptr, kv_indptr, last_page_len, kv_indices : int Tensor
        The last two of a paged batch only; no qo_indptr where q_len tells it.
    custom_mask, packed_custom_mask : Tensor, optional
    kv_lens : int Tensor [batch], optional
        Keys of each request, in the place of last_page_len.
    q_len : int
        The query length of every request, where they are all alike.
    longest_q : int
        A bound on query lengths, as the caller has it; 0 where it is unknown.
    rows, kv_entries : int
        The last offsets of qo_indptr and kv_indptr; -1 where only the device knows. The first may be any: what lies
        before is of no request.
    first_row : int
        The first offset of qo_indptr; 0 where only the device knows.
    names : tuple of str
        What the caller calls `tables`.
    """

    options: Options
    qo_indptr: torch.Tensor | None
    kv_indptr: torch.Tensor | None
    last_page_len: torch.Tensor | None = None
    kv_indices: torch.Tensor | None = None
    custom_mask: torch.Tensor | None = None
    packed_custom_mask: torch.Tensor | None = None
    q_len: int = 0
    longest_q: int = 0
    rows: int = -1
    kv_entries: int = -1
    kv_lens: torch.Tensor | None = None
    names: tuple[str, ...] = NAMES
    first_row: int = 0

    @property
    def batch_size(self) -> int:
        return self.kv_indptr.numel() - 1

    @property
    def tables(self) -> tuple[torch.Tensor | None, ...]:
        """In the order of `tables.NAMES`, kv_lens in the place of last_page_len."""
        lens = self.last_page_len if self.kv_lens is None else self.kv_lens
        return self.qo_indptr, self.kv_indptr, lens, self.kv_indices

    @property
    def has_mask(self) -> bool:
        return self.custom_mask is not None or self.packed_custom_mask is not None

    def lengths_on_host(self) -> tuple[int, ...]:
        """The length of each table that is on the host; 0 for the others. Checks what needs no values."""
        counts = []
        for table in self.tables:
            if table is None:
                missing = len(counts) == KV_INDPTR or len(counts) == KV_INDICES and self.options.page_size
                require(not missing, self.names[len(counts)], None, "a tensor of int32 or int64, one dimension")
                counts.append(0)
                continue
            if not isinstance(table, torch.Tensor) or table.dtype not in _INTEGERS or table.dim() != 1:
                of_tensor = isinstance(table, torch.Tensor)
                value = f"{table.dtype} {tuple(table.shape)}" if of_tensor else f"a {type(table).__name__}"
                require(False, self.names[len(counts)], value, "a tensor of int32 or int64, one dimension")
            counts.append(0 if table.is_cuda else table.numel())
        batch = self.kv_indptr.numel() - 1
        if batch < 0 or not self.q_len and self.qo_indptr.numel() != batch + 1:
            expected = 1 if self.qo_indptr is None else max(self.qo_indptr.numel(), 1)
            allowed = f"[{expected}], batch_size + 1, as {self.names[QO_INDPTR]}"
            require(False, self.names[KV_INDPTR], f"[{batch + 1}]", allowed)
        lens = self.last_page_len if self.kv_lens is None else self.kv_lens
        if lens is None and self.options.page_size:
            require(False, self.names[LENGTHS], None, "a tensor of int32 or int64, one dimension")
        if lens is not None and lens.numel() != batch:
            require(False, self.names[LENGTHS], f"[{lens.numel()}]", f"[{batch}]")
        return tuple(counts)

    def check(self, stage: Stage, page_ids: int | None) -> tuple[int, int]:
        """Check the values of tables that `stage` holds, `page_ids` being the length of kv_indices; (rows, kv_entries)
        of a batch that they tell. Notes the first row."""
        qo, kv, lens, _ = stage.counts
        rows, entries = self.rows, self.kv_entries
        if qo:
            rows = stage.check_indptr(QO_INDPTR)
            self.first_row = stage.first(QO_INDPTR)
        if kv:
            what = "" if page_ids is None else f"the length of {self.names[KV_INDICES]}"
            entries = stage.check_indptr(KV_INDPTR, page_ids, what)
        if lens and self.kv_lens is None:
            stage.check_last_page_len(self.options.page_size)
        elif lens:
            stage.check_kv_lens(self.options.page_size, page_ids)
        return rows, entries


# The widest tile.
MOST_ROWS = 128


def tile_rows(longest_q: int, group: int) -> int:
    """Rows a tile should hold: the power of two that takes the longest query, 16 to 128; 128 if it is unknown."""
    if longest_q <= 0:
        return MOST_ROWS
    return min(MOST_ROWS, max(16, 1 << (longest_q * group - 1).bit_length()))
