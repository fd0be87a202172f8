"""Random calls of latent attention, with queries and caches in each way that engines have them in."""

import torch

from flashinfer.mla import BatchMLAPagedAttentionWrapper, trtllm_batch_decode_with_kv_cache_mla
from flashinfer.testing.compare import assert_close
from flashinfer.testing.fuzz import Call
from tests.fuzz.direct import counts, scale
from tests.fuzz.wrappers import placed, table, workspace
from tests.ops.attention.mla.latents import LOG2E, attend, check, latents

LENGTHS = (0, 1, 2, 15, 17, 63, 65, 129)
FP8 = torch.float8_e4m3fn


def batch_of(draw, each=None):
    heads, (ckv, kpe) = draw.pick(1, 4, 16, 40), draw.pick((64, 16), (32, 8), (16, 0), (512, 64))
    if heads * ckv > draw.largest // 8:
        heads, ckv, kpe = 4, 32, 8
    page = draw.pick(1, 5, 16, 64)
    kv = [draw.pick(*LENGTHS) for _ in range(draw.pick(1, 3))]
    qo = [draw.pick(0, 1, 1, 2, 5) if each is None else each for _ in kv]
    kv_dtype = FP8 if draw.chance(0.2) else None
    x = latents(qo, kv, heads, ckv, kpe, page, dtype=draw.half(), kv_dtype=kv_dtype, device=draw.device)
    return x, qo, kv, (heads, ckv, kpe, page)


def sinks_of(draw, heads):
    return torch.randn(heads, device=draw.device) * 3 if draw.chance(0.25) else None


def wrapper(draw):
    blocked = draw.chance(0.3)
    each = draw.pick(1, 2) if blocked and draw.chance() else None
    x, qo, kv, (heads, ckv, kpe, page) = batch_of(draw, each)
    causal, sm_scale = draw.chance(), draw.pick(0.1, 0.0, 0.03, -0.05)
    sinks = sinks_of(draw, heads)
    out_scale, base_e = 1.0, draw.chance(0.3)
    plan = dict(num_heads=heads, head_dim_ckv=ckv, head_dim_kpe=kpe, page_size=page, causal=causal, sm_scale=sm_scale,
                q_data_type=x.q.dtype, kv_data_type=x.cache.dtype)  # fmt: skip
    if blocked:
        plan |= dict(block_tables=x.blocks(draw.pick(0, 3)), seq_lens=x.kv_lens)
        plan |= dict(max_q_len=each) if each else dict(cum_seq_lens_q=x.qo_indptr)
    else:
        names = ("qo_indptr", "kv_indptr", "kv_indices", "kv_len_arr")
        plan |= {name: table(draw, t) for name, t in zip(names, x.tables)}
    run = dict(return_lse=True)
    if base_e:
        at_plan = draw.chance()
        plan |= dict(lse_mode="basee") if at_plan else {}
        run |= {} if at_plan else dict(return_lse_base_on_e=True)
    if sinks is not None:
        run["sinks"] = sinks
    if draw.chance(0.3):
        bmm1 = draw.pick(0.07, -0.1)
        run["bmm1_scale"], sm_scale = scale(draw, bmm1), bmm1
    if draw.chance(0.3):
        out_scale = draw.pick(0.5, -2.0)
        run["bmm2_scale"] = scale(draw, out_scale)
    if draw.chance(0.2):
        run["o_scale"] = 4.0
        out_scale /= 4.0
    q_nope, q_pe, ckv_cache, kpe_cache = x.parts()
    given_as = draw.pick("parts", "joined", "pairs")
    if given_as == "joined":
        run |= dict(query=draw.laid(x.q), kv_cache=draw.pick(x.cache, x.cache.unsqueeze(1), x.cache.unsqueeze(2)))
        if each and draw.chance():
            run["query"] = run["query"].unflatten(0, (len(kv), each))
    else:
        queries = [draw.laid(t.contiguous() if draw.chance() else t) for t in (q_nope, q_pe)]
        caches = [t.contiguous() if draw.chance() else t for t in (ckv_cache, kpe_cache)]
        if not kpe and draw.chance():
            queries[1] = caches[1] = None
        if given_as == "pairs":
            run |= dict(query=tuple(queries), kv_cache=tuple(caches))
        else:
            run |= dict(zip(("q_nope", "q_pe", "ckv_cache", "kpe_cache"), (*queries, *caches)))
    if draw.chance(0.3):
        run["lse"] = torch.empty(len(x.q), heads, dtype=torch.float32, device=draw.device)
    if draw.chance(0.3):
        dtype = draw.pick(x.q.dtype, torch.float32)
        run["out"] = torch.empty(len(x.q), heads, ckv, dtype=dtype, device=draw.device)
        if given_as != "joined":
            run["out"] = draw.laid(run["out"])
    latent = BatchMLAPagedAttentionWrapper(workspace(draw), backend=draw.backend)

    def call(**arguments):
        latent.plan(**{name: arguments[name] for name in plan})
        return latent.run(**{name: arguments[name] for name in run})

    def compare(result):
        out, lse = result
        for name, got in (("out", out), ("lse", lse)):
            assert name not in run or got.data_ptr() == run[name].data_ptr()
        out, lse = out.reshape(-1, heads, ckv), lse.reshape(-1, heads)
        check((out, lse), x, sm_scale, base_e, out_scale, causal=causal, sinks=sinks)

    return Call(call, plan | run, compare, ("kv_indptr", "query", "kv_cache", "q_pe"))


