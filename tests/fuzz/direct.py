"""Random calls of attention without a plan, as engines make them: block tables or rows, with lengths on the device."""

import math

import torch

import flashinfer
from flashinfer.cudnn import cudnn_batch_decode_with_kv_cache, cudnn_batch_prefill_with_kv_cache
from flashinfer.decode import trtllm_batch_decode_with_kv_cache, xqa_batch_decode_with_kv_cache
from flashinfer.prefill import (
    trtllm_batch_context_with_kv_cache, trtllm_fmha_v2_prefill, trtllm_ragged_attention_deepseek,
)
from flashinfer.testing import generate
from flashinfer.testing.fuzz import PAGE_SIZES, Call
from tests.fuzz.attend import batch_of
from tests.fuzz.wrappers import cache_of, narrow_keys, placed, sinks_of, workspace
from tests.ops.attention import cases
from tests.ops.attention.oracle import Extras, Options

HALVES = torch.float16, torch.bfloat16


def block_tables(draw, pages):
    """[batch, max_pages] page ids, with ids of no page behind each request's."""
    counts = pages.indptr.diff().tolist()
    wide = max(counts, default=0) + draw.pick(0, 1, 3)
    table = torch.full((len(counts), wide), draw.pick(-1, 1 << 20, 0), dtype=torch.int32, device=draw.device)
    for row, ids in zip(table, pages.indices.split(counts)):
        row[: len(ids)] = ids
    if draw.chance(0.2):
        table = torch.cat((table, table), 1)[:, :wide]
    return table.to(draw.pick(torch.int32, torch.int32, torch.int64))


def counts(draw, values, shapes=((-1,), (-1, 1), (-1, 1, 1, 1))):
    """Lengths or offsets in the types and shapes that engines have them in."""
    x = torch.tensor(values, dtype=draw.pick(torch.int32, torch.int32, torch.int64), device=draw.device)
    return x.view(draw.pick(*shapes)) if x.numel() else x


def uniform(draw, x, each):
    """The batch with `each` queries of every request, made of those that it has."""
    batch = len(x.kv_indptr) - 1
    heads, dim = x.q.shape[1:]
    q = generate.randn(batch * each, heads, dim, dtype=x.q.dtype, device=draw.device)
    return generate.Ragged(q, x.k, x.v, generate.indptr([each] * batch, draw.device), x.kv_indptr)


def scale(draw, value):
    return value if draw.chance() else torch.tensor([value], dtype=torch.float32, device=draw.device)


class Asked:
    """A batch, what changes its mathematics, and where results go."""

    def __init__(self, draw, each=None, capped=False, narrow=True):
        x, self.qo, self.kv = batch_of(draw, draw.pick(1, 2, 3))
        if each is not None:
            x = uniform(draw, x, each)
            self.qo = [each] * len(self.kv)
        self.x = narrow_keys(draw, x) if narrow else x
        self.rows, self.heads, self.dim = self.x.q.shape
        self.options = Options(causal=each is None or each > 1, sm_scale=draw.pick(0.1, 0.0, -0.2, self.dim**-0.5),
                               window_left=draw.pick(-1, -1, 0, 1, 7, 100))  # fmt: skip
        if capped:
            self.options.logits_soft_cap = draw.pick(None, None, 0.5, 30.0)
        self.sinks, self.v_scale = sinks_of(draw, self.heads), draw.pick(1.0, 0.5, -2.0)
        self.q = placed(draw, self.x.q)

    def output(self, draw, dtypes=(*HALVES, torch.float32)):
        """out, or out_dtype, or neither."""
        self.o_dtype = draw.pick(None, None, *dtypes)
        if self.o_dtype is None:
            return {}
        if draw.chance():
            return dict(out_dtype=draw.pick(self.o_dtype, str(self.o_dtype).removeprefix("torch.")))
        return dict(out=draw.laid(torch.empty(self.rows, self.heads, self.dim, dtype=self.o_dtype, device=draw.device)))

    def log_sum_exp(self, draw):
        given = dict(return_lse=True)
        if draw.chance():
            given["lse"] = torch.empty(self.rows, self.heads, dtype=torch.float32, device=draw.device)
        return given

    def check(self, given, ln=False, masks=()):
        """Of (out, lse), or of out alone; with `ln` the log-sum-exp is a natural one."""
        extras = Extras(masks=list(masks), sinks=self.sinks, v_scale=self.v_scale)

        def check(result):
            out, lse = result if isinstance(result, tuple) else (result, None)
            if given.get("out") is not None:
                assert out.data_ptr() == given["out"].data_ptr()
            out = out.reshape(self.rows, self.heads, self.dim)
            if lse is None:
                _, lse = cases.oracle.batch(self.x, self.options, torch.float32, extras)
            else:
                lse = lse / math.log(2.0) if ln else lse
            cases.check((out, lse), self.x, self.options, extras, self.x.q.dtype)

        return check


