"""The recurrence of Mamba2's layers, token by token: a state per head that decays, takes x B^T, and is read by C.

h <- h exp(dt A) + (dt x) B^T;  y = h C + D x;  y <- y z sigmoid(z)        (h is [dim, dstate])
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch

from flashinfer._core.dispatch import Op, portable_only
from flashinfer.ops.recurrent.ssm import config

# Largest code of states that are stored with a scale.
LARGEST = {"i16": 32767, "i8": 127, "fp8e4nv": 448}


@dataclass(frozen=True)
class Update:
    """Tokens of every sequence, one after another, from its state: decode, and verification of drafts in a chain.

    Attributes
    ----------
    dim, dstate : int
        Of a head's state.
    dtype : str
        Of x, B, C, z and the result.
    dt_dtype, a_dtype, d_dtype, bias_dtype : str
        Of dt, A, D and dt's bias; "" where there is none.
    tied : bool
        dt, A and the bias have one value for a head, repeated by strides of 0.
    state_dtype, each_dtype : str
        Of the pool, and of the buffer of states after each token; "" where there is none. "i16", "i8" and "fp8e4nv" are
        codes with a float32 scale for each row of a state.
    gated : bool
        The result is multiplied by z sigmoid(z).
    softplus : bool
        dt is the softplus of what is given.
    index : str
        Type of slots and offsets.
    packed : bool
        Sequences are packed by offsets, else each row is one.
    each : str
        Where states after each token go: "" nowhere, "buffer", or "pool", the slots of the table that is written.
    final : bool
        The state after the last token is written.
    read, write, accepted, rows : bool
        Which tables there are: slots that are read, slots that are written, accepted tokens, rows of the buffer.
    rounds : int
        Philox rounds of stochastic rounding of stored states; 0 rounds to nearest.
    aligned : bool
        Rows of states, B and C can be read 16 bytes at a time.
    single : bool
        Every row has one token.
    dense : bool
        Rows of a state lie one after another without gaps, and dstate is a power of two.
    """

    dim: int
    dstate: int
    dtype: str
    dt_dtype: str
    a_dtype: str
    d_dtype: str = ""
    bias_dtype: str = ""
    tied: bool = True
    state_dtype: str = "fp32"
    each_dtype: str = ""
    gated: bool = False
    softplus: bool = True
    index: str = "i32"
    packed: bool = False
    each: str = ""
    final: bool = True
    read: bool = True
    write: bool = False
    accepted: bool = False
    rows: bool = False
    rounds: int = 0
    aligned: bool = True
    single: bool = False
    dense: bool = False


@dataclass(frozen=True)
class Replay:
    """Tokens from a checkpoint of the state and a ring of the tokens since.

    The state is that before `count` tokens, whose x, B and dt are in the ring. New tokens continue it: their results
    are written, and their x, B and dt to the ring behind the old ones. Where the ring would not take as many once more,
    the state after the old tokens is written in place of the checkpoint.

    Attributes
    ----------
    dim, dstate, dtype, dt_dtype, a_dtype, d_dtype, bias_dtype, state_dtype, gated, softplus, index, packed, read,
    rounds, aligned
        As of Update. dt, A and the bias have one value for a head.
    """

    dim: int
    dstate: int
    dtype: str
    dt_dtype: str
    a_dtype: str
    d_dtype: str = ""
    bias_dtype: str = ""
    state_dtype: str = "fp32"
    gated: bool = False
    softplus: bool = True
    index: str = "i32"
    packed: bool = False
    read: bool = True
    rounds: int = 0
    aligned: bool = True


@dataclass(frozen=True)
class Materialize:
    """The state after some of a ring's tokens, written to another slot, of all layers; nothing else changes.

    Attributes
    ----------
    dim, dstate, dtype, a_dtype, state_dtype, rounds
        As of Update; dtype is that of x and B in the rings. A is [heads].
    """

    dim: int
    dstate: int
    dtype: str
    a_dtype: str
    state_dtype: str
    rounds: int = 0


class Layers(NamedTuple):
    """Where each layer's tensors are: int64 [layers], addresses, and strides from slot to slot in elements.

    state, x, B, dt, A, scale : of states [slots, heads, dim, dstate], of rings [slots, heads, length, dim],
        [slots, groups, length, dstate] and float32 [slots, heads, length], of A [heads], of float32 scales
        [slots, heads, dim], 0 where there are none. All but slots are contiguous.
    """

    state: torch.Tensor
    state_stride: torch.Tensor
    x: torch.Tensor
    x_stride: torch.Tensor
    B: torch.Tensor
    B_stride: torch.Tensor
    dt: torch.Tensor
    dt_stride: torch.Tensor
    A: torch.Tensor
    scale: torch.Tensor
    scale_stride: torch.Tensor


class Requests(NamedTuple):
    """What is written: int32 tensors.

    source, goal : [layers, batch], slots; `pad` is skipped. start, count : [batch], ring rows. active : [batch], the
    requests that count, up to the first -1. seed : int64 of one element, or None.
    """

    source: torch.Tensor
    goal: torch.Tensor
    start: torch.Tensor
    count: torch.Tensor
    active: torch.Tensor
    pad: int
    seed: torch.Tensor | None


class Ring(NamedTuple):
    """Tokens since the checkpoint, in `length` rows of each slot; any strides but for a last one of 1.

    x : [slots, heads, length, dim]. B : [slots, groups, length, dstate].
    dt : float32 [slots, heads, length], after bias and softplus.
    start, count : int32 [slots]: the row of the oldest token, and how many there are.
    most : new tokens of a sequence at most.
    """

    x: torch.Tensor
    B: torch.Tensor
    dt: torch.Tensor
    start: torch.Tensor
    count: torch.Tensor
    most: int

    @property
    def length(self) -> int:
        return self.x.shape[2]


class Tokens(NamedTuple):
    """Inputs of the tokens, any strides; B and C with a last stride of 1.

    x, dt, z, out : [rows, tokens, heads, dim]. B, C : [rows, tokens, groups, dstate].
    offsets : [sequences + 1]. Sequence i is the tokens offsets[i] to offsets[i + 1] of the only row; without offsets
        each row is a sequence.
    """

    x: torch.Tensor
    dt: torch.Tensor
    B: torch.Tensor
    C: torch.Tensor
    z: torch.Tensor | None
    out: torch.Tensor
    offsets: torch.Tensor | None = None

    @property
    def sequences(self) -> int:
        return len(self.x) if self.offsets is None else len(self.offsets) - 1


class Layer(NamedTuple):
    """Parameters of a layer, any strides. A : [heads, dim, dstate]. D, bias : [heads, dim], or None."""

    A: torch.Tensor
    D: torch.Tensor | None
    bias: torch.Tensor | None


class Pool(NamedTuple):
    """States and their tables.

    state : [slots, heads, dim, dstate], rows contiguous. scale : float32 [slots, heads, dim], or None.
    each, each_scale : [buffers, steps, heads, dim, dstate] and [buffers, steps, heads, dim], contiguous, or None.
    read, write : [sequences] or [sequences, columns]: slots. None reads slot i for sequence i, and writes what is read.
        Tables may have more rows than there are sequences.
    rows : [sequences], the buffer of each sequence; None is the slot that was read.
    accepted : [sequences]; the column of `read` is one less. None is column 0.
    pad : a slot of this number, a negative one and one past the last are neither read nor written; the result of such a
        sequence is 0.
    seed : int64 of one element, for stochastic rounding.
    """

    state: torch.Tensor
    scale: torch.Tensor | None
    each: torch.Tensor | None
    each_scale: torch.Tensor | None
    read: torch.Tensor | None
    write: torch.Tensor | None
    rows: torch.Tensor | None
    accepted: torch.Tensor | None
    pad: int
    seed: torch.Tensor | None


def _catalog() -> Iterator[Update]:
    # Nemotron-3-Nano: 64 heads of 64 x 128.
    decode = {"single": True, "dense": True}
    yield Update(64, 128, "bf16", "bf16", "fp32", "bf16", "bf16", **decode)
    yield Update(64, 128, "bf16", "bf16", "fp32", "bf16", "bf16", state_dtype="fp16", gated=True, rounds=10, **decode)
    yield Update(64, 128, "bf16", "bf16", "fp32", "bf16", "bf16", state_dtype="i16", each_dtype="i16", each="buffer",
                 final=False, rows=True)  # fmt: skip
    yield Update(64, 64, "fp32", "fp32", "fp32", tied=False, packed=True, each="pool", final=False,
                 write=True, accepted=True)  # fmt: skip
    yield Update(80, 48, "bf16", "fp32", "bf16", tied=False, aligned=False)
    yield Update(128, 256, "bf16", "bf16", "fp32", "fp32", "fp32", state_dtype="fp8e4nv", index="i64", write=True)


def _replays() -> Iterator[Replay]:
    yield Replay(64, 128, "bf16", "bf16", "fp32", "bf16", "bf16")
    yield Replay(64, 128, "bf16", "bf16", "fp32", "bf16", "bf16", state_dtype="fp16", gated=True, rounds=10)
    yield Replay(64, 128, "bf16", "bf16", "fp32", state_dtype="i8", packed=True, index="i64")


def _materials() -> Iterator[Materialize]:
    yield Materialize(64, 128, "bf16", "fp32", "fp32")
    yield Materialize(64, 128, "bf16", "fp32", "i8", rounds=10)


update = Op("ssm_update", Update, portable_only(__name__, config.update), _catalog)
replay = Op(
    "ssm_replay", Replay, portable_only(__name__, config.replay, "portable_replay", "reference_replay"), _replays
)
materialize = Op(
    "ssm_materialize", Materialize,
    portable_only(__name__, config.replay, "portable_materialize", "reference_materialize"), _materials,
)  # fmt: skip
