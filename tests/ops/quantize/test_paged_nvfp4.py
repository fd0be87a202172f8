"""NVFP4 caches read through page tables, against the formats' tables of values."""

import pytest
import torch

import flashinfer
from flashinfer.testing.compare import assert_bitwise
from tests.ops.quantize import truth


@pytest.mark.parametrize("layout", ("NHD", "HND"))
@pytest.mark.parametrize("index", (torch.int32, torch.int64))
def test_dequantised_pages(layout, index, device):
    """One row of the table ends within a page, one is empty, one longer than the output; the rest keeps its bytes."""
    torch.manual_seed(0)
    pages, page, heads, dim, most = 9, 4, 3, 32, 7
    codes = torch.randint(256, (pages, 2, page, heads, dim // 2), dtype=torch.uint8, device=device)
    factors = torch.randint(0x78, (pages, 2, page, heads, dim // 16), dtype=torch.uint8, device=device)
    given = [t.transpose(2, 3).contiguous() if layout == "HND" else t for t in (codes, factors)]
    tables = torch.tensor([[3, 8, -5], [10**6, -1, 7], [0, 3, 5]], dtype=index, device=device)
    lens = torch.tensor([6, 0, 11], dtype=index, device=device)
    out = [torch.full((3, most, heads, dim), 777.0, dtype=torch.bfloat16, device=device) for _ in "kv"]
    for format in ("one", "pair"):
        cache, sf = given if format == "one" else [tuple(t.unbind(1)) for t in given]
        with torch.device("meta"):
            flashinfer.nvfp4_kv_dequantize_paged(
                cache, sf, tables, lens, torch.tensor([0.37], device=device), 3.0, *out, kv_layout=layout
            )
        for part, scale in ((0, 0.37), (1, 3.0)):
            expected = torch.full_like(out[0], 777.0)
            for b, n in enumerate((6, 0, 7)):
                for t in range(n):
                    at = int(tables[b, t // page]), part, t % page
                    code = truth.decode("e2m1", truth.unpack(codes[at]))
                    factor = truth.decode("e4m3", factors[at]).repeat_interleave(16, -1)
                    scaled = (code * factor).float() * torch.tensor(scale, dtype=torch.float32, device=device)
                    expected[b, t] = scaled.bfloat16()
            assert_bitwise(out[part], expected)


@pytest.mark.parametrize("scale", (0.0, -1.0, float("nan"), float("inf"), 0))
def test_scales_are_positive_numbers(scale, device):
    rows = torch.randn(2, 1, 16, dtype=torch.float16, device=device)
    integers = lambda *values, dtype=torch.int32: torch.tensor(values, dtype=dtype, device=device)
    cache = torch.zeros(3, 4, 1, 8, dtype=torch.uint8, device=device)
    sf = torch.zeros(3, 4, 1, 1, dtype=torch.uint8, device=device)
    kpe = torch.zeros(3, 4, 16, dtype=torch.uint8, device=device)
    out = torch.zeros(1, 4, 1, 16, dtype=torch.float16, device=device)
    wide = integers(0, 1, dtype=torch.int64)
    tables = integers(0, 0), wide, integers(2), wide, integers(2)
    slots = integers(0, 1)
    for k, v, name in ((scale, 1.0, "k_scale|ckv_scale"), (1.0, scale, "v_scale|kpe_scale")):
        with pytest.raises(ValueError, match=name):
            flashinfer.nvfp4_quantize_append_paged_kv_cache(rows, rows, *tables[:2], (cache, cache), (sf, sf),
                                                            *tables[2:], k, v)  # fmt: skip
        with pytest.raises(ValueError, match=name):
            flashinfer.nvfp4_quantize_append_paged_mla_kv_cache(rows[:, 0], rows[:, 0], *tables[:2], cache[:, :, 0],
                                                                sf[:, :, 0], kpe, *tables[2:], k, v)  # fmt: skip
        with pytest.raises(ValueError, match=name):
            flashinfer.nvfp4_quantize_append_paged_kv_cache_with_slot_mapping(rows, rows, slots, (cache, cache),
                                                                              (sf, sf), k, v)  # fmt: skip
        with pytest.raises(ValueError, match=name):
            flashinfer.nvfp4_kv_dequantize_paged((cache, cache), (sf, sf), slots[None], slots[:1], k, v, out, out)


def test_appended_pages_are_read_again(device):
    """Tables of both widths; what the append wrote is within half a step of its block of what was given."""
    torch.manual_seed(1)
    rows = torch.randn(2, 5, 2, 32, dtype=torch.bfloat16, device=device)
    integers = lambda *values, dtype=torch.int32: torch.tensor(values, dtype=dtype, device=device)
    cache, sf = (torch.zeros(4, 2, 4, 2, n, dtype=torch.uint8, device=device) for n in (16, 2))
    flashinfer.nvfp4_quantize_append_paged_kv_cache(
        *rows, integers(0, 0, 0, 0, 0, dtype=torch.int64), integers(0, 1, 2, 3, 4), cache, sf,
        integers(3, 1, dtype=torch.int64), integers(0, 2), integers(1, dtype=torch.int64), 0.01, 0.01,
    )  # fmt: skip
    out = torch.zeros(2, 1, 5, 2, 32, dtype=torch.bfloat16, device=device)
    lens = integers(5, dtype=torch.int64)
    flashinfer.nvfp4_kv_dequantize_paged(cache, sf, integers(3, 1)[None], lens, 0.01, 0.01, *out)
    largest = rows.unflatten(-1, (2, 16)).abs().amax(-1, keepdim=True)
    error = (out[:, 0] - rows).abs().unflatten(-1, (2, 16))
    assert (error <= 0.2 * largest).all()
