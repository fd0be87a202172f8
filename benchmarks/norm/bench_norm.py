"""The norms against copy bandwidth: every input is read once and every result written once."""

from collections.abc import Iterator

import torch
from torch.nn import functional

import flashinfer
from flashinfer.testing.bench import Case, Work


def cases(device: torch.device) -> Iterator[Case]:
    """Large batches, decode batches and QK-norm on a GPU; those of a small model on a CPU."""
    on_gpu = device.type == "cuda"
    for shape in ((4096, 8192), (16384, 4096), (1, 8192), (8, 4096)) if on_gpu else ((1, 640), (512, 640)):
        size = "x".join(map(str, shape))
        yield Case(f"rmsnorm {size}", lambda d, shape=shape: _rmsnorm(shape, d))
        yield Case(f"fused_add_rmsnorm {size}", lambda d, shape=shape: _fused_add_rmsnorm(shape, d))
        yield Case(f"layernorm {size}", lambda d, shape=shape: _layernorm(shape, d))
        yield Case(f"fused_add_rmsnorm_quant {size}", lambda d, shape=shape: _fused_add_rmsnorm_quant(shape, d))
        yield Case(f"add_rmsnorm_fp4quant {size}", lambda d, shape=shape: _add_rmsnorm_fp4quant(shape, d))
    for shape in ((8192, 32, 128), (8, 32, 128)) if on_gpu else ((512, 4, 256),):
        yield Case(f"rmsnorm {'x'.join(map(str, shape))}", lambda d, shape=shape: _rmsnorm(shape, d))


def _rows(shape, device):
    return torch.randn(shape, device=device, dtype=torch.bfloat16)


def _rmsnorm(shape, device) -> Work:
    x, w = _rows(shape, device), _rows(shape[-1], device)
    return Work(
        run=lambda x, w, out: flashinfer.rmsnorm(x, w, out=out),
        inputs=(x, w, torch.empty_like(x)),
        bytes=2 * x.nbytes + w.nbytes,
        peers={"torch": lambda x, w, out: functional.rms_norm(x, w.shape, w, 1e-6)},
    )


def _fused_add_rmsnorm(shape, device) -> Work:
    x, residual, w = _rows(shape, device), _rows(shape, device), _rows(shape[-1], device)
    return Work(
        run=flashinfer.fused_add_rmsnorm,
        inputs=(x, residual, w),
        bytes=4 * x.nbytes + w.nbytes,
        peers={"torch": lambda x, residual, w: functional.rms_norm(residual.add_(x), w.shape, w, 1e-6)},
    )


def _layernorm(shape, device) -> Work:
    x = _rows(shape, device)
    gamma, beta = torch.randn(2, shape[-1], device=device).unbind()
    return Work(
        run=flashinfer.layernorm,
        inputs=(x, gamma, beta),
        bytes=2 * x.nbytes + 2 * gamma.nbytes,
        peers={"torch": lambda x, g, b: functional.layer_norm(x, g.shape, g.to(x.dtype), b.to(x.dtype), 1e-6)},
    )


def _fused_add_rmsnorm_quant(shape, device) -> Work:
    x, residual, w = _rows(shape, device), _rows(shape, device), _rows(shape[-1], device)
    out, scale = torch.empty(shape, device=device, dtype=torch.float8_e4m3fn), torch.full((1,), 0.02, device=device)

    def by_torch(out, x, residual, w, scale):
        y = functional.rms_norm(residual.add_(x), w.shape, w, 1e-6)
        out.copy_((y / scale).clamp(-448, 448).to(out.dtype))

    return Work(
        run=flashinfer.fused_add_rmsnorm_quant,
        inputs=(out, x, residual, w, scale),
        bytes=3 * x.nbytes + out.nbytes + w.nbytes,
        peers={"torch": by_torch},
    )


def _add_rmsnorm_fp4quant(shape, device) -> Work:
    x, residual, w = _rows(shape, device), _rows(shape, device), _rows(shape[-1], device)
    codes = torch.empty(shape[0], shape[1] // 2, device=device, dtype=torch.uint8)
    factors = torch.empty(-(-shape[0] // 128) * 128 * shape[1] // 16, device=device, dtype=torch.uint8)
    return Work(
        run=lambda x, residual, w, codes, factors: flashinfer.add_rmsnorm_fp4quant(
            x, residual, w, codes, factors, is_sf_swizzled_layout=True
        ),
        inputs=(x, residual, w, codes, factors),
        bytes=3 * x.nbytes + codes.nbytes + factors.nbytes + w.nbytes,
        peers={},
    )