def trtllm(draw):
    ragged = draw.chance(0.3)
    each = None if ragged else draw.pick(1, 1, 2, 3)
    x, qo, kv, (heads, ckv, kpe, page) = batch_of(draw, each)
    sm_scale, out_scale = draw.pick(0.1, 0.0, -0.05), draw.pick(1.0, 0.5, -2.0)
    sinks, base_e = sinks_of(draw, heads), draw.chance(0.3)
    query = draw.laid(x.q)
    if not ragged:
        query = query.unflatten(0, (len(kv), each))
    given = dict(
        query=query, kv_cache=draw.pick(x.cache, x.cache.unsqueeze(1), placed(draw, x.cache)),
        workspace_buffer=workspace(draw), qk_nope_head_dim=128, kv_lora_rank=ckv, qk_rope_head_dim=kpe,
        block_tables=x.blocks(draw.pick(0, 2)).to(draw.pick(torch.int32, torch.int64)), seq_lens=counts(draw, kv),
        max_seq_len=max(kv), bmm1_scale=scale(draw, sm_scale), bmm2_scale=scale(draw, out_scale),
        sinks=draw.pick(sinks, [sinks]) if sinks is not None else None, backend=draw.backend, return_lse=True,
        return_lse_base="basee" if base_e else draw.pick(None, "base2"),
    )  # fmt: skip
    if ragged:
        given |= dict(cum_seq_lens_q=counts(draw, x.qo_indptr.tolist(), ((-1,),)), max_q_len=max(max(qo), 1))
    if draw.chance(0.3):
        shape = draw.pick((len(x.q), heads), tuple(query.shape[:-1]))
        given["lse"] = torch.empty(shape, dtype=torch.float32, device=draw.device)
    if draw.chance(0.4):
        dtype = draw.pick(x.q.dtype, torch.float32, torch.bfloat16)
        given["out"] = draw.laid(torch.empty(*query.shape[:-1], ckv, dtype=dtype, device=draw.device))

    def compare(result):
        out, lse = result
        for name, got in (("out", out), ("lse", lse)):
            assert given.get(name) is None or got.data_ptr() == given[name].data_ptr()
        out, lse = out.reshape(-1, heads, ckv), lse.reshape(-1, heads)
        check((out, lse), x, sm_scale, base_e, out_scale, causal=each != 1, sinks=sinks)

    return Call(trtllm_batch_decode_with_kv_cache_mla, given, compare)


def chosen_keys(draw):
    """Sparse attention: each query names its keys."""
    x, qo, kv, (heads, ckv, kpe, page) = batch_of(draw, draw.pick(1, 2))
    each = qo[0]
    dim, tokens, top_k = ckv + kpe, x.cache.shape[0] * page, draw.pick(1, 7, 64)
    # Every FP8 value is one of float16.
    keys = torch.cat([part.to(x.q.dtype) for part in x.keys])
    # Places of the keys in the cache.
    starts = x.kv_indptr.tolist()
    places = [int(x.kv_indices[starts[i] + j // page]) * page + j % page for i, n in enumerate(kv) for j in range(n)]
    picked = torch.randint(len(places), (len(x.q), top_k)) if places else torch.full((len(x.q), top_k), -1)
    if places:
        picked[torch.rand(len(x.q), top_k) < draw.pick(0.0, 0.3)] = -1
    at = torch.tensor(places or [0])[picked.clamp(min=0)].masked_fill(picked < 0, -1)
    lens = torch.randint(top_k + 1, (len(x.q),)) if draw.chance() else None
    sm_scale, sinks, base_e = draw.pick(0.1, -0.05), sinks_of(draw, heads), draw.chance(0.3)
    shape = draw.pick((len(kv), each, top_k), (len(x.q), top_k))
    given = dict(
        query=draw.laid(x.q).unflatten(0, (len(kv), each)), kv_cache=x.cache, workspace_buffer=workspace(draw),
        qk_nope_head_dim=128, kv_lora_rank=ckv, qk_rope_head_dim=kpe,
        block_tables=at.view(shape).to(draw.device, draw.pick(torch.int32, torch.int64)), seq_lens=counts(draw, kv),
        max_seq_len=max(kv), sparse_mla_top_k=top_k, bmm1_scale=scale(draw, sm_scale), sinks=sinks,
        sparse_mla_top_k_lens=None if lens is None else counts(draw, lens.tolist()), backend=draw.backend,
        return_lse=True, return_lse_base="basee" if base_e else "base2",
    )  # fmt: skip

    def compare(result):
        out, lse = result
        compute = x.q.dtype
        found = {dtype: [] for dtype in (torch.float64, compute, torch.float32)}
        for row, mine in enumerate(picked):
            mine = mine[: top_k if lens is None else int(lens[row])]
            rows = keys[mine[mine >= 0].to(keys.device)]
            for dtype, parts in found.items():
                parts.append(attend(x.q[row, None], rows, ckv, sm_scale, dtype, sinks=sinks))
        outs = {dtype: [torch.cat(part) for part in zip(*parts)] for dtype, parts in found.items()}
        unit = 1.0 if base_e else LOG2E
        assert_close(out.reshape(-1, heads, ckv), outs[compute][0].to(out.dtype), outs[torch.float64][0], "out")
        assert_close(lse.reshape(-1, heads), outs[torch.float32][1] * unit, outs[torch.float64][1] * unit, "lse")

    return Call(trtllm_batch_decode_with_kv_cache_mla, given, compare)


FAMILIES = (wrapper, trtllm, chosen_keys)
