"""Appending with quantising: the slots of the page table get the codes and factors of the specification, no others."""

import pytest
import torch

from flashinfer import page
from flashinfer.page import quantised
from flashinfer.testing import generate
from flashinfer.testing.compare import assert_bitwise
from tests.ops.norm.variants import variant  # the fixture
from tests.ops.quantize import truth

TABLE = dict(batch_indices=[0, 2, -1, 2, 0], positions=[3, 0, 5, 6, 7], kv_indices=[4, 1, 0, 2], kv_indptr=[0, 2, 2, 4])
TABLE |= dict(kv_last_page_len=[4, 0, 3])
SLOTS = [(4, 3), (0, 0), None, (2, 2), (1, 3)]  # with pages of 4


def tables(**changed):
    return {name: torch.tensor(values, dtype=torch.int32) for name, values in (TABLE | changed).items()}


def on(device, table):
    return {name: tensor.to(device) for name, tensor in table.items()}


def rows(heads, dim, device, dtype=torch.bfloat16):
    x = generate.randn(5, heads, dim, device=device)
    return (x * torch.exp2(torch.randint(-9, 4, (5, heads, 1), device=device).float())).to(dtype)


def nvfp4(x, scale):
    nibbles, factors = truth.nvfp4(x, torch.tensor(1 / scale, device=x.device).float())
    return truth.pack(nibbles), factors


def check(cache, before, expected):
    """cache and before [pages, slots, heads, width]; expected [tokens, heads, width]."""
    for token, slot in enumerate(SLOTS):
        if slot is not None:
            before[slot] = expected[token]
    assert_bitwise(cache.contiguous(), before)


