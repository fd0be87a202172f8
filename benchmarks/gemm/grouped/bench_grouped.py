"""Products in groups: experts of DeepSeek-V3 (TP8), Qwen3-30B and Mixtral against loops, FP8 in DeepGEMM's shapes."""

from collections.abc import Iterator
from functools import partial

import torch
from operands import assert_product, block_scales, decoded, fp8, row_scales

from flashinfer import gemm, grouped_mm
from flashinfer.testing.bench import Case, Target, Work

# experts, N, K of the first product of an expert
_MODELS = {"deepseek-v3 tp8": (256, 512, 7168), "qwen3-30b": (128, 1536, 2048), "mixtral-8x7b": (8, 28672, 4096)}
# groups, rows of each, N, K that DeepGEMM publishes, and 0.95 x its best figure
_CONTIGUOUS = {(4, 8192, 4096, 7168): 1312, (4, 8192, 7168, 2048): 0, (8, 4096, 4096, 7168): 0}
_MASKED = {(1, 1024, 4096, 7168): 1171, (2, 512, 4096, 7168): 0, (4, 256, 4096, 7168): 0, (4, 256, 7168, 2048): 0}


def cases(device: torch.device) -> Iterator[Case]:
    """Rows in all of each model, groups of the same length; small ones on a CPU."""
    on_gpu = device.type == "cuda"
    for name, shape in (_MODELS if on_gpu else {"small": (3, 128, 256)}).items():
        for rows in (64, 1024, 16384) if on_gpu else (7,):
            ways = partial(_segments, rows, *shape)
            yield Case(f"bf16 {name}, {rows} rows", partial(_bf16, rows, *shape), "experts", ways=ways)
            yield Case(f"fp8 {name}, {rows} rows", partial(_fp8, rows, *shape), "experts", builds="experts")
    layouts = {"contiguous": (_contiguous, _CONTIGUOUS), "masked": (_masked, _MASKED)}
    for layout, (make, shapes) in layouts.items():
        for shape, least in (shapes if on_gpu else {(2, 8, 128, 256): 0}).items():
            groups, rows, n, k = shape
            targets = (Target("TFLOP/s", least),) if least else ()
            name = f"fp8 {layout} {groups} of {rows}x{n}x{k}"
            known = dict(builds=layout, problem=f"fp8 blocks {layout}")
            yield Case(name, partial(make, *shape), "DeepGEMM", targets, headline=bool(least), **known)


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
    last = slice(ends[-2], ends[-1])
    return Work(
        run=grouped_mm.grouped_mm_bf16,
        inputs=(x, w, indptr),
        bytes=x.nbytes + used * n * k * 2 + 2 * rows * n,
        flops=2 * rows * n * k,
        peers={
            "torch/loop": lambda x, w, _: _loop(x, w, ends),
            "torch/grouped": lambda x, w, indptr: torch._grouped_mm(x, w.transpose(1, 2), offs=indptr[1:]),
        },
        check=lambda out: assert_product(out[last], x[last], w[-1]),
    )


def _segments(rows, experts, n, k, device) -> dict[str, Work]:
    """FlashInfer's grouped product of bfloat16 on Hopper."""
    work = _bf16(rows, experts, n, k, device)
    wrapper = gemm.SegmentGEMMWrapper(torch.empty(128 << 20, dtype=torch.uint8, device=device))

    def run(x, w, indptr):
        return wrapper.run(x, w, experts, True, seg_indptr=indptr)

    return {"SegmentGEMM": Work(run, work.inputs, check=work.check)}


def _of_row_scales(x, w, offs) -> Work:
    """torch's grouped product of FP8, which has a scale for each row of either operand, not for blocks of K."""
    scales = torch.ones(len(x), device=x.device), torch.ones(w.shape[:2], device=x.device)

    def run(x, w, of_x, of_w, offs):
        return torch._scaled_grouped_mm(
            x, w.transpose(1, 2), of_x, of_w, offs=offs, out_dtype=torch.bfloat16, use_fast_accum=True
        )

    return Work(run, (x, w, *scales, offs))


