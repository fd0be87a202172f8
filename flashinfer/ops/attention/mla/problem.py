"""What a call of latent attention asks for, and the tensors it brings."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from flashinfer._core.checks import dtype_name
from flashinfer.ops.attention.options import PlanOptions
from flashinfer.ops.attention.tables import Table
from flashinfer.ops.kv_layout import Matrix, as_matrix


@dataclass(frozen=True)
class Problem:
    """Everything about a batch of latent attention that a kernel is compiled for.

    A key is a latent row (ckv) and a positional row (kpe), and all heads share it: logits are q_nope . ckv +
    q_pe . kpe, and its value is ckv again. Requests, query rows and positions are as in attention's Problem.

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
        Whether the table of a request names its keys one by one, as tokens of the cache (token t is row t % page_size
        of page t // page_size; a negative one is none), instead of pages.
    first, first_page : int
        Of a sparse problem: so many keys of every request are tokens of a second cache, with pages of first_page.
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
    variant : str
        The key of a user's variant (`variants.find`); '' for none.
    softmax : bool
        False for a variant whose logits are weights.
    matrix : bool
        Whether the caches are rows of one matrix each, as `kv_layout.as_matrix` has it.
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
    variant: str = ""
    softmax: bool = True
    matrix: bool = True

    @property
    def group(self) -> int:
        """Query heads per KV head, as work lists count them."""
        return self.num_heads

    @property
    def head_dim_vo(self) -> int:
        return self.head_dim_ckv


def latent_problem(options: PlanOptions, rows: int) -> Problem:
    """The problem of a plan's options, as most calls bring it; `rows` a tile should hold."""
    variant = options.variant
    causal = options.causal and not (variant and variant.owns_mask)
    return Problem(
        dtype_name(options.q_dtype), dtype_name(options.kv_dtype), dtype_name(options.o_dtype),
        options.num_qo_heads, options.head_dim_vo, options.head_dim_kpe, options.page_size,
        mask="causal" if causal else "full", sparse=options.sparse, first=options.first,
        first_page=options.first_page, split=not options.disable_split_kv, rows=rows,
        variant=variant.key if variant else "", softmax=variant is None or variant.use_softmax,
    )  # fmt: skip


@dataclass
class Inputs:
    """The tensors of one call, as reference and kernels take them.

    Attributes
    ----------
    q_nope : Tensor [rows, num_heads, head_dim_ckv]
    q_pe : Tensor [rows, num_heads, head_dim_kpe], optional
        None for a head_dim_kpe of 0, as kpe.
    ckv : Tensor [pages, page_size, head_dim_ckv]
    kpe : Tensor [pages, page_size, head_dim_kpe], optional
    out : Tensor [rows, num_heads, head_dim_ckv]
    lse : float32 Tensor [rows, num_heads], optional
        Log-sum-exp of the scaled logits.
    table : Table
        kv_indices holds pages, or the tokens of a sparse problem.
    schedule : WorkList, optional
        The work list on a GPU; the reference needs none.
    sm_scale, out_scale : float
        Factors of logits and outputs.
    pe_ratio : float
        A further factor of q_pe . kpe alone.
    first_ckv : Tensor [pages, first_page, head_dim_ckv], optional
        The second cache of Problem.first.
    sinks : float32 Tensor [num_heads], optional
        A logit per head that takes part in the softmax and has no value.
    qk_scale, v_scale : float32 Tensor [1], optional
        Further factors of logits and outputs, with Problem.scales.
    params : tuple
        What the functions of Problem.variant are given.
    """

    q_nope: torch.Tensor
    q_pe: torch.Tensor | None
    ckv: torch.Tensor
    kpe: torch.Tensor | None
    out: torch.Tensor
    lse: torch.Tensor | None
    table: Table
    schedule: object | None
    sm_scale: float
    out_scale: float = 1.0
    pe_ratio: float = 1.0
    first_ckv: torch.Tensor | None = None
    sinks: torch.Tensor | None = None
    qk_scale: torch.Tensor | None = None
    v_scale: torch.Tensor | None = None
    params: tuple = ()

    def moving(self) -> tuple[torch.Tensor | None, ...]:
        """q_nope, q_pe, ckv, kpe, out, lse and page ids: what moves from a launch to its replay."""
        return self.q_nope, self.q_pe, self.ckv, self.kpe, self.out, self.lse, self.table.kv_indices

    def addresses(self) -> tuple[int, ...]:
        """Of `moving`, 0 for None."""
        return tuple([0 if t is None else t.data_ptr() for t in self.moving()])


def matrix_of(cache: torch.Tensor) -> Matrix | None:
    """The matrix whose rows are those of a cache [pages, page_size, dim]; None where strides make none."""
    return as_matrix(cache[:, :, None], True)
