"""Batches that mix prefill and decode: BatchAttention, attention with sinks, POD."""

import pytest
import torch

import flashinfer
from flashinfer._core.checks import UnsupportedConfig
from flashinfer.testing import generate
from tests.ops.attention.cases import check, workspace
from tests.ops.attention.oracle import Extras, Options
from tests.ops.attention.test_engines import close

HALF = torch.float16
QO, KV = [1, 33, 1, 0, 5, 1, 2], [40, 33, 1, 7, 12, 0, 65]


def batch(device, qo=QO, kv=KV, **kwargs):
    return generate.ragged_batch(qo, kv, 4, 2, 64, dtype=HALF, device=device, **kwargs)


def host(tensor, on_host):
    return tensor.cpu() if on_host else tensor


@pytest.mark.parametrize("on_host", (False, True))
@pytest.mark.parametrize("layout", ("NHD", "HND"))
def test_batch_attention(layout, on_host, device):
    x = batch(device)
    paged = generate.paged(x, 8, layout)
    lens = torch.tensor(KV, dtype=torch.int32, device=device)
    # Once through the interpreter is enough.
    interpret = layout == "NHD" and on_host
    for backend in ("auto", "portable") if interpret or device.type == "cuda" else ("auto",):
        wrapper = flashinfer.BatchAttention(layout, device)
        wrapper._backend = backend
        for causal, cap in ((True, None), (False, 2.0)):
            wrapper.plan(
                host(x.qo_indptr, on_host), host(paged.indptr, on_host), paged.indices, host(lens, on_host), 4, 2, 64,
                64, 8, causal, logits_soft_cap=cap, q_data_type=HALF, kv_data_type=HALF,
            )  # fmt: skip
            check(wrapper.run(x.q, paged.kv_cache), x, Options(causal=causal, logits_soft_cap=cap))
            if backend == "portable" and device.type == "cpu":
                continue
            got = wrapper.run(x.q, paged.kv_cache, k_scale=0.5, v_scale=2.0, logits_soft_cap=5.0)
            check(got, x, Options(causal=causal, logits_soft_cap=5.0), Extras(k_scale=0.5, v_scale=2.0))
            out, lse = torch.empty_like(x.q), torch.empty(x.q.shape[:2], device=device)
            got = wrapper.run(x.q, paged.kv_cache, out, lse)
            assert got[0] is out and got[1] is lse
            check(got, x, Options(causal=causal, logits_soft_cap=cap))


def test_batch_attention_with_more_pages_than_keys(device):
    """A request's keys are the first of its pages, which may be more than they fill."""
    x = batch(device, [1, 2], [5, 9])
    paged = generate.paged(x, 4, spare=6)
    used = paged.indices.tolist()
    free = [p for p in range(paged.kv_cache.shape[0]) if p not in used]
    indices = torch.tensor(used[:2] + free[:2] + used[2:] + free[2:3], dtype=torch.int32, device=device)
    indptr, lens = generate.indptr([4, 4], device), torch.tensor([5, 9], dtype=torch.int32, device=device)
    for on_host in (True, False):
        wrapper = flashinfer.BatchAttention(device=device)
        sizes = (4, 2, 64, 64, 4)
        wrapper.plan(
            host(x.qo_indptr, on_host), host(indptr, on_host), indices, host(lens, on_host), *sizes, True,
            q_data_type=HALF, kv_data_type=HALF,
        )  # fmt: skip
        check(wrapper.run(x.q, paged.kv_cache), x, Options(causal=True))
    for wrong in ([17, 9], [-1, 9]):
        with pytest.raises(ValueError, match="^kv_len_arr:"):
            wrapper.plan(x.qo_indptr.cpu(), indptr.cpu(), indices, torch.tensor(wrong), *sizes)
    with pytest.raises(ValueError, match="^kv_len_arr:"):
        wrapper.plan(x.qo_indptr, indptr, indices, lens[:1], *sizes)


def test_batch_attention_refuses_by_name(device):
    wrapper = flashinfer.BatchAttention(device=device)
    x = batch(device, [1], [5])
    paged = generate.paged(x, 8)
    tables = (x.qo_indptr, paged.indptr, paged.indices, torch.tensor([5], dtype=torch.int32))
    with pytest.raises(ValueError, match="plan"):
        wrapper.run(x.q, paged.kv_cache)
    with pytest.raises(UnsupportedConfig, match="^use_profiler:"):
        wrapper.plan(*tables, 4, 2, 64, 64, 8, use_profiler=True)
    wrapper.plan(*tables, 4, 2, 64, 64, 8, q_data_type=HALF, kv_data_type=HALF)
    with pytest.raises(UnsupportedConfig, match="^profiler_buffer:"):
        wrapper.run(x.q, paged.kv_cache, profiler_buffer=x.q)
    with pytest.raises(ValueError, match="^kv_cache_sf:"):
        wrapper.run(x.q, paged.kv_cache, kv_cache_sf=x.q)


