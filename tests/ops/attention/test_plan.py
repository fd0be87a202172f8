"""One wrapper, many plans and calls: what is kept from one to the next never shows in a result."""

import threading

import numpy as np
import pytest
import torch

import flashinfer
from flashinfer._core.checks import UnsupportedConfig
from flashinfer.testing import generate
from flashinfer.testing.compare import assert_bitwise
from tests.ops.attention.cases import backends, check, workspace
from tests.ops.attention.oracle import Extras, Options

HEADS, DIM, PAGE = (4, 2), 64, 4
CAUSAL = Options(causal=True)


def batch(device, qo, kv, dtype=torch.float16):
    x = generate.ragged_batch(list(qo), list(kv), *HEADS, DIM, dtype=dtype, device=device)
    return x, generate.paged(x, PAGE)


def plan_prefill(wrapper, x, paged, where="device", **options):
    tables = (x.qo_indptr, paged.indptr, paged.indices, paged.last_page_len)
    tables = tables if where == "device" else [t.cpu() for t in tables]
    wrapper.plan(*tables, *HEADS, DIM, PAGE, q_data_type=x.q.dtype, **(dict(causal=True) | options))


def plan_decode(wrapper, x, paged, **options):
    wrapper.plan(paged.indptr.cpu(), paged.indices, paged.last_page_len.cpu(), *HEADS, DIM, PAGE,
                 q_data_type=x.q.dtype, **options)  # fmt: skip


def elsewhere(t):
    """The same values in other memory, with the same strides."""
    return torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device=t.device).copy_(t)


def shifted(t):
    """The same values one element after a 16-byte boundary."""
    return torch.cat((t.new_zeros(1), t.flatten()))[1:].view(t.shape)


@pytest.mark.parametrize("where", ("host", "device"))
def test_many_plans_of_one_wrapper(where, device):
    """Longer, shorter, wider, empty, and the same again."""
    batches = [((3, 1), (9, 4)), ((3, 1), (30, 1)), ((1,) * 9, (5,) * 9), ((), ()), ((40,), (40,)), ((3, 1), (9, 4)),
               ((0, 2), (0, 2))]  # fmt: skip
    for backend in backends(device):
        paged_wrapper = flashinfer.BatchPrefillWithPagedKVCacheWrapper(workspace(device), backend=backend)
        ragged_wrapper = flashinfer.BatchPrefillWithRaggedKVCacheWrapper(workspace(device), backend=backend)
        for qo, kv in batches:
            x, paged = batch(device, qo, kv)
            plan_prefill(paged_wrapper, x, paged, where)
            indptrs = (x.qo_indptr, x.kv_indptr) if where == "device" else (x.qo_indptr.cpu(), x.kv_indptr.cpu())
            ragged_wrapper.plan(*indptrs, *HEADS, DIM, causal=True, q_data_type=x.q.dtype)
            for _ in range(2):
                for result in (
                    paged_wrapper.run_return_lse(x.q, paged.kv_cache), ragged_wrapper.run_return_lse(x.q, x.k, x.v)
                ):  # fmt: skip
                    if qo:
                        check(result, x, CAUSAL)
                    assert result[0].shape == x.q.shape


def test_many_decode_plans_of_one_wrapper(device):
    for backend in backends(device):
        wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(workspace(device), backend=backend)
        for kv in ((9, 4, 70), (10, 5, 71), (1, 0, 3), (200,), (9, 4, 70)):
            x, paged = batch(device, (1,) * len(kv), kv)
            plan_decode(wrapper, x, paged)
            for _ in range(2):
                check(wrapper.run_return_lse(x.q, paged.kv_cache), x, Options())


