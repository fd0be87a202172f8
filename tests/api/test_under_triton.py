"""Upstream's `flashinfer.triton`: norms, gates and products with scales of whole tensors, against float64."""

import pytest
import torch

import flashinfer
import flashinfer.triton
from flashinfer.testing.compare import assert_bitwise, assert_close
from flashinfer.testing.generate import Guarded, randn
from flashinfer.triton import activation, cascade, norm, sm_constraint_gemm

E4M3 = torch.float8_e4m3fn


def norm_of(x, w, eps):
    return x * (x.pow(2).mean(-1, keepdim=True) + eps).rsqrt() * w


def rounded(exact, dtype):
    """As torch rounds what it has in float32, cut to the largest value of the dtype."""
    most = torch.finfo(dtype).max
    return exact.float().clamp(-most, most).to(dtype)


def near(out, exact, dtype):
    most = torch.finfo(dtype).max
    through = 2**-3 if dtype == E4M3 else 0.0
    assert out.dtype == dtype
    assert_close(out.float(), rounded(exact, dtype).float(), exact.clamp(-most, most), through=through)


@pytest.mark.parametrize("scaled", (False, True))
@pytest.mark.parametrize("dtype", (torch.bfloat16, torch.float16, torch.float32, E4M3), ids=str)
def test_silu_and_mul(dtype, scaled, device):
    x = (3 * randn(5, 130, device=device)).to(torch.float16)
    scales = dict(x_scale=torch.tensor(0.5, device=device), o_scale=torch.tensor([300.0], device=device))
    given = scales if scaled else {}
    exact = x.double() * (0.5 if scaled else 1)
    exact = torch.nn.functional.silu(exact[:, :65]) * exact[:, 65:] * (300 if scaled else 1)
    near(activation.silu_and_mul(x, **given, dtype=dtype), exact, dtype)
    assert_bitwise(activation.silu_and_mul(x), flashinfer.silu_and_mul(x))


@pytest.mark.parametrize("dtype", (torch.bfloat16, E4M3), ids=str)
def test_rms_norm(dtype, device):
    x, w = randn(5, 72, dtype=torch.bfloat16, device=device), randn(72, dtype=torch.bfloat16, device=device)
    plain, guard = torch.empty_like(x), Guarded((5, 72), dtype, device)
    norm.rms_norm(x, w, plain, 1e-5)
    assert_bitwise(plain, flashinfer.rmsnorm(x, w, 1e-5))
    in_scale, out_scale = torch.tensor([0.25], device=device), torch.tensor(200.0, device=device)
    norm.rms_norm(x, w, guard.out, 1e-2, in_scale, out_scale)
    guard.check()
    near(guard.out, 200 * norm_of(0.25 * x.double(), w.double(), 1e-2), dtype)
    x8 = x.to(E4M3)
    norm.rms_norm(x8, w, guard.out, 1e-2, in_scale)
    near(guard.out, norm_of(0.25 * x8.double(), w.double(), 1e-2), dtype)


@pytest.mark.parametrize("apart", (False, True))
def test_rms_norm_add_residual(apart, device):
    x, r = (randn(5, 72, dtype=torch.float16, device=device) for _ in range(2))
    w = randn(72, dtype=torch.float16, device=device)
    before, total = x.clone(), x.double() + r.double()
    new, out = r.clone(), torch.empty(5, 72, dtype=E4M3, device=device) if apart else None
    scale = torch.tensor(20.0, device=device) if apart else None
    norm.rms_norm_add_residual(x, new, w, 1e-5, out, x_out_scale=scale)
    assert_close(new, before + r, total, "residual")
    exact = norm_of(total, w.double(), 1e-5)
    if apart:
        assert_bitwise(x, before)
        near(out, 20 * exact, E4M3)
    else:
        near(x, exact, torch.float16)
    codes, half = before.to(E4M3), torch.tensor(0.5, device=device)
    total = 0.5 * codes.double() + r.double()
    norm.rms_norm_add_residual(codes, r, w, 1e-5, x_in_scale=half, x_out_scale=half)
    assert_close(r, total.half(), total, "residual")
    near(codes, 0.5 * norm_of(total, w.double(), 1e-5), E4M3)


