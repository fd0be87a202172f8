"""Linear layers of FP8 and NVFP4 with what follows them, against float64 of the same codes and scales."""

import pytest
import torch

from flashinfer import gemm
from flashinfer.ops import layouts
from flashinfer.prims_ts import gemm as by_path
from flashinfer.testing.compare import assert_bitwise
from tests.ops.gemm import scaled

BF16, E4M3 = torch.bfloat16, torch.float8_e4m3fn
HEADS = dict(num_q_heads=1, num_kv_heads=1, head_dim=128)
SIZES = pytest.mark.parametrize("m", [0, 1, 5])


def fp8(m, n, k, device):
    """The operands of a call, and the scaled product."""
    a, weight = (torch.randn(rows, k, device=device).to(E4M3) for rows in (m, n))
    a_scale, weight_scale = torch.rand(m, device=device) + 0.5, (torch.rand(n, device=device) + 0.5) / 8
    y = a.double() @ weight.double().T * a_scale.double()[:, None] * weight_scale.double()
    return (a, weight, a_scale, weight_scale), y


def fp4(m, n, k, device, scale=0.125):
    a, weight = (scaled.operand((rows, k), "e2m1", "ue4m3", 16, device) for rows in (m, n))
    parts = (a.codes, a.arranged("128x4").flatten(), scale), (weight.codes, weight.arranged("128x4").flatten(), 0.5)
    return (*parts[0], *parts[1]), a.values @ weight.values.T, scale * 0.5


def close(out, y, dtype=BF16):
    assert out.dtype == dtype and out.shape == y.shape
    rtol = 2**-8 if dtype == BF16 else 2**-4
    torch.testing.assert_close(out.double(), y, rtol=rtol * 1.1, atol=2e-3 * float(y.abs().max()) if y.numel() else 0)


def gated(y):
    return y[:, ::2] * torch.nn.functional.silu(y[:, 1::2])


def rotation(m, device):
    norms = [(torch.rand(128, device=device) + 0.5).to(BF16) for _ in range(2)]
    angles = torch.rand(m, 64, device=device) * 6
    positions = torch.randperm(m, device=device)
    if m > 2:
        positions[0], positions[1] = m, -1  # they count as 0
    return *norms, torch.cat((angles.cos(), angles.sin()), 1), positions


