"""Products in groups against a float64 product for each group, of exactly what codes and factors stand for."""

import pytest
import torch

import flashinfer
from flashinfer import gemm, grouped_mm
from flashinfer.ops import layouts
from flashinfer.testing import generate
from flashinfer.testing.compare import assert_bitwise, assert_close
from tests.ops.gemm import scaled
from tests.ops.norm.variants import variant  # the fixture

BF16 = torch.bfloat16
gpu = pytest.mark.gpu
NAN = float("nan")

# rows of each group, N, K
SMALL = [([5, 0, 17, 1], 40, 128), ([0, 0], 24, 128), ([18], 40, 192)]
LARGE = [([300, 0, 1, 64, 129, 0], 640, 1024), ([1] * 70, 512, 2048), ([2, 1030], 1160, 512)]
shapes = pytest.mark.parametrize("lengths, n, k", [*SMALL, *(pytest.param(*s, marks=gpu) for s in LARGE)], ids=str)


def poisoned(rows, n, device, dtype=BF16):
    return torch.full((rows, n), NAN, dtype=dtype, device=device)


def check(out, a, b, groups, factors=None):
    """Rows of out against a [M, K] @ b[group of the row].T in float64; those of -1 are as they were, NaN."""
    groups = groups.to(out.device)
    assert out[groups < 0].isnan().all()
    truth, same = torch.empty_like(out, dtype=torch.float64), torch.empty_like(out)
    for g in range(len(b)):
        mine = groups == g
        factor = 1.0 if factors is None else float(factors[g])
        truth[mine] = a[mine] @ b[g].mT * factor
        same[mine] = (scaled.same_dtype(a[mine], b[g], out.dtype) * factor).to(out.dtype)
    there = groups >= 0
    assert_close(out[there], same[there], truth[there])


def members(lengths, more=0):
    """The group of each row, and -1 for `more` rows past the last."""
    return torch.cat([torch.full((n,), g) for g, n in enumerate(lengths)] + [torch.full((more,), -1)])


@shapes
@pytest.mark.parametrize("mode, granularity", [("MN", (1, 128, 128)), ("K", (4, 16, 64))])
def test_group_gemm_fp8(variant, device, lengths, n, k, mode, granularity):
    rows = sum(lengths) + 3
    a, a_scale, a_wide = scaled.groupwise((rows, k), "e4m3", granularity[0], granularity[2], device)
    b, b_scale, b_wide = scaled.groupwise((len(lengths), n, k), "e4m3", granularity[1], granularity[2], device)
    scales = [s.mT.contiguous() if mode == "MN" else s for s in (a_scale, b_scale)]
    out = poisoned(rows, n, device)
    indptr = generate.indptr(lengths, device)
    assert gemm.group_gemm_fp8_nt_groupwise(a, b, *scales, indptr, granularity, mode, out=out) is out
    check(out, a_wide, b_wide, members(lengths, 3))


@pytest.mark.parametrize("lengths, alignment", [([128, 0, 256], 128), ([128, 5, 0], 128)], ids=str)
def test_a_promise_about_offsets(variant, device, lengths, alignment):
    """Groups are where their offsets are, also where they break the promise."""
    a, a_scale, a_wide = scaled.groupwise((sum(lengths) + 3, 128), "e4m3", 1, 128, device)
    b, b_scale, b_wide = scaled.groupwise((3, 32, 128), "e4m3", 128, 128, device)
    out, indptr = poisoned(len(a), 32, device), generate.indptr(lengths, device)
    scales = a_scale.mT.contiguous(), b_scale.mT.contiguous()
    gemm.group_gemm_fp8_nt_groupwise(a, b, *scales, indptr, out=out, segment_alignment=alignment)
    check(out, a_wide, b_wide, members(lengths, 3))


