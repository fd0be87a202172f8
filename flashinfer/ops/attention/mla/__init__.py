"""Multi-head latent attention with absorbed projections: all heads share keys that are their own values."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from flashinfer._core.dispatch import Op, Variant
from flashinfer.ops.attention.mla import config


@dataclass(frozen=True)
class Problem:
    """Everything about a batch of latent attention that a kernel is compiled for.

    A key is a latent row (ckv) and a positional row (kpe); logits are q_nope . ckv + q_pe . kpe, and the value of a key
    is its ckv. Requests, query rows and positions are as in attention's Problem.

    Attributes
    ----------
    q_dtype, kv_dtype, o_dtype : str
        Triton's names: "bf16", "fp16", "fp32", "fp8e4nv", "fp8e5".
    num_heads : int
        Query heads, 1 to 128.
    head_dim_ckv, head_dim_kpe : int
        Elements of a latent row, and of a positional row (0: keys have none).
    page_size : int
        Tokens per page of the cache.
    mask : str
        "full" or "causal".
    sparse : bool
        Whether the table of a request names its keys one by one, as tokens of the cache (token t is row t % page_size of
        page t // page_size; -1 is none), instead of pages.
    first, first_page : int
        Of a sparse problem: so many keys of a request come from a second cache, with pages of first_page tokens.
    sinks, scales : bool
        Whether attention sinks apply, and whether factors of logits and outputs are read from the device.
    lse, base_e : bool
        Whether the log-sum-exp is written too, and in base e instead of 2.
    split : bool
        Whether a request's keys may be divided among several work items.
    rows : int
        Query rows, heads included, that a tile should hold: 16, 32, 64 or 128.
    aligned : bool
        Whether every row of q, of the caches and of out starts on 16 bytes.
    """

    q_dtype: str
    kv_dtype: str
    o_dtype: str
    num_heads: int
    head_dim_ckv: int = 512
    head_dim_kpe: int = 64
    page_size: int = 64
    mask: str = "full"
    sparse: bool = False
    first: int = 0
    first_page: int = 0
    sinks: bool = False
    scales: bool = False
    lse: bool = False
    base_e: bool = False
    split: bool = True
    rows: int = 64
    aligned: bool = True

    @property
    def group(self) -> int:
        """Query heads per KV head: all."""
        return self.num_heads

    @property
    def head_dim_vo(self) -> int:
        return self.head_dim_ckv


def _catalog() -> Iterator[Problem]:
    base = Problem("bf16", "bf16", "bf16", 16, rows=16)
    yield base
    yield replace(base, num_heads=128, mask="causal", lse=True, rows=64)
    yield replace(base, kv_dtype="fp8e4nv", num_heads=32, rows=32, scales=True)
    yield replace(base, q_dtype="fp8e4nv", kv_dtype="fp8e4nv", num_heads=128, rows=64, page_size=1, split=False)
    yield replace(base, num_heads=128, rows=64, sparse=True, sinks=True, lse=True, base_e=True)
    yield replace(base, num_heads=64, head_dim_kpe=0, sparse=True, first=128, first_page=256, rows=64, sinks=True)
    yield replace(base, q_dtype="fp16", kv_dtype="fp8e5", o_dtype="fp16", num_heads=21, head_dim_ckv=80, head_dim_kpe=24,
                  page_size=5, rows=32, aligned=False)  # fmt: skip


mla = Op(
    "mla",
    Problem,
    (
        Variant("portable", "flashinfer.ops.attention.mla.portable", config.refuses, config.choose),
        Variant("reference", "flashinfer.ops.attention.mla.reference"),
    ),
    _catalog,
)
