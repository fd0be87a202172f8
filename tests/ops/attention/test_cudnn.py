"""Prefill wrappers with backend "cudnn": offsets in elements, lengths of four axes, and pages of heads, then tokens."""

import pytest
import torch

import flashinfer
from flashinfer.testing import generate
from tests.ops.attention.cases import check, workspace
from tests.ops.attention.oracle import Options
from tests.ops.attention.test_direct import blocks, lens
from tests.ops.attention.test_engines import HALF, KV, batch

QO = [3, 0, 17, 33, 2, 0]
CAUSAL = Options(causal=True)


def of_cudnn(qo, kv, device):
    """What callers of cuDNN say beside offsets."""
    four_axes = lambda values: lens(values, device).view(-1, 1, 1, 1)
    return dict(seq_lens=four_axes(kv), seq_lens_q=four_axes(qo), max_token_per_sequence=max(qo, default=0),
                max_sequence_kv=max(kv, default=0))  # fmt: skip


def paged_run(x, made, device, offsets, layout="NHD", page_size=8, **plan):
    wrapper = flashinfer.BatchPrefillWithPagedKVCacheWrapper(workspace(device), layout, backend="cudnn")
    heads, head_dim = x.q.shape[1:]
    wrapper.plan(
        offsets, made.indptr, made.indices, made.last_page_len, heads, x.k.shape[1], head_dim, page_size,
        causal=True, q_data_type=x.q.dtype, **plan,
    )  # fmt: skip
    return wrapper.run(x.q, made.kv_cache, return_lse=True)


@pytest.mark.parametrize("where", ("host", "device"))
@pytest.mark.parametrize("said_by", ("lengths", "bound"))
@pytest.mark.parametrize("units", ("elements", "rows"))
def test_offsets_of_pages(units, said_by, where, device):
    x = batch(QO, device)
    made = generate.paged(x, 8, "HND")
    at = device if where == "device" else "cpu"
    offsets = x.qo_indptr.to(at) * (4 * 64 if units == "elements" else 1)
    said = of_cudnn(QO, KV, at)
    if said_by == "lengths":
        said |= dict(block_tables=blocks(made, KV, 9), max_token_per_sequence=None)
    else:
        said |= dict(seq_lens_q=None)
    check(paged_run(x, made, device, offsets, **said), x, CAUSAL)


@pytest.mark.parametrize("layout", ("NHD", "HND"))
def test_pages_are_of_heads_then_tokens(layout, device):
    """In both layouts; where heads and tokens are as many, too."""
    x = batch(QO, device)
    for page_size in (2, 8):
        made = generate.paged(x, page_size, "HND")
        check(paged_run(x, made, device, x.qo_indptr, layout, page_size), x, CAUSAL)


def test_pages_of_tokens_then_heads(device):
    """As kv_layout="NHD" says, where they can be nothing else."""
    x = batch(QO, device)
    check(paged_run(x, generate.paged(x, 8, "NHD"), device, x.qo_indptr), x, CAUSAL)
    with pytest.raises(ValueError, match=r"^paged_kv_cache\[0\]"):
        paged_run(x, generate.paged(x, 8, "NHD"), device, x.qo_indptr, "HND")


@pytest.mark.parametrize("units", ("elements", "rows"))
def test_offsets_of_rows(units, device):
    """Head dims differ, as DeepSeek's do: offsets of q, k, v and out do too, in elements."""
    x = batch(QO, device, head_dim_vo=32, dim=48)
    by = (lambda t, heads, dim: t * heads * dim) if units == "elements" else (lambda t, heads, dim: t)
    wrapper = flashinfer.BatchPrefillWithRaggedKVCacheWrapper(workspace(device), backend="cudnn")
    for said in (of_cudnn(QO, KV, device), of_cudnn(QO, KV, device) | dict(seq_lens=None, seq_lens_q=None)):
        wrapper.plan(
            by(x.qo_indptr, 4, 48), by(x.kv_indptr, 2, 48), 4, 2, 48, 32, causal=True, q_data_type=HALF,
            v_indptr=by(x.kv_indptr, 2, 32), o_indptr=by(x.qo_indptr, 4, 32), **said,
        )  # fmt: skip
        check(wrapper.run(x.q, x.k, x.v, return_lse=True), x, CAUSAL)


