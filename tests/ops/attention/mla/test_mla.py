"""Latent attention through BatchMLAPagedAttentionWrapper, by the reference and by the kernel."""

from dataclasses import replace

import pytest
import torch

from flashinfer.mla import BatchMLAPagedAttentionWrapper
from flashinfer.testing import generate
from flashinfer.testing.compare import assert_close
from flashinfer.testing.emulator import emulate
from tests.ops.attention.cases import backends, workspace
from tests.ops.attention.mla.latents import LOG2E, check, expected, latents

FP8, HALF = torch.float8_e4m3fn, torch.float16
# q_lens, kv_lens, heads, ckv, kpe, page, causal
CASES = {
    "decode": ([1] * 6, [0, 1, 63, 64, 129, 7], 16, 64, 16, 16, False),
    "odd heads and pages": ([1, 2, 1], [37, 5, 1], 5, 48, 8, 3, True),
    "speculative": ([4, 0, 16, 1], [60, 9, 16, 2], 21, 32, 16, 1, True),
    "queries before the first key": ([5, 3], [2, 0], 3, 16, 8, 64, True),
    "prefill": ([40, 1], [40, 33], 2, 64, 0, 8, True),
    "many heads": ([1, 2], [130, 20], 128, 32, 8, 64, False),
}
SCALE = 0.13


def plan(x, backend, page, causal=False, **others):
    wrapper = BatchMLAPagedAttentionWrapper(workspace(x.q.device), backend=backend)
    kpe = x.q.shape[-1] - x.ckv
    wrapper.plan(*x.tables, x.q.shape[1], x.ckv, kpe, page, causal, SCALE, x.q.dtype, x.cache.dtype, **others)
    return wrapper


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("number", (0, 1))
def test_batches(number, case, device):
    q_lens, kv_lens, heads, ckv, kpe, page, causal = CASES[case]
    x = latents(q_lens, kv_lens, heads, ckv, kpe, page, device=device)
    wrapper = plan(x, backends(device)[number], page, causal)
    check(wrapper.run(*x.parts(), return_lse=True), x, SCALE, causal=causal)


@pytest.mark.parametrize("dims", ((512, 64), (80, 24)))
def test_the_dims_of_models(dims, device):
    x = latents([1, 2], [75, 30], 16, *dims, 64, device=device)
    for backend in backends(device):
        check(plan(x, backend, 64, True).run(*x.parts(), return_lse=True), x, SCALE, causal=True)


@pytest.mark.parametrize("q_dtype", (HALF, torch.bfloat16, FP8))
@pytest.mark.parametrize("kv_dtype", (FP8, torch.float8_e5m2))
def test_fp8_keys(kv_dtype, q_dtype, device):
    x = latents([1, 1], [70, 33], 4, 32, 16, 16, dtype=q_dtype, kv_dtype=kv_dtype, device=device)
    for backend in backends(device):
        out, lse = plan(x, backend, 16, output_dtype=HALF).run(*x.parts(), return_lse=True)
        check((out, lse), x, SCALE)


def test_bfloat16(device):
    x = latents([1, 3], [70, 33], 4, 32, 16, 16, dtype=torch.bfloat16, device=device)
    backend = "reference" if device.type == "cpu" else "auto"
    check(plan(x, backend, 16).run(*x.parts(), return_lse=True), x, SCALE)


def test_split_requests(device):
    """Few long requests are divided among work items, with their sinks counted once."""
    x = latents([1, 1, 1], [700, 3, 450], 4, 32, 8, 16, device=device)
    sinks = torch.tensor([0.5, -3.0, 2.0, 40.0], device=device)
    for backend in backends(device):
        wrapper = plan(x, backend, 16)
        check(wrapper.run(*x.parts(), return_lse=True, sinks=sinks), x, SCALE, sinks=sinks)
        result = wrapper.run(*x.parts(), return_lse=True, return_lse_base_on_e=True)
        check(result, x, SCALE, base_e=True)


def test_more_splits_than_one_level_combines():
    """One request on a chip of 132 multiprocessors: more than 96 splits of 64 keys."""
    x = latents([1], [98 * 64], 3, 32, 8, 16)
    sinks = torch.tensor([0.5, -3.0, 40.0])
    with emulate("90a", sms=132):
        result = plan(x, "portable", 16).run(*x.parts(), return_lse=True, return_lse_base_on_e=True, sinks=sinks)
    check(result, x, SCALE, base_e=True, sinks=sinks)


def test_lse_mode(device):
    x = latents([1, 1], [70, 0], 4, device=device)
    for backend in backends(device):
        result = plan(x, backend, 8, lse_mode="basee").run(*x.parts(), return_lse=True)
        check(result, x, SCALE, base_e=True)