def _one_by_one(groups, rows, n, k, device) -> Work:
    """cuBLAS's block-scaled product of each group."""
    a, b = fp8(groups, rows, k, device=device), fp8(groups, n, k, device=device)
    of_a = row_scales(groups, rows, k // 128, device=device)
    of_b = block_scales(groups, n // 128, k // 128, device=device)
    out = torch.empty(groups, rows, n, dtype=torch.bfloat16, device=device)

    def run(*inputs):
        for a, b, of_a, of_b, out in zip(*inputs):
            torch._scaled_mm(a, b.T, of_a, of_b.T, out_dtype=out.dtype, out=out)
        return inputs[-1]

    def check(out):
        assert_product(out[-1], decoded(a[-1], of_a[-1]), decoded(b[-1], of_b[-1]))

    return Work(run, (a, b, of_a, of_b, out), check=check)


def _fp8(rows, experts, n, k, device) -> Work:
    a, b = fp8(rows, k, device=device), fp8(experts, n, k, device=device)
    scales = row_scales(rows, k // 128, device=device), block_scales(experts, n // 128, k // 128, device=device)
    indptr = _indptr(rows, experts, device)
    used, last = int((indptr.diff() > 0).sum()), slice(*indptr[-2:].tolist())
    return Work(
        run=lambda *x: gemm.group_gemm_fp8_nt_groupwise(*x, scale_major_mode="K"),
        inputs=(a, b, *scales, indptr),
        bytes=a.nbytes + used * n * k + 2 * rows * n,
        flops=2 * rows * n * k,
        operands="fp8",
        peers={"torch/scales of rows": _of_row_scales(a, b, indptr[1:])},
        check=lambda out: assert_product(out[last], decoded(a[last], scales[0][last]), decoded(b[-1], scales[1][-1])),
    )


def _contiguous(groups, rows, n, k, device) -> Work:
    """Each row says which group it is of."""
    a, b = fp8(groups * rows, k, device=device), fp8(groups, n, k, device=device)
    scales = (
        row_scales(groups * rows, k // 128, device=device),
        block_scales(groups, n // 128, k // 128, device=device),
    )
    of_index = dict(dtype=torch.int32, device=device)
    index = torch.arange(groups, **of_index).repeat_interleave(rows)
    out = torch.empty(groups * rows, n, dtype=torch.bfloat16, device=device)
    last = slice((groups - 1) * rows, None)
    return Work(
        run=lambda a, b, s, t, index, out: gemm.group_deepgemm_fp8_nt_groupwise(a, b, s, t, index, out=out),
        inputs=(a, b, *scales, index, out),
        bytes=a.nbytes + b.nbytes + out.nbytes,
        flops=2 * groups * rows * n * k,
        operands="fp8",
        peers={
            "torch/one by one": _one_by_one(groups, rows, n, k, device),
            "torch/scales of rows": _of_row_scales(a, b, rows * torch.arange(1, groups + 1, **of_index)),
        },
        check=lambda out: assert_product(out[last], decoded(a[last], scales[0][last]), decoded(b[-1], scales[1][-1])),
        given={"a": a, "w": b, "of_a": scales[0], "of_w": scales[1], "index": index, "out": out},
    )


def _masked(groups, rows, n, k, device) -> Work:
    """Each group has room for four times as many rows as it holds."""
    a, b = fp8(groups, 4 * rows, k, device=device), fp8(groups, n, k, device=device)
    scales = (
        row_scales(groups, 4 * rows, k // 128, device=device),
        block_scales(groups, n // 128, k // 128, device=device),
    )
    held = torch.full((groups,), rows, dtype=torch.int32, device=device)
    out = torch.empty(groups, 4 * rows, n, dtype=torch.bfloat16, device=device)
    return Work(
        run=lambda a, b, s, t, held, out: gemm.batch_deepgemm_fp8_nt_groupwise(a, b, s, t, held, rows, out=out),
        inputs=(a, b, *scales, held, out),
        bytes=groups * (rows * k + n * k + 2 * rows * n),
        flops=2 * groups * rows * n * k,
        operands="fp8",
        peers={"torch/one by one": _one_by_one(groups, rows, n, k, device)},
        check=lambda out: assert_product(
            out[-1, :rows], decoded(a[-1, :rows], scales[0][-1, :rows]), decoded(b[-1], scales[1][-1])
        ),
        given={
            "a": a, "w": b, "of_a": scales[0], "of_w": scales[1], "held": held, "expected": rows, "out": out,
        },
    )  # fmt: skip
