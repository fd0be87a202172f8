"""Random calls of what is made of several attentions: prefill beside decode, one work list for both, shared prefixes,
and masks of blocks."""

import math

import torch

import flashinfer
from flashinfer.testing import generate
from flashinfer.testing.fuzz import PAGE_SIZES, Call
from tests.fuzz.attend import batch_of, names_of, options_of
from tests.fuzz.wrappers import Results, Scales, cache_of, narrow_keys, table, workspace
from tests.ops.attention import cases, oracle
from tests.ops.attention.oracle import Extras, Options

POD, BATCH_POD = flashinfer.PODWithPagedKVCacheWrapper, flashinfer.BatchPODWithPagedKVCacheWrapper


def beside(draw, x, kv_lens, qo_lens=None):
    """Another batch of the same heads, head_dim and dtypes."""
    qo = [1] * len(kv_lens) if qo_lens is None else qo_lens
    return generate.ragged_batch(
        qo, kv_lens, x.q.shape[1], x.k.shape[1], x.q.shape[2], dtype=x.q.dtype, kv_dtype=x.k.dtype, device=draw.device
    )


def positions_of(draw, dim):
    o = options_of(draw, dim)
    o.logits_soft_cap = None
    return o


def pod(draw):
    x, _, _ = batch_of(draw, 1)
    x = narrow_keys(draw, x)
    y = beside(draw, x, [draw.pick(1, 5, 17, 40) for _ in range(draw.pick(1, 3))])
    layout, page = draw.pick("NHD", "HND"), draw.pick(*PAGE_SIZES)
    pages = generate.paged(y, page, layout)
    p, d = positions_of(draw, x.q.shape[2]), positions_of(draw, x.q.shape[2])
    d.causal = False
    scales = Scales(draw, x.q.shape[1], x.k.shape[1])
    wrapper = POD(workspace(draw), layout)
    layout_p = draw.pick("NHD", "HND")
    k, v = (t.transpose(0, 1).contiguous() if layout_p == "HND" else t for t in (x.k, x.v))
    mask, masks = None, []
    if draw.chance(0.2):
        mask = torch.rand(len(x.q), len(x.k), device=draw.device) < 0.7
        masks = [mask]
    # What run() does not say is as planned.
    planned = dict(pos_encoding_mode=d.pos_encoding_mode, window_left=d.window_left, sm_scale=d.sm_scale,
                   rope_scale=d.rope_scale, rope_theta=d.rope_theta)  # fmt: skip
    at_run = {}
    if draw.chance(0.3):
        at_run = {f"{name}_d": value for name, value in planned.items()}
        # A default leaves what was planned.
        planned = {name: None if name in ("sm_scale", "rope_scale", "rope_theta") else default
                   for name, default in zip(planned, ("NONE", -1, None, None, None))}  # fmt: skip
    run = dict(
        q_p=draw.laid(x.q), k_p=k, v_p=v, q_d=draw.laid(y.q), paged_kv_cache_d=cache_of(draw, pages),
        causal_p=p.causal, kv_layout_p=layout_p, pos_encoding_mode_p=p.pos_encoding_mode, sm_scale_p=p.sm_scale,
        window_left_p=p.window_left, rope_scale_p=p.rope_scale, rope_theta_p=p.rope_theta, return_lse_p=True,
        return_lse_d=True, kv_layout_d=layout, **at_run, **scales.given,
    )  # fmt: skip
    if mask is not None:
        packed = generate.pack_mask(mask.flatten(), [len(x.q)], [len(x.k)])[0]
        run |= draw.pick(dict(custom_mask_p=mask), dict(packed_custom_mask_p=packed))
    given = dict(
        indptr=table(draw, pages.indptr), indices=table(draw, pages.indices),
        last_page_len=table(draw, pages.last_page_len), num_qo_heads=x.q.shape[1], num_kv_heads=x.k.shape[1],
        head_dim=x.q.shape[2], page_size=page, q_data_type=x.q.dtype, kv_data_type=x.k.dtype, **planned,
    )  # fmt: skip

    def attend(**arguments):
        wrapper.plan(**{name: arguments[name] for name in given})
        return wrapper.run(**{name: arguments[name] for name in run})

    def check(result):
        cases.check(result[0], scales.truth(x), p, Extras(masks=masks), x.q.dtype)
        cases.check(result[1], scales.truth(y), d, None, x.q.dtype)

    return Call(attend, given | run, check, names_of(POD) + ("scale_q", "q_scale", "k", "q"))


