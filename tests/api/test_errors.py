"""Errors that people meet first: each names the argument, what was given, what is allowed, and the likely cause."""

import numpy as np
import pytest
import torch

import flashinfer

HEADS, DIM, PAGE = (4, 2), 64, 16


class Batch:
    """Two requests of 20 and 5 keys, in pages of 16 tokens, and the calls of engines on it."""

    def __init__(self):
        self.workspace = torch.empty(1 << 16, dtype=torch.uint8)
        self.tables = dict(indptr=ints(0, 2, 3), indices=ints(4, 0, 2), last_page_len=ints(4, 5))
        self.qo_indptr = ints(0, 3, 5)
        self.q, self.rows = torch.randn(2, *HEADS[:1], DIM), torch.randn(5, HEADS[0], DIM)
        self.cache = torch.randn(5, 2, PAGE, HEADS[1], DIM)

    def decode(self, q=None, cache=None, run=None, workspace=0, kv_layout="NHD", backend="auto", **plan):
        workspace = self.workspace if isinstance(workspace, int) and workspace == 0 else workspace
        wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(workspace, kv_layout, backend=backend)
        sizes = dict(num_qo_heads=HEADS[0], num_kv_heads=HEADS[1], head_dim=DIM, page_size=PAGE)
        wrapper.plan(**self.tables | sizes | dict(q_data_type=torch.float32) | plan)
        return wrapper.run(self.q if q is None else q, self.cache if cache is None else cache, **run or {})

    def prefill(self, q=None, run=None, **plan):
        wrapper = flashinfer.BatchPrefillWithPagedKVCacheWrapper(self.workspace)
        tables = dict(qo_indptr=self.qo_indptr) | {f"paged_kv_{name}": t for name, t in self.tables.items()}
        sizes = dict(num_qo_heads=HEADS[0], num_kv_heads=HEADS[1], head_dim_qk=DIM, page_size=PAGE)
        wrapper.plan(**tables | sizes | dict(q_data_type=torch.float32) | plan)
        return wrapper.run(self.rows if q is None else q, self.cache, **run or {})

    def ragged(self, **plan):
        wrapper = flashinfer.BatchPrefillWithRaggedKVCacheWrapper(self.workspace)
        offsets = dict(qo_indptr=self.qo_indptr, kv_indptr=self.qo_indptr)
        wrapper.plan(**offsets | dict(num_qo_heads=4, num_kv_heads=2, head_dim_qk=DIM) | plan)

    def single(self, **options):
        k, v = torch.randn(2, 20, HEADS[1], DIM)
        return flashinfer.single_prefill_with_kv_cache(**dict(q=self.rows, k=k, v=v) | options)


def ints(*values):
    return torch.tensor(values, dtype=torch.int32, device="cpu")


FLOATS, NAN, INF = torch.tensor([0.0, 2.0, 3.0]), float("nan"), float("inf")
additive = torch.zeros(3 * 20 + 2 * 5).masked_fill_(torch.arange(70) % 3 == 0, -INF)

