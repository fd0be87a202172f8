"""What a plan asks for beside its tables: one record, checked once for every distinct set of values."""

from __future__ import annotations

import math
from functools import lru_cache, partial
from numbers import Integral, Real
from typing import NamedTuple

import numpy as np
import torch

from flashinfer._core.checks import UnknownName, as_dtype, dtype_name, number, require
from flashinfer._core.sizes import power_of_two
from flashinfer.ops.attention.problem import FP8, LATENT_Q_DTYPES, NARROW, POS_ENCODINGS, Q_DTYPES, wrong_dtype
from flashinfer.ops.attention.variants import AttentionVariant
from flashinfer.ops.formats import KV_FORMATS, KV_NAMES

_FP8 = (torch.float8_e4m3fn, torch.float8_e5m2)
_KV_ALLOWED = f"that of q, or {', '.join(map(str, (*_FP8, *KV_FORMATS)))}"


class PlanOptions(NamedTuple):
    """What a batch is asked for beside its tables, in the names of the public API, or as `checked` gives it.

    A public function builds it by keywords from its own arguments: dtypes may be names, kv_dtype None is q's, o_dtype
    None is q's (bfloat16 for FP8), head_dim_vo None is head_dim_qk, numbers may be in tensors of one element. `checked`
    has all of these resolved.

    Attributes
    ----------
    source : str
        "paged", "ragged" or "latent". A ragged batch has page_size 0. A latent one is paged and has num_kv_heads 1,
        head_dim_vo = head_dim_ckv and head_dim_qk = head_dim_ckv + head_dim_kpe.
    kv_dtype : dtype or str
        A dtype, or one of `formats.KV_NAMES`. Checked, of a format with factors, it is the format's name.
    interleaved : bool
        The factors of nvfp4 V lie in the page of each head as TensorRT-LLM's generated kernels read them: token
        4 i + t's factor f is where token 4 i + (4 f + t) div (head_dim / 16) would have factor (4 f + t) mod
        (head_dim / 16). With head_dim 64, factor 1 of token 2 is at factor 2 of token 1.
    mixed : bool
        Prefills stand first in the batch and decodes last, and their tiles take turns.
    sparse, first, first_page
        Of latent attention, as its Problem has them.
    """

    source: str
    num_qo_heads: int
    num_kv_heads: int
    head_dim_qk: int
    head_dim_vo: int | None
    page_size: int
    q_dtype: torch.dtype | str | None
    kv_dtype: torch.dtype | str | None = None
    o_dtype: torch.dtype | str | None = None
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
    sparse: bool = False
    first: int = 0
    first_page: int = 0

    def plain(self) -> PlanOptions:
        """Numbers in place of tensors of one element, but for dtypes. Waits for tensors on a device."""
        if torch.Tensor not in map(type, self):
            return self
        return PlanOptions(
            **{name: x if name.endswith("_dtype") else number(name, x) for name, x in self._asdict().items()}
        )

    def checked(self) -> PlanOptions:
        """The same with defaults and dtypes resolved; ValueError for what is out of its range, by name."""
        return _checked(*self)

    def changed(self, **changes) -> PlanOptions:
        """Checked options with other values of some fields."""
        return self._replace(**changes).checked()

    @property
    def group(self) -> int:
        """Query heads per KV head."""
        return self.num_qo_heads // self.num_kv_heads

    @property
    def head_dim_kpe(self) -> int:
        """Of latent attention: elements of a positional row."""
        return self.head_dim_qk - self.head_dim_vo

    @property
    def splits(self) -> int | None:
        """Keys of a split of fixed length; None for splits by load."""
        return None if self.fixed_split_size == -1 else self.fixed_split_size


# No request has more keys. Wider windows and longer splits are taken for this, since kernels add both in int32.
MOST_KEYS = 1 << 30

# PlanOptions by keywords in half the time of a call of the class, which makes a dict of them: for plans.
plan_options = partial(PlanOptions.__new__, PlanOptions)


