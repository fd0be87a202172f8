"""One small call of every room, for tests that hold for all of them: inputs on a device, then a function of nothing.

`CALLS[room](device)` makes the inputs and returns what calls public functions with them and returns their results. What
is written in place is copied first, so that a second call gives the same.
"""

import contextlib

import torch

import flashinfer
import flashinfer.gdn_decode
from flashinfer import fused_moe, gemm, mhc, msa_ops
from flashinfer._core.backends import variants_of
from flashinfer._core.checks import UnsupportedConfig
from flashinfer._core.dispatch import Op
from flashinfer._core.target import target_of
from flashinfer.causal_conv1d import causal_conv1d_update
from flashinfer.concat_ops import concat_mla_k
from flashinfer.mamba import selective_state_update, ssd_combined_fwd
from flashinfer.ops.attention import kernels
from flashinfer.testing import generate
from tests.ops.attention.mla.latents import latents
from tests.ops.attention.mqa_logits.test_mqa_logits import Case, fp8_paged_mqa_logits
from tests.ops.gemm import scaled
from tests.ops.moe.experts.test_experts import E, K, M, bf16_layer, chosen

HALF = torch.float16


def randn(*shape, dtype=HALF, device="cpu"):
    return torch.randn(*shape, dtype=torch.float32, device=device).to(dtype)


def norms(device):
    x, residual, w = (randn(*shape, device=device) for shape in ((3, 64), (3, 64), (64,)))

    def call():
        new, added = x.clone(), residual.clone()
        flashinfer.fused_add_rmsnorm(new, added, w)
        fp8 = torch.empty(3, 64, dtype=torch.float8_e4m3fn, device=device)
        flashinfer.norm.rmsnorm_quant(fp8, x, w, 0.5)
        layer = flashinfer.layernorm(x.bfloat16(), w.float(), w.float())
        return flashinfer.rmsnorm(x, w), new, added, fp8, layer, flashinfer.gemma_rmsnorm(x, w)

    return call


def ropes(device):
    q, k, positions = randn(5, 4, 32, device=device), randn(5, 2, 32, device=device), torch.arange(5, device=device)
    cache = torch.randn(9, 32, dtype=torch.float32, device=device)
    indptr, offsets = generate.indptr([2, 3], device), torch.tensor([0, 4], dtype=torch.int32, device=device)

    def call():
        return (
            *flashinfer.apply_rope_pos_ids(q, k, positions),
            *flashinfer.apply_llama31_rope(q, k, indptr, offsets),
            *flashinfer.apply_rope_with_cos_sin_cache(positions, q.flatten(1), k.flatten(1), 32, cache),
            *flashinfer.rope.rope_quantize_fp8(q, k, None, None, cache, positions, quant_scale_q=0.5)[:2],
        )

    return call


def activations(device):
    x = randn(3, 64, device=device)
    return lambda: (flashinfer.silu_and_mul(x), flashinfer.gelu_and_mul(x), flashinfer.gelu_tanh_and_mul(x))


def pages(device):
    key, value, cache = randn(9, 2, 16, device=device), randn(9, 2, 16, device=device), randn(6, 2, 5, 2, 16).to(device)
    indptr, lens = generate.indptr([2, 7], device), torch.tensor([12, 14], dtype=torch.int32, device=device)
    kv_indptr, last = generate.indptr([3, 3], device), torch.tensor([2, 4], dtype=torch.int32, device=device)
    indices = torch.randperm(6, device=device).int()

    def call():
        batch, positions = flashinfer.get_batch_indices_positions(indptr, lens, 9)
        new = cache.clone()
        flashinfer.append_paged_kv_cache(key, value, batch, positions, new, indices, kv_indptr, last)
        codes, factors = torch.zeros_like(new, dtype=torch.int8), torch.zeros_like(new[..., :1], dtype=torch.float32)
        flashinfer.page.quantize_append_paged_kv_cache(
            key, value, batch, positions, codes, factors, indices, kv_indptr, last, "int8_per_token_head"
        )
        return batch, positions, new, codes, factors, flashinfer.get_seq_lens(kv_indptr, last, 5)

    return call


