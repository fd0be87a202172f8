"""Random calls of products of narrow matrices: FP8, MXFP8, FP4, of one matrix, of batches and of groups of rows."""

import torch

import flashinfer
from flashinfer import gemm, grouped_mm
from flashinfer.testing import generate
from flashinfer.testing.compare import assert_close
from flashinfer.testing.fuzz import FP8, Call
from tests.ops.gemm import scaled
from tests.ops.tensor_cores import adds_fp8_in_few_bits, fp8_dots_error

ELEMENTS = ("e4m3", "e5m2")
# Column blocks of a scale do not have to divide N, nor tiles of 128 rows M.
ROWS = (0, 1, 3, 17, 130)
COLUMNS = (1, 8, 33, 64, 136)
DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def result_of(draw, *shape, dtype=None):
    """Arguments that ask for a dtype of the result, in a tensor given or not, and that dtype."""
    dtype = dtype or draw.pick(*DTYPES)
    out = None
    if draw.chance(0.4):
        out = draw.laid(torch.empty(shape, dtype=dtype, device=draw.device))
    return dict(out=out), dtype


def one(draw, value):
    """A number as a tensor of one element, of some dtype and shape, on either device."""
    device = draw.pick(draw.device, torch.device("cpu"))
    x = torch.tensor(value, dtype=draw.pick(torch.float32, torch.float32, torch.bfloat16), device=device)
    return x.view(draw.pick((), (1,), (1, 1)))


def in_few_bits(out, truth, wide_a, wide_b, factor):
    """Whether Hopper's tensor cores added codes of 8 bits up, whose sums then have the error of few bits; checked."""
    if out.dtype != torch.float32 or not adds_fp8_in_few_bits(out.device):
        return False
    error, most = (out.double() - truth).abs(), fp8_dots_error(wide_a, wide_b.mT) * factor + 2.0**-22 * truth.abs()
    assert bool((error <= most).all()), f"error {float((error - most).max()):.3g} above {float(most.max()):.3g}"
    return True


def compare(out, wide_a, wide_b, factor=1.0, what="out", eight_bits=False):
    """`out` against the product of float64 operands, times a factor."""
    truth = wide_a @ wide_b.mT * factor
    if eight_bits and in_few_bits(out, truth, wide_a, wide_b, factor):
        return
    same = ((wide_a.float() @ wide_b.float().mT) * factor).to(out.dtype)
    # Products cancel in a result of few elements.
    terms = float((wide_a.abs() @ wide_b.abs().mT * factor).max()) if out.numel() and wide_a.shape[-1] else 0.0
    assert_close(out, same, truth, what, terms=terms)


def right(call_out, given, dtype, check):
    """The result is the tensor that was given, if any, in the dtype asked for."""
    assert given is None or call_out is given
    assert call_out.dtype == dtype, call_out.dtype
    check(call_out)


def fp8(draw, *shape):
    """Codes, and their values in float64."""
    codes = draw.values(*shape, dtype=torch.float32, kinds=("normal", "ties")).to(draw.pick(*FP8))
    return codes, codes.double()


def bmm_fp8(draw):
    batch, m, n, k = draw.pick(1, 3), draw.pick(*ROWS), draw.pick(*COLUMNS), draw.pick(1, 16, 48, 100)
    a, wide_a = fp8(draw, batch, m, k)
    b, wide_b = fp8(draw, batch, n, k)
    if {a.dtype, b.dtype} == {torch.float8_e5m2}:
        b = b.to(torch.float8_e4m3fn)
        wide_b = b.double()
    if draw.chance(0.3):
        # Rows of B in memory, instead of columns.
        b = b.mT.contiguous().mT
    scales = [one(draw, draw.pick(1.0, 0.25, 3.0)) for _ in range(2)]
    given, dtype = result_of(draw, batch, m, n)
    arguments = dict(A=draw.laid(a), B=b.mT, A_scale=scales[0], B_scale=scales[1], dtype=dtype) | given
    factor = float(scales[0]) * float(scales[1])
    return Call(gemm.bmm_fp8, arguments, lambda out: right(
        out, given["out"], dtype, lambda out: compare(out, wide_a, wide_b, factor, eight_bits=True)))  # fmt: skip


