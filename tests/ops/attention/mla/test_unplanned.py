"""Latent attention without a plan: block tables and lengths on the device, and keys named one by one."""

from functools import partial

import pytest
import torch

import flashinfer
from flashinfer.mla import (
    trtllm_batch_decode_sparse_mla_dsv4, trtllm_batch_decode_with_kv_cache_mla, xqa_batch_decode_with_kv_cache_mla,
    xqa_mla,
)  # fmt: skip
from flashinfer.testing import generate
from tests.ops.attention.cases import backends, workspace
from tests.ops.attention.mla.latents import Latents, check, latents

FP8, HALF = torch.float8_e4m3fn, torch.float16
SCALE = 0.13


def call(x, page=8, **others):
    """The arguments of trtllm_batch_decode_with_kv_cache_mla for a batch of like query lengths."""
    batch, kpe = len(x.keys), x.q.shape[-1] - x.ckv
    query = x.q.view(batch, -1, *x.q.shape[1:])
    return dict(
        query=query, kv_cache=x.cache[:, None], workspace_buffer=workspace(x.q.device), qk_nope_head_dim=128,
        kv_lora_rank=x.ckv, qk_rope_head_dim=kpe, block_tables=x.blocks(gap=3), seq_lens=x.kv_lens, max_seq_len=1000,
        bmm1_scale=SCALE,
    ) | others  # fmt: skip


@pytest.mark.parametrize("q_len", (1, 3))
def test_block_tables(q_len, device):
    x = latents([q_len] * 5, [70, 0, 33, 1, 129], 6, device=device)
    for backend in backends(device):
        out, lse = trtllm_batch_decode_with_kv_cache_mla(**call(x, backend=backend, return_lse=True))
        assert out.shape == (5, q_len, 6, x.ckv) and lse.shape == (5 * q_len, 6)
        check((out.flatten(0, 1), lse), x, SCALE, causal=True)


def test_requests_of_different_queries(device):
    x = latents([2, 0, 5, 1], [70, 9, 5, 33], 4, device=device)
    sinks = torch.tensor([0.5, -3.0, 2.0, 40.0], device=device)
    for backend in backends(device):
        out = torch.full((8, 4, x.ckv), torch.nan, dtype=HALF, device=device)
        lse = torch.full((8, 4), torch.nan, device=device)
        got = trtllm_batch_decode_with_kv_cache_mla(
            **call(x, query=x.q, cum_seq_lens_q=x.qo_indptr, max_q_len=5, backend=backend, return_lse=True, out=out,
                   lse=lse, sinks=[sinks], return_lse_base="basee", seq_lens=x.kv_lens.view(torch.uint32))
        )  # fmt: skip
        assert got[0].data_ptr() == out.data_ptr() and got[1].data_ptr() == lse.data_ptr()
        check((out, lse), x, SCALE, causal=True, base_e=True, sinks=sinks)


@pytest.mark.parametrize("tensors", (False, True))
def test_fp8_with_scales(tensors, device):
    x = latents([1, 1], [70, 33], 4, dtype=FP8, kv_dtype=FP8, device=device)
    give = (lambda v: torch.tensor([v], device=device)) if tensors else (lambda v: v)
    for backend in backends(device):
        out, lse = trtllm_batch_decode_with_kv_cache_mla(
            **call(x, backend=backend, bmm1_scale=give(0.05), bmm2_scale=give(1.5), return_lse=True)
        )
        assert out.dtype == torch.bfloat16
        check((out.flatten(0, 1), lse), x, 0.05, out_scale=1.5)


def test_xqa_names(device):
    x = latents([1, 1, 1], [70, 0, 33], 4, 64, 64, device=device)
    expected = trtllm_batch_decode_with_kv_cache_mla(**call(x))
    torch.testing.assert_close(xqa_batch_decode_with_kv_cache_mla(**call(x)), expected, rtol=0, atol=0)
    out = torch.full((3, 1, 4, 64), torch.nan, dtype=HALF, device=device)
    semaphores = torch.zeros(4, dtype=torch.int32, device=device)
    lens = x.kv_lens.view(torch.uint32)[:, None]
    for cache in (x.cache, x.cache.flatten(0, 1)):
        out.fill_(torch.nan)
        xqa_mla(x.q[:, None], cache, cache[..., :64], x.blocks(), lens, out, workspace(device), semaphores, 8, 0.7, 0.5)
        _, lse = trtllm_batch_decode_with_kv_cache_mla(**call(x, bmm1_scale=0.35 * 192**-0.5, return_lse=True))
        check((out[:, 0], lse), x, 0.35 * 192**-0.5, out_scale=0.5)
    assert flashinfer.xqa_mla is xqa_mla


