"""Graphs that engines have captured, replayed after they planned through the module, without waiting for the device."""

from functools import partial

import pytest
import torch

import flashinfer
from flashinfer.testing import generate
from flashinfer.testing.compare import assert_bitwise
from tests.engines.steps import (
    SCALE, Pool, decode_arguments, latent_arguments, packed, prefill_arguments, write_tables,
)  # fmt: skip
from tests.engines.test_sglang import begin, begin_prefill, decode_wrapper, latent_wrapper, prefill_wrapper
from tests.ops.attention.cases import check
from tests.ops.attention.mla import latents
from tests.ops.attention.oracle import Extras, Options

pytestmark = pytest.mark.gpu
HALF = torch.float16


def capture(run):
    run()
    run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = run()
    return graph, result


def replay(graph, result, plan, eager):
    """Plan without waiting, replay, and compare with the same wrapper's eager run."""
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        plan()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    for t in result:
        t.fill_(float("nan"))
    graph.replay()
    replayed = [t.clone() for t in result]
    for a, b in zip(replayed, eager(), strict=True):
        assert_bitwise(a, b)
    return replayed


@pytest.mark.parametrize("signature", (16, 20, "decode", "fast_decode_plan"))
def test_decode(signature, device):
    pool = Pool(device, 3, slots=5000)
    wrapper = decode_wrapper(pool, signature != "decode", True, "fa2")
    begin(wrapper, *pool.step([1, 1, 1], [700, 3, 17]))
    run = partial(wrapper.forward_return_lse, pool.q[:3], pool.pair, sm_scale=SCALE, logits_soft_cap=0.0)
    graph, result = capture(run)
    for kv_lens in ([701, 4, 18], [1, 2500, 60], [30, 1, 1], [1500, 1500, 1500]):
        x, paged = pool.step([1, 1, 1], kv_lens)
        pool.kv_indptr.copy_(paged.indptr)
        pool.indices[: len(paged.indices)] = paged.indices
        if signature == "fast_decode_plan":
            plan = partial(begin, wrapper, x, paged, global_override_indptr_cpu=generate.indptr(kv_lens))
            wrapper.begin_forward = partial(flashinfer.fast_decode_plan, wrapper)
        elif signature == "decode":
            plan = partial(wrapper._cached_module.plan, *decode_arguments(wrapper, kv_lens))
        else:
            plan = partial(wrapper._cached_module.plan, *prefill_arguments(wrapper, [1] * 3, kv_lens, signature))
        check(replay(graph, result, plan, run), x, Options())


@pytest.mark.parametrize("masked", (False, True), ids=("causal", "mask"))
def test_verify(masked, device):
    """The graph has what layers gave to forward(), plan() other options; both are planned again by the module."""
    pool = Pool(device, 2, slots=5000)
    pool.mask = torch.zeros(1 << 16, dtype=torch.uint8, device=device)
    wrapper = prefill_wrapper(pool, "fa2", masked)

    def step(kv_lens):
        x, paged = pool.step([4, 4], kv_lens)
        return x, paged, [torch.rand(4, n, device=device) < 0.6 for n in kv_lens]

    x, paged, masks = step([500, 9])
    begin_prefill(wrapper, x, paged, custom_mask=torch.cat([m.flatten() for m in masks]) if masked else None)
    run = partial(wrapper.forward_return_lse, pool.q[:8], pool.pair, causal=True, sm_scale=SCALE, window_left=-1)
    graph, result = capture(run)
    for kv_lens in ([501, 13], [4, 3000], [17, 17]):
        x, paged, masks = step(kv_lens)
        write_tables(wrapper, x, paged, packed(masks, device) if masked else None)
        plan = partial(wrapper._cached_module.plan, *prefill_arguments(wrapper, [4, 4], kv_lens))
        extras = Extras(masks) if masked else None
        check(replay(graph, result, plan, run), x, Options(causal=not masked), extras)


@pytest.mark.parametrize("causal", (False, True), ids=("decode", "verify"))
def test_latent_attention(causal, device):
    q_lens, heads, ckv, page = ([3, 3] if causal else [1, 1]), 16, 512, 64
    rows = sum(q_lens)
    cache = torch.zeros(120, page, ckv + 64, dtype=HALF, device=device)
    q = torch.zeros(rows, heads, ckv + 64, dtype=HALF, device=device)
    wrapper = graph = None
    for kv_lens in ([700, 90], [3000, 3], [64, 1500]):
        x = latents.latents(q_lens, kv_lens, heads, ckv, 64, page, device=device)
        cache.fill_(float("nan"))
        cache[: len(x.cache)] = x.cache
        q.copy_(x.q)
        entries = [-(-n // page) for n in kv_lens]
        if wrapper is None:
            wrapper = latent_wrapper(x, 120, device, "auto")
            wrapper.plan(*x.tables, heads, ckv, 64, page, causal, SCALE, HALF, HALF)
            parts = q[..., :ckv], q[..., ckv:], cache[..., :ckv], cache[..., ckv:]
            run = partial(wrapper.run, *parts, return_lse=True)
            graph, result = capture(run)
            continue
        for name, table in zip(("_qo_indptr_buf", "_kv_indptr_buf", "_kv_indices_buf", "_kv_len_arr_buf"), x.tables):
            getattr(wrapper, name)[: len(table)].copy_(table, non_blocking=True)
        arguments = latent_arguments(wrapper, q_lens, entries, kv_lens, heads, ckv, causal)
        plan = partial(wrapper._cached_module.plan, *arguments)
        latents.check(replay(graph, result, plan, run), x, SCALE, causal=causal)


def test_tables_that_are_replaced_between_launches(device):
    """Held launches know addresses: none of a table that is gone may run."""
    pool = Pool(device, 2, slots=2000)
    wrapper = decode_wrapper(pool, True, False, "fa2")
    begin(wrapper, *pool.step([1, 1], [9, 300]))
    for kv_lens in ([500, 12], [3, 700], [40, 40]):
        x, paged = pool.step([1, 1], kv_lens)
        wrapper._paged_kv_indptr_buf, wrapper._paged_kv_indices_buf = paged.indptr, paged.indices
        del paged
        for _ in range(3):
            result = wrapper.forward_return_lse(pool.q[:2], pool.pair, sm_scale=SCALE)
            torch.empty(1 << 12, dtype=torch.int32, device=device).fill_(-1)
        check(result, x, Options())
