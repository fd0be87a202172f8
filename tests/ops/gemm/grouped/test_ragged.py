"""Products of entries with rows of any number, against float64; rows of no entry stay as they are."""

import pytest
import torch

from flashinfer import gemm, grouped_mm
from flashinfer.testing.compare import assert_close
from tests.ops.gemm import scaled
from tests.ops.norm.variants import variant  # the fixture

BF16 = torch.bfloat16
NAN = float("nan")


def offsets(device, *lengths):
    return torch.tensor([0, *lengths], device=device).cumsum(0).int()


@pytest.mark.parametrize("transpose_a", [False, True])
@pytest.mark.parametrize("transpose_b", [False, True])
def test_masked_bmm(variant, device, transpose_a, transpose_b):
    q, m, n, k = 3, 21, 40, 72
    a, b = torch.randn(q, m, k, device=device).to(BF16), torch.randn(q, k, n, device=device).to(BF16)
    counts = torch.tensor([5, 0, 21], dtype=torch.int32, device=device)
    given_a, given_b = a.mT.contiguous() if transpose_a else a, b.mT.contiguous() if transpose_b else b
    out = torch.full((q, m, n), NAN, dtype=BF16, device=device)
    assert gemm.masked_bmm(given_a, given_b, counts, transpose_a, transpose_b, out) is out
    for entry, count in enumerate(counts.tolist()):
        assert_close(out[entry, :count], a[entry, :count] @ b[entry], a[entry, :count].double() @ b[entry].double())
        assert out[entry, count:].isnan().all()


@pytest.mark.parametrize("transpose_a, transpose_b", [(False, True), (True, False)])
def test_ragged_bmm(variant, device, transpose_a, transpose_b):
    m, n, k = 37, 40, 72
    a, b = torch.randn(m, k, device=device).half(), torch.randn(3, n, k, device=device).half()
    given_a, given_b = a.T.contiguous() if transpose_a else a, b if transpose_b else b.mT.contiguous()
    indptr = offsets(device, 9, 0, 28)
    most = torch.tensor([28], device=device)
    out = gemm.ragged_bmm(given_a, given_b, indptr, 28, most, transpose_a, transpose_b, torch.float32)
    for entry, (begin, end) in enumerate(zip(indptr.tolist(), indptr.tolist()[1:])):
        rows = a[begin:end]
        assert_close(out[begin:end], rows.float() @ b[entry].T.float(), rows.double() @ b[entry].T.double())


def test_ragged_block_scaled_bmm(variant, device):
    a, a_scale, a_values = scaled.groupwise((37, 256), "e4m3", 1, 128, device)
    b, b_scale, b_values = scaled.groupwise((2, 96, 256), "e4m3", 32, 128, device)
    indptr = offsets(device, 9, 28)
    out = gemm.ragged_block_scaled_bmm(a, b, a_scale, b_scale, indptr, 28)
    for entry, rows in ((0, slice(0, 9)), (1, slice(9, 37))):
        truth = a_values[rows] @ b_values[entry].T
        assert_close(out[rows], scaled.same_dtype(a_values[rows], b_values[entry], torch.float32).to(BF16), truth)


KINDS = {  # block_scale_type: the elements of a and of b, the format of a factor, and its elements
    "nvfp4": ("e2m1", "e2m1", "ue4m3", 16),
    "mxfp4": ("e2m1", "e2m1", "ue8m0", 32),
    "mxfp8": ("e4m3", "e5m2", "ue8m0", 32),
    "mixed": ("e4m3", "e2m1", "ue8m0", 32),
}


@pytest.mark.parametrize("kind", KINDS)
def test_masked_scaled_bmm(variant, device, kind):
    element_a, element_b, *factor = KINDS[kind]
    a = scaled.operand((3, 21, 128), element_a, *factor, device)
    b = scaled.operand((3, 40, 128), element_b, *factor, device)
    counts = torch.tensor([5, 0, 21], dtype=torch.int32, device=device)
    tiles = [x.arranged("128x4").view(3, 1, -1, 2, 256) for x in (a, b)]
    out = gemm.masked_scaled_bmm(a.codes, b.codes, *tiles, counts, kind, out_dtype=torch.float32)
    for entry, count in enumerate(counts.tolist()):
        rows, weight = a.values[entry, :count], b.values[entry]
        assert_close(out[entry, :count], scaled.same_dtype(rows, weight, torch.float32), rows @ weight.T)
    assert gemm.masked_scaled_bmm(a.codes, b.codes, *tiles, counts, kind, counts.amax()).dtype == BF16


