"""Wrong arguments of attention's wrappers and functions, refused by the name that the caller has for them."""

import numpy as np
import pytest
import torch

import flashinfer
from flashinfer.mla import (
    BatchMLAPagedAttentionWrapper, trtllm_batch_decode_sparse_mla_dsv4, trtllm_batch_decode_with_kv_cache_mla,
)  # fmt: skip
from flashinfer.prefill import trtllm_fmha_v2_prefill
from flashinfer.testing import generate
from tests.ops.attention.cases import check, workspace
from tests.ops.attention.oracle import Options
from tests.ops.attention.test_direct import lens
from tests.ops.attention.test_engines import HALF, SCRATCH

HEADS, DIM, PAGE = (4, 2), 64, 4


def refused(name):
    return pytest.raises(ValueError, match=rf"^{name}: got ")


def buffer(count, device):
    return torch.zeros(count, dtype=torch.int32, device=device)


def latent_plan(wrapper, device, **changes):
    tables = dict(qo_indptr=lens([0, 1, 2], device), kv_indptr=lens([0, 2, 3], device),
                  kv_indices=lens([0, 1, 2], device), kv_len_arr=lens([5, 3], device))  # fmt: skip
    plan = dict(num_heads=4, head_dim_ckv=64, head_dim_kpe=16, page_size=4, causal=False, sm_scale=0.1,
                q_data_type=HALF)  # fmt: skip
    wrapper.plan(**tables | plan | changes)


@pytest.mark.parametrize(
    "name, now",
    (("q_data_type", torch.bfloat16), ("kv_data_type", torch.float8_e5m2), ("o_data_type", torch.float32),
     ("head_dim_qk", 32), ("head_dim_vo", 32), ("page_size", 8), ("num_qo_heads", 8)),
)  # fmt: skip
def test_what_a_captured_graph_cannot_follow(name, now, device):
    wrapper = flashinfer.BatchPrefillWithPagedKVCacheWrapper(
        workspace(device), use_cuda_graph=True, qo_indptr_buf=buffer(3, device), paged_kv_indptr_buf=buffer(3, device),
        paged_kv_indices_buf=buffer(9, device), paged_kv_last_page_len_buf=buffer(2, device),
    )  # fmt: skip
    tables = lens([0, 3, 5], device), lens([0, 3, 5], device), lens([6, 0, 2, 3, 4], device), lens([1, 1], device)
    sizes = dict(num_qo_heads=4, num_kv_heads=2, head_dim_qk=64, page_size=4)
    wrapper.plan(*tables, **sizes)
    with refused(name):
        wrapper.plan(*tables, **sizes | {name: now})


@pytest.mark.parametrize(
    "name, now",
    (("q_data_type", torch.bfloat16), ("kv_data_type", torch.float8_e5m2), ("output_dtype", torch.float32),
     ("head_dim_ckv", 32), ("head_dim_kpe", 32), ("num_heads", 8)),
)  # fmt: skip
def test_what_a_captured_graph_of_latent_attention_cannot_follow(name, now, device):
    wrapper = BatchMLAPagedAttentionWrapper(
        workspace(device), use_cuda_graph=True, qo_indptr=buffer(3, device), kv_indptr=buffer(3, device),
        kv_indices=buffer(9, device), kv_len_arr=buffer(2, device),
    )  # fmt: skip
    latent_plan(wrapper, device)
    shown = str(now) if isinstance(now, torch.dtype) else now
    with pytest.raises(ValueError, match=f"^{name}: got {shown}; allowed: "):
        latent_plan(wrapper, device, **{name: now})


@pytest.mark.parametrize("name", ("indptr_buffer", "indices_buffer", "last_page_len_buffer"))
def test_buffers_of_a_captured_decode(name, device):
    buffers = dict(indptr_buffer=buffer(6, device), indices_buffer=buffer(9, device),
                   last_page_len_buffer=buffer(5, device))  # fmt: skip
    for wrong in (None, "nothing", buffer(1, device)[0], buffer(5, device).long(), buffer(5, device)[:, None]):
        with refused(name):
            flashinfer.CUDAGraphBatchDecodeWithPagedKVCacheWrapper(workspace(device), **buffers | {name: wrong})
    with refused("workspace_buffer"):
        flashinfer.CUDAGraphBatchDecodeWithPagedKVCacheWrapper(1, **buffers)


@pytest.mark.parametrize(
    "wrapper",
    (flashinfer.BatchDecodeWithPagedKVCacheWrapper, flashinfer.BatchPrefillWithPagedKVCacheWrapper,
     flashinfer.BatchPrefillWithRaggedKVCacheWrapper, BatchMLAPagedAttentionWrapper),
)  # fmt: skip
def test_a_flag_is_no_text(wrapper, device):
    with refused("use_cuda_graph"):
        wrapper(workspace(device), use_cuda_graph="False")


