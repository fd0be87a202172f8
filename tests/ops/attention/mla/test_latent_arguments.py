"""Arguments of latent attention that few callers send, against latent attention in float64."""

from functools import partial

import pytest
import torch

import flashinfer
from flashinfer.mla import BatchMLAPagedAttentionWrapper, trtllm_batch_decode_with_kv_cache_mla
from flashinfer.testing.compare import assert_bitwise, assert_close
from tests.ops.attention.cases import workspace
from tests.ops.attention.mla.latents import LOG2E, Latents, check, expected, latents
from tests.ops.attention.mla.test_unplanned import SCALE, call

FP8, HALF = torch.float8_e4m3fn, torch.float16


@pytest.mark.parametrize("heads", (130, 192, 80))
def test_head_counts(heads, device):
    x = latents([1] * 3, [7, 0, 12], heads, device=device)
    sinks = torch.randn(heads, device=device)
    out, lse = trtllm_batch_decode_with_kv_cache_mla(**call(x, return_lse=True, sinks=sinks))
    check((out[:, 0], lse), x, SCALE, sinks=sinks)
    given, its_lse = torch.full_like(out, 777.0), torch.full((3, 1, heads), 777.0, device=device)
    assert trtllm_batch_decode_with_kv_cache_mla(**call(x, out=given, lse=its_lse, sinks=sinks)) is given
    assert_bitwise(given, out)
    assert_bitwise(its_lse[:, 0], lse)


def test_given_outputs_are_written_and_returned(device):
    x = latents([1, 1], [7, 12], 4, device=device)
    truth = trtllm_batch_decode_with_kv_cache_mla(**call(x, return_lse=True))
    wrapper = BatchMLAPagedAttentionWrapper(workspace(device))
    wrapper.plan(*x.tables, 4, 64, 16, 8, False, SCALE, HALF)
    query = x.q.view(2, 1, 4, 80)
    calls = (
        ((2, 4, 64), (2, 4), lambda **given: trtllm_batch_decode_with_kv_cache_mla(**call(x, **given))),
        ((2, 1, 4, 64), (2, 1, 4), lambda **given: trtllm_batch_decode_with_kv_cache_mla(**call(x, **given))),
        ((2, 4, 64), (2, 4), lambda **given: wrapper.run(*x.parts(), **given)),
        ((2, 1, 4, 64), (2, 1, 4), lambda **given: wrapper.run(query=query, kv_cache=x.cache, **given)),
    )
    for shape, lse_shape, run in calls:
        for returns in (False, True):
            out = torch.full(shape, 777.0, dtype=HALF, device=device)
            lse = torch.full(lse_shape, 777.0, device=device)
            got = run(out=out, lse=lse, return_lse=returns)
            assert (got[0] is out and got[1] is lse) if returns else got is out
            assert_bitwise(out.view(2, 4, 64), truth[0][:, 0])
            assert_bitwise(lse.view(2, 4), truth[1])


@pytest.mark.parametrize("backend", ("reference", "portable"))
def test_a_log_sum_exp_that_lies_in_another_tensor(backend, device):
    """Refused in a call that is like an earlier one, too."""
    x = latents([1, 1], [7, 12], 4, device=device)
    wrapper = BatchMLAPagedAttentionWrapper(workspace(device), backend=backend)
    wrapper.plan(*x.tables, 4, 64, 16, 8, False, SCALE, HALF)
    parts = dict(zip(("q_nope", "q_pe", "ckv_cache", "kpe_cache"), (t.clone() for t in x.parts()), strict=True))
    out, lse = torch.empty(2, 4, 64, dtype=HALF, device=device), torch.empty(2, 4, device=device)
    for name, t in (parts | dict(out=out)).items():
        inside = t.view(-1)[:16].view(torch.float32).view(2, 4)
        for _ in range(3):
            wrapper.run(**parts, out=out, lse=lse, return_lse=True)
        with pytest.raises(ValueError, match=f"^lse: got .*the memory of {name}"):
            wrapper.run(**parts, out=out, lse=inside, return_lse=True)


