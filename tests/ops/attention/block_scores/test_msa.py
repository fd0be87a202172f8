"""Block-sparse attention in three steps, scores, selection, attention, each against its definition in float64."""

import contextlib
import math

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import flashinfer
from flashinfer.msa_ops import (
    msa_proxy_score, msa_proxy_score_fp4, msa_sparse_attention, msa_sparse_decode_attention, msa_topk_select,
)  # fmt: skip
from flashinfer.ops.attention import block_scores as room
from flashinfer.testing import generate
from flashinfer.testing.compare import assert_bitwise, assert_close
from tests.ops.quantize import truth as formats

HALF, BF16, FP8 = torch.float16, torch.bfloat16, torch.float8_e4m3fn
QO, KV = [3, 0, 2, 1], [300, 5, 130, 128]


class Case:
    """Requests with keys side by side and in pages in random order; rows that are nobody's are NaN."""

    def __init__(self, qo=QO, kv=KV, heads=4, kv_heads=2, dim=32, q_dtype=HALF, kv_dtype=None, device="cpu",
                 layout="own"):  # fmt: skip
        torch.manual_seed(0)
        kv_dtype = kv_dtype or q_dtype
        self.qo, self.kv, self.heads, self.kv_heads, self.device = qo, kv, heads, kv_heads, device
        self.q = torch.randn(sum(qo), heads, dim, device=device).to(q_dtype)
        self.k, self.v = (torch.randn(sum(kv), kv_heads, dim, device=device).to(kv_dtype) for _ in "kv")
        self.q_indptr, self.k_indptr = generate.indptr(qo, device), generate.indptr(kv, device)
        counts = [-(-n // 128) for n in kv]
        order = torch.randperm(sum(counts) + 2)
        shape = (len(order), 2, kv_heads, 128, dim) if layout == "one" else (2, len(order), kv_heads, 128, dim)
        memory = torch.full(shape, float("nan"), device=device).to(kv_dtype)
        self.pages = memory.unbind(1 if layout == "one" else 0)
        self.table, at = torch.full((len(kv), max(counts) + 1), -1, dtype=torch.int32), 0
        for b, (n, start) in enumerate(zip(counts, self.k_indptr.tolist())):
            self.table[b, :n] = order[at : at + n]
            for j in range(n):
                rows = slice(start + j * 128, start + min((j + 1) * 128, kv[b]))
                for pool, t in zip(self.pages, (self.k, self.v)):
                    pool[order[at + j], :, : rows.stop - rows.start] = t[rows].transpose(0, 1)
            at += n
        self.table = self.table.to(device)
        self.lens = torch.tensor(kv, dtype=torch.int32, device=device)

    def arguments(self, paged):
        if paged:
            return dict(page_table=self.table, seqused_k=self.lens)
        return dict(cu_seqlens_k=self.k_indptr)

    def rows(self, causal, offset=None):
        """(token, first key, keys that it sees) of each query."""
        ends = self.q_indptr.tolist()
        for b, start in enumerate(self.k_indptr.tolist()[:-1]):
            for i in range(self.qo[b]):
                position = (self.kv[b] - self.qo[b] if offset is None else offset) + i
                yield ends[b] + i, start, max(min(position + 1, self.kv[b]), 0) if causal else self.kv[b]

    def scores(self, dtype, blocks, causal=True, offset=None, q=None, k=None):
        q, k = (self.q if q is None else q).to(dtype), (self.k if k is None else k).to(dtype)
        out = torch.full((self.heads, blocks, sum(self.qo)), -torch.inf, dtype=dtype, device=self.device)
        for token, start, seen in self.rows(causal, offset):
            for block in range(blocks):
                keys = k[start + block * 128 : start + min((block + 1) * 128, seen)]
                if block * 128 < seen:
                    shared = keys.repeat_interleave(self.heads // self.kv_heads, 1)
                    out[:, block, token] = torch.einsum("hd,khd->hk", q[token], shared).amax(-1)
        return out

    def attention(self, chosen, dtype, causal, scale=None, temperature=1.0, k=None, v=None):
        """out, natural lse; products of `dtype`, sums in float32 at least."""
        wide = torch.promote_types(dtype, torch.float32)
        k, v = self.k if k is None else k, self.v if v is None else v
        out = torch.zeros(*self.q.shape[:2], v.shape[2], dtype=wide, device=self.device)
        lse = torch.full(self.q.shape[:2], -torch.inf, dtype=wide, device=self.device)
        scale = (self.q.shape[2] ** -0.5 if scale is None else scale) * temperature
        group = self.heads // self.kv_heads
        for token, start, seen in self.rows(causal):
            for h in range(self.heads):
                at = [start + b * 128 + i for b in chosen[h // group, token].tolist() if b >= 0
                      for i in range(min(128, seen - b * 128))]  # fmt: skip
                if not at:
                    continue
                logits = k[at, h // group].to(wide) @ self.q[token, h].to(wide) * scale
                lse[token, h] = torch.logsumexp(logits, 0)
                weights = torch.exp(logits - logits.max()).to(dtype).to(wide)
                out[token, h] = weights @ v[at, h // group].to(wide) / torch.exp(logits - logits.max()).sum()
        return out.to(dtype), lse


@pytest.fixture(params=("auto", "portable"))
def backend(request, monkeypatch):
    if request.param != "auto":
        op = room.block_scores
        monkeypatch.setattr("flashinfer.msa_ops.score.block_scores", lambda p, device: op(p, device, "portable"))
    return request.param


TYPES = {"fp16": dict(), "bf16": dict(q_dtype=BF16), "fp8 keys": dict(kv_dtype=FP8, heads=2, kv_heads=2),
         "fp8": dict(q_dtype=FP8)}  # fmt: skip


@pytest.mark.parametrize("types", TYPES)
@pytest.mark.parametrize("paged", (False, True))
def test_scores(types, paged, backend, device):
    x = Case(**TYPES[types], device=device)
    for causal, offset, reduce in ((True, None, False), (False, None, True), (True, 126, False)):
        buffer = torch.full((6, 5, sum(QO)), 777.0, device=device)
        out = buffer[1 : 2 if reduce else 1 + x.heads, 1:4]
        with torch.device("meta"):
            got = msa_proxy_score(x.q, x.pages[0] if paged else x.k, x.q_indptr, **x.arguments(paged), causal=causal,
                                  q_offset=offset, reduce_heads=reduce, output=out)  # fmt: skip
        assert got is out and (buffer[0] == 777).all() and (buffer[:, 0] == 777).all() and (buffer[:, 4] == 777).all()
        truth, same = (x.scores(t, 3, causal, offset) for t in (torch.float64, torch.float32))
        if reduce:
            truth, same = truth.amax(0, keepdim=True), same.amax(0, keepdim=True)
        assert_close(got, same, truth, "scores")
    got = msa_proxy_score(x.q, x.k, x.q_indptr, x.k_indptr)
    assert got.shape == (x.heads, 3, sum(QO))
    # The table has a column more than the longest request has blocks.
    in_pages = msa_proxy_score(x.q, x.pages[0], x.q_indptr, **x.arguments(True))
    assert_bitwise(in_pages, got)
    # Contiguous rows that begin anywhere.
    q, k = (torch.cat((t.flatten()[:1], t.flatten()))[1:].view(t.shape) for t in (x.q, x.k))
    assert_bitwise(msa_proxy_score(q, k, x.q_indptr, x.k_indptr), got)


@pytest.mark.parametrize("paged", (False, True))
def test_scores_of_nvfp4(paged, device):
    x = Case(dim=32, device=device)
    one = torch.tensor([8.0], device=device)
    wide, given = [], []
    for t in (x.q.bfloat16(), (x.pages[0].nan_to_num() if paged else x.k).bfloat16()):
        codes, factors = flashinfer.nvfp4_quantize(t.flatten(0, -2), one)
        given.append((codes.view(torch.uint8).view(*t.shape[:-1], 16), factors.view(torch.uint8)))
    for (codes, factors), t in zip(given, (x.q, x.pages[0] if paged else x.k)):
        rows, blocks = codes.flatten(0, -2).shape[0], 2
        # The 128x4 layout by its definition.
        row, block = torch.arange(rows)[:, None], torch.arange(blocks)[None]
        at = row // 128 * 512 + row % 32 * 16 + row % 128 // 32 * 4 + block
        sf = formats.decode("e4m3", factors.flatten()[at.to(device)].cpu())
        code = formats.decode("e2m1", formats.unpack(codes.flatten(0, -2).cpu()))
        wide.append((code.unflatten(-1, (2, 16)) * sf[..., None]).flatten(-2).view(*codes.shape[:-1], 32).to(device))
    got = msa_proxy_score_fp4(given[0][0], given[1][0], given[0][1], given[1][1], 0.125, 0.125, x.q_indptr,
                              **x.arguments(paged), max_k_tiles=3)  # fmt: skip
    k = wide[1]
    if paged:
        rows = []
        for b, n in enumerate(KV):
            rows.append(k[x.table[b, : -(-n // 128)].long()].transpose(1, 2).flatten(0, 1)[:n])
        k = torch.cat(rows)
    truth, same = (x.scores(t, 3, q=wide[0], k=k) / 64 for t in (torch.float64, torch.float32))
    assert_close(got, same, truth, "scores")


class NoWaiting(TorchDispatchMode):
    """Refuses what reads a value of a tensor, for which the host would wait."""

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        assert function is not torch.ops.aten._local_scalar_dense.default
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize("tokens", (1, 3))
def test_a_count_of_blocks_is_not_waited_for(tokens, device, pytestconfig):
    """A decode batch of one token counts its blocks by a tensor of one element, inside CUDA graphs."""
    scores = torch.arange(4.0, device=device).view(1, 4, 1).expand(1, 4, tokens).contiguous()
    for count in (torch.tensor([3]), torch.tensor(3), torch.full((tokens,), 3)):
        count = count.int().to(device)
        # Hostile calls compare values while they are made.
        with NoWaiting() if pytestconfig.getoption("hostile") == "0" else contextlib.nullcontext():
            got = msa_topk_select(scores, 2, count, force_begin_blocks=1)
        assert got.tolist() == [[[0, 2]]] * tokens


def test_selection(device):
    """Ties go to the lower block, NaN is last, forced blocks come first; -1 behind where there are fewer blocks."""
    inf = math.inf
    rows = torch.tensor([[1.0, 5, 5, 2, 5, -inf], [inf, 0, float("nan"), -1, -inf, 7], [0.0, -0.0, 0, 0, 0, 0]])
    scores = rows.t()[None].contiguous().to(device)
    pick = lambda *args, **kwargs: msa_topk_select(scores, *args, **kwargs)[:, 0].tolist()
    assert pick(2) == [[1, 2], [0, 5], [0, 1]]
    assert pick(3, 4) == [[1, 2, 3], [0, 1, 3], [0, 1, 2]]
    assert pick(3, torch.tensor([2, 0, 99], dtype=torch.int32, device=device)) == [[0, 1, -1], [-1] * 3, [0, 1, 2]]
    assert pick(3, 5, force_begin_blocks=1, force_end_blocks=1) == [[0, 1, 4], [0, 1, 4], [0, 1, 4]]
    assert pick(8) == [[0, 1, 2, 3, 4, 5, -1, -1]] * 3
    output = torch.full((5, 1, 2), 777, dtype=torch.int32, device=device)
    with torch.device("meta"):
        assert msa_topk_select(scores, 2, output=output[1:4]).data_ptr() == output[1:4].data_ptr()
    assert (output[0] == 777).all() and (output[4] == 777).all()
    many = torch.randn(2, 40, 9, device=device).round(decimals=1)
    got = msa_topk_select(many, 16)
    for h in range(2):
        for t in range(9):
            order = sorted(range(40), key=lambda b: (-float(many[h, b, t]), b))
            assert got[t, h].tolist() == sorted(order[:16])
    for name, args, kwargs in (("topk", (0,), {}), ("force_begin_blocks", (2,), dict(force_begin_blocks=3)),
                               ("num_valid_pages", (2, torch.zeros(5, dtype=torch.int32)), {}),
                               ("output", (2,), dict(output=torch.zeros(3, 1, 2)))):  # fmt: skip
        with pytest.raises(ValueError, match=name):
            msa_topk_select(scores, *args, **kwargs)


def chosen_of(x, topk, device):
    """Blocks of each KV head and query: some beyond what is seen, -1 among them, one row of nothing else."""
    chosen = torch.stack([torch.randperm(3)[:topk] for _ in range(x.kv_heads * sum(x.qo))])
    chosen = chosen.view(x.kv_heads, sum(x.qo), topk).int()
    chosen[0, 1] = -1
    return chosen.to(device)


def check(result, x, chosen, causal, dtype=None, **others):
    dtype = dtype or x.q.dtype
    truth, same = (x.attention(chosen, t, causal, **others) for t in (torch.float64, dtype))
    assert_close(result[0], same[0].to(result[0].dtype), truth[0], "out")
    assert_close(result[1], x.attention(chosen, torch.float32, causal, **others)[1], truth[1], "lse")


@pytest.mark.parametrize("types", TYPES)
@pytest.mark.parametrize("layout", ("rows", "pages", "one"))
@pytest.mark.parametrize("causal", (False, True))
def test_attention(types, layout, causal, device):
    x = Case(**TYPES[types], device=device, layout=layout)
    paged = layout != "rows"
    k, v = x.pages if paged else (x.k, x.v)
    chosen = chosen_of(x, 2, device)
    given = dict(causal=causal, **x.arguments(paged))
    with torch.device("meta"):
        out, lse, lse_t = msa_sparse_attention(x.q, k, v, chosen, x.q_indptr, **given, return_temperature_lse=True,
                                               lse_temperature_scale=0.5)  # fmt: skip
    dtype = HALF if types == "fp8" else None
    assert out.dtype == (BF16 if types == "fp8" else x.q.dtype)
    check((out, lse), x, chosen, causal, BF16 if types == "fp8" else dtype)
    assert_close(lse_t, x.attention(chosen, torch.float32, causal, temperature=0.5)[1],
                 x.attention(chosen, torch.float64, causal, temperature=0.5)[1], "lse_t")  # fmt: skip
    assert_bitwise(msa_sparse_attention(x.q, k, v, chosen, x.q_indptr, **given), out)


@pytest.mark.parametrize("paged", (False, True))
def test_attention_over_heads_that_are_one(paged, device):
    """A stride of 0 between KV heads."""
    x = Case(kv_heads=1, device=device)
    k, v = (t.expand(-1, 2, *t.shape[2:]) for t in (x.pages if paged else (x.k, x.v)))
    x.k, x.v, x.kv_heads = x.k.expand(-1, 2, -1), x.v.expand(-1, 2, -1), 2
    chosen = chosen_of(x, 2, device)
    check(msa_sparse_attention(x.q, k, v, chosen, x.q_indptr, causal=True, return_softmax_lse=True,
                               **x.arguments(paged)), x, chosen, True)  # fmt: skip


@pytest.mark.parametrize("seqlen_q", (1, 2))
@pytest.mark.parametrize("paged", (False, True))
def test_decode(seqlen_q, paged, device):
    """Lengths of 0, of one key, of whole pages; the output is the caller's."""
    kv = [300, 0, 128, 1, 257]
    x = Case([seqlen_q] * 5, kv, device=device)
    k, v = x.pages if paged else (x.k, x.v)
    chosen = chosen_of(x, 3, device)
    buffer = torch.full((x.q.shape[0] + 2, 4, 32), 777.0, dtype=HALF, device=device)
    got = msa_sparse_decode_attention(x.q, k, v, chosen, **x.arguments(paged), seqlen_q=seqlen_q, out=buffer[1:-1],
                                      return_softmax_lse=True, softmax_scale=0.3)  # fmt: skip
    assert got[0].data_ptr() == buffer[1].data_ptr() and (buffer[0] == 777).all() and (buffer[-1] == 777).all()
    check(got, x, chosen, True, scale=0.3)


@pytest.mark.parametrize("layout", ("rows", "pages", "planar"))
def test_attention_over_nvfp4(layout, device):
    """The truth is made of codes times factors, read by the formats' tables."""
    x = Case(dim=32, device=device)
    paged = layout != "rows"
    one, given = torch.tensor([8.0], device=device), []
    pools = [t.nan_to_num() for t in x.pages] if paged else [x.k, x.v]
    if layout == "planar":
        codes, factors, *_ = flashinfer.nvfp4_quantize_paged_kv_cache(*pools, "HND", one, one)
        given = list(zip(codes, factors))
        linear = [given[0][1].view(torch.uint8), torch.empty_like(given[1][1].view(torch.uint8))]
        stored, place = given[1][1].view(torch.uint8), torch.arange(4 * 2)
        for i in range(32):
            tile = stored[:, :, 4 * i : 4 * i + 4].flatten(2)
            for t in range(4):
                for f in range(2):
                    linear[1][:, :, 4 * i + t, f] = tile[..., place[4 * f + t]]
    else:
        linear = []
        for t in pools:
            codes, factors = flashinfer.nvfp4_quantize(t.flatten(0, -2), one)
            codes, factors = codes.view(torch.uint8).view(*t.shape[:-1], 16), factors.view(torch.uint8)
            given.append((codes, factors))
            row, block = torch.arange(codes.numel() // 16)[:, None], torch.arange(2)[None]
            at = row // 128 * 512 + row % 32 * 16 + row % 128 // 32 * 4 + block
            linear.append(factors.flatten()[at.to(device)].view(*t.shape[:-1], 2))
    exact = []
    for (codes, _), sf in zip(given, linear):
        code = formats.decode("e2m1", formats.unpack(codes.cpu())).unflatten(-1, (2, 16))
        wide = (code * formats.decode("e4m3", sf.cpu())[..., None]).flatten(-2).to(device) / 8
        if paged:
            wide = torch.cat([wide[x.table[b, : -(-n // 128)].long()].transpose(1, 2).flatten(0, 1)[:n]
                              for b, n in enumerate(KV)])  # fmt: skip
        exact.append(wide.to(HALF))
    chosen = chosen_of(x, 2, device)
    (k, k_scale), (v, v_scale) = given
    got = msa_sparse_attention(
        x.q, k, v, chosen, x.q_indptr, **x.arguments(paged), causal=True, k_scale=k_scale, v_scale=v_scale,
        k_global_scale=0.125, v_global_scale=0.125, return_softmax_lse=True,
    )  # fmt: skip
    check(got, x, chosen, True, k=exact[0], v=exact[1])


def test_no_queries(device):
    x = Case([0, 0], [3, 0], device=device)
    chosen = torch.zeros(2, 0, 2, dtype=torch.int32, device=device)
    assert msa_sparse_attention(x.q, x.k, x.v, chosen, x.q_indptr, x.k_indptr).shape == (0, 4, 32)
    assert msa_proxy_score(x.q, x.k, x.q_indptr, x.k_indptr).shape == (4, 1, 0)


BAD = {
    "q2k_indices": dict(q2k_indices=torch.zeros(3, 6, 2, dtype=torch.int32)),
    "v": dict(v=torch.zeros(3, 2, 32, dtype=HALF)),
    "cu_seqlens_q": dict(cu_seqlens_q=torch.zeros(3, dtype=torch.int32)),
    "cu_seqlens_k": dict(cu_seqlens_k=None),
    "k_scale": dict(k_scale=torch.zeros(4, dtype=torch.uint8)),
    "softmax_scale": dict(softmax_scale=float("nan")),
    "causal": dict(causal="False"),
}


@pytest.mark.parametrize("argument", BAD)
def test_bad_input_is_refused_by_name(argument):
    x = Case()
    call = dict(q=x.q, k=x.k, v=x.v, q2k_indices=torch.zeros(2, 6, 2, dtype=torch.int32), cu_seqlens_q=x.q_indptr,
                cu_seqlens_k=x.k_indptr)  # fmt: skip
    with pytest.raises(ValueError, match=f"^{argument}: got "):
        msa_sparse_attention(**call | BAD[argument])
