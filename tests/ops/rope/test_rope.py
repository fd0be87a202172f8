"""RoPE against complex multiplication in float64."""

import math

import pytest
import torch

import flashinfer
from flashinfer._core.target import named
from flashinfer.ops.rope import Problem
from flashinfer.ops.rope.config import portable as portable_config
from flashinfer.testing import generate
from flashinfer.testing.compare import assert_bitwise, assert_close
from tests.ops.norm.variants import in_turn, variant  # variant is a fixture

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
# tokens, query heads, key heads, head_dim, rotary_dim
SHAPES = [
    (1, 1, 1, 64, 64),
    (7, 4, 1, 128, 128),
    (70, 2, 2, 16, 16),
    (5, 9, 3, 72, 72),
    (3, 17, 1, 80, 32),
    (3, 1, 2, 256, 256),
    (2, 1, 1, 512, 512),
    (4, 2, 1, 112, 110),
    (4, 1, 1, 7, 6),
    (3, 2, 1, 64, 2),
    (6, 0, 1, 32, 32),
    (0, 2, 1, 64, 64),
]
LARGE = [(4096, 32, 8, 128, 128), (1023, 28, 4, 96, 96), (33, 128, 1, 192, 64), (2049, 5, 5, 80, 80)]
shapes = pytest.mark.parametrize(("shape", "dtype"), in_turn(SHAPES, DTYPES, LARGE), ids=str)
dtypes = pytest.mark.parametrize("dtype", DTYPES, ids=str)
interleaves = pytest.mark.parametrize("interleave", [False, True], ids=["halves", "pairs"])
inplaces = pytest.mark.parametrize("inplace", [False, True], ids=["new", "inplace"])


def heads(shape, dtype, device):
    tokens, q_heads, k_heads, head_dim, _ = shape
    q = generate.randn(tokens, q_heads, head_dim, dtype=dtype, device=device)
    return q, generate.randn(tokens, k_heads, head_dim, dtype=dtype, device=device)