def test_calls_of_one_plan_that_differ(device):
    """Each call is like an earlier one in all but one thing, and each comes twice."""
    x, paged = batch(device, (3, 1), (9, 4))
    k, v = paged.caches
    sinks = torch.tensor([0.3, -2.0, 5.0, 1.0], device=device)
    other_sinks = torch.tensor([2.0, 1.0, -1.0, 0.0], device=device)
    wide = generate.strided(x.q)
    calls = [
        (x.q, paged.kv_cache, {}, Extras()),
        (elsewhere(x.q), elsewhere(paged.kv_cache), {}, Extras()),
        (shifted(x.q), paged.kv_cache, {}, Extras()),
        (wide, paged.kv_cache, {}, Extras()),
        (x.q, (k, v), {}, Extras()),
        (x.q, (elsewhere(k), shifted(v)), {}, Extras()),
        (x.q, torch.cat((paged.kv_cache, paged.kv_cache)), {}, Extras()),
        (x.q, paged.kv_cache, dict(k_scale=0.5), Extras(k_scale=0.5)),
        (x.q, paged.kv_cache, dict(k_scale=0.25), Extras(k_scale=0.25)),
        (x.q, paged.kv_cache, dict(v_scale=3.0), Extras(v_scale=3.0)),
        (x.q, paged.kv_cache, dict(q_scale=torch.full((4,), 2.0, device=device)), Extras(q_scale=2.0)),
        (x.q, paged.kv_cache, dict(sinks=sinks), Extras(sinks=sinks)),
        (x.q, paged.kv_cache, dict(sinks=other_sinks), Extras(sinks=other_sinks)),
        (x.q, paged.kv_cache, dict(sinks=other_sinks.half()), Extras(sinks=other_sinks)),
    ]
    for backend in backends(device):
        wrapper = flashinfer.BatchPrefillWithPagedKVCacheWrapper(workspace(device), backend=backend)
        plan_prefill(wrapper, x, paged)
        rows = x.q.shape[0]
        for q, cache, arguments, extras in calls * 2:
            for out in (None, shifted(torch.full_like(q, float("nan")))):
                lse = torch.full(q.shape[:2], float("nan"), device=device)
                got, got_lse = wrapper.run(q, cache, out=out, lse=lse, return_lse=True, **arguments)
                assert out is None or got.data_ptr() == out.data_ptr()
                assert got_lse.data_ptr() == lse.data_ptr()
                check((got[:rows], got_lse[:rows]), x, CAUSAL, extras)
                if out is None:
                    assert_bitwise(wrapper.run(q, cache, **arguments)[:rows], got[:rows])


def test_scales_and_sinks_that_change_in_place(device):
    x, paged = batch(device, (1, 1), (9, 30))
    for backend in backends(device):
        wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(workspace(device), backend=backend)
        plan_decode(wrapper, x, paged)
        scales = torch.ones(1), torch.ones(4, device=device), torch.ones(1, device=device)
        sinks = torch.zeros(4, device=device), torch.zeros(4, device=device, dtype=torch.bfloat16)
        for value in (1.0, 0.5):
            for scale in scales:
                scale.fill_(value)
                check(wrapper.run_return_lse(x.q, paged.kv_cache, k_scale=scale), x, Options(), Extras(k_scale=value))
            for sink in sinks:
                sink.fill_(value)
                check(wrapper.run_return_lse(x.q, paged.kv_cache, sinks=sink), x, Options(), Extras(sinks=sink.float()))


def test_a_window_of_its_own_is_that_of_its_call_alone(device):
    x, paged = batch(device, (1, 1), (30, 4))
    for backend in backends(device):
        wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(workspace(device), backend=backend)
        plan_decode(wrapper, x, paged, window_left=20)
        for window in (20, 5, 20, 3, 5):
            result = wrapper.run_return_lse(x.q, paged.kv_cache, window_left=window)
            check(result, x, Options(window_left=window))
            check(wrapper.run_return_lse(x.q, paged.kv_cache), x, Options(window_left=20))


def test_wrong_calls_after_right_ones(device):
    x, paged = batch(device, (3, 2), (9, 5))
    kv = paged.kv_cache
    other = torch.device("meta")
    for backend in backends(device):
        wrapper = flashinfer.BatchPrefillWithPagedKVCacheWrapper(workspace(device), backend=backend)
        plan_prefill(wrapper, x, paged, "host")
        out, lse = torch.empty_like(x.q), torch.empty(x.q.shape[:2], device=device)
        for _ in range(2):
            check(wrapper.run(x.q, kv, out=out, lse=lse, return_lse=True), x, CAUSAL)
            check(wrapper.run(x.q, kv, lse=lse, return_lse=True), x, CAUSAL)
        inside = [t.view(-1)[: 2 * lse.numel()].view(torch.float32).view(lse.shape) for t in (x.q, kv, out)]
        wrong = [
            ("q", dict(q=x.q.float())),
            ("q", dict(q=x.q.to(other))),
            ("q", dict(q=x.q[:4])),
            ("q", dict(q=x.q.transpose(1, 2))),
            ("k", dict(paged_kv_cache=kv.float())),
            ("k", dict(paged_kv_cache=kv.to(other))),
            ("k", dict(paged_kv_cache=kv.transpose(2, 3))),
            ("paged_kv_cache", dict(paged_kv_cache=(kv[:, 0],))),
            ("out", dict(out=out.float())),
            ("out", dict(out=out.to(other))),
            ("out", dict(out=out[1:])),
            ("lse", dict(lse=lse.half())),
            ("lse", dict(lse=lse.to(other))),
            ("lse", dict(lse=lse.t().contiguous().t())),
            ("sinks", dict(sinks=torch.zeros(4, device=other))),
            ("lse: got some of the memory of q", dict(lse=inside[0])),
            ("lse: got some of the memory of q", dict(lse=inside[0], out=None)),
            ("lse: got some of the memory of paged_kv_cache", dict(lse=inside[1])),
            ("lse: got the memory of out", dict(lse=inside[2])),
        ]
        for argument, change in wrong:
            arguments = dict(q=x.q, paged_kv_cache=kv, out=out, lse=lse, return_lse=True) | change
            with pytest.raises(ValueError, match=argument):
                wrapper.run(**arguments)