def concats(device):
    nope, rope = randn(5, 4, 128, device=device), randn(5, 1, 64, device=device)

    def call():
        k = torch.empty(5, 4, 192, dtype=HALF, device=device)
        concat_mla_k(k, nope, rope)
        return (k,)

    return call


def quantised(device):
    x, scale = randn(5, 64, device=device), torch.ones(1, dtype=torch.float32, device=device)
    bits = torch.rand(37, device=device) < 0.5
    indptr = generate.indptr([30, 7], device)

    def call():
        packed, _ = flashinfer.segment_packbits(bits, indptr)
        codes = (*flashinfer.fp4_quantize(x, scale), *flashinfer.mxfp8_quantize(x))
        return (*codes, flashinfer.packbits(bits), packed)

    return call


def sampled(device):
    logits = torch.randn(3, 100, dtype=torch.float32, device=device)
    probs = logits.softmax(-1)
    draft, ids = probs[:2].view(1, 2, 100), torch.tensor([[3, 5]], dtype=torch.int32, device=device)
    seeded = dict(seed=7, offset=0)

    def call():
        sampling = flashinfer.sampling
        torch.manual_seed(3)
        return (
            sampling.sampling_from_probs(probs), sampling.sampling_from_logits(logits, **seeded),
            sampling.top_k_top_p_sampling_from_probs(probs, 20, 0.9), sampling.min_p_sampling_from_probs(probs, 0.1),
            sampling.top_k_renorm_probs(probs, 17), sampling.top_p_renorm_probs(probs, 0.7),
            sampling.top_k_mask_logits(logits, 17), sampling.softmax(logits, 0.7),
            *sampling.chain_speculative_sampling(draft, ids, probs.view(1, 3, 100), **seeded),
        )  # fmt: skip

    return call


def top(device):
    x, lens = torch.randn(2, 50, dtype=torch.float32, device=device), generate.indptr([50, -30], device)[1:]
    table = torch.randperm(100, device=device).int().view(2, 50)
    options = dict(deterministic=True)

    def call():
        given = (*flashinfer.top_k(x, 5, sorted=True, **options),)
        pages = flashinfer.top_k_page_table_transform(x, table, lens, 5, **options)
        return (*given, pages, flashinfer.top_k_ragged_transform(x, lens, lens, 5, **options))

    return call


def routings(device):
    logits, bias = torch.randn(5, 16, dtype=torch.float32, device=device), randn(16, dtype=torch.float32).to(device)

    def call():
        weights = torch.empty(5, 4, dtype=torch.float32, device=device)
        ids = torch.empty(5, 4, dtype=torch.int32, device=device)
        fused_moe.fused_topk_deepseek(logits, bias, 4, 2, 4, 2.5, weights, ids)
        return weights, ids

    return call


def adapters_of_experts(device):
    x, a, b = (randn(*shape, device=device) for shape in ((3, 64), (2, 4, 8, 64), (2, 4, 40, 8)))
    token, expert, adapter = (
        torch.tensor(ids, dtype=torch.int64, device=device) for ids in ([0, 2, 1, 0], [3, 0, 1, 2], [1, 0, -1])
    )
    weights = randn(4, dtype=torch.float32, device=device)
    return lambda: fused_moe.bgmv_moe(x, [a], [b], token, expert, adapter, weights, 4)


def experts(device):
    (x, w1, w2), _ = bf16_layer(device)
    ids, weights = chosen(device)
    logits = torch.randn(len(x), E, dtype=torch.float32, device=device)
    layout = dict(use_shuffled_weight=False, weight_layout=0)

    def call():
        routed = fused_moe.trtllm_bf16_moe(logits, None, x, w1, w2, E, K, None, None, M, 0, E, **layout)
        return fused_moe.cutlass_fused_moe(x, ids, weights, w1, w2, torch.bfloat16, None)[0], routed

    return call


