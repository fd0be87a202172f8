"""Public calls in one graph of torch.compile: what eager calls check by addresses or by values does not break it."""

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

import flashinfer
from flashinfer import fused_moe, gemm, paged_mqa, sampling
from flashinfer.fused_moe import WeightLayout
from flashinfer.testing.compare import assert_bitwise

E4M3 = torch.float8_e4m3fn


def weight_in_blocks(device):
    a, b = (torch.randn(n, 256, device=device).to(E4M3) for n in (3, 64))
    blocks = flashinfer.prepare_low_latency_gemm_weights(b, {})
    return lambda a: gemm.mm_fp8(a, blocks), (a,)


def factors(device):
    x = torch.randint(256, (128, 8), dtype=torch.uint8, device=device)
    return flashinfer.block_scale_interleave, (x,)


def shuffled_factors(device):
    x = torch.randint(256, (128, 8), dtype=torch.uint8, device=device)
    return lambda x: flashinfer.shuffle_matrix_sf_a(x, 128), (x,)


def in_place(device):
    a, b, c = (torch.randn(shape, device=device).bfloat16() for shape in ((16, 32), (32, 16), (16, 16)))

    def call(a, b, c):
        c = c.clone()
        return gemm.gemm_alpha_beta(a, b, c, trans_b=False, alpha=0.5, beta=2.0)

    return call, (a, b, c)


def routing(device):
    logits, bias = torch.randn(3, 8, device=device), torch.zeros(8, device=device)

    def call(logits, bias):
        weights, ids = logits.new_empty(3, 2), logits.new_empty(3, 2, dtype=torch.int32)
        replay = logits.new_empty(3, 2, dtype=torch.int16)
        fused_moe.fused_topk_deepseek(logits, bias, 1, 1, 2, 1.0, weights, ids, routing_replay_out=replay)
        return weights, ids, replay

    return call, (logits, bias)


def adapters(device, do_finalize=True):
    """Experts whose first products get what adapters add; rows between experts are not written."""
    x, w1, w2 = (torch.randn(n, device=device).bfloat16() for n in ((2, 128), (4, 256, 128), (4, 128, 128)))
    chosen = torch.tensor([[0, 1], [2, 3]], device=device).int(), torch.full((2, 2), 0.5, device=device)
    delta = torch.randn(2, 2, 256, device=device).bfloat16()

    def call(x, delta):
        results = fused_moe.trtllm_bf16_routed_moe(
            chosen, x, w1, w2, 4, 2, None, None, 128, 0, 4, use_shuffled_weight=False,
            weight_layout=WeightLayout.MajorK, gemm1_lora_delta=delta, do_finalize=do_finalize,
        )  # fmt: skip
        *first, row, activated = results
        kept = activated[row.long()]
        return (first[0][row.long()], first[1], row, kept) if not do_finalize else (first[0], row, kept)

    return call, (x, delta)


def unfinalized(device):
    return adapters(device, do_finalize=False)


def rows_of_probabilities(device):
    probs, indices = torch.rand(3, 9, device=device), torch.tensor([2, 0, 2], device=device)
    return lambda p, i: sampling.sampling_from_probs(p, indices=i, seed=3, offset=1), (probs, indices)


def rows_of_a_page_table(device):
    scores, table = torch.randn(3, 9, device=device), torch.randint(99, (2, 9), device=device).int()
    lens, rows = torch.tensor([9, 4, 2], device=device).int(), torch.tensor([1, 0, 1], device=device).int()
    return lambda *given: flashinfer.top_k_page_table_transform(*given[:3], 3, given[3]), (scores, table, lens, rows)


def cache_of(device, *, bytes_of_key):
    """Queries of 32 bytes, pages of 8 keys, weights of 2 heads, a block table and lengths."""
    pool = torch.randint(120, (4, 8, 1, bytes_of_key), dtype=torch.uint8, device=device)
    table, lens = torch.tensor([[1, 0], [3, 2]], device=device).int(), torch.tensor([9, 5], device=device).int()
    return torch.randint(120, (2, 1, 2, 32), device=device).byte(), pool, torch.rand(2, 2, device=device), table, lens


def index_scores(device):
    q, pool, weights, table, lens = cache_of(device, bytes_of_key=36)
    pool.view(4, -1)[:, 256:] = torch.ones(4, 8, device=device).view(torch.uint8)

    def call(q, pool, weights, table, lens):
        q = q.view(E4M3)
        return (
            flashinfer.fp8_paged_mqa_logits(q, pool, weights, table, lens, 9)[:, :5],
            paged_mqa.fp8_paged_mqa_logits(q, pool, weights, lens, table, None, 9, clean_logits=True),
        )

    return call, (q, pool, weights, table, lens)


