"""Tables and pools as engines have them: offsets cut out of a larger batch's, and pools without a page axis."""

import pytest
import torch

import flashinfer
from flashinfer.ops import page
from flashinfer.testing import generate
from flashinfer.testing.compare import assert_bitwise
from tests.ops.attention.cases import backends, check, workspace
from tests.ops.attention.oracle import Options

HEADS, DIM = (4, 2), 32
Q_LENS, KV_LENS = [3, 1, 0, 5, 2], [9, 4, 3, 17, 0]


@pytest.fixture
def x(device):
    return generate.ragged_batch(Q_LENS, KV_LENS, *HEADS, DIM, dtype=torch.float16, device=device)


def cut(x, first, last):
    """Requests first : last of a batch, their offsets from 0."""
    q, k = (slice(int(p[first]), int(p[last])) for p in (x.qo_indptr, x.kv_indptr))
    begins = (p[first : last + 1] - p[first] for p in (x.qo_indptr, x.kv_indptr))
    return generate.Ragged(x.q[q], x.k[k], x.v[k], *begins)


def prefill(x, paged, cache, rows=None, backend="auto", tables=None, **plan):
    tables = tables or (x.qo_indptr, paged.indptr, paged.indices, paged.last_page_len)
    wrapper = flashinfer.BatchPrefillWithPagedKVCacheWrapper(workspace(x.q.device), paged.kv_layout, backend=backend)
    wrapper.plan(*tables, *HEADS, DIM, paged.page_size, causal=True, q_data_type=x.q.dtype, kv_data_type=x.k.dtype,
                 **plan)  # fmt: skip
    return wrapper.run(x.q if rows is None else rows, cache, return_lse=True)


def pools(paged):
    """The cache of one-token pages in every layout without a page axis, as one tensor and as pairs; strided, too."""
    k, v = (t.flatten(1, 2) for t in paged.caches)
    one = torch.stack((k, v), 1)
    return [(k, v), [k, v], one, (generate.strided(k, 0), generate.strided(v, 1)), generate.strided(one, 0)]


@pytest.mark.parametrize("kv_layout", ["NHD", "HND"])
def test_pools_without_a_page_axis(x, kv_layout, device):
    paged = generate.paged(x, 1, kv_layout)
    expected = prefill(x, paged, paged.kv_cache)
    check(expected, x, Options(causal=True))
    for pool in pools(paged):
        for given, right in zip(prefill(x, paged, pool), expected):
            assert_bitwise(given, right)


def test_a_kernel_reads_pools_without_a_page_axis(x, device):
    paged = generate.paged(x, 1)
    for backend in backends(device):
        check(prefill(x, paged, pools(paged)[3], backend=backend), x, Options(causal=True))


def test_decode_of_pools_without_a_page_axis(device):
    x = generate.ragged_batch([1, 1, 1], [9, 0, 33], *HEADS, DIM, dtype=torch.float16, device=device)
    paged = generate.paged(x, 1, "HND")
    n = len(x.q)
    buffers = (torch.empty(size, dtype=torch.int32, device=device) for size in (n + 1, 64, n))
    wrapper = flashinfer.CUDAGraphBatchDecodeWithPagedKVCacheWrapper(workspace(device), *buffers, "HND")
    wrapper.plan(paged.indptr, paged.indices, paged.last_page_len, *HEADS, DIM, 1, data_type=x.q.dtype)
    for pool in pools(paged):
        check(wrapper.run(x.q, pool, return_lse=True), x, Options())
        check((wrapper.forward(x.q, pool), wrapper.run_return_lse(x.q, pool)[1]), x, Options())


def test_pools_without_a_page_axis_need_pages_of_one_token(x, device):
    paged = generate.paged(x, 2)
    with pytest.raises(ValueError, match=r"^paged_kv_cache\[0\]: got .* pages of 2 tokens"):
        prefill(x, paged, paged.kv_cache[:, :, 0])
    with pytest.raises(ValueError, match="paged_kv_cache"):
        prefill(x, paged, paged.kv_cache[0, 0, 0])


