"""The masked product under upstream's name, against a float64 product of what codes and factors stand for."""

import importlib
import sys

import pytest
import torch

from flashinfer.cute_dsl import convert_sf_to_mma_layout
from flashinfer.cute_dsl.blockscaled_gemm import grouped_gemm_nt_masked
from flashinfer.testing import generate
from flashinfer.testing.compare import assert_close
from tests.ops.gemm import scaled
from tests.ops.norm.variants import variant  # the fixture
from tests.ops.tensor_cores import half_product

NAMES = {"e2m1": "float4_e2m1fn", "e4m3": "float8_e4m3fn", "e5m2": "float8_e5m2"}
FACTORS = {"ue8m0": "float8_e8m0fnu", "ue4m3": "float8_e4m3fn"}
DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
NAN = float("nan")


def call(a, b, out, counts, encoding, factor, width, c_dtype, seen=None, **more):
    """lhs in the view of the tensor core's layout, rhs's factors flat, as vLLM has them."""
    rows, k = a.values.shape[1:]
    sfa = convert_sf_to_mma_layout(a.arranged("128x4"), rows, k, len(a.codes), width)
    settings = dict(ab_dtype=NAMES[encoding], sf_dtype=FACTORS[factor], c_dtype=c_dtype, sf_vec_size=width)
    moved = [x.codes.permute(1, 2, 0) for x in (a, b)]
    return grouped_gemm_nt_masked((moved[0], sfa), (moved[1], b.arranged("128x4")), out, counts, **settings, **more)


@pytest.mark.parametrize(
    "encoding, factor, width, c_dtype",
    [
        ("e2m1", "ue4m3", 16, "bfloat16"),
        ("e2m1", "ue8m0", 32, "float16"),
        ("e4m3", "ue8m0", 32, "bfloat16"),
        ("e5m2", "ue8m0", 32, "float32"),
    ],
)
@pytest.mark.parametrize("scaled_result", [False, True])
def test_against_float64(variant, device, encoding, factor, width, c_dtype, scaled_result):
    experts, m, n, k = 3, 21, 40, 128
    a = scaled.operand((experts, m, k), encoding, factor, width, device)
    b = scaled.operand((experts, n, k), encoding, factor, width, device)
    counts = torch.tensor([5, 0, 21], dtype=torch.int32, device=device)
    alpha = torch.rand(1, 1, experts, device=device) + 0.5 if scaled_result else None
    more = dict(alpha=alpha, alpha_dtype="float32") if scaled_result else {}
    whole = torch.full((experts + 2, m, n), NAN, dtype=DTYPES[c_dtype], device=device)
    out = whole[1:-1].permute(1, 2, 0)
    assert call(a, b, out, counts, encoding, factor, width, c_dtype, **more) is out
    for e, count in enumerate(counts.tolist()):
        factor_of = 1.0 if alpha is None else float(alpha.flatten()[e])
        truth = a.values[e, :count] @ b.values[e].mT * factor_of
        peer = (scaled.same_dtype(a.values[e, :count], b.values[e], torch.float32) * factor_of).to(out.dtype)
        assert_close(whole[1 + e, :count], peer, truth)
        assert whole[1 + e, count:].isnan().all()
    assert whole[0].isnan().all() and whole[-1].isnan().all()


def test_out_as_experts_first_and_equal_sizes(device):
    """[experts, m, n] is taken too; where all three are equal, strides tell which is meant."""
    size = 32
    a = scaled.operand((size, size, size), "e4m3", "ue8m0", 32, device)
    counts = torch.full((size,), size, dtype=torch.int32, device=device)
    first = torch.zeros(size, size, size, dtype=torch.float32, device=device)
    last = torch.zeros_like(first)
    call(a, a, first, counts, "e4m3", "ue8m0", 32, "float32")
    call(a, a, last.permute(1, 2, 0), counts, "e4m3", "ue8m0", 32, "float32")
    truth = a.values @ a.values.mT
    for out in (first, last):
        assert_close(out, truth.float(), truth)


@pytest.mark.parametrize(
    "changed, name",
    [
        (dict(ab_dtype="int8"), "ab_dtype"),
        (dict(sf_dtype="float32"), "sf_dtype"),
        (dict(c_dtype="float8_e4m3fn"), "c_dtype"),
        (dict(c_dtype="float16"), "out"),
        (dict(sf_vec_size=64), "sf_vec_size"),
        (dict(is_combine_fusion=True), "is_combine_fusion"),
        (dict(num_ranks=2), "num_ranks"),
        (dict(topk_weights=torch.ones(2, 4)), "topk_weights"),
        (dict(is_swap_ab=True), "is_swap_ab"),
        (dict(tile="odd"), "kwargs"),
        (dict(c_major="m"), "c_major"),
        (dict(alpha=torch.ones(3)), "alpha"),
        (dict(alpha=torch.ones(2), alpha_dtype="float16"), "alpha_dtype"),
    ],
    ids=str,
)
def test_what_is_refused(changed, name):
    codes = torch.zeros(2, 4, 64, dtype=torch.float8_e4m3fn).permute(1, 2, 0)
    factors = torch.zeros(2, 128 * 4, dtype=torch.uint8)
    out = torch.zeros(2, 4, 4, dtype=torch.bfloat16).permute(1, 2, 0)
    settings = dict(ab_dtype="float8_e4m3fn", sf_dtype="float8_e8m0fnu", c_dtype="bfloat16", sf_vec_size=32) | changed
    counts = torch.zeros(2, dtype=torch.int32)
    with pytest.raises(ValueError, match=name):
        grouped_gemm_nt_masked((codes, factors), (codes, factors), out, counts, **settings)


def test_routers(device):
    """Every size of upstream's small router products, in the dtype that its name says."""
    from flashinfer import gemm

    for name in [name for name in gemm.__all__ if name.startswith("mm_M1_16_")]:
        hidden, experts = (int(part[1:]) for part in name.split("_")[3:5])
        dtype = torch.bfloat16 if name.endswith("bf16") or experts == 128 else torch.float32
        a = generate.randn(3, hidden, dtype=torch.bfloat16, device=device)
        weight = generate.randn(experts, hidden, dtype=torch.bfloat16, device=device)
        out = torch.full((3, experts), NAN, dtype=dtype, device=device)
        assert getattr(gemm, name)(a, weight.mT, out) is None
        truth = a.double() @ weight.double().mT
        product = half_product(a, weight.mT) if a.is_cuda else a.float() @ weight.float().mT
        for wrong in (out * 0, out * (1.0001 if dtype == torch.float32 else 1.03)):
            with pytest.raises(AssertionError):
                assert_close(wrong, product.to(dtype), truth)
        assert_close(out, product.to(dtype), truth)
        with pytest.raises(ValueError, match="mat_b"):
            getattr(gemm, name)(a, weight.mT[:, 1:], out)


def test_cute_dsl_is_looked_for(tmp_path, monkeypatch):
    from flashinfer.cute_dsl import is_cute_dsl_available, utils

    assert is_cute_dsl_available is utils.is_cute_dsl_available
    for name in ("cutlass", "cutlass.cute"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    assert is_cute_dsl_available() is False
    (tmp_path / "cutlass").mkdir()
    (tmp_path / "cutlass" / "__init__.py").write_text("")
    importlib.invalidate_caches()
    assert is_cute_dsl_available() is False
    (tmp_path / "cutlass" / "cute.py").write_text("raise RuntimeError")
    importlib.invalidate_caches()
    assert is_cute_dsl_available() is True
    sys.modules.pop("cutlass")