@shapes
def test_batch_deepgemm(variant, device, lengths, n, k):
    most = max(lengths) + 2
    a, a_scale, a_wide = scaled.groupwise((len(lengths), most, k), "e4m3", 1, 128, device)
    b, b_scale, b_wide = scaled.groupwise((len(lengths), n, k), "e4m3", 128, 128, device)
    counts = torch.tensor(lengths, dtype=torch.int32, device=device)
    out = poisoned(len(lengths) * most, n, device).view(-1, most, n)
    gemm.batch_deepgemm_fp8_nt_groupwise(a, b, a_scale, b_scale, counts, expected_m=7, out=out)
    groups = torch.cat([members([0] * g + [c], most - c) for g, c in enumerate(lengths)])
    check(out.view(-1, n), a_wide.view(-1, k), b_wide, groups)
    again = gemm.batch_deepgemm_fp8_nt_groupwise(a, b, a_scale, b_scale, counts, 200)
    for g, c in enumerate(lengths):
        assert_close(again[g, :c], out[g, :c], out[g, :c].double())


@shapes
@pytest.mark.parametrize("order", ["sorted", "shuffled"])
def test_group_deepgemm(variant, device, lengths, n, k, order):
    """Groups in order with rows of -1 after each, and rows of all groups in no order."""
    groups = torch.cat([torch.cat((torch.full((c,), g), torch.full((-c % 4,), -1))) for g, c in enumerate(lengths)])
    groups = groups[torch.randperm(len(groups))] if order == "shuffled" else groups
    a, a_scale, a_wide = scaled.groupwise((len(groups), k), "e4m3", 1, 128, device)
    b, b_scale, b_wide = scaled.groupwise((len(lengths), n, k), "e4m3", 128, 128, device)
    out = poisoned(len(groups), n, device)
    gemm.group_deepgemm_fp8_nt_groupwise(a, b, a_scale, b_scale, groups.int().to(device), out=out)
    check(out, a_wide, b_wide, groups)


def padded_factors(operand, lengths):
    """Factors of rows in 128x4 tiles, those of group g from row (start + 127 g) // 128 * 128 on."""
    rows, blocks = operand.flat.shape
    spread = torch.full(((rows + 127 * len(lengths)) // 128 * 128, blocks), 0x7F, dtype=torch.uint8)
    start = 0
    for g, n in enumerate(lengths):
        at = (start + 127 * g) // 128 * 128
        spread[at : at + n] = operand.flat.view(torch.uint8)[start : start + n].cpu()
        start += n
    return layouts.arrange(spread, "128x4").to(operand.flat.device)


@shapes
def test_group_gemm_mxfp8_mxfp4(variant, device, lengths, n, k):
    a = scaled.operand((sum(lengths), k), "e4m3", "ue8m0", 32, device)
    b = scaled.operand((len(lengths), n, k), "e2m1", "ue8m0", 32, device)
    out = gemm.group_gemm_mxfp8_mxfp4_nt_groupwise(
        a.codes, b.codes, padded_factors(a, lengths), b.arranged("128x4"), generate.indptr(lengths, device)
    )
    check(out, a.values, b.values, members(lengths))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, BF16], ids=str)
def test_many_rows_to_a_group(variant, device, dtype):
    """Tiles of 128 rows, which the other lengths do not have."""
    a = scaled.operand((147, 128), "e4m3", "ue8m0", 32, device)
    b = scaled.operand((1, 64, 128), "e2m1", "ue8m0", 32, device)
    a.values.mul_(2.0**-10)
    given = a.codes, b.codes, padded_factors(a, [147]), b.arranged("128x4"), generate.indptr([147], device)
    given[2].sub_(10)
    check(gemm.group_gemm_mxfp8_mxfp4_nt_groupwise(*given, out_dtype=dtype), a.values, b.values, members([147]))


@shapes
def test_group_gemm_nvfp4(variant, device, lengths, n, k):
    a, b = (scaled.operand(s, "e2m1", "ue4m3", 16, device) for s in ((sum(lengths), k), (len(lengths), n, k)))
    factors = torch.rand(len(lengths), device=device) + 0.5
    out = gemm.group_gemm_nvfp4_nt_groupwise(
        a.codes, b.codes, padded_factors(a, lengths), b.arranged("128x4"), generate.indptr(lengths, device), factors
    )
    check(out, a.values, b.values, members(lengths), factors)


