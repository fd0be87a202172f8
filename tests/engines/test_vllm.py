"""Wrappers as vLLM 0.33 drives them: tables on the host, one decode wrapper per captured batch size, asserted plans."""

import inspect

import pytest
import torch

import flashinfer
from flashinfer.decode import fast_decode_plan
from flashinfer.mla import BatchMLAPagedAttentionWrapper
from flashinfer.testing import generate
from flashinfer.testing.compare import assert_close
from tests.ops.attention.cases import backends, check, workspace
from tests.ops.attention.oracle import Options

HEADS, DIM, PAGE, HALF = (8, 2), 64, 16, torch.float16
SCALE = 0.11


def batch(q_lens, kv_lens, device, page=PAGE):
    x = generate.ragged_batch(q_lens, kv_lens, *HEADS, DIM, dtype=HALF, device=device)
    paged = generate.paged(x, page, "HND")
    # One tensor [pages, heads, page, 2 * dim], seen as two.
    k, v = paged.caches
    together = torch.cat((k, v), -1)
    return x, paged, together.split(DIM, -1)


def assert_planned(wrapper, o: Options):
    assert wrapper._window_left == o.window_left
    assert wrapper._logits_soft_cap == (o.logits_soft_cap or 0.0)
    assert wrapper._sm_scale == o.sm_scale
    assert wrapper._causal == o.causal


@pytest.mark.parametrize(
    "o", [Options(causal=True, sm_scale=SCALE), Options(True, 20, 3.0, SCALE), Options(False, -1, None, SCALE)]
)
def test_prefill(o, device):
    for backend in backends(device):
        wrapper = flashinfer.BatchPrefillWithPagedKVCacheWrapper(workspace(device), "HND", backend=backend)
        for q_lens, kv_lens in (([20, 3], [40, 17]), ([1, 9], [5, 60])):
            x, paged, pair = batch(q_lens, kv_lens, device)
            last = paged.last_page_len.cpu()
            wrapper.plan(
                qo_indptr=x.qo_indptr.cpu(), paged_kv_indptr=paged.indptr.cpu(), paged_kv_indices=paged.indices,
                paged_kv_last_page_len=last, seq_lens=flashinfer.get_seq_lens(paged.indptr.cpu(), last, PAGE),
                num_qo_heads=HEADS[0], num_kv_heads=HEADS[1], head_dim_qk=DIM, page_size=PAGE, causal=o.causal,
                sm_scale=o.sm_scale, window_left=o.window_left, logits_soft_cap=o.logits_soft_cap, q_data_type=HALF,
                kv_data_type=HALF, o_data_type=HALF, fixed_split_size=-1, disable_split_kv=False,
            )  # fmt: skip
            assert_planned(wrapper, o)
            out = torch.full_like(x.q, float("nan"))
            result = wrapper.run(
                x.q, pair, q_scale=1.0, k_scale=1.0, v_scale=1.0, out=out, return_lse=True, kv_cache_sf=None
            )
            assert result[0] is out
            check(result, x, o)


def plan_decode(wrapper, paged, o: Options, q_len=1, first=True, **types):
    tables = dict(indptr=paged.indptr.cpu(), indices=paged.indices, last_page_len=paged.last_page_len.cpu())
    given = dict(
        num_qo_heads=HEADS[0], num_kv_heads=HEADS[1], head_dim=DIM, page_size=PAGE, pos_encoding_mode="NONE",
        window_left=o.window_left, logits_soft_cap=o.logits_soft_cap, sm_scale=o.sm_scale, non_blocking=True,
        fixed_split_size=-1, disable_split_kv=False, q_len_per_req=q_len,
    )  # fmt: skip
    types = dict(q_data_type=HALF, kv_data_type=HALF) | types
    if first:
        wrapper.plan(**tables, **given, **types, block_tables=None, seq_lens=None)
    else:
        types.pop("o_data_type", None)
        fast_decode_plan(wrapper, **tables, **given, **types)


@pytest.mark.parametrize("q_len", (1, 3))
@pytest.mark.parametrize("graph", (False, True), ids=("eager", "graph"))
def test_decode(graph, q_len, device):
    o = Options(causal=q_len > 1, window_left=30, logits_soft_cap=4.0, sm_scale=SCALE)
    buffers = {}
    if graph:
        integers = dict(dtype=torch.int32, device=device)
        buffers = dict(
            paged_kv_indptr_buffer=torch.zeros(3, **integers), paged_kv_indices_buffer=torch.zeros(40, **integers),
            paged_kv_last_page_len_buffer=torch.zeros(2, **integers),
        )  # fmt: skip
    for backend in backends(device):
        wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(
            workspace(device), "HND", use_cuda_graph=graph, use_tensor_cores=True, backend=backend, **buffers
        )
        for i, kv_lens in enumerate(([40, 7], [41, 8], [100, 9])):
            x, paged, pair = batch([q_len] * 2, kv_lens, device)
            plan_decode(wrapper, paged, o, q_len, first=i == 0 or not graph)
            assert_planned(wrapper, o)
            out, lse = torch.empty_like(x.q), torch.empty(x.q.shape[:2], device=device)
            scales = dict(q_scale=1.0, k_scale=1.0, v_scale=1.0)
            wrapper.run(x.q, pair, **scales, out=out, lse=lse, return_lse=True, kv_cache_sf=None, sinks=None)
            check((out, lse), x, o)


