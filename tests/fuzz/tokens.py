"""Random calls of the operations of one token: norms, activations, rotations, concatenation, mixed streams."""

import torch
from torch.nn import functional as F

import flashinfer
from flashinfer import mhc
from flashinfer.concat_ops import concat_mla_k
from flashinfer.rope import rope_quantize_fp8
from flashinfer.testing.compare import assert_bitwise, assert_close
from flashinfer.testing.fuzz import HEAD_DIMS, HIDDEN, Call, close
from tests.ops.rope.test_rope import llama31_radians, radians, rotated, same_dtype


def rows(draw):
    return draw.pick(0, 1, 2, 3, 5, 17)


def matrix(draw):
    """x [rows, hidden], sometimes NaN or infinity in one row, and its type."""
    n, dtype = rows(draw), draw.float()
    x = draw.tensor(n, draw.fitting(HIDDEN, max(n, 1)), dtype=dtype)
    if n and draw.chance(0.1):
        draw.spoil(x[draw.integer(0, n - 1)])
    return x, dtype


def rms(x, w, eps, t, offset=0.0):
    y = x.to(t)
    return y * torch.rsqrt((y * y).mean(-1, keepdim=True) + eps) * (w.to(t) + offset)


def rmsnorm(draw):
    x, dtype = matrix(draw)
    w, eps = draw.values(x.shape[1], dtype=dtype), draw.pick(1e-6, 1e-5, 0.1, 0.0)
    gemma = draw.chance(0.3)
    out = torch.empty_like(x) if draw.chance(0.3) else None
    function = flashinfer.gemma_rmsnorm if gemma else flashinfer.rmsnorm
    return Call(
        function,
        dict(input=x, weight=w, eps=eps, out=out),
        lambda result: close(result, lambda t: rms(x, w, eps, t, float(gemma))),
    )


def fused_add_rmsnorm(draw):
    x, dtype = matrix(draw)
    residual, w, eps = draw.tensor(*x.shape, dtype=dtype), draw.values(x.shape[1], dtype=dtype), draw.pick(1e-6, 1e-5)
    gemma = draw.chance(0.3)
    total, rounded = x.double() + residual.double(), (x + residual).clone()
    function = flashinfer.gemma_fused_add_rmsnorm if gemma else flashinfer.fused_add_rmsnorm

    def check(result):
        assert result is None
        assert_close(residual, rounded, total, "residual")
        same = rms(rounded, w, eps, torch.float32, float(gemma)).to(dtype)
        assert_close(x, same, rms(total, w, eps, torch.float64, float(gemma)), "input")

    return Call(function, dict(input=x, residual=residual, weight=w, eps=eps), check)


def layernorm(draw):
    x = draw.tensor(rows(draw), draw.fitting(HIDDEN, 17), dtype=torch.bfloat16, kinds=("normal", "wide"))
    w, b = (draw.values(x.shape[1], dtype=torch.float32, kinds=("normal",)) for _ in range(2))
    eps = draw.pick(1e-6, 1e-5)

    def formula(t):
        y = x.to(t)
        centred = y - y.mean(-1, keepdim=True)
        return centred * torch.rsqrt((centred * centred).mean(-1, keepdim=True) + eps) * w.to(t) + b.to(t)

    return Call(flashinfer.layernorm, dict(input=x, gemma=w, beta=b, eps=eps), lambda out: close(out, formula))


def activation(draw):
    x, _ = matrix(draw)
    half = draw.fitting((8, 16, 64, 1000, 1408, 2816), 2 * max(len(x), 1))
    x = draw.tensor(len(x), 2 * half, dtype=draw.float())
    function, act = draw.pick(
        (flashinfer.silu_and_mul, F.silu),
        (flashinfer.gelu_and_mul, F.gelu),
        (flashinfer.gelu_tanh_and_mul, lambda y: F.gelu(y, approximate="tanh")),
    )

    def formula(t):
        gate, up = x.to(t).chunk(2, -1)
        return act(gate) * up

    return Call(function, dict(input=x), lambda out: close(out, formula))


