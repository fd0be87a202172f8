"""What only a GPU shows: captured graphs, streams, planning without waiting, warm runs without compiling."""

from contextlib import contextmanager

import pytest
import torch

import flashinfer
from flashinfer._core import kernel_cache
from flashinfer.testing import generate, guard
from flashinfer.testing.compare import assert_bitwise
from tests.ops.attention.cases import check, run_decode, run_paged, run_ragged, workspace
from tests.ops.attention.oracle import Extras, Options

pytestmark = pytest.mark.gpu
HEADS, DIM, PAGE = (8, 2), 128, 16
BATCHES = [(1023, 1, 0, 4097), (5, 5, 5, 5), (2000, 300), (0, 0, 0, 1)]


def decode_batch(kv_lens, device):
    x = generate.ragged_batch([1] * len(kv_lens), list(kv_lens), *HEADS, DIM, dtype=torch.bfloat16, device=device)
    return x, generate.paged(x, PAGE, spare=0)


def decode_buffers(device, batch=4, pages=400):
    integers = dict(dtype=torch.int32, device=device)
    return torch.zeros(batch + 1, **integers), torch.zeros(pages, **integers), torch.zeros(batch, **integers)


@pytest.mark.parametrize("dtype", (torch.bfloat16, torch.float16))
@pytest.mark.parametrize("page_size", (0, 1, 16, 24, 128))
@pytest.mark.parametrize("dim", (72, 80, 88, 96, 104, 112, 120, 136, 144, 152, 160, 168))
def test_prefill_of_heads_that_are_no_power_of_two(dim, page_size, dtype, device):
    x = generate.ragged_batch([300, 1, 130], [1000, 70, 257], *HEADS, dim, dtype=dtype, device=device)
    for options in (Options(causal=True), Options(causal=True, window_left=200), Options(logits_soft_cap=20.0)):
        if page_size:
            result = run_paged(x, options, "auto", page_size=page_size)
        else:
            result = run_ragged(x, options, "auto")
        check(result, x, options)


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


@pytest.mark.parametrize("split", (dict(disable_split_kv=True), dict(fixed_split_size=256)))
def test_prefill_work_is_taken_once_in_every_run(split, device):
    """With more splits than blocks begin with, and fewer: what a run leaves behind serves the next one."""
    for lens in ((1000, 0, 1, 700, 129), (40, 3)):
        x = generate.ragged_batch(list(lens), list(lens), 32, 8, DIM, dtype=torch.bfloat16, device=device)
        wrapper = flashinfer.BatchPrefillWithRaggedKVCacheWrapper(workspace(device, 1 << 26))
        wrapper.plan(x.qo_indptr, x.kv_indptr, 32, 8, DIM, causal=True, q_data_type=torch.bfloat16, **split)
        first = wrapper.run(x.q, x.k, x.v, return_lse=True)
        check(first, x, Options(causal=True))
        for _ in range(3):
            for again, result in zip(wrapper.run(x.q, x.k, x.v, return_lse=True), first):
                assert_bitwise(again, result)


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
    with pytest.raises(ValueError, match="^indices: got 21"):
        wrapper.plan(paged.indptr, paged.indices, paged.last_page_len, *HEADS, DIM, PAGE, q_data_type=torch.bfloat16)
    x, paged = decode_batch((1,) * 5, device)
    with pytest.raises(ValueError, match="batch_size"):
        wrapper.plan(paged.indptr, paged.indices, paged.last_page_len, *HEADS, DIM, PAGE, q_data_type=torch.bfloat16)
    x, paged = decode_batch((1,) * 3, device)
    wrapper.plan(paged.indptr, paged.indices, paged.last_page_len, *HEADS, DIM, PAGE, q_data_type=torch.bfloat16)
    with pytest.raises(ValueError, match="num_kv_heads"):
        wrapper.plan(paged.indptr, paged.indices, paged.last_page_len, 8, 4, DIM, PAGE, q_data_type=torch.bfloat16)