def mm_fp8(draw):
    m, n, k = draw.pick(*ROWS), draw.pick(32, 64), draw.pick(128, 256)
    a, wide_a = fp8(draw, m, k)
    b, wide_b = fp8(draw, n, k)
    if arranged := draw.chance():
        a, b = a.float().to(torch.float8_e4m3fn), b.float().to(torch.float8_e4m3fn)
        wide_a, wide_b = a.double(), b.double()
    given, dtype = result_of(draw, m, n)
    alpha = draw.pick(None, one(draw, draw.pick(0.5, 2.5)))
    weight = flashinfer.prepare_low_latency_gemm_weights(b, {}) if arranged else draw.laid(b)
    arguments = dict(a=draw.laid(a), b=weight, alpha=alpha, out_dtype=dtype) | given
    factor = 1.0 if alpha is None else float(alpha)
    return Call(gemm.mm_fp8, arguments, lambda out: right(
        out, given["out"], dtype, lambda out: compare(out, wide_a, wide_b, factor, eight_bits=True)))  # fmt: skip


def mm_mxfp8(draw):
    m, n, k = draw.pick(*ROWS), draw.pick(*COLUMNS), draw.pick(32, 96, 160)
    a = scaled.operand((m, k), draw.pick(*ELEMENTS), "ue8m0", 32, draw.device)
    b = scaled.operand((n, k), draw.pick(*ELEMENTS), "ue8m0", 32, draw.device)
    tall = draw.pick("linear", "128x4", "8x4")
    scales = a.flat if tall == "linear" else a.arranged(tall)
    b_scale = b.flat.mT if draw.chance() else b.arranged("128x4").flatten()
    given, dtype = result_of(draw, m, n)
    arguments = dict(a=draw.laid(a.codes), b=b.codes.mT, a_descale=scales if tall == "linear" else scales.flatten(),
                     b_descale=b_scale, use_8x4_sf_layout=tall == "8x4", out_dtype=dtype) | given  # fmt: skip
    return Call(gemm.mm_mxfp8, arguments, lambda out: right(
        out, given["out"], dtype, lambda out: compare(out, a.values, b.values)))  # fmt: skip


def bmm_mxfp8(draw):
    batch, m, n, k = draw.pick(1, 3), draw.pick(*ROWS), draw.pick(*COLUMNS), draw.pick(32, 96)
    a = scaled.operand((batch, m, k), draw.pick(*ELEMENTS), "ue8m0", 32, draw.device)
    b = scaled.operand((batch, n, k), draw.pick(*ELEMENTS), "ue8m0", 32, draw.device)
    given, dtype = result_of(draw, batch, m, n)
    arguments = dict(A=draw.laid(a.codes), B=b.codes.mT, A_scale=a.arranged("128x4"), B_scale=b.arranged("128x4"))
    return Call(gemm.bmm_mxfp8, arguments | dict(dtype=dtype) | given, lambda out: right(
        out, given["out"], dtype, lambda out: compare(out, a.values, b.values)))  # fmt: skip


def fp4(draw, *shape, width=16):
    return scaled.operand(shape, "e2m1", "ue4m3" if width == 16 else "ue8m0", width, draw.device)


def bytes_of(draw, codes):
    """Two values in a byte, by either of torch's names."""
    return codes.view(torch.float4_e2m1fn_x2) if draw.chance(0.3) else codes


def mm_fp4(draw):
    width = draw.pick(16, 32)
    m, n, k = draw.pick(*ROWS), draw.pick(*COLUMNS), draw.pick(32, 96, 160)
    a, b = fp4(draw, m, k, width=width), fp4(draw, n, k, width=width)
    tall = draw.pick("128x4", "8x4")
    alpha = draw.pick(None, one(draw, draw.pick(0.5, 2.5)))
    factor = 1.0 if alpha is None else float(alpha)
    if m > 1 and draw.chance(0.3):
        alpha = torch.rand(m, device=draw.device) + 0.5
        factor = alpha.double()[:, None]
    given, dtype = result_of(draw, m, n)
    arguments = dict(a=bytes_of(draw, draw.laid(a.codes)), b=bytes_of(draw, b.codes).mT, a_descale=a.arranged(tall),
                     b_descale=b.arranged("128x4"), alpha=alpha, out_dtype=dtype, block_size=width,
                     use_8x4_sf_layout=tall == "8x4", use_nvfp4=width == 16) | given  # fmt: skip
    return Call(gemm.mm_fp4, arguments, lambda out: right(
        out, given["out"], dtype, lambda out: compare(out, a.values, b.values, factor)))  # fmt: skip


def groups_of(draw):
    """Lengths of groups of rows, and their offsets."""
    lens = [draw.pick(0, 1, 5, 17, 130) for _ in range(draw.pick(1, 3))]
    return lens, generate.indptr(lens).int().to(draw.device)


