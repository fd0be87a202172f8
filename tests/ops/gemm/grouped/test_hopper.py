"""The Hopper kernel of FP8 products in groups: when it is chosen, and what groups of any form and size give."""

import pytest
import torch

from flashinfer import gemm
from flashinfer._core.target import named
from flashinfer.ops.gemm import grouped as room
from flashinfer.testing import generate
from flashinfer.testing.compare import assert_bitwise, assert_close
from tests.ops.gemm import scaled

FIELDS = dict(kind="offsets", a="fp8e4nv", b="fp8e4nv", scale="fp32", width=128, out="bf16", tokens=256, columns=128)
# Rows of groups: few, more groups than a warp looks at together, and enough for tiles of 256 columns.
SIZES = [
    ([300, 0, 1, 64, 129, 0], 648, 1168),
    ([0, 3, 1] * 25, 136, 512),
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
        dict(a="bf16", b="bf16", scale="", width=1, columns=1),
    ],
    ids=str,
)
def test_choice(change):
    for kind in ("offsets", "counts", "indices"):
        assert room.grouped.select(room.Problem(**FIELDS | dict(kind=kind)), named("90a")).variant.name == "sm90"
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