def trtllm_decode(draw):
    ragged = draw.chance(0.3)
    each = None if ragged else draw.pick(1, 1, 2, 4)
    a = Asked(draw, each)
    layout = draw.pick("NHD", "HND")
    pages = generate.paged(a.x, draw.pick(*PAGE_SIZES), layout)
    sinks = a.sinks
    if sinks is not None:
        sinks = draw.pick(sinks, [sinks], sinks.view(a.x.k.shape[1], -1))
    bmm1 = dict(bmm1_scale=scale(draw, a.options.sm_scale))
    if draw.chance(0.2):
        log2 = torch.tensor([a.options.sm_scale / math.log(2.0)], dtype=torch.float32, device=draw.device)
        bmm1 = dict(bmm1_scale_log2=log2)
    given = dict(
        query=a.q, kv_cache=cache_of(draw, pages), workspace_buffer=workspace(draw),
        block_tables=block_tables(draw, pages), seq_lens=counts(draw, a.kv), max_seq_len=max(a.kv),
        bmm2_scale=scale(draw, a.v_scale), sinks=sinks, window_left=a.options.window_left, kv_layout=layout,
        backend=draw.backend, **bmm1, **a.output(draw),
        **a.log_sum_exp(draw),
    )  # fmt: skip
    if ragged:
        given |= dict(cum_seq_lens_q=counts(draw, a.x.qo_indptr.tolist(), ((-1,),)), max_q_len=max(max(a.qo), 1))
    else:
        given["q_len_per_req"] = draw.pick(each, None) if a.rows else each
    return Call(trtllm_batch_decode_with_kv_cache, given, a.check(given))


def xqa_decode(draw):
    each = draw.pick(1, 1, 3)
    a = Asked(draw, each)
    layout = draw.pick("NHD", "HND")
    pages = generate.paged(a.x, draw.pick(*PAGE_SIZES), layout)
    output = a.output(draw)
    output.pop("out_dtype", None)
    given = dict(
        query=a.q, kv_cache=cache_of(draw, pages), workspace_buffer=workspace(draw),
        block_tables=block_tables(draw, pages), seq_lens=counts(draw, a.kv), max_seq_len=max(a.kv),
        bmm1_scale=scale(draw, a.options.sm_scale), bmm2_scale=scale(draw, a.v_scale), sinks=a.sinks,
        window_left=a.options.window_left, kv_layout=layout,
        q_len_per_req=each, **output,
    )  # fmt: skip
    return Call(xqa_batch_decode_with_kv_cache, given, a.check(given))


def xqa(draw):
    each = draw.pick(1, 1, 3)
    a = Asked(draw, each)
    layout, page = draw.pick("NHD", "HND"), draw.pick(*PAGE_SIZES)
    pages = generate.paged(a.x, page, layout)
    q_scale, kv_scale, rcp = draw.pick(1.0, 0.5, 2.0), draw.pick(1.0, 0.5), draw.pick(1.0, 0.25)
    a.options.sm_scale, a.v_scale = q_scale * kv_scale * a.dim**-0.5, kv_scale * rcp
    shape = (len(a.kv), 1, a.heads, a.dim) if each == 1 and draw.chance() else (len(a.kv), 1, each, a.heads, a.dim)
    output = torch.empty(shape, dtype=draw.pick(a.x.q.dtype, torch.float32), device=draw.device)
    caches = [draw.laid(t) if t.dtype.itemsize > 1 else t for t in pages.caches]
    given = dict(
        q=draw.laid(a.x.q.view(shape)), k_cache=caches[0], v_cache=caches[1], page_table=block_tables(draw, pages),
        seq_lens=counts(draw, a.kv, ((-1,), (-1, 1))), output=draw.laid(output), workspace_buffer=workspace(draw),
        semaphores=workspace(draw), num_kv_heads=a.x.k.shape[1], page_size=page, sinks=a.sinks,
        q_scale=scale(draw, q_scale), kv_scale=scale(draw, kv_scale), sliding_win_size=a.options.window_left + 1,
        kv_layout=layout, rcp_out_scale=rcp, q_seq_len=each,
    )  # fmt: skip

    def attend(**arguments):
        flashinfer.xqa(**arguments)
        return arguments["output"]

    return Call(attend, given, a.check({}), tuple(given))