@contextmanager
def no_waiting():
    """Inside, whatever torch knows to wait for the device raises."""
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("where", ("host", "pinned", "device"))
def test_plan_and_run_never_wait_for_the_device(where, device):
    x, paged = decode_batch((1023, 1, 0, 4097), device)
    qo_indptr = generate.indptr([1] * 4, device)
    place = {"host": torch.Tensor.cpu, "pinned": lambda t: t.cpu().pin_memory(), "device": lambda t: t}[where]
    tables = [place(t) for t in (paged.indptr, paged.indices, paged.last_page_len)]
    qo_indptr, kv_indptr = place(qo_indptr), place(x.kv_indptr)
    decode, fast = (flashinfer.BatchDecodeWithPagedKVCacheWrapper(workspace(device)) for _ in range(2))
    graph = flashinfer.CUDAGraphBatchDecodeWithPagedKVCacheWrapper(workspace(device), *decode_buffers(device))
    prefill = flashinfer.BatchPrefillWithPagedKVCacheWrapper(workspace(device))
    ragged = flashinfer.BatchPrefillWithRaggedKVCacheWrapper(workspace(device))
    for _ in range(2):
        results = []
        with no_waiting():
            for wrapper in (decode, graph):
                wrapper.plan(*tables, *HEADS, DIM, PAGE, q_data_type=torch.bfloat16)
                results.append(wrapper.run_return_lse(x.q, paged.kv_cache))
            flashinfer.fast_decode_plan(fast, *tables, *HEADS, DIM, PAGE, q_data_type=torch.bfloat16)
            results.append(fast.run_return_lse(x.q, paged.kv_cache))
            prefill.plan(qo_indptr, *tables, *HEADS, DIM, PAGE, causal=True, q_data_type=torch.bfloat16)
            results.append(prefill.run_return_lse(x.q, paged.kv_cache))
            ragged.plan(qo_indptr, kv_indptr, *HEADS, DIM, causal=True, q_data_type=torch.bfloat16)
            results.append(ragged.run_return_lse(x.q, x.k, x.v))
        for result in results:
            check(result, x, Options())


def test_plan_with_options_never_waits(device):
    x, paged = decode_batch((1023, 1, 0, 4097), device)
    tables = [t.cpu() for t in (paged.indptr, paged.indices, paged.last_page_len)]
    sinks = torch.randn(HEADS[0], device=device)
    cases = [
        (dict(pos_encoding_mode="ALIBI"), {}, Extras()),
        (dict(window_left=100), dict(sinks=sinks), Extras(sinks=sinks)),
        (dict(logits_soft_cap=3.0), dict(k_scale=0.5, v_scale=torch.full((1,), 2.0, device=device)),
         Extras(k_scale=0.5, v_scale=2.0)),
    ]  # fmt: skip
    for plan, run, extras in cases:
        wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(workspace(device))
        for _ in range(2):
            with no_waiting():
                wrapper.plan(*tables, *HEADS, DIM, PAGE, q_data_type=torch.bfloat16, **plan)
                result = wrapper.run_return_lse(x.q, paged.kv_cache, **run)
            check(result, x, Options(**plan), extras)


def test_plans_in_flight_do_not_see_each_other(device):
    """The device is busy while many plans are made, and the caller's tables change right after each."""
    wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(workspace(device))
    batches = [decode_batch(lens, device) for lens in BATCHES] * 3
    tables = [[t.cpu() for t in (p.indptr, p.indices, p.last_page_len)] for _, p in batches]
    for (x, paged), table in zip(batches[:4], tables[:4], strict=True):
        wrapper.plan(*table, *HEADS, DIM, PAGE, q_data_type=torch.bfloat16)
        wrapper.run_return_lse(x.q, paged.kv_cache)
    torch.cuda.synchronize()
    torch.cuda._sleep(100_000_000)
    results = []
    for (x, paged), table in zip(batches, tables, strict=True):
        wrapper.plan(*table, *HEADS, DIM, PAGE, q_data_type=torch.bfloat16)
        results.append(wrapper.run_return_lse(x.q, paged.kv_cache))
        for t in table:
            t.fill_(-1)
    for result, (x, _) in zip(results, batches, strict=True):
        check(result, x, Options())


def test_plans_on_two_streams_do_not_see_each_other(device):
    wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(workspace(device))
    batches = [decode_batch(lens, device) for lens in BATCHES[:2]]
    tables = [[t.cpu() for t in (p.indptr, p.indices, p.last_page_len)] for _, p in batches]
    streams = [torch.cuda.Stream(device) for _ in batches]
    for _ in range(2):
        torch.cuda.synchronize()
        results = []
        for (x, paged), table, stream in zip(batches, tables, streams, strict=True):
            with torch.cuda.stream(stream):
                torch.cuda._sleep(20_000_000)
                wrapper.plan(*table, *HEADS, DIM, PAGE, q_data_type=torch.bfloat16, disable_split_kv=True)
                results.append(wrapper.run_return_lse(x.q, paged.kv_cache))
        torch.cuda.synchronize()
        for result, (x, _) in zip(results, batches, strict=True):
            check(result, x, Options())


