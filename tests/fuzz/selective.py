"""Random calls of attention over shared prefixes, and of what chooses keys for it."""

import math

import torch

import flashinfer
from flashinfer.msa_ops import msa_proxy_score
from flashinfer.paged_mqa import fp8_paged_mqa_logits
from flashinfer.testing import generate
from flashinfer.testing.compare import assert_close
from flashinfer.testing.fuzz import Call
from tests.cascade.test_cascade import TREES, Tree
from tests.ops.tensor_cores import adds_fp8_in_few_bits, fp8_dots_error
from tests.ops.topk.test_topk import best

LENGTHS = (0, 1, 2, 15, 17, 63, 65, 129)
BLOCK = 128


def workspace(draw):
    return torch.empty(1 << 20, dtype=torch.uint8, device=draw.device)


def cascade(draw):
    lens, paths, rows = TREES[draw.pick(*TREES)]
    heads, dim = draw.pick((4, 2), (5, 5), (8, 1)), draw.pick(16, 32, 72)
    layout = draw.pick("NHD", "HND")
    tree = Tree(lens, paths, rows, draw.device, draw.half(), draw.pick(1, 3, 4, 16), layout, heads, dim)
    wrapper = flashinfer.MultiLevelCascadeAttentionWrapper(len(lens), workspace(draw), layout)
    options = dict(causal=draw.chance(), sm_scale=draw.pick(None, 0.3), logits_soft_cap=draw.pick(None, 1.5))
    options["window_left"] = draw.pick(-1, -1, 0, 3, 100)

    def attend(q, host, **options):
        tree.plan(wrapper, host, **options)
        return wrapper.run(q, tree.paged.kv_cache)

    return Call(
        attend,
        dict(q=tree.q, host=draw.chance()) | options,
        lambda out: tree.check(out, **options),
        ("num_qo_heads", "head_dim"),
    )