def trtllm_context(draw):
    a = Asked(draw)
    a.options.causal = draw.chance()
    layout = draw.pick("NHD", "HND")
    pages = generate.paged(a.x, draw.pick(*PAGE_SIZES), layout)
    given = dict(
        query=a.q, kv_cache=cache_of(draw, pages), workspace_buffer=workspace(draw),
        block_tables=block_tables(draw, pages), seq_lens=counts(draw, a.kv), max_q_len=max(a.qo), max_kv_len=max(a.kv),
        bmm1_scale=scale(draw, a.options.sm_scale), bmm2_scale=scale(draw, a.v_scale), batch_size=len(a.kv),
        cum_seq_lens_q=counts(draw, a.x.qo_indptr.tolist(), ((-1,),)),
        cum_seq_lens_kv=draw.pick(None, counts(draw, a.x.kv_indptr.tolist(), ((-1,),))),
        window_left=a.options.window_left, kv_layout=layout, sinks=a.sinks, causal=a.options.causal,
        backend=draw.backend if draw.backend != "auto" else "trtllm-gen", **a.output(draw), **a.log_sum_exp(draw),
    )  # fmt: skip
    return Call(trtllm_batch_context_with_kv_cache, given, a.check(given))


def trtllm_ragged(draw):
    a = Asked(draw)
    a.options.causal = draw.chance()
    output = a.output(draw)
    output.pop("out_dtype", None)
    k, v = (draw.laid(t) if t.dtype.itemsize > 1 else t for t in (a.x.k, a.x.v))
    given = dict(
        query=a.q, key=k, value=v, workspace_buffer=workspace(draw), seq_lens=counts(draw, a.kv), max_q_len=max(a.qo),
        max_kv_len=max(a.kv), bmm1_scale=scale(draw, a.options.sm_scale), bmm2_scale=scale(draw, a.v_scale),
        o_sf_scale=1.0, batch_size=len(a.kv), window_left=a.options.window_left,
        cum_seq_lens_q=counts(draw, a.x.qo_indptr.tolist(), ((-1,),)),
        cum_seq_lens_kv=draw.pick(None, counts(draw, a.x.kv_indptr.tolist(), ((-1,),))), enable_pdl=False,
        is_causal=a.options.causal, attention_sinks=a.sinks,
        backend=draw.backend if draw.backend != "auto" else "trtllm-gen", **output, **a.log_sum_exp(draw),
    )  # fmt: skip
    return Call(trtllm_ragged_attention_deepseek, given, a.check(given))


def fmha_v2(draw):
    layout = draw.pick("CONTIGUOUS_Q_KV", "SEPARATE_Q_K_V", "Q_PAGED_KV_NHD", "Q_PAGED_KV_HND")
    a = Asked(draw, capped=True)
    mask = draw.pick("causal", "sliding_window", "padding", "CAUSAL")
    a.options.causal = mask != "padding"
    a.options.pos_encoding_mode = draw.pick("NONE", "NONE", "ALIBI")
    if mask == "padding":
        a.options.window_left = -1
        a.options.causal = a.options.pos_encoding_mode == "ALIBI"
    tables, kv = {}, (a.x.k, a.x.v)
    if layout.startswith("Q_PAGED"):
        pages = generate.paged(a.x, draw.pick(*PAGE_SIZES), layout[-3:])
        tables, kv = dict(block_tables=block_tables(draw, pages)), (pages.kv_cache,)
    elif layout == "CONTIGUOUS_Q_KV":
        kv = (torch.stack(kv, 1),)
    given = dict(
        qkv=(a.q, *kv), input_layout=layout, workspace_buffer=workspace(draw), seq_lens=counts(draw, a.kv),
        max_q_len=max(a.qo), max_kv_len=max(a.kv), bmm1_scale=scale(draw, a.options.sm_scale),
        bmm2_scale=scale(draw, a.v_scale), batch_size=len(a.kv),
        cum_seq_lens_q=counts(draw, a.x.qo_indptr.tolist(), ((-1,),)),
        cum_seq_lens_kv=counts(draw, a.x.kv_indptr.tolist(), ((-1,),)), sinks=a.sinks, mask_mode=mask,
        pos_encoding_mode=draw.pick(None, "NONE", "none") if a.options.pos_encoding_mode == "NONE" else "ALIBI",
        logits_soft_cap_scale=a.options.logits_soft_cap, window_left=a.options.window_left,
        save_softmax_stats=draw.chance(), **a.output(draw), **tables,
    )  # fmt: skip
    check = a.check(given, ln=True)

    def of_stats(result):
        if isinstance(result, tuple):
            out, stats = result
            result = out, stats[..., 0] + stats[..., 1].log()
        check(result)

    return Call(trtllm_fmha_v2_prefill, given, of_stats)


