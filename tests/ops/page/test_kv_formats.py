"""Appending and dequantising in FP8, INT8 and INT4 with float32 factors, against float64 and the formats' bounds."""

import pytest
import torch

import flashinfer
from flashinfer import page
from flashinfer.page import quantised
from flashinfer.quantization import kv_dequantize_paged
from flashinfer.testing import generate
from flashinfer.testing.compare import assert_bitwise
from tests.ops.norm.variants import variant  # the fixture
from tests.ops.page.test_quantised import SLOTS, on, tables
from tests.ops.quantize import truth

# name: (largest magnitude of a code, codes that share a factor, codes in a byte, dtype of the cache)
FORMATS = {
    "fp8_per_token_head": (448.0, 0, 1, torch.float8_e4m3fn),
    "int8_per_token_head": (127.0, 0, 1, torch.int8),
    "int4_per_token_head": (7.0, 0, 2, torch.uint8),
    "int4_group_64": (7.0, 64, 2, torch.uint8),
}


def caches(name, dim, layout, device, together=True, page_size=4):
    """A cache and factors of six pages of random bytes, and both as [pages, slots, heads, width] of K and V."""
    _, width, packed, dtype = FORMATS[name]
    codes = torch.randint(0, 256, (6, 2, page_size, 2, dim // packed), dtype=torch.uint8, device=device)
    factors = torch.rand(6, 2, page_size, 2, dim // width if width else 1, device=device) + 1
    if layout == "HND":
        codes, factors = (x.transpose(2, 3).contiguous() for x in (codes, factors))
    views = [(x.transpose(2, 3) if layout == "HND" else x)[:, i] for x in (codes, factors) for i in (0, 1)]
    given = codes.view(dtype), factors
    return (given if together else [tuple(x.unbind(1)) for x in given]), views


def decoded(name, codes, factors):
    """float64 of bytes and factors."""
    if name.startswith("fp8"):
        codes = truth.decode("e4m3", codes)
    elif name.startswith("int8"):
        codes = codes.view(torch.int8).double()
    else:
        halves = truth.unpack(codes).int()
        codes = torch.where(halves > 7, halves - 16, halves).double()
    return (codes.unflatten(-1, (factors.shape[-1], -1)) * factors.double()[..., None]).flatten(-2)


def append(key, value, given, name, layout, device, **changed):
    table = on(device, tables(**changed))
    page.quantize_append_paged_kv_cache(
        key, value, table.pop("batch_indices"), table.pop("positions"), *given, **table, kv_data_type=name,
        kv_layout=layout,
    )  # fmt: skip


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize(("layout", "together"), (("NHD", True), ("HND", False)))
@pytest.mark.parametrize("dim", (64, 128, 192))
def test_append(variant, device, name, layout, together, dim):
    largest, width, _, _ = FORMATS[name]
    shape = 5, 2, dim
    spread = lambda: torch.exp2(torch.randint(-9, 4, (5, 2, 1), device=device).float())
    key, value = ((generate.randn(*shape, device=device) * spread()).bfloat16() for _ in "kv")
    key[0, 0, 1], key[1] = -0.0, 0
    given, views = caches(name, dim, layout, device, together)
    before = [x.clone() for x in views]
    append(key, generate.strided(value, 1), given, name, layout, device)
    for x, codes, factors, old, old_factors in zip((key, value), views[:2], views[2:], before[:2], before[2:]):
        made, exact = decoded(name, codes, factors), x.double()
        for token, slot in enumerate(SLOTS):
            if slot is None:
                continue
            blocks = exact[token].unflatten(-1, (-1, width or dim))
            amax = blocks.abs().amax(-1)
            want = (amax / largest).clamp(min=2.0**-126)
            # One rounding of a float32 division.
            assert ((factors[slot].double() - want).abs() <= 2.0**-24 * want).all()
            # Half a step, of which e4m3 has one in sixteen parts of a value; and two float32 roundings of the quotient.
            step = want[..., None].expand_as(blocks)
            if name.startswith("fp8"):
                step = torch.maximum(blocks.abs() / 8, step * 2.0**-9)
            error = (made[slot].unflatten(-1, (-1, width or dim)) - blocks).abs()
            assert (error <= step / 2 + 2.0**-21 * amax[..., None]).all()
            assert made[slot].isfinite().all()
            old[slot], old_factors[slot] = codes[slot], factors[slot]
        # What no token goes to keeps its bytes.
        assert_bitwise(codes.contiguous(), old)
        assert_bitwise(factors.contiguous(), old_factors)
    assert (decoded(name, views[0], views[2])[SLOTS[1]] == 0).all()


@pytest.mark.parametrize("name", FORMATS)
def test_numbers_that_are_none(variant, device, name):
    """Infinity is the largest float32; a NaN makes the factor of its block NaN, and of no other."""
    key = torch.ones(5, 2, 128, dtype=torch.float16, device=device)
    key[0, 0, 3], key[1, 1, 100], key[3, 0, 0] = float("inf"), float("nan"), -float("inf")
    given, (codes, _, factors, _) = caches(name, 128, "NHD", device)
    append(key, torch.ones_like(key), given, name, "NHD", device)
    largest, width, _, _ = FORMATS[name]
    most = torch.finfo(torch.float32).max
    for slot, head, at, sign in ((SLOTS[0], 0, 3, 1), (SLOTS[3], 0, 0, -1)):
        found = decoded(name, codes, factors)[slot][head]
        assert abs(float(found[at]) * sign - most) <= 2.0**-22 * most
        assert float(factors[slot][head][0]) == pytest.approx(most / largest, rel=1e-6)
        assert (found[at + 1 : 64] == 0).all() and (not width or (found[64:] - 1).abs().max() < 2.0**-23)
    nan = factors[SLOTS[1]].isnan()
    assert nan[1, -1] and nan.sum() == 1


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("index", (torch.int32, torch.int64))
def test_slots(variant, device, name, index):
    """What a slot mapping writes is what a page table does; rows past it and slots that are none are left out."""
    key, value = (generate.randn(7, 2, 128, device=device).half() for _ in "kv")
    given, views = caches(name, 128, "HND", device)
    other = tuple(x.clone() for x in given)
    append(key[:5], value[:5], given, name, "HND", device)
    slots = torch.tensor([-1 if at is None else 4 * at[0] + at[1] for at in SLOTS], dtype=index, device=device)
    slots[2] = 24  # past the last page
    key[5:] = float("nan")
    page.quantize_append_paged_kv_cache_with_slot_mapping(key, value, slots, *other, name, "HND")
    for one, two in zip(given, other):
        assert_bitwise(one.view(torch.uint8), two.view(torch.uint8))


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("index", (torch.int32, torch.int64))
@pytest.mark.parametrize("layout", ("NHD", "HND"))
def test_dequantised_pages(device, name, index, layout):
    """One row of the table ends within a page, one is empty, one longer than the output; the rest keeps its bytes."""
    given, (k, v, k_factors, v_factors) = caches(name, 128, layout, device)
    if name.startswith("fp8"):
        given[0].view(torch.uint8).bitwise_and_(0xF7)  # no NaN
    lens, most = (6, 0, 11), 7
    rows = torch.tensor([[3, 5, -5], [10**6, -1, 7], [0, 3, 5]], dtype=index, device=device)
    out = [torch.full((3, most, 2, 128), 777.0, dtype=torch.float16, device=device) for _ in "kv"]
    kv_dequantize_paged(*given, rows, torch.tensor(lens, dtype=index, device=device), *out, name, layout)
    for codes, factors, found in ((k, k_factors, out[0]), (v, v_factors, out[1])):
        expected = torch.full_like(found, 777.0)
        for request, length in enumerate(lens):
            for token in range(min(length, most)):
                slot = int(rows[request, token // 4]), token % 4
                # One rounding to float32, one to the result.
                expected[request, token] = decoded(name, codes[slot], factors[slot]).float().half()
        assert_bitwise(found, expected)


@pytest.mark.parametrize("name", FORMATS)
def test_what_was_appended_is_attended(device, name):
    """The cache of the append is the one that decode reads, as large as dequantising says."""
    key, value = (generate.randn(9, 2, 64, dtype=torch.float16, device=device) for _ in "kv")
    given, _ = caches(name, 64, "NHD", device, page_size=4)
    integers = lambda *values: torch.tensor(values, dtype=torch.int64, device=device)
    table = integers(5, 1, 2), integers(0, 3), integers(1)
    page.quantize_append_paged_kv_cache(
        key, value, integers(*[0] * 9), integers(*range(9)), *given, *table, kv_data_type=name
    )
    out = [torch.zeros(1, 9, 2, 64, dtype=torch.float16, device=device) for _ in "kv"]
    kv_dequantize_paged(*given, table[0][None], integers(9), *out, name)
    q = generate.randn(1, 4, 64, dtype=torch.float16, device=device)
    wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(torch.empty(1 << 20, dtype=torch.uint8, device=device))
    wrapper.plan(table[1], table[0], table[2], 4, 2, 64, 4, kv_data_type=name, q_data_type=torch.float16)
    found = wrapper.run(q, given[0], kv_cache_sf=given[1])
    k, v = (x[0].double().repeat_interleave(2, 1) for x in out)
    weights = torch.softmax(torch.einsum("hd,nhd->hn", q[0].double(), k) / 8, 1)
    expected = torch.einsum("hn,nhd->hd", weights, v)
    assert ((found[0].double() - expected).abs() <= 2.0**-9 * expected.abs().amax()).all()


def good(name="int8_per_token_head"):
    key = torch.ones(5, 2, 64).half()
    given, _ = caches(name, 64, "NHD", "cpu", together=False)
    rows = dict(append_key=key, append_value=key.clone(), paged_kv_cache=given[0], kv_cache_sf=given[1])
    return rows | tables() | dict(kv_data_type=name)


@pytest.mark.parametrize(
    ("changed", "argument"),
    (
        (dict(append_key=torch.ones(5, 2, 64)), "append_key"),
        (dict(append_key=torch.ones(5, 2, 32).half()), "append_value|paged_kv_cache"),
        (dict(append_value=torch.ones(4, 2, 64).half()), "append_value"),
        (dict(paged_kv_cache=good("int4_group_64")["paged_kv_cache"]), "paged_kv_cache"),
        (dict(paged_kv_cache=good("fp8_per_token_head")["paged_kv_cache"]), "paged_kv_cache"),
        (dict(kv_cache_sf=tuple(x.half() for x in good()["kv_cache_sf"])), "kv_cache_sf"),
        (dict(kv_cache_sf=tuple(x.expand(-1, -1, -1, 4) for x in good()["kv_cache_sf"])), "kv_cache_sf"),
        (dict(kv_data_type="nvfp4"), "kv_data_type"),
        (dict(kv_data_type="int3"), "kv_data_type"),
        (dict(kv_layout="DHN"), "kv_layout"),
        (tables(positions=[3, 0, 5, 7, 7]), "positions"),
        (tables(kv_indices=[4, 1, 0, 6]), "kv_indices"),
    ),
)
def test_bad_input(changed, argument):
    page.quantize_append_paged_kv_cache(**good())
    with pytest.raises(ValueError, match=f"^({argument}): got .*allowed: "):
        page.quantize_append_paged_kv_cache(**(good() | changed))


def test_blocks_divide_rows():
    for name, dim in (("int4_group_64", 96), ("int4_per_token_head", 63)):
        key = torch.ones(5, 2, dim).half()
        with pytest.raises(ValueError, match="^append_key: got .*multiple of"):
            page.quantize_append_paged_kv_cache(**(good(name) | dict(append_key=key, append_value=key)))


def test_is_a_registered_op():
    key = torch.randn(5, 2, 64).half()
    codes, factors = torch.zeros(6, 4, 2, 64, dtype=torch.uint8), torch.zeros(6, 4, 2, 1)
    given = key, key.clone(), list(tables().values()), codes, codes.clone(), factors, factors.clone(), [1.0, 1.0], []
    torch.library.opcheck(quantised._append_quantised.op, (*given, "int8_per_token_head"))