@pytest.mark.parametrize("context", ("meta", "bfloat16"))
def test_callers_defaults(context, device):
    x = latents([1] * 3, [7, 0, 12], 4, device=device)
    before = torch.get_default_dtype()
    try:
        if context == "meta":
            with torch.device("meta"):
                got = trtllm_batch_decode_with_kv_cache_mla(**call(x, return_lse=True, workspace_buffer=SPACE))
                wrapper = BatchMLAPagedAttentionWrapper(SPACE.to(device))
                wrapper.plan(*x.tables, 4, 64, 16, 8, False, SCALE, HALF)
                other = wrapper.run(*x.parts(), return_lse=True)
        else:
            torch.set_default_dtype(torch.bfloat16)
            got = trtllm_batch_decode_with_kv_cache_mla(**call(x, return_lse=True, workspace_buffer=SPACE))
            wrapper = BatchMLAPagedAttentionWrapper(SPACE.to(device))
            wrapper.plan(*x.tables, 4, 64, 16, 8, False, SCALE, HALF)
            other = wrapper.run(*x.parts(), return_lse=True)
    finally:
        torch.set_default_dtype(before)
    check((got[0][:, 0], got[1]), x, SCALE)
    check(other, x, SCALE)


SPACE = workspace("cpu")


def test_tables_of_keys_and_of_values(device):
    """They name the same latents."""
    x = latents([1] * 3, [7, 0, 12], 4, device=device)
    both = torch.stack((x.blocks(), x.blocks()), 1)
    out, lse = trtllm_batch_decode_with_kv_cache_mla(
        **call(x, block_tables=both, uses_shared_paged_kv_idx=False, return_lse=True)
    )
    check((out[:, 0], lse), x, SCALE)


