"""Attention over shared prefixes equals attention over each request's keys put one after another, in float64."""

import math

import pytest
import torch

import flashinfer
from flashinfer._core.checks import UnsupportedConfig
from flashinfer.testing import generate
from flashinfer.testing.compare import assert_bitwise, assert_close
from tests.ops.attention import oracle

HEADS, DIM = (4, 2), 32


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request):
    return torch.device(request.param)


def workspace(device):
    return torch.empty(1 << 20, dtype=torch.uint8, device=device)


class Tree:
    """Requests that share prefixes.

    Parameters
    ----------
    lens : list of list of int
        Per level, the keys of each node.
    paths : list of tuple of int
        Per request, its node on each level; requests of a node stand together.
    rows : list of int
        Query rows of each request.
    """

    def __init__(
        self, lens, paths, rows, device, dtype=torch.float16, page_size=4, kv_layout="NHD", heads=HEADS, dim=DIM
    ):
        self.lens, self.paths, self.rows = lens, paths, rows
        self.page_size, self.dtype, self.heads, self.dim = page_size, dtype, heads, dim
        nodes = [n for level in lens for n in level]
        self.ragged = generate.ragged_batch([sum(rows)], nodes, *heads, dim, dtype=dtype, device=device)
        self.paged = generate.paged(self.ragged, page_size, kv_layout)
        self.starts = [sum(map(len, lens[:i])) for i in range(len(lens))]

    @property
    def q(self):
        return self.ragged.q

    def keys(self, level, node):
        """Keys and values of a node, [length, heads, dim] each."""
        first, last = self.ragged.kv_indptr[self.starts[level] + node :][:2].tolist()
        return self.ragged.k[first:last], self.ragged.v[first:last]

    def tables(self):
        """qo_indptr, kv_indptr, kv_indices and last_page_len of each level, as plan takes them."""
        arrays = [[], [], [], []]
        for i, level in enumerate(self.lens):
            per_node = [sum(r for r, path in zip(self.rows, self.paths) if path[i] == n) for n in range(len(level))]
            nodes = slice(self.starts[i], self.starts[i] + len(level))
            pages = self.paged.indptr[nodes.start : nodes.stop + 1]
            arrays[0].append(generate.indptr(per_node, self.q.device))
            arrays[1].append(pages - pages[0])
            arrays[2].append(self.paged.indices[pages[0] : pages[-1]])
            arrays[3].append(self.paged.last_page_len[nodes])
        return arrays

    def sizes(self):
        return *self.heads, self.dim, self.page_size

    def plan(self, wrapper, host=False, **options):
        tables = self.tables()
        if host:
            tables = [[t.cpu() for t in per_level] for per_level in tables]
        wrapper.plan(*tables, *self.sizes(), q_data_type=self.dtype, **options)

    def flat(self, dtype, causal=False, window_left=-1, **options):
        """Attention of every request over all its keys, computed in `dtype`."""
        out, row = [], 0
        for path, rows in zip(self.paths, self.rows):
            spans = [self.keys(i, node) for i, node in enumerate(path)]
            k, v = (torch.cat(parts) for parts in zip(*spans))
            own = spans[-1][0].shape[0]
            mask = torch.ones(rows, k.shape[0], dtype=torch.bool)
            for i in range(rows):
                position = k.shape[0] - rows + i
                for j in range(k.shape[0]):
                    later = causal and j >= k.shape[0] - own and j > position
                    mask[i, j] = not later and (window_left < 0 or j >= position - window_left)
            q = self.q[row : row + rows]
            out.append(oracle.request(q, k, v, oracle.Options(**options), dtype, mask=mask.to(q.device))[0])
            row += rows
        return torch.cat(out)

    def check(self, out, **options):
        assert out.dtype == self.dtype
        assert_close(out, self.flat(self.dtype, **options).to(self.dtype), self.flat(torch.float64, **options))