def indexer_logits(draw):
    """FP8 keys with a scale each, in pages in random order; bytes that are nobody's are NaN."""
    heads, dim, page = draw.pick(1, 5, 8, 64), draw.pick(16, 64, 128), draw.pick(1, 5, 16, 64)
    tokens, lens = draw.pick(1, 2), [draw.pick(*LENGTHS) for _ in range(draw.pick(1, 3))]
    pages = [-(-n // page) for n in lens]
    total, device, fp8 = sum(pages) + 2, draw.device, torch.float8_e4m3fn
    keys, scales = torch.randn(total, page, dim, device=device).to(fp8), torch.rand(total, page, device=device) * 2
    cache = torch.cat((keys.view(torch.uint8).view(total, -1), scales.view(torch.uint8)), 1).view(total, page, 1, -1)
    order, table = torch.randperm(total)[: sum(pages)].split(pages), torch.full((len(lens), max(pages) + 1), -1)
    for row, part in zip(table, order):
        row[: len(part)] = part
    q = torch.randn(len(lens), tokens, heads, dim, device=device).to(fp8)
    weights = torch.randn(len(lens) * tokens, heads, device=device)
    context = max(lens) + draw.pick(0, 3)
    arguments = dict(
        q=q, kv_cache=cache, weights=weights, context_lens=draw.ints(lens, torch.int32),
        block_table=table.to(device, torch.int32), schedule_meta=None, max_context_len=context, clean_logits=True,
    )  # fmt: skip

    # Heads cancel: what the 8 ulp of the rule are of; and what a score may err by where tensor cores add few bits.
    largest, bounds = 0.0, torch.zeros(len(lens) * tokens, context, dtype=torch.float64, device=device)

    def formula(t):
        nonlocal largest
        out = torch.full((len(lens) * tokens, context), -math.inf, dtype=t, device=device)
        for i, (n, part) in enumerate(zip(lens, order)):
            part = part.to(device)
            k, s = keys[part].flatten(0, 1)[:n], scales[part].flatten()[:n].to(t)
            for token in range(tokens):
                seen, row = max(n - tokens + 1 + token, 0), i * tokens + token
                dots = (k[:seen].to(t) @ q[i, token].to(t).T).relu()
                parts = dots * weights[row].to(t) * s[:seen, None]
                out[row, :seen] = parts.sum(1)
                largest = max(largest, float(parts.abs().amax())) if seen else largest
                errors = fp8_dots_error(k[:seen], q[i, token].T) * weights[row].double().abs()
                bounds[row, :seen] = errors.sum(1) * s[:seen].double()
        return out

    def check(out):
        same, truth = formula(torch.float32), formula(torch.float64)
        if not adds_fp8_in_few_bits(device):
            return assert_close(out, same, truth, terms=largest)
        seen = truth.isfinite()
        assert torch.equal(out.isneginf(), ~seen), "what no query sees is -inf, and nothing else"
        error = (out.double() - truth).abs()[seen]
        assert (error <= bounds[seen]).all(), f"errs by {(error / bounds[seen]).max():.2f} of the bound"

    return Call(fp8_paged_mqa_logits, arguments, check)


def block_scores(draw):
    """The largest product of a query with a key of each block of 128."""
    kv_heads, group, dim = draw.pick(1, 2), draw.pick(1, 2, 4), draw.pick(16, 32, 64, 128)
    kv = [draw.pick(1, 5, 127, 128, 129, 300) for _ in range(draw.pick(1, 2, 3))]
    qo = [draw.pick(0, 1, 3) for _ in kv]
    dtype, causal = draw.half(), draw.chance()
    q = draw.values(sum(qo), kv_heads * group, dim, dtype=dtype, kinds=("normal", "ties"))
    k = draw.values(sum(kv), kv_heads, dim, dtype=dtype, kinds=("normal", "ties"))
    indptr = [draw.ints(generate.indptr(lens).tolist(), torch.int32) for lens in (qo, kv)]

    def check(out):
        for t, results in ((torch.float64, truth := []), (torch.float32, same := [])):
            for n, queries, keys in zip(kv, q.split(qo), k.split(kv), strict=True):
                s = torch.einsum("qhd,khd->hqk", queries.to(t), keys.to(t).repeat_interleave(group, 1))
                if causal:
                    row, key = (torch.arange(m, device=draw.device) for m in (len(queries), n))
                    s = s.masked_fill(key > row[:, None] + n - len(queries), -math.inf)
                blocks = torch.full((*s.shape[:2], out.shape[1] * BLOCK), -math.inf, dtype=t, device=draw.device)
                blocks[..., :n] = s
                results.append(blocks.unflatten(2, (-1, BLOCK)).amax(3).transpose(1, 2))
        assert_close(out, torch.cat(same, 2), torch.cat(truth, 2))

    arguments = dict(q=q, k=k, cu_seqlens_q=indptr[0], cu_seqlens_k=indptr[1], causal=causal)
    return Call(msa_proxy_score, arguments, check)


def windows(draw):
    """Scores in windows of rows, with NaN around them, whose values tie."""
    rows, columns = draw.pick(1, 2, 5), draw.pick(1, 50, 150, 1000)
    starts, lens = ([draw.integer(0, most) for _ in range(rows)] for most in (columns - 1, columns))
    lens = [min(n, columns - start) for n, start in zip(lens, starts)]
    x = torch.full((rows, columns), math.nan, device=draw.device)
    for row, start, n in zip(x, starts, lens):
        row[start : start + n] = (torch.randn(n, device=draw.device) * 4).round() / 2
    k = draw.pick(1, 5, 20, 64)
    expected = [best(row[start : start + n].tolist(), k) for row, start, n in zip(x, starts, lens)]
    common = dict(input=x, lengths=draw.ints(lens, torch.int32), row_starts=draw.ints(starts, torch.int32), k=k)
    return expected, common | dict(deterministic=True, tie_break=flashinfer.TopKTieBreak.SMALL), starts


def ragged_transform(draw):
    chosen, arguments, _ = windows(draw)
    offsets = [draw.pick(0, 7, 100000) for _ in chosen]
    k = arguments["k"]

    def check(out):
        for row, local, base in zip(out.tolist(), chosen, offsets):
            assert sorted(row) == sorted([j + base for j in local] + [-1] * (k - len(local)))

    return Call(flashinfer.top_k_ragged_transform, arguments | dict(offsets=draw.ints(offsets, torch.int32)), check)


def table_transform(draw):
    chosen, arguments, starts = windows(draw)
    k = arguments["k"]
    table = torch.randperm(len(chosen) * 1100).view(len(chosen), 1100).to(draw.device, torch.int32)

    def check(out):
        for row, local, start, places in zip(out.tolist(), chosen, starts, table.tolist()):
            slots = [places[start + j] for j in local]
            assert sorted(row) == sorted(slots + [-1] * (k - len(local)))

    return Call(flashinfer.top_k_page_table_transform, arguments | dict(src_page_table=table), check)


FAMILIES = (cascade, indexer_logits, block_scores, ragged_transform, table_transform)
