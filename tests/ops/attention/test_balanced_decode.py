"""`prepare_balanced_batch_decode_with_kv_cache`: tensors bound once, lengths that change on the device."""

import re

import pytest
import torch

import flashinfer
from flashinfer.testing.compare import assert_close

PAGE, PAGES = 16, 7


def batch_of(device, lens, heads=(8, 1), dim=64, queries=1, layout="HND", dtype=torch.bfloat16, page=PAGE):
    """Queries, K and V, a table in which no page occurs twice, and lengths. Pages past the longest request are NaN."""
    qo, kv = heads
    shape = (len(lens) * PAGES, kv, page, dim) if layout == "HND" else (len(lens) * PAGES, page, kv, dim)
    q = torch.randn(len(lens) * queries, qo, dim, device=device).to(dtype)
    cache = tuple(torch.randn(shape, device=device).to(dtype) for _ in "kv")
    table = torch.randperm(len(lens) * PAGES).view(len(lens), PAGES).int().to(device)
    return q, cache, table, torch.tensor(lens, dtype=torch.int32, device=device)


def attended(q, cache, table, lens, queries, layout, scale, dtype):
    """Each query over its keys, one by one."""
    out = torch.zeros(q.shape, dtype=dtype, device=q.device)
    for row, (pages, length) in enumerate(zip(table.long(), lens.tolist(), strict=True)):
        k, v = (c[pages].to(dtype) for c in cache)
        k, v = ((c if layout == "NHD" else c.transpose(1, 2)).flatten(0, 1) for c in (k, v))
        group = q.shape[1] // k.shape[1]
        k, v = (c.repeat_interleave(group, 1) for c in (k, v))
        for j in range(queries):
            seen = length - queries + 1 + j
            if seen <= 0:
                continue
            at = row * queries + j
            logits = torch.einsum("hd,nhd->hn", q[at].to(dtype), k[:seen]) * scale
            out[at] = torch.einsum("hn,nhd->hd", logits.softmax(-1), v[:seen])
    return out


CASES = [
    {},
    {"queries": 3},
    {"queries": 2, "layout": "NHD"},
    {"heads": (8, 2), "dim": 128, "dtype": torch.float16, "sm_scale": 0.3},
    {"heads": (6, 3), "page": 5, "queries": 8},
]


@pytest.mark.parametrize("case", CASES, ids=[str(case) for case in CASES])
def test_lengths_change_on_the_device(device, case):
    case = dict(case)
    queries, layout, scale = case.get("queries", 1), case.get("layout", "HND"), case.pop("sm_scale", None)
    page = case.get("page", PAGE)
    most = PAGES * page
    q, cache, table, lens = batch_of(device, [most, queries, 33], **case)
    scratch = torch.empty(0, dtype=torch.uint8, device=device)
    decode = flashinfer.prepare_balanced_batch_decode_with_kv_cache(
        q, cache, table, lens, scratch, sm_scale=scale, q_len_per_req=queries, kv_layout=layout
    )
    factor = q.shape[2] ** -0.5 if scale is None else scale
    for new in ([most, queries, 33], [queries + 1, most - 1, 0], [20, 9, most]):
        lens.copy_(torch.tensor(new))
        out = decode()
        assert out is decode.out and out.dtype == q.dtype
        truth = attended(q, cache, table, lens, queries, layout, factor, torch.float64)
        same = attended(q, cache, table, lens, queries, layout, factor, torch.float32).to(q.dtype)
        assert_close(out, same, truth)


def test_result_in_the_callers_tensor(device):
    q, (k, v), table, lens = batch_of(device, [40, 3])
    scratch = torch.empty(0, dtype=torch.uint8, device=device)
    given = torch.full_like(q, torch.nan)
    both = torch.stack((k, v), 1)
    decode = flashinfer.decode.prepare_balanced_batch_decode_with_kv_cache(
        q, both, table, lens, scratch, out=given, backend="auto"
    )
    assert given.isnan().all()
    assert decode() is given
    assert torch.equal(given, flashinfer.prepare_balanced_batch_decode_with_kv_cache(q, (k, v), table, lens, scratch)())


@pytest.mark.gpu
def test_a_graph_follows_lengths_and_tables(device):
    q, cache, table, lens = batch_of(device, [PAGES * PAGE, 1, 33])
    scratch = torch.empty(0, dtype=torch.uint8, device=device)
    decode = flashinfer.prepare_balanced_batch_decode_with_kv_cache(q, cache, table, lens, scratch)
    decode()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = decode()
    for new in ([5, 111, 60], [0, 1, 112]):
        lens.copy_(torch.tensor(new))
        table.copy_(table.flip(0).clone())
        graph.replay()
        truth = attended(q, cache, table, lens, 1, "HND", 64**-0.5, torch.float64)
        assert_close(out, attended(q, cache, table, lens, 1, "HND", 64**-0.5, torch.float32).bfloat16(), truth)


BAD = [
    ({"backend": "fa3"}, "backend: got 'fa3'; allowed: 'cake', 'auto'"),
    ({"kv_layout": "DHN"}, "kv_layout"),
    ({"q_len_per_req": 0}, "q_len_per_req: got 0; allowed: at least 1"),
    ({"q_len_per_req": 2}, "query: got (2, 8, 64); allowed: [4, num_qo_heads, 64]"),
    ({"query": torch.zeros(2, 8, 32).half()}, "query: got (2, 8, 32)"),
    ({"query": torch.zeros(2, 8, 64)}, "query: got torch.float32; allowed: bfloat16, float16"),
    ({"query": torch.zeros(2, 5, 64).half()}, "query: got (2, 5, 64); allowed: a multiple of 2 heads"),
    ({"query": None}, "query: got None"),
    ({"block_tables": torch.zeros(2, dtype=torch.int32)}, "block_tables: got (2,); allowed: [batch, max_pages]"),
    ({"block_tables": torch.zeros(2, 3)}, "block_tables: got torch.float32; allowed: int32"),
    ({"seq_lens": torch.zeros(3, dtype=torch.int32)}, "seq_lens: got (3,); allowed: (2,)"),
    ({"seq_lens": torch.zeros(2, dtype=torch.int64)}, "seq_lens: got torch.int64; allowed: int32"),
    ({"sm_scale": float("nan")}, "sm_scale: got nan; allowed: a finite number"),
    ({"out": torch.zeros(2, 8, 32).half()}, "out: got (2, 8, 32); allowed: (2, 8, 64)"),
    ({"kv_cache": torch.zeros(4, 2, 0, 16, 64).half()}, "kv_cache: got 0 KV heads; allowed: 1 or more"),
]


@pytest.mark.parametrize(("change", "message"), BAD, ids=[m[:40] for _, m in BAD])
def test_bad_arguments(device, change, message):
    q, cache, table, lens = batch_of(device, [4, 5], heads=(8, 2), dtype=torch.float16)
    call = {"query": q, "kv_cache": cache, "block_tables": table, "seq_lens": lens, "workspace_buffer": q} | {
        name: x.to(device) if isinstance(x, torch.Tensor) else x for name, x in change.items()
    }
    with pytest.raises(ValueError, match="^" + re.escape(message)):
        flashinfer.prepare_balanced_batch_decode_with_kv_cache(**call)
