"""What only a GPU shows: captured graphs, streams, planning without waiting, warm runs without compiling."""

import pytest
import torch

import flashinfer
from flashinfer._core import kernel_cache
from flashinfer.testing import generate
from flashinfer.testing.compare import assert_bitwise
from tests.ops.attention.cases import check, run_decode, workspace
from tests.ops.attention.oracle import Options

pytestmark = pytest.mark.gpu
HEADS, DIM, PAGE = (8, 2), 128, 16
BATCHES = [(1023, 1, 0, 4097), (5, 5, 5, 5), (2000, 300), (0, 0, 0, 1)]


def decode_batch(kv_lens, device):
    x = generate.ragged_batch([1] * len(kv_lens), list(kv_lens), *HEADS, DIM, dtype=torch.bfloat16, device=device)
    return x, generate.paged(x, PAGE, spare=0)


def decode_buffers(device, batch=4, pages=400):
    integers = dict(dtype=torch.int32, device=device)
    return torch.zeros(batch + 1, **integers), torch.zeros(pages, **integers), torch.zeros(batch, **integers)


@pytest.mark.parametrize("where", ("host", "device"))
def test_a_captured_decode_serves_every_later_batch(where, device):
    pool = torch.zeros(400, 2, PAGE, HEADS[1], DIM, dtype=torch.bfloat16, device=device)
    q = torch.zeros(4, HEADS[0], DIM, dtype=torch.bfloat16, device=device)
    out = torch.full_like(q, float("nan"))
    wrapper = flashinfer.CUDAGraphBatchDecodeWithPagedKVCacheWrapper(workspace(device), *decode_buffers(device))

    def plan(paged):
        tables = (paged.indptr, paged.indices, paged.last_page_len)
        tables = tables if where == "device" else tuple(t.cpu().pin_memory() for t in tables)
        wrapper.plan(*tables, *HEADS, DIM, PAGE, q_data_type=torch.bfloat16)

    batches = [decode_batch(lens, device) for lens in BATCHES]
    plan(batches[0][1])
    wrapper.run(q, pool, out=out)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        wrapper.run(q, pool, out=out)
    for x, paged in batches:
        pool[: paged.kv_cache.shape[0]] = paged.kv_cache.nan_to_num()
        q[: x.q.shape[0]] = x.q
        plan(paged)
        out.fill_(float("nan"))
        graph.replay()
        replayed = out.clone()
        eager, lse = wrapper.run(q, pool, return_lse=True)
        assert_bitwise(replayed, eager)
        n = x.q.shape[0]
        check((eager[:n], lse[:n]), x, Options())
        assert (replayed[n:] == 0).all()


def test_a_captured_prefill_serves_every_later_batch(device):
    integers = dict(dtype=torch.int32, device=device)
    wrapper = flashinfer.BatchPrefillWithPagedKVCacheWrapper(
        workspace(device), use_cuda_graph=True, qo_indptr_buf=torch.zeros(4, **integers),
        paged_kv_indptr_buf=torch.zeros(4, **integers), paged_kv_indices_buf=torch.zeros(300, **integers),
        paged_kv_last_page_len_buf=torch.zeros(3, **integers),
    )  # fmt: skip
    pool = torch.zeros(300, 2, PAGE, HEADS[1], DIM, dtype=torch.bfloat16, device=device)
    q = torch.zeros(300, HEADS[0], DIM, dtype=torch.bfloat16, device=device)
    graph = None
    for qo, kv in [((200, 1, 99), (1000, 1, 400)), ((3, 17), (3, 2000)), ((1, 0, 250), (64, 0, 250))]:
        x = generate.ragged_batch(list(qo), list(kv), *HEADS, DIM, dtype=torch.bfloat16, device=device)
        paged = generate.paged(x, PAGE, spare=0)
        pool[: paged.kv_cache.shape[0]] = paged.kv_cache.nan_to_num()
        q[: x.q.shape[0]] = x.q
        wrapper.plan(x.qo_indptr, paged.indptr, paged.indices, paged.last_page_len, *HEADS, DIM, PAGE, causal=True,
                     q_data_type=torch.bfloat16)  # fmt: skip
        if graph is None:
            wrapper.run_return_lse(q, pool)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                out, lse = wrapper.run_return_lse(q, pool)
        out.fill_(float("nan"))
        graph.replay()
        n = x.q.shape[0]
        check((out[:n], lse[:n]), x, Options(causal=True))