# Call, arguments, and the words of the message in their order.
TABLE = [
    ("decode", dict(indices=ints(4, -1, 2)), "^indices: got page -1 of request 0; allowed: 0 ... 4, the pages"),
    ("decode", dict(indices=ints(4, 0, 1200)), "^indices: got page 1200 of request 1; allowed: 0 ... 4, the pages"),
    ("prefill", dict(paged_kv_indices=ints(5, 0, 2)), "^paged_kv_indices: got page 5 of request 0; allowed: 0 ... 4"),
    ("decode", dict(workspace=None), "^float_workspace_buffer: got None; allowed: a uint8 tensor"),
    ("decode", dict(workspace=1 << 20), "^float_workspace_buffer: got a int; allowed: a uint8 tensor"),
    ("decode", dict(indptr=[0, 2, 3]), "^indptr: got a list; allowed: a tensor of int32 or int64"),
    ("decode", dict(indptr=(0, 2, 3)), "^indptr: got a tuple; allowed: a tensor"),
    ("decode", dict(indices=np.array([4, 0, 2])), "^indices: got a ndarray; allowed: a tensor"),
    ("decode", dict(last_page_len=None), "^last_page_len: got None; allowed: a tensor"),
    ("decode", dict(indptr=None), "^indptr: got None; allowed: a tensor"),
    ("decode", dict(indptr=FLOATS), r"^indptr: got torch.float32 \(3,\); allowed: a tensor of int32 or int64"),
    ("prefill", dict(paged_kv_indptr=FLOATS), "^paged_kv_indptr: got torch.float32"),
    ("prefill", dict(qo_indptr=FLOATS), "^qo_indptr: got torch.float32"),
    ("ragged", dict(kv_indptr=FLOATS), "^kv_indptr: got torch.float32"),
    ("decode", dict(q=np.zeros((2, 4, 64), np.float32)), "^q: got a numpy.ndarray; allowed: a torch.Tensor"),
    ("decode", dict(q=[1.0]), "^q: got a builtins.list; allowed: a torch.Tensor"),
    ("decode", dict(cache=np.zeros((5, 2, 16, 2, 64))), "^paged_kv_cache: got a ndarray; allowed: a tensor, or a pair"),
    ("decode", dict(cache=(1, 2)), r"^paged_kv_cache\[0\]: got a builtins.int; allowed: a torch.Tensor"),
    ("decode", dict(cache=torch.randn(5, 2, 2, 16, 64)), r"^paged_kv_cache\[0\]: got .* is this kv_layout='HND'\?"),
    ("decode", dict(kv_layout="HND"), r"^paged_kv_cache\[0\]: got .* is this kv_layout='NHD'\?"),
    ("decode", dict(kv_layout="hnd"), "^kv_layout: got 'hnd'; allowed: 'NHD'"),
    ("decode", dict(q=torch.randn(2, 4, 128)[..., ::2]), "^q: got stride 2 of head_dim; allowed: 1: call .contiguous"),
    ("decode", dict(q=torch.randn(2, 4, 64, dtype=torch.float16)), "^q: got torch.float16; allowed: .*q_data_type"),
    ("decode", dict(backend="fa4"), "^backend: got 'fa4'; allowed: auto, fa2, fa3"),
    ("decode", dict(page_size=24.0), "^page_size: got 24.0; allowed: an int"),
    ("decode", dict(page_size=1.5), "^page_size: got 1.5; allowed: an int"),
    ("decode", dict(page_size=True), "^page_size: got True; allowed: an int"),
    ("prefill", dict(causal="False"), "^causal: got 'False'; allowed: True or False"),
    ("prefill", dict(rope_scale=0), "^rope_scale: got 0; allowed: None, or a positive number"),
    ("prefill", dict(rope_scale=NAN), "^rope_scale: got nan; allowed: None, or a positive number"),
    ("prefill", dict(rope_theta=-1.0), "^rope_theta: got -1.0; allowed: None, or a positive number"),
    ("prefill", dict(rope_theta=0.0), "^rope_theta: got 0.0; allowed: None, or a positive number"),
    ("decode", dict(sm_scale=NAN), "^sm_scale: got nan; allowed: None .* or a finite number"),
    ("decode", dict(sm_scale=INF), "^sm_scale: got inf; allowed: None .* or a finite number"),
    ("decode", dict(sm_scale=torch.ones(4)), r"^sm_scale: got a tensor \(4,\); allowed: a number"),
    ("decode", dict(logits_soft_cap=NAN), "^logits_soft_cap: got nan; allowed: None or 0"),
    ("decode", dict(window_left=1.5), "^window_left: got 1.5; allowed: an int"),
    ("decode", dict(run=dict(k_scale=NAN)), "^k_scale: got nan; allowed: a finite number"),
    ("decode", dict(run=dict(q_scale=torch.tensor(NAN))), "^q_scale: got nan; allowed: a finite number"),
    ("decode", dict(run=dict(v_scale=INF)), "^v_scale: got inf; allowed: a finite number"),
    ("single", dict(sm_scale=NAN), "^sm_scale: got nan"),
    ("single", dict(causal="False"), "^causal: got 'False'"),
    ("single", dict(custom_mask=torch.zeros(5, 20)), "^custom_mask: got torch.float32; allowed: bool, .* mask == 0"),
    ("prefill", dict(custom_mask=additive), "^custom_mask: got torch.float32; allowed: bool, .* mask == 0"),
    ("prefill", dict(q=torch.randn(8, 4, 64)), "^q: got 8 rows; allowed: 5, the last offset of qo_indptr"),
    ("prefill", dict(q=torch.randn(4, 4, 64)), "^q: got 4 rows; allowed: at least 5, the last offset of qo_indptr"),
    ("decode", dict(q=torch.randn(3, 4, 64)), "^q: got 3 rows; allowed: 2, as planned"),
]  # fmt: skip


