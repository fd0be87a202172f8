"""Random calls of matrix products, and of the routing of tokens to experts."""

import torch

from flashinfer import fused_moe, gemm
from flashinfer.fused_moe import RoutingMethodType as Method
from flashinfer.testing import generate
from flashinfer.testing.compare import assert_close
from flashinfer.testing.fuzz import Call, close
from tests.ops.gemm import scaled
from tests.ops.moe.routing.test_routing import check as check_routing


def sizes(draw):
    m = draw.pick(1, 3, 17, 70)
    return m, *(draw.fitting((1, 8, 17, 33, 64, 100, 136), m) for _ in range(2))


def transposed(draw, rows, columns, dtype, kinds):
    """[rows, columns] with contiguous columns, or the transpose of such a one."""
    if draw.chance(0.3):
        return draw.tensor(rows, columns, dtype=dtype, kinds=kinds)
    return draw.tensor(columns, rows, dtype=dtype, kinds=kinds).T


def mm(draw):
    (m, n, k), dtype, kinds = sizes(draw), draw.half(), ("normal", "ties")
    a, b = transposed(draw, m, k, dtype, kinds), transposed(draw, k, n, dtype, kinds)
    out_dtype = draw.pick(dtype, torch.float32)
    arguments = dict(a=a, b=b, out_dtype=out_dtype)
    # Products cancel in a result of one element.
    terms = float((a.double().abs().amax(0) * b.double().abs().amax(1)).max())
    return Call(gemm.mm_bf16, arguments, lambda out: close(out, lambda t: a.to(t) @ b.to(t), terms=terms))


def bmm(draw):
    (m, n, k), dtype, count = sizes(draw), draw.half(), draw.pick(1, 3)
    a, b = draw.values(count, m, k, dtype=dtype), draw.values(count, n, k, dtype=dtype).mT
    arguments = dict(A=a, B=b, out_dtype=dtype)
    return Call(gemm.bmm_bf16, arguments, lambda out: close(out, lambda t: a.to(t) @ b.to(t)))


def blockscaled(draw):
    m, n, k = draw.pick(1, 4, 17), 128 * draw.pick(1, 2), 128 * draw.pick(1, 2)
    a, a_scale, a_wide = scaled.groupwise((m, k), "e4m3", 1, 128, draw.device)
    b, b_scale, b_wide = scaled.groupwise((n, k), "e4m3", 128, 128, draw.device)
    mode = draw.pick("K", "MN")
    scales = [x.mT.contiguous() if mode == "MN" else x for x in (a_scale, b_scale)]
    arguments = dict(a=a, b=b, a_scale=scales[0], b_scale=scales[1], scale_major_mode=mode)

    def check(out):
        assert_close(out, scaled.same_dtype(a_wide, b_wide, out.dtype), a_wide @ b_wide.mT)

    return Call(gemm.gemm_fp8_nt_groupwise, arguments, check)


def segments(draw):
    dtype, lens = draw.half(), [draw.pick(0, 1, 5, 17) for _ in range(draw.pick(1, 3))]
    n, k = (draw.pick(8, 17, 64) for _ in range(2))
    x, w = draw.tensor(sum(lens), k, dtype=dtype), draw.values(len(lens), n, k, dtype=dtype)
    space = torch.empty(1 << 12, dtype=torch.int8, device=draw.device)
    wrapper = gemm.SegmentGEMMWrapper(space)

    def formula(t):
        return torch.cat([part.to(t) @ each.to(t).T for part, each in zip(x.split(lens), w)])

    by_length = draw.chance()
    where = dict(seg_lens=draw.ints(lens, torch.int64)) if by_length else dict(
        seg_indptr=draw.ints(generate.indptr(lens).tolist(), torch.int64))  # fmt: skip
    arguments = dict(x=x, weights=w, batch_size=len(lens), weight_column_major=True) | where
    return Call(wrapper.run, arguments, lambda out: close(out, formula))


def deepseek(draw):
    experts, groups, kept, k = draw.pick((160, 1, 1, 6), (64, 8, 4, 8), (60, 3, 2, 6), (24, 12, 1, 2), (256, 8, 4, 8))
    tokens = draw.pick(1, 3, 7)
    logits = (torch.randn(tokens, experts, device=draw.device) * 2).round()
    bias = (torch.randn(experts, device=draw.device) * 2).round() / 4
    weights = torch.empty(tokens, k, device=draw.device)
    ids = torch.empty(tokens, k, dtype=draw.index(), device=draw.device)
    scale = draw.pick(1.0, 2.5, 0.5)
    arguments = dict(scores=draw.laid(logits), bias=bias, n_group=groups, topk_group=kept, topk=k)
    arguments |= dict(routed_scaling_factor=scale, topk_values=weights, topk_indices=ids)

    def check(result):
        check_routing(logits, Method.DeepSeekV3, k, bias, groups, kept, scale=scale, result=(ids, weights))

    return Call(fused_moe.fused_topk_deepseek, arguments, check)


FAMILIES = (mm, bmm, blockscaled, segments, deepseek)