@pytest.mark.parametrize("layout", ["NHD", "HND"])
@pytest.mark.parametrize("together", [False, True])
@pytest.mark.parametrize("dim", [16, 64, 80])
def test_nvfp4(variant, device, layout, together, dim):
    key, value = rows(2, dim, device), rows(2, dim, device, torch.bfloat16)
    value = generate.strided(value, 1)
    caches, factors = (
        torch.randint(0, 120, (6, 2, 4, 2, dim // part), dtype=torch.uint8, device=device) for part in (2, 16)
    )
    if layout == "HND":
        caches, factors = (x.transpose(2, 3).contiguous() for x in (caches, factors))
    views = [(x.transpose(2, 3) if layout == "HND" else x)[:, i] for x in (caches, factors) for i in (0, 1)]
    before = [x.contiguous().clone() for x in views]
    pair = (lambda x: x) if together else (lambda x: (x[:, 0], x[:, 1]))
    table = on(device, tables())
    page.nvfp4_quantize_append_paged_kv_cache(
        key, value, table.pop("batch_indices"), table.pop("positions"), pair(caches),
        pair(factors.view(torch.float8_e4m3fn)), **table, k_scale=0.25, v_scale=2.0, kv_layout=layout,
    )  # fmt: skip
    expected = nvfp4(key, 0.25), nvfp4(value, 2.0)
    for i, (x, old) in enumerate(zip(views, before)):
        check(x, old, expected[i % 2][i // 2])


@pytest.mark.parametrize(("ckv_dim", "kpe_dim"), [(64, 16), (96, 5)])
def test_mla(variant, device, ckv_dim, kpe_dim):
    ckv, kpe = rows(1, ckv_dim, device, torch.float16)[:, 0], rows(1, kpe_dim, device, torch.float16)[:, 0]
    caches = [torch.randint(0, 120, (6, 4, w), dtype=torch.uint8, device=device) for w in (ckv_dim // 2, ckv_dim // 16)]
    caches.append(torch.ones(6, 4, kpe_dim, device=device).to(torch.float8_e4m3fn))
    before = [x.view(torch.uint8).unsqueeze(2).clone() for x in caches]
    table = on(device, tables())
    page.nvfp4_quantize_append_paged_mla_kv_cache(
        ckv, kpe, table.pop("batch_indices"), table.pop("positions"), *caches, **table, ckv_scale=0.5, kpe_scale=4.0
    )
    codes, factors = nvfp4(ckv, 0.5)
    expected = codes, factors, truth.encode("e4m3", kpe.double() / 4)
    for x, old, new in zip(caches, before, expected):
        check(x.view(torch.uint8).unsqueeze(2), old, new.unsqueeze(1))


def good():
    key = torch.ones(5, 2, 32).half()
    table = tables()
    caches = tuple(torch.zeros(6, 4, 2, 16, dtype=torch.uint8) for _ in range(2))
    factors = tuple(torch.zeros(6, 4, 2, 2, dtype=torch.float8_e4m3fn) for _ in range(2))
    return dict(append_key=key, append_value=key.clone(), paged_kv_cache=caches, kv_cache_sf=factors) | table | dict(
        k_scale=1.0, v_scale=1.0
    )


def zeros(*shape, dtype=torch.uint8):
    return torch.zeros(*shape, dtype=dtype), torch.zeros(*shape, dtype=dtype)


@pytest.mark.parametrize(
    ("changed", "argument"),
    [
        (dict(append_key=torch.ones(5, 2, 32)), "append_key"),
        (dict(append_key=torch.ones(5, 2, 24).half()), "append_key"),
        (dict(append_value=torch.ones(4, 2, 32).half()), "append_value"),
        (dict(append_value=torch.ones(5, 2, 32).bfloat16()), "append_value"),
        (dict(paged_kv_cache=zeros(6, 4, 2, 32)), "paged_kv_cache"),
        (dict(paged_kv_cache=zeros(6, 4, 2, 16, dtype=torch.int8)), "paged_kv_cache"),
        (dict(kv_cache_sf=zeros(6, 4, 2, 4)), "kv_cache_sf"),
        (dict(kv_cache_sf=zeros(6, 4, 2, 2, dtype=torch.float32)), "kv_cache_sf"),
        (dict(k_scale=0.0), "k_scale"),
        (dict(v_scale=torch.ones(2)), "v_scale"),
        (dict(kv_layout="DHN"), "kv_layout"),
        (tables(positions=[3, 0, 5, 7, 7]), "positions"),
        (tables(kv_indices=[4, 1, 0, 6]), "kv_indices"),
        (tables(batch_indices=[0, 2, 1, 0]), "batch_indices"),
    ],
)
def test_bad_input(changed, argument):
    page.nvfp4_quantize_append_paged_kv_cache(**good())
    with pytest.raises(ValueError, match=f"^{argument}: got .*allowed: "):
        page.nvfp4_quantize_append_paged_kv_cache(**(good() | changed))


def test_is_a_registered_op():
    table = list(tables().values())
    key = torch.randn(5, 2, 32).half()
    codes, factors = torch.zeros(6, 4, 2, 16, dtype=torch.uint8), torch.zeros(6, 4, 2, 2, dtype=torch.uint8)
    given = key, key.clone(), table, codes, codes.clone(), factors, factors.clone(), [1.0, 2.0], []
    torch.library.opcheck(quantised._append_quantised.op, given)
    slots = [torch.arange(5)]
    torch.library.opcheck(quantised._append_quantised.op, (*given[:2], slots, *given[3:7], [], [torch.ones(1)] * 2))


def test_compiles_without_a_break():
    def step(key, caches, factors):
        append_indptr, lengths = torch.tensor([0, 2, 2, 5], dtype=torch.int32), torch.tensor([8, 0, 7]).int()
        batch_indices, positions = page.get_batch_indices_positions(append_indptr, lengths, 5)
        table = tables() | dict(batch_indices=batch_indices, positions=positions)
        page.append_paged_kv_cache(key, key, paged_kv_cache=caches, **table)
        page.nvfp4_quantize_append_paged_kv_cache(
            key, key, paged_kv_cache=caches.view(torch.uint8)[..., :16], kv_cache_sf=factors, k_scale=1.0, v_scale=1.0,
            **table,
        )  # fmt: skip
        return page.get_seq_lens(table["kv_indptr"], table["kv_last_page_len"], 4)

    key = torch.randn(5, 2, 32).half()
    caches = [(torch.zeros(6, 2, 4, 2, 32).half(), torch.zeros(6, 2, 4, 2, 2, dtype=torch.uint8)) for _ in range(2)]
    eager = step(key, *caches[0])
    compiled = torch.compile(step, backend="eager", fullgraph=True)(key, *caches[1])
    for a, b in zip((compiled, *caches[1]), (eager, *caches[0])):
        assert_bitwise(a, b)
