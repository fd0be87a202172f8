"""RoPE against copy bandwidth: queries and keys are read once and written once."""

from collections.abc import Iterator

import torch

import flashinfer
from flashinfer.testing.bench import Case, Target, Work


def cases(device: torch.device) -> Iterator[Case]:
    """Prefill and decode batches of 32/8 and 64/8 heads on a GPU; those of a small model on a CPU."""
    shapes = ((4096, 64, 8, 128), (16384, 32, 8, 128), (16384, 16, 16, 64), (8, 32, 8, 128), (1, 32, 8, 128))
    for shape in shapes if device.type == "cuda" else ((1, 4, 1, 256), (512, 4, 1, 256)):
        size = "x".join(map(str, shape))
        goal = (Target("us", 2.5) if shape[0] <= 8 else Target("copy", 0.97),)
        yield Case(f"rope {size}", lambda d, shape=shape: _pos_ids(shape, False, d), targets=goal)
        yield Case(f"rope interleaved {size}", lambda d, shape=shape: _pos_ids(shape, True, d), targets=goal)
        yield Case(f"rope cached, in place {size}", lambda d, shape=shape: _cos_sin_cache(shape, d), targets=goal)
    for tokens in (4096, 8) if device.type == "cuda" else (16,):
        yield Case(
            f"mla_rope_quantize_fp8 {tokens}x128",
            lambda d, tokens=tokens: _mla_quantize(tokens, d),
            targets=(Target("copy", 0.92),) if tokens > 8 else (),
        )
    for tokens, heads in ((7680, 12), (32760, 40)) if device.type == "cuda" else ((16, 2),):
        yield Case(
            f"fused_qk_rmsnorm_rope {tokens}x{heads}",
            lambda d, at=(tokens, heads): _video(*at, d),
            targets=(Target("copy", 0.97),),
        )


def _heads(shape, device):
    tokens, q_heads, k_heads, head_dim = shape
    qkv = torch.randn(tokens, q_heads + 2 * k_heads, head_dim, device=device, dtype=torch.bfloat16)
    pos = torch.arange(tokens, device=device, dtype=torch.int32)
    return pos, qkv[:, :q_heads], qkv[:, q_heads : q_heads + k_heads]


def _torch_rope(pos, x, cache):
    cos, sin = cache[pos].to(x.dtype)[:, None].chunk(2, -1)
    a, b = x.chunk(2, -1)
    return torch.cat([a * cos - b * sin, b * cos + a * sin], -1)


def _cache(pos, head_dim):
    frequency = 1e4 ** (-torch.arange(0, head_dim, 2, device=pos.device) / head_dim)
    angle = torch.arange(len(pos), device=pos.device)[:, None] * frequency
    return torch.cat([angle.cos(), angle.sin()], -1)


def _pos_ids(shape, interleave, device) -> Work:
    pos, q, k = _heads(shape, device)
    cache = _cache(pos, shape[-1])
    peer = {"torch": lambda q, k, pos: (_torch_rope(pos, q, cache), _torch_rope(pos, k, cache))}
    return Work(
        run=lambda q, k, pos: flashinfer.apply_rope_pos_ids(q, k, pos, interleave=interleave),
        inputs=(q, k, pos),
        bytes=2 * (q.numel() + k.numel()) * q.element_size(),
        peers={} if interleave else peer,
    )


def _cos_sin_cache(shape, device) -> Work:
    pos, q, k = _heads(shape, device)
    cache = _cache(pos, shape[-1])
    return Work(
        run=lambda pos, q, k, c: flashinfer.apply_rope_with_cos_sin_cache_inplace(pos, q, k, shape[-1], c),
        inputs=(pos, q, k, cache),
        bytes=2 * (q.numel() + k.numel()) * q.element_size() + cache.nbytes,
        peers={"torch": lambda pos, q, k, c: (q.copy_(_torch_rope(pos, q, c)), k.copy_(_torch_rope(pos, k, c)))},
    )


def _mla_quantize(tokens, device) -> Work:
    """DeepSeek-V3's 128 heads of 64 rotated and 512 other elements."""
    heads = ((tokens, 128, 64), (tokens, 64), (tokens, 128, 512), (tokens, 512))
    given = [torch.randn(shape, device=device, dtype=torch.bfloat16) for shape in heads]
    pos = torch.arange(tokens, device=device)
    return Work(
        run=flashinfer.rope.mla_rope_quantize_fp8,
        inputs=(*given, _cache(pos, 64), pos),
        bytes=sum(x.numel() for x in given) * 3,
    )


def _video(tokens, heads, device) -> Work:
    """Wan's heads of 128, one video."""
    qkv = torch.randn(tokens, 3 * heads * 128, device=device, dtype=torch.bfloat16)
    weights = [torch.rand(heads * 128, device=device).bfloat16() for _ in range(2)]
    options = dict(zip(("num_heads_q", "num_heads_k", "num_heads_v"), (heads,) * 3)) | dict(head_dim=128)
    options |= dict(num_frame_channels=44, num_height_channels=42, num_width_channels=42, ppf=1, pph=tokens // 8, ppw=8)
    return Work(
        run=lambda *given: flashinfer.norm.fused_qk_rmsnorm_rope(*given, **options),
        inputs=(qkv, *weights),
        bytes=2 * qkv.nbytes,
    )