def compare_groups(out, lens, wide_a, wide_b, factors=None, eight_bits=False):
    """Each group's rows against its own weight."""
    wide = [part @ w.mT for part, w in zip(wide_a.split(lens), wide_b)]
    if out.numel():
        factor = 1.0
        if factors is not None:
            factor = torch.cat([f.double().expand(n) for f, n in zip(factors, lens)])[:, None]
        narrow = torch.cat([part.float() @ w.float().mT for part, w in zip(wide_a.split(lens), wide_b)])
        if eight_bits and out.dtype == torch.float32 and adds_fp8_in_few_bits(out.device):
            for i, (mine, part, w) in enumerate(zip(out.split(lens), wide_a.split(lens), wide_b)):
                of_group = 1.0 if factors is None else float(factors[i])
                in_few_bits(mine, wide[i] * of_group, part, w, of_group)
            return
        most = torch.cat([part.abs() @ w.abs().mT for part, w in zip(wide_a.split(lens), wide_b)]) * factor
        assert_close(out, (narrow * factor).to(out.dtype), torch.cat(wide) * factor, terms=float(most.max()))


def grouped_fp8(draw):
    lens, indptr = groups_of(draw)
    n, k = draw.pick(8, 33, 64), draw.pick(16, 48, 100)
    a, wide_a = fp8(draw, sum(lens), k)
    b, wide_b = fp8(draw, len(lens), n, k)
    alpha = draw.pick(None, one(draw, draw.pick(0.5, 2.5)))
    factors = None if alpha is None else alpha.view(1).to(draw.device).expand(len(lens))
    given, dtype = result_of(draw, sum(lens), n)
    arguments = dict(a=draw.laid(a), b=b, m_indptr=indptr, alpha=alpha, out_dtype=dtype) | given
    return Call(grouped_mm.grouped_mm_fp8, arguments, lambda out: right(
        out, given["out"], dtype, lambda out: compare_groups(out, lens, wide_a, wide_b, factors, True)))  # fmt: skip


def grouped_blocks(draw):
    """MXFP8 and FP4 groups of rows, whose factors are of all rows together."""
    lens, indptr = groups_of(draw)
    n, k, width = draw.pick(8, 33, 64), draw.pick(32, 96), draw.pick(16, 32)
    of_fp4 = width == 16 or draw.chance()
    factor = "ue4m3" if width == 16 else "ue8m0"
    a, b = (
        scaled.operand(shape, "e2m1" if of_fp4 else draw.pick(*ELEMENTS), factor, width, draw.device)
        for shape in ((sum(lens), k), (len(lens), n, k))
    )
    given, dtype = result_of(draw, sum(lens), n)
    arguments = dict(a=draw.laid(a.codes), b=b.codes, a_descale=a.arranged("128x4"), b_descale=b.arranged("128x4"),
                     m_indptr=indptr, out_dtype=dtype) | given  # fmt: skip
    factors = None
    if of_fp4:
        alpha = draw.pick(None, one(draw, draw.pick(0.5, 2.5)))
        factors = None if alpha is None else alpha.view(1).to(draw.device).expand(len(lens))
        arguments |= dict(block_size=width, alpha=alpha)
    function = grouped_mm.grouped_mm_fp4 if of_fp4 else grouped_mm.grouped_mm_mxfp8
    return Call(function, arguments, lambda out: right(
        out, given["out"], dtype, lambda out: compare_groups(out, lens, a.values, b.values, factors)))  # fmt: skip


