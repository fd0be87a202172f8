"""NVFP4 caches that the package quantised, against float64 attention over what their codes and factors stand for."""

from dataclasses import replace

import pytest
import torch

import flashinfer
from flashinfer._core.checks import UnsupportedConfig
from flashinfer.decode import trtllm_batch_decode_with_kv_cache, xqa_batch_decode_with_kv_cache
from flashinfer.ops.attention.direct import run_direct
from flashinfer.ops.attention.options import PlanOptions
from flashinfer.ops.attention.tables import block_table
from flashinfer.ops.kv_layout import paged_views
from flashinfer.page import nvfp4_quantize_append_paged_kv_cache_with_slot_mapping
from flashinfer.prefill import trtllm_batch_context_with_kv_cache
from flashinfer.quantization import nvfp4_kv_quantize, nvfp4_quantize_paged_kv_cache
from flashinfer.testing import generate
from flashinfer.testing.compare import assert_bitwise
from tests.ops.attention.cases import backends, check, workspace
from tests.ops.attention.oracle import Extras, Options
from tests.ops.attention.test_direct import blocks, lens

HALF = torch.float16
KV = [5, 0, 40, 33, 17]
SCALES = Extras(k_scale=0.0023, v_scale=0.0031)
# OCP Microscaling Formats Specification 1.0, e2m1 by code.
E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