def batch_pod(draw):
    x, qo, kv = batch_of(draw, draw.pick(1, 2))
    x = narrow_keys(draw, x)
    lens = [draw.pick(0, 1, 5, 17, 40) for _ in range(draw.pick(1, 3))]
    several = draw.chance(0.2)
    y = beside(draw, x, lens, [draw.pick(0, 1, 2) for _ in lens] if several else None)
    layout, page = draw.pick("NHD", "HND"), draw.pick(*PAGE_SIZES)
    # One cache: the pages of both batches.
    both = generate.Ragged(
        torch.cat((x.q, y.q)), *(torch.cat((a.float(), b.float())).to(a.dtype) for a, b in ((x.k, y.k), (x.v, y.v))),
        generate.indptr(x.qo_indptr.diff().tolist() + y.qo_indptr.diff().tolist(), draw.device),
        generate.indptr(kv + lens, draw.device),
    )  # fmt: skip
    pages = generate.paged(both, page, layout)
    cut = len(kv)
    ends = pages.indptr.tolist()
    first = int(ends[cut])
    tables = [
        (x.qo_indptr, pages.indptr[: cut + 1], pages.indices[:first], pages.last_page_len[:cut]),
        (y.qo_indptr, pages.indptr[cut:] - first, pages.indices[first:], pages.last_page_len[cut:]),
    ]
    cache = cache_of(draw, pages)
    other = cache if draw.chance(0.7) else tuple(t.clone() for t in pages.caches)
    p = positions_of(draw, x.q.shape[2])
    d = Options(**{**p.as_kwargs(), "causal": False})
    scales = Scales(draw, x.q.shape[1], x.k.shape[1])
    wrapper = BATCH_POD(workspace(draw), layout)
    names = ("qo_indptr", "kv_indptr", "kv_indices", "last_page_len")
    given = {f"{name}_{part}": table(draw, t) for part, of in zip("pd", tables) for name, t in zip(names, of)}
    given |= dict(
        num_qo_heads=x.q.shape[1], num_kv_heads=x.k.shape[1], head_dim=x.q.shape[2], page_size=page,
        q_data_type=x.q.dtype, kv_data_type=x.k.dtype, pos_encoding_mode=p.pos_encoding_mode, window_left=p.window_left,
        sm_scale=p.sm_scale, rope_scale=p.rope_scale, rope_theta=p.rope_theta,
    )  # fmt: skip
    mask, masks = None, []
    if draw.chance(0.2):
        mask = generate.random_mask(qo, kv, device=draw.device)
        masks = [part.view(a, b) for part, a, b in zip(mask.split([a * b for a, b in zip(qo, kv)]), qo, kv)]
    run = dict(q_p=draw.laid(x.q), paged_kv_cache_p=cache, q_d=draw.laid(y.q), paged_kv_cache_d=other,
               causal_p=p.causal, return_lse=True, **scales.given)  # fmt: skip
    if mask is not None:
        run |= draw.pick(dict(custom_mask_p=mask), dict(packed_custom_mask_p=generate.pack_mask(mask, qo, kv)[0]))
    before = draw.pick(None, None, dict(causal_p=not p.causal), dict(custom_mask_p=None))

    def attend(**arguments):
        wrapper.plan(**{name: arguments[name] for name in given})
        if before is not None:
            plain = {name: value for name, value in run.items() if "mask" not in name}
            wrapper.run(**plain | before)
        return wrapper.run(**{name: arguments[name] for name in run})

    def check(result):
        cases.check(result[0], scales.truth(x), p, Extras(masks=masks), x.q.dtype)
        cases.check(result[1], scales.truth(y), d, None, x.q.dtype)

    return Call(attend, given | run, check, names_of(BATCH_POD))