# Typed, since 24.0 == 24: one must not answer for the other.
@lru_cache(maxsize=1024, typed=True)
def _checked(*values) -> PlanOptions:
    # NumPy's numbers equal Python's, which kernels and later plans like this one need.
    o = PlanOptions(*[value.item() if isinstance(value, np.generic) else value for value in values])
    q_dtype = as_dtype(o.q_dtype, torch.float16, "q_data_type")
    kv_dtype = _kv_dtype(o.kv_dtype, q_dtype)
    o = o._replace(
        head_dim_vo=o.head_dim_qk if o.head_dim_vo is None else o.head_dim_vo, q_dtype=q_dtype, kv_dtype=kv_dtype,
        o_dtype=default_o_dtype(q_dtype, o.o_dtype),
    )  # fmt: skip
    _check_sizes(o)
    if o.pos_encoding_mode not in POS_ENCODINGS:
        raise UnknownName(f"pos_encoding_mode: got {o.pos_encoding_mode!r}; allowed: {', '.join(POS_ENCODINGS)}")
    require(o.window_left >= -1, "window_left", o.window_left, "-1 (no window) or the keys before a query")
    _check_dtypes(o)
    _check_numbers(o)
    split = o.fixed_split_size
    o = o._replace(
        window_left=min(o.window_left, MOST_KEYS), fixed_split_size=None if split is None else min(split, MOST_KEYS)
    )
    owned = o.variant is not None and o.variant.owns_mask
    require(not owned or o.window_left < 0, "window_left", o.window_left, "-1: the variant owns the mask")
    if o.kv_dtype in KV_FORMATS:
        require(o.source == "paged", "kv_data_type", o.kv_dtype, "with paged keys and values")
        known = KV_FORMATS[o.kv_dtype]
        unit = known.width or known.per_byte
        for name in ("head_dim_qk", "head_dim_vo"):
            dim = getattr(o, name)
            require(dim % unit == 0, name, dim, f"a multiple of {unit}, the block of {o.kv_dtype}")
        fours = not o.interleaved or o.page_size % 4 == 0
        require(fours, "page_size", o.page_size, "a multiple of 4, with interleaved factors of V")
    return o


def _kv_dtype(given, q_dtype: torch.dtype) -> torch.dtype | str:
    """The dtype of keys and values, or the name of their format with factors."""
    if given is None or given in KV_NAMES:
        return KV_NAMES.get(given, q_dtype)
    known = isinstance(getattr(torch, str(given).removeprefix("torch."), None), torch.dtype)
    require(known, "kv_data_type", repr(given), _KV_ALLOWED)
    return as_dtype(given, q_dtype, "kv_data_type")


def check_flag(name: str, given) -> None:
    """Refuse what is no flag, of a parameter that changes nothing."""
    if given is not False and given is not True and given is not None:
        require(number(name, given) in (0, 1), name, repr(given), "True or False")


def _check_sizes(o: PlanOptions) -> None:
    if o.source == "latent":
        require(1 <= o.num_qo_heads <= 128, "num_heads", o.num_qo_heads, "1 ... 128")
        require(o.head_dim_kpe >= 0, "head_dim_kpe", o.head_dim_kpe, "at least 0")
    for name in ("num_qo_heads", "num_kv_heads", "head_dim_qk", "head_dim_vo", "page_size", "window_left"):
        value = getattr(o, name)
        fits = isinstance(value, Integral) and not isinstance(value, bool)
        require(fits and (value < 1 << 31 or name == "window_left"), name, repr(value), "an int of 32 bits")
    require(o.causal in (True, False), "causal", repr(o.causal), "True or False")
    require(o.disable_split_kv in (True, False, None), "disable_split_kv", repr(o.disable_split_kv), "True or False")
    require(o.num_kv_heads > 0, "num_kv_heads", o.num_kv_heads, "at least 1")
    divides = o.num_qo_heads > 0 and o.num_qo_heads % o.num_kv_heads == 0
    require(divides, "num_qo_heads", o.num_qo_heads, f"a multiple of num_kv_heads = {o.num_kv_heads}")
    require(o.group <= 128, "num_qo_heads", o.num_qo_heads, f"at most 128 x num_kv_heads = {o.num_kv_heads}")
    require(o.head_dim_qk > 0, "head_dim_qk", o.head_dim_qk, "at least 1")
    require(o.head_dim_vo > 0, "head_dim_vo", o.head_dim_vo, "at least 1")
    require(o.source == "ragged" or 0 < o.page_size <= MOST_KEYS, "page_size", o.page_size, "at least 1, up to 2^30")