TREES = {
    "one level": ([[9, 4, 0]], [(0,), (1,), (2,)], [2, 1, 3]),
    "one prefix": ([[19], [3, 0, 7]], [(0, 0), (0, 1), (0, 2)], [2, 1, 5]),
    "two prefixes": ([[8, 13], [6, 1, 2, 5]], [(0, 0), (0, 1), (1, 2), (1, 3)], [1, 1, 1, 1]),
    "three levels": ([[10], [5, 0], [3, 0, 7, 1]], [(0, 0, 0), (0, 0, 1), (0, 1, 2), (0, 1, 3)], [2, 1, 3, 1]),
    "four levels": (
        [[4], [3, 8], [1, 2, 5], [6, 2, 4, 1]],
        [(0, 0, 0, 0), (0, 0, 1, 1), (0, 1, 2, 2), (0, 1, 2, 3)],
        [1, 2, 1, 4],
    ),
    "an empty first level": ([[0], [5, 2]], [(0, 0), (0, 1)], [3, 1]),
    "an empty middle level": ([[7], [0, 0], [5, 2]], [(0, 0, 0), (0, 1, 1)], [3, 1]),
    "an empty last level": ([[7], [0, 0]], [(0, 0), (0, 1)], [2, 1]),
    "no keys": ([[0], [0, 0]], [(0, 0), (0, 1)], [2, 1]),
    "requests without rows": ([[7], [4, 3, 5]], [(0, 0), (0, 1), (0, 2)], [0, 2, 0]),
    "a chain": ([[6], [5], [4]], [(0, 0, 0)], [3]),
}
OPTIONS = {
    "full": dict(),
    "causal": dict(causal=True),
    "scale": dict(causal=True, sm_scale=0.7),
    "soft cap": dict(logits_soft_cap=1.5),
    "window in the last level": dict(causal=True, window_left=2),
    "window into the prefix": dict(causal=True, window_left=9),
    "window over everything": dict(causal=True, window_left=1000),
    "window of one": dict(causal=True, window_left=0),
    "window of a full mask": dict(window_left=6, logits_soft_cap=2.0),
}


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("tree", TREES)
def test_cascade_equals_flat_attention(tree, options, device):
    tree = Tree(*TREES[tree], device)
    wrapper = flashinfer.MultiLevelCascadeAttentionWrapper(len(tree.lens), workspace(device))
    tree.plan(wrapper, **OPTIONS[options])
    tree.check(wrapper.run(tree.q, tree.paged.kv_cache), **OPTIONS[options])


@pytest.mark.parametrize("kv_layout", ("NHD", "HND"))
@pytest.mark.parametrize("page_size", (1, 3, 16))
def test_layouts_and_pages(kv_layout, page_size, device):
    tree = Tree(*TREES["three levels"], device, page_size=page_size, kv_layout=kv_layout)
    wrapper = flashinfer.MultiLevelCascadeAttentionWrapper(3, workspace(device), kv_layout)
    for host in (False, True):
        tree.plan(wrapper, host, causal=True)
        joined = wrapper.run(tree.q, tree.paged.kv_cache)
        tree.check(joined, causal=True)
        assert_bitwise(wrapper.run(tree.q, tuple(x.clone() for x in tree.paged.kv_cache.unbind(1))), joined)


@pytest.mark.parametrize("dtype", (torch.float16, torch.bfloat16), ids=str)
@pytest.mark.parametrize(("heads", "dim"), [((8, 1), 128), ((5, 5), 72), ((6, 2), 256)])
def test_dtypes_and_heads(dtype, heads, dim, device):
    tree = Tree(*TREES["two prefixes"], device, dtype=dtype, heads=heads, dim=dim)
    wrapper = flashinfer.MultiLevelCascadeAttentionWrapper(2, workspace(device))
    tree.plan(wrapper)
    tree.check(wrapper.run(tree.q, tree.paged.kv_cache))


