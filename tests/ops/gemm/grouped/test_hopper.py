"""The Hopper kernel of products in groups: when it is chosen, and what groups of any kind and size give."""

import pytest
import torch

from flashinfer import gemm, grouped_mm
from flashinfer._core.target import named
from flashinfer.ops.gemm import grouped as room
from flashinfer.testing import generate
from flashinfer.testing.compare import assert_bitwise, assert_close
from tests.ops.gemm import scaled

FIELDS = dict(kind="offsets", a="fp8e4nv", b="fp8e4nv", scale="fp32", width=128, out="bf16", tokens=256, columns=128)
UNSCALED = dict(a="bf16", b="bf16", scale="", width=1, columns=1)
# Rows of groups: few, more groups than a warp looks at together, and enough for tiles of 256 columns.
SIZES = [
    ([300, 0, 1, 64, 129, 0], 648, 1168),
    ([0, 3, 1] * 50, 136, 512),
    ([2, 1030], 1160, 2048),
    ([5000, 100, 3700], 2824, 384),
]


@pytest.mark.parametrize(
    "change",
    [
        dict(kind="lengths"),
        dict(b="fp8e5"),
        dict(columns=64),
        dict(width=64),
        dict(aligned=False),
        dict(padded=True),
        dict(weights="i32"),
        dict(alpha="one"),
        dict(columns_first=True),
        UNSCALED | dict(b="fp16"),
        UNSCALED | dict(a="fp8e5", b="fp8e5", columns_first=True),
        UNSCALED | dict(alpha="groups"),
        UNSCALED | dict(aligned=False),
        UNSCALED | dict(tokens=64),
    ],
    ids=str,
)
def test_choice(change):
    for kind in ("offsets", "counts", "indices"):
        assert room.grouped.select(room.Problem(**FIELDS | dict(kind=kind)), named("90a")).variant.name == "sm90"
    for more in ("kind", "lengths"), ("weights", "i64"), ("columns_first", True), ("alpha", "one"), ("out", "fp32"):
        more = dict([more])
        assert room.grouped.select(room.Problem(**FIELDS | UNSCALED | more), named("90a")).variant.name == "sm90"
    assert room.grouped.select(room.Problem(**FIELDS), named("100a")).variant.name == "portable"
    choice = room.grouped.select(room.Problem(**FIELDS | change), named("90a"))
    assert choice.variant.name == "portable"
    assert dict(choice.refused)["sm90"]


@pytest.mark.gpu
@pytest.mark.parametrize("lengths, n, k", SIZES, ids=lambda x: str(x)[:24])
@pytest.mark.parametrize("kind", ["offsets", "counts", "sorted", "shuffled"])
def test_groups(device, lengths, n, k, kind):
    """Every row of a group against float64, all others as they were; the same bits every time."""
    count, most, rows = len(lengths), max(lengths) + 3, sum(lengths) + 5
    groups = torch.repeat_interleave(torch.arange(count), torch.tensor(lengths))
    groups = torch.cat([groups, torch.full((5,), -1)])
    if kind == "shuffled":
        groups = groups[torch.randperm(rows)]
    shape = (count, most, k) if kind == "counts" else (rows, k)
    a, a_scale, a_wide = scaled.groupwise(shape, "e4m3", 1, 128, device)
    b, b_scale, b_wide = scaled.groupwise((count, n, k), "e4m3", 128, 128, device)
    outs = [torch.full((*shape[:-1], n), float("nan"), dtype=torch.bfloat16, device=device) for _ in range(2)]
    for out in outs:
        if kind == "offsets":
            indptr = generate.indptr(lengths, device)
            gemm.group_gemm_fp8_nt_groupwise(a, b, a_scale, b_scale, indptr, scale_major_mode="K", out=out)
        elif kind == "counts":
            # A negative count is none, and one beyond the rows is all of them.
            held = torch.tensor([n or -1 if n < most - 3 else most + 7 for n in lengths], dtype=torch.int32)
            expected = max(rows // count, 1)
            gemm.batch_deepgemm_fp8_nt_groupwise(a, b, a_scale, b_scale, held.to(device), expected, out=out)
        else:
            gemm.group_deepgemm_fp8_nt_groupwise(a, b, a_scale, b_scale, groups.int().to(device), out=out)
    assert_bitwise(outs[1], outs[0])
    out = outs[0]
    for g, length in enumerate(lengths):
        if kind == "counts":
            length = most if length == most - 3 else length
            assert out[g, length:].isnan().all()
            mine, its = out[g, :length], a_wide[g, :length]
        else:
            here = (groups == g).to(device)
            mine, its = out[here], a_wide[here]
        assert_close(mine, scaled.same_dtype(its, b_wide[g], out.dtype), its @ b_wide[g].mT)
    if kind != "counts":
        assert out[(groups < 0).to(device)].isnan().all()


@pytest.mark.gpu
@pytest.mark.parametrize("lengths, n, k", SIZES, ids=lambda x: str(x)[:24])
@pytest.mark.parametrize("case", ["offsets", "fp32", "fp8", "lengths", "numbers", "columns first"])
def test_unscaled(device, lengths, n, k, case):
    """Without scales, by offsets and lengths, weights of either majorness and by number: as test_groups has it."""
    count, rows = len(lengths), sum(lengths) + 5
    dtype = {"fp32": torch.float16, "fp8": torch.float8_e4m3fn}.get(case, torch.bfloat16)
    a, b = (torch.randn(s, device=device).to(dtype) for s in ((rows, k), (count, n, k)))
    which = list(range(count))
    kind = torch.float32 if case == "fp32" else torch.bfloat16
    outs = [torch.full((rows, n), float("nan"), dtype=kind, device=device) for _ in range(2)]
    indptr = generate.indptr(lengths, device)
    alpha = torch.tensor([0.5], device=device)
    wrapper = gemm.SegmentGEMMWrapper(torch.empty(1, device=device))
    for out in outs:
        if case in ("offsets", "fp32"):
            grouped_mm.grouped_mm_bf16(a, b, indptr, out=out, out_dtype=out.dtype)
        elif case == "fp8":
            grouped_mm.grouped_mm_fp8(a, b, indptr, alpha, out=out)
        elif case == "lengths":
            wrapper.run(a, b, count, True, out=out, seg_lens=torch.tensor(lengths, device=device))
        elif case == "numbers":
            # The last weight for all but the first group, which has one that does not exist.
            which = [-1] + [count - 1] * (count - 1)
            numbers = torch.tensor(which, dtype=torch.int32, device=device)
            wrapper.run(a, b, count, True, out=out, seg_indptr=indptr, weight_indices=numbers)
        else:
            wrapper.run(a, b.mT.contiguous(), count, False, out=out, seg_indptr=indptr)
    assert_bitwise(outs[1], outs[0])
    out, end = outs[0], 0
    for length, weight in zip(lengths, which):
        begin, end = end, end + length
        if weight < 0:
            assert out[begin:end].isnan().all()
            continue
        x, w = a[begin:end].double(), b[weight].double() * (0.5 if case == "fp8" else 1)
        # In 16 bits: tensor cores cut each addition, so the last places are not those of float32.
        mine = out[begin:end].to(torch.float16 if case == "fp32" else out.dtype)
        assert_close(mine, scaled.same_dtype(x.float(), w.float(), mine.dtype), x @ w.mT)
    assert out[end:].isnan().all()