@shapes
@pytest.mark.parametrize("number_format", ["mxfp8", "nvfp4", "mxfp4"])
def test_grouped_mm_of_blocks(variant, device, lengths, n, k, number_format):
    element, factor, width = {"mxfp8": ("e4m3", "ue8m0", 32), "nvfp4": ("e2m1", "ue4m3", 16),
                              "mxfp4": ("e2m1", "ue8m0", 32)}[number_format]  # fmt: skip
    a, b = (scaled.operand(s, element, factor, width, device) for s in ((sum(lengths), k), (len(lengths), n, k)))
    args = a.codes, b.codes, a.arranged("128x4"), b.arranged("128x4"), generate.indptr(lengths, device)
    if number_format == "mxfp8":
        out, factors = grouped_mm.grouped_mm_mxfp8(*args), None
    else:
        alpha = torch.tensor([0.75], device=device)
        out, factors = grouped_mm.grouped_mm_fp4(*args, alpha, block_size=width), [0.75] * len(lengths)
    check(out, a.values, b.values, members(lengths), factors)


@shapes
@pytest.mark.parametrize("element", ["bf16", "fp16", "e4m3", "e5m2"])
def test_grouped_mm_unscaled(variant, device, lengths, n, k, element):
    indptr = generate.indptr(lengths, device)
    if element in scaled.FP8:
        a, a_wide = scaled.codes_of((sum(lengths), k), element, device)
        b, b_wide = scaled.codes_of((len(lengths), n, k), element, device)
        out = grouped_mm.grouped_mm_fp8(a, b, indptr, torch.tensor([0.5], device=device))
        check(out, a_wide, b_wide, members(lengths), [0.5] * len(lengths))
        return
    dtype = BF16 if element == "bf16" else torch.float16
    a, b = (generate.randn(*s, dtype=dtype, device=device) for s in ((sum(lengths), k), (len(lengths), n, k)))
    check(grouped_mm.grouped_mm_bf16(a, b, indptr, out_dtype=dtype), a.double(), b.double(), members(lengths))
    out = grouped_mm.grouped_mm_bf16(a, b, indptr, out_dtype=torch.float32)
    check(out.to(dtype), a.double(), b.double(), members(lengths))


def calls_with_out(device):
    """{name: (call with out and perhaps out_dtype, shape of its result)} of functions that read the dtype off `out`."""
    ones = {s: torch.ones(s, device=device) for s in ((256, 1), (2, 128, 1), (2, 256, 128), (256, 128))}
    a, b = (ones[s].to(torch.float8_e4m3fn) for s in ((256, 128), (2, 256, 128)))
    indptr, indices = generate.indptr([128, 128], device), torch.arange(256, device=device).int() // 128
    counts, of_b = torch.tensor([128, 128], device=device).int(), torch.ones(2, 2, 1, device=device)
    fp4 = [torch.full(x.shape[:-1] + (64,), 0x22, dtype=torch.uint8, device=device) for x in (a, b)]
    tiles = [torch.full((n,), 127, dtype=torch.uint8, device=device) for n in (256 * 4, 2 * 256 * 4)]
    mxfp4 = dict(block_size=32)
    return {
        "gemm_fp8_nt_groupwise": (
            lambda **o: gemm.gemm_fp8_nt_groupwise(a, b[0], ones[256, 1], of_b[0], "K", **o), (256, 256)),
        "group_gemm_fp8_nt_groupwise": (
            lambda **o: gemm.group_gemm_fp8_nt_groupwise(a, b, ones[256, 1], of_b, indptr, scale_major_mode="K", **o),
            (256, 256)),
        "group_deepgemm_fp8_nt_groupwise": (
            lambda **o: gemm.group_deepgemm_fp8_nt_groupwise(a, b, ones[256, 1], of_b, indices, **o), (256, 256)),
        "batch_deepgemm_fp8_nt_groupwise": (
            lambda **o: gemm.batch_deepgemm_fp8_nt_groupwise(
                a.view(2, 128, 128), b, ones[2, 128, 1], of_b, counts, 128, **o), (2, 128, 256)),
        "grouped_mm_bf16": (
            lambda **o: grouped_mm.grouped_mm_bf16(a.to(BF16), b.to(BF16), indptr, **o), (256, 256)),
        "grouped_mm_fp8": (lambda **o: grouped_mm.grouped_mm_fp8(a, b, indptr, **o), (256, 256)),
        "grouped_mm_mxfp8": (lambda **o: grouped_mm.grouped_mm_mxfp8(a, b, *tiles, indptr, **o), (256, 256)),
        "grouped_mm_fp4": (lambda **o: grouped_mm.grouped_mm_fp4(*fp4, *tiles, indptr, **mxfp4, **o), (256, 256)),
    }  # fmt: skip


