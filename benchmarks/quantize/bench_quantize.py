"""Block-scaled quantisation against copy bandwidth: rows are read once, codes and factors written once."""

from collections.abc import Iterator

import torch

import flashinfer
from flashinfer.testing.bench import Case, Work


def cases(device: torch.device) -> Iterator[Case]:
    """Activations of prefill and decode batches on a GPU; small ones on a CPU."""
    on_gpu = device.type == "cuda"
    for shape in ((8192, 7168), (64, 7168), (1, 8192)) if on_gpu else ((64, 640),):
        size = "x".join(map(str, shape))
        yield Case(f"nvfp4_quantize {size}", lambda d, shape=shape: _nvfp4(shape, d))
        yield Case(f"mxfp4_quantize {size}", lambda d, shape=shape: _mx(flashinfer.mxfp4_quantize, shape, 0.5, d))
        yield Case(f"mxfp8_quantize {size}", lambda d, shape=shape: _mx(flashinfer.mxfp8_quantize, shape, 1, d))
    shape = (65536, 128) if on_gpu else (64, 128)
    yield Case(f"nvfp4_kv_dequantize {'x'.join(map(str, shape))}", lambda d: _kv_dequantize(shape, d))
    count = 1 << (28 if on_gpu else 14)
    yield Case(f"packbits {count}", lambda d: _packbits(count, d))


def _rows(shape, device):
    return torch.randn(shape, device=device, dtype=torch.bfloat16)


def _nvfp4(shape, device) -> Work:
    x = _rows(shape, device)
    scale = 448 * 6 / x.abs().max().float().view(1)
    return Work(
        run=lambda x, scale: flashinfer.nvfp4_quantize(x, scale, nvfp4_4over6=None),
        inputs=(x, scale),
        bytes=x.nbytes + x.numel() // 2 + x.numel() // 16,
    )


def _mx(function, shape, code_bytes, device) -> Work:
    x = _rows(shape, device)
    return Work(run=function, inputs=(x,), bytes=x.nbytes + int(x.numel() * code_bytes) + x.numel() // 32)


def _kv_dequantize(shape, device) -> Work:
    x = _rows(shape, device)
    scale = x.abs().max().float().view(1) / 2688
    codes, factors = flashinfer.nvfp4_kv_quantize(x, scale)
    return Work(
        run=flashinfer.nvfp4_kv_dequantize,
        inputs=(codes, factors, scale),
        bytes=codes.nbytes + factors.nbytes + x.nbytes,
    )


def _packbits(count, device) -> Work:
    x = torch.rand(count, device=device) < 0.5
    return Work(run=flashinfer.packbits, inputs=(x,), bytes=x.nbytes + x.nbytes // 8)