def test_levels_of_a_cascade(device):
    for wrong in (0, 1 << 40):
        with refused("num_levels"):
            flashinfer.MultiLevelCascadeAttentionWrapper(wrong, workspace(device))
    wrapper = flashinfer.MultiLevelCascadeAttentionWrapper(2, workspace(device))
    tables = dict(
        qo_indptr_arr=[lens([0, 6], device), lens([0, 3, 4, 6], device)],
        paged_kv_indptr_arr=[lens([0, 3], device), lens([0, 3, 4, 9], device)],
        paged_kv_indices_arr=[lens([*range(3)], device), lens([*range(9)], device)],
        paged_kv_last_page_len=[lens([1], device), lens([1, 4, 1], device)],
    )  # fmt: skip
    for name, wrong in (("paged_kv_last_page_len", [1, 4, 1, 1]), ("paged_kv_indptr_arr", [0, 3, 4]),
                        ("paged_kv_indptr_arr", [])):  # fmt: skip
        changed = tables | {name: [tables[name][0], lens(wrong, device)]}
        for window in (-1, 3):
            with refused(name):
                wrapper.plan(**changed, num_qo_heads=4, num_kv_heads=2, head_dim=32, page_size=4, window_left=window)


def test_windows_of_spans_wider_than_any_request(device):
    x = generate.ragged_batch([3, 5], [9, 5], *HEADS, DIM, dtype=HALF, device=device)
    paged = generate.paged(x, PAGE)
    wrapper = flashinfer.attention.BatchPrefillWithCausalBidirectionalRangesWrapper(
        workspace(device), q_data_type=HALF, kv_data_type=HALF, head_dim_qk=DIM, head_dim_vo=DIM
    )
    wrapper.plan(x.qo_indptr, paged.indptr, paged.indices, paged.last_page_len, *HEADS, DIM, PAGE)
    none = torch.full((8, 2), -1, dtype=torch.int32, device=device)
    for window in (1 << 40, 1 << 31, -(1 << 63)):
        check(wrapper.run(x.q, paged.kv_cache, none, window, window, return_lse=True), x, Options(causal=True))
    with refused("q"):
        wrapper.run(x.q[0, 0, 0], paged.kv_cache, none)


@pytest.mark.parametrize("heads", (-(1 << 63), -4, 0, True, 3, 1 << 40))
def test_heads_under_maps_of_blocks(heads, device):
    wrapper = flashinfer.BlockSparseAttentionWrapper(workspace(device))
    for block_mask in (torch.ones(2, 3, 4, dtype=torch.bool), torch.ones(3, 4, dtype=torch.bool)):
        with refused("num_qo_heads"):
            wrapper.plan(None, None, 12, 32, 4, 8, heads, 2, 64, block_mask=block_mask)


def test_numbers_of_multi_item_scoring(device):
    x = generate.ragged_batch([8], [14], *HEADS, DIM, dtype=HALF, device=device)
    wrapper = flashinfer.BatchPrefillWithRaggedKVCacheWrapper(workspace(device))
    items = dict(prefix_len_ptr=6, token_pos_in_items_ptr=torch.tensor([0, 1, 2, 0, 1, 2, 3, 0]),
                 token_pos_in_items_len=8)  # fmt: skip
    for name, wrong in (("prefix_len_ptr", "6"), ("prefix_len_ptr", 6.5), ("token_pos_in_items_len", "8")):
        with refused(name):
            wrapper.plan(x.qo_indptr, x.kv_indptr, *HEADS, DIM, causal=True, **items | {name: wrong})


def test_numbers_of_latent_attention(device):
    wrapper = BatchMLAPagedAttentionWrapper(workspace(device))
    for wrong in ("x", 2.5, -1):
        with refused("max_q_len"):
            latent_plan(wrapper, device, max_q_len=wrong)
    for right in (np.int64(2), torch.tensor(2), 0, None):
        latent_plan(wrapper, device, max_q_len=right)
        wrapper.plan(num_heads=4, head_dim_ckv=64, head_dim_kpe=16, page_size=4, sm_scale=0.1, q_data_type=HALF,
                     block_tables=lens([[0, 1], [2, 3]], device), seq_lens=lens([5, 3], device),
                     max_q_len=right)  # fmt: skip
    latent_plan(wrapper, device)
    q, cache = torch.ones(2, 4, 80, dtype=HALF, device=device), torch.ones(5, 4, 80, dtype=HALF, device=device)
    for name, wrong in (("return_lse_base_on_e", "False"), ("bmm1_scale", "3.0"), ("bmm2_scale", "3.0"),
                        ("bmm2_scale", True), ("bmm2_scale", float("nan")), ("ckv_scale", "2"),
                        ("sinks", "x")):  # fmt: skip
        with pytest.raises(ValueError, match=f"^{name}: got "):
            wrapper.run(*q.split((64, 16), 2), *cache.split((64, 16), 2), **{name: wrong})


