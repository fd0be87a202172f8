"""Products with block scales against bfloat16 of the same shape: few tokens at memory speed, many at compute speed."""

from collections.abc import Iterator
from functools import partial

import torch

import flashinfer
from flashinfer import gemm
from flashinfer.testing.bench import Case, Work

# N, K of DeepSeek-V3's and Llama's projections
SHAPES = ((7168, 16384), (7168, 2048), (4096, 7168))
ONE_UE4M3, ONE_UE8M0 = 0x38, 127


def cases(device: torch.device) -> Iterator[Case]:
    """(M, N, K) in each format; small ones on a CPU."""
    on_gpu = device.type == "cuda"
    for n, k in SHAPES if on_gpu else ((128, 256),):
        for m in (1, 16, 64, 512, 4096) if on_gpu else (3,):
            for name, make in FORMS.items():
                yield Case(f"{name} {m}x{n}x{k}", partial(make, m, n, k))


def _fp8(*shape, device):
    return torch.randn(shape, device=device).to(torch.float8_e4m3fn)


def _fp4(*shape, device):
    return torch.randint(256, shape, dtype=torch.uint8, device=device)


def _factors(rows, blocks, one, device):
    """Factors of 1, a byte each, in whole tiles."""
    return torch.full((-(-rows // 128) * 128 * blocks,), one, dtype=torch.uint8, device=device)


def _work(m, n, k, run, inputs) -> Work:
    x, w = (torch.randn(s, dtype=torch.bfloat16, device=inputs[0].device) for s in ((m, k), (n, k)))
    moved = sum(t.nbytes for t in inputs) + 2 * m * n
    return Work(run, inputs, moved, 2 * m * n * k, {"torch bf16": Work(lambda x, w: x @ w.T, (x, w))})


def _groupwise(m, n, k, device) -> Work:
    scales = torch.rand(m, k // 128, device=device), torch.rand(n // 128, k // 128, device=device)
    inputs = _fp8(m, k, device=device), _fp8(n, k, device=device), *scales
    return _work(m, n, k, lambda *x: gemm.gemm_fp8_nt_groupwise(*x, "K"), inputs)


def _nvfp4(m, n, k, device) -> Work:
    factors = (_factors(rows, k // 16, ONE_UE4M3, device) for rows in (m, n))
    inputs = _fp4(m, k // 2, device=device), _fp4(n, k // 2, device=device), *factors
    return _work(m, n, k, lambda a, b, *x: flashinfer.mm_fp4(a, b.T, *x), inputs)


def _mxfp8(m, n, k, device) -> Work:
    factors = (_factors(rows, k // 32, ONE_UE8M0, device) for rows in (m, n))
    inputs = _fp8(m, k, device=device), _fp8(n, k, device=device), *factors
    return _work(m, n, k, lambda a, b, *x: flashinfer.mm_mxfp8(a, b.T, *x), inputs)


def _bf16_fp4(m, n, k, device) -> Work:
    x = torch.randn(m, k, dtype=torch.bfloat16, device=device)
    inputs = x, _fp4(n, k // 2, device=device), _factors(n, k // 16, ONE_UE4M3, device)
    return _work(m, n, k, lambda *x: flashinfer.mm_bf16_fp4(*x, backend="cudnn"), inputs)


FORMS = {"fp8 groupwise": _groupwise, "nvfp4": _nvfp4, "mxfp8": _mxfp8, "bf16 x nvfp4": _bf16_fp4}
