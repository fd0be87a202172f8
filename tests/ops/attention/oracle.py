"""Attention written from its definition, a request and a head at a time: float64 is the truth, others are peers.

A peer in a 16-bit dtype computes logits, softmax and sums in float32. It rounds what a kernel has to round: q and k
after a rotation, the weights that multiply V, and the result.
"""

import math
from dataclasses import dataclass, field

import torch

from tests.ops.tensor_cores import half_product, truncated


@dataclass
class Options:
    """What changes the mathematics of attention; the names are those of the public API."""

    causal: bool = False
    window_left: int = -1
    logits_soft_cap: float | None = None
    sm_scale: float | None = None
    pos_encoding_mode: str = "NONE"
    rope_scale: float | None = None
    rope_theta: float | None = None

    def as_kwargs(self):
        return dict(self.__dict__)


@dataclass
class Extras:
    """Inputs beside q, k, v: per-request masks, sinks, scales."""

    masks: list = field(default_factory=list)
    sinks: torch.Tensor | None = None
    q_scale: float = 1.0
    k_scale: float = 1.0
    v_scale: float = 1.0


def rotate(x, positions, scale, theta):
    """LLaMA's rotary embedding of rows [n, dim]: pairs (i, i + dim / 2) as complex numbers, turned by their angle."""
    half = x.shape[-1] // 2
    frequency = theta ** (-torch.arange(half, dtype=torch.float64, device=x.device) / half) / scale
    turn = torch.polar(torch.ones((), dtype=torch.float64, device=x.device), positions.double()[:, None] * frequency)
    re, im = turn.real.to(x.dtype), turn.imag.to(x.dtype)
    lo, hi = x[:, :half], x[:, half:]
    return torch.cat((lo * re - hi * im, lo * im + hi * re), 1)


def slope(head, heads):
    """ALiBi's slope: a geometric sequence from 2^(-8/n) for n a power of two, interleaved with that of 2n beyond it."""
    power = 2 ** math.floor(math.log2(heads))
    if head < power:
        return 2 ** (-8 / power * (head + 1))
    return 2 ** (-8 / (2 * power) * (2 * (head - power) + 1))


def scores(q, k, given, total=None):
    """q @ k.T + total. In float32 of half-precision inputs on a GPU, as tensor cores add: see `half_product`."""
    if q.dtype != torch.float32 or given not in (torch.float16, torch.bfloat16) or not q.is_cuda:
        return q @ k.T if total is None else q @ k.T + total
    return half_product(q, k.T, 0.0 if total is None else total.double()).float()


def _tanh(x):
    """In float32 with the relative error that kernels may make (docs/rooms/attention.md), however small the result."""
    if x.dtype != torch.float32:
        return torch.tanh(x)
    return truncated(torch.tanh(x.double()), 21).float()


def weigh(s, dtype):
    """softmax(s) over the last dimension in two factors: the weights that multiply V, as a kernel whose products take
    `dtype` rounds them, and the sums that divide the product. A row without finite logits has weights of 0."""
    top = s.amax(-1, keepdim=True) if s.shape[-1] else s.new_zeros(*s.shape[:-1], 1)
    p = torch.exp(s - torch.where(top.isfinite(), top, 0.0))
    total = p.sum(-1, keepdim=True)
    return p.to(dtype).to(s.dtype), torch.where(total > 0, total, 1.0)


def request(q, k, v, o: Options, dtype, mask=None, extras=None):
    """out [q_len, heads, dim] in `dtype`, and base-2 lse [q_len, heads] in float32, or float64 with that dtype."""
    wide = torch.promote_types(dtype, torch.float32)
    extras = extras or Extras()
    q_len, heads, dim = q.shape
    kv_len, kv_heads = k.shape[:2]
    scale = (o.sm_scale if o.sm_scale is not None else 1 / math.sqrt(dim)) * extras.q_scale * extras.k_scale
    q_pos = torch.arange(q_len, device=q.device) + kv_len - q_len
    k_pos = torch.arange(kv_len, device=q.device)
    seen = torch.ones(q_len, kv_len, dtype=torch.bool, device=q.device)
    if mask is not None:
        seen = mask.view(q_len, kv_len).clone()
    elif o.causal:
        seen = k_pos[None] <= q_pos[:, None]
    if o.window_left >= 0:
        seen = seen & (k_pos[None] >= q_pos[:, None] - o.window_left)
    out = torch.zeros(q_len, heads, v.shape[-1], dtype=dtype, device=q.device)
    lse = torch.full((q_len, heads), -math.inf, dtype=wide, device=q.device)
    for h in range(heads):
        kv_head = h * kv_heads // heads
        qh, kh, vh = (t[:, i].to(dtype).to(wide) for t, i in ((q, h), (k, kv_head), (v, kv_head)))
        if o.pos_encoding_mode == "ROPE_LLAMA":
            turn = (o.rope_scale or 1.0, o.rope_theta or 1e4)
            qh, kh = (rotate(x, at, *turn).to(dtype).to(wide) for x, at in ((qh, q_pos), (kh, k_pos)))
        s = scores(qh, kh, q.dtype) * scale
        if o.pos_encoding_mode == "ALIBI":
            s = s + slope(h, heads) * (k_pos[None] - q_pos[:, None]).to(wide)
        if o.logits_soft_cap:
            s = o.logits_soft_cap * _tanh(s / o.logits_soft_cap)
        s = s.masked_fill(~seen, -math.inf)
        if extras.sinks is not None:
            s = torch.cat((s, extras.sinks[h].to(wide).expand(q_len, 1)), 1)
        p, total = weigh(s, dtype)
        out[:, h] = (p[:, :kv_len] @ vh / total * extras.v_scale).to(dtype)
        lse[:, h] = torch.logsumexp(s, 1) / math.log(2)
    return out, lse


def batch(ragged, o: Options, dtype, extras=None):
    """The same for every request of a `flashinfer.testing.generate.Ragged` batch, concatenated."""
    extras = extras or Extras()
    wide, heads = torch.promote_types(dtype, torch.float32), ragged.q.shape[1]
    outs = [ragged.q.new_zeros(0, heads, ragged.v.shape[2], dtype=dtype)]
    lses = [ragged.q.new_zeros(0, heads, dtype=wide)]
    for i in range(len(ragged.qo_indptr) - 1):
        mask = extras.masks[i] if extras.masks else None
        out, lse = request(*ragged.request(i), o, dtype, mask, extras)
        outs.append(out)
        lses.append(lse)
    return torch.cat(outs), torch.cat(lses)
