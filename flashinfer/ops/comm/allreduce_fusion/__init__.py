"""All-reduce of rows over ranks, and what models do with the sum: residual, RMSNorm, quantised results; MoE inputs."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch

from flashinfer._core.dispatch import Op, Variant
from flashinfer.ops.comm.allreduce_fusion import config

LONGEST = 16384


@dataclass(frozen=True)
class Problem:
    """Rows that every rank has, summed over ranks in rank order.

    Attributes
    ----------
    transport : str
        How ranks reach each other: "peer" memory, or "collective" calls of the process group.
    world : int
        Ranks.
    dtype : str
        Of the rows, and of what travels.
    block : int
        The length of a row, rounded up to a power of two. The length itself is a run-time argument.
    two_shot : bool
        Each row is summed by one rank, which sends the sum to all; else every rank sends its rows to all.
    source : str
        Of this rank's rows: "" they are given; "reduce" experts' rows [expert, token] with a scale each, and a row a
        token beside; "finalize" rows picked by a table [token, choice], with scales where `scaled`, and where `beside`
        a row a token.
    scale_dtype : str
        Of the scales of "finalize"; "" where it has none.
    beside : bool
        Whether "finalize" has a row a token beside.
    weight_dtype : str
        Of the RMSNorm that follows, with a residual; "" where none does.
    number_format : str
        Of a quantised result: "" none, "fp8" with one scale, "fp8_row" with a scale a row, "fp8_group" with ue8m0
        scales of 128 columns, "nvfp4".
    layout : str
        Of an NVFP4 result's block scales: "linear", "128x4" or "8x4".
    scale : str
        How the scale of the whole tensor comes: "" there is none, "tensor" of one element, "number".
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
    """This rank's rows.

    rows : [tokens, hidden]; of "finalize", [permuted rows, hidden].
    experts : of "reduce", [experts, tokens, hidden].
    scales : float32 [experts, tokens] of "reduce"; [tokens, choices] of "finalize", any dtype, or None.
    index : int32 [tokens, choices] of "finalize": which row, -1 for none.
    beside : rows [tokens, hidden] of "finalize", or None.
    """

    rows: torch.Tensor
    experts: torch.Tensor | None = None
    scales: torch.Tensor | None = None
    index: torch.Tensor | None = None
    beside: torch.Tensor | None = None


class Norm(NamedTuple):
    """residual [tokens, hidden] and weight [hidden] are read; the RMSNorm of sum + residual has weight + bias.

    scale : of the whole quantised result, float32 [1] or a number.
    """

    residual: torch.Tensor | None = None
    weight: torch.Tensor | None = None
    eps: float = 1e-6
    bias: float = 0.0
    scale: torch.Tensor | float | None = None


class Results(NamedTuple):
    """What is written, all [tokens, hidden] but `codes` of NVFP4 (half as wide, bytes) and `factors`.

    factors : float32 [tokens, 1] of "fp8_row"; bytes in its layout of "nvfp4"; int32 [tokens, hidden / 512], any
        strides, of "fp8_group", the scales of four groups in a word.
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
    "allreduce_fusion",
    Problem,
    (
        Variant("portable", "flashinfer.ops.comm.allreduce_fusion.portable", _needs_peers, config.portable),
        Variant("reference", "flashinfer.ops.comm.allreduce_fusion.reference"),
    ),
    _catalog,
)