@pytest.mark.parametrize("tensors", (False, True))
def test_scales(tensors, device):
    x = latents([2, 1], [70, 12], 4, kv_dtype=FP8, device=device)
    give = (lambda v: torch.tensor([v], device=device)) if tensors else (lambda v: v)
    for backend in backends(device):
        wrapper = plan(x, backend, 8)
        result = wrapper.run(*x.parts(), return_lse=True, bmm1_scale=give(0.21), bmm2_scale=give(3.0))
        check(result, x, 0.21, out_scale=3.0)
        if not tensors:
            result = wrapper.run(*x.parts(), return_lse=True, ckv_scale=0.5, kpe_scale=2.0)
            check(result, x, SCALE * 0.5, pe_scale=4.0, out_scale=0.5)


def test_joined_tensors(device):
    x = latents([2, 2, 2], [70, 2, 31], 4, device=device)
    wrapper = plan(x, "auto", 8, True)
    query = x.q.view(3, 2, 4, -1)
    out, lse = wrapper.run(query=query, kv_cache=x.cache, return_lse=True)
    assert out.shape == (3, 2, 4, x.ckv) and lse.shape == (3, 2, 4)
    check((out.flatten(0, 1), lse.flatten(0, 1)), x, SCALE, causal=True)
    for cache in (x.cache[:, None], x.cache[:, :, None]):
        out, lse = wrapper.run(query=x.q, kv_cache=cache, return_lse=True)
        check((out, lse), x, SCALE, causal=True)


@pytest.mark.parametrize("number", (0, 1))
def test_strides_and_given_outputs(number, device):
    x = latents([2, 1], [70, 12], 4, device=device)
    wrapper = plan(x, backends(device)[number], 8, True)
    q_nope, q_pe, ckv, kpe = x.parts()
    for axis, gap in ((1, 3), (0, 8)):
        views = [generate.strided(t.contiguous(), axis, gap) for t in (q_nope, q_pe, ckv, kpe)]
        out = generate.strided(torch.full((3, 4, x.ckv), torch.nan, dtype=HALF, device=device), 1, gap)
        lse = torch.full((3, 4), torch.nan, device=device)
        got = wrapper.run(*views, out=out, lse=lse, return_lse=True)
        assert got[0] is out and got[1] is lse
        check(got, x, SCALE, causal=True)


def test_a_block_table(device):
    x = latents([2, 2, 2], [70, 0, 31], 4, device=device)
    for backend in backends(device):
        wrapper = BatchMLAPagedAttentionWrapper(workspace(device), backend=backend)
        dims = dict(num_heads=4, head_dim_ckv=x.ckv, head_dim_kpe=16, page_size=8, causal=True, sm_scale=SCALE,
                    q_data_type=HALF)  # fmt: skip
        wrapper.plan(block_tables=x.blocks(gap=2), seq_lens=x.kv_lens, max_q_len=2, **dims)
        check(wrapper.run(*x.parts(), return_lse=True), x, SCALE, causal=True)
        wrapper.plan(block_tables=x.blocks(), seq_lens=x.kv_lens, cum_seq_lens_q=x.qo_indptr, **dims)
        check(wrapper.run(*x.parts(), return_lse=True), x, SCALE, causal=True)


def test_tables_of_a_call(device):
    """Without a plan, and in place of the planned ones."""
    x = latents([1, 1, 1], [70, 0, 31], 4, device=device)
    for backend in backends(device):
        wrapper = BatchMLAPagedAttentionWrapper(workspace(device), backend=backend)
        result = wrapper.run(*x.parts(), return_lse=True, kv_len=x.kv_lens, page_table=x.blocks())
        check(result, x, (128 + 16) ** -0.5)
        wrapper = plan(x, backend, 8)
        wrapper.run(*x.parts())
        y = latents([1, 1, 1], [3, 100, 9], 4, device=device)
        check(wrapper.run(*y.parts(), return_lse=True, kv_len=y.kv_lens, page_table=y.blocks()), y, SCALE)
        check(wrapper.run(*x.parts(), return_lse=True), x, SCALE)


def test_no_requests(device):
    empty = torch.zeros(0, dtype=torch.int32, device=device)
    for backend in backends(device):
        wrapper = BatchMLAPagedAttentionWrapper(workspace(device), backend=backend)
        zero = torch.zeros(1, dtype=torch.int32, device=device)
        wrapper.plan(zero, zero, empty, empty, 4, 64, 16, 8, False, SCALE, HALF)
        cache = torch.zeros(3, 8, 80, dtype=HALF, device=device)
        out, lse = wrapper.run(query=cache.new_zeros(0, 4, 80), kv_cache=cache, return_lse=True)
        assert out.shape == (0, 4, 64) and lse.shape == (0, 4)


