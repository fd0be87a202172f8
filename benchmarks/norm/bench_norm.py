"""The norms against copy bandwidth: every input is read once and every result written once."""

from collections.abc import Iterator

import torch
from torch.nn import functional

import flashinfer
from flashinfer.testing.bench import Case, Target, Work


def cases(device: torch.device) -> Iterator[Case]:
    """Large batches, decode batches and QK-norm on a GPU; those of a small model on a CPU."""
    on_gpu = device.type == "cuda"
    plain = {"rmsnorm": _rmsnorm, "fused_add_rmsnorm": _fused_add_rmsnorm, "layernorm": _layernorm}
    quantised = {
        "rmsnorm_quant": _rmsnorm_quant,
        "fused_add_rmsnorm_quant": _fused_add_rmsnorm_quant,
        "fused_add_rmsnorm_fp8_block_quant": _block_quant,
        "add_rmsnorm_fp4quant": _add_rmsnorm_fp4quant,
    }
    for shape in ((4096, 8192), (16384, 8192), (1, 8192), (8, 8192)) if on_gpu else ((1, 640), (512, 640)):
        size = "x".join(map(str, shape))
        for name, make in (plain | quantised).items():
            goal = Target("us", 2.5) if shape[0] <= 8 else Target("copy", 0.97 if name in plain else 0.92)
            yield Case(f"{name} {size}", lambda d, make=make, shape=shape: make(shape, d), targets=(goal,))
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


def _rmsnorm_quant(shape, device) -> Work:
    x, w = _rows(shape, device), _rows(shape[-1], device)
    out, scale = torch.empty(shape, device=device, dtype=torch.float8_e4m3fn), torch.full((1,), 0.02, device=device)
    return Work(
        run=lambda out, x, w, scale: flashinfer.norm.rmsnorm_quant(out, x, w, scale),
        inputs=(out, x, w, scale),
        bytes=x.nbytes + out.nbytes + w.nbytes,
    )


def _block_quant(shape, device) -> Work:
    x, residual, w = _rows(shape, device), _rows(shape, device), _rows(shape[-1], device)
    out, normed = torch.empty(shape, device=device, dtype=torch.float8_e4m3fn), torch.empty_like(x)
    scale = torch.empty(shape[1] // 128, (shape[0] + 3) // 4 * 4, device=device)
    return Work(
        run=lambda *given: flashinfer.norm.fused_add_rmsnorm_fp8_block_quant(*given),
        inputs=(out, scale, normed, x, residual, w),
        bytes=4 * x.nbytes + out.nbytes + scale.nbytes + w.nbytes,
    )


def _fused_add_rmsnorm_quant(shape, device) -> Work:
    x, residual, w = _rows(shape, device), _rows(shape, device), _rows(shape[-1], device)
    out, scale = torch.empty(shape, device=device, dtype=torch.float8_e4m3fn), torch.full((1,), 0.02, device=device)

    def by_torch(out, x, residual, w, scale):
        y = functional.rms_norm(residual.add_(x), w.shape, w, 1e-6)
        out.copy_((y / scale).clamp(-448, 448).to(out.dtype))

    return Work(
        run=lambda *given: flashinfer.norm.fused_add_rmsnorm_quant(*given),
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
    )