def test_older_names_and_a_second_plan(device):
    wrapper = flashinfer.MultiLevelCascadeAttentionWrapper(2, workspace(device))
    for name in ("one prefix", "two prefixes", "no keys"):
        tree = Tree(*TREES[name], device)
        wrapper.begin_forward(*tree.tables(), *tree.sizes(), causal=True, q_data_type="float16")
        wrapper.prewarm_paged_kv_stride_variant()
        tree.check(wrapper.forward(tree.q, tree.paged.kv_cache), causal=True)
        wrapper.reset_workspace_buffer(workspace(device), [workspace(device) for _ in range(2)])


def graph_buffers(levels, nodes, pages, device):
    def make(n):
        return [torch.zeros(n, dtype=torch.int32, device=device) for _ in range(levels)]

    return dict(
        qo_indptr_buf_arr=make(nodes + 1),
        paged_kv_indptr_buf_arr=make(nodes + 1),
        paged_kv_indices_buf_arr=make(pages),
        paged_kv_last_page_len_buf_arr=make(nodes),
    )


def test_fixed_buffers_serve_every_batch_that_fits(device):
    wrapper = flashinfer.MultiLevelCascadeAttentionWrapper(
        2, workspace(device), use_cuda_graph=True, **graph_buffers(2, 4, 32, device)
    )
    assert wrapper.is_cuda_graph_enabled
    for name in ("two prefixes", "an empty first level", "two prefixes"):
        tree = Tree(*TREES[name], device)
        tree.plan(wrapper, causal=True)
        tree.check(wrapper.run(tree.q, tree.paged.kv_cache), causal=True)


@pytest.mark.gpu
def test_a_captured_graph_serves_later_plans(device):
    torch.manual_seed(1)
    batch = [(0, i) for i in range(8)], [1] * 8, device, torch.bfloat16, 16
    first = Tree([[300], [17] * 8], *batch, heads=(32, 8), dim=128)
    later = Tree([[65], [1, 0, 40, 33, 16, 15, 2, 90]], *batch, heads=(32, 8), dim=128)
    buffers = graph_buffers(2, 8, 64, device)
    wrapper = flashinfer.MultiLevelCascadeAttentionWrapper(2, workspace(device), use_cuda_graph=True, **buffers)
    pages = max(t.paged.kv_cache.shape[0] for t in (first, later))
    kv_cache = torch.zeros(pages, 2, 16, 8, 128, dtype=torch.bfloat16, device=device)
    q = torch.empty_like(first.q)

    def fill(tree):
        q.copy_(tree.q)
        kv_cache[: tree.paged.kv_cache.shape[0]] = tree.paged.kv_cache
        tree.plan(wrapper, host=True)

    fill(first)
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        wrapper.run(q, kv_cache)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = wrapper.run(q, kv_cache)
    for tree in (first, later, first):
        fill(tree)
        out.fill_(math.nan)
        graph.replay()
        replayed = out.clone()
        tree.check(replayed)
        assert_bitwise(replayed, wrapper.run(q, kv_cache))


