"""The functions by which engines call attention without a plan, against attention written from its definition."""

import itertools
import math
from dataclasses import replace

import pytest
import torch

import flashinfer
from flashinfer._core.checks import UnsupportedConfig
from flashinfer.cudnn import cudnn_batch_decode_with_kv_cache, cudnn_batch_prefill_with_kv_cache
from flashinfer.decode import trtllm_batch_decode_with_kv_cache, xqa_batch_decode_with_kv_cache
from flashinfer.prefill import (
    fmha_v2_prefill_deepseek, trtllm_batch_context_with_kv_cache, trtllm_fmha_v2_prefill,
    trtllm_ragged_attention_deepseek,
)  # fmt: skip
from flashinfer.testing import generate
from flashinfer.testing.compare import assert_close
from tests.ops.attention import oracle
from tests.ops.attention.cases import check
from tests.ops.attention.oracle import Extras, Options
from tests.ops.attention.test_direct import blocks, lens

HALF = torch.float16
SCRATCH = torch.empty(0, dtype=torch.uint8)
KV = [5, 0, 40, 33, 64, 7]


def names(device, interpret=True):
    """The reference, or the kernels for the chip; and the portable one, on a CPU by the interpreter if `interpret`."""
    return ("auto", "portable") if interpret or device.type == "cuda" else ("auto",)


def batch(qo, device, kv=KV, heads=(4, 2), dim=64, dtype=HALF, **kwargs):
    return generate.ragged_batch(qo, kv, *heads, dim, dtype=dtype, device=device, **kwargs)


def paged(x, kv=KV, page_size=8, layout="HND"):
    made = generate.paged(x, page_size, layout)
    return made.kv_cache, blocks(made, kv, 9), lens(kv, x.q.device)


def decode(x, cache, tables, seq_lens, **kwargs):
    scale = kwargs.pop("bmm1_scale", x.q.shape[-1] ** -0.5)
    return trtllm_batch_decode_with_kv_cache(
        x.q, cache, SCRATCH, tables, seq_lens, 72, scale, return_lse=True, **kwargs
    )


@pytest.mark.parametrize("layout", ("HND", "NHD"))
def test_decode(layout, device):
    x = batch([1] * 6, device)
    cache, tables, seq_lens = paged(x, layout=layout)
    for backend in names(device):
        check(decode(x, cache, tables, seq_lens, kv_layout=layout, backend=backend), x, Options())
        o = Options(window_left=9)
        out = decode(x, cache, tables, seq_lens.view(torch.uint32), kv_layout=layout, backend=backend, window_left=9)
        check(out, x, o)


def test_decode_of_several_queries(device):
    o = Options(causal=True)
    x, y = batch([3] * 6, device), batch([3, 1, 0, 5, 2, 2], device)
    for backend in names(device):
        check(decode(x, *paged(x), q_len_per_req=3, backend=backend), x, o)
        check(decode(x, *paged(x), q_len_per_req=None, backend=backend), x, o)
        check(decode(y, *paged(y), cum_seq_lens_q=y.qo_indptr, max_q_len=5, backend=backend), y, o)
        check(decode(y, *paged(y), cum_seq_lens_q=y.qo_indptr, backend=backend, window_left=6), y,
              Options(causal=True, window_left=6))  # fmt: skip


def test_rows_of_no_request_stay_as_they_are(device):
    """Rows around those of the requests, as in a graph of more rows than a step has."""
    o, whole = Options(causal=True), batch([3, 1, 0, 5, 2, 2], device)
    rows = torch.full((3 + len(whole.q) + 2, *whole.q.shape[1:]), torch.nan, dtype=HALF, device=device)
    rows[3:-2] = whole.q
    x = replace(whole, q=rows)
    for backend in names(device):
        out, lse = torch.full_like(rows, 7), torch.full(rows.shape[:2], 7.0, device=device)
        decode(x, *paged(whole), cum_seq_lens_q=whole.qo_indptr + 3, max_q_len=5, backend=backend, out=out, lse=lse)
        check((out[3:-2], lse[3:-2]), whole, o)
        for left in (out, lse):
            assert (left[:3] == 7).all() and (left[-2:] == 7).all()


