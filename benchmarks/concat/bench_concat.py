"""concat_mla_k against copy bandwidth: keys are written once, their parts read once."""

from collections.abc import Iterator

import torch

from flashinfer.concat_ops import concat_mla_k
from flashinfer.testing.bench import Case, Work


def cases(device: torch.device) -> Iterator[Case]:
    """DeepSeek-V3's 128 heads of 128 + 64, prefill and decode batches on a GPU; fewer heads on a CPU."""
    shapes = ((4096, 128), (8, 128)) if device.type == "cuda" else ((64, 16),)
    for tokens, heads in shapes:
        for dtype in (torch.bfloat16, torch.float8_e4m3fn):
            name = f"concat_mla_k {tokens}x{heads} {str(dtype).removeprefix('torch.')}"
            yield Case(name, lambda d, tokens=tokens, heads=heads, dtype=dtype: _concat(tokens, heads, dtype, d))


def _concat(tokens, heads, dtype, device) -> Work:
    # A slice of the projection that gives k_nope and v, as engines have it.
    k_nope = torch.randn(tokens, heads, 256, device=device).to(dtype)[..., :128]
    k_rope = torch.randn(tokens, 1, 64, device=device).to(dtype)
    k = torch.empty(tokens, heads, 192, device=device, dtype=dtype)
    return Work(
        run=lambda k, k_nope, k_rope: concat_mla_k(k, k_nope, k_rope),
        inputs=(k, k_nope, k_rope),
        bytes=k.nbytes + (k_nope.numel() + k_rope.numel()) * k.element_size(),
        peers={"torch": _torch},
    )


def _torch(k, k_nope, k_rope):
    k[..., :128] = k_nope
    k[..., 128:] = k_rope
