"""Upstream's less ordinary parameters of plan() and run(): the base and layout of the LSE, causality of a decode's
several queries, nvfp4 keys that are not paged."""

import math
from dataclasses import replace

import pytest
import torch

import flashinfer
from flashinfer.testing import generate
from flashinfer.testing.compare import assert_bitwise, assert_close
from tests.ops.attention.cases import check, workspace
from tests.ops.attention.oracle import Extras, Options
from tests.ops.attention.test_defaults import OUTPUTS, Entries

HEADS, DIM, PAGE = (4, 2), 32, 4
E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


@pytest.mark.parametrize("base", ["log2", "ln"])
@pytest.mark.parametrize("name", OUTPUTS)
def test_base_and_layout_of_the_lse(name, base, device):
    entries = Entries(device)
    entry, factor = getattr(entries, name), 1.0 if base == "log2" else math.log(2.0)
    flag = {} if name == "mixed" else dict(return_lse=True)
    out, lse = entry(**flag)
    for layout in ("NH", "HN") if "prefill" in name else ("NH",):
        options = dict(lse_base=base) | (dict(lse_layout=layout) if "prefill" in name else {})
        expected = (lse if layout == "NH" else lse.t()) * factor
        given = torch.full_like(expected, 7.0, memory_format=torch.contiguous_format)
        for found_out, found in (entry(**flag, **options), entry(lse=given, **flag, **options)):
            assert_bitwise(found_out, out)
            torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-6)
            assert found.is_contiguous()
        torch.testing.assert_close(given, expected, rtol=1e-6, atol=1e-6)
        if name != "mixed":
            assert_bitwise(entry(lse=given.fill_(7.0), **options), out)
            torch.testing.assert_close(given, expected, rtol=1e-6, atol=1e-6)
    with pytest.raises(ValueError, match="^lse_base: got 'e'"):
        entry(lse_base="e")
    if "prefill" in name:
        with pytest.raises(ValueError, match="^lse_layout: got 'TH'"):
            entry(lse_layout="TH")
        with pytest.raises(ValueError, match=r"^lse: got \(6, 4\); allowed: \(4, 6\)"):
            entry(lse=torch.empty(6, 4), lse_layout="HN", return_lse=True)


def test_queries_of_a_decode_that_see_later_keys(device):
    x = generate.ragged_batch([3, 3], [9, 17], *HEADS, DIM, dtype=torch.float16, device=device)
    paged = generate.paged(x, PAGE)
    for given, causal in ((dict(), True), (dict(window_right=-1), False), (dict(is_causal=False), False),
                          (dict(is_causal=True), True), (dict(window_right=-1, is_causal=False), False)):  # fmt: skip
        wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(workspace(device))
        wrapper.plan(paged.indptr, paged.indices, paged.last_page_len, *HEADS, DIM, PAGE, q_len_per_req=3, **given)
        check(wrapper.run(x.q, paged.kv_cache, return_lse=True), x, Options(causal=causal))
    for name, given in (("window_right", dict(window_right=4)), ("is_causal", dict(is_causal="no")),
                        ("is_causal", dict(is_causal=True, window_right=-1))):  # fmt: skip
        with pytest.raises(ValueError, match=f"^{name}: got"):
            wrapper.plan(paged.indptr, paged.indices, paged.last_page_len, *HEADS, DIM, PAGE, q_len_per_req=3, **given)