@pytest.mark.parametrize("given_as", ("float", "tensor", "log2"))
def test_scales_and_sinks(given_as, device):
    x = batch([1] * 6, device)
    cache, tables, seq_lens = paged(x)
    sinks = torch.tensor([0.3, -2.0, 5.0, -float("inf")], device=device)
    as_given = (lambda s: torch.tensor([s], device=device)) if given_as != "float" else float
    given = dict(bmm1_scale=as_given(0.25), bmm2_scale=as_given(3.0))
    if given_as == "log2":
        given |= dict(bmm1_scale=7.0, bmm1_scale_log2=torch.tensor([0.25 * math.log2(math.e)], device=device))
    extras = Extras(sinks=sinks, v_scale=3.0)
    for backend in names(device):
        got = decode(x, cache, tables, seq_lens, sinks=[sinks], o_scale=2.0, backend=backend, **given)
        check(got, x, Options(sm_scale=0.25), extras)


def test_one_cache_for_keys_and_values_and_other_strides(device):
    x = batch([1] * 6, device)
    x = replace(x, v=x.k)
    made = generate.paged(x, 8, "NHD")
    k = generate.strided(made.kv_cache[:, 0], 1)
    tables, seq_lens = blocks(made, KV, 9), lens(KV, device)
    shared = made.kv_cache[:, :1]
    for backend in names(device):
        check(decode(x, shared, tables, seq_lens, kv_layout="NHD", backend=backend), x, Options())
        check(decode(x, (k, k), tables, seq_lens.long(), kv_layout="NHD", backend=backend), x, Options())
        check(decode(x, shared, tables.cpu(), seq_lens.cpu(), kv_layout="NHD", backend=backend), x, Options())


@pytest.mark.parametrize("kind", ("bool", torch.uint16, torch.uint8))
@pytest.mark.parametrize("given_as", ("uniform", "ragged"))
def test_masks_of_draft_tokens(kind, given_as, device):
    qo = [4] * 6 if given_as == "uniform" else [4, 1, 0, 3, 2, 4]
    kv = [5, 4, 40, 33, 64, 7]
    x = batch(qo, device, kv)
    tree = torch.rand(sum(qo), 4) < 0.5
    tree[:, 0] = True
    masks, at = [], 0
    for nq, nkv in zip(qo, kv):
        seen = torch.ones(nq, nkv, dtype=torch.bool)
        seen[:, nkv - nq :] = tree[at : at + nq, :nq]
        masks.append(seen.flatten().to(device))
        at += nq
    if kind == "bool":
        mask = tree.to(device)
    else:
        words = (tree.long() << torch.arange(4)).sum(1)
        mask = torch.zeros(sum(qo), 2, dtype=kind)
        mask[:, 0] = words.to(kind)
        mask = mask.to(device)
    given = dict(q_len_per_req=4) if given_as == "uniform" else dict(cum_seq_lens_q=x.qo_indptr, max_q_len=4)
    mask = mask.view(6, 4, -1) if given_as == "uniform" else mask
    for backend in names(device, kind == torch.uint16):
        for window in (-1, 6):
            got = decode(x, *paged(x, kv), mask=mask, window_left=window, backend=backend, **given)
            check(got, x, Options(window_left=window), Extras(masks))


@pytest.mark.parametrize("place", ("first", "last", "without keys"))
def test_requests_without_drafts(place, device):
    """Nothing of the mask is read for them: there is none in front of the first row, and none behind the last."""
    qo, kv = {"first": ([0, 2], [17, 17]), "last": ([2, 0], [17, 17]), "without keys": ([2, 0], [2, 0])}[place]
    x = batch(qo, device, kv)
    mask = torch.tensor([[True, False], [True, True]], device=device)
    seen = [torch.ones(n, m, dtype=torch.bool, device=device) for n, m in zip(qo, kv)]
    seen[0 if qo[0] else 1][:, -2:] = mask
    for backend in names(device):
        got = decode(x, *paged(x, kv), mask=mask, backend=backend, cum_seq_lens_q=x.qo_indptr, max_q_len=2)
        check(got, x, Options(), Extras(seen))