def test_mixed_batches_of_pools_without_a_page_axis(x, device):
    paged = generate.paged(x, 1)
    wrapper = flashinfer.BatchAttention(device=device)
    lens = x.kv_indptr.diff()
    wrapper.plan(x.qo_indptr, paged.indptr, paged.indices, lens, *HEADS, DIM, DIM, 1, causal=True,
                 q_data_type=x.q.dtype, kv_data_type=x.k.dtype)  # fmt: skip
    for pool in pools(paged):
        check(wrapper.run(x.q, pool), x, Options(causal=True))


def test_pod_and_cascade_of_pools_without_a_page_axis(x, device):
    paged = generate.paged(x, 1)
    pool = pools(paged)[0]
    pod = flashinfer.BatchPODWithPagedKVCacheWrapper(workspace(device))
    # The prefill is the first two requests, the decode the others, whose offsets count the whole batch's page ids.
    p = x.qo_indptr[:3], paged.indptr[:3], paged.indices, paged.last_page_len[:2]
    d = x.qo_indptr[2:] - x.qo_indptr[2], paged.indptr[2:], paged.indices, paged.last_page_len[2:]
    pod.plan(*p, *d, *HEADS, DIM, 1, q_data_type=x.q.dtype)
    rows = x.q.split((4, 7))
    parts = pod.run(rows[0], pool, rows[1], pool, return_lse=True)
    for i, part in enumerate(parts):
        check(part, cut(x, 2 * i, 2 if i == 0 else 5), Options())
    cascade = flashinfer.MultiLevelCascadeAttentionWrapper(1, workspace(device))
    tables = ([t] for t in (x.qo_indptr, paged.indptr, paged.indices, paged.last_page_len))
    cascade.plan(*tables, *HEADS, DIM, 1, causal=True, q_data_type=x.q.dtype)
    assert_bitwise(cascade.run(x.q, pool), prefill(x, paged, pool)[0])


@pytest.mark.parametrize("kv_layout", ["NHD", "HND"])
def test_appending_to_pools_without_a_page_axis(x, kv_layout, device):
    paged = generate.paged(x, 1, kv_layout)
    for kind in range(5):
        pool = pools(paged)[kind]
        for t in pool if isinstance(pool, (tuple, list)) else (pool,):
            t.zero_()
        seq_lens = x.kv_indptr.diff()
        where = flashinfer.get_batch_indices_positions(x.kv_indptr, seq_lens, len(x.k))
        flashinfer.append_paged_kv_cache(
            x.k, x.v, *where, pool, paged.indices, paged.indptr, paged.last_page_len, kv_layout
        )
        k, v = pool if isinstance(pool, (tuple, list)) else pool.unbind(1)
        assert_bitwise(k[paged.indices.long()], x.k)
        assert_bitwise(v[paged.indices.long()], x.v)