def holistic(draw):
    """BatchAttention."""
    x, qo, kv = batch_of(draw, draw.pick(0, 1, 3))
    x = narrow_keys(draw, x)
    rows, heads, dim = x.q.shape
    layout, page = draw.pick("NHD", "HND"), draw.pick(*PAGE_SIZES)
    pages = generate.paged(x, page, layout)
    o = Options(causal=draw.chance(), sm_scale=draw.pick(None, 0.1, -0.2), logits_soft_cap=draw.pick(None, 0.0, 5.0))
    scales = Scales(draw, heads, x.k.shape[1])
    scales.given.pop("q_scale", None)
    scales.factors.pop("q_scale", None)
    results = Results(draw, rows, heads, dim, x.q.dtype, ("NH",))
    results.given.pop("return_lse")
    wrapper = flashinfer.BatchAttention(layout, draw.device)
    given = dict(
        qo_indptr=table(draw, x.qo_indptr), kv_indptr=table(draw, pages.indptr), kv_indices=table(draw, pages.indices),
        kv_len_arr=table(draw, x.kv_indptr.diff()), num_qo_heads=heads, num_kv_heads=x.k.shape[1], head_dim_qk=dim,
        head_dim_vo=draw.pick(None, dim), page_size=page, q_data_type=x.q.dtype, kv_data_type=x.k.dtype,
        causal=o.causal, sm_scale=o.sm_scale, logits_soft_cap=o.logits_soft_cap,
    )  # fmt: skip
    run = dict(q=draw.laid(x.q), kv_cache=cache_of(draw, pages), **scales.given, **results.given)
    changed, at_run = draw.pick(None, None, 3.0, 0.0), {}
    if changed is not None:
        at_run["logits_soft_cap"] = changed
        o.logits_soft_cap = changed or o.logits_soft_cap
    before = draw.pick(None, 7.0)

    def attend(**arguments):
        wrapper.plan(**{name: arguments[name] for name in given})
        if before:
            wrapper.run(x.q, run["kv_cache"], logits_soft_cap=before)
        return wrapper.run(**{name: arguments[name] for name in run}, **at_run)

    def check(result):
        cases.check(results.plain(result), scales.truth(x), o, None, x.q.dtype)

    shown = dict(before=before, at_run=at_run)
    return Call(attend, given | run | shown, check, names_of(flashinfer.BatchAttention))


def sink_wrapper(draw):
    x, qo, kv = batch_of(draw, draw.pick(1, 3))
    rows, heads, dim = x.q.shape
    layout, page = draw.pick("NHD", "HND"), draw.pick(*PAGE_SIZES)
    pages = generate.paged(x, page, layout)
    o = Options(causal=draw.chance(), window_left=draw.pick(-1, 0, 7), sm_scale=draw.pick(None, 0.1))
    sinks = torch.randn(heads, device=draw.device) * 3
    at_run = draw.pick(None, 0.3)
    kind = flashinfer.BatchAttentionWithAttentionSinkWrapper
    made = dict(q_data_type=x.q.dtype, kv_data_type=x.k.dtype, head_dim_qk=dim, head_dim_vo=dim,
                window_left=o.window_left, backend=draw.backend)  # fmt: skip
    wrapper = kind(workspace(draw), layout, **made)
    given = dict(
        qo_indptr=table(draw, x.qo_indptr), paged_kv_indptr=table(draw, pages.indptr),
        paged_kv_indices=table(draw, pages.indices), paged_kv_last_page_len=table(draw, pages.last_page_len),
        num_qo_heads=heads, num_kv_heads=x.k.shape[1], head_dim_qk=dim, page_size=page, causal=o.causal,
        sm_scale=o.sm_scale,
    )  # fmt: skip
    results = Results(draw, rows, heads, dim, x.q.dtype)
    cache = cache_of(draw, pages)

    def attend(**arguments):
        wrapper.plan(**{name: arguments[name] for name in given})
        positional = (sinks,) if at_run is None else (sinks, at_run)
        return wrapper.run(x.q, cache, *positional, **results.given)

    if at_run is not None:
        o.sm_scale = at_run

    def check(result):
        cases.check(results.plain(result), x, o, Extras(sinks=sinks))

    return Call(attend, given | results.given | made, check, names_of(kind))


