"""Wrappers as SGLang 0.5.23 drives them: tables in its own buffers on the device, plans that do not look there."""

from functools import partial

import pytest
import torch

import flashinfer
from flashinfer.cascade import merge_state
from flashinfer.mla import BatchMLAPagedAttentionWrapper
from flashinfer.testing import generate
from tests.engines.steps import (
    DIM, HEADS, SCALE, Pool, decode_arguments, latent_arguments, packed, prefill_arguments, write_tables,
)  # fmt: skip
from tests.ops.attention.cases import backends, check, workspace
from tests.ops.attention.mla import latents
from tests.ops.attention.oracle import Extras, Options

HALF = torch.float16


def decode_wrapper(pool, tensor_cores, graph, backend):
    buffers = dict(
        use_cuda_graph=True, paged_kv_indptr_buffer=pool.kv_indptr, paged_kv_indices_buffer=pool.indices,
        paged_kv_last_page_len_buffer=pool.last,
    )  # fmt: skip
    wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(
        pool.workspace, "NHD", backend="fa2", use_tensor_cores=tensor_cores, **(buffers if graph else {})
    )
    assert wrapper._backend == "fa2" and wrapper._cached_module is None
    wrapper._backend = backend
    return wrapper


def prefill_wrapper(pool, backend, masked=False):
    mask = dict(custom_mask_buf=pool.mask, mask_indptr_buf=pool.mask_indptr) if masked else {}
    wrapper = flashinfer.BatchPrefillWithPagedKVCacheWrapper(
        pool.workspace, "NHD", use_cuda_graph=True, backend="fa2", qo_indptr_buf=pool.qo_indptr,
        paged_kv_indptr_buf=pool.kv_indptr, paged_kv_indices_buf=pool.indices, paged_kv_last_page_len_buf=pool.last,
        **mask,
    )  # fmt: skip
    wrapper._backend = backend
    return wrapper


def begin(wrapper, x, paged, **named):
    """A plan of a decode, with the lengths on the device."""
    wrapper.begin_forward(
        paged.indptr, paged.indices, paged.last_page_len, *HEADS, DIM, 1, data_type=HALF, q_data_type=HALF,
        non_blocking=True, fixed_split_size=None, disable_split_kv=False, **named,
    )  # fmt: skip


def begin_prefill(wrapper, x, paged, **named):
    wrapper.begin_forward(
        x.qo_indptr, paged.indptr, paged.indices, paged.last_page_len, *HEADS, DIM, 1, q_data_type=HALF,
        kv_data_type=HALF, non_blocking=True, fixed_split_size=None, prefix_len_ptr=None, token_pos_in_items_ptr=None,
        token_pos_in_items_len=0, max_item_len_ptr=None, **named,
    )  # fmt: skip


@pytest.mark.parametrize("graph", (False, True), ids=("eager", "graph"))
@pytest.mark.parametrize("tensor_cores", (False, True), ids=("cores", "tensor_cores"))
@pytest.mark.parametrize("number", (0, 1))
def test_decode(number, tensor_cores, graph, device):
    pool = Pool(device, 3)
    wrapper = decode_wrapper(pool, tensor_cores, graph, backends(device)[number])
    for kv_lens in ([40, 3, 17], [41, 4, 18], [1, 60, 2]):
        x, paged = pool.step([1, 1, 1], kv_lens)
        if graph:
            # The engine's kernels write where the wrapper looks.
            wrapper._paged_kv_indices_buf[: len(paged.indices)] = paged.indices
        if isinstance(wrapper.begin_forward, partial):
            begin(wrapper, x, paged, global_override_indptr_cpu=generate.indptr(kv_lens))
        else:
            begin(wrapper, x, paged)
        options = dict(sm_scale=SCALE, logits_soft_cap=0.0, k_scale=None, v_scale=None)
        check(wrapper.forward_return_lse(x.q, pool.pair, **options), x, Options())
        assert len(wrapper._plans) == 1, "what forward() says again is no other plan"
        if graph:
            wrapper.begin_forward = partial(flashinfer.fast_decode_plan, wrapper)


