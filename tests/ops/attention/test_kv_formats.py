"""Caches in FP8, INT8 and INT4 with float32 factors, against float64 attention over code * factor."""

from dataclasses import replace

import pytest
import torch

import flashinfer
from flashinfer._core.checks import UnsupportedConfig
from flashinfer.ops.kv_layout import paged_views
from flashinfer.testing import generate
from flashinfer.testing.compare import assert_bitwise
from tests.ops.attention.cases import backends, check, largest_logit, workspace
from tests.ops.attention.oracle import Extras, Options
from tests.ops.quantize import truth

HALF = torch.float16
KV = [5, 0, 40, 33, 17]
# name: (largest magnitude of a code, codes that share a factor, codes in a byte, dtype of the cache)
FORMATS = {
    "fp8_per_token_head": (448.0, 0, 1, torch.float8_e4m3fn),
    "int8_per_token_head": (127.0, 0, 1, torch.int8),
    "int4_per_token_head": (7.0, 0, 2, torch.uint8),
    "int4_group_64": (7.0, 64, 2, torch.uint8),
}
SCALES = dict(k_scale=0.5, v_scale=2.0)


def coded(rows, name):
    """Rows [n, heads, dim] in a format, by float64: bytes of codes, float32 factors, and what they stand for."""
    largest, width, packed, _ = FORMATS[name]
    blocks = rows.double().unflatten(-1, (-1, width or rows.shape[-1]))
    factors = (blocks.abs().amax(-1) / largest).float()
    scaled = blocks / factors.double().clamp(min=1e-30)[..., None]
    if name.startswith("fp8"):
        codes = truth.encode("e4m3", scaled)
        values = truth.decode("e4m3", codes)
        codes = codes.flatten(-2)
    else:
        values = scaled.round().clamp(-largest, largest)
        codes = values.to(torch.int8).view(torch.uint8).flatten(-2)
        codes = truth.pack(codes % 16) if packed == 2 else codes
    return codes, factors, (values * factors.double()[..., None]).flatten(-2)


def batch(device, qo=None, kv=KV, heads=(6, 2), dim=64, dtype=HALF, spread=6, **kwargs):
    """As generate's; magnitudes of rows of values differ by powers of two, and one row of each is zeros."""
    x = generate.ragged_batch(qo or [1] * len(kv), kv, *heads, dim, dtype=dtype, device=device, **kwargs)
    power = torch.randint(-spread, 1, (*x.v.shape[:2], 1), device=device)
    k, v = x.k.clone(), x.v * torch.exp2(power.float()).to(x.v.dtype)
    k[1], v[2] = 0, 0
    return replace(x, k=k, v=v)


def quantised(x, name, page_size=16, layout="NHD"):
    """A batch of what a cache stands for, the cache, and its factors. Slots of no token and spare pages are poison."""
    made = [coded(rows, name) for rows in (x.k, x.v)]
    torch.manual_seed(1)
    paged = generate.paged(replace(x, k=made[0][0], v=made[1][0]), page_size, layout, fill=0x7F)
    torch.manual_seed(1)
    factors = generate.paged(replace(x, k=made[0][1], v=made[1][1]), page_size, layout).kv_cache
    dtype = FORMATS[name][3]
    cache = paged.kv_cache
    cache = tuple(c.view(dtype) for c in cache) if isinstance(cache, tuple) else cache.view(dtype)
    return replace(x, k=made[0][2], v=made[1][2]), replace(paged, kv_cache=cache), factors


def run_decode(x, paged, factors, backend, name, plan=None, **run):
    wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(workspace(x.q.device), paged.kv_layout, backend=backend)
    wrapper.plan(
        paged.indptr, paged.indices, paged.last_page_len, x.q.shape[1], x.k.shape[1], x.q.shape[2], paged.page_size,
        q_data_type=x.q.dtype, kv_data_type=name, **(plan or {}),
    )  # fmt: skip
    return wrapper.run(x.q, paged.kv_cache, return_lse=True, kv_cache_sf=factors, **run)