def index_scores_in_fp4(device):
    q, pool, *others = cache_of(device, bytes_of_key=34)
    factors = torch.full((2, 1, 2, 2), 127, dtype=torch.uint8, device=device)

    def call(q, factors, pool, *others):
        return flashinfer.fp4_paged_mqa_logits(q, factors, pool, *others, 9)[:, :5]

    return call, (q, factors, pool, *others)


def pages_with_factors(device):
    """NVFP4 rows into slots and out of a block table; the scales are tensors on the host."""
    rows, slots = torch.randn(3, 1, 64, device=device).bfloat16(), torch.tensor([5, -1, 2], device=device)
    table, lens = torch.tensor([[1, 7], [0, 1]], device=device), torch.tensor([4, 6], device=device)

    def call(rows, slots, scale, table, lens):
        codes, factors = (rows.new_zeros(2, 4, 1, n, dtype=torch.uint8) for n in (32, 4))
        flashinfer.nvfp4_quantize_append_paged_kv_cache_with_slot_mapping(
            rows, rows, slots, (codes, codes.clone()), (factors, factors.clone()), scale, scale
        )
        k, v = (rows.new_zeros(2, 6, 1, 64) for _ in range(2))
        flashinfer.nvfp4_kv_dequantize_paged((codes, codes), (factors, factors), table, lens, scale, scale, k, v)
        return codes, factors, k, v

    return call, (rows, slots, torch.tensor(0.5), table, lens)


CALLS = (weight_in_blocks, factors, shuffled_factors, in_place, routing, adapters, unfinalized, rows_of_probabilities,
         rows_of_a_page_table, index_scores, index_scores_in_fp4, pages_with_factors)  # fmt: skip


@pytest.mark.parametrize("case", CALLS, ids=lambda case: case.__name__)
def test_one_graph(case, device):
    call, given = case(device)
    results, expected = torch.compile(call, backend="aot_eager", fullgraph=True)(*given), call(*given)
    single = isinstance(expected, torch.Tensor)
    for result, wanted in zip([results] if single else results, [expected] if single else expected, strict=True):
        assert_bitwise(result, wanted)


@pytest.mark.parametrize("case", [rows_of_probabilities, rows_of_a_page_table], ids=lambda case: case.__name__)
def test_fake_tables_have_no_values_to_check(case, device):
    call, given = case(device)
    with FakeTensorMode() as mode:
        result = call(*map(mode.from_tensor, given))
    expected = call(*given)
    assert (result.shape, result.dtype) == (expected.shape, expected.dtype)


def test_rows_that_do_not_exist_are_refused_by_the_graph():
    call, (probs, _) = rows_of_probabilities("cpu")
    compiled = torch.compile(call, backend="aot_eager", fullgraph=True)
    for row in (-1, 3):
        with pytest.raises(RuntimeError, match="indices: allowed: 0 ... 2"):
            compiled(probs, torch.tensor([row]))


def mixture(device):
    """Experts in bfloat16; the weights are of the graph."""
    w1, w2 = (torch.randn(shape, device=device).bfloat16() for shape in ((4, 128, 64), (4, 64, 64)))

    def call(x):
        ids = torch.zeros(x.shape[0], 2, dtype=torch.int32, device=x.device)
        return fused_moe.cutlass_fused_moe(x, ids, ids.float() + 1, w1, w2, torch.bfloat16, None)[0]

    return call


def rotation(device):
    def call(x):
        q, k = x.view(-1, 1, 64).clone(), x.view(-1, 1, 64).clone()
        flashinfer.apply_rope_pos_ids_inplace(q, k, torch.arange(x.shape[0], device=x.device))
        return q + k

    return call


@pytest.mark.parametrize("case", [mixture, rotation], ids=lambda case: case.__name__)
def test_one_graph_for_all_numbers_of_rows(case, device):
    call, graphs = case(device), []

    def counting(graph, inputs):
        graphs.append(graph)
        return graph

    torch._dynamo.reset()
    compiled = torch.compile(call, backend=counting, fullgraph=True, dynamic=True)
    for rows in (9, 13, 40):
        x = torch.randn(rows, 64, device=device).bfloat16()
        assert_bitwise(compiled(x), call(x))
    assert len(graphs) == 1
