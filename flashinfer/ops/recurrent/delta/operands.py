"""What a gated delta rule reads and writes, as typed records."""

from __future__ import annotations

from typing import NamedTuple

import torch

# Slots up to this one are padding where no null slot is named.
NO_NULL = -1


class Tokens(NamedTuple):
    """Inputs of the tokens, any strides but for a last one of 1.

    q, k : [rows, tokens, heads, K]; q is None where no output is asked for.
    v : [rows, tokens, heads, V].
    gate : [rows, tokens, heads] or [rows, tokens, heads, K]; None is no decay.
    beta : [rows, tokens, heads]; None is 1.
    offsets : [sequences + 1]. Sequence i is the tokens offsets[i] to offsets[i + 1] of the only row; without offsets
        each row is a sequence.
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
        """Heads of the state: the most that any input has."""
        return max(x.shape[2] for x in (self.q, self.k, self.v) if x is not None)


class Gates(NamedTuple):
    """Parameters that make decays of raw gates.

    a_log : float32 [heads], the logarithm of a rate.
    bias : [heads] or [heads, K], added to the raw gate; None is 0.
    lower : the bound of a bounded gate.
    sharp, threshold : softplus(x) is log(1 + exp(sharp x)) / sharp, and x where sharp x is above the threshold.
    """

    a_log: torch.Tensor | None = None
    bias: torch.Tensor | None = None
    lower: float = 0.0
    sharp: float = 1.0
    threshold: float = 20.0


class Pool(NamedTuple):
    """States, in the order [slot, head, V, K] of their dimensions whatever their strides.

    source : read from; None is zero.
    state : written to; it may be the source.
    read : [sequences] or [sequences, columns], the slot that a sequence begins with; None is its number.
    accepted : [sequences]; column accepted - 1 of `read`, at least the first and at most the last. None: the first.
    write : [sequences], the slot of the state after the last token; None is the one that was read.
    stop : [sequences], after how many tokens the state is the one that is written; None: after all. Nor do states after
        later tokens go anywhere.
    null : slots up to this one are padding: nothing is read or written, and the output is 0.
    each : [sequences, tokens, heads, V, K], receives the state after every token.
    rows : [sequences, tokens], slots of `state` that receive the state after every token.
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
    """What a verification keeps of each token, by the slot that was read, to commit it later.

    Of "replay": v [slots, heads, T, V] and k [slots, key heads, T, K] as they came, the logarithm of the decay and beta
    [slots, heads, T] in float32. Of "corrections": v the corrections beta (v - u), float32 [slots, heads, T, V], and k
    [slots, heads, T, 2 K], the key and the gate as they came. Each slot is contiguous.
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
    """One token of each sequence of a whole layer, any strides but for a last one of 1 of the gate.

    x : [rows, 3 heads K], q, k and v of all heads before the convolution. weight : [3, width, heads K].
    gate : [rows, heads, K], raw. beta : [rows, heads], raw.
    """

    x: torch.Tensor
    weight: torch.Tensor
    gate: torch.Tensor
    beta: torch.Tensor


class LayerStates(NamedTuple):
    """What a layer keeps of each sequence, any strides.

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
    """Which tokens of the windows are folded into which states, [sequences] each.

    slots : of the states and windows; up to `null` nothing is done.
    lengths : tokens that are folded.
    path : [sequences, T], which token of the window is the i-th; None: the first ones in order.
    track_slots, track_steps : the state after that token also goes to that slot; None: it does not.
    """

    slots: torch.Tensor
    lengths: torch.Tensor
    path: torch.Tensor | None = None
    track_slots: torch.Tensor | None = None
    track_steps: torch.Tensor | None = None
    null: int = NO_NULL


class Marks(NamedTuple):
    """States on the way: every `every` tokens of each sequence, to consecutive places from starts[sequence] on.

    out : [places or slots, heads, V, K]. starts : [sequences + 1].
    first : whether the first one is the initial state (then there are ceil(length / every), else floor).
    slots : [places], the row of `out` for each place; None: the place itself.
    """

    out: torch.Tensor
    starts: torch.Tensor
    every: int
    first: bool = False
    slots: torch.Tensor | None = None