@pytest.mark.parametrize("given_a, given_b", [(False, False), (True, False), (True, True)])
@pytest.mark.parametrize("kind", KINDS)
def test_ragged_scaled_bmm(variant, device, kind, given_a, given_b):
    element_a, element_b, *factor = KINDS[kind]
    a = scaled.operand((149, 128), element_a, *factor, device)
    b = scaled.operand((3, 40, 128), element_b, *factor, device)
    a_global = torch.tensor(0.5, device=device) if given_a else None
    b_global = torch.tensor([2.0, 3.0, 0.25], device=device) if given_b else None
    indptr = offsets(device, 128, 0, 21)
    tiles = a.arranged("128x4").view(2, -1, 2, 256), b.arranged("128x4").view(3, 1, -1, 2, 256)
    out = gemm.ragged_scaled_bmm(
        a.codes, b.codes, *tiles, indptr, 128, kind, a_global_scale=a_global, b_global_scale=b_global
    )
    assert out.dtype == torch.float32
    for entry, rows in ((0, slice(0, 128)), (2, slice(128, 149))):
        divisor = (0.5 if given_a else 1) * (b_global[entry].double() if given_b else 1)
        truth, same = a.values[rows] @ b.values[entry].T, scaled.same_dtype(a.values[rows], b.values[entry], out.dtype)
        assert_close(out[rows], same / divisor, truth / divisor)


def test_scaled_bmm_refusals():
    a, b, one = (torch.ones(2, 4, 64).to(torch.float8_e4m3fn), torch.ones(2, 8, 64).to(torch.float8_e4m3fn),
                 torch.full((2, 512), 127, dtype=torch.uint8))  # fmt: skip
    counts, indptr = torch.tensor([4, 1], dtype=torch.int32), torch.tensor([0, 2, 4], dtype=torch.int32)
    for wrong in (
        {"transpose_a": True}, {"transpose_b": False}, {"block_scale_type": "fp4"}, {"masked_m": counts.long()},
        {"a_scale": one[:1]}, {"b_scale": one.float()}, {"a": a.half()}, {"max_m_device": counts}, {"b": b[..., :32]},
    ):  # fmt: skip
        given = {"a": a, "b": b, "a_scale": one, "b_scale": one, "masked_m": counts, "block_scale_type": "mxfp8"}
        with pytest.raises(ValueError, match=f"^{next(iter(wrong))}"):
            gemm.masked_scaled_bmm(**given | wrong)
    for wrong in (
        {"swizzled_layout_a": False}, {"max_m": -1}, {"m_indptr": indptr[:2]}, {"a_global_scale": torch.ones(2)},
        {"b_global_scale": torch.ones(1)}, {"b_global_scale": torch.ones(2).double()}, {"transpose_b": False},
    ):  # fmt: skip
        given = {"a": a[0], "b": b, "a_scale": one[0], "b_scale": one, "m_indptr": indptr, "max_m": 2}
        with pytest.raises(ValueError, match=f"^{next(iter(wrong))}"):
            gemm.ragged_scaled_bmm(**{"block_scale_type": "mxfp8"} | given | wrong)


def test_contiguous(variant, device):
    a, a_scale, a_values = scaled.groupwise((131, 128), "e4m3", 1, 128, device)
    b, b_scale, b_values = scaled.groupwise((2, 128, 128), "e4m3", 128, 128, device)
    indices = torch.tensor([0] * 128 + [1] * 3, dtype=torch.int32, device=device)
    out = gemm.group_gemm_fp8_nt_groupwise_contiguous(a, b, a_scale, b_scale, indices, validate_indices=True)
    truth = torch.cat((a_values[:128] @ b_values[0].T, a_values[128:] @ b_values[1].T))
    same = torch.cat((a_values[:128].float() @ b_values[0].T.float(), a_values[128:].float() @ b_values[1].T.float()))
    assert_close(out, same.to(BF16), truth)
    for wrong, what in (([1] * 128 + [0] * 3, "sorted"), ([0] * 130 + [1], "128"), ([0] * 130 + [2], "0 to 1")):
        wrong = torch.tensor(wrong, dtype=torch.int32, device=device)
        with pytest.raises(ValueError, match=f"m_indices.*{what}"):
            gemm.group_gemm_fp8_nt_groupwise_contiguous(a, b, a_scale, b_scale, wrong, validate_indices=True)