def test_ragged_keys_must_be_as_many_as_planned(device):
    x, _ = batch(device, (3, 2), (9, 5))
    for backend in backends(device):
        wrapper = flashinfer.BatchPrefillWithRaggedKVCacheWrapper(workspace(device), backend=backend)
        wrapper.plan(x.qo_indptr.cpu(), x.kv_indptr.cpu(), *HEADS, DIM, q_data_type=x.q.dtype)
        with pytest.raises(ValueError, match="k: got 13 rows; allowed: at least 14"):
            wrapper.run(x.q, x.k[:13], x.v[:13])


def test_tables_must_be_integers(device):
    x, paged = batch(device, (3, 2), (9, 5))
    wrapper = flashinfer.BatchPrefillWithPagedKVCacheWrapper(workspace(device))
    tables = dict(qo_indptr=x.qo_indptr, paged_kv_indptr=paged.indptr, paged_kv_indices=paged.indices,
                  paged_kv_last_page_len=paged.last_page_len)  # fmt: skip
    for name, table in tables.items():
        for wrong in (table.float(), table[None]):
            with pytest.raises(ValueError, match=name.removeprefix("paged_").removeprefix("kv_")):
                wrapper.plan(**tables | {name: wrong}, num_qo_heads=4, num_kv_heads=2, head_dim_qk=DIM, page_size=PAGE)
        wrapper.plan(**tables | {name: table.long()}, num_qo_heads=4, num_kv_heads=2, head_dim_qk=DIM, page_size=PAGE,
                     q_data_type=x.q.dtype, causal=True)  # fmt: skip
        check(wrapper.run_return_lse(x.q, paged.kv_cache), x, CAUSAL)


def test_threads_share_a_planned_wrapper(device):
    batches = [batch(device, (1, 1, 1), (30, 4, 9)) for _ in range(4)]
    x, paged = batches[0]
    wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(workspace(device))
    plan_decode(wrapper, x, paged, disable_split_kv=True)
    queries = [y.q for y, _ in batches]
    expected = [wrapper.run(q, paged.kv_cache) for q in queries]
    meet, wrong = threading.Barrier(4), []

    def work(number):
        meet.wait()
        for _ in range(20):
            if not torch.equal(wrapper.run(queries[number], paged.kv_cache), expected[number]):
                wrong.append(number)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def graph_wrapper(device, batch_size=3, pages=100, rows=True, **kwargs):
    integers = dict(dtype=torch.int32, device=device)
    tables = tuple(torch.zeros(count, **integers) for count in (batch_size + 1, pages, batch_size))
    if not rows:
        return flashinfer.CUDAGraphBatchDecodeWithPagedKVCacheWrapper(workspace(device), *tables)
    return flashinfer.BatchPrefillWithPagedKVCacheWrapper(
        workspace(device), "NHD", True, torch.zeros(batch_size + 1, **integers), *tables, **kwargs
    )


@pytest.mark.parametrize(
    "argument, change",
    [
        ("causal", dict(causal=False)),
        ("window_left", dict(window_left=3)),
        ("sm_scale", dict(sm_scale=0.3)),
        ("logits_soft_cap", dict(logits_soft_cap=2.0)),
        ("rope_theta", dict(rope_theta=1e6)),
        ("disable_split_kv", dict(disable_split_kv=True)),
        ("fixed_split_size", dict(fixed_split_size=16)),
        ("pos_encoding_mode", dict(pos_encoding_mode="ALIBI")),
        ("o_data_type", dict(o_data_type=torch.float32)),
        ("qo_indptr", dict(qo_indptr=torch.tensor([0, 3, 6], dtype=torch.int32))),
    ],
)
def test_a_graph_wrapper_refuses_what_a_captured_graph_cannot_follow(argument, change, device):
    x, paged = batch(device, (3, 2), (9, 5))
    wrapper = graph_wrapper(device)
    plan_prefill(wrapper, x, paged, "host")
    arguments = dict(
        qo_indptr=x.qo_indptr.cpu(), paged_kv_indptr=paged.indptr, paged_kv_indices=paged.indices,
        paged_kv_last_page_len=paged.last_page_len, num_qo_heads=4, num_kv_heads=2, head_dim_qk=DIM, page_size=PAGE,
        causal=True, q_data_type=x.q.dtype, sm_scale=DIM**-0.5, logits_soft_cap=0.0,
    )  # fmt: skip
    wrapper.plan(**arguments)
    check(wrapper.run_return_lse(x.q, paged.kv_cache), x, CAUSAL)
    with pytest.raises(ValueError, match=argument):
        wrapper.plan(**arguments | change)
    # What was refused has left nothing behind.
    check(wrapper.run_return_lse(x.q, paged.kv_cache), x, CAUSAL)


