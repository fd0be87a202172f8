"""Numbers and names of what attention may do, and of what may go wrong."""

from __future__ import annotations

from enum import Enum

from flashinfer._core.checks import require

log2e = 1.4426950408889634
ln2 = 0.6931471805599453
LSE_BASES = ("log2", "ln")
LSE_LAYOUTS = ("NH", "HN")


class PosEncodingMode(Enum):
    """Numbers of the position encodings that attention applies."""

    NONE = 0
    ROPE_LLAMA = 1
    ALIBI = 2


class MaskMode(Enum):
    """Numbers of the masks of attention, as `single_prefill_with_kv_cache_with_jit_module` takes them."""

    NON_CAUSAL = 0
    CAUSAL = 1
    CUSTOM = 2
    MULTIITEMSCORING = 3


class TensorLayout(Enum):
    """Numbers of the orders of tokens and heads."""

    NHD = 0
    HND = 1


class GPUArchitectureError(Exception):
    """Upstream's name for a device that a function does not run on; nothing here raises it."""


class LibraryError(Exception):
    """Upstream's name for a library that is missing or too old; nothing here raises it."""


def check_lse_base(lse_base: str) -> None:
    """ValueError unless it is the name of a base of log-sum-exps: "log2" or "ln"."""
    require(lse_base in LSE_BASES, "lse_base", repr(lse_base), ", ".join(map(repr, LSE_BASES)))


def check_lse_layout(lse_layout: str) -> None:
    """ValueError unless it is an order of the axes of log-sum-exps: "NH", tokens and heads, or "HN"."""
    require(lse_layout in LSE_LAYOUTS, "lse_layout", repr(lse_layout), ", ".join(map(repr, LSE_LAYOUTS)))
