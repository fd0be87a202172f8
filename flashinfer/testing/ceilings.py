"""What a card reaches at best: what the rows of a benchmark are set against."""

from __future__ import annotations

import torch

from flashinfer.testing.bench import time_us


def ceilings(device: torch.device) -> dict[str, float]:
    """Measured now, by torch.

    Returns
    -------
    dict
        `copy_gb_s` (read + write), `bf16_tflop_s`, and `fp8_tflop_s` (e4m3, a scale a tensor) where the card multiplies
        it.
    """
    on_gpu = device.type == "cuda"
    count = 1 << (31 if on_gpu else 24)
    source = torch.empty(count, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    # on a GPU this takes a millisecond or so; in a graph a copy of this size reaches two thirds of what it does alone
    copy_us = time_us(lambda a, b: b.copy_(a), (source, target), device, graph=False)
    found = {"copy_gb_s": 2 * count / copy_us / 1e3}
    n = 8192 if on_gpu else 256
    a, b = (torch.randn(n, n, dtype=torch.float32, device=device).to(torch.bfloat16) for _ in range(2))
    found["bf16_tflop_s"] = 2 * n**3 / time_us(torch.matmul, (a, b), device) / 1e6
    if on_gpu and torch.cuda.get_device_capability(device) >= (8, 9):
        a, b = (x.to(torch.float8_e4m3fn) for x in (a, b))
        found["fp8_tflop_s"] = 2 * n**3 / time_us(_fp8_product, (a, b), device) / 1e6
    return found


def _fp8_product(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    one = torch.ones((), dtype=torch.float32, device=a.device)
    return torch._scaled_mm(a, b.T, one, one, out_dtype=torch.bfloat16, use_fast_accum=True)
