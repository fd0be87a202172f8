"""FP8 operands with block scales, what they stand for, and the check of a product: for the rooms of this folder."""

from __future__ import annotations

import torch

from flashinfer.testing.compare import assert_close

BLOCK = 128
# Rows of a result that are checked.
_SAMPLE = slice(0, 64)


def fp8(*shape: int, device) -> torch.Tensor:
    return torch.randn(shape, device=device).to(torch.float8_e4m3fn)


def row_scales(*shape: int, device) -> torch.Tensor:
    """[..., rows, blocks], rows next to each other and padded to four: as cuBLAS and FlashInfer's kernels read them."""
    *outer, rows, blocks = shape
    padded = torch.rand(*outer, blocks, -(-rows // 4) * 4, device=device) + 0.5
    return padded.transpose(-1, -2)[..., :rows, :]


def block_scales(*shape: int, device) -> torch.Tensor:
    """[..., N / 128, K / 128]."""
    return torch.rand(shape, device=device) + 0.5


def decoded(codes: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """float32; a scale belongs to as many rows as there are more codes' rows than scales' rows."""
    rows = codes.shape[-2] // scales.shape[-2]
    return codes.float() * scales.repeat_interleave(rows, -2).repeat_interleave(BLOCK, -1)


def assert_product(out: torch.Tensor, a: torch.Tensor, w: torch.Tensor) -> None:
    """AssertionError unless the first rows of `out` are those of ``a @ w.T``, as well as bfloat16 has them."""
    out, a = out[_SAMPLE], a[_SAMPLE]
    same = (a.bfloat16() @ w.bfloat16().T).to(out.dtype)
    assert_close(out, same, a.double() @ w.double().T)