def test_tables_from_either_side(device):
    x = latents([2, 1], [70, 12], 4, device=device)
    for tables in ([t.cpu().long() for t in x.tables], [t.to(device) for t in x.tables]):
        wrapper = BatchMLAPagedAttentionWrapper(workspace(device))
        wrapper.plan(*tables, 4, x.ckv, 16, 8, True, SCALE, HALF)
        check(wrapper.run(*x.parts(), return_lse=True), x, SCALE, causal=True)


@pytest.mark.parametrize("graph", (False, True), ids=("eager", "graph"))
@pytest.mark.parametrize("where", ("host", "device"))
def test_offsets_of_a_slice(where, graph, device):
    """Those of two of four requests, beside all page ids and all rows of q."""
    x = latents([2, 1, 3, 1], [9, 70, 12, 5], 4, device=device)
    qo, kv, indices, lens = x.tables
    tables = [t.cpu() if where == "host" else t for t in (qo[1:4], kv[1:4], indices, lens[1:3])]
    part = replace(x, q=x.q[2:6], keys=x.keys[1:3], qo_indptr=qo[1:4] - qo[1])
    for backend in backends(device):
        wrapper = graph_wrapper(device, batch=2)[0] if graph else BatchMLAPagedAttentionWrapper(workspace(device))
        wrapper._backend = backend
        wrapper.plan(*tables, 4, x.ckv, 16, 8, True, SCALE, HALF)
        out, lse = wrapper.run(*x.parts(), return_lse=True)
        check((out[2:6], lse[2:6]), part, SCALE, causal=True)
    for name, wrong in (("qo_indptr", [-1, 1, 2]), ("kv_indptr", [4, 2, 3])):
        bad = dict(zip(("qo_indptr", "kv_indptr", "kv_indices", "kv_len_arr"), (t.cpu() for t in tables)))
        with pytest.raises(ValueError, match=f"^{name}: got"):
            BatchMLAPagedAttentionWrapper(workspace(device)).plan(
                **bad | {name: torch.tensor(wrong)}, num_heads=4, head_dim_ckv=x.ckv, head_dim_kpe=16, page_size=8,
                causal=True, sm_scale=SCALE, q_data_type=HALF, kv_data_type=HALF,
            )  # fmt: skip


def graph_wrapper(device, batch=4, pages=60):
    integers = dict(dtype=torch.int32, device=device)
    indptr = [torch.full((batch + 1,), 77, **integers) for _ in range(2)]
    indices, lens = torch.full((pages,), 77, **integers), torch.full((batch,), 77, **integers)
    return BatchMLAPagedAttentionWrapper(workspace(device), True, *indptr, indices, lens), indptr


@pytest.mark.parametrize("number", (0, 1))
def test_fixed_buffers(number, device):
    wrapper, indptr = graph_wrapper(device)
    wrapper._backend = backends(device)[number]
    for kv_lens in ([70, 12, 0, 9], [5, 33]):
        x = latents([1] * len(kv_lens), kv_lens, 4, device=device)
        wrapper.plan(*x.tables, 4, x.ckv, 16, 8, False, SCALE, HALF)
        assert indptr[0].tolist()[len(kv_lens) :] == [len(kv_lens)] * (5 - len(kv_lens))
        check(wrapper.run(*x.parts(), return_lse=True), x, SCALE)
    with pytest.raises(ValueError, match="causal"):
        wrapper.plan(*x.tables, 4, x.ckv, 16, 8, True, SCALE, HALF)
    with pytest.raises(ValueError, match="qo_indptr"):
        wrapper.plan(*latents([1] * 5, [1] * 5, 4, device=device).tables, 4, 64, 16, 8, False, SCALE, HALF)


BAD_PLAN = {
    "num_heads": dict(num_heads=129),
    "head_dim_ckv": dict(head_dim_ckv=520),
    "head_dim_kpe": dict(head_dim_kpe=136),
    "page_size": dict(page_size=0),
    "kv_data_type|kv dtype": dict(kv_data_type=torch.bfloat16),
    "kv_len_arr": dict(kv_len_arr=torch.tensor([7, 17], dtype=torch.int32)),
    "metadata": dict(metadata=object()),
    "lse_mode": dict(lse_mode="base10"),
    "output_scale": dict(output_scale="static"),
    "scale_mode": dict(scale_mode="other"),
    "query_layout": dict(query_layout="NHD"),
    "use_profiler": dict(use_profiler=True),
    "block_tables|qo_indptr": dict(block_tables=torch.zeros(2, 1, dtype=torch.int32)),
}


@pytest.mark.parametrize("argument", BAD_PLAN)
def test_a_bad_plan_is_refused_by_name(argument):
    x = latents([1, 1], [7, 12], 4)
    arguments = dict(zip(("qo_indptr", "kv_indptr", "kv_indices", "kv_len_arr"), x.tables))
    arguments |= dict(num_heads=4, head_dim_ckv=64, head_dim_kpe=16, page_size=8, sm_scale=1.0, q_data_type=HALF)
    with pytest.raises(ValueError, match=argument):
        BatchMLAPagedAttentionWrapper(workspace("cpu"), backend="portable").plan(**arguments | BAD_PLAN[argument])


