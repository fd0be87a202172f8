"""The gated delta rule in torch, float32: token by token for decode and verification, by chunks for prefill."""

from __future__ import annotations

import torch
from torch.nn import functional

from flashinfer._core.implementation import Implementation
from flashinfer.ops.narrow import to_fp8
from flashinfer.ops.recurrent.delta import CHUNK, Chunks, Commit, Step
from flashinfer.ops.recurrent.layouts import spans

EPS = 1e-6


def normalized(x: torch.Tensor) -> torch.Tensor:
    return x * torch.rsqrt((x * x).sum(-1, keepdim=True) + EPS)


def log_decay(problem, gate: torch.Tensor, gates) -> torch.Tensor:
    """The logarithm of the decay, float32, of gates [..., heads] or [..., heads, K]."""
    x = gate.float()
    if problem.gate == "log":
        return x
    if problem.gate == "linear":
        return x.log()
    heads = x.shape[-2] if problem.channels else x.shape[-1]
    rate = spread(gates.a_log.float().exp(), heads, 0)
    if gates.bias is not None:
        x = x + spread(gates.bias.float(), heads, 0)
    rate = rate[:, None] if problem.channels else rate
    if problem.gate == "bounded":
        return gates.lower * torch.sigmoid(rate * x)
    return -rate * functional.softplus(x, gates.sharp, gates.threshold)