def rope(draw):
    dtype, tokens, dim = draw.float(), draw.pick(0, 1, 3, 9), draw.fitting(HEAD_DIMS, 90)
    q_heads, k_heads = draw.pick((1, 1), (5, 1), (7, 7), (4, 2))
    q, k = (draw.tensor(tokens, heads, dim, dtype=dtype) for heads in (q_heads, k_heads))
    rotary_dim, interleave = draw.pick(None, dim, dim // 2), draw.chance()
    arguments = dict(q=q, k=k, rotary_dim=rotary_dim, interleave=interleave)
    if llama31 := draw.chance(0.3):
        name, table = "apply_llama31_rope", llama31_radians(rotary_dim or dim)
    else:
        scale, theta = draw.pick((1.0, 1e4), (4.0, 1e4), (1.0, 5e5), (0.5, 1e6))
        name, table = "apply_rope", radians(rotary_dim or dim, scale, theta)
        arguments |= dict(rope_scale=scale, rope_theta=theta)
    if draw.chance():
        name, positions = name + "_pos_ids", torch.randint(0, 4097, (tokens,), device=draw.device)
        arguments["pos_ids"] = positions.to(draw.index())
    else:
        first, start = draw.integer(0, tokens), [draw.pick(0, 1, 1000) for _ in range(2)]
        arguments |= dict(indptr=draw.ints([0, first, tokens], torch.int32), offsets=draw.ints(start, torch.int32))
        places = [*range(start[0], start[0] + first), *range(start[1], start[1] + tokens - first)]
        positions = torch.tensor(places, device=draw.device)
    angle = positions.double()[:, None] * table.to(draw.device)
    given = q.clone(), k.clone()

    def check(result):
        for out, x, what in zip(result, given, "qk"):
            wide = same_dtype(x, angle, rotary_dim or dim, interleave)
            assert_close(out, wide, rotated(x, angle, rotary_dim or dim, interleave), what)

    assert llama31 == name.startswith("apply_llama31")
    return Call(getattr(flashinfer, name), arguments, check)


def table_of(draw, rotary_dim, length):
    """Cosines, then sines of each position, float32, and the angles."""
    angle = torch.rand(length, rotary_dim // 2, dtype=torch.float64, device=draw.device) * 6.3
    return torch.cat((angle.cos(), angle.sin()), 1).float(), angle


def turned(x, table, positions, interleave):
    """x with its pairs turned by the table's own cosines and sines, in the dtype of x."""
    half = table.shape[1] // 2
    cos, sin = (part.to(x.dtype)[positions.long()][:, None] for part in table.split(half, 1))
    rotary, rest = x[..., : 2 * half], x[..., 2 * half :]
    first, second = (rotary[..., 0::2], rotary[..., 1::2]) if interleave else rotary.chunk(2, -1)
    pair = first * cos - second * sin, second * cos + first * sin
    return torch.cat((torch.stack(pair, -1).flatten(-2) if interleave else torch.cat(pair, -1), rest), -1)


def rope_by_table(draw):
    """With tables of part of a head, heads side by side or not, in place and not."""
    dtype, tokens, dim = draw.float(), draw.pick(0, 1, 3, 9), draw.fitting((16, 64, 80, 128), 90)
    rotary_dim, interleave = draw.pick(dim, dim // 2), draw.chance()
    q_heads, k_heads = draw.pick((1, 1), (5, 1), (4, 2))
    table, _ = table_of(draw, rotary_dim, draw.pick(1, 40))
    positions = torch.randint(0, len(table), (tokens,), device=draw.device).to(draw.index())
    q, k = (draw.tensor(tokens, heads, dim, dtype=dtype, kinds=("normal",)) for heads in (q_heads, k_heads))
    if draw.chance():
        q, k = q.reshape(tokens, q_heads * dim), k.reshape(tokens, k_heads * dim)
    given = [x.clone().view(tokens, heads, dim) for x, heads in ((q, q_heads), (k, k_heads))]
    in_place = draw.chance()
    arguments = dict(positions=positions, query=q, key=k, head_size=dim, cos_sin_cache=table, is_neox=not interleave)

    def check(result):
        assert (result is None) == in_place
        for out, x, kept in zip((q, k) if in_place else result, given, (q, k)):
            assert out.shape == kept.shape
            wide, same = (turned(x.to(t), table, positions, interleave) for t in (torch.float64, torch.float32))
            assert_close(out.reshape(x.shape), same.to(dtype), wide)

    name = "apply_rope_with_cos_sin_cache" + "_inplace" * in_place
    return Call(getattr(flashinfer, name), arguments, check)


def rope_to_fp8(draw):
    """Heads in two parts, the rotated one and the other, in FP8."""
    dtype, tokens = draw.half(), draw.pick(0, 1, 3, 9)
    rotary, rest = draw.pick((64, 0), (64, 512), (32, 48), (16, 16))
    q_heads, k_heads = draw.pick((1, 1), (5, 1), (4, 2))
    table, _ = table_of(draw, rotary, 40)
    interleave, narrow = draw.chance(), draw.pick(torch.float8_e4m3fn, torch.float8_e5m2)
    positions = torch.randint(0, 40, (tokens,), device=draw.device).to(draw.index())
    parts = [
        draw.tensor(tokens, heads, n, dtype=dtype, kinds=("normal",)) if n else None
        for n in (rotary, rest) for heads in (q_heads, k_heads)
    ]  # fmt: skip
    if k_heads == 1 and draw.chance():
        parts[1], parts[3] = (None if x is None else x[:, 0] for x in (parts[1], parts[3]))
    scales = draw.pick(1.0, 0.25, 3.0), draw.pick(1.0, 0.5)
    names = "q_rope", "k_rope", "q_nope", "k_nope"
    outs = [None if x is None else torch.empty(x.shape, dtype=narrow, device=draw.device) for x in parts]
    arguments = dict(zip(names, parts)) | dict(cos_sin_cache=table, pos_ids=positions, is_neox=not interleave)
    arguments |= dict(quantize_dtype=narrow, quant_scale_q=scales[0], quant_scale_kv=scales[1])
    if draw.chance():
        arguments |= {f"{name}_out": out for name, out in zip(names, outs)}

    def check(result):
        for place, (out, x) in enumerate(zip(result, parts)):
            if x is None:
                continue
            assert out.shape == x.shape and out.dtype == narrow
            wide = x.double() if x.dim() == 3 else x.double()[:, None]
            wide = turned(wide, table, positions, interleave) if place < 2 else wide
            wide = wide.view(x.shape) * scales[place % 2]
            info = torch.finfo(narrow)
            bound = wide.abs() * (info.eps / 2 + 1e-5) + info.smallest_normal * info.eps / 2 + 1e-5
            assert bool(((out.double() - wide).abs() <= bound).all()), f"{names[place]}: codes that are not the nearest"

    return Call(rope_quantize_fp8, arguments, check)


def concat(draw):
    tokens, heads = draw.pick(0, 1, 3, 9), draw.pick(1, 3, 16)
    nope, shared = draw.pick((128, 64), (32, 16), (16, 8))
    dtype = draw.float()
    k_nope, k_rope = draw.tensor(tokens, heads, nope, dtype=dtype), draw.tensor(tokens, 1, shared, dtype=dtype)
    k = torch.empty(tokens, heads, nope + shared, dtype=dtype, device=draw.device)
    expected = torch.cat((k_nope, k_rope.expand(-1, heads, -1)), -1)
    arguments = dict(k=k, k_nope=k_nope, k_rope=k_rope)
    return Call(concat_mla_k, arguments, lambda result: assert_bitwise(k, expected))


def mix_streams(draw):
    tokens, hidden = draw.pick(0, 1, 3), draw.fitting((40, 64, 1100, 7168), 12)
    x, residual = (draw.tensor(tokens, *n, dtype=torch.bfloat16, kinds=("normal",)) for n in ((hidden,), (4, hidden)))
    post, comb = (draw.values(tokens, 4, n, dtype=torch.float32, kinds=("normal",)) for n in (1, 4))

    def formula(t):
        wide, streams, p, c = (each.to(t) for each in (x, residual, post, comb))
        return wide[:, None] * p + sum(streams[:, i, None] * c[:, i, :, None] for i in range(4))

    arguments = dict(x=x, residual=residual, post_layer_mix=post, comb_res_mix=comb)
    return Call(mhc.mhc_post, arguments, lambda out: close(out, formula))


FAMILIES = (rmsnorm, fused_add_rmsnorm, layernorm, activation, rope, rope_by_table, rope_to_fp8, concat, mix_streams)