@pytest.mark.parametrize("q_len", (1, 3, "ragged"))
@pytest.mark.parametrize("window", (-1, 5))
def test_ranks_of_context_parallelism_merge_to_the_whole(q_len, window, device):
    """Keys dealt out to ranks: each has its own pages, some none; outputs and LSE merge to those of the whole."""
    world, kv = 3, [5, 2, 40, 33, 0, 7]
    qo = [3, 1, 0, 2, 0, 3] if q_len == "ragged" else [q_len] * 6
    kv = [max(n, m) for n, m in zip(kv, qo)] if q_len != 1 else kv
    x = batch(qo, device, kv)
    given = dict(cum_seq_lens_q=x.qo_indptr, max_q_len=3) if q_len == "ragged" else dict(q_len_per_req=q_len)
    for backend in names(device, window >= 0):
        outs, lses = [], []
        for rank in range(world):
            local = [len(range(rank, n, world)) for n in kv]
            rows = [b + torch.arange(n)[rank::world] for b, n in zip(x.kv_indptr.tolist(), kv)]
            mine = torch.cat(rows).to(device)
            shard = generate.Ragged(x.q, x.k[mine], x.v[mine], x.qo_indptr, generate.indptr(local, device))
            out, lse = decode(
                shard, *paged(shard, local), cp_world=world, cp_rank=rank, window_left=window, backend=backend,
                causal_seqlens_kv_global=lens([n - m for n, m in zip(kv, qo)], device), **given,
            )  # fmt: skip
            outs.append(out)
            lses.append(lse)
        merged = flashinfer.merge_states(torch.stack(outs, 1), torch.stack(lses, 1))
        o = Options(causal=True, window_left=window)
        truth, truth_lse = oracle.batch(x, o, torch.float64)
        same, _ = oracle.batch(x, o, HALF)
        _, same_lse = oracle.batch(x, o, torch.float32)
        assert_close(merged[0], same, truth, "out")
        assert_close(merged[1], same_lse, truth_lse, "lse")


@pytest.mark.parametrize("dtype", (torch.float8_e4m3fn, torch.float8_e5m2))
def test_fp8_caches_and_outputs(dtype, device):
    if device.type == "cuda" and torch.cuda.get_device_capability(device) < (8, 9):
        pytest.skip("needs a GPU of compute capability 8.9, which converts to e4m3")
    x = batch([1] * 6, device, kv_dtype=dtype)
    cache, tables, seq_lens = paged(x)
    exact = 2 * oracle.batch(x, Options(), torch.float64)[0]
    # Rounding to the nearest float8 errs by half a step, and what is rounded by what float16 may.
    step = torch.finfo(dtype).eps * 2.0 ** exact.abs().clamp(min=torch.finfo(dtype).tiny).log2().floor()
    for backend in names(device):
        check(decode(x, cache, tables, seq_lens, backend=backend), x, Options())
        if backend == "portable" and device.type == "cpu":
            # Triton's interpreter (3.6) rounds to float8 by cutting.
            continue
        out, _ = decode(x, cache, tables, seq_lens, backend=backend, out_dtype=dtype, bmm2_scale=1.0 / 0.5,
                        o_scale=0.5)  # fmt: skip
        assert out.dtype == dtype
        assert ((out.double() - exact).abs() <= 0.5 * step + 2e-3 * exact.abs().max()).all()
        # Too large for the type: the largest, and no infinity or NaN.
        full, _ = decode(x, cache, tables, seq_lens, backend=backend, out_dtype=dtype, bmm2_scale=1e9)
        full, sign = full.float()[0], exact[0].sign()
        assert torch.equal(full, sign.float() * torch.finfo(dtype).max)


def test_context(device):
    qo = [3, 0, 17, 33, 2, 0]
    x = batch(qo, device)
    cache, tables, seq_lens = paged(x)
    cum_kv = generate.indptr(KV, device)
    for backend in names(device):
        for o in (Options(causal=True), Options(), Options(causal=True, window_left=6)):
            out = torch.full_like(x.q, float("nan"))
            got = trtllm_batch_context_with_kv_cache(
                x.q, cache, SCRATCH, tables, seq_lens, 33, 72, 0.125, 1.0, 6, x.qo_indptr, cum_kv, o.window_left,
                out, causal=o.causal, return_lse=True, backend=backend,
            )  # fmt: skip
            assert got[0].data_ptr() == out.data_ptr()
            check(got, x, o)