def test_the_output_type_outlives_the_fast_plan():
    """fast_decode_plan has no parameter for it."""
    wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(workspace("cpu"), "HND", backend="auto")
    x, paged, pair = batch([1, 1], [40, 7], torch.device("cpu"))
    types = dict(q_data_type=torch.float8_e4m3fn, kv_data_type=torch.float8_e4m3fn, o_data_type=HALF)
    for first in (True, False):
        plan_decode(wrapper, paged, Options(sm_scale=SCALE), first=first, **types)
        q, k, v = (t.to(torch.float8_e4m3fn) for t in (x.q, *pair))
        assert wrapper.run(q, (k, v), q_scale=1.0, k_scale=1.0, v_scale=1.0).dtype == HALF


def test_two_names_of_block_scales():
    wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(workspace("cpu"), "HND", backend="auto")
    x, paged, pair = batch([1, 1], [40, 7], torch.device("cpu"))
    plan_decode(wrapper, paged, Options())
    scales = tuple(torch.zeros(*t.shape[:-1], DIM // 16, dtype=torch.uint8) for t in pair)
    with pytest.raises(ValueError, match="^kv_block_scales: got tensors"):
        wrapper.run(x.q, pair, kv_cache_sf=scales)
    with pytest.raises(ValueError, match="^kv_cache_sf: got kv_block_scales too"):
        wrapper.run(x.q, pair, kv_cache_sf=scales, kv_block_scales=scales)


def test_scales_per_token_of_latents_are_a_keyword():
    """vLLM's sparse latent attention on Hopper looks for it before it plans with this wrapper."""
    parameter = inspect.signature(BatchMLAPagedAttentionWrapper.run).parameters["ckv_scale_arr"]
    assert parameter.kind is inspect.Parameter.KEYWORD_ONLY


@pytest.mark.parametrize("kpe", (0, 16))
def test_sparse_latent_attention_on_hopper(kpe, device):
    """Every token is a request of one query, whose pages of one token are its top-k: padded to the most tokens, with
    indices that are written into the buffer after the plan, and fp8 latents under queries of 16 bits."""
    most, width, heads, ckv = 6, 5, 4, 64
    q = torch.randn(most, heads, ckv + kpe, dtype=torch.bfloat16, device=device)
    cache = torch.randn(40, ckv + kpe, dtype=torch.float32, device=device).to(torch.float8_e4m3fn)
    integers = lambda n: torch.zeros(n, dtype=torch.int32, device=device)
    indices = integers(most * width)
    wrapper = BatchMLAPagedAttentionWrapper(
        workspace(device), qo_indptr=integers(most + 1), kv_indptr=integers(most + 1), kv_indices=indices,
        kv_len_arr=integers(most), use_cuda_graph=True,
    )  # fmt: skip
    for lens in ([3, 5, 1], [5, 2, 4, 1, 5], [2]):
        n = len(lens)
        padded = torch.tensor(lens + [0] * (most - n), dtype=torch.int32)
        offsets = torch.cat((torch.zeros(1, dtype=torch.int32), padded.cumsum(0).int()))
        wrapper.plan(torch.arange(most + 1, dtype=torch.int32).clamp(max=n), offsets, indices, padded, heads, ckv, kpe,
                     1, False, SCALE, q_data_type=torch.bfloat16, kv_data_type=torch.float8_e4m3fn)  # fmt: skip
        chosen = torch.randint(40, (int(offsets[-1]),), dtype=torch.int32, device=device)
        indices[: len(chosen)] = chosen
        pages = cache[:, None]
        out = wrapper.run(q[:n, :, :ckv], q[:n, :, ckv:], pages[..., :ckv], pages[..., ckv:], ckv_scale=0.5,
                          kpe_scale=0.25)  # fmt: skip
        factor = torch.tensor([0.5] * ckv + [0.25] * kpe, dtype=torch.float64, device=device)
        truth, same = [], []
        for i in range(n):
            keys = cache[chosen[offsets[i] : offsets[i + 1]].long()].double() * factor
            for dtype, results in ((torch.float64, truth), (torch.float32, same)):
                p = torch.softmax(q[i].to(dtype) @ keys.to(dtype).t() * SCALE, -1)
                p = p if dtype == torch.float64 else p.bfloat16().float()
                results.append(p @ keys[:, :ckv].to(dtype))
        assert_close(out, torch.stack(same).bfloat16(), torch.stack(truth))


@pytest.mark.parametrize("split", (False, True), ids=("whole", "split"))
def test_lengths_that_are_written_after_the_plan(split, device):
    """A sparse prefill plans from bounds that the host knows, and then puts in what the device knows."""
    x, paged, pair = batch([1, 1, 1], [40, 7, 90], device)
    for backend in backends(device):
        wrapper = flashinfer.BatchPrefillWithPagedKVCacheWrapper(workspace(device), "HND", backend=backend)
        for _ in range(2):
            pages = torch.zeros(30, dtype=torch.int32, device=device)
            most, last = torch.tensor([0, 10, 20, 30], dtype=torch.int32), torch.full((3,), PAGE, dtype=torch.int32)
            wrapper.plan(
                torch.arange(4, dtype=torch.int32), most, pages, last, *HEADS, DIM, PAGE, head_dim_vo=DIM, causal=False,
                sm_scale=SCALE, q_data_type=HALF, kv_data_type=HALF, disable_split_kv=not split,
                max_token_per_sequence=1,
            )  # fmt: skip
            pages[: len(paged.indices)] = paged.indices
            wrapper._paged_kv_indptr_buf.copy_(paged.indptr)
            wrapper._paged_kv_last_page_len_buf.copy_(paged.last_page_len)
            for _ in range(3):
                check(wrapper.run(x.q, pair, return_lse=True), x, Options(sm_scale=SCALE))
