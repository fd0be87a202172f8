"""The state-space recurrence in torch, in float32, token by token."""

import torch
from torch.nn.functional import silu, softplus

from flashinfer._core.implementation import Implementation
from flashinfer.ops.recurrent.ssm import LARGEST, philox

# Fraction bits that a dtype keeps of float32's 23, and the exponent of its least normal number.
_FRACTION = {torch.bfloat16: (7, -126), torch.float16: (10, -14), torch.float8_e4m3fn: (3, -6)}


def run(problem, config, tokens, layer, pool):
    """As `flashinfer/ops/recurrent/ssm/__init__.py` states it."""
    heads = tokens.x.shape[2]
    repeat = heads // tokens.B.shape[2]
    A = layer.A.float()
    bounds = None if tokens.offsets is None else tokens.offsets.tolist()
    if bounds is not None:
        tokens.out.zero_()
    for n in range(tokens.sequences):
        row, (start, end) = (n, (0, tokens.x.shape[1])) if bounds is None else (0, bounds[n : n + 2])
        slot = slot_of(pool, pool.read, n, 0 if pool.accepted is None else int(pool.accepted[n]) - 1)
        if slot is None:
            tokens.out[row, start:end] = 0
            continue
        h = widened(pool.state, pool.scale, slot)
        for t in range(start, end):
            x, dt = tokens.x[row, t].float(), tokens.dt[row, t].float()
            dt = dt if layer.bias is None else dt + layer.bias.float()
            dt = softplus(dt) if problem.softplus else dt
            B, C = (m[row, t].float().repeat_interleave(repeat, 0)[:, None] for m in (tokens.B, tokens.C))
            h = h * torch.exp(dt[..., None] * A) + (dt * x)[..., None] * B
            y = (h * C).sum(-1)
            y = y if layer.D is None else y + layer.D.float() * x
            tokens.out[row, t] = y if tokens.z is None else y * silu(tokens.z[row, t].float())
            if problem.each == "buffer":
                buffer = slot if pool.rows is None else int(pool.rows[n])
                if 0 <= buffer < len(pool.each):
                    where = buffer * pool.each.shape[1] + t - start
                    store(problem, pool, pool.each.flatten(0, 1), _flat(pool.each_scale), where, h, t - start)
            elif problem.each == "pool":
                goal = slot_of(pool, pool.write, n, t - start)
                if goal is not None:
                    store(problem, pool, pool.state, pool.scale, goal, h, t - start)
        goal = slot if pool.write is None else slot_of(pool, pool.write, n, 0)
        if problem.final and goal is not None and end > start:
            store(problem, pool, pool.state, pool.scale, goal, h, end - start - 1)


def _flat(scale):
    return None if scale is None else scale.flatten(0, 1)


def slot_of(pool, table, n, column) -> int | None:
    """The slot of a sequence; None where it is padding."""
    if table is None:
        slot = n
    else:
        slot = int(table[n] if table.dim() == 1 else table[n, min(max(column, 0), table.shape[1] - 1)])
    return slot if slot != pool.pad and 0 <= slot < len(pool.state) else None


def widened(state, scale, slot):
    wide = state[slot].float()
    return wide if scale is None else wide * scale[slot][..., None]


def store(problem, pool, states, scales, slot, h, step) -> None:
    """Write a state in the dtype of `states`, with the scales of its rows where it has them."""
    dtype = states.dtype
    name = {torch.int16: "i16", torch.int8: "i8", torch.float8_e4m3fn: "fp8e4nv"}.get(dtype)
    if scales is not None:
        largest = h.abs().amax(-1)
        # A code may not be NaN, so that a row with one has it as its scale.
        scale = torch.where(largest == 0, 1.0, largest / LARGEST[name])
        scales[slot] = scale
        h = h / scale[..., None]
    if problem.rounds:
        at = torch.arange(h.numel(), device=h.device).view(h.shape)
        seed = int(pool.seed)
        h = _rounded(h, dtype, philox.words(seed, (at, slot, step, 0), problem.rounds))
    elif not dtype.is_floating_point:
        h = h.round()
    if name:
        h = h.clamp(-LARGEST[name], LARGEST[name])
    states[slot] = h.to(dtype)


def _rounded(h, dtype, random):
    """Each value as one of its two neighbours in a dtype, the nearer the more often."""
    if dtype == torch.float32:
        return h
    part = (random >> 8).float() / (1 << 24)
    if not dtype.is_floating_point:
        return torch.floor(h + part)
    bits, least = _FRACTION[dtype]
    exponent = torch.frexp(h)[1] - 1
    quantum = torch.ldexp(torch.ones_like(h), exponent.clamp(min=least) - bits)
    return torch.floor(h / quantum + part) * quantum


IMPLEMENTATION = Implementation(run)
