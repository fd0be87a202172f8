"""The tensors that the gated delta rule reads and writes, as typed records."""

from __future__ import annotations

from typing import NamedTuple

import torch

# The null slot by default: slots up to the null slot are padding.
NO_NULL = -1


class Tokens(NamedTuple):
    """Inputs of the tokens. The last stride is 1, the others are arbitrary.

    q, k : [rows, tokens, heads, K]; q is None if no output is needed.
    v : [rows, tokens, heads, V].
    gate : [rows, tokens, heads] or [rows, tokens, heads, K]; None for no decay.
    beta : [rows, tokens, heads]; None for 1.
    offsets : [sequences + 1]. Sequence i has tokens offsets[i] to offsets[i + 1] - 1 of the only row. None: each row is
        a sequence.
    """

    q: torch.Tensor | None
    k: torch.Tensor
    v: torch.Tensor
    gate: torch.Tensor | None = None
    beta: torch.Tensor | None = None
    offsets: torch.Tensor | None = None

    @property
    def sequences(self) -> int:
        return self.k.shape[0] if self.offsets is None else self.offsets.shape[0] - 1

    @property
    def heads(self) -> int:
        """Heads of the state: the largest number of heads of q, k and v."""
        return max(x.shape[2] for x in (self.q, self.k, self.v) if x is not None)


class Gates(NamedTuple):
    """Parameters of raw gates, from which decays are computed.

    a_log : float32 [heads], the logarithm of a rate.
    bias : [heads] or [heads, K], added to the raw gate; None for 0.
    lower : the bound of a bounded gate.
    sharp, threshold : softplus(x) is log(1 + exp(sharp x)) / sharp, and x where sharp x is above the threshold.
    """

    a_log: torch.Tensor | None = None
    bias: torch.Tensor | None = None
    lower: float = 0.0
    sharp: float = 1.0
    threshold: float = 20.0


class Pool(NamedTuple):
    """States [slot, head, V, K], of any strides.

    source : states that are read; None for zeros.
    state : states that are written; may be the source.
    read : [sequences] or [sequences, columns], the slot of a sequence's initial state; None: the sequence's number.
    accepted : [sequences]; the column of `read` is accepted - 1, clamped. None: the first column.
    write : [sequences], the slot of the final state; None: the slot that was read.
    stop : [sequences], the number of tokens after which the final state is taken; no state after later tokens is
        stored. None: all tokens.
    null : slots up to this one are padding: nothing is read or written, and the output is 0.
    each : [sequences, tokens, heads, V, K], the state after every token.
    rows : [sequences, tokens], slots of `state` for the state after every token.
    """

    source: torch.Tensor | None = None
    state: torch.Tensor | None = None
    read: torch.Tensor | None = None
    accepted: torch.Tensor | None = None
    write: torch.Tensor | None = None
    stop: torch.Tensor | None = None
    null: int = NO_NULL
    each: torch.Tensor | None = None
    rows: torch.Tensor | None = None


class Kept(NamedTuple):
    """What a verification stores of each token for a later commit, at the slot of its initial state.

    With keep = "replay": raw v [slots, heads, T, V] and k [slots, key heads, T, K], and the logarithm of the decay and
    beta, float32 [slots, heads, T]. With "corrections": in v the corrections beta (v - u), float32 [slots, heads, T,
    V], and in k [slots, heads, T, 2 K] the raw key and gate. Each slot is contiguous.
    """

    v: torch.Tensor
    k: torch.Tensor
    gate: torch.Tensor | None = None
    beta: torch.Tensor | None = None


class Norm(NamedTuple):
    """The gated RMSNorm that follows: out = o / rms(o) * weight * sigmoid(gate).

    gate : [rows, tokens, heads, V]. weight : float32 [V].
    """

    gate: torch.Tensor
    weight: torch.Tensor
    eps: float


class LayerTokens(NamedTuple):
    """One token of each sequence for a whole layer. The gate's last stride is 1, other strides are arbitrary.

    x : [rows, 3 heads K], q, k and v of all heads before the convolution. weight : [3, width, heads K].
    gate : [rows, heads, K], raw. beta : [rows, heads], raw.
    """

    x: torch.Tensor
    weight: torch.Tensor
    gate: torch.Tensor
    beta: torch.Tensor


class LayerStates(NamedTuple):
    """The state of a layer for each sequence, of any strides.

    conv : [slots, 3 heads K, width - 1], the last inputs. state : [slots, heads, K, K].
    slots : [rows], contiguous; slots up to `null` are padding: nothing is read or written, and the output is 0.
    """

    conv: torch.Tensor
    state: torch.Tensor
    slots: torch.Tensor
    null: int


class Window(NamedTuple):
    """The replay windows of all layers: Kept's tensors of "replay", with layers in front."""

    v: torch.Tensor
    k: torch.Tensor
    gate: torch.Tensor
    beta: torch.Tensor


class Accepted(NamedTuple):
    """The tokens of the windows that are applied to the states, [sequences] each.

    slots : slots of the states and windows; slots up to `null` are skipped.
    lengths : the number of accepted tokens.
    path : [sequences, T], the window's tokens in order; None: the first ones.
    track_slots, track_steps : the state after accepted token track_steps is also stored in track_slots; None: it is
    not.
    """

    slots: torch.Tensor
    lengths: torch.Tensor
    path: torch.Tensor | None = None
    track_slots: torch.Tensor | None = None
    track_steps: torch.Tensor | None = None
    null: int = NO_NULL


class Marks(NamedTuple):
    """Checkpoints: the states after every `every` tokens of each sequence, at consecutive places from starts[sequence]
    on.

    out : [places or slots, heads, V, K]. starts : [sequences + 1].
    first : whether the first checkpoint is the initial state (then there are ceil(length / every), else floor). A
        sequence of 130 tokens with every = 64 has states after 64 and 128 tokens, or with `first` after 0, 64 and 128.
    slots : [places], the row of `out` for each place; None: the place itself.
    """

    out: torch.Tensor
    starts: torch.Tensor
    every: int
    first: bool = False
    slots: torch.Tensor | None = None
