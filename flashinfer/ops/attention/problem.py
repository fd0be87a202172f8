"""What an attention call asks for, and the tensors it brings."""

from __future__ import annotations

from dataclasses import dataclass
from typing import get_args

import torch

from flashinfer._core.literals import PosEncodingMode
from flashinfer.ops.attention.tables import Table
from flashinfer.ops.formats import KV_FORMATS

POS_ENCODINGS = get_args(PosEncodingMode)
FP8 = ("fp8e4nv", "fp8e5")
# What travels to kernels as bytes, and is widened in registers.
NARROW = (*FP8, *KV_FORMATS)
Q_DTYPES = ("bf16", "fp16", "fp32", *FP8)
# Latent attention multiplies no float32, and reads no nvfp4.
LATENT_Q_DTYPES = ("bf16", "fp16", *FP8)


# Values of Problem.requests beside 0: one, and two for each lane of a warp.
REQUESTS = (1, 64)


@dataclass(frozen=True)
class Problem:
    """Everything about a batch of attention that a kernel is compiled for. Lengths, strides and scales are arguments.

    A batch is a list of requests. Request i has query rows `qo_indptr[i] : qo_indptr[i + 1]`, and keys in pages of a
    table or in contiguous rows. Its last query row stands at the position of its last key, so query row r of q_len
    stands at kv_len - q_len + r.

    Attributes
    ----------
    source : str
        Where keys and values are: "paged" or "ragged".
    q_dtype, kv_dtype, o_dtype : str
        Triton's names: "bf16", "fp16", "fp32", "fp8e4nv", "fp8e5"; of keys and values also the formats with factors of
        `formats.KV_FORMATS`.
    head_dim_qk, head_dim_vo : int
        Elements of a query / key row, and of a value / output row.
    group : int
        Query heads per KV head (GQA).
    page_size : int
        Tokens per page; 0 for ragged.
    mask : str
        "full", "causal" or "custom" (packed bits).
    window, soft_cap, sinks : bool
        Whether a sliding window, a logits soft cap, attention sinks apply.
    pos_encoding : str
        "NONE", "ROPE_LLAMA" (rotary, applied to q and k on the fly) or "ALIBI".
    head_scales : bool
        Whether logits and outputs are scaled by float32 vectors per query head, read from the device.
    lse : bool
        Whether the log-sum-exp is written too.
    split : bool
        Whether a request's keys may be divided among several work items, with partial results to combine.
    many_splits : bool
        Whether a tile of up to 64 rows may have so many splits that they are combined in two levels
        (`SplitPolicy.many`).
    rows : int
        Query rows a tile should hold, GQA heads included: 16, 32, 64 or 128.
    aligned : bool
        Whether every row of q, k, v and out starts on 16 bytes.
    matrix : bool
        Whether k, and v, are the rows of a matrix (`kv_layout.as_matrix`).
    variant : str
        The key of a user's variant (`variants.AttentionVariant.key`); "" for none.
    softmax : bool
        Whether weights are the softmax of logits; else they are what the variant makes of them.
    interleaved : bool
        Whether the nvfp4 factors of V lie four tokens interleaved (`PlanOptions.interleaved`).
    requests : int
        The most requests of a batch whose lengths the kernel reads itself (`WorkList.requests`); 0 for a work list.
    """

    source: str
    q_dtype: str
    kv_dtype: str
    o_dtype: str
    head_dim_qk: int
    head_dim_vo: int
    group: int
    page_size: int = 0
    mask: str = "full"
    window: bool = False
    soft_cap: bool = False
    sinks: bool = False
    pos_encoding: str = "NONE"
    head_scales: bool = False
    lse: bool = False
    split: bool = True
    many_splits: bool = False
    rows: int = 128
    aligned: bool = True
    matrix: bool = True
    variant: str = ""
    softmax: bool = True
    interleaved: bool = False
    requests: int = 0


@dataclass(frozen=True)
class Scalars:
    """Numbers of a call that no kernel is compiled for.

    Attributes
    ----------
    sm_scale : float
        Factor of q . k, the scalar q and k scales included.
    out_scale : float
        Factor of the output (the scalar v scale).
    soft_cap : float
        Logits become soft_cap * tanh(logits / soft_cap), ALiBi's biases in them; 0 for none.
    window_left : int
        A query sees itself and this many keys before it; -1 for all.
    rope_scale, rope_theta : float
        Rotary frequencies are theta ** (-2 i / head_dim) / scale.
    """

    sm_scale: float
    out_scale: float = 1.0
    soft_cap: float = 0.0
    window_left: int = -1
    rope_scale: float = 1.0
    rope_theta: float = 1e4


