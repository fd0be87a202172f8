"""Operations in torch, whose sources definitions carry; parameters by the names that templates give them."""

import math
from collections.abc import Callable

import torch


def _uses(reference: Callable, *helpers: Callable):
    """Definitions carry the sources of a reference's helpers before its own."""
    reference._trace_reference_dependencies = helpers


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


def layernorm(hidden_states, weight, bias):
    x = torch.nn.functional.layer_norm(hidden_states.float(), weight.shape, weight.float(), bias.float(), 1e-6)
    return x.to(hidden_states.dtype)


def matrix_product(A, B):
    return (A.float() @ B.float()).to(A.dtype)


def _frequencies(rotary_dim, scale, theta, device):
    exponents = torch.arange(0, rotary_dim, 2, dtype=torch.float64, device=device) / rotary_dim
    return theta**-exponents / scale


def _stretched(rotary_dim, scale, theta, low, high, context, device):
    plain = _frequencies(rotary_dim, 1, theta, device)
    kept = ((context * plain / (2 * math.pi) - low) / (high - low)).clamp(0, 1)
    return kept * plain + (1 - kept) * plain / scale


def _positions(indptr, offsets):
    lengths = indptr.diff().long()
    first = torch.repeat_interleave(offsets.long() - indptr[:-1].long(), lengths)
    return first + torch.arange(len(first), device=indptr.device)


def _rotated(x, cos, sin, interleave):
    rotary_dim = 2 * cos.shape[-1]
    turned, kept = x[..., :rotary_dim].float(), x[..., rotary_dim:]
    a, b = (turned[..., ::2], turned[..., 1::2]) if interleave else turned.chunk(2, -1)
    pair = a * cos[:, None] - b * sin[:, None], b * cos[:, None] + a * sin[:, None]
    turned = torch.stack(pair, -1).flatten(-2) if interleave else torch.cat(pair, -1)
    return torch.cat((turned.to(x.dtype), kept), -1)


def _both(q, k, positions, frequencies, interleave):
    angles = positions[:, None] * frequencies
    cos, sin = angles.cos().float(), angles.sin().float()
    return _rotated(q, cos, sin, interleave), _rotated(k, cos, sin, interleave)


def rope_pos_ids(q, k, pos_ids, rotary_dim=None, interleave=False, rope_scale=1, rope_theta=1e4):
    frequencies = _frequencies(rotary_dim or q.shape[-1], rope_scale, rope_theta, q.device)
    return _both(q, k, pos_ids, frequencies, interleave)


def rope(q, k, indptr, offsets, rotary_dim=None, interleave=False, rope_scale=1, rope_theta=1e4):
    frequencies = _frequencies(rotary_dim or q.shape[-1], rope_scale, rope_theta, q.device)
    return _both(q, k, _positions(indptr, offsets), frequencies, interleave)


def llama31_rope_pos_ids(
    q, k, pos_ids, rotary_dim=None, interleave=False, rope_scale=8, rope_theta=5e5, low_freq_factor=1,
    high_freq_factor=4, old_context_len=8192,
):  # fmt: skip
    factors = low_freq_factor, high_freq_factor, old_context_len
    frequencies = _stretched(rotary_dim or q.shape[-1], rope_scale, rope_theta, *factors, q.device)
    return _both(q, k, pos_ids, frequencies, interleave)


def llama31_rope(
    q, k, indptr, offsets, rotary_dim=None, interleave=False, rope_scale=8, rope_theta=5e5, low_freq_factor=1,
    high_freq_factor=4, old_context_len=8192,
):  # fmt: skip
    factors = low_freq_factor, high_freq_factor, old_context_len
    frequencies = _stretched(rotary_dim or q.shape[-1], rope_scale, rope_theta, *factors, q.device)
    return _both(q, k, _positions(indptr, offsets), frequencies, interleave)


def rope_cos_sin_cache(positions, query, key, head_size, cos_sin_cache, is_neox=True):
    cos, sin = cos_sin_cache[positions.long()].chunk(2, -1)
    parts = (x.view(len(x), -1, head_size) for x in (query, key))
    return tuple(_rotated(x, cos, sin, not is_neox).flatten(1) for x in parts)


_uses(rope_pos_ids, _frequencies, _rotated, _both)
_uses(rope, _frequencies, _positions, _rotated, _both)
_uses(llama31_rope_pos_ids, _frequencies, _stretched, _rotated, _both)
_uses(llama31_rope, _frequencies, _stretched, _positions, _rotated, _both)
_uses(rope_cos_sin_cache, _rotated)