def spread(x: torch.Tensor, heads: int, dim: int) -> torch.Tensor:
    """x with each head repeated to give `heads` heads."""
    return x if x.shape[dim] == heads else x.repeat_interleave(heads // x.shape[dim], dim)


def stored(state: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """float32 states rounded to the dtype in which they are stored."""
    return to_fp8(state, dtype) if dtype.itemsize == 1 else state.to(dtype)


def gathered(tokens):
    """(function, lengths, place): the function pads an input to [sequences, longest, ...]; place is its token index."""
    if tokens.offsets is None:
        lengths = torch.full((tokens.k.shape[0],), tokens.k.shape[1], device=tokens.k.device, dtype=torch.int64)
        return (lambda x: x), lengths, None
    offsets = tokens.offsets.long()
    lengths = offsets.diff()
    longest = int(lengths.max()) if len(lengths) else 0
    place = offsets[:-1, None] + torch.arange(longest, device=offsets.device, dtype=torch.int64)
    place = place.clamp(max=max(tokens.k.shape[1] - 1, 0))
    return (lambda x: x[0][place]), lengths, place


def first_slots(pool, sequences: int, device) -> torch.Tensor:
    if pool.read is None:
        return torch.arange(sequences, device=device, dtype=torch.int64)
    read = pool.read.long()
    if read.dim() == 1:
        return read
    column = torch.zeros(sequences, device=device, dtype=torch.int64)
    if pool.accepted is not None:
        column = (pool.accepted.long() - 1).clamp(0, read.shape[1] - 1)
    return read.gather(1, column[:, None])[:, 0]


def step(problem: Step, tokens, gates, pool, out, scale, kept=None, norm=None, parents=None) -> None:
    heads, device = tokens.heads, tokens.k.device
    of, lengths, place = gathered(tokens)
    sequences, longest = len(lengths), int(lengths.max()) if len(lengths) else 0
    longest = longest if parents is None else min(longest, parents.shape[1])
    if tokens.offsets is not None:
        out.zero_()
    if not sequences or not longest and pool.state is None:
        return
    slots = first_slots(pool, sequences, device)
    live = slots > pool.null
    q, k, v = (spread(of(x).float(), heads, 2) for x in (tokens.q, tokens.k, tokens.v))
    if problem.normalize:
        q, k = normalized(q), normalized(k)
    log = None if tokens.gate is None else spread(of(log_decay(problem, tokens.gate, gates)), heads, 2)
    decay = (
        None if log is None else (log.exp() if problem.gate != "linear" else spread(of(tokens.gate.float()), heads, 2))
    )
    beta = torch.ones((), device=device, dtype=torch.float32).expand(*k.shape[:3])
    if tokens.beta is not None:
        beta = spread(of(tokens.beta).float(), heads, 2)
        beta = beta.sigmoid() if problem.beta == "logit" else beta
    state = torch.zeros(sequences, heads, v.shape[-1], k.shape[-1], device=device, dtype=torch.float32)
    if pool.source is not None:
        state[live] = pool.source[slots[live]].float()
    states, stopped = [], state
    for t in range(longest):
        active = live & (t < lengths)
        before = state if parents is None else _parent_state(states, state, parents[:, t].long(), t)
        new = before
        if decay is not None:
            new = new * (decay[:, t, :, None, :] if problem.channels else decay[:, t, :, None, None])
        correction = beta[:, t, :, None] * (v[:, t] - (new * k[:, t, :, None, :]).sum(-1))
        new = new + correction[..., None] * k[:, t, :, None, :]
        o = scale * (new * q[:, t, :, None, :]).sum(-1)
        if norm is not None:
            o = o * torch.rsqrt(o.square().mean(-1, keepdim=True) + norm.eps) * norm.weight.float()
            o = o * of(norm.gate)[:, t].float().sigmoid()
        o = torch.where(active[:, None, None], o, 0.0).to(out.dtype)
        if place is None:
            out[:, t] = o
        else:
            inside = t < lengths
            out[0, place[inside, t]] = o[inside]
        wanted = active if pool.stop is None else active & (t < pool.stop)
        _store_each(pool, new, wanted, t)
        if kept is not None and t < kept.v.shape[2]:
            at = (slots[active], t)
            raw = (
                x[:, t][active]
                for x in (of(tokens.k), of(tokens.v), *(() if tokens.gate is None else (of(tokens.gate),)))
            )
            _keep(problem, kept, at, tuple(raw), correction[active], None if log is None else log[:, t][active],
                  beta[:, t][active])  # fmt: skip
        new = torch.where(active[:, None, None, None], new, before)
        if pool.stop is not None:
            stopped = torch.where((t < pool.stop)[:, None, None, None], new, stopped)
        if parents is None:
            state = new
        else:
            states.append(new)
    if problem.final:
        last = state if pool.stop is None else stopped
        write = slots if pool.write is None else pool.write.long()
        goes = live & (write > pool.null)
        pool.state[write[goes]] = stored(last[goes], pool.state.dtype)


def _parent_state(states, first, parent, t):
    """The state that token t follows: that of its parent, or the first one where the parent is negative."""
    before = first
    for j in range(t):
        before = torch.where((parent == j)[:, None, None, None], states[j], before)
    return before


def _store_each(pool, state, active, t) -> None:
    if pool.each is not None:
        pool.each[: len(active), t][active] = stored(state[active], pool.each.dtype)
    if pool.rows is not None:
        row = pool.rows[:, t].long()
        goes = active & (row > pool.null)
        pool.state[row[goes]] = stored(state[goes], pool.state.dtype)


def _keep(problem, kept, at, raw, correction, log, beta) -> None:
    slots, t = at
    if problem.keep == "replay":
        kept.k[slots, :, t] = raw[0].to(kept.k.dtype)
        kept.v[slots, :, t] = raw[1].to(kept.v.dtype)
        kept.gate[slots, :, t] = 0.0 if log is None else log
        kept.beta[slots, :, t] = beta
        return
    heads = correction.shape[1]
    kept.v[slots, :, t] = correction
    both = torch.cat([spread(raw[0], heads, 1), spread(raw[2], heads, 1).to(raw[0].dtype)], -1)
    kept.k[slots, :, t] = both.to(kept.k.dtype)


def commit(problem: Commit, state, window, accepted) -> None:
    """state : [layers, slots, heads, V, K]."""
    heads = window.v.shape[2]
    for i, (slot, length) in enumerate(zip(accepted.slots.tolist(), accepted.lengths.tolist())):
        if slot <= accepted.null or length <= 0:
            continue
        s = state[:, slot].float()
        for j in range(length):
            t = j if accepted.path is None else int(accepted.path[i, j])
            k = spread(window.k[:, slot, :, t].float(), heads, 1)
            k = normalized(k) if problem.normalize else k
            s = s * window.gate[:, slot, :, t].float().exp()[..., None, None]
            u = (s * k[..., None, :]).sum(-1)
            delta = window.beta[:, slot, :, t].float()[..., None] * (window.v[:, slot, :, t].float() - u)
            s = s + delta[..., None] * k[..., None, :]
            if accepted.track_slots is not None and int(accepted.track_steps[i]) == j:
                track = int(accepted.track_slots[i])
                if track > accepted.null:
                    state[:, track] = stored(s, state.dtype)
        state[:, slot] = stored(s, state.dtype)


# Below this, a decay is taken for exp(LEAST), so that sums of logarithms over a chunk keep their digits.
LEAST = -64.0
BLOCK = 16


def chunks(problem: Chunks, tokens, gates, pool, out, scale, marks=None, write=None, segment=0) -> None:
    """The WY form, one sequence and one chunk of 64 padded tokens at a time: bits depend on nothing else."""
    heads = tokens.heads
    bounds = spans(tokens.offsets, *tokens.k.shape[:2])
    if tokens.offsets is not None:
        out.zero_()
    log = None if tokens.gate is None else log_decay(problem, tokens.gate, gates).clamp(min=LEAST)
    slots = first_slots(pool, len(bounds), out.device).tolist()
    places = [0] * len(bounds) if marks is None else marks.starts.tolist()
    table = None if marks is None or marks.slots is None else marks.slots.tolist()
    for (row, begin, end), slot, place in zip(bounds, slots, places):
        if slot <= pool.null:
            out[row, begin:end] = 0
            continue
        shape = heads, tokens.v.shape[3], tokens.k.shape[3]
        state = torch.zeros(shape, dtype=torch.float32, device=out.device)
        if pool.source is not None:
            state = pool.source[slot].float()
        if marks is not None and marks.first and end > begin:
            _mark(marks, table, place, state)
            place += 1
        for first in range(begin, end, problem.stride):
            last = min(first + problem.stride, end)
            state = _chunk(problem, tokens, log, (row, first, last), state, out, scale, write)
            done = first + problem.stride - begin
            if marks is not None and done % marks.every == 0 and done < end - begin + (not marks.first):
                _mark(marks, table, place, state)
                place += 1
        if pool.state is not None:
            pool.state[slot] = stored(state, pool.state.dtype)


def _mark(marks, table, place, state) -> None:
    place = place if table is None else table[place]
    if place >= 0:
        marks.out[place] = stored(state, marks.out.dtype)


def _chunk(problem, tokens, log, where, state, out, scale, write):
    """One chunk: outputs, and the state after it. Everything is [heads, 64, ...], padded with zeros."""
    row, first, last = where
    heads = state.shape[0]

    def padded(x):
        x = spread(x[row, first:last].float(), heads, 1).transpose(0, 1)
        tile = x.new_zeros(heads, CHUNK, *x.shape[2:])
        tile[:, : last - first] = x
        return tile

    q, k, v = (padded(x) for x in tokens[:3])
    if problem.normalize:
        q, k = normalized(q), normalized(k)
    beta = torch.ones(heads, CHUNK, dtype=torch.float32, device=out.device)
    erase = k
    if problem.beta == "channels":
        erase = k * padded(tokens.beta)
    elif tokens.beta is not None:
        beta = padded(tokens.beta.float().sigmoid() if problem.beta == "logit" else tokens.beta)
    sums = torch.zeros(heads, CHUNK, 1, dtype=torch.float64, device=out.device)
    if log is not None:
        # In float64: behind tokens that forget, sums are large, and decays are made of their differences.
        sums = padded(log).double().cumsum(1)
        sums = sums if problem.channels else sums[..., None]
    keys, queries = (_decayed_products(x, k, sums) for x in (erase, q))
    since = sums.exp().float()
    v = v if write is None else v * padded(write)
    values = v - (erase * since) @ state.mT
    lower = (keys * beta[..., None]).tril(-1)
    change = torch.linalg.solve_triangular(lower, beta[..., None] * values, upper=False, unitriangular=True)
    o = (q * since) @ state.mT + queries.tril() @ change
    out[row, first:last] = (scale * o[:, : last - first]).transpose(0, 1).to(out.dtype)
    total = sums[:, -1:]
    return state * total.exp().float() + change.mT @ (k * (total - sums).exp().float())


def _decayed_products(x, k, sums):
    """x_i . k_j with the decay from j to i, for i no earlier than j."""
    if sums.shape[-1] == 1:
        gap = sums - sums.mT
        return (x @ k.mT) * gap.tril().exp().float().tril()
    products = x.new_zeros(*x.shape[:2], k.shape[1])
    for i in range(0, x.shape[1], BLOCK):
        rows = slice(i, i + BLOCK)
        before = sums[:, i - 1 : i] if i else torch.zeros_like(sums[:, :1])
        left = x[:, rows] * (sums[:, rows] - before).exp().float()
        products[:, rows, :i] = left @ (k[:, :i] * (before - sums[:, :i]).exp().float()).mT
        gap = sums[:, rows, None] - sums[:, None, rows]
        within = (x[:, rows, None] * k[:, None, rows] * gap.clamp(max=0).exp().float()).sum(-1)
        products[:, rows, rows] = within
    return products


IMPLEMENTATION = Implementation({Step: step, Commit: commit, Chunks: chunks})