def test_a_captured_run_on_other_tiles_than_planned_serves_later_batches(device):
    """Rows that are not aligned run on narrower tiles than plan() expects, with a work list of their own."""
    integers = dict(dtype=torch.int32, device=device)
    wrapper = flashinfer.BatchPrefillWithRaggedKVCacheWrapper(
        workspace(device), use_cuda_graph=True, qo_indptr_buf=torch.zeros(3, **integers),
        kv_indptr_buf=torch.zeros(3, **integers),
    )  # fmt: skip
    q, k, v = (torch.zeros(601, n, DIM + 1, dtype=torch.bfloat16, device=device)[..., :DIM] for n in (8, 2, 2))
    graph = None
    for lens in ((300, 301), (17, 500), (0, 129)):
        x = generate.ragged_batch(list(lens), list(lens), *HEADS, DIM, dtype=torch.bfloat16, device=device)
        for buffer, rows in ((q, x.q), (k, x.k), (v, x.v)):
            buffer[: len(rows)] = rows
        wrapper.plan(x.qo_indptr, x.kv_indptr, *HEADS, DIM, causal=True, q_data_type=torch.bfloat16)
        if graph is None:
            wrapper.run_return_lse(q, k, v)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                out, lse = wrapper.run_return_lse(q, k, v)
        out.fill_(float("nan"))
        graph.replay()
        n = x.q.shape[0]
        check((out[:n], lse[:n]), x, Options(causal=True))


def test_a_graph_wrapper_refuses_what_its_buffers_cannot_hold(device):
    buffers = decode_buffers(device, pages=20)
    wrapper = flashinfer.CUDAGraphBatchDecodeWithPagedKVCacheWrapper(workspace(device), *buffers)
    x, paged = decode_batch((16 * 21,), device)
    with pytest.raises(ValueError, match="kv_indices"):
        wrapper.plan(paged.indptr, paged.indices, paged.last_page_len, *HEADS, DIM, PAGE, q_data_type=torch.bfloat16)
    x, paged = decode_batch((1,) * 5, device)
    with pytest.raises(ValueError, match="batch_size"):
        wrapper.plan(paged.indptr, paged.indices, paged.last_page_len, *HEADS, DIM, PAGE, q_data_type=torch.bfloat16)
    x, paged = decode_batch((1,) * 3, device)
    wrapper.plan(paged.indptr, paged.indices, paged.last_page_len, *HEADS, DIM, PAGE, q_data_type=torch.bfloat16)
    with pytest.raises(ValueError, match="num_kv_heads"):
        wrapper.plan(paged.indptr, paged.indices, paged.last_page_len, 8, 4, DIM, PAGE, q_data_type=torch.bfloat16)


def test_plan_and_run_never_wait_for_the_device(device):
    x, paged = decode_batch((1023, 1, 0, 4097), device)
    wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(workspace(device))
    prefill = flashinfer.BatchPrefillWithPagedKVCacheWrapper(workspace(device))
    qo_indptr = generate.indptr([1] * 4, device)
    tables = (paged.indptr, paged.indices, paged.last_page_len)
    pinned = [t.cpu().pin_memory() for t in tables]
    torch.cuda.synchronize()
    results = []
    torch.cuda.set_sync_debug_mode("error")
    try:
        for given in (tables, pinned):
            wrapper.plan(*given, *HEADS, DIM, PAGE, q_data_type=torch.bfloat16)
            results.append(wrapper.run_return_lse(x.q, paged.kv_cache))
        prefill.plan(qo_indptr, *tables, *HEADS, DIM, PAGE, causal=True, q_data_type=torch.bfloat16)
        results.append(prefill.run_return_lse(x.q, paged.kv_cache))
    finally:
        torch.cuda.set_sync_debug_mode("default")
    for result in results:
        check(result, x, Options())


def test_on_a_side_stream(device):
    x, paged = decode_batch((1023, 1, 0, 4097), device)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        result = run_decode(x, Options(), "portable", page_size=PAGE, paged=paged)
    stream.synchronize()
    check(result, x, Options())


def test_warm_runs_compile_nothing_and_allocate_their_output_only(device):
    x, paged = decode_batch((1023, 1, 0, 4097), device)
    wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(workspace(device))
    out = torch.empty_like(x.q)
    tables = (paged.indptr, paged.indices, paged.last_page_len)
    wrapper.plan(*tables, *HEADS, DIM, PAGE, q_data_type=torch.bfloat16)
    wrapper.run(x.q, paged.kv_cache, out=out)
    kernel_cache.freeze()
    try:
        before = torch.cuda.memory_stats()["allocation.all.allocated"]
        wrapper.run(x.q, paged.kv_cache, out=out)
        assert torch.cuda.memory_stats()["allocation.all.allocated"] == before
    finally:
        kernel_cache.freeze(False)


def test_a_workspace_too_small_is_replaced(device):
    x, paged = decode_batch((4097, 4097), device)
    wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(torch.empty(16, dtype=torch.uint8, device=device))
    tables = (paged.indptr, paged.indices, paged.last_page_len)
    wrapper.plan(*tables, *HEADS, DIM, PAGE, q_data_type=torch.bfloat16)
    check(wrapper.run_return_lse(x.q, paged.kv_cache), x, Options())
    needed, _ = wrapper.workspace_size(*tables, *HEADS, DIM, PAGE, q_data_type=torch.bfloat16)
    assert needed > 16


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
def test_on_the_second_device():
    device = torch.device("cuda", 1)
    x, paged = decode_batch((1023, 1, 0, 4097), device)
    check(run_decode(x, Options(), "portable", page_size=PAGE, paged=paged), x, Options())
