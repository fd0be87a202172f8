"""Latent attention's Hopper kernel: what it takes and refuses, and, on a Hopper GPU, its results."""

from dataclasses import replace

import pytest
import torch

from flashinfer._core.target import named
from flashinfer.mla import BatchMLAPagedAttentionWrapper, trtllm_batch_decode_with_kv_cache_mla
from flashinfer.ops.attention.mla import Problem, mla
from flashinfer.ops.attention.mla.config import choose_sm90
from flashinfer.ops.attention.mla.sm90 import combine_latent
from flashinfer.testing import generate
from flashinfer.testing.compare import assert_bitwise, assert_close
from tests.ops.attention.cases import workspace
from tests.ops.attention.mla.latents import LOG2E, check, latents
from tests.ops.attention.mla.test_unplanned import call, chosen, sparse

BF, HALF, E4, E5 = torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.float8_e5m2
SCALE = 0.06
PROBLEM = Problem("bf16", "bf16", "bf16", 128)

REFUSED = {
    "compute capability": (dict(), "120a"),
    "keys fp16": (dict(kv_dtype="fp16"), "90a"),
    "output fp8e4nv": (dict(o_dtype="fp8e4nv"), "90a"),
    "head_dim_ckv 256": (dict(head_dim_ckv=256), "90a"),
    "head_dim_kpe 32": (dict(head_dim_kpe=32), "90a"),
    "two caches": (dict(sparse=True, first=128, first_page=64), "90a"),
    "16 bytes": (dict(aligned=False), "90a"),
}


@pytest.mark.parametrize("reason", REFUSED)
def test_what_is_refused_is_left_to_the_portable_kernel(reason):
    changes, arch = REFUSED[reason]
    variant = mla.variants[0]
    assert variant.name == "sm90" and not variant.refuses(PROBLEM, named("90a"))
    assert reason in variant.refuses(replace(PROBLEM, **changes), named(arch))


@pytest.mark.parametrize(
    ("changes", "gather"),
    (({}, False), ({"page_size": 16}, False), ({"page_size": 8}, True), ({"page_size": 48}, True),
     ({"matrix": False}, True), ({"sparse": True}, True), ({"kv_dtype": "fp8e4nv"}, True)),
)  # fmt: skip
def test_boxes_are_pages_that_are_powers_of_two(changes, gather):
    assert choose_sm90(replace(PROBLEM, **changes), named("90a")).gather == gather


@pytest.fixture
def hopper(device):
    if torch.cuda.get_device_capability(device) != (9, 0):
        pytest.skip("needs a Hopper GPU, which has wgmma")
    return device


# q_lens, kv_lens, heads, page, causal, dtype, kpe
CASES = {
    "one block to three pairs": ([1] * 8, [0, 1, 64, 65, 128, 129, 256, 300], 64, 64, False, BF, 64),
    "two tiles a token, split": ([1] * 3, [1000, 77, 4097], 128, 64, False, HALF, 64),
    "no positional rows": ([1] * 3, [1000, 77, 2049], 128, 32, False, HALF, 0),
    "few heads, tokens": ([4, 1, 0, 16], [100, 7, 9, 1025], 16, 16, True, BF, 64),
    "odd heads, before the first key": ([9, 3, 5], [2, 0, 700], 21, 256, True, BF, 64),
    "many tokens of one head": ([200, 77], [300, 70], 1, 64, True, BF, 64),
    "pages of a token": ([2, 1], [1000, 77], 128, 1, True, BF, 64),
    "pages of no box": ([1] * 3, [1000, 0, 77], 16, 5, False, BF, 0),
    "many requests": ([1] * 300, [(i * 131) % 1500 for i in range(300)], 16, 64, False, BF, 64),
}  # fmt: skip


@pytest.mark.gpu
@pytest.mark.parametrize("joined", (False, True))
@pytest.mark.parametrize("case", CASES)
def test_batches(case, joined, hopper):
    _check_batch(CASES[case], CASES[case][5], joined, hopper)


