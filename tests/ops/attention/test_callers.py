"""What callers of upstream's wrappers and functions send and get back beside numbers: older names of types, fixed
buffers, axes of results."""

from dataclasses import replace

import pytest
import torch

import flashinfer
from flashinfer.cudnn import cudnn_batch_decode_with_kv_cache
from flashinfer.decode import trtllm_batch_decode_with_kv_cache, xqa_batch_decode_with_kv_cache
from flashinfer.mla import trtllm_batch_decode_with_kv_cache_mla
from flashinfer.prefill import (
    trtllm_batch_context_with_kv_cache, trtllm_fmha_v2_prefill, trtllm_ragged_attention_deepseek,
)  # fmt: skip
from flashinfer.testing import generate
from tests.ops.attention.cases import check, workspace
from tests.ops.attention.oracle import Extras, Options
from tests.ops.attention.test_direct import lens
from tests.ops.attention.test_engines import HALF, SCRATCH, close, paged

E4M3 = torch.float8_e4m3fn
KV = [5, 0, 40, 33, 64, 7]


def decodes(device, dtype=HALF):
    """One query a request, over keys and values that FP8 has too; and the pages of an FP8 cache."""
    x = generate.ragged_batch([1] * len(KV), KV, 4, 2, 64, dtype=dtype, device=device)
    x = replace(x, k=x.k.to(E4M3).to(dtype), v=x.v.to(E4M3).to(dtype))
    pages = generate.paged(x, 8)
    return x, pages, pages.kv_cache.to(E4M3)


@pytest.mark.parametrize(
    "given, q_dtype, fp8",
    ((dict(data_type=E4M3), HALF, True), (dict(data_type="float8_e4m3fn", q_data_type="float16"), HALF, True),
     (dict(data_type=E4M3, q_data_type=torch.bfloat16), torch.bfloat16, True), (dict(data_type=HALF), HALF, False),
     (dict(data_type=torch.bfloat16), torch.bfloat16, False), (dict(data_type=HALF, kv_data_type=E4M3), HALF, True)),
)  # fmt: skip
def test_the_older_name_of_both_types(given, q_dtype, fp8, device):
    """An FP8 data_type is that of the cache: queries stay in float16, as they are by default."""
    x, pages, narrow = decodes(device, q_dtype)
    cache = narrow if fp8 else pages.kv_cache
    tables, sizes = (pages.indptr, pages.indices, pages.last_page_len), (4, 2, 64, 8)
    decode = flashinfer.BatchDecodeWithPagedKVCacheWrapper(workspace(device))
    decode.plan(*tables, *sizes, **given)
    check(decode.run(x.q, cache, return_lse=True), x, Options())
    single = flashinfer.PODWithPagedKVCacheWrapper(workspace(device))
    single.plan(*tables, *sizes, **given)
    p = generate.ragged_batch([3], [9], 4, 2, 64, dtype=q_dtype, device=device)
    of_p, of_d = single.run(p.q, p.k, p.v, x.q, cache, return_lse_p=True, return_lse_d=True)
    check(of_p, p, Options())
    check(of_d, x, Options())
    both = flashinfer.BatchPODWithPagedKVCacheWrapper(workspace(device))
    both.plan(*(x.qo_indptr, *tables) * 2, *sizes, **given)
    for part in both.run(x.q, cache, x.q, cache, return_lse=True):
        check(part, x, Options())


@pytest.mark.parametrize("wrapper", ("decode", "paged", "ragged"))
def test_fixed_buffers_of_another_number_of_requests(wrapper, device):
    def buffer(count):
        return torch.zeros(count, dtype=torch.int32, device=device)

    def made(qo, kv, last):
        if wrapper == "decode":
            tables = dict(paged_kv_indptr_buffer=buffer(kv), paged_kv_indices_buffer=buffer(20),
                          paged_kv_last_page_len_buffer=buffer(last))  # fmt: skip
            return flashinfer.BatchDecodeWithPagedKVCacheWrapper(workspace(device), use_cuda_graph=True, **tables)
        if wrapper == "ragged":
            tables = dict(qo_indptr_buf=buffer(qo), kv_indptr_buf=buffer(kv))
            return flashinfer.BatchPrefillWithRaggedKVCacheWrapper(workspace(device), use_cuda_graph=True, **tables)
        tables = dict(qo_indptr_buf=buffer(qo), paged_kv_indptr_buf=buffer(kv), paged_kv_indices_buf=buffer(20),
                      paged_kv_last_page_len_buf=buffer(last))  # fmt: skip
        return flashinfer.BatchPrefillWithPagedKVCacheWrapper(workspace(device), use_cuda_graph=True, **tables)

    assert made(4, 4, 3).is_cuda_graph_enabled
    if wrapper != "decode":
        name = "kv_indptr_buf" if wrapper == "ragged" else "paged_kv_indptr_buf"
        with pytest.raises(ValueError, match=f"^{name}: got 5 elements; allowed: 4, as qo_indptr_buf has"):
            made(4, 5, 3)
    if wrapper != "ragged":
        name = "paged_kv_last_page_len_buf" + ("fer" if wrapper == "decode" else "")
        with pytest.raises(ValueError, match=f"^{name}: got 4 elements; allowed: 3, as "):
            made(4, 4, 4)