def test_fp8_and_nvfp4_pools_without_a_page_axis(device):
    x = generate.ragged_batch([2, 1], [9, 5], *HEADS, DIM, dtype=torch.bfloat16, device=device)
    paged = generate.paged(x, 1)
    for dtype in (torch.float8_e4m3fn, torch.float8_e5m2):
        narrow = tuple(t.to(dtype) for t in paged.caches)
        tables = (x.qo_indptr, paged.indptr, paged.indices, paged.last_page_len)
        results = []
        for pool in (narrow, tuple(t[:, 0] for t in narrow)):
            wrapper = flashinfer.BatchPrefillWithPagedKVCacheWrapper(workspace(device))
            wrapper.plan(*tables, *HEADS, DIM, 1, q_data_type=x.q.dtype, kv_data_type=dtype)
            results.append(wrapper.run(x.q, pool))
        assert_bitwise(*results)
    slots = len(paged.kv_cache)
    codes = [torch.randint(256, (slots, HEADS[1], DIM // 2), dtype=torch.uint8, device=device) for _ in range(2)]
    factors = [torch.full((slots, HEADS[1], DIM // 16), 0x38, dtype=torch.uint8, device=device) for _ in range(2)]
    results = []
    for of_pages in (False, True):
        cache, scales = ([t[:, None] if of_pages else t for t in pair] for pair in (codes, factors))
        wrapper = flashinfer.BatchPrefillWithPagedKVCacheWrapper(workspace(device))
        wrapper.plan(*tables, *HEADS, DIM, 1, q_data_type=x.q.dtype, kv_data_type="nvfp4")
        results.append(wrapper.run(x.q, tuple(cache), kv_cache_sf=tuple(scales)))
    assert_bitwise(*results)


@pytest.mark.parametrize("where", ["host", "device"])
def test_offsets_of_a_slice_of_a_batch(x, where, device):
    """Requests 1 to 4 of five: page table offsets from the whole batch's, as vLLM cuts them."""
    paged = generate.paged(x, 4)
    place = "cpu" if where == "host" else device
    part = cut(x, 1, 4)
    tables = [t.to(place) for t in (part.qo_indptr, paged.indptr[1:5], paged.indices, paged.last_page_len[1:4])]
    for backend in backends(device):
        check(prefill(part, paged, paged.kv_cache, backend=backend, tables=tables), part, Options(causal=True))
    # Offsets of queries count rows of q: here q is the whole batch's.
    tables[0] = x.qo_indptr[1:5].to(place)
    out, lse = prefill(part, paged, paged.kv_cache, rows=x.q, tables=tables)
    rows = slice(int(x.qo_indptr[1]), int(x.qo_indptr[4]))
    check((out[rows], lse[rows]), part, Options(causal=True))
    # Rows of no request have no keys; in the caller's own tensors they are the caller's.
    if where == "host" or device.type == "cpu":
        for rest in (slice(0, rows.start), slice(rows.stop, None)):
            assert (out[rest] == 0).all() and (lse[rest] == -torch.inf).all()
        wrapper = flashinfer.BatchPrefillWithPagedKVCacheWrapper(workspace(device))
        wrapper.plan(*tables, *HEADS, DIM, 4, causal=True, q_data_type=x.q.dtype)
        own = torch.full_like(out, 7.0), torch.full_like(lse, 7.0)
        wrapper.run(x.q, paged.kv_cache, out=own[0], lse=own[1])
        for mine, new in zip(own, (out, lse)):
            assert_bitwise(mine[rows], new[rows])
            assert (mine[: rows.start] == 7).all() and (mine[rows.stop :] == 7).all()


@pytest.mark.parametrize("where", ["cpu", None], ids=["host", "device"])
@pytest.mark.parametrize("o_dtype", [torch.float16, torch.float8_e4m3fn], ids=str)
def test_rows_past_the_plan_in_cuda_graph_mode(x, o_dtype, where, device):
    """Tensors of a capture serve smaller batches, whose other rows are as those without keys."""
    paged, n = generate.paged(x, 4), len(Q_LENS)
    buffers = [torch.zeros(size, dtype=torch.int32, device=device) for size in (n + 1, n + 1, 64, n)]
    wrapper = flashinfer.BatchPrefillWithPagedKVCacheWrapper(workspace(device), "NHD", True, *buffers)
    tables = [t.to(where or device) for t in (x.qo_indptr, paged.indptr, paged.indices, paged.last_page_len)]
    sizes = dict(q_data_type=x.q.dtype, o_data_type=o_dtype)
    wrapper.plan(*tables, *HEADS, DIM, 4, **sizes)
    expected = wrapper.run(x.q, paged.kv_cache, return_lse=True)
    wrapper.plan(*(t[:k] for t, k in zip(tables, (4, 4, None, 3))), *HEADS, DIM, 4, **sizes)
    for given in (False, True):
        own = [torch.empty_like(t) for t in expected] if given else (None, None)
        out, lse = wrapper.run(x.q, paged.kv_cache, out=own[0], lse=own[1], return_lse=True)
        rows = int(x.qo_indptr[3])
        assert_bitwise(out[:rows].float(), expected[0][:rows].float())
        assert (out[rows:].float() == 0).all() and (lse[rows:] == -torch.inf).all()


def test_ragged_offsets_of_a_slice(x, device):
    part = cut(x, 1, 4)
    wrapper = flashinfer.BatchPrefillWithRaggedKVCacheWrapper(workspace(device))
    wrapper.plan(part.qo_indptr, x.kv_indptr[1:5], *HEADS, DIM, q_data_type=x.q.dtype)
    check(wrapper.run(part.q, x.k, x.v, return_lse=True), part, Options())
    # Offsets on a GPU are not looked at: that would wait for it.
    wrapper.plan(part.qo_indptr.cpu(), x.kv_indptr[1:5].cpu(), *HEADS, DIM, q_data_type=x.q.dtype)
    with pytest.raises(ValueError, match="kv_indptr"):
        wrapper.run(part.q, part.k, part.v)


def test_decode_and_mixed_offsets_of_a_slice(device):
    x = generate.ragged_batch([1] * 5, [9, 4, 3, 17, 0], *HEADS, DIM, dtype=torch.float16, device=device)
    paged, part = generate.paged(x, 4), cut(x, 1, 5)
    wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(workspace(device))
    wrapper.plan(paged.indptr[1:], paged.indices, paged.last_page_len[1:], *HEADS, DIM, 4, data_type=x.q.dtype)
    check(wrapper.run(part.q, paged.kv_cache, return_lse=True), part, Options())
    mixed = flashinfer.BatchAttention(device=device)
    lens = x.kv_indptr.diff()[1:]
    mixed.plan(part.qo_indptr, paged.indptr[1:], paged.indices, lens, *HEADS, DIM, DIM, 4,
               q_data_type=x.q.dtype, kv_data_type=x.k.dtype)  # fmt: skip
    check(mixed.run(part.q, paged.kv_cache), part, Options())


def test_masks_and_cascades_of_a_slice(x, device):
    paged, part = generate.paged(x, 4), cut(x, 1, 4)
    mask = generate.random_mask(Q_LENS[1:4], KV_LENS[1:4], device=device)
    tables = part.qo_indptr, paged.indptr[1:5], paged.indices, paged.last_page_len[1:4]
    whole = generate.paged(part, 4)
    right = prefill(part, whole, whole.kv_cache, custom_mask=mask)
    for given, expected in zip(prefill(part, paged, paged.kv_cache, tables=tables, custom_mask=mask), right):
        assert_bitwise(given, expected)
    # Level 0 is one node with the keys of request 0, level 1 the slice; a window reaches into both.
    cascade = flashinfer.MultiLevelCascadeAttentionWrapper(2, workspace(device))
    rows = int(part.qo_indptr[-1])
    shared = torch.tensor([0, rows], dtype=torch.int32), paged.indptr[:2], paged.indices, paged.last_page_len[:1]
    cascade.plan(*zip(shared, tables), *HEADS, DIM, 4, causal=True, window_left=6, q_data_type=x.q.dtype)
    shifted = torch.tensor([2, 2 + rows], dtype=torch.int32), *shared[1:]
    later = part.qo_indptr + 2, *tables[1:]
    expected = cascade.run(part.q, paged.kv_cache)
    cascade.plan(*zip(shifted, later), *HEADS, DIM, 4, causal=True, window_left=6, q_data_type=x.q.dtype)
    q = torch.cat((torch.zeros_like(part.q[:2]), part.q))
    assert_bitwise(cascade.run(q, paged.kv_cache)[2:], expected)


def test_block_rows_of_a_slice(device):
    q, k, v = (torch.randn(rows, 2, 16, device=device) for rows in (4, 8, 8))
    indptr, indices = torch.tensor([0, 1, 3, 4]), torch.tensor([3, 0, 2, 1])
    mask = torch.rand(4, 2, 2) < 0.7
    whole = flashinfer.BlockSparseAttentionWrapper(workspace(device))
    common = dict(q_data_type=torch.float32, kv_data_type=torch.float32, o_data_type=torch.float32)
    for given in (None, mask):
        whole.plan(indptr, indices, 6, 8, 2, 2, 2, 2, 16, mask=given, **common)
        expected = whole.run(torch.cat((q[:2], q)), k, v)[2:]
        whole.plan(indptr[1:], indices, 4, 8, 2, 2, 2, 2, 16, mask=given, **common)
        assert_bitwise(whole.run(q, k, v), expected)
    for bad, name in ((indptr + 1, "indptr"), (indptr.flip(0), "indptr")):
        with pytest.raises(ValueError, match=name):
            whole.plan(bad, indices, 6, 8, 2, 2, 2, 2, 16)
    with pytest.raises(ValueError, match="indices: got block columns"):
        whole.plan(indptr, indices + 1, 6, 8, 2, 2, 2, 2, 16)


def test_appending_by_offsets_of_a_slice(x, device):
    paged = generate.paged(x, 4)
    lens = x.kv_indptr.diff()
    first = KV_LENS[0]
    rows = [torch.empty(len(x.k), dtype=torch.int32, device=device) for _ in range(2)]
    for backend in backends(device):
        page.positions(page.Positions(), device, backend).run(x.kv_indptr[1:], lens[1:], *rows)
        assert rows[0][:first].tolist() == [-1] * first
        assert rows[0][first:].tolist() == [0] * 4 + [1] * 3 + [2] * 17
        assert rows[1][first:].tolist() == [*range(4), *range(3), *range(17)]
    cache = torch.zeros_like(paged.kv_cache)
    flashinfer.append_paged_kv_cache(
        x.k, x.v, *rows, cache, paged.indices, paged.indptr[1:], paged.last_page_len[1:]
    )
    flashinfer.append_paged_kv_cache(
        x.k[:9], x.v[:9], torch.zeros(9, dtype=torch.int32, device=device),
        torch.arange(9, dtype=torch.int32, device=device), cache, paged.indices, paged.indptr[:2],
        paged.last_page_len[:1],
    )  # fmt: skip
    check(prefill(x, paged, cache), x, Options(causal=True))


@pytest.mark.parametrize("bad", [[-1, 3, 5], [2, 1, 4], [1, 3, 99]])
def test_wrong_offsets_name_the_callers_parameter(bad, device):
    bad, two = torch.tensor(bad, dtype=torch.int32), torch.tensor([0, 1, 2])
    ids, last = torch.arange(9), torch.tensor([1, 1])
    decode = flashinfer.BatchDecodeWithPagedKVCacheWrapper(workspace(device))
    with pytest.raises(ValueError, match="^indptr: got"):
        decode.plan(bad, ids, last, *HEADS, DIM, 4)
    prefill = flashinfer.BatchPrefillWithPagedKVCacheWrapper(workspace(device))
    with pytest.raises(ValueError, match="^paged_kv_indptr: got"):
        prefill.plan(two, bad, ids, last, *HEADS, DIM, 4)
    with pytest.raises(ValueError, match="^kv_indptr: got"):
        flashinfer.BatchAttention(device=device).plan(two, bad, ids, last, *HEADS, DIM, DIM, 4)
    if bad[-1] < 99:
        ragged = flashinfer.BatchPrefillWithRaggedKVCacheWrapper(workspace(device))
        with pytest.raises(ValueError, match="^kv_indptr: got"):
            ragged.plan(two, bad, *HEADS, DIM)


@pytest.mark.parametrize("which", range(4))
def test_wide_values_do_not_wrap(which, device):
    """An int64 table whose value is 2^32 more than a good one."""
    names = "qo_indptr", "paged_kv_indptr", "paged_kv_indices", "paged_kv_last_page_len"
    tables = [torch.tensor([0, 1, 2]), torch.tensor([0, 1, 2]), torch.arange(2), torch.tensor([1, 1])]
    tables[which][1] += 1 << 32
    wrapper = flashinfer.BatchPrefillWithPagedKVCacheWrapper(workspace(device))
    with pytest.raises(ValueError, match=f"^{names[which]}: got 429496"):
        wrapper.plan(*tables, *HEADS, DIM, 4)


def test_pages_outside_a_latent_cache_are_refused():
    """On the CPU, where a look at tables waits for nothing."""
    wrapper = flashinfer.mla.BatchMLAPagedAttentionWrapper(workspace("cpu"))
    offsets, lens = torch.tensor([0, 2], dtype=torch.int32), torch.tensor([9], dtype=torch.int32)
    q = torch.randn(1, 2, 32).half(), torch.randn(1, 2, 16).half()
    cache = torch.randn(3, 8, 32).half(), torch.randn(3, 8, 16).half()
    one = torch.tensor([0, 1], dtype=torch.int32)
    for page in (-1, 3):
        ids = torch.tensor([0, page], dtype=torch.int32)
        wrapper.plan(one, offsets, ids, lens, 2, 32, 16, 8, False, 0.1, torch.float16, torch.float16)
        with pytest.raises(ValueError, match=f"^kv_indices: got page {page} of request 0; allowed: 0 ... 2"):
            wrapper.run(*q, *cache)