# (case, dtype of queries): dtype of keys
FP8 = {
    ("one block to three pairs", BF): E4,
    ("two tiles a token, split", HALF): E4,
    ("no positional rows", BF): E5,
    ("few heads, tokens", BF): E4,
    ("many tokens of one head", HALF): E5,
    ("pages of a token", BF): E4,
    ("pages of no box", HALF): E4,
    ("many requests", BF): E4,
}


@pytest.mark.gpu
@pytest.mark.parametrize("joined", (False, True))
@pytest.mark.parametrize(("case", "q_dtype"), FP8)
def test_fp8_caches(case, q_dtype, joined, hopper):
    _check_batch((*CASES[case][:5], q_dtype, CASES[case][6]), FP8[case, q_dtype], joined, hopper)


def _check_batch(case, kv_dtype, joined, hopper):
    q_lens, kv_lens, heads, page, causal, dtype, kpe = case
    x = latents(q_lens, kv_lens, heads, 512, kpe, page, dtype=dtype, kv_dtype=kv_dtype, device=hopper)
    wrapper = BatchMLAPagedAttentionWrapper(workspace(hopper, 1 << 27), backend="sm90")
    wrapper.plan(*x.tables, heads, 512, kpe, page, causal, SCALE, dtype, kv_dtype)
    parts = x.parts() if joined else [t.contiguous() for t in x.parts()]
    results = []
    for _ in range(2):
        out = torch.full((*x.q.shape[:2], 512), torch.nan, dtype=dtype, device=hopper)
        results.append(wrapper.run(*parts, out=out, return_lse=True))
        check(results[-1], x, SCALE, causal=causal)
    for first, again in zip(*results):
        assert_bitwise(first, again)


@pytest.mark.gpu
@pytest.mark.parametrize("heads", (128, 5))
@pytest.mark.parametrize("kv_dtype", (E4, E5))
def test_fp8_queries(kv_dtype, heads, hopper):
    x = latents([2] * 4, [1000, 0, 77, 2050], heads, 512, 64, 32, dtype=E4, kv_dtype=kv_dtype, device=hopper)
    for give in (lambda v: v, lambda v: torch.tensor([v], device=hopper)):
        out, lse = trtllm_batch_decode_with_kv_cache_mla(
            **call(x, backend="sm90", bmm1_scale=give(SCALE), bmm2_scale=give(1.5), return_lse=True, max_seq_len=2050,
                   workspace_buffer=workspace(hopper, 1 << 27))
        )  # fmt: skip
        assert out.dtype == BF
        check((out.flatten(0, 1), lse), x, SCALE, out_scale=1.5, causal=True)


@pytest.mark.gpu
@pytest.mark.parametrize("kv_dtype", (BF, E4))
def test_sinks_and_factors(kv_dtype, hopper):
    x = latents([1] * 4, [1000, 0, 77, 2050], 16, 512, 64, 64, dtype=BF, kv_dtype=kv_dtype, device=hopper)
    wrapper = BatchMLAPagedAttentionWrapper(workspace(hopper, 1 << 27), backend="sm90")
    wrapper.plan(*x.tables, 16, 512, 64, 64, False, SCALE, BF, kv_dtype)
    sinks = torch.randn(16, device=hopper) * 4
    check(wrapper.run(*x.parts(), return_lse=True, sinks=sinks), x, SCALE, sinks=sinks)
    check(wrapper.run(*x.parts(), return_lse=True, return_lse_base_on_e=True), x, SCALE, base_e=True)
    result = wrapper.run(*x.parts(), return_lse=True, ckv_scale=0.5, kpe_scale=2.0)
    check(result, x, SCALE * 0.5, pe_scale=4.0, out_scale=0.5)
    on_device = [torch.tensor([v], device=hopper) for v in (-0.05, 3.0)]
    result = wrapper.run(*x.parts(), return_lse=True, bmm1_scale=on_device[0], bmm2_scale=on_device[1])
    check(result, x, -0.05, out_scale=3.0)
    check(wrapper.run(*x.parts(), return_lse=True, bmm1_scale=-0.03), x, -0.03)