def cudnn_decode(draw):
    each = draw.pick(1, 1, 2)
    a = Asked(draw, each)
    a.v_scale = 1.0
    pages = generate.paged(a.x, draw.pick(*PAGE_SIZES), "HND")
    output = a.output(draw)
    output.pop("out_dtype", None)
    caches = [draw.laid(t) if t.dtype.itemsize > 1 else t for t in pages.caches]
    offsets = [i * each for i in range(len(a.kv) + 1)]
    given = dict(
        q=a.q, k_cache=caches[0], v_cache=caches[1], scale=scale(draw, a.options.sm_scale),
        workspace_buffer=workspace(draw), max_sequence_kv=max(a.kv), actual_seq_lens_kv=counts(draw, a.kv),
        block_tables=block_tables(draw, pages), batch_offsets_q=draw.pick(None, counts(draw, offsets, ((-1,),))),
        q_len_per_req=each,
        window_left=a.options.window_left, sinks=a.sinks, **output, **a.log_sum_exp(draw),
    )  # fmt: skip
    return Call(cudnn_batch_decode_with_kv_cache, given, a.check(given))


def cudnn_prefill(draw):
    a = Asked(draw)
    a.options.causal, a.options.window_left, a.sinks = draw.chance(), -1, None
    q_scale, k_scale = draw.pick(None, 0.5), draw.pick(None, 2.0)
    factors = dict(q_scale=q_scale, k_scale=k_scale, v_scale=None if a.v_scale == 1.0 else a.v_scale)
    factors = {name: None if x is None else torch.full(draw.pick((1,), (1, 1, 1, 1)), x, device=draw.device)
               for name, x in factors.items()}  # fmt: skip
    base, units = draw.pick("log2", "ln"), draw.pick("elements", "tokens")
    output = a.output(draw)
    if "out_dtype" in output:
        output = dict(o_data_type=a.o_dtype)
    out = output.get("out")
    step = lambda row: 1 if units == "tokens" else row
    offsets = lambda indptr, row: counts(draw, [n * row for n in indptr.tolist()], ((-1,), (-1, 1, 1, 1)))
    where = {}
    if draw.chance(0.7):
        where["batch_offsets_q"] = offsets(a.x.qo_indptr, step(a.q.stride(0)))
        if draw.chance():
            where["batch_offsets_o"] = offsets(a.x.qo_indptr, step(a.heads * a.dim if out is None else out.stride(0)))
        if draw.chance(0.3):
            where["batch_offsets_stats"] = offsets(a.x.qo_indptr, step(a.heads))
    given = dict(
        q=a.q, scale=a.options.sm_scale, workspace_buffer=workspace(draw), max_token_per_sequence=max(max(a.qo), 1),
        max_sequence_kv=max(a.kv), causal=a.options.causal, actual_seq_lens_q=counts(draw, a.qo),
        actual_seq_lens_kv=counts(draw, a.kv), lse_base=base, batch_offsets_units=units, **where, **factors, **output,
        **a.log_sum_exp(draw),
    )  # fmt: skip
    if draw.chance():
        pages = generate.paged(a.x, draw.pick(*PAGE_SIZES), "HND")
        caches = [draw.laid(t) if t.dtype.itemsize > 1 else t for t in pages.caches]
        given |= dict(k_cache=caches[0], v_cache=caches[1], block_tables=block_tables(draw, pages))
    else:
        k, v = (draw.laid(t) if t.dtype.itemsize > 1 else t for t in (a.x.k, a.x.v))
        given |= dict(k_cache=k, v_cache=v)
        if draw.chance(0.7):
            given["batch_offsets_k"] = offsets(a.x.kv_indptr, step(k.stride(0)))
            if draw.chance():
                given["batch_offsets_v"] = offsets(a.x.kv_indptr, step(v.stride(0)))
    a.options.sm_scale *= (q_scale or 1.0) * (k_scale or 1.0)
    return Call(cudnn_batch_prefill_with_kv_cache, given, a.check(given, ln=base == "ln"))