@pytest.mark.parametrize("lengths", ("uniform", "ragged"))
def test_ranks_of_context_parallelism_merge_to_the_whole(lengths, device):
    """Several queries: each sees the keys of all ranks up to its own, the last of the request."""
    world, kv = 3, [9, 4, 30]
    qo = [2, 2, 2] if lengths == "uniform" else [2, 1, 3]
    x = latents(qo, kv, 4, device=device)
    outs, lses = [], []
    for rank in range(world):
        keys = [k[rank::world] for k in x.keys]
        lens = [len(k) for k in keys]
        pages = torch.cat([torch.nn.functional.pad(k, (0, 0, 0, -len(k) % 8)) for k in keys]).view(-1, 8, 80)
        counts = [-(-n // 8) for n in lens]
        table, at = torch.full((3, 4), -1, dtype=torch.int32, device=device), 0
        for row, n in zip(table, counts):
            row[:n] = torch.arange(at, at + n, device=device)
            at += n
        given = dict(query=x.q, cum_seq_lens_q=x.qo_indptr, max_q_len=3) if lengths == "ragged" else {}
        out, lse = trtllm_batch_decode_with_kv_cache_mla(**call(x, **given) | dict(
            kv_cache=pages, block_tables=table, seq_lens=torch.tensor(lens, dtype=torch.int32, device=device),
            enable_dcp=True, cp_world=world, cp_rank=rank, return_lse=True,
            causal_seqlens_kv_global=torch.tensor(kv, dtype=torch.int32, device=device),
        ))  # fmt: skip
        outs.append(out.flatten(0, -3))
        lses.append(lse)
    merged = flashinfer.merge_states(torch.stack(outs, 1), torch.stack(lses, 1))
    truth, truth_lse = expected(x, SCALE, torch.float64, causal=True)
    same, _ = expected(x, SCALE, HALF, causal=True)
    _, same_lse = expected(x, SCALE, torch.float32, causal=True)
    assert_close(merged[0], same, truth)
    assert_close(merged[1], same_lse * LOG2E, truth_lse * LOG2E)


@pytest.mark.parametrize("planned", (True, False))
def test_outputs_of_another_type_than_planned(planned, device):
    """As CUTLASS' kernels write fp8, the output over o_scale."""
    x = latents([1] * 3, [7, 3, 12], 4, device=device)
    wrapper = BatchMLAPagedAttentionWrapper(workspace(device), backend="cutlass")
    out = torch.empty(3, 4, 64, dtype=FP8, device=device)
    scale, given = (128 + 16) ** -0.5, dict(page_table=x.blocks(), kv_len=x.kv_lens)
    if planned:
        wrapper.plan(*x.tables, 4, 64, 16, 8, False, scale, HALF)
        given = {}
    assert wrapper.run(*x.parts(), out=out, o_scale=0.25, **given) is out
    truth, _ = expected(x, scale, torch.float64)
    same, _ = expected(x, scale, HALF)
    assert_close(out, (same * 4).to(FP8), truth * 4)


def test_queries_and_caches_in_pairs(device):
    x = latents([1] * 3, [7, 3, 12], 4, device=device)
    wrapper = BatchMLAPagedAttentionWrapper(workspace(device))
    wrapper.plan(*x.tables, 4, 64, 16, 8, False, SCALE, HALF, query_layout="split", kv_cache_layout="split",
                 lse_mode="base2", output_scale="none", scale_mode="kv-per-tensor", use_sinks=False)  # fmt: skip
    q_nope, q_pe, ckv, kpe = x.parts()
    check(wrapper.run(query=(q_nope, q_pe), kv_cache=(ckv, kpe), return_lse=True), x, SCALE)


@pytest.mark.parametrize("groups", (1, 4))
@pytest.mark.parametrize("graph", (False, True))
def test_scales_of_each_latent(groups, graph, device):
    """fp8 latents with a scale for each token and group of elements, and fp8 positions under a scale of their own."""
    torch.manual_seed(3)
    x = latents([2, 1, 1], [17, 3, 12], 4, dtype=torch.bfloat16, kv_dtype=FP8, device=device)
    scales = torch.full((*x.cache.shape[:2], groups), float("nan"), device=device)
    # Powers of two: the products are bf16 values, and the truth is made of them.
    scales[:] = 2.0 ** torch.randint(-2, 3, scales.shape, device=device).float()
    wide = x.cache.float()
    wide[..., :64] *= scales.repeat_interleave(64 // groups, -1)
    keys = []
    for i, n in enumerate(x.kv_lens.tolist()):
        pages = x.kv_indices[x.kv_indptr[i] : x.kv_indptr[i + 1]].long()
        keys.append(wide[pages].flatten(0, 1)[:n].bfloat16())
    exact = Latents(x.q, None, keys, x.qo_indptr, x.kv_indptr, None, x.kv_lens, 64)
    fixed = {}
    if graph:
        integers = dict(dtype=torch.int32, device=device)
        fixed = dict(
            use_cuda_graph=True, qo_indptr=torch.zeros(4, **integers), kv_indptr=torch.zeros(4, **integers),
            kv_indices=torch.full((20,), 10**6, **integers), kv_len_arr=torch.zeros(3, **integers),
        )  # fmt: skip
    wrapper = BatchMLAPagedAttentionWrapper(workspace(device), **fixed)
    wrapper.plan(*x.tables, 4, 64, 16, 8, True, SCALE, torch.bfloat16, FP8)
    half = torch.tensor([0.5], device=device)
    got = wrapper.run(*x.parts(), ckv_scale=1.0, ckv_scale_arr=scales, kpe_scale=half, return_lse=True)
    check(got, exact, SCALE, causal=True, pe_scale=0.5)
    with pytest.raises(ValueError, match="ckv_scale_arr"):
        wrapper.run(*x.parts(), ckv_scale_arr=scales[..., 0], kpe_scale=1.0)


def test_rows_past_the_plan_are_refused(device):
    """In CUDA-graph mode, where a smaller batch is padded, they are rows without keys."""
    x = latents([1, 2], [7, 12], 4, device=device)
    q_nope, q_pe, ckv, kpe = x.parts()
    more = [torch.cat([t, t[:1]]) for t in (q_nope, q_pe)]
    wrapper = BatchMLAPagedAttentionWrapper(workspace(device))
    # Offsets on a GPU are not looked at: that would wait for it.
    on_host = [t.cpu() for t in x.tables]
    wrapper.plan(*on_host, 4, 64, 16, 8, False, SCALE, HALF)
    with pytest.raises(ValueError, match="q_nope: got 4 rows; allowed: 3, the last offset of qo_indptr"):
        wrapper.run(*more, ckv, kpe)
    with pytest.raises(ValueError, match="q_nope: got 2 rows; allowed: at least 3"):
        wrapper.run(q_nope[:2], q_pe[:2], ckv, kpe)
    for tables in (on_host, x.tables):
        buffers = [torch.zeros(n, dtype=torch.int32, device=device) for n in (4, 4, 9, 3)]
        padded = BatchMLAPagedAttentionWrapper(workspace(device), True, *buffers)
        padded.plan(*tables, 4, 64, 16, 8, False, SCALE, HALF)
        for _ in range(3):
            out, lse = padded.run(*more, ckv, kpe, return_lse=True)
            check((out[:3], lse[:3]), x, SCALE)
            assert not out[3:].any() and lse[3:].eq(-torch.inf).all()


@pytest.mark.parametrize(
    "name, change",
    (
        ("out", lambda t: 3), ("out", lambda t: t.tolist()), ("out", lambda t: t[:1]), ("out", lambda t: t.mT),
        ("out", lambda t: t[..., :1].expand(t.shape)), ("out", lambda t: t.to(torch.complex64)),
        ("lse", lambda t: "none"), ("lse", lambda t: t.flatten()[0]), ("lse", lambda t: t[..., :3]),
        ("query", lambda t: 3), ("query", lambda t: (t,)), ("query", lambda t: t.flatten()),
        ("query", lambda t: (t.tolist(), t)), ("kv_cache", lambda t: "none"), ("kv_cache", lambda t: t.tolist()),
        ("o_scale", lambda t: "1"), ("o_scale", lambda t: torch.ones(2)),
    ),
)  # fmt: skip
def test_what_is_refused_in_one_tensor(name, change, device):
    x = latents([1, 1], [7, 12], 4, device=device)
    wrapper = BatchMLAPagedAttentionWrapper(workspace(device))
    wrapper.plan(*x.tables, 4, 64, 16, 8, False, SCALE, HALF)
    out = torch.full((2, 1, 4, 64), 777.0, dtype=HALF, device=device)
    given = dict(query=x.q.view(2, 1, 4, 80), kv_cache=x.cache, out=out, o_scale=None,
                 lse=torch.full((2, 1, 4), 777.0, device=device))  # fmt: skip
    with pytest.raises(ValueError, match=rf"^{name}[\[:]"):
        wrapper.run(**given | {name: change(given[name])})
    assert (out == 777).all()


def test_an_operand_without_columns_is_on_the_device(device):
    x = latents([1, 1], [7, 12], 4, device=device)
    wrapper = BatchMLAPagedAttentionWrapper(workspace(device))
    wrapper.plan(*x.tables, 4, 80, 0, 8, False, SCALE, HALF)
    wrapper.run(x.q, x.q[..., :0], x.cache, x.cache[..., :0])
    for name, wrong in (("q_pe", x.q), ("kpe_cache", x.cache)):
        with pytest.raises(ValueError, match=f"^{name}:"):
            wrapper.run(x.q, ckv_cache=x.cache, **{name: wrong[..., :0].to("meta")})


def test_outputs_whose_requests_and_queries_are_apart_in_memory(device):
    """A slice of the queries' axis: no one stride leads from row to row."""
    q, cache = (torch.randn(*shape, device=device).half() for shape in ((3, 2, 4, 80), (5, 16, 80)))
    pages, lens = (torch.tensor(t, dtype=torch.int32, device=device) for t in ([[3, 1], [0, 0], [2, 4]], [20, 5, 32]))
    run = partial(trtllm_batch_decode_with_kv_cache_mla, q, cache, workspace(device), 64, 64, 16, pages, lens, 32,
                  bmm1_scale=0.1)  # fmt: skip
    expected, expected_lse = run(return_lse=True)
    wide, wide_lse = (torch.full(shape, 7.0, device=device) for shape in ((3, 5, 4, 64), (3, 5, 4)))
    wide = wide.half()
    out, lse = wide[:, 1:3], wide_lse[:, 1:3]
    assert run(out=out, lse=lse) is out
    assert torch.equal(out, expected) and torch.equal(lse.reshape(6, 4), expected_lse)
    assert bool((wide[:, [0, 3, 4]] == 7).all()) and bool((wide_lse[:, [0, 3, 4]] == 7).all())
    with pytest.raises(ValueError, match="^out: got strides"):
        run(out=torch.empty(3, 1, 4, 64, device=device).half().expand(3, 2, 4, 64))


@pytest.mark.parametrize("name, wrong", (("qk_rope_head_dim", -1), ("kv_lora_rank", 0), ("kv_lora_rank", True)))
@pytest.mark.parametrize("function", ("trtllm_batch_decode_with_kv_cache_mla", "xqa_batch_decode_with_kv_cache_mla"))
def test_wrong_head_sizes_are_named_as_the_caller_names_them(function, name, wrong):
    q, cache = torch.ones(2, 1, 4, 80, dtype=torch.float16), torch.ones(5, 4, 80, dtype=torch.float16)
    sizes = dict(qk_nope_head_dim=64, kv_lora_rank=64, qk_rope_head_dim=16) | {name: wrong}
    tables, lens = torch.zeros(2, 2, dtype=torch.int32), torch.ones(2, dtype=torch.int32)
    with pytest.raises(ValueError, match=f"^{name}: got {wrong}; allowed: "):
        getattr(flashinfer.mla, function)(
            q, cache, torch.empty(0, dtype=torch.uint8), block_tables=tables, seq_lens=lens, max_seq_len=8, **sizes
        )