@pytest.mark.gpu
@pytest.mark.parametrize("kv_dtype", (BF, E4))
@pytest.mark.parametrize(("page", "heads", "count", "top_k"), ((64, 128, 6, 40), (1, 128, 3, 512), (5, 21, 200, 100)))
def test_keys_named_one_by_one(page, heads, count, top_k, kv_dtype, hopper):
    q = generate.randn(count, heads, 576, dtype=BF, device=hopper)
    cache = generate.randn(4000 // page, page, 576, dtype=kv_dtype, device=hopper)
    tokens = chosen(count, top_k, cache.shape[0] * page, hopper)
    lens = torch.randint(0, top_k + 1, (count,), dtype=torch.int32, device=hopper)
    for given in (None, lens):
        x = sparse(tokens, cache, q, 512, given)
        out, lse = trtllm_batch_decode_with_kv_cache_mla(
            **call(x, query=q[:, None], kv_cache=cache, sparse_mla_top_k=top_k, backend="sm90", bmm1_scale=SCALE,
                   block_tables=tokens[:, None], seq_lens=lens, sparse_mla_top_k_lens=given, return_lse=True,
                   workspace_buffer=workspace(hopper, 1 << 27))
        )  # fmt: skip
        check((out.flatten(0, 1), lse), x, SCALE)


@pytest.mark.parametrize(("at_a_time", "programs"), ((4, 50), (8, 50), (4, 800)))
def test_combining_split_tiles(at_a_time, programs, device):
    """Split tiles between others, dealt out to few programs and to many, by rows, and by parts of them; splits without
    a key."""
    heads, dim, slots = 3, 32, 90
    p = replace(PROBLEM, q_dtype="fp16", o_dtype="fp16", num_heads=heads, head_dim_ckv=dim, sinks=True, lse=True,
                base_e=True)  # fmt: skip
    c = replace(choose_sm90(p, named("90a")), block_m=16, combine_splits=at_a_time, combine_rows=2,
                combine_parts=2)  # fmt: skip
    partial_out = torch.randn(slots, 16, dim, device=device)
    partial_lse = torch.randn(slots, 16, device=device)
    partial_lse[torch.rand(slots, 16) < 0.3] = -torch.inf
    partial_out[partial_lse == -torch.inf] = 0
    sinks = torch.randn(heads, device=device)
    sinks[1] = -torch.inf
    items = torch.full((400, 16), 0, dtype=torch.int32, device=device)
    out, lse = torch.zeros(300, heads, dim, dtype=HALF, device=device), torch.zeros(300, heads, device=device)
    truth, truth_lse = out.double(), lse.double()
    at = slot = token = 0
    for tile in range(300):
        splits = 1 if tile % 13 else 2 + tile % 4
        # A record as the schedule writes it; of its positions, the combination reads none.
        for n in range(splits):
            row = torch.tensor([token, 1, 0, 0, 0, 0, 0, slot + n if splits > 1 else -1, 0, slot, splits])
            items[at, :11] = row
            at += 1
        if splits > 1:
            parts = partial_lse[slot : slot + splits, :heads].double()
            every = torch.cat((parts, sinks.double()[None] * LOG2E)) / LOG2E
            truth_lse[token] = torch.logsumexp(every, 0)
            weights = torch.exp(parts / LOG2E - truth_lse[token]).nan_to_num(0.0)
            values = partial_out[slot : slot + splits, :heads].double().nan_to_num(0.0)
            truth[token] = (weights[..., None] * values).sum(0)
            slot += splits
        token += 1
    counts = torch.tensor([at], dtype=torch.int32, device=device)
    combine_latent(p, c, (programs, 1, 1), out, lse, partial_out, partial_lse, items, counts, sinks, *out.stride()[:2])
    assert slot <= slots and 50 < at <= 400
    assert_close(out, truth.to(HALF), truth)
    assert_close(lse, truth_lse.float(), truth_lse, "lse")
