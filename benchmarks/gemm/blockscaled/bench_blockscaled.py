"""Products with block scales against cuBLAS's and bfloat16 of the same shape; few rows against copy bandwidth."""

from collections.abc import Iterator
from functools import partial

import torch
from operands import assert_product, block_scales, decoded, fp8, row_scales

import flashinfer
from flashinfer import gemm
from flashinfer.testing.bench import Case, Target, Work

ONE_UE4M3, ONE_UE8M0 = 0x38, 127
_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


def cases(device: torch.device) -> Iterator[Case]:
    """DeepSeek-V3's projections on a GPU; small ones on a CPU."""
    if device.type != "cuda":
        for make in (_fp8, _nvfp4, _mxfp8, _bf16_fp4):
            yield _row(make, 4, 128, 256)
        return
    for size, least in (
        ((4096, 7168, 16384), 1.15), ((4096, 4096, 7168), 1.1), ((4096, 7168, 2048), 1.1), ((4096, 24576, 1536), 1.1),
    ):  # fmt: skip
        yield _row(_fp8, *size, group="many rows", targets=(Target("torch", least),), headline=size[0] < size[2])
    for m in (1, 16, 64):
        yield _row(_fp8, m, 7168, 16384, group="few rows", targets=(Target("copy", 0.9),), headline=m == 64)
    for make in (_nvfp4, _mxfp8, _bf16_fp4):
        for m in (16, 512, 4096):
            yield _row(make, m, 7168, 16384, group="FP4 and MXFP8")


def _row(make, m: int, n: int, k: int, **row) -> Case:
    name = {_fp8: "fp8 1x128, 128x128", _nvfp4: "nvfp4", _mxfp8: "mxfp8", _bf16_fp4: "bf16 x nvfp4"}[make]
    if make is _fp8:
        # DeepGEMM's kernels in FlashInfer are built for each shape
        row |= {"builds": f"{name} {m}x{n}x{k}", "problem": "fp8 blocks"}
    return Case(f"{name} {m}x{n}x{k}", partial(make, m, n, k), **row)


def _work(m, n, k, run, inputs, a, w, peers=(), operands="bf16", given=()) -> Work:
    """`a`, `w` : functions, which give the operands in float32."""
    device = inputs[0].device
    wide = [torch.randn(s, dtype=torch.bfloat16, device=device) for s in ((m, k), (n, k))]
    moved = sum(t.nbytes for t in inputs) + 2 * m * n
    bf16 = Work(lambda x, w: x @ w.T, tuple(wide))

    peers = dict(peers) | {"torch bf16": bf16}

    def check(out):
        assert_product(out, a(), w())

    return Work(run, inputs, moved, 2 * m * n * k, operands, peers=peers, check=check, given=dict(given))


def _fp8(m, n, k, device) -> Work:
    """A scale for 1 x 128 of the rows and 128 x 128 of the weight."""
    a, w = fp8(m, k, device=device), fp8(n, k, device=device)
    scales = row_scales(m, k // 128, device=device), block_scales(n // 128, k // 128, device=device)
    inputs = a, w, *scales, torch.empty(m, n, dtype=torch.bfloat16, device=device)

    def by_torch(a, w, of_a, of_w, out):
        return torch._scaled_mm(a, w.T, of_a, of_w.T, out_dtype=out.dtype)

    wide = (lambda: decoded(a, scales[0])), (lambda: decoded(w, scales[1]))
    given = zip(("a", "w", "of_a", "of_w", "out"), inputs)
    return _work(m, n, k, gemm.fp8_blockscale_gemm_sm90, inputs, *wide, {"torch": by_torch}, "fp8", given)


def _fp4(*shape, device):
    return torch.randint(256, shape, dtype=torch.uint8, device=device)


def _e2m1(codes):
    """float32 of two codes a byte, the first in the low half."""
    values = torch.tensor([*_E2M1, *(-x for x in _E2M1)], device=codes.device)
    return values[torch.stack([codes & 15, codes >> 4], -1).flatten(-2).long()]


def _factors(rows, blocks, one, device):
    """Factors of 1, a byte each, in whole tiles."""
    return torch.full((-(-rows // 128) * 128 * blocks,), one, dtype=torch.uint8, device=device)


def _nvfp4(m, n, k, device) -> Work:
    factors = (_factors(rows, k // 16, ONE_UE4M3, device) for rows in (m, n))
    inputs = a, w, *_ = _fp4(m, k // 2, device=device), _fp4(n, k // 2, device=device), *factors
    return _work(m, n, k, lambda a, b, *x: flashinfer.mm_fp4(a, b.T, *x), inputs, lambda: _e2m1(a), lambda: _e2m1(w))


def _mxfp8(m, n, k, device) -> Work:
    factors = (_factors(rows, k // 32, ONE_UE8M0, device) for rows in (m, n))
    inputs = a, w, *_ = fp8(m, k, device=device), fp8(n, k, device=device), *factors
    return _work(m, n, k, lambda a, b, *x: flashinfer.mm_mxfp8(a, b.T, *x), inputs, a.float, w.float)


def _bf16_fp4(m, n, k, device) -> Work:
    x = torch.randn(m, k, dtype=torch.bfloat16, device=device)
    inputs = _, w, _ = x, _fp4(n, k // 2, device=device), _factors(n, k // 16, ONE_UE4M3, device)
    run = partial(flashinfer.mm_bf16_fp4, backend="cudnn")
    return _work(m, n, k, run, inputs, x.float, lambda: _e2m1(w))