@pytest.mark.parametrize("dtype", (torch.bfloat16, torch.float16, torch.float32, E4M3), ids=str)
@pytest.mark.parametrize("name", ("gemm", "gemm_persistent", "gemm_descriptor_persistent"))
def test_products(name, dtype, device):
    a, b = (randn(*shape, device=device).to(dtype) for shape in ((33, 64), (64, 48)))
    limit = {} if name == "gemm" else {"num_sms": 16}
    transposed = name.endswith("descriptor_persistent")
    given = b.mT.contiguous() if transposed else b
    product, exact = getattr(sm_constraint_gemm, name), a.double() @ b.double()
    result = torch.bfloat16 if dtype == E4M3 else dtype

    def check(out, exact):
        # Tensor cores multiply float32 as TF32, which has float16's bits, and add products of FP8 in some 13 bits.
        if device.type == "cuda" and out.dtype == torch.float32 and dtype in (torch.float32, E4M3):
            out = out.to(torch.float16 if dtype == torch.float32 else torch.bfloat16)
        assert_close(out, exact.to(out.dtype), exact)

    check(product(a, given, **limit), exact)
    c = randn(33, 48, dtype=result, device=device)
    exact = 0.5 * exact + 2 * c.double()
    assert product(a, given, c, 0.5, 2.0, **limit) is c
    check(c, exact)
    wide = product(a, given, out_dtype=torch.float32, alpha=3.0, beta=7.0, **limit)
    exact = 3 * (a.double() @ b.double())
    assert wide.dtype == torch.float32
    check(wide, exact)
    codes = randn(33, 48, device=device).to(E4M3)
    both = 30 * (a.double() @ b.double()) + 2 * codes.double()
    assert product(a, given, codes, 30.0, 2.0, out_dtype=E4M3, **limit) is codes
    near(codes, both, E4M3)
    near(product(a, given, out_dtype=E4M3, alpha=30.0, **limit), 30 * (a.double() @ b.double()), E4M3)


def test_names_of_merging():
    assert cascade.merge_state is flashinfer.merge_state and cascade.merge_states is flashinfer.merge_states
    assert cascade.merge_state_in_place is flashinfer.merge_state_in_place
    assert flashinfer.triton.cascade is cascade


def test_bad_input():
    x, w = torch.ones(2, 8), torch.ones(8)
    product = sm_constraint_gemm.gemm_persistent
    for argument, call in (
        ("x", lambda: activation.silu_and_mul(torch.ones(2, 7))),
        ("x", lambda: activation.silu_and_mul(torch.ones(2, 8).int())),
        ("dtype", lambda: activation.silu_and_mul(x, dtype=torch.int8)),
        ("out", lambda: norm.rms_norm(x, w, x.int(), 0.0)),
        ("x_out", lambda: norm.rms_norm_add_residual(x, x.clone(), w, 0.0, torch.ones(1, 8).expand(2, 8))),
        ("o_scale", lambda: activation.silu_and_mul(x, o_scale=torch.ones(2))),
        ("out", lambda: norm.rms_norm(x, w, torch.ones(2, 4), 0.0)),
        ("in_scale", lambda: norm.rms_norm(x, w, x.clone(), 0.0, in_scale=torch.ones(2))),
        ("residual", lambda: norm.rms_norm_add_residual(x, torch.ones(3, 8), w, 0.0)),
        ("x_out", lambda: norm.rms_norm_add_residual(x, x.clone(), w, 0.0, torch.ones(2, 4))),
        ("b", lambda: product(x, torch.ones(7, 3))),
        ("c", lambda: product(x, torch.ones(8, 3), torch.ones(2, 3).half())),
        ("num_sms", lambda: product(x, torch.ones(8, 3), num_sms=0)),
    ):
        with pytest.raises(ValueError, match=f"^{argument}: got .*allowed: "):
            call()
