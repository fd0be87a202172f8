"""Wrappers as mini-sglang drives them: one-token pages, offsets on the host, "fa2" put into the wrapper."""

import pytest
import torch

import flashinfer
from flashinfer.testing import generate
from tests.engines.steps import DIM, HEADS, Pool
from tests.ops.attention.cases import check
from tests.ops.attention.oracle import Options

HALF = torch.float16


def on_host(t, device):
    return t.cpu().pin_memory() if device.type == "cuda" else t.cpu()


def plan_decode(wrapper, x, paged, device):
    lens = on_host(x.kv_indptr.diff(), device)
    wrapper.plan(
        indptr=on_host(paged.indptr, device), indices=paged.indices, last_page_len=on_host(paged.last_page_len, device),
        num_qo_heads=HEADS[0], num_kv_heads=HEADS[1], head_dim=DIM, page_size=1, pos_encoding_mode="NONE",
        seq_lens=lens, data_type=HALF, q_data_type=HALF, kv_data_type=HALF, non_blocking=True,
    )  # fmt: skip


@pytest.fixture
def wrappers(device):
    pool = Pool(device, 4)
    prefill = flashinfer.BatchPrefillWithPagedKVCacheWrapper(pool.workspace, kv_layout="NHD", backend="fa2")
    decode = flashinfer.BatchDecodeWithPagedKVCacheWrapper(
        pool.workspace, use_tensor_cores=True, kv_layout="NHD", backend="fa2"
    )
    decode._int_workspace_buffer = prefill._int_workspace_buffer
    graph = flashinfer.CUDAGraphBatchDecodeWithPagedKVCacheWrapper(
        pool.workspace, kv_layout="NHD", use_tensor_cores=True, indptr_buffer=pool.kv_indptr[:3],
        indices_buffer=pool.indices, last_page_len_buffer=pool.last[:2],
    )  # fmt: skip
    graph._backend, graph._int_workspace_buffer = "fa2", prefill._int_workspace_buffer
    return pool, prefill, decode, graph


def test_prefill_and_decode(wrappers, device):
    pool, prefill, decode, graph = wrappers
    for q_lens, kv_lens in (([9, 4], [9, 4]), ([3, 7], [20, 8])):
        x, paged = pool.step(q_lens, kv_lens)
        prefill.plan(
            qo_indptr=on_host(x.qo_indptr, device), paged_kv_indptr=on_host(paged.indptr, device),
            paged_kv_indices=paged.indices, paged_kv_last_page_len=on_host(paged.last_page_len, device),
            num_qo_heads=HEADS[0], num_kv_heads=HEADS[1], head_dim_qk=DIM, page_size=1, pos_encoding_mode="NONE",
            seq_lens=on_host(x.kv_indptr.diff(), device), q_data_type=HALF, kv_data_type=HALF, non_blocking=True,
            causal=True,
        )  # fmt: skip
        check(prefill.run(q=x.q, paged_kv_cache=pool.pair, return_lse=True), x, Options(causal=True))
    for kv_lens in ([30, 5], [31, 6]):
        x, paged = pool.step([1, 1], kv_lens)
        for wrapper in (decode, graph):
            plan_decode(wrapper, x, paged, device)
            check(wrapper.run(q=x.q, paged_kv_cache=pool.pair, return_lse=True), x, Options())
    assert graph._int_workspace_buffer is decode._int_workspace_buffer is prefill._int_workspace_buffer


def test_a_backend_that_is_put_in_is_the_one_that_runs(wrappers, device):
    pool, _, decode, graph = wrappers
    x, paged = pool.step([1, 1], [30, 5])
    for wrapper in (decode, graph):
        wrapper._backend = "portable"
        plan_decode(wrapper, x, paged, device)
        assert wrapper.explain().variant.name == "portable" and wrapper.resolved_backend == "fa2"
    graph._backend = "reference"
    with pytest.raises(ValueError, match="^backend: got reference; allowed: portable, as first planned"):
        plan_decode(graph, x, paged, device)