@pytest.mark.gpu
@pytest.mark.parametrize("options", ("full", "window into the prefix"))
def test_a_served_batch(options, device):
    torch.manual_seed(2)
    paths = [(0, i // 8, i) for i in range(32)]
    own = [int(n) for n in torch.randint(0, 90, (32,))]
    tree = Tree([[1023], [129, 0, 64, 31], own], paths, [1 + i % 3 for i in range(32)], device, torch.bfloat16, 16,
                heads=(32, 8), dim=128)  # fmt: skip
    options = OPTIONS[options] | dict(window_left=150 if "window_left" in OPTIONS[options] else -1)
    wrapper = flashinfer.MultiLevelCascadeAttentionWrapper(3, workspace(device))
    tree.plan(wrapper, **options)
    tree.check(wrapper.run(tree.q, tree.paged.kv_cache), **options)


def shared(tree, kv_layout):
    """Level 0 of a tree as contiguous keys and values, and the page table of its level 1."""
    k, v = tree.keys(0, 0)
    if kv_layout == "HND":
        k, v = (x.transpose(0, 1).contiguous() for x in (k, v))
    return k, v, [per_level[1] for per_level in tree.tables()]


@pytest.mark.parametrize("kv_layout", ("NHD", "HND"))
@pytest.mark.parametrize("length", (0, 1, 33))
@pytest.mark.parametrize("dtype", (torch.float16, torch.bfloat16), ids=str)
def test_decode_with_one_shared_prefix(dtype, length, kv_layout, device):
    paths = [(0, i) for i in range(4)]
    tree = Tree([[length], [5, 0, 12, 1]], paths, [1] * 4, device, dtype, kv_layout=kv_layout)
    k, v, table = shared(tree, kv_layout)
    wrapper = flashinfer.BatchDecodeWithSharedPrefixPagedKVCacheWrapper(workspace(device), kv_layout)
    wrapper.reset_workspace_buffer(workspace(device), workspace(device))
    wrapper.begin_forward(*table[1:], *tree.sizes(), data_type=dtype)
    for _ in range(2):
        tree.check(wrapper.forward(tree.q, k, v, tree.paged.kv_cache))
    wrapper.end_forward()


@pytest.mark.parametrize("kv_layout", ("NHD", "HND"))
@pytest.mark.parametrize("length", (0, 1, 33))
@pytest.mark.parametrize("options", (dict(), dict(causal=True), dict(causal=True, sm_scale=0.3)), ids=str)
def test_prefill_with_one_shared_prefix(options, length, kv_layout, device):
    wrapper = flashinfer.BatchPrefillWithSharedPrefixPagedKVCacheWrapper(workspace(device), kv_layout)
    wrapper.reset_workspace_buffer(workspace(device), workspace(device))
    wrapper.prewarm_paged_kv_stride_variant()
    for dtype in (torch.float16, torch.bfloat16):
        paths = [(0, i) for i in range(4)]
        tree = Tree([[length], [5, 0, 12, 3]], paths, [4, 1, 7, 0], device, dtype, kv_layout=kv_layout)
        k, v, table = shared(tree, kv_layout)
        wrapper.begin_forward(*table, *tree.sizes())
        # The caller's tables are the next batch's from here on; both calls plan.
        for each in (table[0], table[1], table[3]):
            each.zero_()
        tree.check(wrapper.forward(tree.q, k, v, tree.paged.kv_cache, **options), **options)
        tree.check(wrapper.forward(tree.q, k, v, tree.paged.kv_cache))
        wrapper.end_forward()


def test_levels_are_counted():
    tree = Tree(*TREES["one prefix"], "cpu")
    wrapper = flashinfer.MultiLevelCascadeAttentionWrapper(2, workspace("cpu"))
    names = ("qo_indptr_arr", "paged_kv_indptr_arr", "paged_kv_indices_arr", "paged_kv_last_page_len")
    for i, name in enumerate(names):
        tables = tree.tables()
        tables[i].pop()
        with pytest.raises(ValueError, match=f"^{name}: got 1 tensors; allowed: 2, one per level"):
            wrapper.plan(*tables, *tree.sizes())
    with pytest.raises(ValueError, match="^int_workspace_buffers: got 3 tensors; allowed: 2, one per level"):
        wrapper.reset_workspace_buffer(workspace("cpu"), [workspace("cpu")] * 3)
    with pytest.raises(ValueError, match=r"^num_levels: got 0; allowed: 1 \.\.\. 1024"):
        flashinfer.MultiLevelCascadeAttentionWrapper(0, workspace("cpu"))
    for name in graph_buffers(2, 4, 8, "cpu"):
        with pytest.raises(ValueError, match=f"^{name}: got 0 tensors; allowed: 2, one per level"):
            buffers = graph_buffers(2, 4, 8, "cpu") | {name: None}
            flashinfer.MultiLevelCascadeAttentionWrapper(2, workspace("cpu"), use_cuda_graph=True, **buffers)


def test_bad_plans_and_runs():
    tree = Tree(*TREES["one prefix"], "cpu")
    wrapper = flashinfer.MultiLevelCascadeAttentionWrapper(2, workspace("cpu"))
    with pytest.raises(ValueError, match="allowed: after plan"):
        wrapper.run(tree.q, tree.paged.kv_cache)
    tables = tree.tables()
    tables[0][0] = tables[0][0] - tables[0][0].sign()
    with pytest.raises(ValueError, match=r"^qo_indptr_arr: got levels ending at rows \[7, 8\]; allowed: "):
        wrapper.plan(*tables, *tree.sizes())
    with pytest.raises(ValueError, match="^q_data_type: got torch.float8_e4m3fn; allowed: "):
        wrapper.plan(*tree.tables(), *tree.sizes(), q_data_type=torch.float8_e4m3fn)
    for mode in ("ROPE_LLAMA", "ALIBI"):
        with pytest.raises(UnsupportedConfig, match=f"^pos_encoding_mode: got '{mode}'; allowed: 'NONE' with two"):
            wrapper.plan(*tree.tables(), *tree.sizes(), pos_encoding_mode=mode)
    tree.plan(wrapper)
    with pytest.raises(ValueError, match="^q: got torch.float32; allowed: "):
        wrapper.run(tree.q.float(), tree.paged.kv_cache)
    tables = tree.tables()
    tables[3][1] = tables[3][1] + 100
    with pytest.raises(ValueError, match="^paged_kv_last_page_len: got "):
        wrapper.plan(*tables, *tree.sizes(), causal=True)
    with pytest.raises(ValueError, match="allowed: after plan"):
        wrapper.run(tree.q, tree.paged.kv_cache)
    fixed = flashinfer.MultiLevelCascadeAttentionWrapper(
        2, workspace("cpu"), use_cuda_graph=True, **graph_buffers(2, 4, 32, "cpu")
    )
    with pytest.raises(UnsupportedConfig, match="^window_left: got 4; allowed: -1 with two levels"):
        tree.plan(fixed, window_left=4)


@pytest.mark.parametrize("mode", ("ROPE_LLAMA", "ALIBI"))
def test_one_level_takes_position_encodings(mode, device):
    tree = Tree(*TREES["one level"], device)
    wrapper = flashinfer.MultiLevelCascadeAttentionWrapper(1, workspace(device))
    tree.plan(wrapper, pos_encoding_mode=mode)
    tree.check(wrapper.run(tree.q, tree.paged.kv_cache), pos_encoding_mode=mode)


def test_bad_calls_with_one_shared_prefix():
    tree = Tree([[5], [5, 2]], [(0, 0), (0, 1)], [1, 1], "cpu")
    k, v, table = shared(tree, "NHD")
    decode = flashinfer.BatchDecodeWithSharedPrefixPagedKVCacheWrapper(workspace("cpu"))
    prefill = flashinfer.BatchPrefillWithSharedPrefixPagedKVCacheWrapper(workspace("cpu"))
    for wrapper in (decode, prefill):
        with pytest.raises(ValueError, match="; allowed: after "):
            wrapper.forward(tree.q, k, v, tree.paged.kv_cache)
    for i, name in enumerate(("qo_indptr", "paged_kv_indptr", "paged_kv_indices", "paged_kv_last_page_len")):
        with pytest.raises(ValueError, match=f"^{name}: got a list; allowed: "):
            prefill.begin_forward(*table[:i], table[i].tolist(), *table[i + 1 :], *tree.sizes())
    decode.begin_forward(*table[1:], *tree.sizes(), data_type="float16")
    prefill.begin_forward(*table, *tree.sizes())
    for wrapper in (decode, prefill):
        for bad in ((k[:, :, :16], v), (k[0], v), (k, v[:3]), (k.float(), v.float().half())):
            with pytest.raises(ValueError, match="got .*; allowed: "):
                wrapper.forward(tree.q, *bad, tree.paged.kv_cache)
        with pytest.raises(ValueError, match="^v_shared: got "):
            wrapper.forward(tree.q, k, v[..., 1:], tree.paged.kv_cache)
        with pytest.raises(ValueError, match="^k_shared: got "):
            wrapper.forward(tree.q, k[0], v, tree.paged.kv_cache)
