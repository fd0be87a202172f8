"""Arguments of the engine functions that few callers send, against attention in float64 written from its definition."""

import math

import pytest
import torch

from flashinfer.cudnn import cudnn_batch_decode_with_kv_cache, cudnn_batch_prefill_with_kv_cache
from flashinfer.decode import trtllm_batch_decode_with_kv_cache, xqa_batch_decode_with_kv_cache
from flashinfer.prefill import (
    fmha_v2_prefill_deepseek, trtllm_batch_context_with_kv_cache, trtllm_fmha_v2_prefill,
    trtllm_ragged_attention_deepseek, trtllm_sage_attention_quantize,
)  # fmt: skip
from flashinfer.testing import generate
from flashinfer.testing.compare import assert_bitwise, assert_close
from flashinfer.utils import FP4Tensor
from flashinfer.xqa import xqa
from tests.ops.attention.cases import check
from tests.ops.attention.oracle import Extras, Options
from tests.ops.attention.test_direct import lens
from tests.ops.attention.test_engines import HALF, KV, SCRATCH, batch, close, decode, paged
from tests.ops.quantize import truth as formats

E4M3 = torch.float8_e4m3fn
LN2 = math.log(2.0)


@pytest.mark.parametrize("context", ("meta", "bfloat16"))
def test_callers_defaults(context, device):
    """Engines load models under a default device and a default dtype: nothing here is allocated by them."""
    x, y = batch([1] * 6, device), batch([3, 0, 5], device, [5, 0, 9])
    cache, tables, seq_lens = paged(x)
    o = Options(causal=True)

    def calls():
        yield decode(x, cache, tables, seq_lens), x, Options()
        yield decode(x, cache, tables, seq_lens, mask=torch.ones(6, 1, dtype=torch.bool, device=device)), x, Options()
        yield cudnn_batch_prefill_with_kv_cache(
            y.q, y.k, y.v, 0.125, SCRATCH, max_token_per_sequence=5, max_sequence_kv=9, causal=True, return_lse=True,
            batch_offsets_q=y.qo_indptr, batch_offsets_o=y.qo_indptr.clone(), batch_offsets_k=y.kv_indptr,
            batch_offsets_v=y.kv_indptr.clone(), batch_offsets_stats=y.qo_indptr, batch_offsets_units="tokens",
        ), y, o  # fmt: skip
        yield trtllm_ragged_attention_deepseek(
            y.q, y.k, y.v, SCRATCH, lens([5, 0, 9], device), 5, 9, 0.125, 1.0, 1.0, 3, -1, y.qo_indptr, y.kv_indptr,
            False, True, True,
        ), y, o  # fmt: skip
        out = cudnn_batch_decode_with_kv_cache(
            x.q, *cache.unbind(1), 0.125, SCRATCH, max_sequence_kv=72, actual_seq_lens_kv=seq_lens, block_tables=tables,
            return_lse=True, batch_offsets_q=torch.arange(7, dtype=torch.int32, device=device),
        )  # fmt: skip
        yield out, x, Options()

    before = torch.get_default_dtype()
    try:
        if context == "meta":
            with torch.device("meta"):
                results = list(calls())
        else:
            torch.set_default_dtype(torch.bfloat16)
            results = list(calls())
    finally:
        torch.set_default_dtype(before)
    for result, of, options in results:
        assert result[0].device == result[1].device == device
        check(result, of, options)