@pytest.mark.parametrize("signature", (15, 16, 19, 20, "decode"))
@pytest.mark.parametrize("graph", (False, True), ids=("eager", "graph"))
def test_decode_by_the_module(graph, signature, device):
    pool = Pool(device, 2)
    wrapper = decode_wrapper(pool, signature != "decode", graph, backends(device)[0])
    begin(wrapper, *pool.step([1, 1], [9, 30]))
    for kv_lens in ([10, 31], [50, 1]):
        x, paged = pool.step([1, 1], kv_lens)
        if graph:
            pool.kv_indptr.copy_(paged.indptr)
            pool.indices[: len(paged.indices)] = paged.indices
        else:
            wrapper._paged_kv_indptr_buf, wrapper._paged_kv_indices_buf = paged.indptr, paged.indices
            wrapper._paged_kv_last_page_len_buf = paged.last_page_len
        if signature == "decode":
            arguments = decode_arguments(wrapper, kv_lens)
        else:
            arguments = prefill_arguments(wrapper, [1, 1], kv_lens, signature)
        wrapper._plan_info = wrapper._cached_module.plan(*arguments)
        # What the caller gave its own plan(), said again after it.
        wrapper._pos_encoding_mode, wrapper._window_left, wrapper._logits_soft_cap = "NONE", -1, 0.0
        wrapper._sm_scale = wrapper._rope_scale = wrapper._rope_theta = None
        check(wrapper.forward_return_lse(x.q, pool.pair, sm_scale=SCALE), x, Options())
        assert len(wrapper._plans) == 1 and wrapper._fixed_batch_size == (2 if graph else 0)


@pytest.mark.parametrize("options", (Options(causal=True), Options(causal=True, logits_soft_cap=5.0, window_left=6)))
@pytest.mark.parametrize("number", (0, 1))
def test_draft_extend(number, options, device):
    """plan() knows nothing of the options that layers give to forward(); a replay goes through the module alone."""
    pool = Pool(device, 2)
    wrapper = prefill_wrapper(pool, backends(device)[number])
    x, paged = pool.step([3, 3], [20, 9])
    begin_prefill(wrapper, x, paged)
    for q_lens, kv_lens in (([3, 3], [20, 9]), ([3, 3], [21, 40]), ([1, 2], [1, 30])):
        if kv_lens != [20, 9]:
            x, paged = pool.step(q_lens, kv_lens)
            write_tables(wrapper, x, paged)
            wrapper._max_total_num_rows = wrapper._max_total_num_rows or sum(q_lens)
            wrapper._plan_info = wrapper._cached_module.plan(*prefill_arguments(wrapper, q_lens, kv_lens))
        given = dict(causal=True, sm_scale=SCALE, window_left=options.window_left, k_scale=1.0, v_scale=1.0)
        given["logits_soft_cap"] = options.logits_soft_cap or 0.0
        out, lse = wrapper.forward_return_lse(pool.q[:6], pool.pair, **given)
        check((out[: len(x.q)], lse[: len(x.q)]), x, options)
    assert len(wrapper._plans) == 2, "one as planned, one for the layers: their buffers are never replaced"


@pytest.mark.parametrize("number", (0, 1))
def test_target_verify(number, device):
    """A tree of drafts, whose mask the engine packs into the wrapper's buffer."""
    pool = Pool(device, 2)
    wrapper = prefill_wrapper(pool, backends(device)[number], masked=True)
    for i, kv_lens in enumerate(([20, 9], [21, 33], [4, 4])):
        x, paged = pool.step([4, 4], kv_lens)
        masks = [torch.rand(4, n, device=device) < 0.6 for n in kv_lens]
        if i == 0:
            begin_prefill(wrapper, x, paged, custom_mask=torch.cat([mask.flatten() for mask in masks]))
        else:
            write_tables(wrapper, x, paged, packed(masks, device))
            wrapper._cached_module.plan(*prefill_arguments(wrapper, [4, 4], kv_lens))
        result = wrapper.forward_return_lse(x.q, pool.pair, causal=True, sm_scale=SCALE, logits_soft_cap=0.0)
        check(result, x, Options(), Extras(masks))
        assert wrapper._custom_mask_buf is pool.mask and wrapper._mask_indptr_buf is pool.mask_indptr


def test_prefill_of_new_tokens_and_of_the_cache(device):
    """Ragged attention among new tokens, paged attention to the prefix, and the two merged."""
    q_lens, kv_lens = [5, 3], [20, 11]
    x = generate.ragged_batch(q_lens, kv_lens, *HEADS, DIM, dtype=HALF, device=device)
    prefix = [n - m for n, m in zip(kv_lens, q_lens)]
    rows = [torch.arange(*x.kv_indptr[i : i + 2].tolist()) for i in range(2)]
    old = torch.cat([r[:n] for r, n in zip(rows, prefix)]).to(device)
    new = torch.cat([r[n:] for r, n in zip(rows, prefix)]).to(device)
    cached = generate.Ragged(x.q, x.k[old], x.v[old], x.qo_indptr, generate.indptr(prefix, device))
    paged = generate.paged(cached, 1)
    for backend in backends(device):
        ragged = flashinfer.BatchPrefillWithRaggedKVCacheWrapper(workspace(device), "NHD", backend=backend)
        wrapper = flashinfer.BatchPrefillWithPagedKVCacheWrapper(workspace(device), "NHD", backend=backend)
        for _ in range(2):
            ragged.begin_forward(x.qo_indptr, x.qo_indptr, *HEADS, DIM, q_data_type=HALF)
            begin_prefill(wrapper, x, paged)
            for _ in range(2):
                first = ragged.forward_return_lse(
                    x.q, x.k[new], x.v[new], causal=True, sm_scale=SCALE, window_left=-1, logits_soft_cap=0.0
                )
                second = wrapper.forward_return_lse(x.q, paged.kv_cache, causal=False, sm_scale=SCALE)
                check(merge_state(*first, *second), x, Options(causal=True))