def wrong_dtype(
    q_dtype: str, kv_dtype: str, o_dtype: str, q_dtypes: tuple[str, ...] = Q_DTYPES, narrow: tuple[str, ...] = NARROW
) -> tuple[str, str, str] | None:
    """Of three dtypes that no kernel takes on any chip: the argument that is wrong, its value, and what is allowed.

    The one rule for public checks and for what variants refuse, the CPU's among them.
    """
    if q_dtype not in q_dtypes:
        return "q_data_type (dtype of q)", q_dtype, ", ".join(q_dtypes)
    if kv_dtype not in (q_dtype, *narrow):
        allowed = ", ".join(dict.fromkeys((q_dtype, *narrow)))
        return "kv_data_type (dtype of k and v)", kv_dtype, f"{allowed}: that of q, or narrower"
    if o_dtype not in Q_DTYPES:
        return "o_data_type (dtype of out)", o_dtype, ", ".join(Q_DTYPES)
    return None


def folds(sm_scale: float) -> bool:
    """Whether a kernel may multiply a maximum of -inf by sm_scale: a normal positive float32. 0 times it is NaN, a
    negative scale makes a minimum of it, and what is less may become 0 on its way."""
    return sm_scale >= 2.0**-126


@dataclass
class Inputs:
    """The tensors of one call, as reference and kernels take them.

    Attributes
    ----------
    q : Tensor [rows, qo_heads, head_dim_qk]
    k, v : Tensor
        Paged: [pages, page_size, kv_heads, head_dim] (an HND cache comes as its transposed view). Ragged:
        [rows, kv_heads, head_dim].
    out : Tensor [rows, qo_heads, head_dim_vo]
    lse : float32 Tensor [rows, qo_heads], optional
        Log-sum-exp of the scaled logits, base 2.
    table : Table
    schedule : WorkList, optional
        The work list on a GPU; the reference needs none.
    scalars : Scalars
    sinks : float32 Tensor [qo_heads], optional
        A logit per head that takes part in the softmax and has no value.
    qk_scale, v_scale : float32 Tensor [qo_heads], optional
        Factors of logits and of outputs per query head, with Problem.head_scales.
    alibi_slopes : float32 Tensor [qo_heads], optional
    params : tuple
        What the functions of Problem.variant are given, in the order of the variant's parameters.
    k_factors, v_factors : Tensor [pages, page_size, kv_heads, blocks], optional
        Of keys and values in a format with factors, which are bytes: float8_e4m3fn of nvfp4, else float32.
    """

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    out: torch.Tensor
    lse: torch.Tensor | None
    table: Table
    schedule: object | None
    scalars: Scalars
    sinks: torch.Tensor | None = None
    qk_scale: torch.Tensor | None = None
    v_scale: torch.Tensor | None = None
    alibi_slopes: torch.Tensor | None = None
    params: tuple = ()
    k_factors: torch.Tensor | None = None
    v_factors: torch.Tensor | None = None

    def moving(self) -> tuple[torch.Tensor | None, ...]:
        """q, k, v, out, lse, page ids, and lengths that the kernel reads: what moves from a launch to its replay."""
        lens = (self.table.kv_lens,) if self.schedule is not None and self.schedule.requests else ()
        return self.q, self.k, self.v, self.out, self.lse, self.table.kv_indices, *lens

    def addresses(self) -> tuple[int, ...]:
        """Of `moving`, 0 for None."""
        return tuple([0 if t is None else t.data_ptr() for t in self.moving()])


def alibi_slopes(num_heads: int) -> list[float]:
    """Slope of each head (Press et al., Train Short, Test Long, 2022; its code for counts not a power of two)."""
    power = 1 << (num_heads.bit_length() - 1)
    slopes = [2.0 ** (-8.0 * (head + 1) / power) for head in range(power)]
    slopes += [2.0 ** (-4.0 * (2 * head + 1) / power) for head in range(num_heads - power)]
    return slopes