@pytest.mark.parametrize("name", calls_with_out("cpu"))
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_dtype_of_a_result_that_is_given(device, name, dtype):
    """It is that of `out`, whatever out_dtype says: its default is bfloat16."""
    call, shape = calls_with_out(device)[name]
    for more in ({}, {"out_dtype": BF16}):
        out = torch.full(shape, NAN, dtype=dtype, device=device)
        assert call(out=out, **more) is out
        assert (out == 128).all()
    assert call(out_dtype=dtype).dtype == dtype


def test_dtype_of_a_result_of_contiguous_groups():
    a, b = torch.ones(128, 128).to(torch.float8_e4m3fn), torch.ones(1, 128, 128).to(torch.float8_e4m3fn)
    given = a, b, torch.ones(128, 1), torch.ones(1, 1, 1), torch.zeros(128, dtype=torch.int32)
    out = poisoned(128, 128, "cpu")
    assert (gemm.group_gemm_fp8_nt_groupwise_contiguous(*given, out=out, out_dtype=torch.float16) == 128).all()
    with pytest.raises(ValueError, match="^out: got torch.float16"):
        gemm.group_gemm_fp8_nt_groupwise_contiguous(*given, out=out.half())
    with pytest.raises(ValueError, match="^out_dtype: got torch.float16"):
        gemm.group_gemm_fp8_nt_groupwise_contiguous(*given, out_dtype=torch.float16)


@shapes
@pytest.mark.parametrize("column_major, index", [(True, torch.int32), (False, torch.int64)])
def test_segment_gemm(variant, device, lengths, n, k, column_major, index):
    x = generate.randn(sum(lengths) + 2, k, dtype=torch.float16, device=device)
    weights = generate.randn(len(lengths) + 1, n, k, dtype=torch.float16, device=device)
    given = weights if column_major else weights.mT.contiguous()
    wrapper = flashinfer.SegmentGEMMWrapper(torch.empty(16, dtype=torch.int8, device=device))
    seg_lens = torch.tensor(lengths, dtype=index, device=device)
    seg_indptr = generate.indptr(lengths, device).to(index)
    out = poisoned(len(x), n, device, torch.float16)
    wrapper.run(x, given, len(lengths), column_major, out, seg_lens)
    check(out, x.double(), weights.double(), members(lengths, 2))
    again = wrapper.forward(x, given, len(lengths), column_major, seg_indptr=seg_indptr)
    assert_bitwise(again[: sum(lengths)], out[: sum(lengths)])
    # Weights in another order, and on a GPU, where the host does not read it, one that does not exist.
    order = torch.arange(len(lengths), 0, -1)
    if device.type != "cpu":
        order[0] = len(weights)
    chosen = poisoned(len(x), n, device, torch.float16)
    wrapper.run(x, given, len(lengths), column_major, chosen, seg_lens, weight_indices=order.to(index).to(device))
    found = torch.cat((order[members(lengths)], torch.full((2,), -1)))
    check(chosen, x.double(), weights.double(), torch.where(found == len(weights), -1, found))


@pytest.mark.parametrize("column_major", [True, False])
@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2])
def test_segments_of_fp8(variant, device, dtype, column_major):
    """Values as they are, without scales; a new tensor is bfloat16, and `out` says float16."""
    lengths, n, k = [3, 0, 5], 24, 80
    x, weights = (torch.randn(s, device=device).to(dtype) for s in ((sum(lengths), k), (len(lengths), n, k)))
    given = weights if column_major else weights.mT.contiguous()
    wrapper = flashinfer.SegmentGEMMWrapper(torch.empty(16, dtype=torch.int8, device=device))
    seg_lens = torch.tensor(lengths, device=device)
    made = wrapper.run(x, given, len(lengths), column_major, seg_lens=seg_lens)
    assert made.dtype == BF16
    out = poisoned(len(x), n, device, torch.float16)
    wrapper.run(x, given, len(lengths), column_major, out, seg_lens)
    for result in (made, out):
        check(result, x.double(), weights.double(), members(lengths))
    with pytest.raises(ValueError, match="^out: got torch.float32"):
        wrapper.run(x, given, len(lengths), column_major, out.float(), seg_lens)