BAD_RUN = {
    "q_nope": lambda x: dict(q_nope=x.q[..., :63]),
    "q_pe": lambda x: dict(q_pe=None),
    "ckv_cache": lambda x: dict(ckv_cache=x.cache[:, :4, :64]),
    "kpe_cache": lambda x: dict(kpe_cache=x.cache[:2, :, 64:]),
    "out": lambda x: dict(out=x.q),
    "sinks": lambda x: dict(sinks=torch.zeros(3)),
    "o_scale": lambda x: dict(o_scale=0.0),
    "ckv_scale_arr": lambda x: dict(ckv_scale_arr=torch.ones(1)),
    "ckv_scale": lambda x: dict(ckv_scale=torch.ones(2)),
    "bmm1_scale": lambda x: dict(bmm1_scale=torch.ones(2)),
    "kv_len": lambda x: dict(page_table=x.blocks()),
    "profiler_buffer": lambda x: dict(profiler_buffer=torch.ones(1)),
    "query": lambda x: dict(query=x.q),
}


@pytest.mark.parametrize("argument", BAD_RUN)
def test_a_bad_run_is_refused_by_name(argument):
    x = latents([1, 1], [7, 12], 4)
    wrapper = plan(x, "auto", 8)
    arguments = dict(zip(("q_nope", "q_pe", "ckv_cache", "kpe_cache"), x.parts()))
    with pytest.raises(ValueError, match=argument):
        wrapper.run(**arguments | BAD_RUN[argument](x))


def test_run_needs_a_plan_and_a_scale():
    x = latents([1, 1], [7, 12], 4)
    with pytest.raises(ValueError, match="plan"):
        BatchMLAPagedAttentionWrapper(workspace("cpu")).run(*x.parts())
    wrapper = BatchMLAPagedAttentionWrapper(workspace("cpu"))
    wrapper.plan(*x.tables, 4, 64, 16, 8, q_data_type=HALF)
    with pytest.raises(ValueError, match="sm_scale"):
        wrapper.run(*x.parts())
    check(wrapper.run(*x.parts(), return_lse=True, bmm1_scale=0.3), x, 0.3)


@pytest.mark.gpu
def test_a_captured_run_serves_every_later_batch(device):
    wrapper, _ = graph_wrapper(device, pages=400)
    q = torch.zeros(4, 16, 576, dtype=torch.bfloat16, device=device)
    pool = torch.zeros(400, 64, 576, dtype=torch.bfloat16, device=device)
    graph = None
    for kv_lens in ([4097, 1, 0, 1023], [5, 5, 5, 5], [2000, 300]):
        x = latents([1] * len(kv_lens), kv_lens, 16, 512, 64, 64, torch.bfloat16, device=device)
        q[: len(kv_lens)], pool[: len(x.cache)] = x.q, x.cache.nan_to_num()
        tables = x.tables if graph is None else [t.cpu() for t in x.tables]
        wrapper.plan(*tables, 16, 512, 64, 64, False, SCALE, torch.bfloat16)
        if graph is None:
            wrapper.run(query=q, kv_cache=pool, return_lse=True)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                out, lse = wrapper.run(query=q, kv_cache=pool, return_lse=True)
        out.fill_(torch.nan)
        graph.replay()
        check((out[: len(kv_lens)], lse[: len(kv_lens)]), x, SCALE)


@pytest.mark.parametrize("split", (False, True))
@pytest.mark.parametrize("sinks", (None, (3e38, -3e38, -torch.inf, 88.0)))
@pytest.mark.parametrize("scale", (0.0, 1e-40, SCALE))
def test_scales_and_sinks_of_any_size(scale, sinks, split, device):
    """Held to float32, since float16 has no sink of 3e38."""
    x = latents([1, 1, 2], [700 if split else 70, 0, 33], 4, device=device)
    sinks = None if sinks is None else torch.tensor(sinks, device=device)
    for backend in backends(device):
        wrapper = BatchMLAPagedAttentionWrapper(workspace(device), backend=backend)
        wrapper.plan(*x.tables, 4, x.ckv, 16, 8, True, scale, x.q.dtype, x.cache.dtype)
        out, lse = wrapper.run(*x.parts(), return_lse=True, **({} if sinks is None else dict(sinks=sinks)))
        truth, truth_lse = expected(x, scale, torch.float64, causal=True, sinks=sinks)
        same, same_lse = expected(x, scale, torch.float32, causal=True, sinks=sinks)
        assert_close(out, same.to(out.dtype), truth, "out")
        assert_close(lse, same_lse * LOG2E, truth_lse * LOG2E, "lse")
