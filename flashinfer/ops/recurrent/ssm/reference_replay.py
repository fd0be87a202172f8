"""Replay from a checkpoint in torch: the ring's tokens, then the new ones, in float32."""

import torch
from torch.nn.functional import silu, softplus

from flashinfer._core.implementation import Implementation
from flashinfer.ops.recurrent.ssm.reference import slot_of, store, widened


def run(problem, config, tokens, layer, pool, ring):
    """As `flashinfer/ops/recurrent/ssm/__init__.py` states it."""
    repeat = tokens.x.shape[2] // tokens.B.shape[2]
    A, length = layer.A.float(), ring.length
    bounds = None if tokens.offsets is None else tokens.offsets.tolist()
    if bounds is not None:
        tokens.out.zero_()
    for n in range(tokens.sequences):
        row, (start, end) = (n, (0, tokens.x.shape[1])) if bounds is None else (0, bounds[n : n + 2])
        slot = slot_of(pool, pool.read, n, 0)
        if slot is None:
            tokens.out[row, start:end] = 0
            continue
        first, count = int(ring.start[slot]), int(ring.count[slot])
        h = widened(pool.state, pool.scale, slot)
        for t in range(count):
            at = (first + t) % length
            h = _step(h, ring.x[slot, :, at].float(), ring.dt[slot, :, at], A, ring.B[slot, :, at].float(), repeat)
        if count + 2 * ring.most > length:
            store(problem, pool, pool.state, pool.scale, slot, h, 0)
        for t in range(start, end):
            x, dt = tokens.x[row, t].float(), tokens.dt[row, t, :, 0].float()
            dt = dt if layer.bias is None else dt + layer.bias[:, 0].float()
            dt = softplus(dt) if problem.softplus else dt
            h = _step(h, x, dt, A, tokens.B[row, t].float(), repeat)
            y = (h * tokens.C[row, t].float().repeat_interleave(repeat, 0)[:, None]).sum(-1)
            y = y if layer.D is None else y + layer.D.float() * x
            tokens.out[row, t] = y if tokens.z is None else y * silu(tokens.z[row, t].float())
            at = (first + count + t - start) % length
            ring.x[slot, :, at] = tokens.x[row, t]
            ring.B[slot, :, at] = tokens.B[row, t]
            ring.dt[slot, :, at] = dt


def _step(h, x, dt, A, B, repeat):
    B = B.repeat_interleave(repeat, 0)[:, None]
    return h * torch.exp(dt[:, None, None] * A) + (dt[:, None] * x)[..., None] * B


IMPLEMENTATION = Implementation(run)