def prefills(device):
    x = generate.ragged_batch([3, 0, 5], [5, 7, 17], 4, 2, 16, dtype=HALF, device=device)
    paged, space = generate.paged(x, 4), torch.empty(1 << 20, dtype=torch.uint8, device=device)
    table = (x.qo_indptr, paged.indptr, paged.indices, paged.last_page_len, 4, 2, 16, 4)
    mask = generate.random_mask([3, 0, 5], [5, 7, 17], device=device)
    q, k, v = x.request(2)

    def call():
        ragged = flashinfer.BatchPrefillWithRaggedKVCacheWrapper(space)
        ragged.plan(x.qo_indptr, x.kv_indptr, 4, 2, 16, custom_mask=mask, q_data_type=HALF)
        results = [*ragged.run(x.q, x.k, x.v, return_lse=True)]
        pages = flashinfer.BatchPrefillWithPagedKVCacheWrapper(space)
        pages.plan(*table, causal=True, window_left=3, q_data_type=HALF)
        results += pages.run(x.q, paged.kv_cache, return_lse=True)
        return *results, flashinfer.single_prefill_with_kv_cache(q, k, v, causal=True)

    return call


def decodes(device):
    x = generate.ragged_batch([1, 1, 1], [5, 0, 33], 4, 2, 16, dtype=HALF, device=device)
    paged, space = generate.paged(x, 4), torch.empty(1 << 20, dtype=torch.uint8, device=device)
    q, k, v = x.request(2)

    def call():
        wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(space)
        wrapper.plan(paged.indptr, paged.indices, paged.last_page_len, 4, 2, 16, 4, q_data_type=HALF)
        results = wrapper.run(x.q, paged.kv_cache, return_lse=True)
        return *results, flashinfer.single_decode_with_kv_cache(q[0], k, v)

    return call


def merges(device):
    v, s = randn(5, 3, 4, 16, device=device), torch.randn(5, 3, 4, dtype=torch.float32, device=device)

    def call():
        a, b = ((v[:, i].contiguous(), s[:, i].contiguous()) for i in (0, 1))
        return *flashinfer.merge_states(v, s), *flashinfer.merge_state(*a, *b)

    return call


def latent(device):
    x = latents([1, 3], [17, 5], 4, device=device)
    space = torch.empty(1 << 20, dtype=torch.uint8, device=device)

    def call():
        wrapper = flashinfer.mla.BatchMLAPagedAttentionWrapper(space)
        wrapper.plan(*x.tables, 4, 64, 16, 8, True, 0.1, HALF, HALF)
        return wrapper.run(*x.parts(), return_lse=True)

    return call


def scores(device):
    x = Case([33, 0, 17], device=device)
    return lambda: (fp8_paged_mqa_logits(**x.arguments(40, clean_logits=True)),)


def products(device):
    a, b = randn(4, 32, dtype=torch.bfloat16, device=device), randn(48, 32, dtype=torch.bfloat16, device=device)
    return lambda: (gemm.mm_bf16(a, b.T),)


def scaled_products(device):
    a, a_scale, _ = scaled.groupwise((4, 128), "e4m3", 1, 128, device)
    b, b_scale, _ = scaled.groupwise((128, 128), "e4m3", 128, 128, device)
    return lambda: (gemm.gemm_fp8_nt_groupwise(a, b, a_scale, b_scale, scale_major_mode="K"),)


def grouped_products(device):
    x, w = randn(4, 32, device=device), randn(2, 48, 32, device=device)
    lens = torch.tensor([1, 3], dtype=torch.int64, device=device)
    space = torch.empty(1 << 12, dtype=torch.int8, device=device)
    return lambda: (gemm.SegmentGEMMWrapper(space).run(x, w, 2, True, seg_lens=lens),)


def deltas(device):
    q, k, v = (randn(2, 1, heads, 16, device=device) for heads in (2, 2, 4))
    state, a, b = randn(2, 4, 16, 16).float().to(device), randn(2, 1, 4, device=device), randn(2, 1, 4, device=device)
    decay, bias = torch.zeros(4, dtype=torch.float32, device=device), torch.ones(4, dtype=torch.float32, device=device)

    def call():
        return flashinfer.gdn_decode.gated_delta_rule_decode_pretranspose(q, k, v, state.clone(), decay, a, bias, b)

    return call