def test_given_outputs_are_written_and_returned(device):
    x = batch([1] * 6, device)
    cache, tables, seq_lens = paged(x)
    truth = decode(x, cache, tables, seq_lens)
    for returns in (False, True):
        out = torch.full((6, 1, 4, 64), 777.0, dtype=HALF, device=device)
        lse = torch.full((6, 1, 4), 777.0, device=device)
        got = trtllm_batch_decode_with_kv_cache(
            x.q, cache, SCRATCH, tables, seq_lens, 72, 0.125, out=out, lse=lse, return_lse=returns
        )
        assert got[0] is out and got[1] is lse if returns else got is out
        assert_bitwise(out.flatten(0, 1), truth[0])
        assert_bitwise(lse.flatten(0, 1), truth[1])
        out, lse = torch.full_like(x.q, 777.0), torch.full((6, 4), 777.0, device=device)
        got = cudnn_batch_decode_with_kv_cache(
            x.q, *cache.unbind(1), 0.125, SCRATCH, max_sequence_kv=72, actual_seq_lens_kv=seq_lens, block_tables=tables,
            out=out, lse=lse, return_lse=returns,
        )  # fmt: skip
        assert got[0] is out and got[1] is lse if returns else got is out
        assert_bitwise(lse, truth[1])


def test_tables_of_keys_and_of_values(device):
    """V lies in other pages than K; entries past a request's keys name anything."""
    x = batch([1] * 6, device)
    cache, tables, seq_lens = paged(x)
    moved = torch.randperm(cache.shape[0], device=device)
    k, v = cache[:, 0], torch.full_like(cache[:, 1], float("nan"))
    v[moved] = cache[:, 1]
    used = torch.arange(tables.shape[1], device=device) < ((seq_lens + 7) // 8)[:, None]
    of_v = torch.where(used, moved[tables.clamp(0, cache.shape[0] - 1).long()].int(), -7)
    both = torch.stack((torch.where(used, tables, 10**6), of_v), 1)
    check(decode(x, (k, v), both, seq_lens, uses_shared_paged_kv_idx=False), x, Options())
    out = trtllm_batch_context_with_kv_cache(
        x.q, (k, v), SCRATCH, both, seq_lens, 1, 72, 0.125, 1.0, 6, x.qo_indptr, x.kv_indptr, return_lse=True,
        uses_shared_paged_kv_idx=False,
    )  # fmt: skip
    check(out, x, Options(causal=True))
    # The blocks of one allocation, counted from the first of K.
    pool = torch.cat((k, v))
    blocks = torch.stack((both[:, 0], both[:, 1] + k.shape[0]), 1)
    out = trtllm_fmha_v2_prefill(
        (x.q, pool[: k.shape[0]], pool[k.shape[0] :]), "Q_PAGED_KV_HND", SCRATCH, seq_lens, 1, 72, 0.125, 1.0, 6,
        x.qo_indptr, x.kv_indptr, blocks,
    )  # fmt: skip
    close(out, x, Options(causal=True))


@pytest.mark.parametrize("layout", ("HND", "NHD"))
@pytest.mark.parametrize("q_len", (1, 3))
def test_pages_chosen_by_each_kv_head(layout, q_len, device):
    """Each KV head has a table and lengths of its own; the truth is an attention of each head over its pages' keys."""
    torch.manual_seed(1)
    page, pages, heads, kv_heads, dim, batch_size = 8, 12, 4, 2, 64, 3
    cache = torch.randn(pages, 2, kv_heads, page, dim, dtype=HALF, device=device)
    q = torch.randn(batch_size * q_len, heads, dim, dtype=HALF, device=device)
    tables = torch.stack([torch.randperm(pages)[:4] for _ in range(kv_heads * batch_size)])
    tables = tables.view(kv_heads, batch_size, 4).int().to(device)
    seq_lens = torch.tensor([[32, 9, 17], [3, 24, 0]], dtype=torch.int32, device=device)
    given = cache if layout == "HND" else cache.transpose(2, 3)
    sinks = torch.randn(kv_heads, heads // kv_heads, device=device)
    out, lse = trtllm_batch_decode_with_kv_cache(
        q, given, SCRATCH, tables, seq_lens, 32, dim**-0.5, kv_layout=layout, enable_block_sparse_attention=True,
        q_len_per_req=q_len, return_lse=True, sinks=sinks,
    )  # fmt: skip
    truth, same = (_by_head(q, cache, tables, seq_lens, q_len, sinks, dtype) for dtype in (torch.float64, HALF))
    assert_close(out, same[0], truth[0])
    single = _by_head(q, cache, tables, seq_lens, q_len, sinks, torch.float32)
    assert_close(lse, single[1], truth[1])


def _by_head(q, cache, tables, seq_lens, q_len, sinks, dtype):
    out = torch.zeros(q.shape, dtype=dtype, device=q.device)
    lse = torch.full(q.shape[:2], -math.inf, dtype=dtype, device=q.device)
    group = q.shape[1] // tables.shape[0]
    for h in range(q.shape[1]):
        for row in range(q.shape[0]):
            b, i = divmod(row, q_len)
            count = int(seq_lens[h // group, b]) - (q_len - 1 - i)
            chosen = tables[h // group, b].long()
            k, v = (cache[chosen, part, h // group].flatten(0, 1)[: max(count, 0)].to(dtype) for part in range(2))
            logits = torch.cat((k @ q[row, h].to(dtype) * 0.125, sinks.flatten()[h].view(1).to(dtype)))
            weights = torch.softmax(logits, 0)[:-1]
            out[row, h] = weights @ v
            lse[row, h] = torch.logsumexp(logits, 0) / LN2
    return out, lse


@pytest.mark.parametrize("dtype", (E4M3, torch.float8_e5m2))
def test_keys_in_16_bits_beside_values_in_8(dtype, device):
    x = batch([1] * 6, device)
    x = generate.Ragged(x.q, x.k, x.v.to(dtype).to(HALF), x.qo_indptr, x.kv_indptr)
    cache, tables, seq_lens = paged(x)
    check(decode(x, (cache[:, 0], cache[:, 1].to(dtype)), tables, seq_lens), x, Options())


@pytest.mark.parametrize("layout", ("HND", "NHD"))
def test_pools_without_a_page_axis(layout, device):
    kv = [3, 0, 5]
    x = batch([1] * 3, device, kv)
    slots = torch.randperm(11, device=device)[:8]
    pool = torch.full((11, 2, 2, 64), float("nan"), dtype=HALF, device=device)
    pool[slots, 0], pool[slots, 1] = x.k, x.v
    tables = torch.zeros(3, 7, dtype=torch.int32, device=device)
    for i, (a, b) in enumerate(zip(x.kv_indptr[:-1], x.kv_indptr[1:])):
        tables[i, : b - a] = slots[a:b]
    for cache in (pool, (pool[:, 0], pool[:, 1])):
        check(decode(x, cache, tables, lens(kv, device), kv_layout=layout), x, Options())


def test_errors_name_operands_as_the_caller_does(device):
    x = batch([1] * 6, device)
    cache, tables, seq_lens = paged(x)
    strided = torch.cat([cache, cache], -1)[..., ::2]
    with pytest.raises(ValueError, match=r"^kv_cache\[0\]: got stride 2"):
        trtllm_batch_decode_with_kv_cache(x.q, strided, SCRATCH, tables, seq_lens, 72, 0.125)
    k, v = strided.unbind(1)
    with pytest.raises(ValueError, match="^k_cache: got stride 2"):
        cudnn_batch_decode_with_kv_cache(x.q, k, v, 0.125, SCRATCH, max_sequence_kv=72, actual_seq_lens_kv=seq_lens,
                                         block_tables=tables)  # fmt: skip


def test_numbers_in_tensors_of_one_element(device):
    x = batch([3] * 6, device)
    cache, tables, seq_lens = paged(x)
    one = lambda value, dtype=torch.int64: torch.tensor([value], dtype=dtype, device=device)
    check(decode(x, cache, tables, seq_lens, q_len_per_req=one(3), window_left=one(9), bmm2_scale=one(1.0, HALF),
                 bmm1_scale=torch.tensor(0.125, dtype=torch.float64)),
          x, Options(causal=True, window_left=9))  # fmt: skip


@pytest.mark.parametrize("own", (False, True))
def test_nvfp4_outputs(own, device):
    """Codes times factors over the scale are the output in 16 bits, quantised: within half a step of its block."""
    x = batch([1] * 6, device)
    cache, tables, seq_lens = paged(x)
    plain = decode(x, cache, tables, seq_lens)[0].float()
    start, scale = (3, 64.0) if own else (0, 64.0)
    given = {}
    if own:
        factors = torch.full((128, 16), 0x38, dtype=torch.uint8, device=device).view(E4M3)
        given["out"] = FP4Tensor(torch.empty(6, 4, 32, dtype=torch.uint8, device=device), factors, start)
    out, lse = decode(x, cache, tables, seq_lens, out_dtype="nvfp4", o_sf_scale=scale, o_sf_vec_size=16, **given)
    assert isinstance(out, FP4Tensor) and out.data.shape == (6, 4, 32) and lse.shape == (6, 4)
    if own:
        assert out is given["out"]
    # The 128x4 layout by its definition: row 32 g + r of a tile of 4 blocks is at 16 r + 4 g.
    row = start + torch.arange(6)[:, None]
    block = torch.arange(16)[None]
    at = (block // 4) * 512 + (row % 32) * 16 + (row // 32) * 4 + block % 4
    flat = out.scale.view(torch.uint8).flatten()
    sf = flat[at.to(device)].view(E4M3).float()
    codes = out.data.flatten(1)
    values = torch.stack((codes & 15, codes >> 4), -1).flatten(1).view(6, 16, 16)
    value = formats.decode("e2m1", values.cpu()).float().to(device) * sf[..., None] / scale
    blocks = plain.flatten(1).view(6, 16, 16)
    largest = blocks.abs().amax(-1, keepdim=True)
    assert ((value - blocks).abs() <= largest * 0.21 + 1e-4).all()
    if own:
        touched = torch.zeros(flat.shape, dtype=torch.bool, device=device)
        touched[at.to(device)] = True
        assert (flat[~touched] == 0x38).all()


def test_nvfp4_outputs_of_no_request(device):
    cache = torch.zeros(4, 2, 2, 16, 64, dtype=HALF, device=device)
    tables, none = (torch.zeros(shape, dtype=torch.int32, device=device) for shape in ((0, 2), (0,)))
    out = trtllm_batch_decode_with_kv_cache(
        torch.zeros(0, 4, 64, dtype=HALF, device=device), cache, torch.empty(0, dtype=torch.uint8, device=device),
        tables, none, 20, out_dtype="nvfp4", o_sf_scale=1.0,
    )  # fmt: skip
    assert isinstance(out, FP4Tensor) and out.data.shape == (0, 4, 32)


def test_statistics_of_the_softmax(device):
    x = batch([1] * 6, device)
    cache, tables, seq_lens = paged(x)
    out, stats = trtllm_fmha_v2_prefill(
        (x.q, cache), "Q_PAGED_KV_HND", SCRATCH, seq_lens, 1, 72, 0.125, 1.0, 6, x.qo_indptr, x.kv_indptr, tables,
        mask_mode="CAUSAL", save_softmax_stats=True,
    )  # fmt: skip
    assert stats.shape == (6, 4, 2)
    check((out, (stats[..., 0] + stats[..., 1].log()) / LN2), x, Options(causal=True))
    y = batch([17] * 3, device, [17] * 3, heads=(4, 4))
    q, k, v = (t.unflatten(0, (3, 17)) for t in (y.q, y.k, y.v))
    out, lse = torch.empty_like(q), torch.empty(3, 17, 4, 2, device=device)
    got = fmha_v2_prefill_deepseek(q, k, v, out, 4, 64, 17, 1.0, return_lse=True, lse=lse)
    assert got[0] is out and got[1] is lse
    lse = lse.flatten(0, 1)
    check((out.flatten(0, 1), (lse[..., 0] + lse[..., 1].log()) / LN2), y, Options(causal=True))


@pytest.mark.parametrize("mode", ("CAUSAL", "Padding", "SLIDING_WINDOW"))
def test_names_of_masks_in_any_case(mode, device):
    x = batch([3, 0, 5], device, [5, 0, 9])
    window = 2 if mode == "SLIDING_WINDOW" else -1
    out = trtllm_fmha_v2_prefill(
        (x.q, x.k, x.v), "SEPARATE_Q_K_V", SCRATCH, lens([5, 0, 9], device), 5, 9, 0.125, 1.0, 3, x.qo_indptr,
        x.kv_indptr, mask_mode=mode, window_left=window, pos_encoding_mode="none",
    )  # fmt: skip
    close(out, x, Options(causal=mode != "Padding", window_left=window))


@pytest.mark.parametrize("units", ("elements", "tokens"))
def test_cudnn_offsets_of_their_own(units, device):
    """Requests begin at rows of their own in k, v, out and lse; head dims differ, as DeepSeek's; the rest stays."""
    qo, kv = [3, 0, 4], [5, 2, 9]
    x = batch(qo, device, kv, dim=48, head_dim_vo=32)
    o = Options(causal=True)
    v = torch.full((30, 2, 32), float("nan"), dtype=HALF, device=device)
    v_starts, o_starts, s_starts = [4, 9, 15, 24], [1, 4, 6, 10], [0, 5, 5, 9]
    for a, b, at in zip(x.kv_indptr[:-1], x.kv_indptr[1:], v_starts):
        v[at : at + b - a] = x.v[a:b]
    unit = (lambda row: 1) if units == "tokens" else (lambda row: row)
    by = lambda starts, row: torch.as_tensor(starts, dtype=torch.int64, device=device) * unit(row)
    out = torch.full((11, 4, 32), 777.0, dtype=HALF, device=device)
    lse = torch.full((11, 4), 777.0, device=device)
    got = cudnn_batch_prefill_with_kv_cache(
        x.q, x.k, v, 48**-0.5, SCRATCH, max_token_per_sequence=4, max_sequence_kv=9, causal=True, return_lse=True,
        actual_seq_lens_kv=lens(kv, device), batch_offsets_units=units, out=out,
        lse=lse, batch_offsets_q=by(x.qo_indptr, 4 * 48), batch_offsets_o=by(o_starts, 4 * 32),
        batch_offsets_k=by(x.kv_indptr, 2 * 48), batch_offsets_v=by(v_starts, 2 * 32),
        batch_offsets_stats=by(s_starts, 4),
    )  # fmt: skip
    assert got[0] is out and got[1] is lse
    rows = [at + i for at, n in zip(o_starts, qo) for i in range(n)]
    of_lse = [at + i for at, n in zip(s_starts, qo) for i in range(n)]
    check((out[rows], lse[of_lse]), x, o)
    assert (out[[i for i in range(11) if i not in rows]] == 777).all()
    assert (lse[[i for i in range(11) if i not in of_lse]] == 777).all()


def test_cudnn_offsets_count_elements_of_memory(device):
    """q, k and v are columns of one packed tensor: from row to row are three times as many elements as in out."""
    x = batch([3, 0, 4], device, [3, 0, 4], heads=(4, 4))
    packed = torch.stack((x.q, x.k, x.v), 1)
    q, k, v = packed.unbind(1)
    common = dict(max_token_per_sequence=4, max_sequence_kv=4, causal=True, return_lse=False)
    starts, row = x.qo_indptr.long(), 4 * 64
    offsets = {f"batch_offsets_{name}": starts * 3 * row for name in "qkv"} | dict(batch_offsets_o=starts * row)
    out, _ = cudnn_batch_prefill_with_kv_cache(q, k, v, 0.125, SCRATCH, **common, **offsets)
    close(out, x, Options(causal=True))
    out = torch.zeros_like(x.q)
    shared = torch.empty(2 * x.q.numel(), dtype=HALF, device=device)
    refused = {
        "batch_offsets_q": dict(offsets, batch_offsets_q=starts.cpu() * row),
        "out": dict(offsets, out=out.new_zeros(4, 64, len(out)).permute(2, 0, 1)),
        "out: got some of the memory of q": dict(offsets, out=shared[8 : 8 + out.numel()].view_as(out),
                                                 q=shared[: out.numel()].view_as(out)),
    }  # fmt: skip
    for name, given in refused.items():
        with pytest.raises(ValueError, match=f"^{name}"):
            cudnn_batch_prefill_with_kv_cache(given.pop("q", q), k, v, 0.125, SCRATCH, **common, **given)


def test_cudnn_takes_either_of_two_offsets(device):
    x = batch([3, 0, 4], device, [5, 2, 9])
    common = dict(max_token_per_sequence=4, max_sequence_kv=9, causal=True, return_lse=False,
                  batch_offsets_units="tokens")  # fmt: skip
    for q, kv in (("q", "k"), ("o", "v"), ("q", "v"), ("o", "k")):
        given = {f"batch_offsets_{q}": x.qo_indptr, f"batch_offsets_{kv}": x.kv_indptr}
        out, _ = cudnn_batch_prefill_with_kv_cache(x.q, x.k, x.v, 0.125, SCRATCH, **common, **given)
        close(out, x, Options(causal=True))


def test_permissions_change_no_result(device):
    x = batch([3, 0, 4], device, [5, 2, 9])
    given = dict(use_fp16_softmax=True, uses_spcompress=True, skip_softmax_threshold_scale_factor=1000.0)
    out = trtllm_ragged_attention_deepseek(
        x.q, x.k, x.v, SCRATCH, lens([5, 2, 9], device), 4, 9, 0.125, 1.0, 1.0, 3, -1, x.qo_indptr, x.kv_indptr, False,
        True, False, **given,
    )  # fmt: skip
    close(out, x, Options(causal=True))
    cache, tables, seq_lens = paged(x, [5, 2, 9])
    out = trtllm_batch_context_with_kv_cache(
        x.q, cache, SCRATCH, tables, seq_lens, 4, 9, 0.125, 1.0, 3, x.qo_indptr, x.kv_indptr, **given
    )
    close(out, x, Options(causal=True))


def test_xqa_as_engines_call_it(device):
    x = batch([1] * 6, device)
    cache, tables, seq_lens = paged(x, layout="NHD")
    sinks = torch.randn(2, 2, device=device)
    extras = Extras(sinks=sinks.flatten())
    out = torch.empty_like(x.q)
    got = xqa_batch_decode_with_kv_cache(
        query=x.q, kv_cache=tuple(cache.unbind(1)), workspace_buffer=SCRATCH, block_tables=tables, seq_lens=seq_lens,
        max_seq_len=72, bmm1_scale=0.125, bmm2_scale=1.0, window_left=-1, out=out, sinks=sinks, kv_layout="NHD",
        enable_pdl=False, q_len_per_req=1, o_scale=1.0, mask=None, kv_cache_sf=None,
    )  # fmt: skip
    assert got is out
    close(out, x, Options(), extras)
    out = torch.empty(6, 1, 4, 64, dtype=HALF, device=device)
    xqa(x.q.view(6, 1, 4, 64), *cache.unbind(1), tables, seq_lens.view(torch.uint32)[:, None], out, SCRATCH, SCRATCH, 2,
        8, sinks, torch.tensor([1.0], device=device), 1.0)  # fmt: skip
    close(out.view(6, 4, 64), x, Options(), extras)


def test_xqa_of_requests_that_lie_apart(device):
    """Queries and output of a request have a stride that is no multiple of theirs; what lies between stays."""
    x = batch([3] * 6, device)
    cache, tables, seq_lens = paged(x, layout="NHD")
    q, out = (torch.full((6, 2, 3, 4, 64), 777.0, dtype=HALF, device=device) for _ in range(2))
    q[:, :1] = x.q.view(6, 1, 3, 4, 64)
    xqa(q[:, :1], *cache.unbind(1), tables, seq_lens, out[:, :1], SCRATCH, SCRATCH, 2, 8, q_seq_len=3)
    close(out[:, 0].reshape(18, 4, 64), x, Options(causal=True))
    assert (out[:, 1] == 777).all()


def test_xqa_of_pages_that_hold_one_token_many_times(device):
    x = batch([1] * 6, device)
    cache, tables, seq_lens = paged(x, layout="NHD")
    k, v = (t[:, :1].expand(t.shape) for t in cache.unbind(1))
    call = SCRATCH, tables, seq_lens, 72, 0.125
    repeated, plain = (xqa_batch_decode_with_kv_cache(x.q, kv, *call) for kv in ((k, v), (k.clone(), v.clone())))
    assert_bitwise(repeated, plain)


@pytest.mark.parametrize(
    "name, change",
    (
        ("q", dict(q=torch.ones((), dtype=HALF))),
        ("q_scale", dict(q_scale=torch.tensor([math.nan]))),
        ("kv_scale", dict(kv_scale=torch.tensor([math.inf]))),
        ("output", dict(output=torch.ones(1, 1, 1, 64, dtype=HALF).expand(6, 1, 4, 64))),
        ("output", dict(output=torch.ones(6, 1, 4, 64, dtype=torch.complex64))),
        ("q_cu_seq_lens", dict(q=torch.ones(6, 4, 64, dtype=HALF), output=torch.ones(6, 4, 64, dtype=HALF),
                               q_cu_seq_lens=torch.arange(6))),
        ("q_cu_seq_lens", dict(q=torch.ones(6, 4, 64, dtype=HALF), output=torch.ones(6, 4, 64, dtype=HALF),
                               q_cu_seq_lens=torch.arange(7) - 1)),
        ("mask", dict(mask=torch.tensor(True))),
        ("mask", dict(mask=torch.ones(6, 1, 0, dtype=torch.bool))),
    ),
)  # fmt: skip
def test_xqa_refuses_by_its_own_names(name, change):
    x = batch([1] * 6, "cpu")
    cache, tables, seq_lens = paged(x, layout="NHD")
    k, v = cache.unbind(1)
    q = x.q.view(6, 1, 4, 64)
    call = dict(q=q, k_cache=k, v_cache=v, page_table=tables, seq_lens=seq_lens, output=torch.zeros_like(q),
                workspace_buffer=SCRATCH, semaphores=SCRATCH, num_kv_heads=2, page_size=8)  # fmt: skip
    with pytest.raises(ValueError, match=f"^{name}: got "):
        xqa(**(call | change))


@pytest.mark.parametrize(
    "name, change",
    (
        ("q_cu_seq_lens", dict(q_cu_seq_lens=torch.arange(6))),
        ("q_len_per_req", dict(q_cu_seq_lens=torch.arange(7), q_len_per_req=0)),
        (r"kv_cache_sf\[1\]", dict(kv_cache_sf=(torch.ones(54, 8, 2, 4, dtype=torch.uint8),) * 2)),
        ("out", dict(out=torch.ones(6, 64, 4, dtype=HALF).mT.transpose(0, 1))),
    ),
)
def test_decode_by_xqa_refuses_by_its_own_names(name, change):
    x = batch([1] * 6, "cpu")
    cache, tables, seq_lens = paged(x, layout="NHD")
    k, v = cache.unbind(1)
    if "kv_cache_sf" in change:
        k, v = (torch.ones(54, 8, 2, width, dtype=torch.uint8) for width in (32, 64))
    with pytest.raises(ValueError, match=f"^{name}: got "):
        xqa_batch_decode_with_kv_cache(x.q, (k, v), SCRATCH, tables, seq_lens, 72, **change)


@pytest.mark.parametrize("kind", (torch.int8, E4M3))
def test_sage_quantised_operands(kind, device):
    """What attends is code times scale: the truth is made of exactly those products."""
    torch.manual_seed(2)
    qo, kv = [5, 0, 18], [21, 3, 18]
    x = batch(qo, device, kv, dtype=torch.bfloat16)

    def quantise(t, indptr, size):
        scales = torch.full((t.shape[1], -(-t.shape[0] // size) + 2), float("nan"), device=device)
        codes, exact = torch.empty(t.shape, dtype=kind, device=device), torch.empty_like(t)
        for i, (a, b) in enumerate(zip(indptr[:-1].tolist(), indptr[1:].tolist())):
            for at in range(a, b, size):
                rows = slice(at, min(at + size, b))
                # Powers of two, so that products are bf16 values.
                scale = 2.0 ** torch.ceil(torch.log2(t[rows].float().abs().amax((0, 2)) / 100))
                scales[:, a // size + i + (at - a) // size] = scale
                code = t[rows].float() / scale[:, None]
                codes[rows] = (code.round() if kind == torch.int8 else code).to(kind)
                exact[rows] = (codes[rows].float() * scale[:, None]).to(exact.dtype)
        return codes, scales, exact

    (q, q_sf, q_exact), (k, k_sf, k_exact) = quantise(x.q, x.qo_indptr, 1), quantise(x.k, x.kv_indptr, 16)
    v_sf = 2.0 ** torch.randint(-7, -3, (2, 64), device=device).float()
    v = (x.v.float() / v_sf).clamp(-448, 448).to(E4M3)
    exact = generate.Ragged(q_exact, k_exact, (v.float() * v_sf).bfloat16(), x.qo_indptr, x.kv_indptr)
    got = trtllm_ragged_attention_deepseek(
        q, k, v, SCRATCH, lens(kv, device), 18, 21, 0.125, 1.0, 1.0, 3, -1, x.qo_indptr, x.kv_indptr, False, True, True,
        sage_attn_sfs=(q_sf, k_sf, None, v_sf), num_elts_per_sage_attn_blk=(1, 16, 0, 0),
    )  # fmt: skip
    check(got, exact, Options(causal=True))


@pytest.mark.parametrize("smooth", (False, True))
@pytest.mark.parametrize("kind", (torch.int8, E4M3))
def test_sage_quantisation(kind, smooth, device):
    """A code times the scale of its block is within a step of the value; the largest of a block is met."""
    torch.manual_seed(4)
    qo, kv = [5, 0, 18], [21, 3, 18]
    x = batch(qo, device, kv, dtype=torch.bfloat16)
    with torch.device("meta"):
        made = trtllm_sage_attention_quantize(x.q, x.k, x.v, 4, 16, kind, x.qo_indptr, x.kv_indptr, smooth)
    q, k, v, q_sf, k_sf, v_sf = made[:6]
    assert q_sf.shape == (4, -(-23 // 4) + 2) and k_sf.shape == (2, -(-42 // 16) + 2) and v_sf.shape == (2, 64)
    exact = x.k.float()
    if smooth:
        exact = exact - exact.mean(0)
        assert_close(made[6], x.k.float().mean(0), x.k.double().mean(0), "k_mean")
    largest, step = (127, 0.51 / 127) if kind == torch.int8 else (448, 1 / 15)
    of_q, of_k = (q, q_sf, x.q.float(), x.qo_indptr, 4), (k, k_sf, exact, x.kv_indptr, 16)
    for codes, scale, given, indptr, size in (of_q, of_k):
        assert codes.dtype == kind
        for i, (a, b) in enumerate(zip(indptr[:-1].tolist(), indptr[1:].tolist())):
            for at in range(a, b, size):
                rows = slice(at, min(at + size, b))
                mine = scale[:, a // size + i + (at - a) // size]
                most = given[rows].abs().amax((0, 2))
                assert torch.allclose(mine, most / largest, rtol=1e-5)
                error = (codes[rows].float() * mine[:, None] - given[rows]).abs().amax((0, 2))
                assert (error <= most * step).all()
    assert ((v.float() * v_sf - x.v.float()).abs() <= x.v.float().abs() / 15 + v_sf / 256).all()
    with pytest.raises(ValueError, match="k_block_size"):
        trtllm_sage_attention_quantize(x.q, x.k, x.v, 4, 8)
