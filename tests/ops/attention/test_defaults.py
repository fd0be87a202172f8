"""Outputs that are given, and calls under torch's default device and dtype, of every attention entry."""

import contextlib

import pytest
import torch

import flashinfer
from flashinfer.testing import generate
from flashinfer.testing.compare import assert_bitwise
from tests.ops.attention.cases import workspace

HEADS, DIM, PAGE = (4, 2), 32, 4
Q_LENS, KV_LENS = [3, 1, 2], [9, 4, 17]


class Entries:
    """A call of each entry with tensors made beforehand: entry(out, lse, return_lse)."""

    def __init__(self, device):
        x = self.x = generate.ragged_batch(Q_LENS, KV_LENS, *HEADS, DIM, dtype=torch.float16, device=device)
        self.one = generate.ragged_batch([1] * 3, KV_LENS, *HEADS, DIM, dtype=torch.float16, device=device)
        self.paged, self.workspace, self.device = generate.paged(x, PAGE), workspace(device), device
        self.mask = generate.random_mask(Q_LENS, KV_LENS, device=device)
        self.lens = x.kv_indptr.diff()
        self.scale = torch.tensor([0.5, 2.0], device=device)
        self.chosen = torch.rand(2, 3, 4, device=device) < 0.6
        self.sizes = torch.tensor([[1, 3, 2]] * 2), torch.tensor([[4, 9, 1, 6]] * 2)
        self.of_heads = [torch.randn(heads, n, DIM, dtype=torch.float16, device=device)
                         for heads, n in ((4, 6), (2, 20), (2, 20))]  # fmt: skip
        self.of_one, self.of_all = torch.arange(4, dtype=torch.int32), torch.tensor([0, 6])
        self.positions = torch.tensor([0, 1, 2, 0] * 3, dtype=torch.int32)
        self.blocks = torch.tensor([0, 2, 3]), torch.tensor([1, 3, 0]), torch.rand(3, 3, 5, device=device) < 0.7

    @property
    def tables(self):
        return self.x.qo_indptr, self.paged.indptr, self.paged.indices, self.paged.last_page_len

    def paged_prefill(self, *plan, **call):
        wrapper = flashinfer.BatchPrefillWithPagedKVCacheWrapper(self.workspace)
        wrapper.plan(*self.tables, *HEADS, DIM, PAGE, custom_mask=self.mask, pos_encoding_mode="ALIBI",
                     q_data_type=torch.float16)  # fmt: skip
        return wrapper.run(self.x.q, self.paged.kv_cache, k_scale=self.scale, **call)

    def ragged_prefill(self, **call):
        wrapper = flashinfer.BatchPrefillWithRaggedKVCacheWrapper(self.workspace)
        wrapper.plan(self.x.qo_indptr, self.x.kv_indptr, *HEADS, DIM, causal=True, pos_encoding_mode="ROPE_LLAMA",
                     window_left=5, q_data_type=torch.float16)  # fmt: skip
        return wrapper.run(self.x.q, self.x.k, self.x.v, **call)

    def decode(self, **call):
        wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(self.workspace)
        wrapper.plan(*self.tables[1:], *HEADS, DIM, PAGE, pos_encoding_mode="ALIBI", q_data_type=torch.float16)
        return wrapper.run(self.one.q, self.paged.kv_cache, v_scale=self.scale, **call)

    def mixed(self, **call):
        wrapper = flashinfer.BatchAttention(device=self.device)
        wrapper.plan(*self.tables[:3], self.lens, *HEADS, DIM, DIM, PAGE, causal=True, q_data_type=torch.float16,
                     kv_data_type=torch.float16)  # fmt: skip
        return wrapper.run(self.x.q, self.paged.kv_cache, **call)

    def block_sparse(self, **call):
        wrapper = flashinfer.BlockSparseAttentionWrapper(self.workspace)
        indptr, indices, mask = self.blocks
        wrapper.plan(indptr, indices, 6, 20, 3, 5, *HEADS, DIM, mask=mask, q_data_type=torch.float16)
        return wrapper.run(*(t.transpose(0, 1) for t in self.of_heads), **call)

    def sparse_per_head(self, **call):
        wrapper = flashinfer.BlockSparseAttentionWrapper(self.workspace)
        wrapper.plan(None, None, 6, 20, 2, 5, *HEADS, DIM, block_mask=self.chosen, q_data_type=torch.float16)
        return wrapper.run(*(t.transpose(0, 1) for t in self.of_heads), **call)

    def variable_sparse(self, **call):
        wrapper = flashinfer.VariableBlockSparseAttentionWrapper(self.workspace)
        wrapper.plan(self.chosen, *self.sizes, *HEADS, DIM, causal=True, q_data_type=torch.float16)
        return wrapper.run(*self.of_heads, **call)

    def single(self):
        q, k, v = self.x.request(0)
        return flashinfer.single_prefill_with_kv_cache(
            q, k, v, causal=True, pos_encoding_mode="ALIBI", k_scale=self.scale, return_lse=True
        )

    def single_decode(self):
        q, k, v = self.one.request(2)
        return flashinfer.single_decode_with_kv_cache(q[0], k, v, pos_encoding_mode="ALIBI", q_scale=2.0)

    def pod(self):
        q, k, v = self.x.request(0)
        wrapper = flashinfer.PODWithPagedKVCacheWrapper(self.workspace)
        wrapper.plan(*self.tables[1:], *HEADS, DIM, PAGE)
        return wrapper.run(q, k, v, self.one.q, self.paged.kv_cache, q_scale=2.0)

    def batch_pod(self):
        wrapper = flashinfer.BatchPODWithPagedKVCacheWrapper(self.workspace)
        wrapper.plan(*self.tables, self.of_one, *self.tables[1:], *HEADS, DIM, PAGE)
        return wrapper.run(self.x.q, self.paged.kv_cache, self.one.q, self.paged.kv_cache)

    def cascade(self):
        wrapper = flashinfer.MultiLevelCascadeAttentionWrapper(2, self.workspace)
        shared = self.of_all, self.paged.indptr[:2], self.paged.indices, self.paged.last_page_len[:1]
        wrapper.plan(*zip(shared, self.tables), *HEADS, DIM, PAGE, causal=True, window_left=6)
        return wrapper.run(self.x.q, self.paged.kv_cache)

    def shared_prefix(self):
        _, k, v = self.x.request(0)
        prefill = flashinfer.BatchPrefillWithSharedPrefixPagedKVCacheWrapper(self.workspace)
        prefill.begin_forward(*self.tables, *HEADS, DIM, PAGE)
        decode = flashinfer.BatchDecodeWithSharedPrefixPagedKVCacheWrapper(self.workspace)
        decode.begin_forward(*self.tables[1:], *HEADS, DIM, PAGE)
        return (
            prefill.forward(self.x.q, k, v, self.paged.kv_cache, causal=True),
            decode.forward(self.one.q, k, v, self.paged.kv_cache),
        )

    def append(self):
        cache = torch.zeros_like(self.paged.kv_cache)
        rows = flashinfer.get_batch_indices_positions(self.x.kv_indptr, self.lens, len(self.x.k))
        flashinfer.append_paged_kv_cache(
            self.x.k, self.x.v, *rows, cache, self.paged.indices, self.paged.indptr, self.paged.last_page_len
        )
        return cache, flashinfer.get_seq_lens(self.paged.indptr, self.paged.last_page_len, PAGE)

    def own_cache(self):
        cache = flashinfer.PagedKVCache(1, HEADS[1], DIM, PAGE, 16, device=self.device)
        decode = flashinfer.BatchDecodeWithPagedKVCache(cache, *HEADS, DIM)
        sequence = cache.begin_forward(len(self.x.k))
        cache.append(self.x.k, self.x.v)
        cache.end_forward(sequence)
        return decode.decode(self.one.q[:1, None])

    def multi_item(self):
        wrapper = flashinfer.BatchPrefillWithRaggedKVCacheWrapper(self.workspace)
        wrapper.plan(self.x.qo_indptr, self.x.kv_indptr, *HEADS, DIM, causal=True, prefix_len_ptr=self.lens - 3,
                     token_pos_in_items_ptr=self.positions, token_pos_in_items_len=4)  # fmt: skip
        return wrapper.run(self.x.q, self.x.k, self.x.v)