def shared_prefix(draw):
    """Requests whose keys begin with the same ones."""
    decode = draw.chance()
    x, qo, kv = batch_of(draw, draw.pick(1, 3), decode=decode)
    rows, heads, dim = x.q.shape
    shared = draw.pick(0, 1, 17, 65)
    prefix = generate.ragged_batch([0], [shared], heads, x.k.shape[1], dim, dtype=x.q.dtype, device=draw.device)
    layout, page = draw.pick("NHD", "HND"), draw.pick(*PAGE_SIZES)
    pages = generate.paged(x, page, layout)
    causal, scale = draw.chance(), draw.pick(None, 0.1)
    k, v = (draw.laid(t.transpose(0, 1).contiguous() if layout == "HND" else t) for t in (prefix.k, prefix.v))
    tables = [table(draw, t) for t in (pages.indptr, pages.indices, pages.last_page_len)]
    sizes = heads, x.k.shape[1], dim, page
    cache, q = cache_of(draw, pages), draw.laid(x.q)
    if decode:
        wrapper = flashinfer.BatchDecodeWithSharedPrefixPagedKVCacheWrapper(workspace(draw), layout)
        causal = False
    else:
        wrapper = flashinfer.BatchPrefillWithSharedPrefixPagedKVCacheWrapper(workspace(draw), layout)

    def attend(**arguments):
        if decode:
            wrapper.begin_forward(*tables, *sizes, x.q.dtype)
            return wrapper.forward(q, k, v, cache)
        wrapper.begin_forward(table(draw, x.qo_indptr), *tables, *sizes)
        return wrapper.forward(q, k, v, cache, causal=causal, sm_scale=scale)

    if decode:
        scale = None

    def check(result):
        outs = {}
        for dtype in (x.q.dtype, torch.float64):
            parts = [torch.zeros(0, heads, dim, dtype=dtype, device=draw.device)]
            for i in range(len(kv)):
                rq, rk, rv = x.request(i)
                mask = torch.ones(len(rq), shared + len(rk), dtype=torch.bool, device=draw.device)
                if causal:
                    mask[:, shared:] = torch.ones(len(rq), len(rk), device=draw.device).tril(len(rk) - len(rq)).bool()
                keys, values = torch.cat((prefix.k, rk)), torch.cat((prefix.v, rv))
                parts.append(oracle.request(rq, keys, values, Options(sm_scale=scale), dtype, mask)[0])
            outs[dtype] = torch.cat(parts)
        cases.assert_close(result, outs[x.q.dtype], outs[torch.float64])

    shown = dict(q=q, k=k, v=v, cache=cache, tables=tables, sizes=sizes, causal=causal, scale=scale, decode=decode)
    return Call(attend, shown, check, ("unique_kv_cache", "k_shared", "v_shared"))