def test_axes_of_drafts_by_xqa(device):
    """A new output has an axis for the queries of a request, where it has several; a given one has its own axes."""
    x = generate.ragged_batch([3] * 6, [5, 4, 40, 33, 64, 7], 4, 2, 64, dtype=HALF, device=device)
    cache, tables, seq_lens = paged(x, [5, 4, 40, 33, 64, 7], layout="NHD")
    call = dict(kv_cache=cache, workspace_buffer=SCRATCH, block_tables=tables, seq_lens=seq_lens, max_seq_len=72,
                bmm1_scale=0.125, q_len_per_req=3)  # fmt: skip
    new = xqa_batch_decode_with_kv_cache(x.q, **call)
    assert new.shape == (6, 3, 4, 64)
    close(new.flatten(0, 1), x, Options(causal=True))
    out = torch.empty_like(x.q)
    assert xqa_batch_decode_with_kv_cache(x.q, out=out, **call) is out
    close(out, x, Options(causal=True))
    packed = xqa_batch_decode_with_kv_cache(x.q, q_cu_seq_lens=x.qo_indptr, **call)
    assert packed.shape == x.q.shape


def _bounds(device):
    x = generate.ragged_batch([2, 1], [5, 9], 4, 2, 64, dtype=HALF, device=device)
    cache, tables, seq_lens = paged(x, [5, 9])
    k, v = cache.unbind(1)
    rows = x.qo_indptr, x.kv_indptr
    decode = lambda max_seq_len=72, **others: trtllm_batch_decode_with_kv_cache(
        x.q[:2], cache, SCRATCH, tables, seq_lens, max_seq_len, **others
    )
    context = lambda max_q_len=2, max_kv_len=9: trtllm_batch_context_with_kv_cache(
        x.q, cache, SCRATCH, tables, seq_lens, max_q_len, max_kv_len, 0.125, 1.0, 2, *rows)  # fmt: skip
    ragged = lambda max_q_len=2, max_kv_len=9: trtllm_ragged_attention_deepseek(
        x.q, x.k, x.v, SCRATCH, seq_lens, max_q_len, max_kv_len, 0.125, 1.0, 1.0, 2, -1, *rows, None, True, False
    )
    v2 = lambda max_q_len=2, max_kv_len=9: trtllm_fmha_v2_prefill(
        (x.q, x.k, x.v), "SEPARATE_Q_K_V", SCRATCH, seq_lens, max_q_len, max_kv_len, 0.125, 1.0, 2, *rows)  # fmt: skip
    cudnn = lambda **bound: cudnn_batch_decode_with_kv_cache(
        x.q[:2], k, v, 0.125, SCRATCH, actual_seq_lens_kv=seq_lens, block_tables=tables, **bound
    )
    latent = lambda max_seq_len: trtllm_batch_decode_with_kv_cache_mla(
        torch.zeros(2, 1, 16, 80, dtype=HALF, device=device), torch.zeros(9, 8, 80, dtype=HALF, device=device), SCRATCH,
        64, 64, 16, tables.clamp(max=8), seq_lens, max_seq_len)  # fmt: skip
    return dict(decode=decode, context=context, ragged=ragged, v2=v2, cudnn=cudnn, latent=latent)


