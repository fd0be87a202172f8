"""The causal convolution in torch, float32, one sequence at a time."""

from __future__ import annotations

import torch
from torch.nn import functional

from flashinfer._core.implementation import Implementation
from flashinfer.ops.recurrent.layouts import spans


def run(problem, config, call) -> None:
    width, out = problem.width, call.out
    bounds = spans(call.offsets, *call.x.shape[:2])
    if call.offsets is not None:
        out.zero_()
    slots = range(len(bounds)) if call.slots is None else call.slots.tolist()
    accepted = [1] * len(bounds) if call.accepted is None else call.accepted.tolist()
    fresh = [True] * len(bounds) if call.fresh is None else call.fresh.tolist()
    # [channels, 1, width]
    weight = call.weight.float().transpose(1, 2).reshape(-1, 1, width)
    bias = None if call.bias is None else call.bias.float()
    for (row, begin, end), slot, count, reads in zip(bounds, slots, accepted, fresh):
        if slot <= call.null:
            out[row, begin:end] = 0
            continue
        before = torch.zeros(call.x.shape[2], width - 1, dtype=torch.float32, device=call.x.device)
        if call.state is not None and reads:
            first = min(max(count - 1, 0), call.state.shape[2] - width + 1)
            before = call.state[slot, :, first : first + width - 1].float()
        x = torch.cat([before, call.x[row, begin:end].float().T], 1)
        if end > begin:
            y = functional.conv1d(x[None], weight, bias, groups=weight.shape[0])[0]
            out[row, begin:end] = (functional.silu(y) if problem.silu else y).T.to(out.dtype)
        if call.state is not None and not (problem.rolling and begin == end):
            kept = x[:, 1 : call.state.shape[2] + 1] if problem.rolling else x[:, x.shape[1] - width + 1 :]
            call.state[slot, :, : kept.shape[1]] = kept.to(call.state.dtype)


IMPLEMENTATION = Implementation(run)
