"""Choosing keys, and latent attention over them, against float64 and a sort in Python."""

import math

import pytest
import torch

from flashinfer import dsa_indexer
from flashinfer.dsa_indexer import dsa_indexer_topk
from flashinfer.dsa_sparse_attention import dsa_sparse_attention, dsa_sparse_attention_varlen
from flashinfer.testing import generate
from flashinfer.testing.compare import assert_close
from tests.ops.attention.mla.latents import attend
from tests.ops.attention.mqa_logits.test_mqa_logits import run_by

HALF = torch.float16


def windows(qo, kv, ratio, offsets):
    for s, (n, m) in enumerate(zip(qo, kv)):
        offset = offsets[s] if offsets else m - n if ratio == 1 else 0
        for u in range(n):
            yield s, max(min((offset + u + 1) // ratio, m), 0)


def expected(values, seen, top_k):
    """Ids in ascending order of the largest values; of equal ones the later, NaN below all."""
    number = lambda j: (False, 0.0, j) if math.isnan(values[j]) else (True, values[j], j)
    chosen = sorted(sorted(range(seen), key=number)[::-1][:top_k])
    return chosen + [-1] * (top_k - len(chosen))


@pytest.mark.parametrize("case", ("prefix", "ratio", "offsets", "short"))
@pytest.mark.parametrize("dtype", (HALF, torch.bfloat16))
def test_chosen_keys(case, dtype, device, monkeypatch):
    """Small integers: scores are exact and often equal. Keys come in parts of 16, queries in parts of 4."""
    torch.manual_seed(0)
    monkeypatch.setattr(dsa_indexer, "_KEYS", 16)
    monkeypatch.setattr(dsa_indexer, "_QUERIES", 4)
    qo, kv = [5, 0, 3, 2], [37, 4, 3, 50]
    ratio, offsets = (4 if case == "ratio" else 1), ([-2, 0, 7, 30] if case == "offsets" else None)
    top_k = 60 if case == "short" else 9
    q = torch.randint(-1, 2, (sum(qo), 4, 16), device=device).to(dtype)
    packed = torch.full((sum(kv), 40), float("nan"), dtype=dtype, device=device)
    packed[:, 8:24] = torch.randint(-1, 2, (sum(kv), 16), device=device).to(dtype)
    k, w = packed[:, 8:24], torch.randint(-2, 3, (sum(qo), 4), device=device).float()
    q[1, 0, 0], w[1, 0] = float("nan"), 1.0
    given = dict(q_causal_offsets=torch.tensor(offsets, device=device)) if offsets else {}
    buffers = [torch.full((sum(qo) + 2, top_k), 777, dtype=t, device=device) for t in (torch.int32, torch.float32)]
    with torch.device("meta"):
        ids, scores = dsa_indexer_topk(
            q, k, w, generate.indptr(qo, device), generate.indptr(kv, device), top_k=top_k, softmax_scale=0.5,
            ratio=ratio, indices=buffers[0][1:-1], scores=buffers[1][1:-1], **given,
        )  # fmt: skip
    assert all((b[0] == 777).all() and (b[-1] == 777).all() for b in buffers)
    starts = generate.indptr(kv).tolist()
    for row, (s, seen) in enumerate(windows(qo, kv, ratio, offsets)):
        keys = k[starts[s] : starts[s] + kv[s]].double()
        values = ((q[row].double() @ keys.t() * 0.5).relu() * w[row, :, None].double()).sum(0).tolist()
        want = expected(values, seen, top_k)
        assert ids[row].tolist() == want, (row, seen)
        got = [-math.inf if j < 0 else values[j] for j in want]
        got = torch.tensor(got, dtype=torch.float64)
        assert torch.equal(scores[row].cpu().double().nan_to_num(nan=9e9), got.nan_to_num(nan=9e9))


@pytest.mark.parametrize("length", (0, 1, 2, 3))
def test_lengths_about_top_k(length, device):
    q = torch.ones(1, 1, 16, dtype=HALF, device=device)
    k = torch.arange(length, device=device)[:, None].expand(length, 16).to(HALF).contiguous()
    ids, scores = dsa_indexer_topk(q, k, torch.ones(1, 1, device=device), generate.indptr([1], device),
                                   generate.indptr([length], device), top_k=2, softmax_scale=1.0)  # fmt: skip
    keys = list(range(length))[-2:]
    assert ids[0].tolist() == keys + [-1] * (2 - len(keys))
    assert scores[0].tolist() == [16.0 * j for j in keys] + [-math.inf] * (2 - len(keys))


@pytest.mark.parametrize("backend", ("auto", "portable", "sm90"))
def test_an_infinite_key(backend, device, monkeypatch):
    """Five heads stand in a product of more columns: a head that is not there adds nothing, times infinity too."""
    if backend != "auto":
        monkeypatch.setattr("flashinfer.dense_mqa.mqa_logits", run_by(backend))
    q = torch.randn(2, 5, 16, device=device).to(HALF)
    q[0, :, 0], q[1, :, 0] = -q[0, :, 0].abs(), q[1, :, 0].abs()
    k = torch.zeros(3, 16, dtype=HALF, device=device)
    k[1, 0] = torch.inf
    given = q, k, torch.ones(2, 5, device=device), generate.indptr([2], device), generate.indptr([3], device)
    offsets = torch.tensor([2], device=device)
    ids, scores = dsa_indexer_topk(*given, top_k=2, softmax_scale=1.0, q_causal_offsets=offsets)
    assert ids.tolist() == [[1, 2], [1, 2]] and scores.tolist() == [[0.0, 0.0], [math.inf, 0.0]]


def truth(q, keys, rows, ckv, scale, dtype):
    each = [attend(q[i : i + 1], keys[[j for j in row if j >= 0]], ckv, scale, dtype) for i, row in enumerate(rows)]
    return torch.cat([out for out, _ in each]), torch.cat([lse for _, lse in each])


@pytest.mark.parametrize("causal", (False, True))
def test_attention_over_named_keys(causal, device):
    """Slices of wider rows; rows of nothing, negative and too large numbers, and lengths of rows."""
    torch.manual_seed(1)
    qo, kv = [3, 2], [9, 4]
    q = torch.randn(5, 6, 48 + 16, dtype=HALF, device=device)
    packed = torch.full((13, 80), float("nan"), dtype=HALF, device=device)
    packed[:, :64] = torch.randn(13, 64, dtype=HALF, device=device)
    ids = torch.randint(-2, 12, (5, 7), device=device).int()
    ids[1], ids[2, 0] = -1, 10**9
    lens = torch.tensor([7, 7, 4, 0, 7], dtype=torch.int32, device=device)
    operands = q[..., :48], q[..., 48:], packed[:, :48], packed[:, 48:64]
    rows, flat = [], []
    for t in range(5):
        d = int(t >= 3)
        u = t - 3 * d
        own = [j for j in ids[t, : int(lens[t])].tolist() if 0 <= j < kv[d] and (not causal or j <= kv[d] - qo[d] + u)]
        rows.append([9 * d + j for j in own])
        flat.append([j for j in ids[t].tolist() if 0 <= j < 13])
    keys, scale = packed[:, :64], 64**-0.5
    out, lse = dsa_sparse_attention_varlen(
        *operands, ids, generate.indptr(qo, device), generate.indptr(kv, device), causal=causal, topk_length=lens,
        return_lse=True,
    )  # fmt: skip
    for got, named in (((out, lse), rows), (dsa_sparse_attention(*operands, ids, return_lse=True), flat)):
        same = truth(q, keys, named, 48, scale, HALF)[0]
        assert_close(got[0], same, truth(q, keys, named, 48, scale, torch.float64)[0], "out")
        assert_close(got[1], truth(q, keys, named, 48, scale, torch.float32)[1],
                     truth(q, keys, named, 48, scale, torch.float64)[1], "lse")  # fmt: skip
    with pytest.raises(ValueError, match="kv_latent: .*gradient"):
        dsa_sparse_attention(operands[0], operands[1], operands[2].clone().requires_grad_(), operands[3], ids)
    with pytest.raises(ValueError, match="^q_latent: got "):
        of_documents = generate.indptr(qo, device), generate.indptr(kv, device)
        dsa_sparse_attention_varlen(operands[0][0, 0, 0], *operands[1:], ids, *of_documents)


BAD = {
    "q": dict(q=torch.zeros(2, 1, 16)),
    "k": dict(k=torch.zeros(4, 8, dtype=HALF)),
    "w": dict(w=torch.zeros(2, 2)),
    "top_k": dict(top_k=0),
    "softmax_scale": dict(softmax_scale=-1.0),
    "indices": dict(indices=torch.zeros(2, 5, dtype=torch.int32)),
    "backend": dict(backend="other"),
}


@pytest.mark.parametrize("argument", BAD)
def test_bad_input_is_refused_by_name(argument):
    call = dict(q=torch.zeros(2, 1, 16, dtype=HALF), k=torch.zeros(4, 16, dtype=HALF), w=torch.zeros(2, 1),
                cu_seqlens_q=generate.indptr([2]), cu_seqlens_k=generate.indptr([4]), top_k=2)  # fmt: skip
    with pytest.raises(ValueError, match=f"^{argument}: got "):
        dsa_indexer_topk(**call | BAD[argument])