@pytest.mark.parametrize("call, arguments, words", TABLE, ids=[f"{t[0]}-{i}" for i, t in enumerate(TABLE)])
def test_errors_people_meet_first(call, arguments, words):
    with pytest.raises(ValueError, match=words) as error:
        getattr(Batch(), call)(**arguments)
    message = str(error.value)
    assert "\n" not in message and len(message) <= 300


def test_what_is_right_passes():
    batch = Batch()
    expected = batch.decode()
    for scale in (torch.tensor(0.125), torch.tensor([0.125])):
        torch.testing.assert_close(batch.decode(sm_scale=scale), expected, rtol=0, atol=0)
    assert batch.prefill(causal=np.bool_(True), page_size=np.int64(PAGE)).shape == (5, 4, 64)
    whole = torch.arange(70) % 3 != 0
    for mask in (whole, whole.to(torch.uint8), whole.to(torch.int64)):
        torch.testing.assert_close(batch.prefill(custom_mask=mask), batch.prefill(custom_mask=whole))
    assert batch.ragged() is None and batch.single().shape == (5, 4, 64)


def test_errors_are_the_built_in_kinds_too_that_callers_of_upstream_catch():
    batch = Batch()
    tensor = torch.randn(2, 4, 64)
    with pytest.raises(KeyError, match="^kv_layout: got 'hnd'; allowed: 'NHD'"):
        batch.decode(kv_layout="hnd")
    with pytest.raises(KeyError, match="^pos_encoding_mode: got 'ROPE'; allowed: NONE, ROPE_LLAMA, ALIBI"):
        batch.prefill(pos_encoding_mode="ROPE")
    with pytest.raises(TypeError, match="^temperature: got 'hot'"):
        flashinfer.sampling.softmax(tensor[0], temperature="hot")
    with pytest.raises(TypeError, match="^dtype: got 3"):
        flashinfer.utils.canonicalize_torch_dtype(3)
    with pytest.raises(TypeError, match="^q: got "):
        batch.decode(q=[1.0])
    for wrapper in (flashinfer.BatchPrefillWithRaggedKVCacheWrapper, flashinfer.BlockSparseAttentionWrapper):
        with pytest.raises(RuntimeError, match=f"^{wrapper.__name__}.run: got no plan"):
            wrapper(batch.workspace).run(tensor, tensor, tensor)
    with pytest.raises(RuntimeError, match="^backend: got 'fa4'"):
        batch.decode(backend="fa4")
    for kind in (AssertionError, RuntimeError):
        with pytest.raises(kind, match="^weight: got "):
            flashinfer.rmsnorm(tensor[0], torch.randn(63))
        with pytest.raises(kind, match="^q: got 3 rows"):
            batch.decode(q=torch.randn(3, 4, 64))
    with pytest.raises(NotImplementedError):
        flashinfer.single_decode_with_kv_cache(tensor[0, :, :4], tensor[:, :, :4], tensor[:, :, :4])
    with pytest.raises(NotImplementedError, match="^pos_encoding_mode: got 'ALIBI'; allowed: 'NONE'"):
        flashinfer.BatchPrefillWithCausalBidirectionalRangesWrapper(batch.workspace, pos_encoding_mode="ALIBI")
    token, beta = torch.randn(1, 1, 2, 16), torch.ones(1, 1, 2)
    with pytest.raises(TypeError, match="^prefill_workspace: got int; allowed: "):
        flashinfer.recurrent_kda(token, token, token, -token.abs(), beta, prefill_workspace=3)