def latent_wrapper(x, pages, device, backend, batch=2):
    integers = dict(dtype=torch.int32, device=device)
    buffers = [torch.zeros(n, **integers) for n in (batch + 1, batch + 1, pages, batch)]
    wrapper = BatchMLAPagedAttentionWrapper(
        workspace(device), use_cuda_graph=True, qo_indptr=buffers[0], kv_indptr=buffers[1], kv_indices=buffers[2],
        kv_len_arr=buffers[3], backend="auto",
    )  # fmt: skip
    wrapper._backend = backend
    return wrapper


def replan_latent(wrapper, x, q_lens, kv_lens, causal):
    entries = [-(-n // 8) for n in kv_lens]
    wrapper._causal, wrapper._page_size, wrapper._sm_scale = causal, 8, SCALE
    wrapper._qo_indptr_buf.copy_(x.qo_indptr, non_blocking=True)
    wrapper._kv_indptr_buf.copy_(x.kv_indptr, non_blocking=True)
    wrapper._kv_indices_buf[: len(x.kv_indices)].copy_(x.kv_indices, non_blocking=True)
    wrapper._kv_len_arr_buf.copy_(x.kv_lens, non_blocking=True)
    wrapper._cached_module.plan(*latent_arguments(wrapper, q_lens, entries, kv_lens, 4, x.ckv, causal))


@pytest.mark.parametrize("causal", (False, True), ids=("decode", "verify"))
@pytest.mark.parametrize("number", (0, 1))
def test_latent_attention(number, causal, device):
    q_lens = [3, 3] if causal else [1, 1]
    wrapper = None
    for kv_lens in ([20, 9], [50, 3], [8, 70]):
        x = latents.latents(q_lens, kv_lens, 4, device=device)
        if wrapper is None:
            wrapper = latent_wrapper(x, 60, device, backends(device)[number])
            wrapper.plan(*x.tables, 4, x.ckv, 16, 8, causal, SCALE, HALF, HALF)
        else:
            replan_latent(wrapper, x, q_lens, kv_lens, causal)
        latents.check(wrapper.run(*x.parts(), return_lse=True), x, SCALE, causal=causal)
        assert (wrapper._causal, wrapper._sm_scale, wrapper._page_size) == (causal, SCALE, 8)


def test_an_fp8_cache_under_a_half_precision_model():
    """data_type is the cache's where q_data_type is said too."""
    pool = Pool(torch.device("cpu"), 2)
    x, paged = pool.step([1, 1], [9, 30])
    wrapper = decode_wrapper(pool, True, False, "auto")
    wrapper.begin_forward(paged.indptr, paged.indices, paged.last_page_len, *HEADS, DIM, 1,
                          data_type=torch.float8_e4m3fn, q_data_type=HALF)  # fmt: skip
    out = wrapper.forward(x.q, pool.kv.to(torch.float8_e4m3fn), sm_scale=SCALE, k_scale=1.0, v_scale=1.0)
    assert out.dtype == HALF


REFUSED = {
    "num_qo_heads": 8, "num_kv_heads": 1, "page_size": 16, "head_dim_qk": 128, "head_dim_vo": 32, "batch_size": 3,
    "enable_cuda_graph": False, "fixed_split_size": 64, "disable_split_kv": True,
    "qo_indptr": torch.tensor([0, 4]), "kv_indptr": torch.tensor([0, 20, 9]), "kv_lens": torch.tensor([20, 10]),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_the_module_refuses_what_contradicts_the_wrapper(name):
    pool = Pool(torch.device("cpu"), 2)
    wrapper = prefill_wrapper(pool, "reference")
    begin_prefill(wrapper, *pool.step([3, 3], [20, 9]))
    before = wrapper._active
    with pytest.raises(ValueError, match=f"^{name}: got"):
        wrapper._cached_module.plan(*prefill_arguments(wrapper, [3, 3], [20, 9], **{name: REFUSED[name]}))
    assert wrapper._active is before
    wrapper._cached_module.plan(*prefill_arguments(wrapper, [3, 3], [20, 9]))
    with pytest.raises(ValueError, match=r"^\*args: got 12 arguments"):
        wrapper._cached_module.plan(*prefill_arguments(wrapper, [3, 3], [20, 9], 12))


def test_more_rows_than_a_graph_was_captured_over():
    pool = Pool(torch.device("cpu"), 2)
    wrapper = prefill_wrapper(pool, "portable")
    x, paged = pool.step([3, 3], [20, 9])
    begin_prefill(wrapper, x, paged)
    wrapper.forward(x.q, pool.pair, causal=True)
    write_tables(wrapper, *pool.step([4, 3], [20, 9]))
    with pytest.raises(ValueError, match="^qo_indptr: got 7 rows; allowed: at most 6"):
        wrapper._cached_module.plan(*prefill_arguments(wrapper, [4, 3], [20, 9]))


@pytest.mark.parametrize("graph", (False, True), ids=("eager", "graph"))
def test_tables_that_are_replaced(graph, device):
    """What stands in the wrapper is what the next run reads, and no launch of before."""
    pool = Pool(device, 2)
    for backend in backends(device):
        wrapper = decode_wrapper(pool, True, graph, backend)
        x, paged = pool.step([1, 1], [9, 30])
        begin(wrapper, x, paged)
        for _ in range(3):
            check(wrapper.forward_return_lse(x.q, pool.pair, sm_scale=SCALE), x, Options())
        x, paged = pool.step([1, 1], [33, 12])
        wrapper._paged_kv_indptr_buf = paged.indptr.clone()
        wrapper._paged_kv_indices_buf = torch.cat((paged.indices, paged.indices[:5]))
        for _ in range(3):
            check(wrapper.forward_return_lse(x.q, pool.pair, sm_scale=SCALE), x, Options())
        table = wrapper._paged_kv_indptr_buf
        x, paged = pool.step([1, 1], [20, 24])
        begin(wrapper, x, paged)
        check(wrapper.forward_return_lse(x.q, pool.pair, sm_scale=SCALE), x, Options())
        if graph:
            assert wrapper._paged_kv_indptr_buf is table and torch.equal(table, paged.indptr)
            with pytest.raises(ValueError, match="^kv_indptr: got torch.int64"):
                wrapper._paged_kv_indptr_buf = paged.indptr.long()


def test_options_that_are_set(device):
    pool = Pool(device, 2)
    x, paged = pool.step([3, 3], [20, 9])
    wrapper = flashinfer.BatchPrefillWithPagedKVCacheWrapper(pool.workspace, backend=backends(device)[0])
    assert not hasattr(wrapper, "_causal")
    begin_prefill(wrapper, x, paged, causal=True)
    check(wrapper.run_return_lse(x.q, pool.pair), x, Options(causal=True))
    wrapper._causal, wrapper._sm_scale, wrapper._window_left, wrapper._logits_soft_cap = False, 0.3, 5, 2.0
    changed = Options(sm_scale=0.3, window_left=5, logits_soft_cap=2.0)
    check(wrapper.run_return_lse(x.q, pool.pair), x, changed)
    assert (wrapper._causal, wrapper._sm_scale, wrapper._window_left, wrapper._logits_soft_cap) == (False, 0.3, 5, 2.0)
    begin_prefill(wrapper, x, paged, causal=True)
    check(wrapper.run_return_lse(x.q, pool.pair), x, Options(causal=True))


def test_what_was_planned_has_upstreams_names(device):
    pool = Pool(device, 2)
    x, paged = pool.step([3, 3], [20, 9])
    wrapper = flashinfer.BatchPrefillWithPagedKVCacheWrapper(pool.workspace)
    names = "_batch_size", "_num_qo_heads", "_num_kv_heads", "_cached_q_data_type", "_cached_o_data_type"
    assert not any(hasattr(wrapper, name) for name in names) and wrapper._jit_module is None
    begin_prefill(wrapper, x, paged)
    assert [getattr(wrapper, name) for name in names] == [2, *HEADS, HALF, HALF]
    assert wrapper._cached_kv_data_type == HALF
    # Engines that plan by themselves set them, and _plan_info.
    wrapper._batch_size, wrapper._cached_q_data_type, wrapper._plan_info = 2, HALF, ()
    check(wrapper.run_return_lse(x.q, pool.pair), x, Options())


def test_a_graph_cannot_follow_options_that_are_set():
    pool = Pool(torch.device("cpu"), 2)
    wrapper = prefill_wrapper(pool, "reference")
    x, paged = pool.step([3, 3], [20, 9])
    begin_prefill(wrapper, x, paged)
    wrapper._sm_scale = 0.3
    with pytest.raises(ValueError, match="^sm_scale: got 0.3; allowed: 0.125, as first planned"):
        wrapper.run(x.q, pool.pair)
    begin_prefill(wrapper, x, paged)
    wrapper.run(x.q, pool.pair)
