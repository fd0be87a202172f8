"""Products in groups against a loop of products: experts of DeepSeek-V3 (TP8), Qwen3-30B and Mixtral."""

from collections.abc import Iterator
from functools import partial

import torch

from flashinfer import gemm, grouped_mm
from flashinfer.testing.bench import Case, Work

# experts, N, K of the first product of an expert
MODELS = {"deepseek-v3 tp8": (256, 512, 7168), "qwen3-30b": (128, 1536, 2048), "mixtral-8x7b": (8, 28672, 4096)}


def cases(device: torch.device) -> Iterator[Case]:
    """(tokens in all) in each format; small ones on a CPU."""
    on_gpu = device.type == "cuda"
    for name, shape in MODELS.items() if on_gpu else (("small", (3, 128, 256)),):
        for rows in (64, 1024, 16384) if on_gpu else (7,):
            yield Case(f"bf16 {name}, {rows} rows", partial(_bf16, rows, *shape))
            yield Case(f"fp8 groupwise {name}, {rows} rows", partial(_fp8, rows, *shape))


def _indptr(rows: int, experts: int, device):
    """Rows spread over the experts as evenly as they can be."""
    return (torch.arange(experts + 1, device=device) * rows // experts).to(torch.int32)


def _loop(x, w, ends):
    out = x.new_empty(len(x), w.shape[1])
    for e in range(len(w)):
        torch.mm(x[ends[e] : ends[e + 1]], w[e].T, out=out[ends[e] : ends[e + 1]])
    return out


def _bf16(rows, experts, n, k, device) -> Work:
    x, w = (torch.randn(s, dtype=torch.bfloat16, device=device) for s in ((rows, k), (experts, n, k)))
    indptr = _indptr(rows, experts, device)
    ends = indptr.tolist()
    used = sum(a < b for a, b in zip(ends, ends[1:]))
    return Work(
        run=grouped_mm.grouped_mm_bf16,
        inputs=(x, w, indptr),
        bytes=x.nbytes + used * n * k * 2 + 2 * rows * n,
        flops=2 * rows * n * k,
        peers={"torch loop": lambda x, w, _: _loop(x, w, ends)},
    )


def _fp8(rows, experts, n, k, device) -> Work:
    a, b = (torch.randn(s, device=device).to(torch.float8_e4m3fn) for s in ((rows, k), (experts, n, k)))
    scales = torch.rand(rows, k // 128, device=device), torch.rand(experts, n // 128, k // 128, device=device)
    indptr = _indptr(rows, experts, device)
    used = int((indptr.diff() > 0).sum())
    return Work(
        run=lambda *x: gemm.group_gemm_fp8_nt_groupwise(*x, scale_major_mode="K"),
        inputs=(a, b, *scales, indptr),
        bytes=a.nbytes + used * n * k + 2 * rows * n,
        flops=2 * rows * n * k,
    )