@pytest.mark.parametrize(
    "function, name",
    (("decode", "max_seq_len"), ("decode", "q_len_per_req"), ("context", "max_q_len"), ("context", "max_kv_len"),
     ("ragged", "max_q_len"), ("ragged", "max_kv_len"), ("v2", "max_q_len"), ("v2", "max_kv_len"),
     ("cudnn", "max_sequence_kv"), ("latent", "max_seq_len")),
)  # fmt: skip
def test_bounds_below_zero(function, name, device):
    """Also bounds that no kernel here needs: below 0 they are a caller's mistake."""
    call = _bounds(device)[function]
    call(**{name: 1 if name == "q_len_per_req" else 72})
    for wrong in (-1, "a", 1.5):
        with pytest.raises(ValueError, match=f"^{name}: got {wrong!r}; allowed: a"):
            call(**{name: wrong})


def test_masks_of_fmha_v2_whose_size_or_name_is_left_out(device):
    """Three names are one causal mask, and the sizes say what it has beside; ALiBi is causal under any name."""
    x = generate.ragged_batch([3, 0, 9], [5, 2, 33], 4, 2, 64, dtype=HALF, device=device)
    chunks = []
    for nq, nkv in ((3, 5), (0, 2), (9, 33)):
        q_pos, k_pos = torch.arange(nkv - nq, nkv)[:, None], torch.arange(nkv)
        chunks.append(((k_pos <= q_pos) & (k_pos // 8 == q_pos // 8)).flatten().to(device))
    causal, alibi = Options(causal=True), Options(causal=True, pos_encoding_mode="ALIBI")
    for given, o, extras in (
        (dict(mask_mode="sliding_window"), causal, None), (dict(mask_mode="chunked"), causal, None),
        (dict(chunked_attention_size=8), Options(), Extras(chunks)),
        (dict(window_left=2), Options(causal=True, window_left=2), None),
        (dict(mask_mode="padding", pos_encoding_mode="alibi"), alibi, None),
    ):  # fmt: skip
        out = trtllm_fmha_v2_prefill(
            (x.q, x.k, x.v), "SEPARATE_Q_K_V", SCRATCH, lens([5, 2, 33], device), 9, 33, 0.125, 1.0, 3, x.qo_indptr,
            x.kv_indptr, **given,
        )  # fmt: skip
        close(out, x, o, extras)


@pytest.mark.parametrize("function", ("decode", "context", "cudnn", "latent"))
def test_block_tables_without_columns(function, device):
    """A batch before its first page: as many columns as the longest request has pages, which are none."""
    x = generate.ragged_batch([1] * 3, [9] * 3, 4, 2, 64, dtype=HALF, device=device)
    cache, wide, _ = paged(x, [9] * 3)
    none = lens([0] * 3, device)
    for tables in (wide[:, :0], wide.new_empty(3, 0)):
        out, lse = {
            "decode": lambda: trtllm_batch_decode_with_kv_cache(
                x.q, cache, SCRATCH, tables, none, 0, return_lse=True),
            "context": lambda: trtllm_batch_context_with_kv_cache(
                x.q, cache, SCRATCH, tables, none, 1, 0, 1.0, 1.0, 3, x.qo_indptr, None, return_lse=True),
            "cudnn": lambda: cudnn_batch_decode_with_kv_cache(
                x.q, *cache.unbind(1), 1.0, SCRATCH, max_sequence_kv=0, actual_seq_lens_kv=none, block_tables=tables,
                return_lse=True),
            "latent": lambda: trtllm_batch_decode_with_kv_cache_mla(
                torch.ones(3, 1, 16, 80, dtype=HALF, device=device), torch.ones(9, 8, 80, dtype=HALF, device=device),
                SCRATCH, 64, 64, 16, tables, none, 0, return_lse=True),
        }[function]()  # fmt: skip
        assert not out.any() and bool((lse == float("-inf")).all())


def test_the_lse_of_one_head_in_any_order_of_axes(device):
    """[rows, 1] of memory that is [1, rows], as of the heads of one rank of many."""
    x = generate.ragged_batch([2, 3], [9, 5], 1, 1, 64, dtype=HALF, device=device)
    wrapper = flashinfer.BatchPrefillWithRaggedKVCacheWrapper(workspace(device))
    wrapper.plan(x.qo_indptr, x.kv_indptr, 1, 1, 64, q_data_type=HALF)
    lse = torch.empty(1, 5, device=device).t()
    out, _ = wrapper.run(x.q, x.k, x.v, lse=lse, return_lse=True)
    check((out, lse), x, Options())
