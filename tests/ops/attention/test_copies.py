"""Copies of a wrapper: each plans on its own, and neither follows the other's plan."""

import copy
import pickle

import pytest
import torch

import flashinfer
from flashinfer.mla import BatchMLAPagedAttentionWrapper
from flashinfer.testing import generate
from flashinfer.testing.compare import assert_bitwise
from tests.ops.attention.cases import backends, check, workspace
from tests.ops.attention.mla.latents import latents
from tests.ops.attention.oracle import Options

HEADS, DIM, PAGE = (4, 2), 64, 4
CAUSAL = Options(causal=True)
BY_PICKLE = lambda wrapper: pickle.loads(pickle.dumps(wrapper))
WAYS = pytest.mark.parametrize("way", (copy.copy, copy.deepcopy, BY_PICKLE), ids=("copy", "deepcopy", "pickle"))


class Batch:
    """A batch, and how wrappers of one class plan and run it."""

    def __init__(self, device, q_lens, kv_lens):
        self.x = generate.ragged_batch(q_lens, kv_lens, *HEADS, DIM, dtype=torch.float16, device=device)
        self.paged = generate.paged(self.x, PAGE)

    def plan(self, wrapper, graph=False):
        x, p = self.x, self.paged
        tables = [t.cpu() for t in (x.qo_indptr, p.indptr, p.indices, p.last_page_len)]
        wrapper.plan(*tables, *HEADS, DIM, PAGE, causal=True)

    def check(self, wrapper):
        rows = len(self.x.q)
        out, lse = wrapper.run(self.x.q, self.paged.kv_cache, return_lse=True)
        check((out[:rows], lse[:rows]), self.x, CAUSAL)


@WAYS
def test_copies_plan_apart(way, device):
    a, b = Batch(device, [3, 5], [20, 9]), Batch(device, [2, 6], [33, 12])
    for backend in backends(device):
        wrapper = flashinfer.BatchPrefillWithPagedKVCacheWrapper(workspace(device), backend=backend)
        for _ in range(2):
            a.plan(wrapper)
        a.check(wrapper)
        other = way(wrapper)
        with pytest.raises(ValueError, match="got no plan"):
            other.run(a.x.q, a.paged.kv_cache)
        a.check(wrapper)
        for _ in range(3):
            b.plan(other)
            b.check(other)
            a.check(wrapper)
        b.plan(wrapper)
        a.plan(other)
        b.check(wrapper)
        a.check(other)


@WAYS
def test_copies_of_a_graph_wrapper(way, device):
    """copy.copy keeps the buffers that the constructor was given; the others have new ones."""
    buffers = [torch.zeros(n, dtype=torch.int32, device=device) for n in (3, 3, 40, 2)]
    wrapper = flashinfer.BatchPrefillWithPagedKVCacheWrapper(workspace(device), "NHD", True, *buffers)
    a, b = Batch(device, [3, 5], [20, 9]), Batch(device, [2, 6], [33, 12])
    a.plan(wrapper)
    other = way(wrapper)
    b.plan(other)
    b.check(other)
    shared = way is copy.copy
    assert (other._shown.kv_indptr is buffers[1]) == shared
    if not shared:
        a.check(wrapper)
    a.plan(wrapper)
    a.check(wrapper)


def test_a_traced_copy_runs_its_own_plan(device):
    a, b = Batch(device, [3, 5], [20, 9]), Batch(device, [2, 6], [33, 12])
    wrapper = flashinfer.BatchPrefillWithPagedKVCacheWrapper(workspace(device))
    a.plan(wrapper)
    other = copy.copy(wrapper)
    b.plan(other)
    for batch, owner in ((a, wrapper), (b, other)):
        run = torch.compile(lambda q, kv: owner.run(q, kv, return_lse=True), backend="eager", fullgraph=True)
        check(run(batch.x.q, batch.paged.kv_cache), batch.x, CAUSAL)


@WAYS
def test_copies_of_a_latent_wrapper(way, device):
    a, b = (latents(q, kv, 4, device=device) for q, kv in (([1, 2], [9, 20]), ([2, 1], [5, 30])))
    plan = lambda wrapper, x: wrapper.plan(*x.tables, 4, 64, 16, 8, True, 0.1, x.q.dtype, x.cache.dtype)
    wrapper = BatchMLAPagedAttentionWrapper(workspace(device))
    plan(wrapper, a)
    expected = wrapper.run(*a.parts())
    other = way(wrapper)
    plan(other, b)
    found = other.run(*b.parts())
    assert_bitwise(wrapper.run(*a.parts()), expected)
    plan(wrapper, b)
    assert_bitwise(wrapper.run(*b.parts()), found)


def _cascade(wrapper, unique):
    one = torch.tensor([0, 2], dtype=torch.int32)
    each = torch.tensor([0, 1, 2], dtype=torch.int32)
    last = torch.tensor([4], dtype=torch.int32), torch.tensor([2, 3], dtype=torch.int32)
    pages = torch.tensor([5, 6], dtype=torch.int32), torch.tensor(unique, dtype=torch.int32)
    wrapper.plan([one, each], [one, each], pages, last, *HEADS, DIM, PAGE)


@WAYS
def test_copies_of_what_is_made_of_wrappers(way, device):
    """A cascade's levels, POD's two parts and a decode beside a shared prefix are copied with what they are in."""
    q = torch.randn(2, HEADS[0], DIM, device=device).half()
    cache = torch.randn(9, 2, PAGE, HEADS[1], DIM, device=device).half()
    wrapper = flashinfer.MultiLevelCascadeAttentionWrapper(2, workspace(device))
    _cascade(wrapper, (0, 1))
    expected = wrapper.run(q, cache)
    other = way(wrapper)
    with pytest.raises(ValueError, match="got no plan"):
        other.run(q, cache)
    _cascade(other, (3, 4))
    assert not torch.equal(other.run(q, cache), expected)
    assert_bitwise(wrapper.run(q, cache), expected)
    for make in (
        flashinfer.BatchDecodeWithSharedPrefixPagedKVCacheWrapper, flashinfer.PODWithPagedKVCacheWrapper,
        flashinfer.BatchPODWithPagedKVCacheWrapper,
    ):  # fmt: skip
        first = make(workspace(device))
        second = way(first)
        parts = [name for name, part in vars(first).items() if hasattr(part, "plan")]
        assert parts and all(getattr(first, name) is not getattr(second, name) for name in parts)