def test_segments_from_the_host(variant, device):
    """Lengths and numbers of weights on the CPU are checked and moved; rows of no segment are 0 in a new tensor."""
    x = generate.randn(9, 64, dtype=torch.float16, device=device)
    weights = generate.randn(3, 16, 64, dtype=torch.float16, device=device)
    wrapper = flashinfer.SegmentGEMMWrapper(torch.empty(16, dtype=torch.int8, device=device))
    chosen = torch.tensor([2, 0])
    out = wrapper.run(x, weights, 2, True, seg_indptr=torch.tensor([1, 4, 8]), weight_indices=chosen)
    groups = torch.tensor([-1, 2, 2, 2, 0, 0, 0, 0, -1])
    assert not out[groups < 0].any()
    out[groups < 0] = NAN
    check(out, x.double(), weights.double(), groups)
    refused = [
        (dict(seg_lens=torch.tensor([5, 5])), "seg_lens"),
        (dict(seg_lens=torch.tensor([5, -1])), "seg_lens"),
        (dict(seg_indptr=torch.tensor([0, 5, 4])), "seg_indptr"),
        (dict(seg_indptr=torch.tensor([0, 5, 10])), "seg_indptr"),
        (dict(seg_indptr=torch.tensor([-1, 5, 9])), "seg_indptr"),
        (dict(seg_lens=torch.tensor([4, 5]), weight_indices=torch.tensor([0, 3])), "weight_indices"),
        (dict(seg_lens=torch.tensor([4, 5]), weight_indices=torch.tensor([-1, 0])), "weight_indices"),
    ]
    for arguments, name in refused:
        with pytest.raises(ValueError, match=name):
            wrapper.run(x, weights, 2, True, **arguments)


def test_more_groups_than_are_searched_at_once(device):
    """The search for a tile's group goes on from chunk to chunk."""
    lengths = [0] * 300 + [2, 0, 3]
    x = generate.randn(5, 128, dtype=torch.float16, device=device)
    weights = generate.randn(303, 24, 128, dtype=torch.float16, device=device)
    indptr = generate.indptr(lengths, device)
    out = grouped_mm.grouped_mm_bf16(x, weights, indptr, out_dtype=torch.float16, backend="portable")
    check(out, x.double(), weights.double(), members(lengths))


@pytest.mark.parametrize("rows, groups", [(0, 2), (4, 0)])
def test_nothing_to_do(variant, device, rows, groups):
    a, b = torch.zeros(rows, 128, dtype=BF16, device=device), torch.zeros(groups, 8, 128, dtype=BF16, device=device)
    out = grouped_mm.grouped_mm_bf16(a, b, torch.zeros(groups + 1, dtype=torch.int32, device=device))
    assert out.shape == (rows, 8)


def test_no_columns(device):
    """Rows of groups are zeros where there is nothing to sum."""
    a, b = torch.zeros(5, 0, dtype=BF16, device=device), torch.zeros(2, 8, 0, dtype=BF16, device=device)
    out = torch.full((5, 8), float("nan"), dtype=BF16, device=device)
    grouped_mm.grouped_mm_bf16(a, b, torch.tensor([0, 1, 3], dtype=torch.int32, device=device), out=out)
    assert not out[:3].any() and out[3:].isnan().all()


def good():
    a, a_scale, _ = scaled.groupwise((6, 128), "e4m3", 1, 128, "cpu")
    b, b_scale, _ = scaled.groupwise((2, 8, 128), "e4m3", 128, 128, "cpu")
    return dict(a=a, b=b, a_scale=a_scale, b_scale=b_scale)


