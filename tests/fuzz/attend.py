"""Random calls of attention: one request, ragged and paged batches, decode, and the merging of states."""

import inspect
import math

import torch

import flashinfer
from flashinfer.testing import generate
from flashinfer.testing.compare import assert_close
from flashinfer.testing.fuzz import HEAD_DIMS, HEADS, LENGTHS, PAGE_SIZES, Call
from tests.ops.attention import cases
from tests.ops.attention.merge.test_merge import formula as merged
from tests.ops.attention.oracle import Extras, Options


def options_of(draw, dim):
    """Arguments of attention, and for the oracle."""
    o = Options(
        causal=draw.chance(),
        window_left=draw.pick(-1, -1, 0, 1, 7, 100),
        logits_soft_cap=draw.pick(None, None, 0.5, 30.0, 1e5),
        sm_scale=draw.pick(None, None, 0.1, 0.0, -0.2, 1.0),
        pos_encoding_mode=draw.pick("NONE", "NONE", "NONE", "ALIBI", "ROPE_LLAMA" if dim % 2 == 0 else "NONE"),
    )
    if o.pos_encoding_mode == "ROPE_LLAMA":
        o.rope_scale, o.rope_theta = draw.pick((None, None), (2.0, 1e4), (1.0, 5e5))
    return o