@pytest.mark.parametrize("kind", ("decode", "prefill", "graph"))
def test_a_captured_plan_follows_its_tables(kind, device):
    """plan() and run() in one graph, replayed after the tables on the device have changed."""
    pages, batch = 400, 4
    indptr, indices, last = decode_buffers(device, batch, pages)
    qo_indptr = generate.indptr([1] * batch, device)
    pool = torch.zeros(pages, 2, PAGE, HEADS[1], DIM, dtype=torch.bfloat16, device=device)
    q = torch.zeros(batch, HEADS[0], DIM, dtype=torch.bfloat16, device=device)
    out, lse = torch.empty_like(q), torch.empty(batch, HEADS[0], device=device)
    if kind == "decode":
        wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(workspace(device))
    elif kind == "graph":
        wrapper = flashinfer.CUDAGraphBatchDecodeWithPagedKVCacheWrapper(workspace(device), *decode_buffers(device))
    else:
        wrapper = flashinfer.BatchPrefillWithPagedKVCacheWrapper(workspace(device))

    def step():
        tables = (indptr, indices, last) if kind != "prefill" else (qo_indptr, indptr, indices, last)
        wrapper.plan(*tables, *HEADS, DIM, PAGE, q_data_type=torch.bfloat16)
        wrapper.run(q, pool, out=out, lse=lse, return_lse=True)

    def fill(lens):
        x, paged = decode_batch(lens, device)
        pool[: paged.kv_cache.shape[0]] = paged.kv_cache.nan_to_num()
        q.copy_(x.q)
        for buffer, table in zip((indptr, indices, last), (paged.indptr, paged.indices, paged.last_page_len)):
            buffer[: len(table)] = table
        return x

    fill((5, 5, 5, 5))
    step()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    for lens in ((1023, 1, 0, 4097), (5, 5, 5, 5), (1, 2000, 300, 0)):
        x = fill(lens)
        out.fill_(float("nan"))
        graph.replay()
        check((out, lse), x, Options())
        # An eager plan between replays is its own.
        y, paged = decode_batch((7, 700, 0, 1), device)
        if kind != "graph":
            tables = (paged.indptr, paged.indices, paged.last_page_len)
            tables = tables if kind == "decode" else (qo_indptr, *tables)
            wrapper.plan(*tables, *HEADS, DIM, PAGE, q_data_type=torch.bfloat16)
            check(wrapper.run_return_lse(y.q, paged.kv_cache), y, Options())


def test_a_captured_plan_refuses_tables_on_the_host(device):
    x, paged = decode_batch((5, 5, 5, 5), device)
    wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(workspace(device))
    tables = (paged.indptr.cpu(), paged.indices, paged.last_page_len)
    wrapper.plan(*tables, *HEADS, DIM, PAGE, q_data_type=torch.bfloat16)
    with pytest.raises(ValueError, match="tables on the host"), torch.cuda.graph(torch.cuda.CUDAGraph()):
        wrapper.plan(*tables, *HEADS, DIM, PAGE, q_data_type=torch.bfloat16)
    wrapper.plan(*tables, *HEADS, DIM, PAGE, q_data_type=torch.bfloat16)
    check(wrapper.run_return_lse(x.q, paged.kv_cache), x, Options())


def test_on_a_side_stream(device):
    x, paged = decode_batch((1023, 1, 0, 4097), device)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        result = run_decode(x, Options(), "portable", page_size=PAGE, paged=paged)
    stream.synchronize()
    check(result, x, Options())


def test_warm_runs_compile_nothing_and_allocate_their_output_only(device, monkeypatch):
    # Around each output the guard has a buffer, and copies its margins where it ends: these would count, too.
    monkeypatch.setattr(guard, "_CALLERS", ())
    x, paged = decode_batch((1023, 1, 0, 4097), device)
    wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(workspace(device))
    out = torch.empty_like(x.q)
    lse = torch.empty(x.q.shape[:2], device=device)
    tables = (paged.indptr.cpu(), paged.indices, paged.last_page_len.cpu())
    wrapper.plan(*tables, *HEADS, DIM, PAGE, q_data_type=torch.bfloat16)
    wrapper.run(x.q, paged.kv_cache, out=out)
    wrapper.run(x.q, paged.kv_cache, out=out, lse=lse, return_lse=True)
    kernel_cache.freeze()
    try:
        before = torch.cuda.memory_stats()["allocation.all.allocated"]
        wrapper.plan(*tables, *HEADS, DIM, PAGE, q_data_type=torch.bfloat16)
        wrapper.run(x.q, paged.kv_cache, out=out)
        wrapper.run(x.q, paged.kv_cache, out=out, lse=lse, return_lse=True)
        assert torch.cuda.memory_stats()["allocation.all.allocated"] == before
        wrapper.run(x.q, paged.kv_cache, return_lse=True)
        assert torch.cuda.memory_stats()["allocation.all.allocated"] == before + 2
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
    wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(workspace(device))
    for _ in range(2):
        for current in (0, 1, 0):
            with torch.cuda.device(current):
                tables = (paged.indptr.cpu(), paged.indices, paged.last_page_len)
                wrapper.plan(*tables, *HEADS, DIM, PAGE, q_data_type=torch.bfloat16)
                check(wrapper.run_return_lse(x.q, paged.kv_cache), x, Options())
                check(wrapper.run_return_lse(x.q, paged.kv_cache), x, Options())
                assert torch.cuda.current_device() == current