@pytest.mark.parametrize("dtype", [BF16, torch.float32, torch.float8_e4m3fn])
@pytest.mark.parametrize("trans_a, trans_b, alpha, beta", [(False, True, 1.0, 0.0), (True, False, -0.5, 2.0)])
def test_alpha_beta(device, dtype, trans_a, trans_b, alpha, beta):
    a, b = torch.randn(19, 72, device=device).to(dtype), torch.randn(72, 24, device=device).to(dtype)
    given_a, given_b = a.T.contiguous() if trans_a else a, b.T.contiguous() if trans_b else b
    before = torch.randn(19, 24, device=device).to(BF16)
    c = before.clone() if beta else torch.full_like(before, NAN)
    assert gemm.gemm_alpha_beta(given_a, given_b, c, trans_a, trans_b, alpha, beta) is c
    same = alpha * (a.float() @ b.float()) + (beta * before.float() if beta else 0)
    truth = alpha * (a.double() @ b.double()) + (beta * before.double() if beta else 0)
    assert_close(c, same.to(BF16), truth)
    for shared in (c[:1].expand(19, 24), c[:, :1].expand(19, 24)):
        with pytest.raises(ValueError, match="^c: got strides"):
            gemm.gemm_alpha_beta(given_a, given_b, shared, trans_a, trans_b, alpha, beta)


@pytest.mark.parametrize("gated", [False, True])
def test_moe_gemm_fp8(variant, device, gated):
    """Scales of each expert's rows begin at a multiple of 4 columns; what lies between is NaN."""
    a, a_scale, a_values = scaled.groupwise((12, 256), "e4m3", 1, 128, device)
    b, b_scale, b_values = scaled.groupwise((3, 128, 256), "e4m3", 128, 128, device)
    indptr = offsets(device, 5, 0, 7)
    padded = torch.full((2, (12 + 3 * 3) // 4 * 4), NAN, device=device)
    for e, (begin, end) in enumerate(zip(indptr.tolist(), indptr.tolist()[1:])):
        first = (begin + 3 * e) // 4 * 4
        padded[:, first : first + end - begin] = a_scale[begin:end].T
    out = grouped_mm.moe_gemm_fp8_nt_groupwise(a, b, padded, b_scale.mT.contiguous(), indptr, is_gated=gated)
    check_moe_gemm(out, a_values, b_values, indptr, gated)


@pytest.mark.parametrize("width", [32, 128])
def test_moe_gemm_mxfp8(variant, device, width):
    a = scaled.operand((12, 256), "e4m3", "ue8m0", width, device)
    b = scaled.operand((3, 64, 256), "e4m3", "ue8m0", width, device)
    indptr = offsets(device, 5, 0, 7)
    blocks = -(-256 // (4 * width))
    padded = torch.full(((12 + 3 * 3) // 4 * 4, 4 * blocks), 255, dtype=torch.uint8, device=device)
    for e, (begin, end) in enumerate(zip(indptr.tolist(), indptr.tolist()[1:])):
        first = (begin + 3 * e) // 4 * 4
        padded[first : first + end - begin, : 256 // width] = a.flat[begin:end]
    of_b = torch.nn.functional.pad(b.flat, (0, 4 * blocks - 256 // width)).contiguous()
    # Words of four factors, the column of words contiguous, as TMA copies them.
    a_scale = padded.view(torch.int32).T.contiguous().T
    out = grouped_mm.moe_gemm_mxfp8_nt_groupwise(
        a.codes, b.codes, a_scale, of_b.view(torch.int32), indptr, scale_granularity_mnk=(1, 1, width)
    )
    check_moe_gemm(out, a.values, b.values, indptr, False)


def check_moe_gemm(out, a, b, indptr, gated):
    def product(dtype):
        ends = indptr.tolist()
        parts = [a[i:j].to(dtype) @ w.T.to(dtype) for i, j, w in zip(ends, ends[1:], b)]
        y = torch.cat(parts)
        up, gate = y.chunk(2, 1)
        return torch.nn.functional.silu(gate) * up if gated else y

    assert_close(out, product(torch.float32).to(out.dtype), product(torch.float64))