def packed(draw, mask):
    """A mask [..., width] as bool, or in the bits of words."""
    kind = draw.pick(torch.bool, torch.uint8, torch.uint16, torch.uint32)
    if kind == torch.bool:
        return mask
    bits = 8 * kind.itemsize
    padded = torch.nn.functional.pad(mask.long(), (0, -mask.shape[-1] % bits)).unflatten(-1, (-1, bits))
    words = (padded << torch.arange(bits, device=mask.device)).sum(-1)
    return words.to(kind) if kind == torch.uint8 else words.to(torch.int64).to("cpu").to(kind).to(mask.device)


def drafts(draw):
    """Decode of draft tokens that see one another as a mask says."""
    ragged = draw.chance(0.3)
    each = None if ragged else draw.pick(1, 2, 5, 9)
    a = Asked(draw, each)
    a.options.causal, a.options.window_left = False, -1
    a.kv = [max(n, q) for n, q in zip(a.kv, a.qo)]
    sizes = a.heads, a.x.k.shape[1], a.dim
    a.x = generate.ragged_batch(a.qo, a.kv, *sizes, dtype=a.x.q.dtype, kv_dtype=a.x.k.dtype, device=draw.device)
    a.q, width, layout = placed(draw, a.x.q), max(max(a.qo), 1), draw.pick("NHD", "HND")
    seen = torch.rand(a.rows, width, device=draw.device) < 0.6
    masks, row = [], 0
    for n, m in zip(a.qo, a.kv):
        whole = torch.ones(n, m - n, dtype=torch.bool, device=draw.device)
        masks.append(torch.cat((whole, seen[row : row + n, :n]), 1))
        row += n
    mask = packed(draw, seen)
    if not ragged and draw.chance():
        mask = mask.view(len(a.kv), each, -1)
    pages = generate.paged(a.x, draw.pick(*PAGE_SIZES), layout)
    given = dict(
        query=a.q, kv_cache=cache_of(draw, pages), workspace_buffer=workspace(draw),
        block_tables=block_tables(draw, pages), seq_lens=counts(draw, a.kv), max_seq_len=max(a.kv), mask=mask,
        bmm1_scale=scale(draw, a.options.sm_scale), bmm2_scale=scale(draw, a.v_scale), sinks=a.sinks, kv_layout=layout,
        backend=draw.backend, **a.output(draw), **a.log_sum_exp(draw),
    )  # fmt: skip
    if ragged:
        given |= dict(cum_seq_lens_q=counts(draw, a.x.qo_indptr.tolist(), ((-1,),)), max_q_len=width)
    else:
        given["q_len_per_req"] = each
    return Call(trtllm_batch_decode_with_kv_cache, given, a.check(given, masks=masks))


def shards(draw):
    """One rank of context parallelism: it has every cp_world-th key."""
    each, world = draw.pick(1, 2, 3), draw.pick(2, 3)
    a = Asked(draw, each)
    rank, window = draw.integer(0, world - 1), a.options.window_left
    a.options.causal, a.options.window_left, a.sinks = False, -1, None
    # Keys of each request on all ranks; those of its queries are the last.
    before = [max(n, each) - each for n in a.kv]
    places = [torch.arange(rank, max(n + each, rank), world, device=draw.device) for n in before]
    a.kv = [len(at) for at in places]
    sizes = a.heads, a.x.k.shape[1], a.dim
    a.x = generate.ragged_batch(a.qo, a.kv, *sizes, dtype=a.x.q.dtype, kv_dtype=a.x.k.dtype, device=draw.device)
    a.q, layout = placed(draw, a.x.q), draw.pick("NHD", "HND")
    masks = []
    for n, at in zip(before, places):
        last = n + torch.arange(each, device=draw.device)[:, None]
        masks.append((at <= last) & ((at >= last - window) if window >= 0 else True))
    pages = generate.paged(a.x, draw.pick(*PAGE_SIZES), layout)
    given = dict(
        query=a.q, kv_cache=cache_of(draw, pages), workspace_buffer=workspace(draw),
        block_tables=block_tables(draw, pages), seq_lens=counts(draw, a.kv), max_seq_len=max(a.kv), window_left=window,
        bmm1_scale=scale(draw, a.options.sm_scale), bmm2_scale=scale(draw, a.v_scale), kv_layout=layout,
        q_len_per_req=each, backend=draw.backend, cp_world=world, cp_rank=rank,
        causal_seqlens_kv_global=counts(draw, before), **a.output(draw), **a.log_sum_exp(draw),
    )  # fmt: skip
    return Call(trtllm_batch_decode_with_kv_cache, given, a.check(given, masks=masks))


FAMILIES = (
    trtllm_decode, xqa_decode, xqa, trtllm_context, trtllm_ragged, fmha_v2, cudnn_decode, cudnn_prefill, drafts, shards,
)  # fmt: skip