def blocks(draw):
    """BlockSparseAttentionWrapper."""
    R, C = draw.pick(1, 3, 16), draw.pick(1, 4, 16, 24)
    M, N = draw.integer(1, 40), C * draw.integer(1, 6)
    heads, kv_heads = draw.pick((4, 2), (2, 2), (6, 2))
    dim, dtype = draw.pick(16, 64), draw.half()
    x = generate.ragged_batch([M], [N], heads, kv_heads, dim, dtype=dtype, device=draw.device)
    count = -(-M // R)
    per_head = draw.chance(0.3)
    shape = (draw.pick(kv_heads, heads),) if per_head else ()
    chosen = torch.rand(*shape, count, N // C) < draw.pick(0.0, 0.3, 0.8, 1.0)
    if per_head and shape[0] == heads:
        chosen = chosen[:: heads // kv_heads].repeat_interleave(heads // kv_heads, 0)
    o = Options(sm_scale=draw.pick(None, 0.1), logits_soft_cap=draw.pick(None, 2.0))
    of_head = chosen if per_head else chosen[None].expand(kv_heads, -1, -1)
    of_head = of_head.repeat_interleave(heads // of_head.shape[0], 0)
    seen = of_head.repeat_interleave(R, 1)[:, :M].repeat_interleave(C, 2)
    row, key = torch.arange(M)[:, None], torch.arange(N)
    causal = draw.chance(0.4)
    given = dict(M=M, N=N, R=R, C=C, num_qo_heads=heads, num_kv_heads=kv_heads, head_dim=dim, sm_scale=o.sm_scale,
                 logits_soft_cap=o.logits_soft_cap, q_data_type=dtype, kv_data_type=draw.pick(None, dtype),
                 o_data_type=draw.pick(dtype, torch.float32), causal=causal)  # fmt: skip
    if per_head or draw.chance(0.3):
        given |= dict(indptr=None, indices=None, block_mask=chosen.to(draw.device))
        if causal:
            seen = seen & (key <= row + N - M)
    else:
        rows, columns = chosen.nonzero(as_tuple=True)
        indptr = generate.indptr(chosen.sum(1).tolist())
        given |= dict(indptr=table(draw, indptr), indices=table(draw, columns.int()))
        if draw.chance(0.4):
            mask = torch.rand(len(columns), R, C) < 0.6
            inner = torch.zeros(count, R, N // C, C, dtype=torch.bool)
            inner[rows, :, columns] = mask
            seen = seen & inner.view(count * R, N)[:M]
            given["mask"] = mask.to(draw.device)
        elif causal:
            seen = seen & (key <= row + N - M)
    wrapper = flashinfer.BlockSparseAttentionWrapper(workspace(draw), backend=draw.backend)
    results = Results(draw, M, heads, dim, given["o_data_type"], ("NH",))
    scales = Scales(draw, heads, kv_heads)
    if per_head:
        scales.given = {name: value for name, value in scales.given.items() if not isinstance(value, torch.Tensor)}
        scales.factors = {name: value for name, value in scales.factors.items() if name in scales.given}
    at_plan = draw.chance(0.3)
    if at_plan:
        given |= scales.given
    else:
        results.given |= {f"scale_{name[0]}": value for name, value in scales.given.items()}
    q, k, v = (draw.laid(t) for t in (x.q, x.k, x.v))

    def attend(**arguments):
        wrapper.plan(**{name: arguments[name] for name in given})
        return wrapper.run(q, k, v, **results.given)

    def check(result):
        check_heads(results.plain(result), scales.truth(x), o, seen.to(draw.device), dtype)

    shown = given | dict(q=q, k=k, v=v) | results.given
    return Call(attend, shown, check, names_of(flashinfer.BlockSparseAttentionWrapper))


def check_heads(result, x, o, seen, dtype):
    """Of one request whose query heads see keys of their own, `seen` [heads, rows, keys]."""
    out, lse = result
    heads, group = x.q.shape[1], x.q.shape[1] // x.k.shape[1]
    for h in range(heads):
        k, v = (t[:, h // group, None] for t in (x.k, x.v))
        one = generate.Ragged(x.q[:, h : h + 1], k, v, x.qo_indptr, x.kv_indptr)
        cases.check((out[:, h : h + 1], lse[:, h : h + 1]), one, o, Extras(masks=[seen[h]]), dtype)


def variable_blocks(draw):
    """VariableBlockSparseAttentionWrapper."""
    heads, kv_heads = draw.pick((4, 2), (2, 2), (6, 2), (3, 1))
    rows, columns = draw.integer(1, 4), draw.integer(1, 5)
    step = draw.pick(1, 1, 8, 16)
    M, N = draw.integer(1, 30), step * draw.integer(1, 8)

    def parts(total, count, unit=1):
        cuts = sorted(draw.integer(0, total // unit) for _ in range(count - 1))
        return [(b - a) * unit for a, b in zip([0, *cuts], [*cuts, total // unit])]

    row_sizes = torch.tensor([parts(M, rows) for _ in range(kv_heads)])
    column_sizes = torch.tensor([parts(N, columns, step) for _ in range(kv_heads)])
    chosen = torch.rand(kv_heads, rows, columns) < draw.pick(0.0, 0.5, 1.0)
    dim, dtype = draw.pick(16, 64), draw.half()
    x = generate.ragged_batch([M], [N], heads, kv_heads, dim, dtype=dtype, device=draw.device)
    seen = torch.stack([
        c.repeat_interleave(r, 0).repeat_interleave(s, 1) for c, r, s in zip(chosen, row_sizes, column_sizes)
    ]).repeat_interleave(heads // kv_heads, 0)  # fmt: skip
    o, causal = Options(sm_scale=draw.pick(None, 0.1), logits_soft_cap=draw.pick(None, 2.0)), draw.chance(0.4)
    if causal:
        seen = seen & (torch.arange(N) <= torch.arange(M)[:, None] + N - M)
    wrapper = flashinfer.VariableBlockSparseAttentionWrapper(workspace(draw), backend=draw.backend)
    given = dict(
        block_mask_map=chosen.to(draw.device), block_row_sz=row_sizes.to(draw.pick(torch.int32, torch.int64)),
        block_col_sz=column_sizes.to(draw.pick(torch.int32, torch.int64)), num_qo_heads=heads, num_kv_heads=kv_heads,
        head_dim=dim, causal=causal, sm_scale=o.sm_scale, logits_soft_cap=o.logits_soft_cap, q_data_type=dtype,
        kv_data_type=draw.pick(None, dtype),
    )  # fmt: skip
    q, k, v = (t.transpose(0, 1) for t in (x.q, x.k, x.v))
    q, k, v = (draw.laid(t.contiguous() if draw.chance(0.7) else t) for t in (q, k, v))
    results = dict(return_lse=True, lse_base=draw.pick("log2", "ln"))
    if draw.chance(0.3):
        results["out"] = draw.laid(torch.empty(heads, M, dim, dtype=dtype, device=draw.device))
    if draw.chance(0.3):
        results["lse"] = torch.empty(heads, M, dtype=torch.float32, device=draw.device)

    def attend(**arguments):
        wrapper.plan(**{name: arguments[name] for name in given})
        return wrapper.run(q, k, v, **results)

    def check(result):
        out, lse = result
        for name, got in (("out", out), ("lse", lse)):
            assert name not in results or got.data_ptr() == results[name].data_ptr()
        lse = lse / math.log(2.0) if results["lse_base"] == "ln" else lse
        check_heads((out.transpose(0, 1), lse.t()), x, o, seen.to(draw.device), dtype)

    shown = given | dict(q=q, k=k, v=v) | results
    return Call(attend, shown, check, names_of(flashinfer.VariableBlockSparseAttentionWrapper))


FAMILIES = (pod, batch_pod, holistic, sink_wrapper, shared_prefix, blocks, variable_blocks)
