"""Small calls of every kind of kernel, for a memory checker to watch: each tensor is an allocation of its own.

    PYTORCH_NO_CUDA_MEMORY_CACHING=1 compute-sanitizer --tool memcheck python small_cases.py [NAME ...]
"""

import sys

import torch

import flashinfer

DEVICE = torch.device("cuda", 0)


def randn(*shape, dtype=torch.bfloat16):
    return torch.randn(*shape, device=DEVICE, dtype=torch.float32).to(dtype)


def workspace():
    return torch.empty(1 << 22, dtype=torch.uint8, device=DEVICE)


def ints(*values):
    return torch.tensor(values, dtype=torch.int32)


def ragged(dim=128, **plan):
    """Lengths around tiles, and nothing."""
    q_lens, kv_lens = ints(0, 130, 1, 65, 0), ints(0, 130, 1, 129, 3)
    q_lens, kv_lens = (x.cumsum(0).to(torch.int32) for x in (q_lens, kv_lens))
    wrapper = flashinfer.BatchPrefillWithRaggedKVCacheWrapper(workspace())
    wrapper.plan(q_lens, kv_lens, 4, 2, dim, q_data_type=torch.bfloat16, **plan)
    rows, keys = int(q_lens[-1]), int(kv_lens[-1])
    wrapper.run(randn(rows, 4, dim), randn(keys, 2, dim), randn(keys, 2, dim), return_lse=True)


def paged(page_size, q_lens=(130, 1, 64), kv_lens=(150, 1, 129), decode=False, dim=128, kv_dtype=torch.bfloat16):
    """Full pages in no order; the last of each request partly filled."""
    pages = [-(-n // page_size) for n in kv_lens]
    indices = torch.randperm(sum(pages), device=DEVICE).to(torch.int32)
    indptr = ints(0, *pages).cumsum(0).to(torch.int32)
    last = ints(*((n - 1) % page_size + 1 for n in kv_lens))
    cache = randn(sum(pages), 2, page_size, 2, dim).to(kv_dtype)
    types = dict(q_data_type=torch.bfloat16, kv_data_type=kv_dtype)
    if decode:
        wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(workspace())
        wrapper.plan(indptr, indices, last, 4, 2, dim, page_size, **types)
        return wrapper.run(randn(len(kv_lens), 4, dim), cache)
    wrapper = flashinfer.BatchPrefillWithPagedKVCacheWrapper(workspace())
    qo_indptr = ints(0, *q_lens).cumsum(0).to(torch.int32)
    wrapper.plan(qo_indptr, indptr, indices, last, 4, 2, dim, page_size, causal=True, **types)
    return wrapper.run(randn(sum(q_lens), 4, dim), cache)


def latent(page_size):
    pages = 5
    wrapper = flashinfer.mla.BatchMLAPagedAttentionWrapper(workspace())
    lens = ints(3 * page_size - 1, 2 * page_size)
    indices = torch.randperm(pages, device=DEVICE).to(torch.int32)
    qo_indptr, kv_indptr = (x.to(DEVICE) for x in (ints(0, 1, 2), ints(0, 3, 5)))
    wrapper.plan(qo_indptr, kv_indptr, indices, lens.to(DEVICE), 16, 512, 64, page_size, False, 192**-0.5,
                 torch.bfloat16, torch.bfloat16)  # fmt: skip
    wrapper.run(randn(2, 16, 512), randn(2, 16, 64), randn(pages, page_size, 512), randn(pages, page_size, 64))


def merge():
    v, s = randn(7, 4, 128), randn(7, 4, dtype=torch.float32)
    flashinfer.merge_state(v, s, randn(7, 4, 128), randn(7, 4, dtype=torch.float32))
    flashinfer.merge_states(randn(7, 3, 4, 128), randn(7, 3, 4, dtype=torch.float32))


def tokens():
    x, w = randn(3, 1001), randn(1001)
    flashinfer.rmsnorm(x, w)
    flashinfer.fused_add_rmsnorm(x, randn(3, 1001), w)
    flashinfer.silu_and_mul(randn(5, 2 * 1008))
    flashinfer.apply_rope_pos_ids(randn(9, 4, 128), randn(9, 2, 128), torch.arange(9, device=DEVICE, dtype=torch.int32))
    cache = randn(6, 2, 5, 2, 128)
    batch, positions = flashinfer.get_batch_indices_positions(ints(0, 2, 9).to(DEVICE), ints(12, 14).to(DEVICE), 9)
    flashinfer.append_paged_kv_cache(randn(9, 2, 128), randn(9, 2, 128), batch, positions, cache,
                                     torch.arange(6, device=DEVICE, dtype=torch.int32), ints(0, 3, 6).to(DEVICE),
                                     ints(2, 4).to(DEVICE))  # fmt: skip


def sampled():
    probs = randn(3, 5003, dtype=torch.float32).softmax(-1)
    flashinfer.sampling.top_k_top_p_sampling_from_probs(probs, 40, 0.9)
    flashinfer.sampling.top_k_renorm_probs(probs, 17)
    flashinfer.top_k(probs, 100)


def quantised():
    x = randn(130, 512)
    flashinfer.fp4_quantize(x, torch.ones(1, device=DEVICE))
    flashinfer.mxfp8_quantize(x)


CASES = {
    "ragged": lambda: ragged(causal=True),
    "ragged, window and cap": lambda: ragged(64, causal=True, window_left=40, logits_soft_cap=20.0),
    "pages of 16": lambda: paged(16),
    "pages of 5": lambda: paged(5),
    "page size 1": lambda: paged(1),
    "decode": lambda: paged(16, kv_lens=(2000, 1, 17), decode=True),
    "decode, odd pages and dim": lambda: paged(3, kv_lens=(700, 1, 17), decode=True, dim=72),
    "decode, FP8": lambda: paged(16, kv_lens=(700, 1, 17), decode=True, kv_dtype=torch.float8_e4m3fn),
    "latent": lambda: latent(16),
    "latent, page size 1": lambda: latent(1),
    "merge": merge,
    "tokens": tokens,
    "sampling": sampled,
    "quantisation": quantised,
}


if __name__ == "__main__":
    for name in sys.argv[1:] or CASES:
        CASES[name]()
        torch.cuda.synchronize()
        print(name, flush=True)
