"""Random calls of attention over keys and values in formats with factors, under every option that changes a logit."""

import torch

import flashinfer
from flashinfer.ops.kv_layout import paged_views
from flashinfer.testing import generate
from flashinfer.testing.fuzz import PAGE_SIZES, Call
from tests.fuzz.attend import masks_of, names_of, options_of
from tests.fuzz.wrappers import Results, Scales, offsets_within, sinks_of, splits_of, table, workspace
from tests.ops.attention import cases
from tests.ops.attention.oracle import Extras
from tests.ops.attention.test_kv_formats import FORMATS, coded, quantised

LENGTHS = (0, 1, 5, 16, 33, 70)


def batch_of(draw, decode):
    heads, kv_heads = draw.pick((4, 2), (6, 2), (8, 1), (2, 2))
    dim = draw.fitting((64, 128), heads * 4)
    kv = [draw.pick(*LENGTHS) for _ in range(draw.pick(1, 3))]
    qo = [1] * len(kv) if decode else [draw.pick(0, 1, min(n, 17)) for n in kv]
    qo = [n if n * heads * dim <= draw.largest else 1 for n in qo]
    return generate.ragged_batch(qo, kv, heads, kv_heads, dim, dtype=draw.half(), device=draw.device), qo, kv


def factors_as(draw, factors, layout):
    """Factors in one tensor or two, with gaps between rows of a token."""
    if draw.chance():
        return factors
    parts = paged_views(factors, "NHD")
    if draw.chance():
        parts = [generate.strided(t, draw.integer(0, 2), 3) for t in parts]
    return tuple(parts)


def pages(draw):
    """The wrappers with pages, and BatchAttention."""
    kind = draw.pick("decode", "paged", "holistic")
    name, layout, page = draw.pick(*FORMATS), draw.pick("NHD", "HND"), draw.pick(*PAGE_SIZES)
    x, qo, kv = batch_of(draw, kind == "decode")
    rows, heads, dim = x.q.shape
    mask, masks = masks_of(draw, qo, kv) if kind == "paged" else (None, [])
    o = options_of(draw, dim)
    if kind == "holistic":
        o.pos_encoding_mode, o.window_left, o.rope_scale, o.rope_theta = "NONE", -1, None, None
    o.causal = o.causal and kind != "decode"
    x, paged, factors = quantised(x, name, page, layout)
    scales = Scales(draw, heads, x.k.shape[1])
    if kind == "holistic":
        scales.given.pop("q_scale", None)
        scales.factors.pop("q_scale", None)
    sinks = None if kind == "holistic" else sinks_of(draw, heads)
    results = Results(draw, rows, heads, dim, x.q.dtype, ("NH", "HN") if kind == "paged" else ("NH",))
    indptr, indices = offsets_within(draw, paged.indptr, paged.indices)
    sizes = dict(num_qo_heads=heads, num_kv_heads=x.k.shape[1], page_size=page)
    sizes |= dict(q_data_type=x.q.dtype, kv_data_type=name)
    known = o.as_kwargs()
    if kind == "decode":
        known.pop("causal")
        wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(workspace(draw), layout, backend=draw.backend)
        tables = dict(indptr=indptr, indices=indices, last_page_len=paged.last_page_len)
        sizes |= dict(head_dim=dim) | splits_of(draw)
    elif kind == "paged":
        wrapper = flashinfer.BatchPrefillWithPagedKVCacheWrapper(workspace(draw), layout, backend=draw.backend)
        tables = dict(qo_indptr=x.qo_indptr, paged_kv_indptr=indptr, paged_kv_indices=indices,
                      paged_kv_last_page_len=paged.last_page_len)  # fmt: skip
        sizes |= dict(head_dim_qk=dim, custom_mask=mask) | splits_of(draw)
    else:
        known = dict(causal=o.causal, sm_scale=o.sm_scale, logits_soft_cap=o.logits_soft_cap)
        wrapper = flashinfer.BatchAttention(layout, draw.device)
        tables = dict(qo_indptr=x.qo_indptr, kv_indptr=indptr, kv_indices=indices, kv_len_arr=x.kv_indptr.diff())
        sizes |= dict(head_dim_qk=dim, head_dim_vo=None)
        results.given.pop("return_lse")
    planned = {key: table(draw, t) for key, t in tables.items()} | sizes | known
    cache = paged.kv_cache
    run = dict(kv_cache_sf=factors_as(draw, factors, layout), **scales.given, **results.given)
    if sinks is not None:
        run["sinks"] = sinks
    if draw.chance():
        cache = tuple(paged.caches)
    if draw.chance():
        cache = tuple(t.view(torch.uint8) for t in cache) if isinstance(cache, tuple) else cache.view(torch.uint8)

    def attend(**arguments):
        wrapper.plan(**{key: arguments[key] for key in planned})
        return wrapper.run(x.q, cache, **run)

    def check(result):
        extras = Extras(masks=masks, sinks=sinks)
        cases.check(results.plain(result), scales.truth(x), o, extras, x.q.dtype)

    return Call(attend, planned | dict(cache=cache) | run, check, names_of(type(wrapper)))


def rows(draw):
    """The ragged wrapper."""
    name, layout = draw.pick(*FORMATS), draw.pick("NHD", "HND")
    x, qo, kv = batch_of(draw, False)
    mask, masks = masks_of(draw, qo, kv)
    rows, heads, dim = x.q.shape
    o = options_of(draw, dim)
    (k, k_factors, keys), (v, v_factors, values) = (coded(t, name) for t in (x.k, x.v))
    truth = generate.Ragged(x.q, keys, values, x.qo_indptr, x.kv_indptr)
    k, v = (t.view(FORMATS[name][3]) for t in (k, v))
    parts = [t.transpose(0, 1).contiguous() if layout == "HND" else t for t in (k, v, k_factors, v_factors)]
    scales, results = Scales(draw, heads, x.k.shape[1]), Results(draw, rows, heads, dim, x.q.dtype)
    wrapper = flashinfer.BatchPrefillWithRaggedKVCacheWrapper(workspace(draw), layout, backend=draw.backend)
    planned = dict(
        qo_indptr=table(draw, x.qo_indptr), kv_indptr=table(draw, x.kv_indptr), num_qo_heads=heads,
        num_kv_heads=x.k.shape[1], head_dim_qk=dim, q_data_type=x.q.dtype, kv_data_type=name, custom_mask=mask,
        **o.as_kwargs(), **splits_of(draw),
    )  # fmt: skip
    run = dict(kv_cache_sf=tuple(parts[2:]), **scales.given, **results.given)

    def attend(**arguments):
        wrapper.plan(**{key: arguments[key] for key in planned})
        return wrapper.run(x.q, *parts[:2], **run)

    def check(result):
        cases.check(results.plain(result), scales.truth(truth), o, Extras(masks=masks), x.q.dtype)

    shown = planned | dict(k=parts[0], v=parts[1]) | run
    return Call(attend, shown, check, names_of(flashinfer.BatchPrefillWithRaggedKVCacheWrapper))


FAMILIES = (pages, rows)