def test_tokens_that_a_sparse_table_names():
    """On the CPU, where looking at them costs nothing; on a GPU in debug mode."""
    cache, q = torch.ones(5, 4, 80, dtype=HALF), torch.ones(2, 3, 4, 80, dtype=HALF)
    tokens = torch.zeros(2, 3, 8, dtype=torch.int32)
    tokens[1, 0, 2] = 20
    call = lambda q, table, **others: trtllm_batch_decode_with_kv_cache_mla(
        q, cache, SCRATCH, 64, 64, 16, table, None, 0, 8, **others
    )
    with pytest.raises(ValueError, match="^block_tables: got token 20 for query 3, in column 2; allowed: below 20"):
        call(q, tokens)
    # What does not count may be anything.
    call(q, tokens, sparse_mla_top_k_lens=torch.full((6,), 2))
    call(q, torch.where(tokens == 20, -5, tokens))
    with pytest.raises(ValueError, match="^sparse_mla_top_k_lens: got 2 ... 9; allowed: 0 ... 8"):
        call(q, tokens.clamp(max=0), sparse_mla_top_k_lens=torch.tensor([9, 2, 2, 2, 2, 2]))
    with refused("block_tables"):
        call(q, tokens[0, 0, 0])
    with refused("query"):
        call(torch.ones(2, 3, 4, 160, dtype=HALF)[..., ::2], tokens)
    window, others = torch.ones(50, 4, 64, dtype=HALF), torch.ones(20, 4, 64, dtype=HALF)
    for column, most in ((3, 200), (130, 80)):
        named = torch.zeros(4, 137, dtype=torch.int32)
        named[2, column] = most
        with pytest.raises(ValueError, match=f"^sparse_indices: got token {most} for query 2, in column {column}"):
            trtllm_batch_decode_sparse_mla_dsv4(torch.ones(4, 3, 64, dtype=HALF), window, SCRATCH, named, others)


def test_chunks_and_pools_of_fmha_v2(device):
    x = generate.ragged_batch([3, 9], [5, 33], *HEADS, DIM, dtype=HALF, device=device)
    seq_lens = lens([5, 33], device)
    call = (SCRATCH, seq_lens, 9, 33, 0.125, 1.0, 2, x.qo_indptr, x.kv_indptr)
    out, stats = trtllm_fmha_v2_prefill(
        (x.q, x.k, x.v), "SEPARATE_Q_K_V", *call, chunked_attention_size=1 << 40, save_softmax_stats=True
    )
    check((out, stats[..., 0] * 1.4426950408889634), x, Options(causal=True))
    pool = torch.zeros(2 * 9 * 1024 + 1, dtype=HALF, device=device)
    k, v = pool[: 9 * 1024].view(9, 2, 8, 64), pool[9 * 1024 + 1 :].view(9, 2, 8, 64)
    with refused("qkv"):
        tables = torch.zeros(2, 2, 5, dtype=torch.int32, device=device)
        trtllm_fmha_v2_prefill((x.q, k, v), "Q_PAGED_KV_HND", *call, block_tables=tables)


def test_what_is_planned_stays_where_a_run_says_nothing(device):
    x = generate.ragged_batch([1, 1], [9, 5], *HEADS, DIM, dtype=HALF, device=device)
    paged, o = generate.paged(x, PAGE), Options(logits_soft_cap=2.0)
    mixed = flashinfer.BatchAttention(device=device)
    mixed.plan(x.qo_indptr, paged.indptr, paged.indices, lens([9, 5], device), *HEADS, DIM, DIM, PAGE,
               logits_soft_cap=2.0, q_data_type=HALF, kv_data_type=HALF)  # fmt: skip
    for nothing in (0.0, None):
        check(mixed.run(x.q, paged.kv_cache, logits_soft_cap=nothing), x, o)
    pod = flashinfer.PODWithPagedKVCacheWrapper(workspace(device))
    pod.plan(paged.indptr, paged.indices, paged.last_page_len, *HEADS, DIM, PAGE, window_left=2)
    for nothing in (dict(), dict(window_left_d=None, pos_encoding_mode_d=None, sm_scale_d=None)):
        _, decode = pod.run(x.q, x.k, x.v, x.q, paged.kv_cache, return_lse_d=True, **nothing)
        check(decode, x, Options(window_left=2))