def run_prefill(x, paged, factors, backend, name, o, **run):
    wrapper = flashinfer.BatchPrefillWithPagedKVCacheWrapper(workspace(x.q.device), paged.kv_layout, backend=backend)
    wrapper.plan(
        x.qo_indptr, paged.indptr, paged.indices, paged.last_page_len, x.q.shape[1], x.k.shape[1], x.q.shape[2],
        paged.page_size, head_dim_vo=x.v.shape[2], q_data_type=x.q.dtype, kv_data_type=name, **o.as_kwargs(),
    )  # fmt: skip
    return wrapper.run(x.q, paged.kv_cache, return_lse=True, kv_cache_sf=factors, **run)


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize(("page_size", "layout"), ((1, "NHD"), (16, "HND"), (24, "NHD")))
def test_decode(name, page_size, layout, device):
    x, paged, factors = quantised(batch(device), name, page_size, layout)
    for backend in backends(device):
        check(run_decode(x, paged, factors, backend, name), x, Options())
        # Bytes are codes too, and a window leaves blocks out.
        raw = replace(paged, kv_cache=paged.kv_cache.view(torch.uint8))
        result = run_decode(x, raw, factors, backend, name, dict(window_left=9), **SCALES)
        check(result, x, Options(window_left=9), Extras(**SCALES))


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize(
    "shape",
    ((64, 64, 1), (128, 64, 3), *(pytest.param(s, marks=pytest.mark.matrix) for s in ((256, 256, 2), (192, 128, 8)))),
)
def test_prefill(name, shape, device):
    dim, dim_vo, group = shape
    o = Options(causal=True, window_left=12 if dim == 128 else -1, logits_soft_cap=9.0 if dim == 256 else None)
    x = batch(device, qo=[3, 0, 17, 1, 2], heads=(2 * group, 2), dim=dim, head_dim_vo=dim_vo)
    x, paged, factors = quantised(x, name, 8)
    # Factors between rows of codes, as engines keep them: of each cache its own, far apart.
    apart = tuple(generate.strided(f, 2, 3, float("nan")) for f in paged_views(factors, "NHD"))
    sinks = generate.randn(2 * group, device=device)
    for backend in backends(device):
        for scales in (factors, apart):
            check(run_prefill(x, paged, scales, backend, name, o, **SCALES), x, o, Extras(**SCALES))
        result = run_prefill(x, paged, factors, backend, name, o, sinks=sinks)
        check(result, x, o, Extras(sinks=sinks))


@pytest.mark.parametrize("name", FORMATS)
def test_values_of_any_magnitude(name, device):
    """Rows of values of 2^-30 to 2^20, the heaviest key's the least: weights times factors leave float16's range."""
    x = batch(device, kv=[70, 3], dim=64, dtype=torch.float32, spread=0)
    power = torch.exp2(torch.randint(-30, -10, (*x.v.shape[:2], 1), device=device).float())
    power[0], power[70] = 2.0**-29, 2.0**20
    x = replace(x, q=x.q * 4, v=x.v * power)
    x.k[0] = 8 * x.q[0].view(2, 3, 64).mean(1)
    x, paged, factors = quantised(x, name, 16)
    # Logits are large: a weight is off by their roundings, times what it weighs.
    terms = float(run_decode(x, *_magnitudes(paged, factors, name), "reference", name)[0].max())
    terms *= largest_logit(x, Options())
    for backend in backends(device):
        check(run_decode(x, paged, factors, backend, name), x, Options(), terms=terms)
        half = replace(x, q=x.q.half())
        out, _ = run_decode(half, paged, factors, backend, name, dict(o_data_type=torch.float32))
        exact, _ = run_decode(replace(x, q=half.q.float()), paged, factors, "reference", name)
        # Weights times factors are rounded to float16, and of several factors a row these and what they make of codes:
        # 2^-11 of |weight * value| each. What is 2^-28 of the largest is a subnormal, and off by up to 2^-39 of that.
        bound = run_decode(replace(x, q=half.q.float()), *_magnitudes(paged, factors, name), "reference", name)[0]
        largest = torch.stack([x.request(i)[2].abs().amax((0, 2)).repeat_interleave(3) for i in range(2)])
        roundings = (3 if FORMATS[name][1] else 1) * 2.0**-11 + 2.0**-18
        assert ((out - exact).abs() <= roundings * bound + 70 * 2.0**-39 * largest[..., None]).all()