def batch_of(draw, batch, decode=False):
    """q, k and v whose products stay within what a test can wait for."""
    heads, kv_heads = draw.pick(*HEADS)
    dim = draw.fitting(HEAD_DIMS, heads * 4)
    most = max(n for n in LENGTHS if n <= max(draw.largest // (heads * dim), 2))
    kv = draw.lengths(batch, most)
    qo = [1] * batch if decode else [draw.pick(0, 1, 2, n, min(n, 17)) for n in kv]
    qo = [n if n * heads * dim <= draw.largest else 1 for n in qo]
    x = generate.ragged_batch(qo, kv, heads, kv_heads, dim, dtype=draw.half(), device=draw.device)
    kind = draw.pick("normal", "normal", "wide", "ties", "equal")
    for t in (x.q, x.k):
        if kind == "wide":
            t.mul_(5)
        elif kind == "ties":
            t.copy_(t.round())
        elif kind == "equal":
            t.fill_(0.5)
    if x.q.numel() and draw.chance(0.1):
        x.q[draw.integer(0, len(x.q) - 1)] = math.nan
    return x, qo, kv


def masks_of(draw, qo, kv):
    """A flat mask, and one of each request; or none."""
    if draw.chance(0.75):
        return None, []
    mask = generate.random_mask(qo, kv, device=draw.device)
    return mask, [part.view(a, b) for part, a, b in zip(mask.split([a * b for a, b in zip(qo, kv)]), qo, kv)]


def checked(x, o, extras=None):
    return lambda result: cases.check(result, x, o, extras)


def names_of(wrapper):
    functions = (wrapper, wrapper.plan, wrapper.run)
    return tuple(name for function in functions for name in inspect.signature(function).parameters)


def scales_of(draw):
    return {"k_scale": draw.pick(None, 0.5, 2.0), "v_scale": draw.pick(None, 0.5, -1.5)} if draw.chance(0.3) else {}


def ragged(draw):
    x, qo, kv = batch_of(draw, draw.pick(0, 1, 3))
    o, (mask, masks) = options_of(draw, x.q.shape[2]), masks_of(draw, qo, kv)
    also = names_of(flashinfer.BatchPrefillWithRaggedKVCacheWrapper)
    arguments = dict(ragged=x, options=o, backend=draw.backend, mask=mask)
    return Call(cases.run_ragged, arguments, checked(x, o, Extras(masks=masks)), also)


def paged(draw):
    x, qo, kv = batch_of(draw, draw.pick(0, 1, 3))
    o, (mask, masks), scales = options_of(draw, x.q.shape[2]), masks_of(draw, qo, kv), scales_of(draw)
    also = names_of(flashinfer.BatchPrefillWithPagedKVCacheWrapper)
    layout = dict(page_size=draw.pick(*PAGE_SIZES), kv_layout=draw.pick("NHD", "HND"))
    arguments = dict(ragged=x, options=o, backend=draw.backend, mask=mask, run=scales) | layout
    known = {name: value for name, value in scales.items() if value is not None}
    return Call(cases.run_paged, arguments, checked(x, o, Extras(masks=masks, **known)), also)


def decode(draw):
    x, _, _ = batch_of(draw, draw.pick(0, 1, 3), decode=True)
    o, scales = options_of(draw, x.q.shape[2]), scales_of(draw)
    o.causal = False
    layout = dict(page_size=draw.pick(*PAGE_SIZES), kv_layout=draw.pick("NHD", "HND"))
    arguments = dict(ragged=x, options=o, backend=draw.backend, run=scales) | layout
    known = {name: value for name, value in scales.items() if value is not None}
    also = names_of(flashinfer.BatchDecodeWithPagedKVCacheWrapper)
    return Call(cases.run_decode, arguments, checked(x, o, Extras(**known)), also)


def single(draw):
    x, qo, kv = batch_of(draw, 1, decode=draw.chance())
    o, (mask, masks) = options_of(draw, x.q.shape[2]), masks_of(draw, qo, kv)
    q, k, v = (draw.laid(t) for t in x.request(0))
    layout = draw.pick("NHD", "HND")
    k, v = (t.transpose(0, 1).contiguous() if layout == "HND" else t for t in (k, v))
    arguments = dict(q=q, k=k, v=v, kv_layout=layout, return_lse=True)
    known = {name: draw.pick(None, None, 0.5, -2.0) for name in ("q_scale", "k_scale", "v_scale")}
    extras = {name: value for name, value in known.items() if value is not None}
    if len(q) == 1 and draw.chance():
        o.causal = False
        given = o.as_kwargs()
        given.pop("causal")

        def check(result):
            out, lse = result
            cases.check((out[None], lse[None]), x, o, Extras(**extras))

        return Call(flashinfer.single_decode_with_kv_cache, arguments | given | known | dict(q=q[0]), check)
    given = dict(custom_mask=masks[0] if masks else None, o_dtype=draw.pick(None, None, torch.float32)) | o.as_kwargs()
    if masks and draw.chance():
        given["custom_mask"], given["packed_custom_mask"] = None, generate.pack_mask(mask, qo, kv)[0]
    for name, value in known.items():
        # As tensors under one name, and as numbers under another.
        other = f"scale_{name[0]}"
        if value is not None and (name == "q_scale" or draw.chance()):
            known, given = known | {name: None}, given | {other: torch.full((1,), value, device=draw.device)}
    known.pop("q_scale")
    check = lambda result: cases.check(result, x, o, Extras(masks=masks, **extras), x.q.dtype)
    return Call(flashinfer.single_prefill_with_kv_cache, arguments | given | known, check)


def merge(draw):
    tokens, count, heads = draw.pick(0, 1, 5), draw.pick(1, 2, 3, 9), draw.pick(1, 3, 5)
    dim, dtype = draw.fitting(HEAD_DIMS, 100), draw.float()
    v = draw.values(tokens, count, heads, dim, dtype=dtype, kinds=("normal", "wide"))
    s = draw.values(tokens, count, heads, dtype=torch.float32, kinds=("normal", "wide", "ties"))
    empty = torch.rand(tokens, count, heads, device=draw.device) < draw.pick(0.0, 0.3, 1.0)
    s[empty], v[empty] = -math.inf, math.nan

    def check(result):
        (truth, truth_lse), (same, same_lse) = merged(v, s, torch.float64), merged(v, s, torch.float32)
        assert_close(result[0], same.to(dtype), truth, "v")
        assert_close(result[1], same_lse, truth_lse, "s")

    if count == 2 and draw.chance():
        a, b = ((draw.laid(v[:, i].contiguous()), s[:, i].contiguous()) for i in (0, 1))
        return Call(flashinfer.merge_state, dict(v_a=a[0], s_a=a[1], v_b=b[0], s_b=b[1]), check)
    return Call(flashinfer.merge_states, dict(v=draw.laid(v), s=s), check)


FAMILIES = (single, ragged, paged, decode, merge)