def turned(y, q_norm, k_norm, cos_sin, positions, dtype=BF16):
    """Norms and rotations by complex numbers."""
    m = len(y)
    heads = y.reshape(m, 3, y.shape[1] // 384, 128).clone()
    row = torch.where((positions < 0) | (positions >= m), 0, positions)
    turn = torch.complex(*cos_sin.double()[row][:, None].chunk(2, -1))
    for third, weight in enumerate((q_norm, k_norm)):
        x = heads[:, third].to(dtype).double()
        x = x / (x.square().mean(-1, keepdim=True) + 1e-6).sqrt() * weight.double()
        pairs = torch.view_as_complex(x.unflatten(-1, (-1, 2)).contiguous()) * turn
        heads[:, third] = torch.view_as_real(pairs).flatten(-2)
    return heads.flatten(1)


@SIZES
def test_fp8_linear(m, device):
    given, y = fp8(m, 96, 256, device)
    bias, thirds = torch.randn(96, device=device).to(BF16), torch.tensor([0.5, 1.0, 3.0], device=device)
    close(gemm.fp8_linear(*given), y)
    wide = torch.full((m, 128), 7.0, dtype=BF16, device=device)
    out = gemm.fp8_linear(*given, bias, qkv_scale=thirds, out=wide[:, 16:112])
    assert (wide[:, :16] == 7).all() and (wide[:, 112:] == 7).all()
    y = (y + bias.double()) * thirds.double().repeat_interleave(32)
    close(out, y)
    narrow, one = gemm.fp8_linear(*given, bias, qkv_scale=thirds, out_dtype=E4M3)
    close(narrow, y, E4M3)
    assert_bitwise(one, torch.ones(1, device=device))
    scale = torch.tensor([200.0], device=device)
    out = gemm.fp8_linear(*given, bias, qkv_scale=thirds, out_dtype=E4M3, output_quant_scale=scale)
    close(out, (y * 200).clamp(-448, 448), E4M3)


@SIZES
@pytest.mark.parametrize("biased", [False, True])
def test_swiglu_of_fp8(m, biased, device):
    given, y = fp8(m, 80, 128, device)
    bias = torch.randn(80, device=device).to(BF16) if biased else None
    y = gated(y + bias.double() if biased else y)
    close(gemm.fp8_linear_swiglu(*given, bias), y)
    close(gemm.fp8_linear_swiglu(*given, bias, out_dtype=E4M3)[0], y, E4M3)


@SIZES
@pytest.mark.parametrize("thirds", [None, (0.5, 2.0, 3.0)])
def test_heads_of_fp8(m, thirds, device):
    given, y = fp8(m, 384, 128, device)
    turn = rotation(m, device)
    scale = None if thirds is None else torch.tensor(thirds, device=device)
    if scale is not None:
        y = y * scale.double().repeat_interleave(128)
    close(gemm.fp8_qkv_qknorm_rope(*given, *turn, **HEADS, qkv_scale=scale), turned(y, *turn))


@SIZES
def test_fp4_linear(m, device):
    """The bias is added before the global scales."""
    given, y, scale = fp4(m, 40, 256, device)
    bias = torch.randn(40, device=device).to(BF16)
    close(gemm.fp4_linear(*given), y * scale)
    out = torch.full((m + 1, 40), 7.0, dtype=BF16, device=device)
    gemm.fp4_linear(*given, bias, out=out[:m])
    assert (out[m] == 7).all()
    y = (y + bias.double()) * scale
    close(out[:m], y)
    quant = torch.tensor([0.25], device=device)
    close(gemm.fp4_linear(*given, bias, out_dtype=E4M3, output_quant_scale=quant), (y / 4).clamp(-448, 448), E4M3)
    layer = by_path.prepare_fp4_linear(*given[3:5], given[2], given[5], bias)
    assert_bitwise(layer(*given[:2]), out[:m])
    # A model's bias learns; its product here does not.
    learning = by_path.prepare_fp4_linear(*given[3:5], given[2], given[5], torch.nn.Parameter(bias))(*given[:2])
    assert not learning.requires_grad
    layer = by_path.prepare_fp4_linear(*given[3:5], given[2], given[5], bias, out_dtype=E4M3)
    assert_bitwise(layer(*given[:2]), gemm.fp4_linear(*given, bias, out_dtype=E4M3)[0])


@SIZES
def test_swiglu_of_fp4(m, device):
    """And NVFP4: each block's factor is that of its largest value, each code the nearest."""
    given, y, scale = fp4(m, 96, 256, device, 0.004)
    y = gated(y * scale)
    close(gemm.fp4_linear_swiglu(*given), y)
    quant = torch.tensor([3.0], device=device)
    codes, factors = gemm.fp4_linear_swiglu(*given, out_dtype=torch.uint8, output_quant_scale=quant)
    high, wide = layouts.padded(m, 3, "128x4")
    assert codes.shape == (m, 24) and factors.shape == (high * wide,) and factors.dtype == torch.uint8
    # Byte of row r and block b: tiles of 128 rows and four blocks, in each rows by 32, then by four.
    r, b = torch.arange(m)[:, None], torch.arange(3)
    found = factors.cpu()[r // 128 * 128 * wide + r % 32 * 16 + r % 128 // 32 * 4 + b].view(E4M3).double()
    blocks = y.cpu().unflatten(1, (3, 16)) * 3
    peak = blocks.abs().amax(-1) / 6
    assert ((found - peak).abs() <= peak * 2**-4 * 1.01 + 2**-10).all()
    table = torch.cat((scaled.E2M1, -scaled.E2M1))
    nibbles = torch.stack((codes.cpu() & 15, codes.cpu() >> 4), -1).flatten(1).long()
    values = table[nibbles].unflatten(1, (3, 16)) * found[..., None]
    assert ((values - blocks).abs() <= found[..., None] * 1.01 + 2**-9).all()
    plain = gemm.fp4_linear_swiglu(*given, out_dtype=torch.uint8)
    assert len(plain) == 3
    assert_bitwise(plain[2], torch.ones(1, device=device))
    layer = by_path.prepare_fp4_linear_swiglu(
        *given[3:5], given[2], given[5], out_dtype=torch.uint8, output_quant_scale=quant
    )
    for ours, theirs in zip(layer(*given[:2]), (codes, factors), strict=True):
        assert_bitwise(ours, theirs)


@SIZES
@pytest.mark.parametrize("thirds", [None, (0.5, 2.0, 3.0)])
def test_heads_of_fp4(m, thirds, device):
    """Factors of Q, K and V stand for the global scales."""
    given, y, scale = fp4(m, 384, 256, device)
    turn = rotation(m, device)
    factors = None if thirds is None else torch.tensor(thirds, device=device)
    y = y * (scale if thirds is None else factors.double().repeat_interleave(128))
    out = gemm.fp4_qkv_qknorm_rope(*given, *turn, **HEADS, qkv_scale=factors)
    close(out, turned(y, *turn))
    layer = by_path.prepare_fp4_qkv_qknorm_rope(
        *given[3:5], given[2], given[5], *turn[:2], **HEADS, qkv_scale=factors
    )
    assert_bitwise(layer(*given[:2], cos_sin=turn[2], positions=turn[3]), out)


def test_refused():
    given, _ = fp8(3, 384, 128, "cpu")
    turn = rotation(3, "cpu")
    four = fp4(3, 384, 256, "cpu")[0]
    apart = by_path.PrimsTsGemmConfig(100, "fp8_e4m3", "bf16", "linear", False, None, None, separate_qkv_output=True)
    whole, half = torch.ones(384).to(BF16), torch.ones(3)
    calls = [
        (lambda: gemm.fp8_linear(given[0].to(BF16), *given[1:]), "a"),
        (lambda: gemm.fp8_linear(given[0], given[1][:, :64], *given[2:]), "weight"),
        (lambda: gemm.fp8_linear(*given[:2], given[2][:2], given[3]), "a_scale"),
        (lambda: gemm.fp8_linear(*given, whole.float()), "bias"),
        (lambda: gemm.fp8_linear(*given, out_dtype=torch.uint8), "out_dtype"),
        (lambda: gemm.fp8_linear(*given, output_quant_scale=half[:1]), "output_quant_scale"),
        (lambda: gemm.fp8_linear(*given, out_dtype=E4M3, output_quant_scale=half), "output_quant_scale"),
        (lambda: gemm.fp8_linear(*given, out=whole[:3]), "out"),
        (lambda: gemm.fp8_linear(*given, qkv_scale=half[:2]), "qkv_scale"),
        (lambda: gemm.fp8_linear(*given, config=apart), "config"),
        (lambda: gemm.fp8_linear_swiglu(given[0], given[1][:5], given[2], given[3][:5]), "weight"),
        (lambda: gemm.fp8_qkv_qknorm_rope(*given, *turn, **HEADS, is_neox=True), "is_neox"),
        (lambda: gemm.fp8_qkv_qknorm_rope(*given, *turn, **HEADS | dict(num_kv_heads=2)), "num_kv_heads"),
        (lambda: gemm.fp8_qkv_qknorm_rope(*given, *turn, **HEADS | dict(head_dim=64)), "head_dim"),
        (lambda: gemm.fp8_qkv_qknorm_rope(*given, *turn[:3], turn[3].int(), **HEADS), "positions"),
        (lambda: gemm.fp4_linear(four[0], four[1][:-1], *four[2:]), "a_block_scale"),
        (lambda: gemm.fp4_linear(*four, out_dtype=torch.uint8), "out_dtype"),
        (lambda: gemm.fp4_linear_swiglu(*(x[:24] if i == 3 else x for i, x in enumerate(four))), "weight_block_scale"),
        (lambda: gemm.fp4_qkv_qknorm_rope(*four, *turn, **HEADS, out_dtype=E4M3), "out_dtype"),
        (lambda: by_path.PreparedFp4Linear(*four[3:5], 1.0, 1.0, epilogue="no such"), "epilogue"),
        (lambda: by_path.PreparedFp4Linear(*four[3:5], 1.0, 1.0, epilogue="linear", q_norm=turn[0]), "q_norm"),
        (lambda: by_path.PreparedFp4Linear(*four[3:5], 1.0, 1.0, epilogue="qkv_qknorm_rope", head_dim=64), "head_dim"),
        (lambda: by_path.prepare_fp4_qkv_qknorm_rope(four[3][:9], four[4], 1, 1, *turn[:2], **HEADS), "weight_packed"),
    ]
    for call, name in calls:
        with pytest.raises(ValueError, match=f"^{name}: got "):
            call()