def test_ragged_of_deepseek(device):
    x = batch([3, 0, 17, 33, 2, 0], device, heads=(4, 4), dim=48, head_dim_vo=32)
    for backend in names(device):
        for causal in (False, True):
            got = trtllm_ragged_attention_deepseek(
                x.q, x.k, x.v, SCRATCH, lens(KV, device), 33, 64, 48**-0.5, 1.0, 1.0, 6, -1, x.qo_indptr, x.kv_indptr,
                False, causal, True, backend=backend,
            )  # fmt: skip
            check(got, x, Options(causal=causal))


def close(out, x, o, extras=None):
    truth, _ = oracle.batch(x, o, torch.float64, extras)
    same, _ = oracle.batch(x, o, out.dtype, extras)
    assert_close(out, same, truth, "out")


@pytest.mark.parametrize("layout", ("PACKED_QKV", "CONTIGUOUS_Q_KV", "SEPARATE_Q_K_V", "Q_PAGED_KV_NHD",
                                    "Q_PAGED_KV_HND"))  # fmt: skip
def test_fmha_v2(layout, device):
    packed = layout == "PACKED_QKV"
    x = batch(KV if packed else [3, 0, 17, 33, 2, 0], device, heads=(4, 4) if packed else (4, 2))
    tables = None
    if packed:
        given = torch.stack((x.q, x.k, x.v), 1)
    elif layout == "CONTIGUOUS_Q_KV":
        given = x.q, torch.stack((x.k, x.v), 1)
    elif layout == "SEPARATE_Q_K_V":
        given = x.q, x.k, x.v
    else:
        cache, tables, _ = paged(x, layout=layout[-3:])
        given = x.q, cache
    chunks = []
    for nq, nkv in zip(x.qo_indptr.diff().tolist(), KV):
        q_pos, k_pos = torch.arange(nkv - nq, nkv)[:, None], torch.arange(nkv)
        chunks.append(((k_pos <= q_pos) & (k_pos // 8 == q_pos // 8)).flatten().to(device))
    cases = (
        (dict(), Options(causal=True), None),
        (dict(mask_mode="padding"), Options(), None),
        (dict(mask_mode="sliding_window", window_left=6), Options(causal=True, window_left=6), None),
        (dict(mask_mode="chunked", chunked_attention_size=8), Options(), Extras(chunks)),
        (dict(pos_encoding_mode="ALIBI", logits_soft_cap_scale=2.0),
         Options(causal=True, pos_encoding_mode="ALIBI", logits_soft_cap=2.0), None),
    )  # fmt: skip
    for kwargs, o, extras in cases:
        out = trtllm_fmha_v2_prefill(
            given, layout, SCRATCH, lens(KV, device), 64, 64, 0.125, 1.0, 6, x.qo_indptr, x.kv_indptr, tables, **kwargs
        )
        close(out, x, o, extras)


def test_fmha_v2_of_deepseek(device):
    x = batch([17] * 3, device, [17] * 3, heads=(4, 4), dim=48, head_dim_vo=32)
    q, k, v = (t.unflatten(0, (3, 17)) for t in (x.q, x.k, x.v))
    out = torch.empty(3, 17, 4, 32, dtype=HALF, device=device)
    scale = torch.tensor([0.3], device=device)
    assert fmha_v2_prefill_deepseek(q, k, v, out, 4, 48, 17, 1.0, scale_bmm1_d=scale, scale_bmm2=2.0) is out
    close(out.flatten(0, 1), x, Options(causal=True, sm_scale=0.3), Extras(v_scale=2.0))


def test_xqa(device):
    x = batch([1] * 6, device)
    (cache, tables, seq_lens), sinks = paged(x, layout="NHD"), torch.tensor([0.3, -2.0, 5.0, 1.0], device=device)
    out = torch.full((6, 1, 4, 64), float("nan"), dtype=HALF, device=device)
    k, v = cache.unbind(1)
    flashinfer.xqa(
        x.q.view(6, 1, 4, 64), k, v, tables, seq_lens[:, None], out, SCRATCH, SCRATCH, 2, 8, sinks, 0.5,
        torch.tensor([2.0], device=device), 10, rcp_out_scale=0.25,
    )  # fmt: skip
    close(out.view(6, 4, 64), x, Options(sm_scale=0.125, window_left=9), Extras(sinks=sinks, v_scale=0.5))
    y = batch([3] * 6, device)
    cache, tables, seq_lens = paged(y)
    out = torch.empty(6, 1, 3, 4, 64, dtype=HALF, device=device)
    k, v = cache.unbind(1)
    flashinfer.xqa(y.q.view(out.shape), k, v, tables, seq_lens, out, SCRATCH, SCRATCH, 2, 8, kv_layout="HND",
                   q_seq_len=3)  # fmt: skip
    close(out.view(18, 4, 64), y, Options(causal=True))
    got = xqa_batch_decode_with_kv_cache(y.q, cache, SCRATCH, tables, seq_lens, 64, 0.125, kv_layout="HND",
                                         q_len_per_req=3, q_cu_seq_lens=y.qo_indptr)  # fmt: skip
    close(got, y, Options(causal=True))


def test_the_module_and_its_function_are_one(device):
    import importlib

    module = importlib.import_module("flashinfer.xqa")
    assert callable(module) and callable(flashinfer.xqa)
    with pytest.raises(TypeError, match="k_cache"):
        module()


def test_cudnn_decode(device, monkeypatch):
    # On a GPU, looking at offsets waits.
    monkeypatch.setenv("FLASHINFER_DEBUG", "1")
    x = batch([1] * 6, device)
    cache, tables, seq_lens = paged(x)
    k, v = cache.unbind(1)
    common = dict(max_sequence_kv=72, actual_seq_lens_kv=seq_lens.view(6, 1, 1, 1), block_tables=tables)
    check(cudnn_batch_decode_with_kv_cache(x.q, k, v, 0.125, SCRATCH, return_lse=True, **common), x, Options())
    windowed = cudnn_batch_decode_with_kv_cache(x.q, k, v, 0.125, SCRATCH, window_left=3, **common)
    close(windowed, x, Options(window_left=3))
    for row in (1, 4 * 64):
        offsets = dict(batch_offsets_q=x.qo_indptr * row, batch_offsets_o=x.qo_indptr * row)
        close(cudnn_batch_decode_with_kv_cache(x.q, k, v, 0.125, SCRATCH, **common, **offsets), x, Options())
    for name in ("batch_offsets_q", "batch_offsets_o"):
        with pytest.raises(ValueError, match=name):
            others = {name: x.qo_indptr + 1}
            cudnn_batch_decode_with_kv_cache(x.q, k, v, 0.125, SCRATCH, **common, **others)
    y = batch([1] * 6, device, [8] * 6)
    made = generate.paged(y, 8, "HND")
    k, v = made.kv_cache[made.indices.long()].unbind(1)
    close(cudnn_batch_decode_with_kv_cache(y.q, k, v, 0.125, SCRATCH, max_sequence_kv=8), y, Options())


@pytest.mark.parametrize("units", ("elements", "tokens"))
@pytest.mark.parametrize("source", ("paged", "ragged"))
def test_cudnn_prefill(units, source, device):
    qo = [3, 0, 17, 33, 2, 0]
    x = batch(qo, device)
    cache, tables, _ = paged(x)
    k, v = cache.unbind(1) if source == "paged" else (x.k, x.v)
    by = (lambda t, heads, dim=64: t) if units == "tokens" else (lambda t, heads, dim=64: t * heads * dim)
    offsets = dict(batch_offsets_q=by(x.qo_indptr, 4), batch_offsets_units=units)
    if source == "ragged":
        offsets |= dict(batch_offsets_k=by(x.kv_indptr, 2), batch_offsets_v=by(x.kv_indptr, 2))
    else:
        offsets |= dict(block_tables=tables)
    common = dict(max_token_per_sequence=33, max_sequence_kv=72, actual_seq_lens_q=lens(qo, device).view(6, 1, 1, 1),
                  actual_seq_lens_kv=lens(KV, device), causal=True)  # fmt: skip
    o = Options(causal=True)
    got = cudnn_batch_prefill_with_kv_cache(
        x.q, k, v, 0.125, SCRATCH, return_lse=True, batch_offsets_stats=by(x.qo_indptr, 4, 1), **common, **offsets
    )
    check(got, x, o)
    # Without offsets, requests follow one another. An LSE of three axes is padded, a new one is packed.
    for name in ("batch_offsets_q", "batch_offsets_k", "batch_offsets_v"):
        offsets.pop(name, None)
    scales = dict(q_scale=torch.tensor([0.5], device=device), v_scale=torch.tensor([2.0], device=device))
    padded = torch.full((6, 33, 4), 777.0, device=device)
    out, lse = cudnn_batch_prefill_with_kv_cache(
        x.q, k, v, 0.25, SCRATCH, return_lse=True, lse_base="ln", lse=padded, **common, **offsets, **scales
    )
    assert lse is padded
    number = torch.arange(33, device=device)
    there = number < lens(qo, device)[:, None]
    assert (lse[~there] == -float("inf")).all()
    check((out / 2, lse[there] / math.log(2)), x, o)
    check(cudnn_batch_prefill_with_kv_cache(x.q, k, v, 0.125, SCRATCH, return_lse=True, **common, **offsets), x, o)
    _, none = cudnn_batch_prefill_with_kv_cache(x.q, k, v, 0.125, SCRATCH, return_lse=False, **common, **offsets)
    assert none is None


def test_cudnn_prefill_of_padded_rows(device):
    """batch * max_token_per_sequence rows: each request has that many, and its queries are the first of them."""
    qo, kv = [3, 0, 5], [5, 0, 9]
    x = batch(qo, device, kv)
    q = torch.full((3, 5, 4, 64), float("nan"), dtype=HALF, device=device)
    k, v = (torch.full((3, 9, 2, 64), float("nan"), dtype=HALF, device=device) for _ in "kv")
    for i in range(3):
        for to, rows, indptr in ((q, x.q, x.qo_indptr), (k, x.k, x.kv_indptr), (v, x.v, x.kv_indptr)):
            a, b = indptr[i : i + 2].tolist()
            to[i, : b - a] = rows[a:b]
    out, _ = cudnn_batch_prefill_with_kv_cache(
        q.flatten(0, 1), k.flatten(0, 1), v.flatten(0, 1), 0.125, SCRATCH, max_token_per_sequence=5, max_sequence_kv=9,
        actual_seq_lens_q=lens(qo, device), actual_seq_lens_kv=lens(kv, device), causal=True, return_lse=False,
    )  # fmt: skip
    there = torch.arange(5, device=device) < lens(qo, device)[:, None]
    close(out.view(3, 5, 4, 64)[there], x, Options(causal=True))


def test_no_requests(device):
    x = batch([], device, [])
    cache = torch.empty(2, 2, 2, 8, 64, dtype=HALF, device=device)
    tables = torch.empty(0, 9, dtype=torch.int32, device=device)
    out, lse = decode(x, cache, tables, lens([], device))
    assert out.shape == (0, 4, 64) and lse.shape == (0, 4)


def refusals(x, cache, tables, seq_lens):
    query = dict(query=x.q, kv_cache=cache, workspace_buffer=SCRATCH, block_tables=tables, seq_lens=seq_lens,
                 max_seq_len=64)  # fmt: skip
    wrong = lambda **kwargs: lambda: trtllm_batch_decode_with_kv_cache(**(query | kwargs))
    yield "kv_cache_sf", wrong(kv_cache_sf=(x.q, x.q))
    yield "kv_block_scales", wrong(kv_block_scales=(x.q, x.q))
    yield "uses_shared_paged_kv_idx", wrong(uses_shared_paged_kv_idx="no")
    yield "block_tables", wrong(uses_shared_paged_kv_idx=False)
    yield "block_tables", wrong(enable_block_sparse_attention=True, seq_lens=seq_lens[None])
    yield "window_left", wrong(enable_block_sparse_attention=True, window_left=3)
    yield "window_left", wrong(window_left=1.5)
    yield "bmm1_scale", wrong(bmm1_scale=float("nan"))
    yield "o_sf_vec_size", wrong(out_dtype="nvfp4", o_sf_vec_size=32)
    yield "o_sf_scale", wrong(out_dtype="nvfp4", o_sf_scale=-1.0)
    yield "lse", wrong(lse=torch.empty(6, 3, device=x.q.device))
    yield "bf16q_fp8kv_transform_mode", wrong(bf16q_fp8kv_transform_mode="fast")
    yield "query", wrong(q_len_per_req=2)
    yield "cum_seq_lens_q", wrong(cum_seq_lens_q=x.qo_indptr[:-1])
    yield "seq_lens", wrong(seq_lens=seq_lens.float())
    yield "block_tables", wrong(block_tables=tables[0])
    yield "seq_lens", wrong(block_tables=tables[:-1])
    yield "bmm1_scale", wrong(bmm1_scale=torch.ones(2))
    yield "bmm1_scale_log2", wrong(bmm1_scale_log2=torch.ones(2))
    yield "o_scale", wrong(o_scale=0.0)
    yield "o_sf_scale", wrong(o_sf_scale=1.0)
    yield "cp_rank", wrong(cp_rank=1)
    yield "causal_seqlens_kv_global", wrong(cp_world=2, window_left=3)
    yield "mask", wrong(mask=torch.ones(5, 1, dtype=torch.bool, device=x.q.device))
    yield "mask", wrong(mask=torch.ones(6, 1, device=x.q.device))
    yield "mask", wrong(mask=torch.ones(6, 1, 0, dtype=torch.bool, device=x.q.device))
    yield "mask", wrong(mask=torch.ones(6, 1, dtype=torch.bool, device=x.q.device)[0, 0])
    yield "out", wrong(out=torch.empty_like(x.q).mT)
    yield "out", wrong(out=torch.empty_like(x.q, dtype=torch.complex64))
    yield "kv_layout", wrong(kv_layout="DHN")
    yield "backend", wrong(backend="no such")
    yield "sinks", wrong(sinks=[x.q, x.q])
    yield "query", wrong(query=x.q[0])
    yield "kv_cache", wrong(kv_cache=cache[0, 0, 0, 0, 0])
    yield "out_dtype", wrong(out_dtype="nothing")
    k, v = cache.unbind(1)
    given = dict(max_sequence_kv=72, actual_seq_lens_kv=seq_lens, block_tables=tables)
    cudnn = lambda k=k, v=v, **kwargs: lambda: cudnn_batch_decode_with_kv_cache(
        x.q, k, v, 1.0, SCRATCH, **(given | kwargs)
    )
    yield "k_cache", cudnn(k=k[0, 0, 0])
    yield "v_cache", cudnn(v=v[0, 0, 0])
    yield "actual_seq_lens_kv", cudnn(block_tables=tables[:-1])
    yield "max_sequence_kv", cudnn(actual_seq_lens_kv=None, max_sequence_kv=1 << 31)
    more = given | dict(max_token_per_sequence=1, causal=True, return_lse=True)
    prefill = lambda k=k, **kwargs: lambda: cudnn_batch_prefill_with_kv_cache(
        x.q, k, v, 1.0, SCRATCH, **(more | kwargs)
    )
    yield "k_cache", prefill(k=k[0, 0, 0])
    yield "k_cache", prefill(block_tables=None)
    yield "max_token_per_sequence", prefill(max_token_per_sequence=-1)
    yield "batch_offsets_q", prefill(batch_offsets_q=x.qo_indptr.to(torch.int8))
    yield "lse", prefill(batch_offsets_stats=x.qo_indptr * 4, lse=torch.empty(3, device=x.q.device))
    ragged = lambda q=x.q, k=x.k, v=x.v, **kwargs: lambda: trtllm_ragged_attention_deepseek(
        q, k, v, SCRATCH, seq_lens, 1, 64, 1.0, 1.0, 1.0, 6, -1, x.qo_indptr, x.kv_indptr, False, True, False, **kwargs
    )
    yield "query", ragged(q=x.q.flatten())
    yield "key", ragged(k=x.k[0])
    yield "value", ragged(v=x.v.flatten())
    yield "sage_attn_sfs", ragged(sage_attn_sfs=(None, x.q, None, None))
    codes, scales = [t.to(torch.int8) for t in (x.q, x.k, x.v)], [torch.ones(h, 999, device=x.q.device) for h in (4, 2)]
    sage = lambda k=codes[1], v=x.v, of_k=scales[1], of_v=None, sizes=(1, 16, 0, 0): ragged(
        codes[0], k, v, sage_attn_sfs=(scales[0], of_k, None, of_v), num_elts_per_sage_attn_blk=sizes
    )
    yield from (("sage_attn_sfs", sage(of_k=wrong)) for wrong in (2, [[1.0]], scales[1].to("meta")))
    yield "sage_attn_sfs", sage(of_v=torch.ones(2, 64, device=x.q.device), v=codes[2])
    yield from (("num_elts_per_sage_attn_blk", sage(sizes=wrong)) for wrong in (("1", 16, 0, 0), (1, 16.5, 0, 0)))
    yield "key", sage(k=x.k.to(torch.float8_e4m3fn))
    fmha = lambda layout="SEPARATE_Q_K_V", qkv=(x.q, x.k, x.v), **kwargs: lambda: trtllm_fmha_v2_prefill(
        qkv, layout, SCRATCH, seq_lens, 1, 64, 1.0, 1.0, 6, x.qo_indptr, x.kv_indptr, **kwargs
    )
    split = (), (x.q, x.k), x.q, (x.q.flatten(), x.k, x.v), (x.q, x.k[None], x.v), (x.q, x.k, x.v[:-1])
    yield from (("qkv", fmha(qkv=wrong)) for wrong in split)
    yield "qkv", fmha("PACKED_QKV", x.q)
    yield "qkv", fmha("PACKED_QKV", (x.q, x.k, x.v))
    yield "qkv", fmha("CONTIGUOUS_Q_KV", (x.q, x.k))
    yield "qkv", fmha("Q_PAGED_KV_NHD", (x.q,), block_tables=tables)
    yield "input_layout", fmha("QKV")
    yield "mask_mode", fmha(mask_mode="custom")
    yield "window_left", fmha(mask_mode="padding", window_left=3)
    yield "window_left", fmha(chunked_attention_size=8, window_left=3)
    yield "chunked_attention_size", fmha(mask_mode="padding", chunked_attention_size=8)
    yield "block_tables", fmha(block_tables=tables)
    yield "pos_encoding_mode", fmha(pos_encoding_mode="ROPE_LLAMA")


def test_offsets_and_lengths_on_the_host_are_within_the_rows():
    """On a GPU nothing looks at them: that would wait."""
    x = batch([1] * 6, torch.device("cpu"))
    cache, tables, seq_lens = paged(x)
    k, v = cache.unbind(1)
    given = dict(max_token_per_sequence=1, max_sequence_kv=72, actual_seq_lens_kv=seq_lens, causal=True)
    for wrong in (-1, 1 << 40):
        indptr = x.qo_indptr.long()
        indptr[3] = wrong
        with pytest.raises(ValueError, match="^cum_seq_lens_q:"):
            trtllm_batch_decode_with_kv_cache(x.q, cache, SCRATCH, tables, seq_lens, 64, cum_seq_lens_q=indptr)
        with pytest.raises(ValueError, match="^actual_seq_lens_q:"):
            cudnn_batch_prefill_with_kv_cache(x.q, k, v, 1.0, SCRATCH, block_tables=tables, return_lse=False,
                                              actual_seq_lens_q=indptr[:6], **given)  # fmt: skip
    for wrong, name in itertools.product((-1, -(1 << 31)), ("cum_seq_lens_q", "cum_seq_lens_kv")):
        indptrs = dict(cum_seq_lens_q=x.qo_indptr.clone(), cum_seq_lens_kv=x.kv_indptr.clone())
        indptrs[name][0] = wrong
        with pytest.raises(ValueError, match=f"^{name}:"):
            trtllm_ragged_attention_deepseek(x.q, x.k, x.v, SCRATCH, seq_lens, 1, 64, 1.0, 1.0, 1.0, 6, -1,
                                             enable_pdl=False, is_causal=True, return_lse=False, **indptrs)  # fmt: skip
        with pytest.raises(ValueError, match=f"^{name}:"):
            trtllm_fmha_v2_prefill((x.q, x.k, x.v), "SEPARATE_Q_K_V", SCRATCH, seq_lens, 1, 64, 1.0, 1.0, 6, **indptrs)
    for name in "qokv":
        offsets = {f"batch_offsets_{each}": x.qo_indptr.clone() for each in "qokv"}
        offsets[f"batch_offsets_{name}"][0] = -1
        for units in ("tokens", "elements"):
            with pytest.raises(ValueError, match=f"^batch_offsets_{name}:" if units == "tokens" else "^batch_offsets"):
                cudnn_batch_prefill_with_kv_cache(x.q, x.k, x.v, 1.0, SCRATCH, return_lse=False,
                                                  batch_offsets_units=units, **given, **offsets)  # fmt: skip


def test_what_is_refused_is_refused_by_name(device):
    x = batch([1] * 6, device)
    cases = list(refusals(x, *paged(x)))
    for name, call in cases:
        with pytest.raises((ValueError, UnsupportedConfig), match=rf"^{name}[\[:]"):
            call()