def test_a_graph_wrapper_refuses_masks_it_has_no_buffer_for(device):
    x, paged = batch(device, (3, 2), (9, 5))
    mask = generate.random_mask((3, 2), (9, 5), device=device)
    with pytest.raises(ValueError, match="custom_mask"):
        plan_prefill(graph_wrapper(device), x, paged, custom_mask=mask)
    buffers = dict(
        custom_mask_buf=torch.zeros(100, dtype=torch.uint8, device=device),
        mask_indptr_buf=torch.zeros(4, dtype=torch.int32, device=device),
    )
    wrapper = graph_wrapper(device, **buffers)
    plan_prefill(wrapper, x, paged, custom_mask=mask)
    plan_prefill(wrapper, x, paged, custom_mask=mask)
    other = batch(device, (1, 2), (4, 2))
    packed = torch.zeros(101, dtype=torch.uint8, device=device)
    for given in (dict(custom_mask=mask), dict(packed_custom_mask=packed), dict(packed_custom_mask=packed.int())):
        with pytest.raises(ValueError, match="custom_mask"):
            plan_prefill(wrapper, *other, "host", **given)
        # What was refused has left the buffers alone.
        check(wrapper.run_return_lse(x.q, paged.kv_cache), x, Options(), Extras([*mask.split((27, 10))]))
    with pytest.raises(ValueError, match="custom_mask"):
        plan_prefill(wrapper, x, paged)


def test_a_graph_wrapper_first_planned_for_few_serves_many(device):
    """A wide group of wide heads, so that a request has several tiles: the work list must hold all of them."""
    heads, dim = (64, 1), 512
    for backend in backends(device)[-1:]:
        wrapper = graph_wrapper(device, 4, rows=False)
        wrapper._backend = backend
        for kv in ((5,), (9, 4, 30, 1)):
            x = generate.ragged_batch([1] * len(kv), list(kv), *heads, dim, dtype=torch.float16, device=device)
            paged = generate.paged(x, PAGE)
            wrapper.plan(paged.indptr, paged.indices, paged.last_page_len, *heads, dim, PAGE, q_data_type=x.q.dtype)
            q = torch.cat((x.q, x.q.new_zeros(4 - len(kv), *x.q.shape[1:])))
            out, lse = wrapper.run(q, paged.kv_cache, return_lse=True)
            check((out[: len(kv)], lse[: len(kv)]), x, Options())
            assert (out[len(kv) :] == 0).all()
        with pytest.raises(ValueError, match="q: got 3 rows; allowed: at least 4"):
            wrapper.run(q[:3], paged.kv_cache)


def test_a_graph_wrapper_refuses_other_query_lengths(device):
    wrapper = graph_wrapper(device, rows=False)
    x, paged = batch(device, (3, 3), (9, 5))
    plan_decode(wrapper, x, paged, q_len_per_req=3)
    with pytest.raises(ValueError, match="q_len_per_req"):
        plan_decode(wrapper, x, paged, q_len_per_req=2)
    with pytest.raises(ValueError, match="causal"):
        plan_decode(wrapper, x, paged)


def test_numbers_of_numpy_are_those_of_python(device):
    x, paged = batch(device, (1, 1), (5, 9))
    wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(workspace(device), "NHD")
    tables = paged.indptr.cpu(), paged.indices, paged.last_page_len.cpu()
    of_numpy = [np.int64(n) for n in (*HEADS, DIM, PAGE)]
    results = []
    # Equal to the numbers before, these do not get what was kept of them.
    for numbers in (of_numpy, (*HEADS, DIM, PAGE)):
        wrapper.plan(*tables, *numbers, q_data_type=x.q.dtype, sm_scale=np.float32(0.25), window_left=np.int32(-1))
        results.append(wrapper.run(x.q, paged.kv_cache))
    assert_bitwise(*results)