def sparse(tokens, cache, q, ckv, lens=None, first=None):
    """The keys that rows of `tokens` name, as a batch of one query each; `first` is the cache of the first 128."""
    keys = []
    for i, row in enumerate(tokens.tolist()):
        row = row if lens is None else row[: int(lens[i])]
        rows = [(cache if first is None or at >= 128 else first).flatten(0, 1)[t] for at, t in enumerate(row) if t >= 0]
        keys.append(torch.stack(rows) if rows else cache.new_zeros(0, cache.shape[-1]))
    indptr = generate.indptr([1] * len(keys), q.device)
    return Latents(q, cache, keys, indptr, indptr, None, None, ckv)


def chosen(count, top_k, pool, device):
    """Tokens of the pool for each query: -1 here and there, one row of nothing else, and duplicates."""
    tokens = torch.randint(pool, (count, top_k), dtype=torch.int32)
    tokens[torch.rand(count, top_k) < 0.3] = -1
    tokens[1] = -1
    tokens[2, 1:5] = tokens[2, 0] = 3
    return tokens.to(device)


@pytest.mark.parametrize(("page", "kv_dtype"), ((1, HALF), (64, FP8), (5, HALF)))
def test_keys_named_one_by_one(page, kv_dtype, device):
    q = generate.randn(6, 5, 80, dtype=HALF, device=device)
    cache = generate.randn(max(1, 320 // page), page, 80, dtype=kv_dtype, device=device)
    tokens = chosen(6, 40, cache.shape[0] * page, device)
    lens = torch.tensor([40, 17, 33, 0, 1, 40], dtype=torch.int32, device=device)
    for given in (None, lens):
        x = sparse(tokens, cache, q, 64, given)
        for backend in backends(device):
            out, lse = trtllm_batch_decode_with_kv_cache_mla(
                **call(x, query=q.view(2, 3, 5, 80), kv_cache=cache, sparse_mla_top_k=40, backend=backend,
                       block_tables=tokens.view(2, 3, 40), seq_lens=lens[:2], sparse_mla_top_k_lens=given,
                       return_lse=True)
            )  # fmt: skip
            check((out.flatten(0, 1), lse), x, SCALE)


def test_a_page_of_a_cache_with_gaps(device):
    """Pages may be further apart than their tokens."""
    q = generate.randn(3, 4, 80, dtype=HALF, device=device)
    cache = generate.strided(generate.randn(20, 16, 80, dtype=HALF, device=device), 0, 80)
    tokens = chosen(3, 33, 320, device)
    x = sparse(tokens, cache, q, 64)
    for backend in backends(device):
        out, lse = trtllm_batch_decode_with_kv_cache_mla(
            **call(x, query=q[:, None], kv_cache=cache, sparse_mla_top_k=33, backend=backend, block_tables=tokens,
                   return_lse=True)
        )  # fmt: skip
        check((out[:, 0], lse), x, SCALE)


@pytest.mark.parametrize("kv_dtype", (HALF, FP8))
def test_two_caches(kv_dtype, device):
    q = generate.randn(4, 3, 64, dtype=HALF, device=device)
    window = generate.randn(10, 16, 64, dtype=kv_dtype, device=device)
    compressed = generate.randn(30, 2, 64, dtype=kv_dtype, device=device)
    tokens = torch.cat((chosen(4, 128, 160, device), chosen(4, 20, 60, device)), 1)
    lens = torch.tensor([148, 140, 130, 100], dtype=torch.int32, device=device)
    sinks = torch.tensor([0.5, -3.0, 2.0], device=device)
    x = sparse(tokens, compressed, q, 64, lens, window)
    for backend in backends(device):
        run = partial(trtllm_batch_decode_sparse_mla_dsv4, query=q, workspace_buffer=workspace(device),
                      bmm1_scale=SCALE, backend=backend, sinks=sinks)  # fmt: skip
        out = run(swa_kv_cache=window[:, None], compressed_kv_cache=compressed[:, None], sparse_indices=tokens,
                  sparse_topk_lens=lens)  # fmt: skip
        check_out(out, x, sinks)
        out = run(swa_kv_cache=window[:, :, None], sparse_indices=tokens[:, :128], kv_layout="NHD")
        check_out(out, sparse(tokens[:, :128], window, q, 64), sinks)


@pytest.mark.parametrize("lengths", ("uniform", "ragged"))
def test_lengths_bound_the_window(lengths, device):
    """Columns of the window past a query's own key are anything."""
    q = generate.randn(6, 3, 64, dtype=HALF, device=device)
    window, compressed = (generate.randn(n, 4, 64, dtype=HALF, device=device) for n in (50, 20))
    tokens = torch.cat((torch.randint(200, (6, 128)), torch.randint(80, (6, 9))), 1).int().to(device)
    if lengths == "uniform":
        given, ends = dict(query=q.view(3, 2, 3, 64)), [4, 5, 129, 130, 0, 1]
        lens, queries = [5, 130, 1], {}
    else:
        given, ends = dict(query=q), [7, 300, 301, 302, 1, 2]
        lens, queries = [7, 302, 2], dict(cum_seq_lens_q=generate.indptr([1, 3, 2], device), max_q_len=3)
    out = trtllm_batch_decode_sparse_mla_dsv4(
        **given, **queries, swa_kv_cache=window, compressed_kv_cache=compressed, sparse_indices=tokens,
        workspace_buffer=workspace(device), seq_lens=torch.tensor(lens, dtype=torch.int32, device=device),
        bmm1_scale=SCALE,
    )  # fmt: skip
    seen = tokens.clone()
    for row, end in zip(seen, ends):
        row[min(end, 128) : 128] = -1
    check_out(out.reshape(6, 3, 64), sparse(seen, compressed, q, 64, None, window), None)


@pytest.mark.parametrize("lens", ("own", "total", "none"))
def test_two_tables(lens, device):
    """The window's tokens and the others in tables of their own, as the packed backend of upstream takes them."""
    q = generate.randn(4, 3, 64, dtype=HALF, device=device)
    window, compressed = (generate.randn(n, 4, 64, dtype=HALF, device=device) for n in (50, 20))
    near, far = (torch.randint(n, (4, width), dtype=torch.int32, device=device) for n, width in ((200, 70), (80, 9)))
    of_near, of_far = (torch.tensor(n, dtype=torch.int32, device=device) for n in ([70, 3, 0, 50], [9, 2, 5, 0]))
    given = dict(swa_topk_lens=of_near)
    if lens == "own":
        given |= dict(extra_sparse_topk_lens=of_far - 1, sparse_topk_lens_offset=1)
    elif lens == "total":
        given |= dict(sparse_topk_lens=of_far + 128)
    out = trtllm_batch_decode_sparse_mla_dsv4(
        query=q, swa_kv_cache=window, compressed_kv_cache=compressed, sparse_indices=near, extra_sparse_indices=far,
        workspace_buffer=workspace(device), bmm1_scale=SCALE, **given,
    )  # fmt: skip
    both = torch.full((4, 137), -1, dtype=torch.int32, device=device)
    for row in range(4):
        both[row, : int(of_near[row])] = near[row, : int(of_near[row])]
        n = 9 if lens == "none" else int(of_far[row])
        both[row, 128 : 128 + n] = far[row, :n]
    check_out(out, sparse(both, compressed, q, 64, None, window), None)


def check_out(out, x, sinks):
    """As `check`, where no LSE is given: it is that of the definition."""
    from tests.ops.attention.mla.latents import LOG2E, expected

    lse = expected(x, SCALE, torch.float64, sinks=sinks)[1] * LOG2E
    check((out, lse.float()), x, SCALE, sinks=sinks)


def test_no_requests_and_no_keys(device):
    for backend in backends(device):
        empty = torch.zeros(0, 2, dtype=torch.int32, device=device)
        cache = torch.zeros(3, 8, 80, dtype=HALF, device=device)
        run = partial(trtllm_batch_decode_with_kv_cache_mla, cache.new_zeros(0, 1, 4, 80), cache, workspace(device),
                      128, 64, 16, empty, empty[:, 0], 8, backend=backend)  # fmt: skip
        assert run().shape == (0, 1, 4, 64)
        assert run(sparse_mla_top_k=2).shape == (0, 1, 4, 64)


BAD = {
    "query": lambda x: dict(query=x.q),
    "kv_cache": lambda x: dict(kv_cache=x.cache[..., :70]),
    "block_tables": lambda x: dict(block_tables=x.kv_indices),
    "seq_lens": lambda x: dict(seq_lens=x.kv_lens[:1]),
    "out": lambda x: dict(out=x.q),
    "lse": lambda x: dict(lse=torch.zeros(3), return_lse=True),
    "sinks": lambda x: dict(sinks=[torch.zeros(4)] * 2),
    "block_tables: got .* of K and of V": lambda x: dict(uses_shared_paged_kv_idx=False),
    "uses_shared_paged_kv_idx": lambda x: dict(uses_shared_paged_kv_idx="no"),
    "kv_scale_format": lambda x: dict(kv_scale_format="ue8m0"),
    "causal_seqlens_kv_global": lambda x: dict(cp_world=2),
    "cp_rank": lambda x: dict(cp_world=2, cp_rank=2),
    "bmm1_scale": lambda x: dict(bmm1_scale=float("nan")),
    "return_lse_base": lambda x: dict(return_lse_base="10"),
    "sparse_mla_top_k_lens": lambda x: dict(sparse_mla_top_k_lens=x.kv_lens),
    "block_tables: got .* queries": lambda x: dict(sparse_mla_top_k=7),
    "backend": lambda x: dict(backend="other"),
}


@pytest.mark.parametrize("argument", BAD)
def test_bad_input_is_refused_by_name(argument):
    x = latents([2, 2], [70, 33], 4)
    with pytest.raises(ValueError, match=argument):
        trtllm_batch_decode_with_kv_cache_mla(**call(x) | BAD[argument](x))


def test_no_query(device):
    cache = torch.zeros(3, 8, 64, dtype=HALF, device=device)
    tokens = torch.zeros(0, 130, dtype=torch.int32, device=device)
    run = partial(trtllm_batch_decode_sparse_mla_dsv4, torch.zeros(0, 4, 64, dtype=HALF, device=device), cache,
                  workspace(device))  # fmt: skip
    assert run(sparse_indices=tokens, compressed_kv_cache=cache).shape == (0, 4, 64)
    both = run(sparse_indices=tokens[:, :70], extra_sparse_indices=tokens[:, :9], compressed_kv_cache=cache)
    assert both.shape == (0, 4, 64)


def test_tables_have_a_row_for_each_query():
    q, cache = torch.zeros(2, 4, 64, dtype=HALF), torch.zeros(3, 8, 64, dtype=HALF)
    near, far = torch.zeros(2, 70, dtype=torch.int32), torch.zeros(4, 9, dtype=torch.int32)
    run = partial(trtllm_batch_decode_sparse_mla_dsv4, q, cache, workspace("cpu"), compressed_kv_cache=cache)
    with pytest.raises(ValueError, match="^extra_sparse_indices: got"):
        run(sparse_indices=near, extra_sparse_indices=far)
    with pytest.raises(ValueError, match="^sparse_indices: got"):
        run(sparse_indices=far)


def test_dsv4_refuses_other_arguments():
    q, cache = torch.zeros(2, 4, 64, dtype=HALF), torch.zeros(3, 8, 64, dtype=HALF)
    run = partial(trtllm_batch_decode_sparse_mla_dsv4, q, cache, workspace("cpu"))
    tokens = torch.zeros(2, 130, dtype=torch.int32)
    for name, given in (
        ("sparse_indices", {}), ("sparse_indices", dict(sparse_indices=tokens)),
        ("sparse_indices", dict(sparse_indices=tokens, extra_sparse_indices=tokens)),
        ("hca_swa_indices", dict(sparse_indices=tokens, hca_swa_indices=tokens)),
        ("seq_lens", dict(sparse_indices=tokens[:, :9], seq_lens=torch.zeros(3, dtype=torch.int32))),
        ("dsv4_output_scale", dict(sparse_indices=tokens, dsv4_output_scale=q)),
        ("swa_kv_cache", dict(sparse_indices=tokens[:, :9], swa_kv_cache=torch.zeros(3, 8, 584, dtype=torch.uint8))),
    ):  # fmt: skip
        with pytest.raises(ValueError, match=name):
            run(**given) if "swa_kv_cache" not in given else trtllm_batch_decode_sparse_mla_dsv4(
                query=q, workspace_buffer=workspace("cpu"), **given
            )


@pytest.mark.gpu
def test_a_captured_call_follows_its_tables(device):
    x = latents([1] * 4, [4097, 1, 0, 1023], 16, 512, 64, 64, torch.bfloat16, device=device)
    arguments = call(x, kv_cache=x.cache.nan_to_num(), return_lse=True)
    trtllm_batch_decode_with_kv_cache_mla(**arguments)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out, lse = trtllm_batch_decode_with_kv_cache_mla(**arguments)
    lens, tables = x.kv_lens.clone(), arguments["block_tables"]
    for order in ((0, 1, 2, 3), (3, 2, 0, 1)):
        order = torch.tensor(order, device=device)
        arguments["block_tables"].copy_(tables[order].clone())
        arguments["seq_lens"].copy_(lens[order])
        y = Latents(x.q, x.cache, [x.keys[i] for i in order.tolist()], x.qo_indptr, x.kv_indptr, None, None, x.ckv)
        out.fill_(torch.nan)
        graph.replay()
        check((out[:, 0], lse), y, SCALE)
        arguments["block_tables"].copy_(tables[torch.argsort(order)].clone())