def values(codes, factors):
    """What codes [..., n / 2] and row-major factors [..., n / 16] stand for; float16 holds it exactly."""
    table = torch.tensor(E2M1 + tuple(-x for x in E2M1), dtype=torch.float64, device=codes.device)
    pairs = torch.stack((codes % 16, codes // 16), -1).flatten(-2).long()
    exact = table[pairs] * factors.view(torch.float8_e4m3fn).double().repeat_interleave(16, -1)
    assert_bitwise(exact.half().double(), exact)
    return exact.half()


def quantised(x, page_size, layout, extras=SCALES):
    """A batch as it comes out of an nvfp4 cache, the cache, its factors, and where its pages are."""
    made, caches, factors = [], [], []
    for rows, scale in ((x.k, extras.k_scale), (x.v, extras.v_scale)):
        n, heads, dim = rows.shape
        codes, e4m3 = nvfp4_kv_quantize(rows.reshape(-1, dim), torch.tensor([scale], device=rows.device))
        made.append(values(codes, e4m3).view(n, heads, dim))
        caches.append(codes.view(n, heads, dim // 2))
        factors.append(e4m3.view(n, heads, dim // 16))
    torch.manual_seed(1)
    paged = generate.paged(replace(x, k=caches[0], v=caches[1]), page_size, layout, fill=0x5A)
    torch.manual_seed(1)
    # 0x7F is the NaN of e4m3.
    scales = generate.paged(replace(x, k=factors[0], v=factors[1]), page_size, layout, fill=0x7F)
    return replace(x, k=made[0], v=made[1]), paged, scales.kv_cache


def batch(device, qo=None, kv=KV, heads=(6, 2), dim=64, dtype=HALF, **kwargs):
    return generate.ragged_batch(qo or [1] * len(kv), kv, *heads, dim, dtype=dtype, device=device, **kwargs)


def run_decode(x, paged, factors, backend, plan=None, **run):
    wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(workspace(x.q.device), paged.kv_layout, backend=backend)
    wrapper.plan(
        paged.indptr, paged.indices, paged.last_page_len, x.q.shape[1], x.k.shape[1], x.q.shape[2], paged.page_size,
        q_data_type=x.q.dtype, **(dict(kv_data_type="nvfp4") | (plan or {})),
    )  # fmt: skip
    return wrapper.run(x.q, paged.kv_cache, return_lse=True, kv_block_scales=factors, **run)


@pytest.mark.parametrize("page_size", (5, 16))
@pytest.mark.parametrize("layout", ("NHD", "HND"))
def test_decode(layout, page_size, device):
    x, paged, factors = quantised(batch(device), page_size, layout)
    scales = dict(k_scale=SCALES.k_scale, v_scale=SCALES.v_scale)
    tensors = {name: torch.tensor([scale] * 2, device=device) for name, scale in scales.items()}
    for backend in backends(device):
        check(run_decode(x, paged, factors, backend, **scales), x, Options(), SCALES)
        e4m3 = factors.view(torch.float8_e4m3fn)
        plan = dict(kv_data_type=torch.uint8, window_left=9)
        check(run_decode(x, paged, e4m3, backend, plan, **tensors), x, Options(window_left=9), SCALES)


@pytest.mark.parametrize("dims", ((16, 16, 1), (96, 96, 4), (128, 64, 5)))
def test_head_dims(dims, device):
    dim, dim_vo, group = dims
    o = Options(causal=True)
    x = batch(device, qo=[3, 0, 17, 1, 2], heads=(2 * group, 2), dim=dim, head_dim_vo=dim_vo)
    x, paged, factors = quantised(x, 8, "NHD")
    # Of each cache its own tensors, so that rows of factors may lie apart.
    apart = tuple(generate.strided(f, 2, 3, 0x7F) for f in paged_views(factors, "NHD"))
    for backend in backends(device):
        wrapper = flashinfer.BatchPrefillWithPagedKVCacheWrapper(workspace(device), backend=backend)
        wrapper.plan(
            x.qo_indptr, paged.indptr, paged.indices, paged.last_page_len, 2 * group, 2, dim, 8, head_dim_vo=dim_vo,
            causal=True, q_data_type=HALF, kv_data_type=torch.uint8,
        )  # fmt: skip
        for scales in (factors, apart):
            result = wrapper.run(
                x.q, paged.kv_cache, return_lse=True, kv_block_scales=scales, k_scale=SCALES.k_scale,
                v_scale=SCALES.v_scale,
            )  # fmt: skip
            check(result, x, o, SCALES)


@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16))
def test_query_dtypes(dtype, device):
    if dtype == torch.bfloat16 and device.type == "cpu":
        names = ("reference",)
    else:
        names = backends(device)
    x = batch(device, kv=[33, 9], dtype=dtype)
    x, paged, factors = quantised(replace(x, k=x.k.half(), v=x.v.half()), 8, "HND")
    x = replace(x, k=x.k.to(dtype), v=x.v.to(dtype))
    o = Options(pos_encoding_mode="ROPE_LLAMA") if dtype == torch.float32 else Options()
    for backend in names:
        plan = dict(pos_encoding_mode=o.pos_encoding_mode)
        result = run_decode(x, paged, factors, backend, plan, k_scale=SCALES.k_scale, v_scale=SCALES.v_scale)
        check(result, x, o, SCALES)


def whole(x, page_size, layout):
    """As `quantised`, by `nvfp4_quantize_paged_kv_cache`, whose factors of V are interleaved."""
    torch.manual_seed(2)
    paged = generate.paged(x, page_size, layout, fill=0.0)
    k, v = paged.caches
    codes, factors, *scales = nvfp4_quantize_paged_kv_cache(k, v, layout)
    # V in the place of K has the same factors row by row.
    _, (v_rows, _), *_ = nvfp4_quantize_paged_kv_cache(v, v, layout)
    kv = []
    for code, factor in zip(paged_views(codes, layout), paged_views((factors[0], v_rows), layout)):
        pages = values(code, factor)
        rows = []
        for i, n in enumerate(x.kv_indptr.diff().tolist()):
            mine = paged.indices[paged.indptr[i] : paged.indptr[i + 1]].long()
            rows.append(pages[mine].flatten(0, 1)[:n])
        kv.append(torch.cat(rows))
    return replace(x, k=kv[0], v=kv[1]), replace(paged, kv_cache=codes), factors, Extras(None, None, 1.0, *scales)


@pytest.mark.parametrize("layout", ("NHD", "HND"))
@pytest.mark.parametrize("dim", (64, 96))
def test_interleaved_factors(dim, layout, device):
    x, paged, factors, extras = whole(batch(device, dim=dim), 8, layout)
    extras.masks = []
    scales = dict(k_scale=extras.k_scale, v_scale=extras.v_scale)
    check(run_decode(x, paged, factors, "trtllm-gen", **scales), x, Options(), extras)
    table = block_table(blocks(paged, KV, 9), lens(KV, device), q_len=1)
    asked = PlanOptions("paged", 6, 2, dim, dim, 8, HALF, torch.uint8, interleaved=True).checked()
    k_factors, v_factors = paged_views(factors, layout)
    for backend in backends(device):
        result = run_direct(
            asked, table, x.q, paged.kv_cache, lambda kv: paged_views(kv, layout), kv_tokens=400, longest_q=1,
            backend=backend, return_lse=True, k_factors=k_factors, v_factors=v_factors, **scales,
        )  # fmt: skip
        check(result, x, Options(), extras)


def test_engine_functions(device):
    x, paged, factors, extras = whole(batch(device), 8, "HND")
    extras.masks = []
    table, count = blocks(paged, KV, 9), lens(KV, device)
    bmm1, bmm2 = extras.k_scale * 64**-0.5, extras.v_scale
    scratch = workspace(device, 16)
    for backend in ("trtllm-gen", "auto"):
        if backend == "auto" and device.type == "cuda" and torch.cuda.get_device_capability()[0] == 12:
            continue
        result = trtllm_batch_decode_with_kv_cache(
            x.q, paged.kv_cache, scratch, table, count, 64, bmm1, bmm2, backend=backend, kv_cache_sf=factors,
            return_lse=True,
        )  # fmt: skip
        check(result, x, Options(), extras)
    tensors = (torch.tensor([scale], device=device) for scale in (bmm1, bmm2))
    result = trtllm_batch_context_with_kv_cache(
        x.q, paged.kv_cache, scratch, table, count, 1, 64, *tensors, len(KV), x.qo_indptr, None,
        kv_block_scales=factors, return_lse=True,
    )  # fmt: skip
    check(result, x, Options(), extras)


def test_xqa_reads_factors_row_by_row(device):
    x, paged, factors = quantised(batch(device), 8, "NHD")
    call = workspace(device, 16), blocks(paged, KV, 9), lens(KV, device), 64, SCALES.k_scale * 64**-0.5, SCALES.v_scale
    same = trtllm_batch_decode_with_kv_cache(
        x.q, paged.kv_cache, *call, backend="xqa", kv_layout="NHD", kv_block_scales=factors, return_lse=True
    )
    check(same, x, Options(), SCALES)
    assert_bitwise(xqa_batch_decode_with_kv_cache(x.q, paged.kv_cache, *call, kv_cache_sf=factors), same[0])
    halves = paged.caches + paged_views(factors, "NHD")
    out = torch.empty_like(x.q)[:, None]
    k, v, k_sf, v_sf = halves
    flashinfer.xqa(
        x.q[:, None], k, v, call[1], call[2][:, None], out, call[0], call[0], 2, 8, kv_layout="NHD",
        k_sf_cache=k_sf, v_sf_cache=v_sf,
    )  # fmt: skip
    plain = trtllm_batch_decode_with_kv_cache(
        x.q, paged.kv_cache, *call[:4], 64**-0.5, backend="xqa", kv_layout="NHD", kv_block_scales=factors
    )
    assert_bitwise(out[:, 0], plain)


def test_what_was_appended(device):
    """The cache that the append writes is the one that decode reads, and a held launch follows new factors."""
    torch.manual_seed(3)
    k, v = (generate.randn(12, 2, 64, dtype=HALF, device=device) for _ in range(2))
    cache = torch.zeros(3, 2, 4, 2, 32, dtype=torch.uint8, device=device)
    factors = torch.zeros(3, 2, 4, 2, 4, dtype=torch.uint8, device=device)
    nvfp4_quantize_append_paged_kv_cache_with_slot_mapping(
        k, v, torch.arange(12, device=device), cache, factors, SCALES.k_scale, SCALES.v_scale
    )
    rows = [values(c, f).flatten(0, 1) for c, f in zip(paged_views(cache, "NHD"), paged_views(factors, "NHD"))]
    q = generate.randn(1, 4, 64, dtype=HALF, device=device)
    x = generate.Ragged(q, *rows, generate.indptr([1], device), generate.indptr([12], device))
    for backend in backends(device):
        wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(workspace(device), backend=backend)
        wrapper.plan(
            torch.tensor([0, 3]), torch.arange(3), torch.tensor([4]), 4, 2, 64, 4, q_data_type=HALF,
            kv_data_type=torch.uint8,
        )  # fmt: skip
        call = dict(return_lse=True, k_scale=SCALES.k_scale, v_scale=SCALES.v_scale)
        for _ in range(2):
            check(wrapper.run(q, cache, kv_block_scales=factors, **call), x, Options(), SCALES)
        less = factors - 8  # an exponent less: half of each value
        halved = replace(x, k=x.k / 2, v=x.v / 2)
        check(wrapper.run(q, cache, kv_block_scales=less, **call), halved, Options(), SCALES)


def test_bad_input(device):
    x, paged, factors = quantised(batch(device), 8, "NHD")
    k, v = paged_views(factors, "NHD")
    decode = lambda given, plan=None: run_decode(x, paged, given, "auto", plan)
    with pytest.raises(ValueError, match=r"^kv_block_scales\[0\]: got None"):
        decode(None)
    for bad, message in (
        ((k[..., :3], v), r"^kv_block_scales\[0\]: got .*3\)"),
        ((k, v[:-1]), r"^kv_block_scales\[1\]: got"),
        ((k.float(), v), r"^kv_block_scales\[0\]: got torch.float32"),
        ((k, v[0]), r"^kv_block_scales\[1\]: got"),
        (k, "^kv_block_scales: got"),
    ):
        with pytest.raises(ValueError, match=message):
            decode(bad)
    with pytest.raises(ValueError, match=r"^paged_kv_cache\[0\]: got torch.uint8"):
        decode(factors, dict(kv_data_type=HALF))
    with pytest.raises(ValueError, match="^head_dim_qk: got 72"):
        PlanOptions("paged", 2, 2, 72, 64, 8, HALF, "nvfp4").checked()
    with pytest.raises(ValueError, match="^page_size: got 5"):
        PlanOptions("paged", 2, 2, 64, 64, 5, HALF, "nvfp4", interleaved=True).checked()
    with pytest.raises(ValueError, match="^k: got torch.uint8"):
        flashinfer.single_decode_with_kv_cache(x.q[0], k[0], v[0])
    half = generate.paged(x, 8)
    wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(workspace(device))
    wrapper.plan(half.indptr, half.indices, half.last_page_len, 6, 2, 64, 8)
    with pytest.raises(ValueError, match="^kv_block_scales: got tensors"):
        wrapper.run(x.q, half.kv_cache, kv_block_scales=factors)
    table, count = blocks(paged, KV, 9), lens(KV, device)
    run = lambda **call: trtllm_batch_decode_with_kv_cache(
        x.q, paged.kv_cache, workspace(device, 16), table, count, 64, kv_layout="NHD", **call
    )
    with pytest.raises(ValueError, match=r"^kv_block_scales\[0\]: got None"):
        run()
    with pytest.raises(ValueError, match="^kv_cache_sf: got"):
        run(kv_cache_sf=factors, kv_block_scales=factors)
    for backend in ("sm80", "sm90"):
        with pytest.raises(UnsupportedConfig, match="reference|nvfp4|Gluon|wgmma"):
            run(kv_cache_sf=factors, backend=backend)