def radians(rotary_dim, scale=1.0, theta=1e4):
    return torch.tensor([theta ** (-2 * j / rotary_dim) / scale for j in range(rotary_dim // 2)], dtype=torch.float64)


def llama31_radians(rotary_dim, scale=8.0, theta=5e5, low=1.0, high=4.0, context=8192):
    """By wavelength: short waves are kept, long ones stretched, those between interpolated."""
    result = []
    for j in range(rotary_dim // 2):
        frequency = theta ** (-2 * j / rotary_dim)
        wavelength = 2 * math.pi / frequency
        if wavelength > context / low:
            frequency /= scale
        elif wavelength > context / high:
            smooth = (context / wavelength - low) / (high - low)
            frequency = (1 - smooth) * frequency / scale + smooth * frequency
        result.append(frequency)
    return torch.tensor(result, dtype=torch.float64)


def rotated(x, angle, rotary_dim, interleave):
    """x in float64 with its pairs turned by angle [tokens, pairs]."""
    y = x.double().clone()
    part = y[..., :rotary_dim]
    first, second = (part[..., 0::2], part[..., 1::2]) if interleave else part.chunk(2, -1)
    z = torch.complex(first, second) * torch.polar(torch.ones_like(angle), angle)[:, None]
    first.copy_(z.real)
    second.copy_(z.imag)
    return y


def same_dtype(x, angle, rotary_dim, interleave):
    """The rotation as models write it, cosines and sines of float32 angles, all products in the dtype of x."""
    y = x.clone()
    cos, sin = (f(angle.float()).to(x.dtype)[:, None] for f in (torch.cos, torch.sin))
    part = x[..., :rotary_dim]
    first, second = (part[..., 0::2], part[..., 1::2]) if interleave else part.chunk(2, -1)
    part = y[..., :rotary_dim]
    a, b = (part[..., 0::2], part[..., 1::2]) if interleave else part.chunk(2, -1)
    a.copy_(first * cos - second * sin)
    b.copy_(second * cos + first * sin)
    return y


def check(results, given, angle, rotary_dim, interleave):
    angle = angle.to(given[0].device)
    for name, out, x in zip("qk", results, given):
        assert_close(out, same_dtype(x, angle, rotary_dim, interleave), rotated(x, angle, rotary_dim, interleave), name)
        assert_bitwise(out[..., rotary_dim:], x[..., rotary_dim:], f"{name}, what is not rotated")


def run(name, q, k, *args, inplace=False, **kwargs):
    """The named function's result and the inputs as they were."""
    given = q.clone(), k.clone()
    if not inplace:
        out = getattr(flashinfer, name)(q, k, *args, **kwargs)
        assert_bitwise(q, given[0])
        assert_bitwise(k, given[1])
        return out, given
    assert getattr(flashinfer, name + "_inplace")(q, k, *args, **kwargs) is None
    return (q, k), given


@shapes
@interleaves
@inplaces
def test_pos_ids(variant, device, shape, dtype, interleave, inplace):
    q, k = heads(shape, dtype, device)
    rotary_dim = shape[-1]
    pos = torch.randint(0, 9000, (shape[0],), dtype=torch.int32, device=device)
    out, given = run("apply_rope_pos_ids", q, k, pos, rotary_dim, interleave, inplace=inplace)
    check(out, given, pos.cpu()[:, None] * radians(rotary_dim), rotary_dim, interleave)


@pytest.mark.parametrize("head_dim", [64, 72, 80, 96, 112, 128, 192, 256, 512])
@interleaves
def test_head_dims(variant, device, head_dim, interleave):
    """All of a head is rotated if rotary_dim is not given."""
    q, k = heads((3, 2, 1, head_dim, head_dim), torch.float16, device)
    pos = torch.tensor([5, 0, 77], device=device)
    out, given = run("apply_rope_pos_ids", q, k, pos, interleave=interleave)
    check(out, given, pos.cpu()[:, None] * radians(head_dim), head_dim, interleave)


@pytest.mark.parametrize("lengths", [(3,), (2, 0, 5, 1), (0, 0, 4, 0), (1,) * 9, (0,), ()], ids=str)
@inplaces
@interleaves
def test_ragged(variant, device, lengths, inplace, interleave):
    offsets = [7 * i * i for i in range(len(lengths))]
    pos = torch.tensor([start + j for start, n in zip(offsets, lengths) for j in range(n)], dtype=torch.int64)
    q, k = heads((sum(lengths), 2, 1, 32, 32), torch.float16, device)
    indptr = generate.indptr(lengths, device)
    offsets = torch.tensor(offsets, dtype=torch.int32, device=device)
    out, given = run("apply_rope", q, k, indptr, offsets, interleave=interleave, inplace=inplace)
    check(out, given, pos[:, None] * radians(32), 32, interleave)
    q, k = given
    out, given = run("apply_llama31_rope", q, k, indptr.long(), offsets.long(), inplace=inplace, interleave=interleave)
    check(out, given, pos[:, None] * llama31_radians(32), 32, interleave)


@pytest.mark.parametrize("rotary_dim", [32, 20])
@pytest.mark.parametrize(("scale", "theta"), [(1, 1e4), (4.0, 1e4), (0.5, 1e6), (2.5, 123456.7)])
def test_scale_and_theta(variant, device, rotary_dim, scale, theta):
    q, k = heads((4, 2, 1, 32, rotary_dim), torch.float32, device)
    pos = torch.tensor([0, 3, 1000, 4095], device=device)
    angle = pos.cpu()[:, None] * radians(rotary_dim, scale, theta)
    out, given = run("apply_rope_pos_ids", q, k, pos, rotary_dim, False, scale, theta)
    check(out, given, angle, rotary_dim, False)
    indptr, offsets = generate.indptr([1, 1, 1, 1], device), pos.int()
    out, given = run("apply_rope", q, k, indptr, offsets, rotary_dim, True, rope_scale=scale, rope_theta=theta)
    check(out, given, angle, rotary_dim, True)


@pytest.mark.parametrize(
    "changed", [{}, dict(scale=32.0), dict(theta=1e4), dict(low=2.0), dict(high=9.5), dict(context=100)], ids=str
)
@inplaces
def test_llama31(variant, device, changed, inplace):
    given = dict(scale=8.0, theta=5e5, low=1.0, high=4.0, context=8192) | changed
    q, k = heads((4, 2, 1, 64, 64), torch.float32, device)
    pos = torch.tensor([1, 9, 500, 20000], dtype=torch.int32, device=device)
    angle = pos.cpu()[:, None] * llama31_radians(64, **given)
    options = dict(rope_scale=given["scale"], rope_theta=given["theta"], low_freq_factor=given["low"])
    options |= dict(high_freq_factor=given["high"], old_context_len=given["context"])
    out, before = run("apply_llama31_rope_pos_ids", q, k, pos, inplace=inplace, **options)
    check(out, before, angle, 64, False)
    q, k = before
    tables = generate.indptr([1, 1, 1, 1], device), pos
    out, before = run("apply_llama31_rope", q, k, *tables, interleave=True, inplace=inplace, **options)
    check(out, before, angle, 64, True)


@dtypes
def test_far_positions(variant, device, dtype):
    """At ten million, float32 knows an angle to half a radian; the result is as good as at ten all the same."""
    q, k = heads((6, 2, 1, 128, 128), dtype, device)
    pos = torch.tensor([10**7, 10**7 + 1, 131071, 2**31 - 1, -5, -(10**6)], dtype=torch.int32, device=device)
    out, given = run("apply_rope_pos_ids", q, k, pos)
    angle = pos.cpu().double()[:, None] * radians(128)
    near = torch.remainder(angle, 2 * math.pi)
    check(out, given, near, 128, False)


def test_cosines_and_sines_are_within_a_rounding_of_float32(variant, device):
    """Rotating (1, 0) shows them; 5000 radians apart by one meet every part of the circle."""
    q = torch.tensor([1.0, 0.0], device=device).expand(5000, 1, 2)
    pos = torch.arange(5000, device=device)
    angle = pos.double()
    out, _ = flashinfer.apply_rope_pos_ids(q, q, pos)
    assert (out[:, 0].double() - torch.stack([angle.cos(), angle.sin()], 1)).abs().max() <= 2**-23


@shapes
@interleaves
@inplaces
def test_cos_sin_cache(variant, device, shape, dtype, interleave, inplace):
    tokens, q_heads, k_heads, head_dim, rotary_dim = shape
    q, k = heads(shape, dtype, device)
    cache = torch.randn(50, rotary_dim, device=device)
    pos = torch.randint(0, 50, (tokens,), device=device, dtype=torch.int64 if inplace else torch.int32)
    flat = q.reshape(tokens, q_heads * head_dim), k.reshape(tokens, k_heads * head_dim)
    before = [x.clone() for x in flat]
    if inplace:
        flashinfer.apply_rope_with_cos_sin_cache_inplace(pos, *flat, head_dim, cache, not interleave)
        out = flat
    else:
        out = flashinfer.apply_rope_with_cos_sin_cache(pos, *flat, head_dim, cache, is_neox=not interleave)
    for name, y, x in zip(("query", "key"), out, before):
        x = x.view(tokens, x.shape[1] // head_dim, head_dim)
        c, s = cache[pos].chunk(2, -1)
        truth, same = x.double().clone(), x.clone()
        for t, c, s in ((truth, c.double(), s.double()), (same, c.to(dtype), s.to(dtype))):
            part = t[..., :rotary_dim]
            a, b = (part[..., 0::2], part[..., 1::2]) if interleave else part.chunk(2, -1)
            turned = a * c[:, None] - b * s[:, None], b * c[:, None] + a * s[:, None]
            a.copy_(turned[0])
            b.copy_(turned[1])
        assert_close(y, same.flatten(1), truth.flatten(1), name)


def test_cos_sin_cache_takes_heads_and_strides(variant, device):
    """Three dimensions, slices of a fused projection, and a cache with gaps between and within its rows."""
    qkv = generate.randn(5, 4 + 1 + 1, 32, dtype=torch.float16, device=device)
    pos = torch.tensor([3, 0, 2, 2, 1], device=device)
    angle = pos.cpu()[:, None] * radians(32)
    cache = (
        torch.cat([f(torch.arange(4)[:, None] * radians(32)) for f in (torch.cos, torch.sin)], -1).float().to(device)
    )
    for layout in (cache, generate.strided(cache, 0, gap=3), generate.strided(cache, 1, gap=1)):
        x = qkv.clone()
        flashinfer.apply_rope_with_cos_sin_cache_inplace(pos, x[:, :4], x[:, 4:5], 32, layout)
        check((x[:, :4], x[:, 4:5]), (qkv[:, :4], qkv[:, 4:5]), angle, 32, False)
        assert_bitwise(x[:, 5], qkv[:, 5])


@pytest.mark.parametrize("axis", [0, 1, 2])
@inplaces
def test_strides(variant, device, axis, inplace):
    q, k = (generate.strided(x, axis) for x in heads((5, 3, 2, 64, 64), torch.bfloat16, device))
    gaps = int(q._base.isnan().sum()), int(k._base.isnan().sum())
    pos = torch.arange(5, device=device) * 31
    out, given = run("apply_rope_pos_ids", q, k, pos, 48, inplace=inplace)
    check(out, given, pos.cpu()[:, None] * radians(48), 48, False)
    assert (int(q._base.isnan().sum()), int(k._base.isnan().sum())) == gaps


def test_slices_of_a_fused_projection(variant, device):
    qkv = generate.randn(9, 6, 24, dtype=torch.bfloat16, device=device)
    x = qkv.clone()
    pos = torch.arange(9, device=device)
    flashinfer.apply_rope_pos_ids_inplace(x[:, :4], x[:, 4:5], pos, interleave=True)
    check((x[:, :4], x[:, 4:5]), (qkv[:, :4], qkv[:, 4:5]), pos.cpu()[:, None] * radians(24), 24, True)
    assert_bitwise(x[:, 5], qkv[:, 5])


def f(*shape, dtype=torch.float32, device="cpu"):
    return torch.ones(*shape, dtype=dtype, device=device)


BAD_HEADS = {
    "q of two dimensions": (dict(q=f(3, 8)), "q"),
    "q of integers": (dict(q=f(3, 2, 8, dtype=torch.int32)), "q"),
    "q of float64": (dict(q=f(3, 2, 8, dtype=torch.float64)), "q"),
    "k of other tokens": (dict(k=f(2, 1, 8)), "k"),
    "k of another dim": (dict(k=f(3, 1, 6)), "k"),
    "k of another dtype": (dict(k=f(3, 1, 8, dtype=torch.float16)), "k"),
    "k elsewhere": (dict(k=f(3, 1, 8, device="meta")), "k"),
    "odd rotary_dim": (dict(rotary_dim=3), "rotary_dim"),
    "rotary_dim of 0": (dict(rotary_dim=0), "rotary_dim"),
    "rotary_dim past the head": (dict(rotary_dim=10), "rotary_dim"),
    "rope_scale of 0": (dict(rope_scale=0), "rope_scale"),
    "rope_theta below 0": (dict(rope_theta=-1.0), "rope_theta"),
}
BAD_POSITIONS = {
    "too few": (dict(pos_ids=torch.zeros(2, dtype=torch.int32)), "pos_ids"),
    "floats": (dict(pos_ids=torch.zeros(3)), "pos_ids"),
    "elsewhere": (dict(pos_ids=torch.zeros(3, dtype=torch.int32, device="meta")), "pos_ids"),
}
BAD_RAGGED = {
    "offsets of two dimensions": (dict(offsets=torch.zeros(2, 1, dtype=torch.int32)), "offsets"),
    "offsets of floats": (dict(offsets=torch.zeros(2)), "offsets"),
    "indptr too short": (dict(indptr=torch.tensor([0, 3])), "indptr"),
    "indptr of floats": (dict(indptr=torch.tensor([0.0, 1.0, 3.0])), "indptr"),
    "indptr that decreases": (dict(indptr=torch.tensor([0, 4, 3])), "indptr"),
    "indptr from 1": (dict(indptr=torch.tensor([1, 2, 3])), "indptr"),
    "indptr that ends early": (dict(indptr=torch.tensor([0, 1, 2])), "indptr"),
    "no request": (dict(indptr=torch.tensor([0]), offsets=torch.zeros(0, dtype=torch.int32)), "offsets"),
}
BAD_LLAMA31 = {
    "factors the wrong way round": (dict(low_freq_factor=4, high_freq_factor=4), "high_freq_factor"),
    "no context": (dict(old_context_len=0), "old_context_len"),
}
CASES = [(ragged, name) for ragged in (False, True) for name in BAD_HEADS | BAD_LLAMA31]
CASES += [(False, name) for name in BAD_POSITIONS] + [(True, name) for name in BAD_RAGGED]


@pytest.mark.parametrize(("ragged", "name"), CASES)
def test_bad_input(ragged, name):
    changed, argument = (BAD_HEADS | BAD_POSITIONS | BAD_RAGGED | BAD_LLAMA31)[name]
    good = dict(q=f(3, 2, 8), k=f(3, 1, 8))
    good |= dict(indptr=torch.tensor([0, 1, 3]), offsets=torch.tensor([5, 0])) if ragged else {}
    good |= {} if ragged else dict(pos_ids=torch.tensor([1, 2, 3]))
    functions = ["apply_llama31_rope"] if name in BAD_LLAMA31 else ["apply_llama31_rope", "apply_rope"]
    for function in functions:
        for suffix in ("", "_inplace"):
            call = getattr(flashinfer, function + ("" if ragged else "_pos_ids") + suffix)
            call(**good)
            with pytest.raises(ValueError, match=f"^{argument}: got .*allowed: "):
                call(**(good | changed))


@pytest.mark.parametrize(
    ("changed", "argument"),
    [
        (dict(query=f(3, 2, 2, 8)), "query"),
        (dict(query=f(3, 15)), "query"),
        (dict(query=f(3, 2, 4)), "query"),
        (dict(query=f(3, 16, dtype=torch.int32)), "query"),
        (dict(key=f(2, 8)), "key"),
        (dict(key=f(3, 8, dtype=torch.float16)), "key"),
        (dict(head_size=0), "head_size"),
        (dict(head_size=3), "query"),
        (dict(cos_sin_cache=f(8)), "cos_sin_cache"),
        (dict(cos_sin_cache=f(4, 8, dtype=torch.bfloat16)), "cos_sin_cache"),
        (dict(cos_sin_cache=f(4, 10)), "cos_sin_cache"),
        (dict(cos_sin_cache=f(4, 7)), "cos_sin_cache"),
        (dict(cos_sin_cache=f(4, 8, device="meta")), "cos_sin_cache"),
        (dict(positions=torch.tensor([0, 1])), "positions"),
        (dict(positions=torch.tensor([0.0, 1.0, 2.0])), "positions"),
        (dict(positions=torch.tensor([0, 1, 4])), "positions"),
        (dict(positions=torch.tensor([0, -1, 2])), "positions"),
    ],
)
def test_bad_input_of_cos_sin_cache(changed, argument):
    good = dict(positions=torch.tensor([0, 3, 2]), query=f(3, 16), key=f(3, 8), head_size=8, cos_sin_cache=f(4, 8))
    for name in ("apply_rope_with_cos_sin_cache", "apply_rope_with_cos_sin_cache_inplace"):
        getattr(flashinfer, name)(**good)
        with pytest.raises(ValueError, match=f"^{argument}: got .*allowed: "):
            getattr(flashinfer, name)(**(good | changed))


def test_are_registered_ops():
    """torch.compile sees one op that writes what it says it writes."""
    from flashinfer.rope import rotate as rope

    q, k = heads((3, 2, 1, 8, 8), torch.float32, "cpu")
    new = torch.empty_like(q), torch.empty_like(k)
    ragged = torch.tensor([0, 1, 3]), torch.tensor([5, 0])
    cache = torch.randn(9, 8)
    torch.library.opcheck(rope._rope.op, (q, k, *new, *ragged, 8, False, [1.0, 1e4]))
    torch.library.opcheck(rope._rope_inplace.op, (q, k, torch.arange(3), None, 6, True, [8.0, 1e4, 1.0, 4.0, 8192.0]))
    torch.library.opcheck(rope._rope_cached.op, (q, k, *new, torch.arange(3), 8, cache, True))
    torch.library.opcheck(rope._rope_cached_inplace.op, (q, k, torch.arange(3), 8, cache, False))


@pytest.mark.gpu
def test_positions_outside_the_cache_become_nan_and_are_refused_in_debug_mode(device, monkeypatch):
    q, k = heads((4, 2, 1, 64, 64), torch.bfloat16, device)
    cache = torch.randn(10, 64, device=device)
    given = torch.tensor([9, 10, -1, 0], device=device), q, k, 64, cache
    for out in flashinfer.apply_rope_with_cos_sin_cache(*given):
        assert out[[1, 2]].isnan().all()
        assert out[[0, 3]].isfinite().all()
    monkeypatch.setenv("FLASHINFER_DEBUG", "1")
    with pytest.raises(ValueError, match="^positions: got .*allowed: "):
        flashinfer.apply_rope_with_cos_sin_cache(*given)


@pytest.mark.gpu
def test_offsets_beyond_2_31(device):
    buffer = torch.empty(3, 1 << 30, dtype=torch.bfloat16, device=device)
    buffer[:, :512] = generate.randn(3, 512, dtype=torch.bfloat16, device=device)
    q, k = buffer[:, :384].unflatten(1, (3, 128)), buffer[:, 384:512].unflatten(1, (1, 128))
    pos = torch.tensor([1, 2, 3], device=device)
    given = q.clone(), k.clone()
    flashinfer.apply_rope_pos_ids_inplace(q, k, pos)
    check((q, k), given, pos.cpu()[:, None] * radians(128), 128, False)


@pytest.mark.gpu
def test_graph_and_stream(device):
    """A captured graph and a side stream give the bits of an eager call; each replay of the graph reads positions."""
    q, k = heads((64, 32, 8, 128, 128), torch.bfloat16, device)
    pos = torch.arange(64, dtype=torch.int32, device=device)
    eager = flashinfer.apply_rope_pos_ids(q, k, pos)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = flashinfer.apply_rope_pos_ids(q, k, pos)
    pos += 100
    later = flashinfer.apply_rope_pos_ids(q, k, pos)
    graph.replay()
    for out, expected in zip(captured, later):
        assert_bitwise(out, expected)
    pos -= 100
    stream = torch.cuda.Stream(device)
    stream.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(stream):
        aside = flashinfer.apply_rope_pos_ids(q, k, pos)
    stream.synchronize()
    for out, expected in zip(aside, eager):
        assert_bitwise(out, expected)


@pytest.mark.parametrize("longest", [1, 3])
def test_more_tiles_of_tokens_than_an_axis_of_the_grid_has_programs(variant, device, monkeypatch, longest):
    if variant != "reference":
        monkeypatch.setattr("flashinfer.ops.rope.portable._LONGEST_AXIS", longest)
    q, k = heads((37, 3, 1, 64, 64), torch.float32, device)
    pos = torch.randint(0, 9000, (37,), dtype=torch.int32, device=device)
    out, given = run("apply_rope_pos_ids", q, k, pos, 64, False)
    check(out, given, pos.cpu()[:, None] * radians(64), 64, False)


@pytest.mark.parametrize("inplace", [False, True])
def test_a_thread_holds_few_elements(inplace):
    """Of what rotates and of what is copied beside it: with hundreds, a kernel compiles for a minute."""
    for head_dim in (64, 128, 192, 512):
        for rotary_dim in (2, 8, 32, head_dim):
            problem = Problem("bf16", head_dim, rotary_dim, False, False, "i32", True, inplace)
            tile = portable_config(problem, named("90a"))
            rest = 0 if inplace else head_dim - rotary_dim
            threads = 32 * tile.num_warps
            assert tile.heads * tile.tokens * max(rotary_dim, rest) <= 128 * threads