BAD = {
    "a": dict(a=torch.zeros(6, 128)),
    "b": dict(b=torch.zeros(2, 8, 64).to(torch.float8_e4m3fn)),
    "a_scale": dict(a_scale=torch.ones(1, 6)),
    "b_scale": dict(b_scale=torch.ones(1, 1)),
    "m_indptr": dict(m_indptr=torch.zeros(2, dtype=torch.int32)),
    "m_indptr of int64": dict(m_indptr=torch.zeros(3, dtype=torch.int64)),
    "m_indptr elsewhere": dict(m_indptr=torch.zeros(3, dtype=torch.int32, device="meta")),
    "scale_major_mode": dict(scale_major_mode="N"),
    "segment_alignment": dict(segment_alignment=0),
    "out": dict(out=torch.empty(6, 9, dtype=BF16)),
    "backend": dict(backend="nothing"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_input_of_group_gemm(name):
    given = good() | dict(m_indptr=torch.tensor([0, 2, 6], dtype=torch.int32), scale_major_mode="K") | BAD[name]
    with pytest.raises(ValueError, match=f"^{name.split()[0]}: got .*allowed: "):
        gemm.group_gemm_fp8_nt_groupwise(**given)


def test_bad_input_of_the_others():
    with pytest.raises(ValueError, match="^m_indices: got"):
        gemm.group_deepgemm_fp8_nt_groupwise(**good(), m_indices=torch.zeros(5, dtype=torch.int32))
    batch = good() | dict(a=torch.zeros(2, 6, 128).to(torch.float8_e4m3fn), a_scale=torch.ones(2, 6, 1))
    with pytest.raises(ValueError, match="^masked_m: got"):
        gemm.batch_deepgemm_fp8_nt_groupwise(**batch, masked_m=torch.zeros(3, dtype=torch.int32), expected_m=3)
    with pytest.raises(ValueError, match="^expected_m: got"):
        gemm.batch_deepgemm_fp8_nt_groupwise(**batch, masked_m=torch.zeros(2, dtype=torch.int32), expected_m=0)
    a, b = (scaled.operand(s, "e2m1", "ue4m3", 16, "cpu") for s in ((6, 128), (2, 8, 128)))
    indptr = torch.tensor([0, 2, 6], dtype=torch.int32)
    with pytest.raises(ValueError, match="^a_scale: got"):
        gemm.group_gemm_nvfp4_nt_groupwise(a.codes, b.codes, a.arranged("128x4"), b.arranged("128x4"), indptr)
    x, weights = torch.zeros(4, 8, dtype=BF16), torch.zeros(1, 8, 8, dtype=BF16)
    ones = torch.full((1024,), 0x38).byte(), torch.full((2, 1024), 0x38).byte()
    for wrong, name in (((ones[0][1:], ones[1]), "a_descale"), ((ones[0], ones[1][:1]), "b_descale")):
        with pytest.raises(ValueError, match=f"^{name}: got"):
            grouped_mm.grouped_mm_fp4(torch.zeros(3, 64).byte(), torch.zeros(2, 32, 64).byte(), *wrong,
                                      torch.tensor([0, 1, 3]).int())  # fmt: skip
    with pytest.raises(ValueError, match="^seg_lens: got None"):
        flashinfer.SegmentGEMMWrapper(torch.empty(1)).run(x, weights, 1, True)


def test_is_a_registered_op():
    from flashinfer.gemm import _launch

    a, b = torch.zeros(6, 64, dtype=BF16), torch.zeros(2, 8, 64, dtype=BF16)
    args = a, b, None, None, None, torch.zeros(6, 8, dtype=BF16), torch.tensor([0, 2, 6], dtype=torch.int32), None
    torch.library.opcheck(_launch.grouped.op, (*args, "offsets"))


@gpu
def test_graph(device):
    """A captured product follows what m_indptr holds when it is replayed."""
    a, b = (generate.randn(*s, dtype=BF16, device=device) for s in ((64, 512), (4, 256, 512)))
    indptr = generate.indptr([16, 16, 16, 16], device)
    out = poisoned(64, 256, device)
    grouped_mm.grouped_mm_bf16(a, b, indptr, out)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        grouped_mm.grouped_mm_bf16(a, b, indptr, out)
    for lengths in ([0, 64, 0, 0], [1, 2, 3, 58], [20, 0, 4, 9]):
        indptr.copy_(generate.indptr(lengths, device))
        out.fill_(NAN)
        graph.replay()
        check(out, a.double(), b.double(), members(lengths, 64 - sum(lengths)))
