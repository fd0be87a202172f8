"""Block-scaled quantisation against copy bandwidth: rows are read once, codes and factors written once."""

from collections.abc import Iterator
from functools import partial

import torch

import flashinfer
from flashinfer.testing.bench import Case, Target, Work


def cases(device: torch.device) -> Iterator[Case]:
    """Activations of prefill and decode batches on a GPU; small ones on a CPU."""
    on_gpu = device.type == "cuda"
    makers = {
        "nvfp4_quantize": _nvfp4,
        "mxfp4_quantize": lambda shape, d: _mx(flashinfer.mxfp4_quantize, shape, 0.5, d),
        "mxfp8_quantize": lambda shape, d: _mx(flashinfer.mxfp8_quantize, shape, 1, d),
    }
    for shape in ((4096, 8192), (16384, 8192), (8, 8192), (1, 8192)) if on_gpu else ((64, 640),):
        goal = Target("us", 2.5) if shape[0] <= 8 else Target("copy", 0.97)
        for name, make in makers.items():
            size = "x".join(map(str, shape))
            yield Case(f"{name} {size}", lambda d, make=make, shape=shape: make(shape, d), targets=(goal,))
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
        run=flashinfer.nvfp4_quantize,
        inputs=(x, scale),
        bytes=x.nbytes + x.numel() // 2 + x.numel() // 16,
        check=partial(_assert_codes, x, 16),
    )


def _mx(function, shape, code_bytes, device) -> Work:
    x = _rows(shape, device)
    size = x.nbytes + int(x.numel() * code_bytes) + x.numel() // 32
    return Work(run=function, inputs=(x,), bytes=size, check=partial(_assert_codes, x, 32))


def _assert_codes(x: torch.Tensor, block: int, result: tuple[torch.Tensor, torch.Tensor]) -> None:
    """AssertionError unless codes point where the values of their block do, whatever the layout of the factors is.

    Kernels that are empty on a chip that they were not written for leave codes unwritten, and take no time.
    """
    codes = result[0].view(len(x), -1)[:64]
    x = x[:64].float()
    if codes.shape[1] * 2 == x.shape[1]:
        # e2m1, the first of a pair in the low bits; the fourth bit is the sign
        nibbles = torch.stack((codes.view(torch.uint8) & 15, codes.view(torch.uint8) >> 4), -1).flatten(1).long()
        values = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6], device=x.device)
        decoded = torch.cat((values, -values))[nibbles]
    else:
        decoded = codes.view(torch.float8_e4m3fn).float()
    pairs = x.reshape(-1, block), decoded.reshape(-1, block)
    cosine = torch.nn.functional.cosine_similarity(*pairs).nan_to_num(-1).min().item()
    assert cosine > 0.9, f"wrong codes: a block of {block} has a cosine of {cosine:.3g} with its values"


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