def quantised(rows, dim, device):
    """Codes and factors of random nvfp4 rows of 2 heads, and their values by the format's specification."""
    codes = torch.randint(256, (rows, 2, dim // 2), dtype=torch.uint8, device=device)
    factors = torch.tensor([0.25, 0.5, 1.0, 1.75], device=device)[torch.randint(4, (rows, 2, dim // 16), device=device)]
    table = torch.tensor([*E2M1, *(-x for x in E2M1)], dtype=torch.float64, device=device)
    values = table[torch.stack((codes & 15, codes >> 4), -1).flatten(-2).long()]
    return codes, factors.to(torch.float8_e4m3fn), values * factors.double().repeat_interleave(16, -1)


@pytest.mark.parametrize("kv_layout", ["NHD", "HND"])
def test_nvfp4_keys_in_rows(kv_layout, device):
    """Ragged and single prefill, with another head_dim of values, and a batch of pages in mixed attention."""
    q_lens, kv_lens, dim_vo = [3, 1, 2], [9, 0, 17], 64
    q = torch.randn(6, 4, DIM, dtype=torch.float16, device=device)
    (k, kf, k_true), (v, vf, v_true) = quantised(26, DIM, device), quantised(26, dim_vo, device)
    x = generate.Ragged(q, k_true.half(), v_true.half(), generate.indptr(q_lens, device),
                        generate.indptr(kv_lens, device))  # fmt: skip
    options = Options(causal=True)
    turn = lambda t: t.transpose(0, 1).contiguous() if kv_layout == "HND" else t
    for place in ("cpu", device):
        wrapper = flashinfer.BatchPrefillWithRaggedKVCacheWrapper(workspace(device), kv_layout)
        offsets = x.qo_indptr.to(place), x.kv_indptr.to(place)
        wrapper.plan(*offsets, *HEADS, DIM, dim_vo, causal=True, kv_data_type="nvfp4")
        factors = turn(kf), turn(vf).view(torch.uint8)
        check(wrapper.run(q, turn(k), turn(v), kv_cache_sf=factors, return_lse=True), x, options)
    wrapper.plan(*offsets, *HEADS, DIM, causal=True, kv_data_type="nvfp4")
    in_one = torch.stack((turn(kf), turn(kf)), 1)
    same = generate.Ragged(q, x.k, x.k, x.qo_indptr, x.kv_indptr)
    check(wrapper.run(q, turn(k), turn(k), kv_cache_sf=in_one, return_lse=True), same, options)
    for wrong in (None, in_one[:, 0], in_one[:, :1], (turn(kf),), 1.0):
        with pytest.raises(ValueError, match="kv_block_scales|kv_cache_sf"):
            wrapper.run(q, turn(k), turn(k), kv_cache_sf=wrong)
    alone = generate.Ragged(q[3:], x.k[9:], x.v[9:], generate.indptr([3], device), generate.indptr([17], device))
    result = flashinfer.single_prefill_with_kv_cache(
        q[3:], turn(k[9:]), turn(v[9:]), causal=True, kv_layout=kv_layout, kv_cache_sf=(turn(kf[9:]), turn(vf[9:])),
        return_lse=True,
    )  # fmt: skip
    check(result, alone, options)
    mixed = flashinfer.BatchAttention(kv_layout, device)
    slots = torch.arange(26, dtype=torch.int32, device=device)
    mixed.plan(x.qo_indptr, x.kv_indptr, slots, x.kv_indptr.diff(), *HEADS, DIM, dim_vo, 1, causal=True,
               q_data_type=torch.float16, kv_data_type="nvfp4")  # fmt: skip
    check(mixed.run(q, (k, v), kv_cache_sf=(kf, vf)), x, options)


def test_one_element_tensors_are_numbers(device):
    x = generate.ragged_batch([3], [9], *HEADS, DIM, dtype=torch.float32, device=device)
    call = lambda scale, theta: flashinfer.single_prefill_with_kv_cache(
        x.q, x.k, x.v, sm_scale=scale, rope_theta=theta, pos_encoding_mode="ROPE_LLAMA", causal=True
    )
    expected = call(0.25, 1e5)
    for place in ("cpu", device):
        assert_bitwise(call(torch.tensor(0.25, device=place), torch.tensor([1e5], device=place)), expected)
        wrapper = flashinfer.BatchPrefillWithRaggedKVCacheWrapper(workspace(device))
        wrapper.plan(x.qo_indptr, x.kv_indptr, *HEADS, DIM, causal=True, sm_scale=torch.tensor([0.25], device=place),
                     rope_theta=torch.tensor(1e5, device=place), pos_encoding_mode="ROPE_LLAMA",
                     q_data_type=torch.float32)  # fmt: skip
        out = wrapper.run(x.q, x.k, x.v, v_scale=torch.tensor(2.0, device=place))
        assert_close(out, expected * 2, (expected * 2).double(), "out")


def items_seen(q_len, kv_len, prefix, positions):
    """Row by row: a token sees the prefix, its own item up to itself, and nothing of other items or of delimiters."""
    seen = torch.zeros(q_len, kv_len, dtype=torch.bool)
    for row in range(q_len):
        at = kv_len - q_len + row
        delimiter = at - positions[at - prefix] if at >= prefix else -1
        for key in range(at + 1):
            seen[row, key] = key < prefix or key > delimiter
    return seen


@pytest.mark.parametrize("options", [{}, dict(pos_encoding_mode="ROPE_LLAMA"), dict(logits_soft_cap=5.0)], ids=str)
def test_multi_item_scoring(options, device):
    """Items of 2 and 3 tokens behind a prefix of 6, each behind a delimiter, on both paths and given in any type."""
    positions = [0, 1, 2, 0, 1, 2, 3, 0]
    x = generate.ragged_batch([10, 8], [14, 14], *HEADS, DIM, dtype=torch.float16, device=device)
    masks = [items_seen(n, 14, 6, positions).to(device) for n in (10, 8)]
    paged = generate.paged(x, PAGE)
    for prefix, dtype in ((6, torch.uint16), (torch.tensor([6, 6], dtype=torch.uint32), torch.int32),
                          (torch.tensor(6), torch.int64)):  # fmt: skip
        items = dict(prefix_len_ptr=prefix, token_pos_in_items_ptr=torch.tensor(positions * 2).to(dtype),
                     token_pos_in_items_len=8, max_item_len_ptr=torch.tensor([3, 3]).to(dtype))  # fmt: skip
        ragged = flashinfer.BatchPrefillWithRaggedKVCacheWrapper(workspace(device))
        ragged.plan(x.qo_indptr, x.kv_indptr, *HEADS, DIM, causal=True, **items, **options)
        pages = flashinfer.BatchPrefillWithPagedKVCacheWrapper(workspace(device))
        pages.plan(x.qo_indptr, paged.indptr, paged.indices, paged.last_page_len, *HEADS, DIM, PAGE, causal=True,
                   **items, **options)  # fmt: skip
        for result in (ragged.run(x.q, x.k, x.v, return_lse=True), pages.run(x.q, paged.kv_cache, return_lse=True)):
            check(result, x, Options(**options), Extras(masks=masks))
    for name in ("token_pos_in_items_ptr", "token_pos_in_items_len", "max_item_len_ptr"):
        with pytest.raises(ValueError, match=f"^{name}: got"):
            ragged.plan(x.qo_indptr, x.kv_indptr, *HEADS, DIM, **{name: items[name]})
    for name, wrong in (("prefix_len_ptr", 15), ("prefix_len_ptr", torch.tensor([6, 6, 6])),
                        ("token_pos_in_items_len", 9), ("token_pos_in_items_len", 7),
                        ("custom_mask", torch.ones(252, dtype=torch.bool)),
                        ("packed_custom_mask", torch.ones(32, dtype=torch.uint8))):  # fmt: skip
        with pytest.raises(ValueError, match=f"^{name}: got"):
            ragged.plan(x.qo_indptr, x.kv_indptr, *HEADS, DIM, **items | {name: wrong})
        with pytest.raises(ValueError, match=f"^{name}: got"):
            pages.plan(x.qo_indptr, paged.indptr, paged.indices, paged.last_page_len, *HEADS, DIM, PAGE,
                       **items | {name: wrong})  # fmt: skip


def test_an_item_is_scored_as_if_it_stood_alone_behind_the_prefix(device):
    """Of the last token of an item a score is made: it sees what it would see without items and delimiters beside."""
    prefix, lens = 6, (2, 3, 1)
    positions = [0, *(p for n in lens for p in (*range(1, n + 1), 0))]
    total = prefix + len(positions)
    x = generate.ragged_batch([total], [total], *HEADS, DIM, dtype=torch.float32, device=device)
    wrapper = flashinfer.BatchPrefillWithRaggedKVCacheWrapper(workspace(device))
    wrapper.plan(x.qo_indptr, x.kv_indptr, *HEADS, DIM, causal=True, q_data_type=torch.float32, prefix_len_ptr=prefix,
                 token_pos_in_items_ptr=torch.tensor(positions), token_pos_in_items_len=len(positions))  # fmt: skip
    out = wrapper.run(x.q, x.k, x.v)
    begin = prefix + 1
    for n in lens:
        rows = torch.tensor([*range(prefix), *range(begin, begin + n)], device=device)
        q, k, v = (t[rows].double() for t in (x.q, x.k, x.v))
        group = HEADS[0] // HEADS[1]
        k, v = (t.repeat_interleave(group, 1) for t in (k, v))
        logits = torch.einsum("qhd,khd->hqk", q, k) * DIM**-0.5
        hidden = torch.ones(len(rows), len(rows), dtype=torch.bool, device=device).triu(1)
        alone = torch.einsum("hqk,khd->qhd", logits.masked_fill(hidden, -math.inf).softmax(-1), v)
        assert_close(out[begin : begin + n], alone[prefix:].float(), alone[prefix:], "out")
        begin += n + 1


def test_what_is_given_twice_has_to_agree():
    x = generate.ragged_batch([3, 1], [9, 4], *HEADS, DIM, dtype=torch.float16)
    paged = generate.paged(x, PAGE)
    tables = paged.indptr, paged.indices, paged.last_page_len
    blocks = torch.full((2, 5), -1, dtype=torch.int32)
    blocks[0, :3], blocks[1, :1] = paged.indices[:3], paged.indices[3:]
    lens = torch.tensor([9, 4])
    right = dict(seq_lens=lens.view(2, 1, 1, 1), block_tables=blocks)
    wrong = [("seq_lens", lens + 1), ("seq_lens", lens[:1]), ("block_tables", blocks.flip(0)),
             ("block_tables", blocks[:, :2])]  # fmt: skip
    prefill = flashinfer.BatchPrefillWithPagedKVCacheWrapper(workspace("cpu"))
    decode = flashinfer.BatchDecodeWithPagedKVCacheWrapper(workspace("cpu"))
    ragged = flashinfer.BatchPrefillWithRaggedKVCacheWrapper(workspace("cpu"))
    decode.plan(*tables, *HEADS, DIM, PAGE, **right)
    for name, value in wrong:
        with pytest.raises(ValueError, match=f"^{name}: got"):
            decode.plan(*tables, *HEADS, DIM, PAGE, **{name: value})
    more = dict(seq_lens_q=torch.tensor([3, 1]), max_token_per_sequence=3, max_sequence_kv=torch.tensor(9))
    prefill.plan(x.qo_indptr, *tables, *HEADS, DIM, PAGE, **right, **more)
    ragged.plan(x.qo_indptr, x.kv_indptr, *HEADS, DIM, seq_lens=lens, **more)
    bounds = [("seq_lens_q", lens), ("max_token_per_sequence", 2), ("max_sequence_kv", 8), ("uniform_q_len", 3)]
    for name, value in wrong + bounds:
        with pytest.raises(ValueError, match=f"^{name}: got"):
            prefill.plan(x.qo_indptr, *tables, *HEADS, DIM, PAGE, **{name: value})
    for name, value in bounds:
        with pytest.raises(ValueError, match=f"^{name}: got"):
            ragged.plan(x.qo_indptr, x.kv_indptr, *HEADS, DIM, **{name: value})


def test_workspace_size_of_a_wrapper_with_sinks():
    wrapper = flashinfer.BatchAttentionWithAttentionSinkWrapper(workspace("cpu"), head_dim_qk=DIM, head_dim_vo=DIM)
    one = torch.tensor([0, 1])
    assert wrapper.workspace_size(one, one, torch.zeros(1, dtype=torch.int32), one[1:], *HEADS, DIM, PAGE) == (0, 0)


@pytest.mark.parametrize("backend", ("trtllm-gen", "cute-dsl"))
def test_queries_of_a_request_that_only_run_knows(backend, device):
    """Backends of upstream that take any number. The tables of the last plan stay, and what it said of later keys."""
    page, kv = PAGE, [9, 1, 6]
    batches = {n: generate.ragged_batch([n] * 3, kv, *HEADS, DIM, dtype=torch.float16, device=device) for n in (1, 3)}
    made = generate.paged(batches[1], page)
    for later, given in ((False, {}), (True, dict(is_causal=False))):
        wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(workspace(device), backend=backend)
        tables = [made.indptr.clone(), made.indices.clone(), made.last_page_len.clone()]
        wrapper.plan(*tables, *HEADS, DIM, page, q_len_per_req=3 if later else 1, **given)
        if device.type == "cpu":
            # Tables on a GPU are kept, and not copied.
            tables[0].fill_(99), tables[2].fill_(99)
        for n in (3, 1, 3):
            x = replace(batches[1], q=batches[n].q, qo_indptr=batches[n].qo_indptr)
            result = wrapper.run(x.q, made.kv_cache, return_lse=True, q_len_per_req=n)
            check(result, x, Options(causal=not later))
    other = flashinfer.BatchDecodeWithPagedKVCacheWrapper(workspace(device))
    other.plan(made.indptr, made.indices, made.last_page_len, *HEADS, DIM, page)
    with pytest.raises(ValueError, match="^q: got "):
        other.run(batches[3].q, made.kv_cache)


@pytest.mark.parametrize("kind", ("ragged", "paged", "graph"))
def test_masks_come_in_any_axes_and_have_the_size_of_their_batch(kind, device):
    """Also where the mask is on a GPU: the tables on the host say how large it has to be."""
    x = generate.ragged_batch([3, 0, 5], [9, 4, 5], *HEADS, DIM, dtype=torch.float16, device=device)
    paged, masks = generate.paged(x, PAGE), [torch.rand(n, device=device) < 0.5 for n in (27, 0, 25)]
    flat = torch.cat(masks)
    packed = torch.cat([flashinfer.packbits(mask, "little") for mask in masks])
    tables = [t.cpu() for t in (x.qo_indptr, paged.indptr, paged.indices, paged.last_page_len)]
    if kind == "ragged":
        wrapper = flashinfer.BatchPrefillWithRaggedKVCacheWrapper(workspace(device))
        plan = lambda **mask: wrapper.plan(x.qo_indptr.cpu(), x.kv_indptr.cpu(), *HEADS, DIM, **mask)
        run = lambda: wrapper.run(x.q, x.k, x.v, return_lse=True)
    else:
        buffer = lambda n, dtype=torch.int32: torch.zeros(n, dtype=dtype, device=device)
        buffers = dict(
            use_cuda_graph=True, qo_indptr_buf=buffer(6), paged_kv_indptr_buf=buffer(6),
            paged_kv_indices_buf=buffer(20), paged_kv_last_page_len_buf=buffer(5),
            custom_mask_buf=buffer(40, torch.uint8), mask_indptr_buf=buffer(6),
        )  # fmt: skip
        wrapper = flashinfer.BatchPrefillWithPagedKVCacheWrapper(
            workspace(device), **(buffers if kind == "graph" else {})
        )
        plan = lambda **mask: wrapper.plan(*tables, *HEADS, DIM, PAGE, **mask)
        run = lambda: wrapper.run(x.q, paged.kv_cache, return_lse=True)
    for given in (dict(custom_mask=flat), dict(custom_mask=flat.view(4, 13)), dict(custom_mask=flat[None, :, None]),
                  dict(packed_custom_mask=packed), dict(packed_custom_mask=packed.view(2, 4))):  # fmt: skip
        plan(**given)
        check(run(), x, Options(), Extras(masks=masks))
    for name, wrong in (("custom_mask", flat[:-1]), ("custom_mask", torch.cat((flat, flat))),
                        ("packed_custom_mask", packed[:-1])):  # fmt: skip
        with pytest.raises(ValueError, match=f"^{name}: got"):
            plan(**{name: wrong})
