"""State-space duality in torch, float32: one sequence and one chunk of padded tokens at a time."""

from __future__ import annotations

import torch
from torch.nn import functional

from flashinfer._core.implementation import Implementation
from flashinfer.ops.recurrent.layouts import spans

# A decay below exp(-64) is taken for exp(-64), as kernels take it: -inf has no differences.
LEAST = -64.0


def run(problem, config, tokens, layer, pool, out, marks=None) -> None:
    """Bits of a sequence depend on nothing else: chunks begin at multiples of `chunk` of their sequence."""
    bounds = spans(tokens.offsets, *tokens.x.shape[:2])
    if tokens.offsets is not None:
        out.zero_()
    slots = range(len(bounds)) if pool.read is None else pool.read.tolist()
    for n, ((row, begin, end), slot) in enumerate(zip(bounds, slots)):
        if not 0 <= slot < (len(bounds) if pool.read is None else len(pool.source)):
            out[row, begin:end] = 0
            continue
        shape = tokens.x.shape[2], problem.dim, problem.dstate
        state = torch.zeros(shape, dtype=torch.float32, device=tokens.x.device)
        if pool.source is not None:
            state = pool.source[slot].float()
        wanted = {} if marks is None else _wanted(marks, n, 0 if tokens.offsets is None else begin)
        _mark(marks, wanted.get(0, ()), state)
        for first in range(begin, end, problem.chunk):
            last = min(first + problem.chunk, end)
            chunk = _Chunk(problem, tokens, layer, row, first, last)
            out[row, first:last] = chunk.results(state)[: last - first].to(out.dtype)
            for token, places in wanted.items():
                if first < token + begin <= last:
                    _mark(marks, places, chunk.state_before(token + begin - first, state))
            state = chunk.state_before(last - first, state)
        if pool.state is not None:
            pool.state[slot] = state.to(pool.state.dtype)


def _wanted(marks, n: int, begin: int) -> dict:
    """The places of the states that are wanted of sequence n, by their token, counted from its first."""
    wanted: dict[int, list] = {}
    for token, place in zip(marks.tokens[n].tolist(), marks.places[n].tolist()):
        if token >= 0 and 0 <= place < len(marks.out):
            wanted.setdefault(token - begin, []).append(place)
    return wanted


def _mark(marks, places, state) -> None:
    for place in places:
        marks.out[place] = state.to(marks.out.dtype)


class _Chunk:
    """The tokens of a chunk in float32, padded with tokens of dt 0, which change nothing."""

    def __init__(self, problem, tokens, layer, row, first, last):
        heads = tokens.x.shape[2]

        def padded(x):
            return functional.pad(x, (0,) * (2 * x.dim() - 1) + (problem.chunk - (last - first),))

        x, dt, B, C = (t[row, first:last].float() for t in tokens[:4])
        if layer.bias is not None:
            dt = dt + layer.bias.float()
        if problem.softplus:
            dt = functional.softplus(dt)
        self.dt = padded(dt.clamp(layer.least, layer.most))
        self.x = padded(x)
        self.B, self.C = (padded(m).repeat_interleave(heads // m.shape[1], 1) for m in (B, C))
        # In float64: of tokens behind one that decays much, differences of sums are to keep their digits.
        self.sums = (self.dt * layer.A.float()).clamp(min=LEAST).double().cumsum(0)
        self.skip = None if layer.D is None else layer.D.float().view(heads, -1) * self.x
        self.gate = None if tokens.z is None else functional.silu(padded(tokens.z[row, first:last].float()))

    def results(self, state) -> torch.Tensor:
        """[chunk, heads, dim]."""
        sums = self.sums.T
        decay = (sums[:, :, None] - sums[:, None, :]).tril().float().exp().tril()
        scores = torch.einsum("ihn,jhn->hij", self.C, self.B) * decay * self.dt.T[:, None]
        y = torch.einsum("hij,jhd->ihd", scores, self.x)
        y = y + torch.einsum("ihn,hdn->ihd", self.C, state) * self.sums.float().exp()[..., None]
        if self.skip is not None:
            y = y + self.skip
        return y if self.gate is None else y * self.gate

    def state_before(self, token: int, state) -> torch.Tensor:
        """The state before a token of the chunk, or after its last, of the state at its beginning."""
        last = self.sums[token - 1]
        weight = torch.zeros_like(self.dt)
        weight[:token] = self.dt[:token] * (last - self.sums[:token]).float().exp()
        added = torch.einsum("jhd,jhn->hdn", self.x * weight[..., None], self.B)
        return state * last.float().exp()[:, None, None] + added


IMPLEMENTATION = Implementation(run)