@pytest.mark.parametrize("integer", (int, np.int64, torch.tensor), ids=lambda kind: kind.__name__)
def test_bounds_are_integers_of_any_kind(integer, device):
    x, paged = batch(device, (3, 2), (5, 9))
    for backend in backends(device):
        wrapper = flashinfer.BatchPrefillWithPagedKVCacheWrapper(workspace(device), "NHD", backend=backend)
        plan_prefill(wrapper, x, paged, max_token_per_sequence=integer(3), max_sequence_kv=integer(9))
        check(wrapper.run(x.q, paged.kv_cache, return_lse=True), x, CAUSAL)
        wrapper = flashinfer.BatchPrefillWithRaggedKVCacheWrapper(workspace(device), backend=backend)
        wrapper.plan(x.qo_indptr, x.kv_indptr, *HEADS, DIM, causal=True, max_token_per_sequence=integer(7))
        check(wrapper.run(x.q, x.k, x.v, return_lse=True), x, CAUSAL)
    with pytest.raises(ValueError, match="^max_token_per_sequence: got 2.5"):
        plan_prefill(wrapper_of(device), x, paged, max_token_per_sequence=2.5)


def wrapper_of(device):
    return flashinfer.BatchPrefillWithPagedKVCacheWrapper(workspace(device), "NHD")


def test_nothing_is_recorded_for_gradients(device):
    x, paged = batch(device, (3, 2), (5, 9))
    for backend in backends(device):
        wrapper = flashinfer.BatchPrefillWithPagedKVCacheWrapper(workspace(device), "NHD", backend=backend)
        plan_prefill(wrapper, x, paged)
        q = x.q.clone().requires_grad_()
        assert not wrapper.run(q, paged.kv_cache).requires_grad
        out = torch.empty_like(x.q)
        assert wrapper.run(q, paged.kv_cache, out=out) is out and not out.requires_grad


def test_lengths_are_those_that_plan_saw(device):
    x, paged = batch(device, (3, 2), (5, 9))
    for backend in backends(device):
        wrapper = flashinfer.BatchPrefillWithPagedKVCacheWrapper(workspace(device), "NHD", backend=backend)
        qo, kv, last = (t.clone() for t in (x.qo_indptr.cpu(), paged.indptr.cpu(), paged.last_page_len.cpu()))
        wrapper.plan(qo, kv, paged.indices, last, *HEADS, DIM, PAGE, causal=True, q_data_type=x.q.dtype)
        for table in (qo, kv, last):
            table.zero_()
        check(wrapper.run(x.q, paged.kv_cache, return_lse=True), x, CAUSAL)


def test_a_refused_plan_leaves_how_keys_lie_as_it_was(device):
    half, indptr, sizes = torch.float16, torch.tensor([0, 3]), (4, 2, 64)
    q = torch.randn(3, 4, 64, dtype=half, device=device)
    codes = torch.randint(256, (3, 2, 32), device=device).to(torch.uint8)
    factors = torch.full((3, 2, 4), 56, dtype=torch.uint8, device=device)
    wrapper = flashinfer.BatchPrefillWithRaggedKVCacheWrapper(workspace(device))
    wrapper.plan(indptr, indptr, *sizes, q_data_type=half, kv_data_type="nvfp4")
    wanted = wrapper.run(q, codes, codes, kv_cache_sf=(factors, factors))
    with pytest.raises(ValueError, match="^sm_scale: got nan"):
        wrapper.plan(indptr, indptr, *sizes, q_data_type=half, sm_scale=float("nan"))
    assert_bitwise(wrapper.run(q, codes, codes, kv_cache_sf=(factors, factors)), wanted)


def test_a_refused_plan_leaves_what_drafts_see_as_it_was(device):
    tables = [torch.tensor(x) for x in ([0, 1], [1], [9])]
    q, cache = torch.randn(3, 4, 64, device=device).half(), torch.randn(3, 2, 16, 2, 64, device=device).half()
    plan = dict(zip(("indptr", "indices", "last_page_len"), tables)) | dict(
        num_qo_heads=4, num_kv_heads=2, head_dim=64, page_size=16, q_data_type=torch.float16
    )
    found = []
    for refused in (False, True):
        wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(workspace(device), backend="trtllm-gen")
        wrapper.plan(**plan)
        if refused:
            with pytest.raises(ValueError, match="^sm_scale: got nan"):
                wrapper.plan(**plan, is_causal=False, sm_scale=float("nan"))
        # More queries of each request than were planned, causal among themselves.
        found.append(wrapper.run(q, cache))
    assert_bitwise(*found)