def test_sinks_of_a_wrapper(device):
    x = batch(device)
    paged = generate.paged(x, 8)
    sinks = torch.tensor([0.3, -2.0, 5.0, 1.0], device=device)
    wrapper = flashinfer.BatchAttentionWithAttentionSinkWrapper(
        workspace(device), q_data_type=HALF, kv_data_type=HALF, head_dim_qk=64, head_dim_vo=64, window_left=9
    )
    tables = (x.qo_indptr, paged.indptr, paged.indices, paged.last_page_len)
    wrapper.plan(*tables, 4, 2, 64, 8, causal=True)
    o = Options(causal=True, window_left=9)
    check(wrapper.run(x.q, paged.kv_cache, sinks, return_lse=True), x, o, Extras(sinks=sinks))
    check(wrapper.run(x.q, paged.kv_cache, sinks=sinks, return_lse=True), x, o, Extras(sinks=sinks))
    o = Options(causal=True, window_left=9, sm_scale=0.3)
    check(wrapper.run(x.q, paged.kv_cache, sinks, 0.3, return_lse=True), x, o, Extras(sinks=sinks))
    with pytest.raises(ValueError, match="^head_dim_qk"):
        wrapper.plan(*tables, 4, 2, 128, 8)


@pytest.mark.parametrize("layout", ("NHD", "HND"))
def test_pod(layout, device):
    p = batch(device, [17], [33])
    d = batch(device, [1] * 4, [5, 0, 40, 12])
    paged = generate.paged(d, 8, layout)
    k, v = (t.transpose(0, 1).contiguous() if layout == "HND" else t for t in (p.k, p.v))
    wrapper = flashinfer.PODWithPagedKVCacheWrapper(workspace(device), layout)
    wrapper.plan(paged.indptr, paged.indices, paged.last_page_len, 4, 2, 64, 8, q_data_type=HALF, window_left=20)
    common = dict(kv_layout_p=layout, kv_layout_d=layout, causal_p=True)
    of_p, of_d = wrapper.run(
        p.q, k, v, d.q, paged.kv_cache, return_lse_p=True, return_lse_d=True, q_scale=0.5, v_scale=2.0, **common
    )
    extras = Extras(q_scale=0.5, v_scale=2.0)
    check(of_p, p, Options(causal=True), extras)
    check(of_d, d, Options(window_left=20), extras)
    mask = generate.random_mask([17], [33], device=device)
    of_p, of_d = wrapper.run(
        p.q, k, v, d.q, paged.kv_cache, mask.view(17, 33), window_left_d=3, sm_scale_d=0.2, **common
    )
    close(of_p, p, Options(), Extras([mask]))
    close(of_d, d, Options(window_left=3, sm_scale=0.2))
    of_p, of_d = wrapper.run(p.q, k, v, d.q, paged.kv_cache, sm_scale_p=0.3, **common)
    close(of_p, p, Options(causal=True, sm_scale=0.3))
    close(of_d, d, Options(window_left=20))
    # A plan that is refused leaves the one before it.
    with pytest.raises(ValueError, match="^num_qo_heads: got 3"):
        wrapper.plan(paged.indptr, paged.indices, paged.last_page_len, 3, 2, 64, 8, window_left=3, sm_scale=0.2)
    close(wrapper.run(p.q, k, v, d.q, paged.kv_cache, **common)[1], d, Options(window_left=20))
    for name in ("custom_mask_d", "packed_custom_mask_d"):
        with pytest.raises(ValueError, match=f"^{name}:"):
            wrapper.run(p.q, k, v, d.q, paged.kv_cache, **common, **{name: mask})


@pytest.mark.parametrize(
    "name, wrong",
    (("q_p", lambda t: t[0]), ("k_p", lambda t: t.bool()), ("k_p", lambda t: t[..., :32]), ("v_p", lambda t: t[:-1]),
     ("q_d", lambda t: t.float()), ("paged_kv_cache_d", lambda t: t[..., :32]), ("sm_scale_p", "a"),
     ("window_left_p", -3), ("pos_encoding_mode_p", "rope"), ("rope_theta_p", -1.0), ("return_lse_p", 2),
     ("return_lse_d", "no"), ("causal_p", "yes"), ("kv_layout_p", "DHN")),
)  # fmt: skip
def test_pod_names_the_argument_of_a_part(name, wrong, device):
    p, d = batch(device, [17], [33]), batch(device, [1] * 4, [5, 0, 40, 12])
    paged = generate.paged(d, 8)
    wrapper = flashinfer.PODWithPagedKVCacheWrapper(workspace(device))
    wrapper.plan(paged.indptr, paged.indices, paged.last_page_len, 4, 2, 64, 8, q_data_type=HALF)
    given = dict(q_p=p.q, k_p=p.k, v_p=p.v, q_d=d.q, paged_kv_cache_d=paged.kv_cache)
    with pytest.raises(ValueError, match=rf"^{name}\b.*: got "):
        wrapper.run(**given | {name: wrong(given[name]) if callable(wrong) else wrong})