def _check_dtypes(o: PlanOptions) -> None:
    q_dtype, kv_dtype = dtype_name(o.q_dtype, "q_data_type"), kv_name(o.kv_dtype)
    taken = (LATENT_Q_DTYPES, FP8) if o.source == "latent" else (Q_DTYPES, NARROW)
    wrong = wrong_dtype(q_dtype, kv_dtype, dtype_name(o.o_dtype, "o_data_type"), *taken)
    if wrong:
        require(False, *wrong)


def kv_name(kv_dtype: torch.dtype | str) -> str:
    """What Problems call a checked kv_dtype."""
    if kv_dtype in KV_FORMATS:
        return kv_dtype
    try:
        return dtype_name(kv_dtype, "kv_data_type")
    except ValueError:
        require(False, "kv_data_type", kv_dtype, _KV_ALLOWED)


def _check_numbers(o: PlanOptions) -> None:
    cap, scale, fixed = o.logits_soft_cap, o.sm_scale, o.fixed_split_size
    # Kernels take both as float32: past its ends they would be inf or 0.
    fits = cap is None or is_finite(cap) and (cap == 0 or 2.0**-126 <= cap < 2.0**128)
    require(fits, "logits_soft_cap", repr(cap), "None or 0 (no cap), or a positive number, normal in float32")
    fits = scale is None or is_finite(scale) and abs(scale) < 2.0**128
    require(fits, "sm_scale", repr(scale), "None (1 / sqrt(head_dim)), or a finite number, in float32, too")
    for name in ("rope_scale", "rope_theta"):
        value = getattr(o, name)
        require(value is None or is_finite(value) and value > 0, name, repr(value), "None, or a positive number")
    fits = fixed is None or isinstance(fixed, Integral) and (fixed > 0 or fixed == -1)
    require(fits, "fixed_split_size", repr(fixed), "None, -1, or a number of keys")


@lru_cache(maxsize=1024)
def latent_options(
    num_heads: int, head_dim_ckv: int, head_dim_kpe: int, page_size: int, q_dtype, kv_dtype=None, o_dtype=None, **others
) -> PlanOptions:
    """Checked options of latent attention; `others` are fields of PlanOptions."""
    return PlanOptions(
        source="latent", num_qo_heads=num_heads, num_kv_heads=1, head_dim_qk=head_dim_ckv + head_dim_kpe,
        head_dim_vo=head_dim_ckv, page_size=page_size, q_dtype=q_dtype, kv_dtype=kv_dtype, o_dtype=o_dtype, **others,
    ).checked()  # fmt: skip


def is_finite(value) -> bool:
    """Whether it is a number, and neither NaN nor infinite."""
    return isinstance(value, Real) and math.isfinite(value)


def default_o_dtype(q_dtype: torch.dtype, o_dtype: str | torch.dtype | None) -> torch.dtype:
    """Output type: as asked, else q's; bfloat16 for fp8 q, whose range an output has no scale for."""
    given = as_dtype(o_dtype, None, "o_data_type")
    if given is not None:
        return given
    return torch.bfloat16 if q_dtype in _FP8 else q_dtype


def both_dtypes(q_data_type, kv_data_type, data_type) -> tuple:
    """The dtypes of q and of kv, where `data_type`, the older name of both, stands for one that is left out.

    "float16" is the default of q_data_type, and so no word on it: a data_type stands for it, but for FP8, which then is
    that of the cache alone.
    """
    if data_type is None:
        return q_data_type, kv_data_type
    dtype = as_dtype(data_type, argument="data_type")
    if q_data_type is None or q_data_type == "float16" and dtype not in _FP8:
        q_data_type = dtype
    return q_data_type, dtype if kv_data_type is None else kv_data_type


# The widest tile.
MOST_ROWS = 128


def tile_rows(longest_q: int, group: int) -> int:
    """Rows a tile should hold: the power of two that takes the longest query, 16 to 128; 128 if it is unknown."""
    if longest_q <= 0:
        return MOST_ROWS
    return min(MOST_ROWS, power_of_two(longest_q * group, 16))
