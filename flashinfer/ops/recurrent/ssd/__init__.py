"""The recurrence of Mamba2's layers over prompts, by chunks: state-space duality.

h <- h exp(dt A) + (dt x) B^T;  y = h C + D x;  y <- y z sigmoid(z)        (h is [dim, dstate])
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch

from flashinfer._core.dispatch import Op, portable_only
from flashinfer.ops.recurrent.ssd import config


@dataclass(frozen=True)
class Prefill:
    """All tokens of every sequence, in chunks that begin at multiples of `chunk` of the sequence.

    Attributes
    ----------
    dim, dstate : int
        Of a head's state.
    dtype : str
        Of x, B, C, z and the result.
    dt_dtype, a_dtype, d_dtype, bias_dtype : str
        Of dt, A, D and dt's bias; "" where there is none.
    chunk : int
        Tokens of a chunk, a multiple of 64.
    source_dtype, state_dtype, marks_dtype : str
        Of the states that sequences begin with, of those after the last token, and of those on the way; "" where there
        are none.
    wide_d : bool
        D has a value for each of dim, else one for a head.
    gated : bool
        The result is multiplied by z sigmoid(z).
    softplus : bool
        dt is the softplus of what is given.
    index : str
        Type of slots and offsets.
    packed : bool
        Sequences are packed by offsets, else each row is one.
    read : bool
        A table names the slot of each sequence.
    aligned : bool
        Rows of x, B, C, z, the result and states can be read 16 bytes at a time.
    """

    dim: int
    dstate: int
    dtype: str
    dt_dtype: str
    a_dtype: str
    d_dtype: str = ""
    bias_dtype: str = ""
    chunk: int = 128
    source_dtype: str = ""
    state_dtype: str = ""
    marks_dtype: str = ""
    wide_d: bool = False
    gated: bool = False
    softplus: bool = True
    index: str = "i32"
    packed: bool = False
    read: bool = False
    aligned: bool = True


class Tokens(NamedTuple):
    """Inputs of the tokens, any strides but for a last one of 1; dt has any.

    x, z : [rows, tokens, heads, dim], as is the result. dt : [rows, tokens, heads].
    B, C : [rows, tokens, groups, dstate].
    offsets : [sequences + 1]. Sequence i is the tokens offsets[i] to offsets[i + 1] of the only row, and tokens of no
        sequence have result 0; without offsets each row is a sequence.
    """

    x: torch.Tensor
    dt: torch.Tensor
    B: torch.Tensor
    C: torch.Tensor
    z: torch.Tensor | None
    offsets: torch.Tensor | None = None

    @property
    def sequences(self) -> int:
        return len(self.x) if self.offsets is None else len(self.offsets) - 1


class Layer(NamedTuple):
    """Parameters of a layer, contiguous. A, bias : [heads]. D : [heads] or [heads, dim]. least, most : limits of dt."""

    A: torch.Tensor
    D: torch.Tensor | None
    bias: torch.Tensor | None
    least: float
    most: float


class Pool(NamedTuple):
    """States [slots, heads, dim, dstate] with contiguous rows.

    source : what sequences begin with; None is zero. state : receives what they end with; it may be the source.
    read : [sequences], the slot in both; None is the sequence's number. A negative one, and one past the last, is
        padding: no state is read or written, and the result is 0.
    """

    source: torch.Tensor | None
    state: torch.Tensor | None
    read: torch.Tensor | None


class Marks(NamedTuple):
    """Checkpoints: states on the way. out : [places, heads, dim, dstate], contiguous.

    tokens : [sequences, marks], before which token a state is wanted, counted as offsets are: in the packed row, or in
        the sequence where each row is one. A negative one, and one outside its sequence, is none.
    places : [sequences, marks], where in `out` it goes; a negative one is none.
    """

    out: torch.Tensor
    tokens: torch.Tensor
    places: torch.Tensor


def _catalog() -> Iterator[Prefill]:
    # Nemotron-3-Nano and Nemotron-H: heads of 64 x 128.
    nano = {"d_dtype": "bf16", "bias_dtype": "bf16"}
    fp32 = {"source_dtype": "fp32", "state_dtype": "fp32"}
    yield Prefill(64, 128, "bf16", "bf16", "fp32", **nano, **fp32, packed=True, marks_dtype="fp32")
    yield Prefill(64, 128, "bf16", "bf16", "fp32", **nano, chunk=256, state_dtype="bf16", gated=True, wide_d=True)
    yield Prefill(128, 256, "bf16", "fp32", "fp32", source_dtype="bf16", state_dtype="bf16", packed=True, index="i64",
                  read=True)  # fmt: skip
    yield Prefill(80, 48, "fp16", "fp32", "fp32", softplus=False, marks_dtype="fp16", aligned=False)
    yield Prefill(64, 128, "bf16", "bf16", "fp32", **nano, source_dtype="bf16", state_dtype="bf16", marks_dtype="bf16")
    yield Prefill(64, 128, "bf16", "bf16", "fp32", **nano, **fp32, chunk=64, packed=True)
    yield Prefill(64, 64, "fp32", "fp32", "fp32", "fp32", "fp32", **fp32)


def _long_rows(problem, target) -> str:
    return "a state of more than 256 columns does not fit in registers" if problem.dstate > 256 else ""


prefill = Op("ssd_prefill", Prefill, portable_only(__name__, config.portable, refuses=_long_rows), _catalog)