@pytest.mark.parametrize("name", ("head_dim_qk", "head_dim_vo"))
def test_a_wrapper_of_sinks_has_whole_head_dims(name, device):
    with pytest.raises(ValueError, match=f"^{name}: got nan; allowed: an integer"):
        flashinfer.BatchAttentionWithAttentionSinkWrapper(workspace(device), **{name: float("nan")})


@pytest.mark.parametrize("tables", ("host", "device"))
@pytest.mark.parametrize("rows", ((1, 1, 1, 1), (1, 3, 2, 1)))
@pytest.mark.parametrize("caches", (1, 2))
def test_batch_pod(caches, rows, tables, device):
    qo, kv = [17, 0, 5], [33, 4, 5]
    p, d = batch(device, qo, kv), batch(device, rows, [5, 3, 40, 12])
    pages_p, pages_d = generate.paged(p, 8), generate.paged(d, 8)
    cache_p, cache_d, indices_d = pages_p.kv_cache, pages_d.kv_cache, pages_d.indices
    if caches == 1:
        indices_d = indices_d + len(cache_p)
        cache_p = cache_d = torch.cat([cache_p, cache_d])
    wrapper = flashinfer.BatchPODWithPagedKVCacheWrapper(workspace(device))
    mask = generate.random_mask(qo, kv, device=device)
    masks = list(mask.split([a * b for a, b in zip(qo, kv)]))
    for _ in range(2):
        given = p.qo_indptr, pages_p.indptr, pages_p.indices, pages_p.last_page_len, d.qo_indptr, pages_d.indptr
        given = [t.cpu() if tables == "host" and t is not pages_p.indices else t for t in given]
        wrapper.plan(*given, indices_d, pages_d.last_page_len, 4, 2, 64, 8, data_type=HALF)
        causal = (dict(causal_p=True), Options(causal=True), None)
        masked = (dict(custom_mask_p=mask), Options(), Extras(masks))
        for kwargs, o, extras in (causal, masked, (dict(), Options(), None)):
            of_p, of_d = wrapper.run(p.q, cache_p, d.q, cache_d, return_lse=True, **kwargs)
            check(of_p, p, o, extras)
            check(of_d, d, Options())
            # One launch writes one tensor.
            alone = extras is not None or caches == 2 or (o.causal and max(rows) > 1)
            if device.type == "cpu" or tables == "host":
                in_one = of_p[0].untyped_storage().data_ptr() == of_d[0].untyped_storage().data_ptr()
                assert in_one != alone
        if device.type == "cpu" or tables == "host":
            with pytest.raises(ValueError, match="q_p: got 44 rows"):
                wrapper.run(torch.cat([p.q, p.q]), cache_p, d.q, cache_d)


@pytest.mark.parametrize("part", "pd")
@pytest.mark.parametrize(
    "name, wrong",
    (("qo_indptr", [0, 2**31 - 1, 2**31 - 1]), ("kv_indptr", [0, 1, 4]), ("kv_indptr", [0, 1, 1 << 20]),
     ("last_page_len", [9, 1]), ("last_page_len", [1, -1]), ("kv_indices", [0, 1, 1 << 31])),
)  # fmt: skip
def test_batch_pod_names_the_table_of_a_part(part, name, wrong):
    """Also where both parts are planned as one batch."""
    names = "qo_indptr", "kv_indptr", "kv_indices", "last_page_len"
    values = [0, 1, 2], [0, 1, 3], [0, 1, 2], [8, 8]
    tables = {f"{each}_{of}": torch.tensor(x) for of in "pd" for each, x in zip(names, values)}
    wrapper = flashinfer.BatchPODWithPagedKVCacheWrapper(workspace("cpu"))
    sizes = dict(num_qo_heads=4, num_kv_heads=2, head_dim=64, page_size=8)
    wrapper.plan(**tables, **sizes)
    of_rows = "_[pd]" if name == "qo_indptr" else f"_{part}"
    with pytest.raises(ValueError, match=f"^{name}{of_rows}:"):
        wrapper.plan(**tables | {f"{name}_{part}": torch.tensor(wrong)}, **sizes)
