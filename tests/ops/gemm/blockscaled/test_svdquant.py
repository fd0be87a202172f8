"""SVDQuant's products against float64 sums over codes, factors and the narrow matrices."""

import pytest
import torch

from flashinfer import SfLayout, mm_nvfp4_svdquant, nvfp4_quantize, nvfp4_quantize_smooth, svdquant_linear
from flashinfer.testing.compare import assert_bitwise
from tests.ops.gemm import scaled


@pytest.mark.parametrize("m, n, k, rank, biased", [(1, 40, 64, 32, True), (9, 136, 80, 5, False), (0, 8, 16, 32, True)])
@pytest.mark.parametrize("variant", ["reference", "portable"])
def test_mm(m, n, k, rank, biased, variant, device):
    a, b = (scaled.operand((rows, k), "e2m1", "ue4m3", 16, device) for rows in (m, n))
    d, l1 = (torch.randn(rows, rank, device=device).half() for rows in (m, n))
    bias = torch.randn(n, device=device).half() if biased else None
    alpha = torch.tensor([0.03125], device=device)
    # More factors than there are tiles, as a caller's buffer may have.
    a_sf = torch.cat((a.arranged("128x4").view(-1), torch.full((512,), 0x7F, dtype=torch.uint8, device=device)))
    out = torch.empty(m, n, dtype=torch.float16, device=device)
    result = mm_nvfp4_svdquant(
        a.codes, b.codes, a_sf, b.arranged("128x4"), alpha, d, l1, bias, out if biased else None, variant
    )
    expected = (a.values @ b.values.T + d.double() @ l1.double().T) / 32 + (bias.double() if biased else 0)
    assert result is out or not biased
    assert result.dtype == torch.float16
    torch.testing.assert_close(result.double(), expected, rtol=1e-3, atol=2e-3)


@pytest.mark.parametrize("strided", [False, True])
def test_linear(strided, device):
    m, n, k, rank = 5, 24, 64, 32
    x = torch.randn(m, 2 * k, device=device).half()[:, ::2]
    x = x if strided else x.contiguous()
    smooth = torch.rand(k, device=device).half() + 0.5
    weight = scaled.operand((n, k), "e2m1", "ue4m3", 16, device)
    l2t, l1 = torch.randn(k, rank, device=device).half(), torch.randn(n, rank, device=device).half()
    l1 = l1 * 4
    scale, alpha, bias = (torch.tensor([v], device=device) for v in (4.0, 0.25, 3.0))
    codes, factors = nvfp4_quantize_smooth(x, smooth, scale)
    plain = nvfp4_quantize(x * smooth, scale)
    assert_bitwise(codes, plain[0])
    assert_bitwise(factors, plain[1].view(-1))
    result = svdquant_linear(
        x, weight.codes, weight.arranged("128x4"), alpha, smooth, l2t, l1, scale, bias.expand(n).contiguous()
    )
    again = svdquant_linear(
        x, weight.codes, weight.arranged("128x4"), alpha, smooth, l2t, l1, scale, bias.expand(n).contiguous(),
        backend="cute-dsl-unfused",
    )  # fmt: skip
    assert_bitwise(again, result)
    table = torch.cat((scaled.E2M1, -scaled.E2M1)).to(device)
    values = torch.stack((table[(codes & 15).long()], table[(codes >> 4).long()]), -1).flatten(1)
    _, rows = nvfp4_quantize(x * smooth, scale, SfLayout.layout_linear)
    values = values * rows.view(torch.float8_e4m3fn).double().repeat_interleave(16, 1)
    down = (x.double() @ l2t.double()).half().double()
    expected = (values @ weight.values.T + down @ l1.double().T) / 4 + 3
    torch.testing.assert_close(result.double(), expected, rtol=2e-3, atol=0.2)


def test_refused():
    x, smooth, scale = torch.randn(2, 32).half(), torch.rand(32).half(), torch.ones(1)
    with pytest.raises(ValueError, match="pre_quant_scale: got"):
        nvfp4_quantize_smooth(x, smooth[:16], scale)
    codes, factors = nvfp4_quantize_smooth(x, smooth, scale)
    with pytest.raises(ValueError, match="^x: got"):
        svdquant_linear(x[0, 0], codes, factors, scale, smooth, x.T, x, scale)
    d, l1 = torch.zeros(2, 4).half(), torch.zeros(2, 3).half()
    with pytest.raises(ValueError, match="l1: got"):
        mm_nvfp4_svdquant(codes, codes, factors, factors, scale, d, l1)
    with pytest.raises(ValueError, match="a_sf: got"):
        mm_nvfp4_svdquant(codes, codes, factors[:256], factors, scale, d, d)
    with pytest.raises(ValueError, match="out: got torch.int8"):
        mm_nvfp4_svdquant(codes, codes, factors, factors, scale, d, d, out=torch.zeros(2, 2).to(torch.int8))
    out = torch.zeros(2, 2).half()
    with pytest.raises(ValueError, match="out: got some of the memory of bias"):
        mm_nvfp4_svdquant(codes, codes, factors, factors, scale, d, d, out[1], out)