OUTPUTS = ["paged_prefill", "ragged_prefill", "decode", "mixed", "block_sparse", "sparse_per_head", "variable_sparse"]
OTHERS = [
    "single", "single_decode", "pod", "batch_pod", "cascade", "shared_prefix", "append", "own_cache", "multi_item",
]  # fmt: skip


@pytest.fixture
def entries(device):
    return Entries(device)


@pytest.mark.parametrize("name", OUTPUTS)
def test_given_outputs_are_written_and_returned(name, entries):
    entry = getattr(entries, name)
    always = name == "mixed"
    flag = {} if always else dict(return_lse=True)
    expected = entry(**flag)
    for flag in ({},) if always else ({}, dict(return_lse=True)):
        # Twice: launches of the second call may be those of the first.
        for _ in range(2):
            out, lse = (torch.full_like(t, 7.0) for t in expected)
            found = entry(out=out, lse=lse, **flag)
            found_out, found_lse = found if always or flag else (found, lse)
            assert found_out is out and found_lse is lse
            assert_bitwise(out, expected[0])
            assert_bitwise(lse, expected[1])


class Defaults(contextlib.ExitStack):
    """torch's default device, or dtype."""

    def __init__(self, default):
        super().__init__()
        self.default = default

    def __enter__(self):
        if isinstance(self.default, torch.dtype):
            self.callback(torch.set_default_dtype, torch.get_default_dtype())
            torch.set_default_dtype(self.default)
        else:
            self.enter_context(torch.device(self.default))
        return super().__enter__()


# A tensor made on "meta" has no values: whatever is made without a device fails.
@pytest.mark.parametrize("default", ["meta", torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize("name", OUTPUTS + OTHERS)
def test_defaults_of_torch_change_nothing(name, default, entries):
    entry = getattr(entries, name)
    call = dict(return_lse=True) if name in OUTPUTS and name != "mixed" else {}
    expected = entry(**call)
    with Defaults(default):
        found = entry(**call)
    flat = lambda x: [x] if isinstance(x, torch.Tensor) else [t for part in x for t in flat(part)]
    for a, b in zip(flat(found), flat(expected), strict=True):
        assert a.dtype == b.dtype and a.device == b.device
        assert_bitwise(a, b)
