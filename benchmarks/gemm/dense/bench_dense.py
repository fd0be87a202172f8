"""Dense products against the best matrix product of torch, and few rows against copy bandwidth."""

from collections.abc import Iterator
from functools import partial

import torch
from operands import assert_product, fp8

import flashinfer
from flashinfer import gemm
from flashinfer.testing.bench import Case, Target, Work
from flashinfer.testing.compare import assert_close


def cases(device: torch.device) -> Iterator[Case]:
    """Shapes of DeepSeek-V3 and Llama on a GPU; small ones on a CPU."""
    if device.type != "cuda":
        yield _row(_bf16, 64, 64, 64)
        yield _row(_fp8, 64, 64, 128)
        yield Case("router 16x256x7168", _router)
        return
    near, bound = (Target("torch", 0.97),), (Target("copy", 0.9),)
    for size in ((8192, 8192, 8192), (4096, 4096, 7168), (512, 4096, 4096)):
        yield _row(_bf16, *size, group="many rows", targets=near, headline=size[0] == 8192)
    for size in ((8192, 8192, 8192), (4096, 4096, 7168), (4096, 7168, 16384)):
        yield _row(_fp8, *size, group="many rows", targets=near, headline=size[2] == 7168)
    for m in (1, 16, 64):
        yield _row(_bf16, m, 7168, 16384, group="few rows", targets=bound, headline=m == 1)
        yield _row(_fp8, m, 7168, 16384, group="few rows", targets=bound, headline=m == 64)
        yield _row(_bf16, m, 4096, 4096, group="few rows")
    yield Case("router 16x256x7168", _router, "few rows")


def _row(make, m: int, n: int, k: int, **row) -> Case:
    ways = partial(_bf16_ways, m, n, k) if make is _bf16 else None
    name = make.__name__[1:]
    return Case(f"{name} {m}x{n}x{k}", partial(make, m, n, k), ways=ways, builds=f"{name} {m <= 16}", **row)


def _bf16(m: int, n: int, k: int, device, **options) -> Work:
    a, weight = (torch.randn(*s, dtype=torch.bfloat16, device=device) for s in ((m, k), (n, k)))
    out = torch.empty(m, n, dtype=torch.bfloat16, device=device)
    return Work(
        run=lambda a, weight, out: gemm.mm_bf16(a, weight.T, out=out, **options),
        inputs=(a, weight, out),
        bytes=a.nbytes + weight.nbytes + out.nbytes,
        flops=2 * m * n * k,
        peers={"torch": lambda a, weight, out: torch.mm(a, weight.T, out=out)},
        check=lambda result: assert_product(result, a, weight),
    )


def _bf16_ways(m: int, n: int, k: int, device) -> dict[str, Work]:
    """FlashInfer's backends that need neither another package nor another chip."""
    names = ("cublaslt", "tinygemm") if m <= 16 else ("cublaslt",)
    return {name: _bf16(m, n, k, device, backend=name) for name in names}


def _fp8(m: int, n: int, k: int, device) -> Work:
    """One scale a tensor, sums of FP8's tensor cores as they come."""
    a, weight = fp8(m, k, device=device), fp8(n, k, device=device)
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
        operands="fp8",
        peers={"torch": by_torch},
        check=check,
    )


def _router(device) -> Work:
    a, weight = (torch.randn(*s, dtype=torch.bfloat16, device=device) for s in ((16, 7168), (256, 7168)))
    out = torch.empty(16, 256, device=device)

    def run(a, weight, out):
        gemm.mm_M1_16_K7168_N256(a, weight.T, out)
        return out

    return Work(
        run=run,
        inputs=(a, weight, out),
        bytes=a.nbytes + weight.nbytes + out.nbytes,
        flops=2 * 16 * 256 * 7168,
        peers={"torch": lambda a, weight, out: torch.mm(a, weight.T)},
        check=lambda result: assert_product(result, a, weight),
    )
