"""concat_mla_k against torch.cat: elements are moved, so every bit is the same."""

import pytest
import torch

from flashinfer.concat_ops import concat_mla_k
from flashinfer.testing import generate
from flashinfer.testing.compare import assert_bitwise
from tests.ops.norm.variants import variant  # the fixture

DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float8_e4m3fn, torch.float8_e5m2)


def parts(tokens, heads, nope, rope, dtype, device):
    return tuple(generate.randn(tokens, h, w, dtype=dtype, device=device) for h, w in ((heads, nope), (1, rope)))


def together(k_nope, k_rope):
    bits = [x.contiguous().view(torch.uint8) for x in (k_nope, k_rope.expand(-1, k_nope.shape[1], -1))]
    return torch.cat(bits, -1)


@pytest.mark.parametrize(
    "shape",
    [(5, 3, 128, 64), (3, 2, 40, 7), (1, 1, 1, 1), (0, 4, 128, 64), (2, 3, 16, 0), (2, 3, 0, 16)]
    + [pytest.param(s, marks=pytest.mark.gpu) for s in [(2049, 128, 128, 64), (7, 128, 192, 64)]],
    ids=str,
)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_concat(variant, device, shape, dtype):
    given = parts(*shape, dtype, device)
    guard = generate.Guarded((*shape[:2], shape[2] + shape[3]), dtype, device)
    assert concat_mla_k(guard.out, *given) is None
    guard.check()
    assert_bitwise(guard.out.view(torch.uint8), together(*given))


@pytest.mark.parametrize("axis", [0, 1, 2])
def test_strides(variant, device, axis):
    given = [generate.strided(x, axis) for x in parts(4, 3, 32, 16, torch.float16, device)]
    k = generate.strided(torch.zeros(4, 3, 48, dtype=torch.float16, device=device), axis, 16)
    gaps = int(k._base.isnan().sum())
    concat_mla_k(k, *given, backend="auto")
    assert_bitwise(k.contiguous().view(torch.uint8), together(*given))
    assert int(k._base.isnan().sum()) == gaps


@pytest.mark.parametrize(
    ("changed", "argument"),
    [
        (dict(k=torch.ones(3, 2, 11)), "k"),
        (dict(k=torch.ones(3, 2, 12, dtype=torch.int64)), "k"),
        (dict(k=torch.ones(3, 2, 12, device="meta")), "k"),
        (dict(k_nope=torch.ones(3, 8)), "k_nope"),
        (dict(k_nope=torch.ones(3, 2, 8, dtype=torch.float16)), "k_nope"),
        (dict(k_rope=torch.ones(3, 2, 4)), "k_rope"),
        (dict(k_rope=torch.ones(2, 1, 4)), "k_rope"),
        (dict(backend="nothing"), "backend"),
    ],
)
def test_bad_input(changed, argument):
    good = dict(k=torch.ones(3, 2, 12), k_nope=torch.ones(3, 2, 8), k_rope=torch.ones(3, 1, 4))
    concat_mla_k(**good)
    with pytest.raises(ValueError, match=f"^{argument}: got .*allowed: "):
        concat_mla_k(**(good | changed))


def test_is_a_registered_op():
    from flashinfer import concat_ops

    given = parts(3, 2, 8, 4, torch.float32, "cpu")
    torch.library.opcheck(concat_ops._concat_mla_k.op, (torch.empty(3, 2, 12), *given, "default"))


def test_compiles_without_a_break():
    def keys(k_nope, k_rope):
        k = torch.empty(3, 2, 12)
        concat_mla_k(k, k_nope, k_rope)
        return k

    given = parts(3, 2, 8, 4, torch.float32, "cpu")
    assert_bitwise(torch.compile(keys, backend="aot_eager", fullgraph=True)(*given), keys(*given))