def convolutions(device):
    x, weight, bias = randn(3, 32, device=device), randn(32, 4, device=device), randn(32, device=device)
    state = randn(3, 32, 3, device=device)
    return lambda: (causal_conv1d_update(x, state.clone(), weight, bias, activation="silu"),)


def state_spaces(device):
    x, dt = randn(2, 4, 16, device=device), randn(2, 4, 1, device=device).expand(2, 4, 16)
    B, C = randn(2, 2, 16, device=device), randn(2, 2, 16, device=device)
    A = torch.rand(4, dtype=torch.float32, device=device)[:, None, None].expand(4, 16, 16)
    state = torch.rand(2, 4, 16, 16, dtype=torch.float32, device=device)

    def call():
        new = state.clone()
        return selective_state_update(new, x, dt, -A, B, C, None, dt_softplus=True), new

    return call


def state_space_prompts(device):
    x, dt, B = randn(1, 70, 4, 16, device=device), randn(1, 70, 4, device=device), randn(1, 70, 2, 16, device=device)
    A = torch.rand(4, dtype=torch.float32, device=device)
    offsets = torch.tensor([0, 66, 70], dtype=torch.int32, device=device)
    return lambda: ssd_combined_fwd(x, dt, -A, B, B, dt_softplus=True, cu_seqlens=offsets)


def hyper_connections(device):
    residual, mix = randn(3, 4, 64, device=device), torch.rand(3, 24, dtype=torch.float32, device=device)

    def call():
        post, comb, x = mhc.mhc_pre_big_fuse_with_prenorm(mix, residual, mix[0, :3].clone(), mix[1].clone())
        return post, comb, x, mhc.mhc_post(x, residual, post, comb)

    return call


def hashed_routings(device):
    logits, table = randn(4, 8, device=device), torch.tensor([[1, 5], [0, 7]], dtype=torch.int32, device=device)
    tokens = torch.tensor([1, 0, 0, 1], dtype=torch.int64, device=device)
    return lambda: fused_moe.hash_topk(logits, tokens, table, 1)


def block_scores(device):
    q, k = randn(3, 4, 64, device=device), randn(200, 2, 64, device=device)
    offsets, keys = generate.indptr([1, 2], device), generate.indptr([130, 70], device)
    return lambda: (msa_ops.msa_proxy_score(q, k, offsets, keys),)


CALLS = {
    "norm": norms,
    "rope": ropes,
    "activation": activations,
    "page": pages,
    "concat": concats,
    "quantize": quantised,
    "sampling": sampled,
    "topk": top,
    "moe.routing": routings,
    "moe.experts": experts,
    "moe.finalize": experts,
    "moe.lora": adapters_of_experts,
    "attention.prefill": prefills,
    "attention.decode": decodes,
    "attention.merge": merges,
    "attention.mla": latent,
    "attention.mqa_logits": scores,
    "gemm.dense": products,
    "gemm.blockscaled": scaled_products,
    "gemm.grouped": grouped_products,
    "recurrent.delta": deltas,
    "recurrent.conv": convolutions,
    "recurrent.ssd": state_space_prompts,
    "recurrent.ssm": state_spaces,
    "mhc": hyper_connections,
    "moe.hash_routing": hashed_routings,
    "attention.block_scores": block_scores,
}
# Rooms whose calls need more than one process; tests/comm and tests/ops/comm have them.
RANKS = {"comm.allreduce_fusion", "comm.alltoall"}


@contextlib.contextmanager
def by(variant):
    """Every op runs by the reference or, under the interpreter, by its portable kernel where it has one for that."""
    select, call = Op.select, Op.__call__

    def chosen(op, problem, device, backend="auto"):
        variants_of(backend)
        try:
            return select(op, problem, target_of(device), variant)
        except UnsupportedConfig:
            return select(op, problem, target_of(device), backend)

    Op.__call__ = chosen
    # Attention keeps what it chose.
    kernels._kernels_of.cache_clear()
    try:
        yield
    finally:
        Op.__call__ = call
        kernels._kernels_of.cache_clear()
