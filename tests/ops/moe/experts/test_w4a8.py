"""4-bit weights under rows with scales of columns or of their own: INT4 and Humming's MXFP4 of `cutlass_fused_moe`, as
Hopper's callers send them, and NVFP4 by TensorRT-LLM's names."""

import pytest
import torch

import flashinfer
from flashinfer import fused_moe
from flashinfer._core.target import named
from flashinfer.fused_moe import interleave_moe_scales_for_sm90_mixed_gemm as interleaved_scales
from flashinfer.fused_moe import interleave_moe_weights_for_sm90_mixed_gemm as interleaved
from flashinfer.ops.moe import experts as room
from flashinfer.testing.compare import assert_bitwise
from tests.ops.moe.experts.layers import E2M1, arranged, between, mixture, nibbles, random, swiglu, weights
from tests.ops.moe.experts.test_experts import check, chosen, tokens, way  # `way` is the fixture

E, H, M = 4, 256, 128
HALF = torch.float16


def e4m3(x):
    return x.float().clamp(-448, 448).to(torch.float8_e4m3fn)


def int4(n, k, device):
    """Codes, factors of 128 elements, and values in float64."""
    codes = torch.randint(256, (E, n, k // 2), dtype=torch.uint8, device=device)
    halves = nibbles(codes)
    factors = ((torch.rand(E, n, k // 128, device=device) + 0.5) / 4 / k**0.5).to(torch.bfloat16)
    value = torch.where(halves > 7, halves - 16, halves) * factors.double().repeat_interleave(128, 2)
    return codes, factors, value


def int4_layer(device, rows_of_scales=1, dtype=HALF):
    (w1, s1, v1), (w2, s2, v2) = int4(2 * M, H, device), int4(H, M, device)
    x = torch.randn(tokens(device), H, device=device).to(dtype)
    a1 = (torch.rand(rows_of_scales, H, device=device) + 1).to(torch.bfloat16)
    a2 = (torch.rand(rows_of_scales, M, device=device) * 8 + 8).to(torch.bfloat16)
    d1, d2 = (torch.rand(E, device=device) + 0.5 for _ in range(2))
    empty = torch.empty(0, dtype=dtype, device=device)
    scales = [interleaved_scales(s1, 128), interleaved_scales(s2, 128), a1, a2[..., None], empty, empty, d1, d2]
    given = [interleaved(w, "int4") for w in (w1, w2)]
    return (x, given, scales), (v1, v2, s1, s2), (a1, a2, d1, d2)


def call(x, ids, s, given, scales, dtype=HALF, **flags):
    flags = {"use_w4_group_scaling": True, "use_packed_weights": True} | flags
    return fused_moe.cutlass_fused_moe(x, ids, s, *given, dtype, scales, **flags)[0]


def through(a2, dtype=HALF):
    return lambda h: e4m3(h.to(dtype).float() * a2.float()).double()


def test_int4(way, device):
    (x, given, scales), (v1, v2, *_), (a1, a2, d1, d2) = int4_layer(device)
    ids, s = chosen(device)
    xd = e4m3(x.float() * a1.float()).double()
    out = call(x, ids, s, given, scales)
    truth = dict(d1=d1, d2=d2, through=through(a2[0]))
    check(out, xd, v1, v2, ids, s, dtype=HALF, spacing=2**-3, **truth)
    # float16 tensors are the bytes of bfloat16 ones, and columns of a1 may come as [hidden].
    bytes_of = [scale.view(HALF) if scale.dtype == torch.bfloat16 else scale for scale in scales]
    bytes_of[2] = bytes_of[2][0]
    assert_bitwise(call(x, ids, s, given, bytes_of), out)
    assert_bitwise(call(x, ids.long(), s, given, tuple(scales), use_packed_weights=False), out)
    with pytest.raises(AssertionError, match="error"):
        check(out, xd, v1, v2, ids, s, dtype=HALF, spacing=2**-3, **truth | {"d2": d2 * 1.1})


def test_scales_of_each_expert(way, device):
    """A token's row is then another one for each of its experts: the layer is a sum over them."""
    (x, given, scales), (v1, v2, *_), (a1, a2, d1, d2) = int4_layer(device, E)
    ids, s = chosen(device)
    out = call(x, ids, s, given, scales)
    total = torch.zeros(len(x), H, dtype=torch.float64, device=device)
    for e in range(E):
        only = torch.where(ids == e, ids, -1)
        xd = e4m3(x.float() * a1[e].float()).double()
        total += mixture(xd, v1, v2, only, s, d1=d1, d2=d2, through=through(a2[e]))
    # Codes that were rounded to bfloat16 with their factors would lie 1.4 % away.
    assert (out.double() - total).norm() < 2e-3 * total.norm()
    same = scales[:2] + [scales[2][:1].expand(E, H).contiguous(), scales[3][:1].expand(E, M, 1).contiguous()]
    one = scales[:2] + [scales[2][:1], scales[3][:1]]
    assert_bitwise(call(x, ids, s, given, same + scales[4:]), call(x, ids, s, given, one + scales[4:]))


def test_groups_together_and_no_column_scales(way, device):
    """Two or four groups of a row beside each other, as SGLang puts them itself; empty column scales are 1."""
    w1, s1, _ = int4(2 * 512, 512, device)
    w2, s2, _ = int4(512, 512, device)
    x = torch.randn(3, 512, device=device).to(torch.bfloat16)
    ids, s = torch.tensor([[0, 1], [2, 3], [1, 1]], device=device), torch.rand(3, 2, device=device)
    empty, ones = torch.empty(0, device=device), torch.ones(E, device=device)
    tail = [empty, empty, empty, empty, ones, ones]
    expected = call(x, ids, s, (w1, w2), [interleaved_scales(s1, 128), interleaved_scales(s2, 128), *tail], x.dtype)
    for f in (2, 4):
        beside = [t.unflatten(2, (-1, f)).transpose(1, 2).flatten(2).contiguous() for t in (s1, s2)]
        assert_bitwise(call(x, ids, s, (w1, w2), [*beside, *tail], x.dtype), expected)
    flat = [torch.ones(512, dtype=torch.bfloat16, device=device)] * 2
    given = [interleaved_scales(s1, 128), interleaved_scales(s2, 128), *flat, *tail[2:]]
    assert_bitwise(call(x, ids, s, (w1, w2), given, x.dtype), expected)


@pytest.mark.parametrize("offsets", [False, True])
def test_humming(way, device, offsets):
    """MXFP4 by its factorisation, rows in e4m3 over scales of their own; `offsets` : interleaved by the caller."""
    (w1, s1, v1), (w2, s2, v2) = weights("mxfp4", E, 2 * M, H, device), weights("mxfp4", E, H, M, device)
    sizes = torch.logspace(-2, 2, tokens(device), device=device)
    x = (torch.randn(tokens(device), H, device=device) * sizes[:, None]).to(HALF)
    x[-1] = 0
    made = []
    for w, scale in ((w1, s1), (w2, s2)):
        codes, factors, residual = fused_moe.preprocess_moe_weights_for_sm90_mixed_gemm_humming(
            w, scale, interleave=not offsets
        )
        if offsets:
            codes, factors = interleaved(codes, "fp4_fp8"), interleaved_scales(factors)
        made.append((codes, factors.view(torch.int32), residual * 64))
    (c1, o1, r1), (c2, o2, r2) = made
    ids, s = chosen(device)
    out = call(x, ids, s, (c1, c2), [o1, r1, torch.ones((), device=device), o2, r2], use_packed_weights=False,
               use_wfp4afp8_humming=True)  # fmt: skip

    def over_rows(h):
        scale = (h.to(HALF).float().abs().amax(-1, keepdim=True) / 448).clamp(min=1e-30)
        return e4m3(h.to(HALF).float() / scale).double() * scale.double()

    check(out, over_rows(x), v1, v2, ids, s, dtype=HALF, spacing=2**-3, through=over_rows)


@pytest.mark.parametrize("routed", [True, False])
def test_nvfp4_with_scales_of_tokens(way, device, routed):
    """Tokens of very different size; a scale of each before the products, and of each row between them."""
    H = M = 128
    count, base = tokens(device), 1 / (448 * 6)
    x = torch.randn(count, H, device=device).to(HALF) * 4.0 ** (torch.arange(count, device=device) % 4 - 2)[:, None]
    x = x.to(HALF)
    x[1] = 0
    layout = flashinfer.SfLayout.layout_linear
    codes, x_scale, p = flashinfer.nvfp4_quantize(x, base, layout, per_token_activation=True)
    xd = E2M1.to(device)[nibbles(codes)] * x_scale.view(torch.float8_e4m3fn).double().repeat_interleave(16, 1)
    (w1, s1, v1), (w2, s2, v2) = weights("nvfp4", E, 2 * M, H, device), weights("nvfp4", E, H, M, device)
    (w1, s1), (w2, s2) = arranged(w1, s1, True), arranged(w2, s2, False)
    d, q, f = torch.full((E,), 0.5, device=device), torch.full((E,), 2.0, device=device), torch.rand(E, device=device)
    given = (codes, x_scale, w1, s1, None, None, None, None, w2, s2, None, d * q, d, f, E, 2, None, None, M, 0, E, None)
    if routed:
        ids, s = chosen(device)
        out = fused_moe.trtllm_fp4_block_scale_routed_moe((ids, s), None, *given, per_token_scale=p)[0]
    else:
        logits = torch.randn(count, E, device=device)
        ids, s = fused_moe.routing.route(logits, None, 1, 2)
        out = fused_moe.trtllm_fp4_block_scale_moe(
            logits, None, *given, routing_method_type=1, per_token_scale=p[:, None]
        )[0]

    def over_rows(y, e):
        h = (swiglu(y).double() * float(q[e])).to(torch.bfloat16).double()
        scale = float(h.abs().max().float() * base)
        return between("nvfp4", 1 / scale)(h) * scale if scale else h

    xd = xd * p.double()[:, None]
    check(out, xd, v1, v2, ids, s, act=over_rows, of_expert=True, d1=d, d2=f, spacing=0.5)
    assert not out[1].any()
    with pytest.raises(AssertionError, match="error"):
        check(out, xd * 1.2, v1, v2, ids, s, act=over_rows, of_expert=True, d1=d, d2=f, spacing=0.5)


@pytest.mark.parametrize("encoding", ["nvfp4", "mxfp4"])
def test_shared_experts(way, device, encoding):
    """Shared experts come after the routed ones, in weights and in ids; each token has them all."""
    H = M = 128
    count, shared = tokens(device), 2
    x = torch.randn(count, H, device=device).bfloat16()
    (w1, s1, v1), (w2, s2, v2) = (
        (torch.cat((a, b)) for a, b in zip(weights(encoding, E, n, 128, device),
                                           weights(encoding, shared, n, 128, device), strict=True))
        for n in (2 * M, H)
    )  # fmt: skip
    (w1, s1), (w2, s2) = arranged(w1, s1, True), arranged(w2, s2, False)
    logits = torch.randn(count, E, device=device)
    ids, s = (part.to(device) for part in fused_moe.routing.route(logits, None, 2, 2, n_group=1, topk_group=1))
    ids = torch.cat((ids, torch.arange(E, E + shared, device=device).expand(count, -1)), 1).int()
    s = torch.cat((s, torch.ones(count, shared, device=device)), 1)
    given = (x, None, w1, s1, None, None, None, None, w2, s2, None, None, None, None, E, 2, 1, 1, M, 0, E, 1.0, 2)
    by_logits = fused_moe.trtllm_fp4_block_scale_moe(logits, None, *given, num_fused_shared_experts=shared)[0]
    by_ids = fused_moe.trtllm_fp4_block_scale_routed_moe((ids, s), None, *given, num_fused_shared_experts=shared)[0]
    for out in (by_logits, by_ids):
        check(out, x, v1, v2, ids, s, act=swiglu, dtype=torch.bfloat16)
    with pytest.raises(AssertionError, match="error"):
        check(by_ids, x, v1, v2, ids[:, :2], s[:, :2], act=swiglu, dtype=torch.bfloat16)
    for name, change in (("num_fused_shared_experts", {22: 1}), ("num_fused_shared_experts", {19: 1, 20: 3}),
                         ("topk_ids", {15: 3})):  # fmt: skip
        bad = [change.get(i, value) for i, value in enumerate(given)]
        with pytest.raises(ValueError, match=f"^{name}: got "):
            fused_moe.trtllm_fp4_block_scale_routed_moe((ids, s), None, *bad, num_fused_shared_experts=shared)


@pytest.mark.parametrize(
    "change", [dict(dtype=HALF), dict(count=3), dict(rows="bf16")], ids=["a dtype", "a count", "rows without"]
)
def test_scales_of_tokens_that_are_refused(change):
    given = dict(dtype=torch.float32, count=4, rows="nvfp4") | change
    codes, x_scale, _ = random(given["rows"], 4, 128)
    (w1, s1, _), (w2, s2, _) = weights("nvfp4", E, 256, 128), weights("nvfp4", E, 128, 128)
    (w1, s1), (w2, s2) = arranged(w1, s1, True), arranged(w2, s2, False)
    with pytest.raises(ValueError, match="^per_token_scale: got .*allowed: "):
        fused_moe.trtllm_fp4_block_scale_routed_moe(
            chosen("cpu"), None, codes, x_scale, w1, s1, None, None, None, None, w2, s2, None, None, None, None, E, 2,
            None, None, 128, 0, E, None, per_token_scale=torch.ones(given["count"], dtype=given["dtype"]),
        )  # fmt: skip


def test_workspace(device):
    """Of the size that is asked for, or none: nothing is read or written there."""
    sizes = dict(max_num_tokens=4, hidden_size=H, intermediate_size=M, num_experts_total=E, top_k=2)
    size = fused_moe.cutlass_fused_moe_workspace_size(**sizes, x_dtype=HALF, weight_dtype=torch.uint8, device=device)
    named = fused_moe.cutlass_fused_moe_workspace_size(**sizes, x_dtype=HALF, weight_dtype=HALF, backend="cutlass")
    assert named == size
    workspace = torch.full((size,), 7, dtype=torch.uint8, device=device)
    (x, given, scales), *_ = int4_layer(device)
    ids, s = chosen(device)
    out = call(x, ids, s, given, scales, workspace_buffer=workspace, profile_ids=[0, 0])
    assert_bitwise(out, call(x, ids, s, given, scales))
    assert (workspace == 7).all()
    for name in sizes:
        with pytest.raises(ValueError, match=f"^{name}: got 0; allowed: 1 or more"):
            fused_moe.cutlass_fused_moe_workspace_size(**sizes | {name: 0}, x_dtype=HALF, weight_dtype=HALF)
    with pytest.raises(ValueError, match="^backend: got 'cake'; allowed: "):
        fused_moe.cutlass_fused_moe_workspace_size(**sizes, x_dtype=HALF, weight_dtype=HALF, backend="cake")


BAD = {
    "an expert's zeros": ("quant_scales: zeros of fc2", lambda q: [*q[:5], torch.ones(2), *q[6:]]),
    "seven tensors": ("quant_scales", lambda q: q[:7]),
    "factors in float32": ("quant_scales: fc1", lambda q: [q[0].float(), *q[1:]]),
    "factors of other rows": ("quant_scales: fc2", lambda q: [q[0], q[1][:, :, :4], *q[2:]]),
    "columns of another count": ("quant_scales: a1", lambda q: [*q[:2], q[2][:, :9], *q[3:]]),
    "columns of experts": ("quant_scales: a2", lambda q: [*q[:3], q[3].repeat(1, 1, E), *q[4:]]),
    "another count of experts": ("quant_scales: d1", lambda q: [*q[:6], torch.ones(3), q[7]]),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_scales(name):
    argument, change = BAD[name]
    (x, given, scales), *_ = int4_layer("cpu")
    with pytest.raises(ValueError, match=f"^{argument}.*: got .*allowed: "):
        call(x, *chosen("cpu"), given, change(scales))


def test_rows_in_fp8_are_refused():
    (x, given, scales), *_ = int4_layer("cpu")
    with pytest.raises(ValueError, match="^input: got .*allowed: "):
        call(x.to(torch.float8_e4m3fn), *chosen("cpu"), given, scales)
    with pytest.raises(NotImplementedError, match="^min_latency_mode: got True"):
        call(x, *chosen("cpu"), given, scales, min_latency_mode=True)


@pytest.mark.parametrize("encoding, layout", [("int4", "strips"), ("mxfp4", "strips")])
@pytest.mark.parametrize("tile", [16, 64, 128])
def test_choice(encoding, layout, tile):
    """A step of K is no less than the elements of a scale factor."""
    problem = room.Problem(
        "fp8", encoding, "bf16", tile, act="swiglu", weight_layout=layout, scale="tensor",
        fragments=encoding == "mxfp4", weighted="row" if encoding == "mxfp4" else "",
    )  # fmt: skip
    for arch in ("80", "90a", "100a", "120a"):
        choice = room.product.select(problem, named(arch))
        assert choice.variant.name == "portable"
        assert choice.config.tile_k % room.WIDTH[encoding] == 0