def _magnitudes(paged, factors, name):
    """The cache with values of |code| * factor."""
    cache = paged.kv_cache.clone()
    v = cache[:, 1]
    if v.dtype == torch.int8:
        v.copy_(v.clamp(min=-127).abs())
    elif v.dtype == torch.uint8:
        halves = truth.unpack(v).view(torch.int8)
        v.copy_(truth.pack(torch.where(halves > 7, 16 - halves, halves)))
    else:
        v.view(torch.uint8).bitwise_and_(0x7F)
    return replace(paged, kv_cache=cache), factors


@pytest.mark.parametrize("name", FORMATS)
def test_rotary_and_wide_queries(name, device):
    o = Options(pos_encoding_mode="ROPE_LLAMA")
    x, paged, factors = quantised(batch(device, kv=[33, 9], dim=128, dtype=torch.float32), name)
    for backend in backends(device):
        check(run_decode(x, paged, factors, backend, name, dict(pos_encoding_mode="ROPE_LLAMA")), x, o)


@pytest.mark.parametrize("name", FORMATS)
def test_bfloat16_queries(name, device):
    """Products are in float16, which the interpreter has right; queries are over a power of two of their row."""
    x = batch(device, dim=128, dtype=torch.bfloat16)
    x = replace(x, q=x.q * torch.exp2(torch.arange(-20, 10, 6, device=device)).to(x.q)[:, None, None])
    x, paged, factors = quantised(x, name)
    for backend in backends(device):
        check(run_decode(x, paged, factors, backend, name), x, Options())


@pytest.mark.parametrize("name", FORMATS)
def test_batch_attention(name, device):
    x, paged, factors = quantised(batch(device, qo=[3, 0, 17, 1, 2]), name)
    wrapper = flashinfer.BatchAttention("NHD", device)
    wrapper.plan(
        x.qo_indptr, paged.indptr, paged.indices, x.kv_indptr.diff().int(), 6, 2, 64, 64, 16, causal=True,
        q_data_type=HALF, kv_data_type=name,
    )  # fmt: skip
    check(wrapper.run(x.q, paged.kv_cache, kv_cache_sf=factors), x, Options(causal=True))


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("layout", ("NHD", "HND"))
def test_ragged_rows(name, layout, device):
    x = batch(device, qo=[3, 1, 17, 1, 2])
    made = [coded(rows, name) for rows in (x.k, x.v)]
    lay = lambda rows: rows.transpose(0, 1).contiguous() if layout == "HND" else rows
    k, v = (lay(codes).view(FORMATS[name][3]) for codes, _, _ in made)
    scales = tuple(lay(factors) for _, factors, _ in made)
    stands_for = replace(x, k=made[0][2], v=made[1][2])
    for backend in backends(device):
        wrapper = flashinfer.BatchPrefillWithRaggedKVCacheWrapper(workspace(device), layout, backend=backend)
        wrapper.plan(x.qo_indptr, x.kv_indptr, 6, 2, 64, causal=True, q_data_type=HALF, kv_data_type=name)
        result = wrapper.run(x.q, k, v, return_lse=True, kv_cache_sf=scales)
        check(result, stands_for, Options(causal=True))


@pytest.mark.parametrize("name", FORMATS)
def test_factors_that_are_not_numbers(name, device):
    """A NaN factor makes the outputs NaN that see it, and no other request's."""
    x, paged, factors = quantised(batch(device, kv=[20, 20]), name)
    want = run_decode(x, paged, factors, "reference", name)[0]
    first = int(paged.indices[0])
    factors[first, 1, 0] = float("nan")
    for backend in backends(device):
        out = run_decode(x, paged, factors, backend, name)[0]
        assert out[0].isnan().all()
        assert out[1].isfinite().all() and (out[1] - want[1]).abs().max() < 0.01 * want[1].abs().max()


