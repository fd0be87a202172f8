"""RoPE into FP8 and into pages.

With cosines and sines of whole quarter turns and scales that are powers of two nothing is rounded before the format
does it, and the codes are those of its specification, bit for bit. With other angles the result is as near to float64
as torch's rotation in the inputs' dtype comes.
"""

import pytest
import torch

from flashinfer import rope
from flashinfer.testing import generate
from flashinfer.testing.compare import assert_bitwise, assert_close
from tests.ops.norm.variants import variant  # the fixture
from tests.ops.quantize import truth

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
FORMATS = {E4M3: "e4m3", E5M2: "e5m2"}


def quarter_turns(positions, rope_dim, device):
    """[positions, rope_dim]: each pair of each position at a multiple of a quarter turn."""
    turn = torch.randint(0, 4, (positions, rope_dim // 2), device=device)
    cos = torch.tensor([1.0, 0.0, -1.0, 0.0], device=device)[turn]
    sin = torch.tensor([0.0, 1.0, 0.0, -1.0], device=device)[turn]
    return torch.cat((cos, sin), 1)


def rotate(x, cos_sin, neox):
    """x [tokens, heads, dim] by cos_sin [tokens, dim], in the dtype of x."""
    cos, sin = cos_sin.to(x.dtype)[:, None].chunk(2, -1)
    a, b = x.chunk(2, -1) if neox else (x[..., 0::2], x[..., 1::2])
    turned = a * cos - b * sin, b * cos + a * sin
    return torch.cat(turned, -1) if neox else torch.stack(turned, -1).flatten(-2)


def bits(x, dtype, scale):
    """Codes of float64 x * scale."""
    return truth.encode(FORMATS[dtype], x * scale)


def assert_codes(out, expected):
    """The sign of zero apart: that of a * 0 - b * 0 depends on the order of the operations."""
    out = out.view(torch.uint8)
    zero = (expected & 0x7F) == 0
    assert_bitwise(torch.where(zero, out & 0x7F, out), torch.where(zero, 0, expected).to(torch.uint8))


def inputs(tokens, q_heads, k_heads, rope_dim, rest, dtype, device, mla=False):
    """q_rope, k_rope, q_nope, k_nope, of a wide range."""

    def make(heads, width):
        x = generate.randn(tokens, heads, width, device=device)
        return (x * torch.exp2(torch.randint(-12, 9, x.shape, device=device).float())).to(dtype)

    q_rope, k_rope, q_nope, k_nope = (make(h, w) for w in (rope_dim, rest) for h in (q_heads, k_heads))
    return (q_rope, k_rope[:, 0], q_nope, k_nope[:, 0]) if mla else (q_rope, k_rope, q_nope, k_nope)


@pytest.mark.parametrize("neox", [True, False])
@pytest.mark.parametrize(
    ("shape", "mla", "dtype", "out"),
    [
        ((3, 4, 1, 64, 512), True, torch.bfloat16, E4M3),
        ((5, 3, 2, 32, 16), False, torch.float16, E5M2),
        ((7, 2, 1, 10, 3), False, torch.bfloat16, E4M3),
        ((2, 2, 2, 128, 0), False, torch.float32, E4M3),
        ((0, 2, 1, 64, 64), True, torch.bfloat16, E4M3),
        pytest.param((4097, 128, 1, 64, 512), True, torch.bfloat16, E4M3, marks=pytest.mark.gpu),
    ],
    ids=str,
)
def test_has_the_bits_of_the_format(variant, device, shape, mla, dtype, out, neox):
    tokens, _, _, rope_dim, _ = shape
    given = inputs(*shape, dtype, device, mla)
    cache = quarter_turns(50, rope_dim, device)
    pos = torch.randint(0, 50, (tokens,), device=device, dtype=torch.int32 if neox else torch.int64)
    results = rope.rope_quantize_fp8(*given, cache, pos, neox, out, 0.5, 4.0)
    for x, y, scale, turned in zip(given, results, (0.5, 4.0, 0.5, 4.0), (True, True, False, False)):
        assert y.dtype == out and y.shape == x.shape
        x = x.double() if x.dim() == 3 else x.double()[:, None]
        x = rotate(x, cache[pos], neox) if turned else x
        assert_codes(y, bits(x, out, scale).view(y.shape))


@pytest.mark.parametrize("neox", [True, False])
def test_other_angles(variant, device, neox):
    q, k, *_ = inputs(9, 3, 2, 64, 0, torch.bfloat16, device)
    cache = torch.randn(20, 64, device=device)
    pos = torch.randint(0, 20, (9,), device=device)
    outs = rope.rope_quantize_fp8(q, k, None, None, cache, pos, neox, quant_scale_q=0.3, quant_scale_kv=0.01)
    for x, y, scale in zip((q, k), outs, (0.3, 0.01)):
        expected = (rotate(x.double(), cache[pos].double(), neox) * scale).clamp(-448, 448)
        same = (rotate(x, cache[pos], neox) * scale).clamp(-448, 448).to(E4M3)
        assert_close(y.float(), same.float(), expected, through=2**-3)
    assert outs[2].shape == (9, 3, 0) and outs[3].shape == (9, 2, 0)


def test_mla_into_slices_of_one_tensor(variant, device):
    given = inputs(4, 2, 1, 32, 64, torch.float16, device, mla=True)
    cache, pos = quarter_turns(9, 32, device), torch.tensor([8, 0, 3, 3], device=device)
    q, k = (torch.zeros(*x.shape[:-1], 96, dtype=E5M2, device=device) for x in given[:2])
    outs = q[..., 64:], k[..., 64:], q[..., :64], k[..., :64]
    named = dict(zip(("q_rope_out", "k_rope_out", "q_nope_out", "k_nope_out"), outs))
    results = rope.mla_rope_quantize_fp8(*given, cache, pos, enable_pdl=True, **named)
    assert all(a is b for a, b in zip(results, outs))
    plain = rope.rope_quantize_fp8(*given, cache, pos, quantize_dtype=E5M2, backend="auto")
    for a, b in zip(results, plain):
        assert_bitwise(a.contiguous(), b)


def test_strides(variant, device):
    given = inputs(5, 3, 2, 32, 48, torch.bfloat16, device)
    cache, pos = quarter_turns(9, 32, device), torch.arange(5, device=device)
    plain = rope.rope_quantize_fp8(*given, cache, pos)
    for axis in (0, 1, 2):
        strided = [generate.strided(x, axis) for x in given]
        outs = [generate.strided(torch.zeros_like(x), axis, 16) for x in plain]
        gaps = [int(x._base.isnan().sum()) for x in outs]
        named = dict(zip(("q_rope_out", "k_rope_out", "q_nope_out", "k_nope_out"), outs))
        rope.rope_quantize_fp8(*strided, generate.strided(cache, axis % 2, 3), pos, **named)
        for a, b in zip(outs, plain):
            assert_bitwise(a.contiguous(), b)
        assert [int(x._base.isnan().sum()) for x in outs] == gaps


TABLE = dict(kv_indices=[4, 1, 0, 2], kv_indptr=[0, 2, 2, 4], batch_indices=[0, 2, -1, 2, 0], positions=[3, 0, 5, 6, 7])
SLOTS = [(4, 3), (0, 0), None, (2, 2), (1, 3)]  # with pages of 4


def tables(device):
    return {name: torch.tensor(values, dtype=torch.int32, device=device) for name, values in TABLE.items()}


def check_pages(cache, before, expected):
    """Only the slots of SLOTS changed, to `expected` [tokens, heads, dim]; cache is [pages, slots, heads, dim]."""
    for token, slot in enumerate(SLOTS):
        if slot is not None:
            assert_codes(cache[slot], expected[token])
            before[slot] = cache[slot]
    assert_bitwise(cache.contiguous(), before)


@pytest.mark.parametrize("layout", ["NHD", "HND"])
@pytest.mark.parametrize(("rope_dim", "rest", "value_dim"), [(32, 0, 32), (32, 16, 64), (6, 5, 7)])
def test_append(variant, device, layout, rope_dim, rest, value_dim):
    given = inputs(5, 4, 2, rope_dim, rest, torch.bfloat16, device)
    v = generate.randn(5, 2, value_dim, dtype=torch.bfloat16, device=device)
    cos_sin, pos = quarter_turns(9, rope_dim, device), torch.tensor([8, 0, 3, 3, 1], device=device)
    caches = [torch.ones(6, 4, 2, dim, device=device).to(E4M3) for dim in (rope_dim + rest, value_dim)]
    caches = [c.transpose(1, 2).contiguous() for c in caches] if layout == "HND" else caches
    views = [c.transpose(1, 2) if layout == "HND" else c for c in caches]
    before = [c.contiguous().clone() for c in views]
    q_rope, q_nope = rope.rope_quantize_fp8_append_paged_kv_cache(
        *given, v, cos_sin, pos, tuple(caches), **tables(device), quant_scale_q=0.25, quant_scale_kv=2.0,
        page_size=4, kv_layout=layout,
    )  # fmt: skip
    plain = rope.rope_quantize_fp8(*given, cos_sin, pos, quant_scale_q=0.25, quant_scale_kv=2.0)
    assert_bitwise(q_rope, plain[0])
    assert_bitwise(q_nope, plain[2])
    keys = torch.cat((rotate(given[1].double(), cos_sin[pos], True), given[3].double()), -1)
    check_pages(views[0], before[0], bits(keys, E4M3, 2.0))
    check_pages(views[1], before[1], bits(v.double(), E4M3, 2.0))


def test_append_mla(variant, device):
    given = inputs(5, 4, 1, 16, 64, torch.bfloat16, device, mla=True)
    cos_sin, pos = quarter_turns(9, 16, device), torch.tensor([8, 0, 3, 3, 1], device=device)
    ckv, kpe = (torch.ones(6, 4, dim, device=device).to(E5M2) for dim in (64, 16))
    before = [c.clone() for c in (ckv, kpe)]
    q_rope = torch.empty(5, 4, 16, dtype=E5M2, device=device)
    results = rope.rope_quantize_fp8_append_paged_kv_cache(
        *given, None, cos_sin, pos, (ckv, kpe), **tables(device), is_neox=False, page_size=4, q_rope_out=q_rope
    )
    assert results[0] is q_rope and results[1].dtype == E5M2
    check_pages(ckv, before[0], bits(given[3].double(), E5M2, 1.0))
    rotated = rotate(given[1].double()[:, None], cos_sin[pos], False)[:, 0]
    check_pages(kpe, before[1], bits(rotated, E5M2, 1.0))


def test_positions_outside_the_page_table_are_refused_on_the_cpu():
    given = inputs(5, 4, 2, 16, 0, torch.float32, "cpu")
    caches = tuple(torch.zeros(6, 4, 2, 16, dtype=E4M3) for _ in range(2))
    for changed, argument in (
        (dict(positions=[3, 0, 5, 8, 7]), "positions"),
        (dict(batch_indices=[0, 1, -1, 2, 0]), "positions"),
        (dict(batch_indices=[0, 3, -1, 2, 0]), "batch_indices"),
        (dict(kv_indices=[4, 1, 0, 6]), "kv_indices"),
    ):
        table = tables("cpu") | {name: torch.tensor(values) for name, values in changed.items()}
        with pytest.raises(ValueError, match=f"^{argument}: got .*allowed: "):
            rope.rope_quantize_fp8_append_paged_kv_cache(
                *given, torch.zeros(5, 2, 16), torch.zeros(9, 16), torch.arange(5), caches, **table, page_size=4
            )


def f(*shape, dtype=torch.float32, device="cpu"):
    return torch.ones(*shape, dtype=dtype, device=device)


@pytest.mark.parametrize(
    ("changed", "argument"),
    [
        (dict(q_rope=f(3, 8)), "q_rope"),
        (dict(q_rope=f(3, 2, 8, dtype=torch.float64)), "q_rope"),
        (dict(q_rope=f(3)[0]), "q_rope"),
        (dict(k_rope=f(3)), "k_rope"),
        (dict(k_rope=f(2, 1, 8)), "k_rope"),
        (dict(k_rope=f(3, 1, 8, dtype=torch.float16)), "k_rope"),
        (dict(q_nope=f(3, 1, 4)), "q_nope"),
        (dict(k_nope=f(3, 4)), "k_nope"),
        (dict(k_nope=f(3, 1, 4, device="meta")), "k_nope"),
        (dict(cos_sin_cache=f(4, 6)), "cos_sin_cache"),
        (dict(cos_sin_cache=f(4, 8, dtype=torch.float16)), "cos_sin_cache"),
        (dict(pos_ids=torch.tensor([0, 1])), "pos_ids"),
        (dict(pos_ids=torch.tensor([0, 1, 4])), "pos_ids"),
        (dict(quantize_dtype=torch.float16), "quantize_dtype"),
        (dict(quantize_dtype=E5M2, q_rope_out=f(3, 2, 8, dtype=E4M3)), "quantize_dtype"),
        (dict(q_rope_out=f(3, 2, 6, dtype=E4M3)), "q_rope_out"),
        (dict(q_rope_out=f(3, 2, 8, dtype=E4M3, device="meta")), "q_rope_out"),
        (dict(backend="nothing"), "backend"),
    ],
)
def test_bad_input(changed, argument):
    good = dict(q_rope=f(3, 2, 8), k_rope=f(3, 1, 8), q_nope=f(3, 2, 4), k_nope=f(3, 1, 4))
    good |= dict(cos_sin_cache=f(4, 8), pos_ids=torch.tensor([1, 2, 3]))
    rope.rope_quantize_fp8(**good)
    with pytest.raises(ValueError, match=f"^{argument}: got .*allowed: "):
        rope.rope_quantize_fp8(**(good | changed))


@pytest.mark.parametrize(
    ("changed", "argument"),
    [
        (dict(v=None), "v"),
        (dict(v=f(5, 1, 16)), "v"),
        (dict(page_size=16), "page_size"),
        (dict(kv_layout="DHN"), "kv_layout"),
        (dict(paged_kv_cache=(f(6, 4, 2, 20, dtype=E4M3), f(6, 4, 2, 16, dtype=E4M3))), "paged_kv_cache"),
        (dict(paged_kv_cache=(f(6, 4, 2, 16), f(6, 4, 2, 16))), "quantize_dtype"),
        (dict(quantize_dtype=E5M2), "quantize_dtype"),
        (dict(paged_kv_cache=(f(6, 4, 2, 16, dtype=E4M3), f(5, 4, 2, 16, dtype=E4M3))), "paged_kv_cache"),
        (dict(paged_kv_cache=(f(6, 4, 2, 16, dtype=E4M3), f(6, 3, 2, 16, dtype=E4M3))), "paged_kv_cache"),
        (dict(paged_kv_cache=(f(6, 4, 2, 16, dtype=E4M3), f(6, 4, 1, 16, dtype=E4M3))), "paged_kv_cache"),
        (dict(paged_kv_cache=(f(6, 4, 1, 16, dtype=E4M3), f(6, 4, 1, 16, dtype=E4M3))), "paged_kv_cache"),
        (dict(v=f(5)), "v"),
        (dict(q_rope_out=f(5, 4, 16)), "quantize_dtype"),
        (dict(kv_indptr=torch.zeros(2, 2, dtype=torch.int32)), "kv_indptr"),
        (dict(batch_indices=torch.zeros(4, dtype=torch.int32)), "batch_indices"),
        (dict(positions=torch.zeros(5)), "positions"),
    ],
)
def test_bad_input_of_append(changed, argument):
    good = dict(q_rope=f(5, 4, 16), k_rope=f(5, 2, 16), q_nope=None, k_nope=None, v=f(5, 2, 16))
    good |= dict(cos_sin_cache=f(9, 16), pos_ids=torch.arange(5), page_size=4) | tables("cpu")
    good |= dict(paged_kv_cache=tuple(f(6, 4, 2, 16, dtype=E4M3) for _ in range(2)))
    rope.rope_quantize_fp8_append_paged_kv_cache(**good)
    with pytest.raises(ValueError, match=f"^{argument}: got .*allowed: "):
        rope.rope_quantize_fp8_append_paged_kv_cache(**(good | changed))


def test_are_registered_ops():
    from flashinfer.rope import quantize

    q, k = f(5, 4, 16), f(5, 2, 16)
    outs = [x.byte() for x in (q, k, q[..., :0], k[..., :0])]
    heads, cos_sin, pos, numbers = [q, k, q[..., :0], k[..., :0]], f(9, 16), torch.arange(5), [1.0, 2.0, 0.0]
    torch.library.opcheck(quantize._rope_quantize.op, (heads, cos_sin, pos, numbers, *outs, "fp8e5", "auto", True))
    caches = [torch.zeros(6, 4, 2, dim, dtype=torch.uint8) for dim in (16, 0, 16)]
    table = [tables("cpu")[name] for name in ("batch_indices", "positions", "kv_indices", "kv_indptr")]
    given = (heads, k, cos_sin, pos, table, numbers, outs[0], outs[2], *caches, "fp8e4nv")
    torch.library.opcheck(quantize._rope_quantize_append.op, given, {"pdl": False})


def test_compiles_without_a_break():
    q, k, v = torch.randn(5, 4, 16), torch.randn(5, 2, 16), torch.randn(5, 2, 16)
    cos_sin, pos, table = torch.randn(9, 16), torch.arange(5), tables("cpu")

    def step(q, k, v, k_cache, v_cache):
        outs = rope.rope_quantize_fp8(q, k, None, None, cos_sin, pos)
        again = rope.rope_quantize_fp8_append_paged_kv_cache(
            q, k, None, None, v, cos_sin, pos, (k_cache, v_cache), **table, page_size=4
        )
        return outs[0].float(), outs[1].float(), again[0].float()

    caches = [[torch.zeros(6, 4, 2, 16, dtype=E4M3) for _ in range(2)] for _ in range(2)]
    eager = step(q, k, v, *caches[0])
    compiled = torch.compile(step, backend="eager", fullgraph=True)(q, k, v, *caches[1])
    for a, b in zip((*compiled, *caches[1]), (*eager, *caches[0])):
        assert_bitwise(a, b)
