"""The Hopper kernel of block-scaled FP8: when it is chosen, and what the shapes that it is made for give."""

import pytest
import torch

from flashinfer import gemm
from flashinfer._core.target import named
from flashinfer.ops.gemm import blockscaled as room
from flashinfer.testing.compare import assert_bitwise, assert_close
from tests.ops.gemm import scaled

FIELDS = dict(a="fp8e4nv", b="fp8e4nv", scale="fp32", width=128, out="bf16", tokens=256, columns=128)


@pytest.mark.parametrize(
    "change",
    [
        dict(b="fp8e5"),
        dict(columns=64),
        dict(width=64),
        dict(aligned=False),
        dict(a="e2m1", b="e2m1", scale="ue4m3", width=16, a_layout="128x4", b_layout="128x4"),
    ],
    ids=str,
)
def test_choice(change):
    assert room.blockscaled.select(room.Problem(**FIELDS), named("90a")).variant.name == "sm90"
    assert room.blockscaled.select(room.Problem(**FIELDS), named("100a")).variant.name == "portable"
    choice = room.blockscaled.select(room.Problem(**FIELDS | change), named("90a"))
    assert choice.variant.name != "sm90"
    assert dict(choice.refused)["sm90"]


@pytest.mark.gpu
@pytest.mark.parametrize("m, n, k", [(1024, 2048, 2048), (300, 648, 1168), (4096, 264, 512), (64, 7168, 2048),
                                     (1, 264, 7168), (17, 520, 1040), (200, 256, 8192),
                                     (4200, 4040, 1168)])  # fmt: skip
@pytest.mark.parametrize("rows", [1, 128])
def test_shapes(device, m, n, k, rows):
    """Ends of tiles of both widths, of K and of K slices, several tiles a block; the same bits every time."""
    a, a_scale, a_wide = scaled.groupwise((m, k), "e4m3", rows, 128, device)
    b, b_scale, b_wide = scaled.groupwise((n, k), "e4m3", 128, 128, device)
    outs = []
    for mode in ("K", "MN", "K"):
        scales = [s.mT.contiguous() if mode == "MN" else s for s in (a_scale, b_scale)]
        out = torch.full((m, n), float("nan"), dtype=torch.bfloat16, device=device)
        gemm.gemm_fp8_nt_groupwise(a, b, *scales, mode, scale_granularity_mnk=(rows, 128, 128), out=out)
        outs.append(out)
    assert_close(outs[0], scaled.same_dtype(a_wide, b_wide, outs[0].dtype), a_wide @ b_wide.mT)
    assert_bitwise(outs[1], outs[0])
    assert_bitwise(outs[2], outs[0])