def test_a_splits_result_is_deterministic(device):
    """With fixed splits a request's bits do not depend on the batch it is in."""
    name = "int8_per_token_head"
    x, paged, factors = quantised(batch(device, kv=[40, 33, 90]), name)
    whole = run_decode(x, paged, factors, "portable", name, dict(fixed_split_size=32))
    alone = replace(paged, indptr=paged.indptr[:2], last_page_len=paged.last_page_len[:1])
    result = run_decode(replace(x, q=x.q[:1]), alone, factors, "portable", name, dict(fixed_split_size=32))
    for one, all in zip(result, whole):
        assert_bitwise(one, all[:1])


def test_names():
    plan = lambda kv: flashinfer.BatchDecodeWithPagedKVCacheWrapper(workspace("cpu")).plan(
        torch.tensor([0, 1]), torch.tensor([0]), torch.tensor([3]), 2, 2, 64, 4, kv_data_type=kv
    )
    for name in FORMATS:
        plan(name)
    for name in ("int3_per_token", "int8", torch.int8, "int4"):
        with pytest.raises(ValueError, match="^kv_data_type.*: got .*i.*; allowed: .*nvfp4.*int4_group_64"):
            plan(name)


@pytest.mark.parametrize("name", FORMATS)
def test_bad_input(name, device):
    x, paged, factors = quantised(batch(device), name)
    k, v = paged_views(factors, "NHD")
    for bad, message in (
        (None, r"^kv_block_scales\[0\]: got None"),
        ((k, v[:-1]), r"^kv_block_scales\[1\]: got"),
        ((k.half(), v), r"^kv_block_scales\[0\]: got torch.float16; allowed: torch.float32"),
        ((k[..., 0], v), r"kv_block_scales\[0\]: got"),
    ):
        with pytest.raises(ValueError, match=message.replace("kv_block_scales", "(kv_block_scales|kv_cache_sf)")):
            run_decode(x, paged, bad, "auto", name)
    with pytest.raises(ValueError, match=r"^(paged_kv_cache\[0\]|k): got torch.float16; allowed: .* of " + name):
        run_decode(x, replace(paged, kv_cache=paged.kv_cache.view(torch.uint8).half()), factors, "auto", name)
    for backend in ("sm80", "sm90"):
        with pytest.raises(UnsupportedConfig, match="reference|kv dtype|wgmma|Gluon|k and v"):
            run_decode(x, paged, factors, backend, name)


def planned_on_a_card(card, name):
    """A plan and two runs in CUDA-graph mode: the kernel that is launched, and its factors' places."""
    wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(
        torch.empty(1 << 20, dtype=torch.uint8, device="cuda"), use_cuda_graph=True,
        paged_kv_indptr_buffer=torch.empty(4, dtype=torch.int32, device="cuda"),
        paged_kv_indices_buffer=torch.empty(8, dtype=torch.int32, device="cuda"),
        paged_kv_last_page_len_buffer=torch.empty(3, dtype=torch.int32, device="cuda"),
    )  # fmt: skip
    _, width, packed, dtype = FORMATS[name]
    cache = torch.empty(8, 2, 16, 2, 128 // packed, dtype=dtype, device="cuda")
    factors = torch.empty(8, 2, 16, 2, 128 // width if width else 1, device="cuda")
    q = torch.empty(3, 8, 128, dtype=torch.bfloat16, device="cuda")
    for indptr in ([0, 2, 3, 6], [0, 1, 2, 3]):
        wrapper.plan(
            torch.tensor(indptr), torch.arange(indptr[-1]), torch.tensor([16, 3, 1]), 8, 2, 128, 16,
            q_data_type=torch.bfloat16, kv_data_type=name,
        )  # fmt: skip
        wrapper.run(q, cache, kv_cache_sf=factors)
    return wrapper._active.kernels.latest.variant.name


@pytest.mark.matrix
@pytest.mark.parametrize("name", ("int8_per_token_head", "int4_group_64"))
def test_plans_on_a_card(name, on_card):
    assert on_card(planned_on_a_card, name) == "portable"
