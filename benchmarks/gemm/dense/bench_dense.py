"""Dense products against the best matrix product of torch, and few rows against copy bandwidth."""

from collections.abc import Iterator

import torch

import flashinfer
from flashinfer import gemm
from flashinfer.testing.bench import Case, Target, Work
from flashinfer.testing.compare import assert_close


def cases(device: torch.device) -> Iterator[Case]:
    """Shapes of DeepSeek-V3 and Llama on a GPU; small ones on a CPU."""
    if device.type != "cuda":
        yield Case("bf16 64x64x64", lambda d: _bf16(64, 64, 64, d))
        yield Case("fp8 64x64x128", lambda d: _fp8(64, 64, 128, d))
        return
    near = (Target("torch", 0.97),)
    for m, n, k in ((8192, 8192, 8192), (4096, 4096, 7168), (512, 4096, 4096)):
        yield Case(f"bf16 {m}x{n}x{k}", lambda d, s=(m, n, k): _bf16(*s, d), "many rows", near)
    for m, n, k in ((8192, 8192, 8192), (4096, 4096, 7168), (4096, 7168, 16384)):
        yield Case(f"fp8 {m}x{n}x{k}", lambda d, s=(m, n, k): _fp8(*s, d), "many rows", near)
    bound = (Target("copy", 0.9),)
    for m in (1, 16, 64):
        yield Case(f"bf16 {m}x7168x16384", lambda d, m=m: _bf16(m, 7168, 16384, d), "few rows", bound)
        yield Case(f"fp8 {m}x7168x16384", lambda d, m=m: _fp8(m, 7168, 16384, d), "few rows", bound)
        yield Case(f"bf16 {m}x4096x4096", lambda d, m=m: _bf16(m, 4096, 4096, d), "few rows")
    yield Case("router 16x256x7168", _router, "few rows")


def _bf16(m: int, n: int, k: int, device) -> Work:
    a, weight = (torch.randn(*s, dtype=torch.bfloat16, device=device) for s in ((m, k), (n, k)))
    out = torch.empty(m, n, dtype=torch.bfloat16, device=device)

    def check(result):
        rows = slice(0, 64)
        assert_close(result[rows], a[rows] @ weight.T, a[rows].double() @ weight.T.double())

    return Work(
        run=lambda a, weight, out: gemm.mm_bf16(a, weight.T, out=out),
        inputs=(a, weight, out),
        bytes=a.nbytes + weight.nbytes + out.nbytes,
        flops=2 * m * n * k,
        peers={"torch": lambda a, weight, out: torch.mm(a, weight.T, out=out)},
        check=check,
    )


def _fp8(m: int, n: int, k: int, device) -> Work:
    a, weight = (torch.randn(*s, device=device).to(torch.float8_e4m3fn) for s in ((m, k), (n, k)))
    out, one = torch.empty(m, n, dtype=torch.bfloat16, device=device), torch.ones((), device=device)

    def by_torch(a, weight, out, one):
        return torch._scaled_mm(a, weight.T, one, one, out_dtype=out.dtype, use_fast_accum=True)

    def check(result):
        rows = slice(0, 64)
        same = by_torch(a[rows], weight, out[rows], one)
        assert_close(result[0, rows], same, a[rows].double() @ weight.T.double())

    return Work(
        run=lambda a, weight, out, one: flashinfer.bmm_fp8(a[None], weight.T[None], one, one, out.dtype, out=out[None]),
        inputs=(a, weight, out, one),
        bytes=a.nbytes + weight.nbytes + out.nbytes,
        flops=2 * m * n * k,
        peers={"torch": by_torch},
        check=check,
    )


def _router(device) -> Work:
    a, weight = (torch.randn(*s, dtype=torch.bfloat16, device=device) for s in ((16, 7168), (256, 7168)))
    out = torch.empty(16, 256, device=device)
    return Work(
        run=lambda a, weight, out: gemm.mm_M1_16_K7168_N256(a, weight.T, out),
        inputs=(a, weight, out),
        bytes=a.nbytes + weight.nbytes + out.nbytes,
        flops=2 * 16 * 256 * 7168,
        peers={"torch": lambda a, weight, out: torch.mm(a, weight.T)},
    )
