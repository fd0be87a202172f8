"""All-reduce of rows over ranks, fused with what surrounds it in a model: MoE reduction before; residual, RMSNorm and
quantization after."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch

from flashinfer._core.dispatch import Op, portable_only
from flashinfer.ops.comm.allreduce_fusion import config

LONGEST = 16384


@dataclass(frozen=True)
class Problem:
    """The sum over ranks of rows that every rank has, in rank order.

    Attributes
    ----------
    transport : str
        "peer" for peer memory, "collective" for the process group.
    world : int
        Ranks.
    dtype : str
        Dtype of the rows, and of the rows that are sent.
    block : int
        The length of a row, rounded up to a power of two. The length itself is a run-time argument.
    two_shot : bool
        Each row is summed by one rank, which sends the sum to all (two-shot); else every rank sends its rows to all
        (one-shot).
    source : str
        How this rank's rows are made. "": they are given. "reduce": the sum of experts' rows [expert, token] times a
        scale each, plus a row for each token. "finalize": the sum of rows picked by a table [token, choice], times
        scales if there is a `scale_dtype`, plus a row for each token if `beside`.
    scale_dtype : str
        Dtype of the scales of "finalize"; "" for none.
    beside : bool
        Whether "finalize" adds a row for each token.
    weight_dtype : str
        Dtype of the weight of the RMSNorm that follows, with a residual; "" for no norm.
    number_format : str
        Format of a quantized result: "" for none, "fp8" with one scale, "fp8_row" with a scale a row, "fp8_group" with
        ue8m0 scales of 128 columns, "nvfp4".
    layout : str
        Layout of an NVFP4 result's block scales: "linear", "128x4" or "8x4".
    scale : str
        The scale of the whole tensor: "" for none, "tensor" of one element, "number" for a scalar.
    sum, normed : bool
        Whether the sum, and the normalised rows, are written.
    aligned : bool
        Rows can be read 16 bytes at a time.
    """

    transport: str
    world: int
    dtype: str
    block: int
    two_shot: bool = False
    source: str = ""
    scale_dtype: str = ""
    beside: bool = False
    weight_dtype: str = ""
    number_format: str = ""
    layout: str = ""
    scale: str = ""
    sum: bool = True
    normed: bool = False
    aligned: bool = True


class Rows(NamedTuple):
    """This rank's rows. Fields are None where the problem's `source` does not use them.

    rows : [tokens, hidden]; with "finalize" [permuted rows, hidden].
    experts : with "reduce" [experts, tokens, hidden].
    scales : with "reduce" float32 [experts, tokens]; with "finalize" [tokens, choices] of any dtype, or None.
    index : with "finalize" int32 [tokens, choices]: the row of each choice, -1 for none.
    beside : with "finalize" [tokens, hidden], or None.
    """

    rows: torch.Tensor
    experts: torch.Tensor | None = None
    scales: torch.Tensor | None = None
    index: torch.Tensor | None = None
    beside: torch.Tensor | None = None


class Norm(NamedTuple):
    """The RMSNorm of sum + residual, times weight + bias. residual : [tokens, hidden]. weight : [hidden].

    scale : the scale of the quantized result, float32 [1] or a scalar.
    """

    residual: torch.Tensor | None = None
    weight: torch.Tensor | None = None
    eps: float = 1e-6
    bias: float = 0.0
    scale: torch.Tensor | float | None = None


class Results(NamedTuple):
    """The outputs: [tokens, hidden], except `codes` of NVFP4 (bytes, half as wide) and `factors`.

    factors : float32 [tokens, 1] with "fp8_row"; bytes in the layout with "nvfp4"; int32 [tokens, hidden / 512] of any
        strides with "fp8_group", the scales of four groups in a word.
    """

    sum: torch.Tensor | None = None
    residual: torch.Tensor | None = None
    normed: torch.Tensor | None = None
    codes: torch.Tensor | None = None
    factors: torch.Tensor | None = None


def _needs_peers(problem, target) -> str:
    if problem.transport != "peer":
        return "ranks do not reach each other's memory: the process group carries the rows"
    return f"rows longer than {LONGEST} do not fit in registers" if problem.block > LONGEST else ""


def _catalog() -> Iterator[Problem]:
    yield Problem("peer", 2, "bf16", 4096)
    yield Problem("peer", 8, "bf16", 8192, two_shot=True, weight_dtype="bf16", normed=True, sum=False)
    norm = {"weight_dtype": "bf16", "sum": False}
    nvfp4 = dict(number_format="nvfp4", layout="128x4", scale="tensor")
    yield Problem("peer", 4, "fp16", 4096, source="reduce", **nvfp4, **norm)
    yield Problem(
        "peer", 2, "bf16", 8192, number_format="fp8", scale="number", source="finalize", scale_dtype="bf16",
        beside=True, **norm,
    )
    yield Problem("peer", 2, "fp32", 2048, number_format="fp8_row", normed=True, aligned=False, **norm)
    yield Problem("peer", 2, "bf16", 4096, number_format="fp8_group", normed=True, **norm)


allreduce_fusion = Op(
    "allreduce_fusion", Problem, portable_only(__name__, config.portable, refuses=_needs_peers), _catalog
)