def test_a_row_that_could_be_either(device):
    """One request whose rows are as many as one row has elements: its length decides."""
    for rows, count in ((64, 64), (1, 64)):
        x = batch([rows], device, [70], heads=(1, 1))
        wrapper = flashinfer.BatchPrefillWithRaggedKVCacheWrapper(workspace(device), backend="cudnn")
        offsets = torch.tensor([0, count], dtype=torch.int32, device=device)
        wrapper.plan(offsets, x.kv_indptr, 1, 1, 64, causal=True, q_data_type=HALF, **of_cudnn([rows], [70], device))
        check(wrapper.run(x.q, x.k, x.v, return_lse=True), x, CAUSAL)


def test_offsets_that_say_neither(device):
    x = batch([3, 4], device, [3, 4])
    wrapper = flashinfer.BatchPrefillWithRaggedKVCacheWrapper(workspace(device), backend="cudnn")
    said = of_cudnn([3, 4], [3, 4], "cpu")
    with pytest.raises(ValueError, match="^(seq_lens_q|max_token_per_sequence)"):
        wrapper.plan(x.qo_indptr.cpu() * 5, x.kv_indptr, 4, 2, 64, q_data_type=HALF, **said)


def test_prefill_takes_the_backend_that_upstream_documents(device):
    """Two requests of 3 and 2 queries after 17 and 3 keys, in pages of heads, then tokens."""
    q = torch.randn(5, 4, 64, dtype=torch.float16, device=device)
    k, v = torch.randn(2, 5, 2, 16, 64, dtype=torch.float16, device=device)
    tables = torch.tensor([[4, 0], [2, 1]], dtype=torch.int32, device=device)
    lengths = [torch.tensor(x, dtype=torch.int32, device=device).view(2, 1, 1, 1) for x in ((3, 2), (20, 5))]
    for backend in (None, "cubin", "cudnn"):
        out, _ = flashinfer.cudnn.cudnn_batch_prefill_with_kv_cache(
            q, k, v, 0.125, workspace(device), max_token_per_sequence=3, max_sequence_kv=20,
            actual_seq_lens_q=lengths[0], actual_seq_lens_kv=lengths[1], block_tables=tables, causal=True,
            return_lse=False, backend=backend,
        )  # fmt: skip
        for rows, pages, length in ((slice(0, 3), [4, 0], 20), (slice(3, 5), [2], 5)):
            keys, values = (x[pages].transpose(1, 2).flatten(0, 1)[:length].double() for x in (k, v))
            keys, values = (x.repeat_interleave(2, 1) for x in (keys, values))
            logits = torch.einsum("qhd,khd->hqk", q[rows].double(), keys) * 0.125
            hidden = torch.ones_like(logits[0], dtype=torch.bool).triu(length - logits.shape[1] + 1)
            weights = logits.masked_fill(hidden, -torch.inf).softmax(-1)
            expected = torch.einsum("hqk,khd->qhd", weights, values)
            torch.testing.assert_close(out[rows].double(), expected, atol=2e-3, rtol=0)


def test_one_query_whose_row_has_any_stride(device):
    """Heads before tokens: offsets in elements are of its row, whatever torch has for the stride of an axis of 1."""
    x = generate.ragged_batch([1], [20], 4, 2, 64, dtype=HALF, device=device)
    made = generate.paged(x, 16, "HND")
    q, out = (t.view(4, 1, 64).transpose(0, 1) for t in (x.q, torch.empty_like(x.q)))
    assert q.stride(0) == 64
    offsets, table, of_k = lens([0, 256], device), blocks(made, [20], 2), lens([20], device)
    where = dict(actual_seq_lens_kv=of_k, block_tables=table, batch_offsets_q=offsets, batch_offsets_o=offsets, out=out)
    found = flashinfer.cudnn_batch_decode_with_kv_cache(
        q, *made.caches, 0.125, workspace(device), max_sequence_kv=20, return_lse=True, **where
    )
    check(found, x, Options())
    found = flashinfer.prefill.cudnn_batch_prefill_with_kv_cache(
        q, *made.caches, 0.125, workspace(device), max_token_per_sequence=1, max_sequence_kv=20, causal=True,
        return_lse=True, actual_seq_lens_q=lens([1], device), **where,
    )  # fmt: skip
    check(found, x, CAUSAL)