def padded_factors(a, lens):
    """Factors in tiles of 128 rows, where each group begins with a tile."""
    begins, place, first = [], 0, 0
    for g, n in enumerate(lens):
        begins.append((first + 127 * g) // 128 * 128)
        first += n
    rows = (sum(lens) + 127 * len(lens)) // 128 * 128
    placed = torch.zeros(rows, a.flat.shape[1], dtype=torch.uint8, device=a.flat.device)
    for begin, n in zip(begins, lens):
        placed[begin : begin + n] = a.flat.view(torch.uint8)[place : place + n]
        place += n
    return scaled.layouts.arrange(placed, "128x4")


def group_gemm_fp4(draw):
    """MXFP8 rows by MXFP4 weights, and NVFP4 by NVFP4."""
    lens, indptr = groups_of(draw)
    n, k, nvfp4 = draw.pick(8, 33, 64), draw.pick(32, 96, 128), draw.chance()
    kind = ("ue4m3", 16) if nvfp4 else ("ue8m0", 32)
    a = scaled.operand((sum(lens), k), "e2m1" if nvfp4 else draw.pick(*ELEMENTS), *kind, draw.device)
    b = scaled.operand((len(lens), n, k), "e2m1", *kind, draw.device)
    given, dtype = result_of(draw, sum(lens), n)
    arguments = dict(a=draw.laid(a.codes), b=b.codes, a_scale=padded_factors(a, lens), b_scale=b.arranged("128x4"),
                     m_indptr=indptr, out_dtype=dtype) | given  # fmt: skip
    alpha = torch.rand(len(lens), device=draw.device) + 0.5 if nvfp4 and draw.chance() else None
    if nvfp4:
        arguments |= dict(alpha=alpha, swap_ab=draw.chance())
    else:
        arguments |= dict(mma_sm=draw.pick(1, 2), tile_n=draw.pick(64, 128), swap_ab=draw.chance())
    function = gemm.group_gemm_nvfp4_nt_groupwise if nvfp4 else gemm.group_gemm_mxfp4_nt_groupwise
    return Call(function, arguments, lambda out: right(
        out, given["out"], dtype, lambda out: compare_groups(out, lens, a.values, b.values, alpha)))  # fmt: skip


def scaled_groups(draw):
    """FP8 with float32 scales of blocks, by offsets or by the group of each row."""
    lens, indptr = groups_of(draw)
    n, k = draw.pick(8, 33, 136), draw.pick(64, 128, 200)
    gm, gn, gk = draw.pick((1, 128, 128), (1, 1, 128), (128, 128, 128), (1, 128, 64), (1, 64, 32))
    rows = sum(lens)
    element = draw.pick(*ELEMENTS)
    a, a_scale, wide_a = scaled.groupwise((rows, k), element, gm, gk, draw.device)
    b, b_scale, wide_b = scaled.groupwise((len(lens), n, k), draw.pick(*ELEMENTS), gn, gk, draw.device)
    given, dtype = result_of(draw, rows, n)
    arguments = dict(a=draw.laid(a), b=b, scale_granularity_mnk=(gm, gn, gk), out_dtype=dtype) | given
    if draw.chance():
        mode = draw.pick("K", "MN")
        scales = [x.mT.contiguous() if mode == "MN" else x for x in (a_scale, b_scale)]
        arguments |= dict(m_indptr=indptr, scale_major_mode=mode, a_scale=scales[0], b_scale=scales[1])
        function = gemm.group_gemm_fp8_nt_groupwise
    else:
        ids = torch.cat([torch.full((n,), g, dtype=torch.int32) for g, n in enumerate(lens)]).to(draw.device)
        arguments |= dict(m_indices=ids, a_scale=a_scale, b_scale=b_scale)
        function = gemm.group_deepgemm_fp8_nt_groupwise
    return Call(function, arguments, lambda out: right(
        out, given["out"], dtype, lambda out: compare_groups(out, lens, wide_a, wide_b, eight_bits=True)))  # fmt: skip


def masked(draw):
    """The first rows of each group; what lies behind them is left as it is."""
    groups, m, n, k = draw.pick(1, 3), draw.pick(1, 17, 130), draw.pick(8, 33, 136), draw.pick(64, 128, 200)
    gm, gn, gk = draw.pick((1, 128, 128), (1, 1, 128), (128, 128, 128))
    a, a_scale, wide_a = scaled.groupwise((groups, m, k), draw.pick(*ELEMENTS), gm, gk, draw.device)
    b, b_scale, wide_b = scaled.groupwise((groups, n, k), draw.pick(*ELEMENTS), gn, gk, draw.device)
    lens = [draw.integer(0, m) for _ in range(groups)]
    given, dtype = result_of(draw, groups, m, n)
    counts = draw.ints(lens, torch.int32)
    arguments = dict(a=draw.laid(a), b=b, a_scale=a_scale, b_scale=b_scale, masked_m=counts, expected_m=draw.pick(1, m))

    def check(out):
        rows = [x[:c] for x, c in zip(wide_a, lens)]
        kept = torch.cat([x[:c] for x, c in zip(out, lens)])
        compare_groups(kept, lens, torch.cat(rows), wide_b, eight_bits=True)

    arguments |= dict(scale_granularity_mnk=(gm, gn, gk), out_dtype=dtype) | given
    function = gemm.batch_deepgemm_fp8_nt_groupwise
    return Call(function, arguments, lambda out: right(out, given["out"], dtype, check))


FAMILIES = (
    bmm_fp8, mm_fp8, mm_mxfp8, bmm_mxfp8, mm_fp4, grouped_fp8, grouped_blocks, group_gemm_fp4, scaled_groups, masked,
)  # fmt: skip
