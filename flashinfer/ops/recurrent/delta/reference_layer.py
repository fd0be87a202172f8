"""One token of a whole layer of Kimi Linear's kind in torch, float32."""

import torch
from torch.nn import functional

from flashinfer._core.implementation import Implementation
from flashinfer.ops.recurrent.delta.reference import log_decay, normalized, stored


def run(problem, config, tokens, gates, states, out, scale, norm) -> None:
    slots = states.slots.long()
    live = slots > states.null
    slots = slots[live]
    out.zero_()
    heads, dim = out.shape[1:]
    window = torch.cat([states.conv[slots].float(), tokens.x[live].float()[..., None]], 2)
    states.conv[slots] = window[..., 1:].to(states.conv.dtype)
    taps = tokens.weight.float().transpose(1, 2).reshape(-1, problem.width)
    q, k, v = functional.silu((window * taps).sum(-1)).view(-1, 3, heads, dim).unbind(1)
    q, k = normalized(q), normalized(k)
    decay = log_decay(problem, tokens.gate[live], gates).exp()
    s = states.state[slots].float() * decay[:, :, None]
    correction = tokens.beta[live].float().sigmoid()[..., None] * (v - (s * k[:, :, None]).sum(-1))
    s = s + correction[..., None] * k[:, :, None]
    states.state[slots] = stored(s, states.state.dtype)
    o = scale * (s * q[:, :, None]).sum(-1)
    o = o * torch.rsqrt(o.square().mean(-1, keepdim=True) + norm.eps) * norm.weight.float()
    out[live] = (o * norm.gate[live].float().sigmoid()).to(out.dtype)


IMPLEMENTATION = Implementation(run)
