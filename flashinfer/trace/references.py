"""Operations in torch, whose sources definitions carry; parameters by the names that templates give them."""

import math

import torch


def rmsnorm(hidden_states, weight):
    x = hidden_states.float()
    x = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6) * weight.float()
    return x.to(hidden_states.dtype)


def gemma_rmsnorm(hidden_states, weight):
    x = hidden_states.float()
    x = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6) * (weight.float() + 1)
    return x.to(hidden_states.dtype)


def fused_add_rmsnorm(hidden_states, residual, weight):
    x = hidden_states.float() + residual.float()
    y = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6) * weight.float()
    return y.to(hidden_states.dtype), x.to(residual.dtype)


def gemma_fused_add_rmsnorm(hidden_states, residual, weight):
    x = hidden_states.float() + residual.float()
    y = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6) * (weight.float() + 1)
    return y.to(hidden_states.dtype), x.to(residual.dtype)


def rmsnorm_quant(hidden_states, weight, scale):
    x = hidden_states.float()
    y = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6) * weight.float() / scale
    return y.clamp(-448, 448).to(torch.float8_e4m3fn)


def fused_add_rmsnorm_quant(hidden_states, residual, weight, scale):
    x = hidden_states.float() + residual.float()
    y = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6) * weight.float() / scale
    return y.clamp(-448, 448).to(torch.float8_e4m3fn), x.to(residual.dtype)


def silu_and_mul(input):
    gate, up = input.float().chunk(2, -1)
    return (torch.nn.functional.silu(gate) * up).to(input.dtype)


def gelu_and_mul(input):
    gate, up = input.float().chunk(2, -1)
    return (torch.nn.functional.gelu(gate) * up).to(input.dtype)


def gelu_tanh_and_mul(input):
    gate, up = input.float().chunk(2, -1)
    return (torch.nn.functional.gelu(gate, approximate="tanh") * up).to(input.dtype)


def softmax(logits, temperature=None):
    x = logits.float()
    if temperature is not None:
        x = x / torch.as_tensor(temperature, dtype=torch.float32, device=x.device).reshape(-1, 1)
    return torch.softmax(x, -1)


def merge_state(v_a, s_a, v_b, s_b):
    s = torch.logaddexp2(s_a, s_b)
    v = v_a.float() * torch.exp2(s_a - s)[..., None] + v_b.float() * torch.exp2(s_b - s)[..., None]
    return v.to(v_a.dtype), s


def merge_state_in_place(v, s, v_other, s_other, mask=None):
    merged = torch.logaddexp2(s, s_other)
    out = v.float() * torch.exp2(s - merged)[..., None] + v_other.float() * torch.exp2(s_other - merged)[..., None]
    if mask is not None:
        out = torch.where(mask[:, None, None], out, v.float())
        merged = torch.where(mask[:, None], merged, s)
    return out.to(v.dtype), merged


def merge_states(v, s):
    weights = torch.softmax(s * math.log(2), 1)
    return (weights[..., None] * v.float()).sum(1).to(v.dtype), torch.logsumexp(s * math.log(2), 1) / math.log(2)
