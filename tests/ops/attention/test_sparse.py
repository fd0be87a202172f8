"""Block-sparse attention against attention under the mask that the blocks make, in float64."""

import pytest
import torch

import flashinfer
from flashinfer._core.checks import UnsupportedConfig
from flashinfer.testing import generate
from flashinfer.testing.compare import assert_bitwise
from tests.ops.attention.cases import check, workspace
from tests.ops.attention.oracle import Extras, Options
from tests.ops.attention.test_engines import close

HALF = torch.float16
DTYPES = dict(q_data_type=HALF, kv_data_type=HALF)


def names(device, interpret=True):
    return ("auto", "portable") if interpret or device.type == "cuda" else ("auto",)


def bsr(chosen, device):
    """indptr and indices of a boolean map of blocks."""
    indptr = torch.nn.functional.pad(chosen.sum(1).cumsum(0), (1, 0)).to(torch.int32)
    return indptr.to(device), chosen.nonzero()[:, 1].to(torch.int32).to(device)


def dense(chosen, rows, columns):
    """The mask of blocks, elementwise."""
    return chosen.repeat_interleave(torch.as_tensor(rows), 0).repeat_interleave(torch.as_tensor(columns), 1)


def causal(m, n):
    return torch.arange(n) <= torch.arange(m)[:, None] + n - m


def one(m, n, device, heads=(4, 2)):
    return generate.ragged_batch([m], [n], *heads, 64, dtype=HALF, device=device)


@pytest.mark.parametrize("block", ((1, 1), (4, 8), (5, 3), (16, 16)))
def test_bsr(block, device):
    r, c = block
    chosen = torch.rand(5, 6) < 0.5
    chosen[1] = False
    x = one(5 * r, 6 * c, device)
    indptr, indices = bsr(chosen, device)
    full = dense(chosen, [r] * 5, [c] * 6)
    for backend in names(device, block == (5, 3)):
        wrapper = flashinfer.BlockSparseAttentionWrapper(workspace(device), backend)
        sizes = (5 * r, 6 * c, r, c, 4, 2, 64)
        for on_host in (False, True):
            tables = (indptr.cpu().long(), indices.cpu()) if on_host else (indptr, indices)
            wrapper.plan(*tables, *sizes, **DTYPES, logits_soft_cap=2.0)
            check(wrapper.run(x.q, x.k, x.v, return_lse=True), x, Options(logits_soft_cap=2.0),
                  Extras([full.flatten().to(device)]))  # fmt: skip
        wrapper.plan(indptr, indices, *sizes, causal=True, **DTYPES)
        seen = full & causal(5 * r, 6 * c)
        check(wrapper.run(x.q, x.k, x.v, return_lse=True), x, Options(), Extras([seen.flatten().to(device)]))
        within = torch.rand(indices.shape[0], r, c) < 0.6
        seen = full.clone()
        at = 0
        for i, j in chosen.nonzero().tolist():
            seen[i * r : (i + 1) * r, j * c : (j + 1) * c] = within[at]
            at += 1
        wrapper.plan(indptr, indices, *sizes, mask=within.to(device), **DTYPES)
        check(wrapper.run(x.q, x.k, x.v, return_lse=True), x, Options(), Extras([seen.flatten().to(device)]))
        rows = [seen[i * r : (i + 1) * r][:, dense(chosen[i : i + 1], [1], [c] * 6)[0]].flatten() for i in range(5)]
        bits, _ = generate.pack_mask(torch.cat(rows), [1] * 5, [len(row) for row in rows])
        wrapper.plan(indptr, indices, *sizes, packed_mask=bits.to(device), **DTYPES)
        check(wrapper.run(x.q, x.k, x.v, return_lse=True), x, Options(), Extras([seen.flatten().to(device)]))


@pytest.mark.parametrize("is_causal", (False, True))
def test_bsr_whose_last_block_row_has_fewer_queries(is_causal, device):
    chosen = torch.rand(3, 4) < 0.6
    chosen[2, 1] = True
    x = one(11, 32, device)
    full = dense(chosen, [5, 5, 1], [8] * 4)
    seen = full & causal(11, 32) if is_causal else full
    extras = Extras([seen.flatten().to(device)])
    wrapper = flashinfer.BlockSparseAttentionWrapper(workspace(device))
    sizes = 11, 32, 5, 8, 4, 2, 64
    for on_host in (False, True):
        wrapper.plan(*bsr(chosen, "cpu" if on_host else device), *sizes, causal=is_causal, **DTYPES)
        check(wrapper.run(x.q, x.k, x.v, return_lse=True), x, Options(), extras)
    assert (wrapper.M, wrapper.N, wrapper.R, wrapper.C) == (11, 32, 5, 8)
    for given in (chosen, chosen.expand(2, 3, 4), chosen.expand(4, 3, 4)):
        wrapper.plan(None, None, *sizes, causal=is_causal, block_mask=given.to(device), **DTYPES)
        check(wrapper.run(x.q, x.k, x.v, return_lse=True), x, Options(), extras)
    # Of the last row's blocks, the first row alone is of a query.
    within = torch.rand(int(chosen.sum()), 5, 8) < 0.6
    seen = full.clone()
    for at, (i, j) in enumerate(chosen.nonzero().tolist()):
        seen[i * 5 : (i + 1) * 5, j * 8 : (j + 1) * 8] = within[at][: 1 if i == 2 else 5]
    wrapper.plan(*bsr(chosen, device), *sizes, mask=within.to(device), **DTYPES)
    check(wrapper.run(x.q, x.k, x.v, return_lse=True), x, Options(), Extras([seen.flatten().to(device)]))


def test_masks_of_blocks_as_masks_of_block_rows(device):
    """A caller packs these in bits, one block row from a byte of its own."""
    chosen = torch.tensor([[True, False, True], [False, False, False], [True, True, True]])
    indptr, indices = bsr(chosen, device)
    within = torch.rand(5, 3, 4, device=device) < 0.6
    flat = flashinfer.sparse.convert_bsr_mask_layout(within, indptr)
    rows = [within[:2].transpose(0, 1).reshape(-1), within[2:].transpose(0, 1).reshape(-1)]
    assert torch.equal(flat, torch.cat(rows))
    x = one(9, 12, device)
    wrapper = flashinfer.BlockSparseAttentionWrapper(workspace(device))
    wrapper.plan(indptr, indices, 9, 12, 3, 4, 4, 2, 64, mask=within, **DTYPES)
    expected = wrapper.run(x.q, x.k, x.v)
    bits, _ = flashinfer.segment_packbits(flat, indptr * 12, bitorder="little")
    wrapper.plan(indptr, indices, 9, 12, 3, 4, 4, 2, 64, packed_mask=bits, **DTYPES)
    assert_bitwise(wrapper.run(x.q, x.k, x.v), expected)
    for name, args in (
        ("mask", (within[:4], indptr)), ("mask", (within[0], indptr)), ("indptr", (within, indptr[None])),
    ):  # fmt: skip
        with pytest.raises(ValueError, match=f"^{name}: got"):
            flashinfer.sparse.convert_bsr_mask_layout(*args)


def test_query_heads_of_one_kv_head_have_one_map(device):
    chosen = torch.ones(4, 3, 4, dtype=torch.bool)
    chosen[1, 0, 0] = False
    wrapper = flashinfer.BlockSparseAttentionWrapper(workspace(device))
    with pytest.raises(ValueError, match="^block_mask: got query heads of one KV head that differ; allowed: the same"):
        wrapper.plan(None, None, 12, 32, 4, 8, 4, 2, 64, block_mask=chosen.to(device))


def test_bsr_outputs_scales_and_forward(device):
    chosen = torch.rand(3, 4) < 0.6
    chosen[0, 0] = True
    x = one(12, 32, device)
    masks = [dense(chosen, [4] * 3, [8] * 4).flatten().to(device)]
    wrapper = flashinfer.BlockSparseAttentionWrapper(workspace(device))
    wrapper.plan(*bsr(chosen, device), 12, 32, 4, 8, 4, 2, 64, q_scale=0.5, v_scale=3.0, **DTYPES)
    out, lse = torch.empty_like(x.q), torch.empty(12, 4, device=device)
    got = wrapper.run(x.q, x.k, x.v, out=out, lse=lse, return_lse=True)
    assert got[0] is out and got[1] is lse
    check(got, x, Options(), Extras(masks, q_scale=0.5, v_scale=3.0))
    got = wrapper.run(generate.strided(x.q), generate.strided(x.k), generate.strided(x.v), 1.0, 2.0, 1.0,
                      return_lse=True)  # fmt: skip
    check(got, x, Options(), Extras(masks, k_scale=2.0))
    close(wrapper.forward(x.q, x.k, x.v, 1.0, 1.0, 1.0, sm_scale=0.3), x, Options(sm_scale=0.3), Extras(masks))
    assert wrapper.run(x.q, x.k, x.v).dtype == torch.float16


@pytest.mark.parametrize("per_head", (False, True))
@pytest.mark.parametrize("is_causal", (False, True))
def test_bsr_of_a_block_mask(per_head, is_causal, device):
    x = one(12, 32, device)
    chosen = torch.rand(2, 3, 4) < 0.5 if per_head else (torch.rand(3, 4) < 0.5).expand(2, 3, 4)
    wrapper = flashinfer.BlockSparseAttentionWrapper(workspace(device))
    given = chosen if per_head else chosen[0]
    wrapper.plan(None, None, 12, 32, 4, 8, 4, 2, 64, block_mask=given.to(device), causal=is_causal, **DTYPES)
    out = torch.empty_like(x.q)
    got = wrapper.run(x.q, x.k, x.v, out=out, return_lse=True)
    assert got[0] is out
    check_heads(got, x, [dense(c, [4] * 3, [8] * 4) for c in chosen], is_causal, device)


@pytest.mark.parametrize("backend", ("vsa_sm100_blk64", "vsa_blackwell_blk64", "vsa_sm100_blk128", "vsa_sm120_blk64"))
def test_upstreams_video_backends(backend, device):
    """They are preferences; a block mask stands in the place of other maps, and splits of keys are a hint of one."""
    x = one(12, 32, device)
    chosen = torch.rand(2, 3, 4) < 0.5
    indptr, indices = bsr(torch.ones(3, 4, dtype=torch.bool), device)
    wrapper = flashinfer.BlockSparseAttentionWrapper(workspace(device), backend=backend)
    options = dict(block_mask=chosen.to(device)) | DTYPES
    for splits in (None, "auto", 2):
        if splits is not None and not backend.endswith("blk64") or splits and backend == "vsa_sm120_blk64":
            with pytest.raises(ValueError, match="^kv_splits: got .*; allowed: None of backend="):
                wrapper.plan(indptr, indices, 12, 32, 4, 8, 4, 2, 64, kv_splits=splits, **options)
            continue
        wrapper.plan(indptr, indices, 12, 32, 4, 8, 4, 2, 64, kv_splits=splits, **options)
        got = wrapper.run(x.q, x.k, x.v, return_lse=True)
        check_heads(got, x, [dense(c, [4] * 3, [8] * 4) for c in chosen], False, device)


def check_heads(got, x, masks, is_causal, device):
    """Outputs [rows, heads, ...] against each KV head's own mask."""
    out, lse = got
    group = out.shape[1] // len(masks)
    for h, mask in enumerate(masks):
        mine = slice(h * group, (h + 1) * group)
        part = generate.Ragged(x.q[:, mine], x.k[:, h : h + 1], x.v[:, h : h + 1], x.qo_indptr, x.kv_indptr)
        seen = mask & causal(*mask.shape) if is_causal else mask
        check((out[:, mine], lse[:, mine]), part, Options(), Extras([seen.flatten().to(device)]))


VARIED = {
    "odd": ([[3, 0, 9], [7, 4, 1]], [[4, 9, 2, 7], [1, 1, 20, 0]]),
    "even": ([[8, 8, 8], [4, 4, 16]], [[16, 32, 16, 16], [48, 16, 0, 16]]),
    "one query": ([[1, 0, 0], [0, 0, 1]], [[4, 9, 2, 7], [1, 1, 20, 0]]),
    "one key": ([[2, 3, 1], [1, 1, 4]], [[0, 1, 0, 0], [1, 0, 0, 0]]),
    "without keys": ([[2, 3, 1], [1, 1, 4]], [[0, 0, 0, 0], [0, 0, 0, 0]]),
}


@pytest.mark.parametrize("sizes", VARIED)
@pytest.mark.parametrize("is_causal", (False, True))
def test_variable_blocks(sizes, is_causal, device):
    rows, columns = (torch.tensor(s) for s in VARIED[sizes])
    m, n = int(rows[0].sum()), int(columns[0].sum())
    x = one(m, n, device)
    chosen = torch.rand(2, 3, 4) < 0.5
    chosen[0, 0] = False
    masks = [dense(chosen[h], rows[h], columns[h]) for h in range(2)]
    q, k, v = (t.transpose(0, 1).contiguous() for t in (x.q, x.k, x.v))
    for backend in names(device, sizes == "odd"):
        wrapper = flashinfer.VariableBlockSparseAttentionWrapper(workspace(device), backend)
        wrapper.plan(chosen.to(device), rows.to(device), columns.to(device), 4, 2, 64, is_causal, **DTYPES)
        out, lse = wrapper.run(q, k, v, return_lse=True)
        assert out.shape == (4, m, 64) and lse.shape == (4, m)
        check_heads((out.transpose(0, 1), lse.T), x, masks, is_causal, device)
        # Heads that do not lie one after another, and places for the results.
        poisoned = torch.full_like(q, float("nan")), torch.full((4, m), float("nan"), device=device)
        views = (t.transpose(0, 1) for t in (x.q, x.k, x.v))
        got = wrapper.run(*views, *poisoned, return_lse=True)
        assert got[0] is poisoned[0] and got[1] is poisoned[1]
        check_heads((got[0].transpose(0, 1), got[1].T), x, masks, is_causal, device)


def test_variable_blocks_under_other_options(device):
    rows, columns = torch.tensor([[4, 8]] * 2), torch.tensor([[16, 8]] * 2)
    x = one(12, 24, device)
    chosen = torch.tensor([[[True, False], [True, True]]] * 2)
    wrapper = flashinfer.VariableBlockSparseAttentionWrapper(workspace(device))
    wrapper.plan(chosen, rows, columns, 4, 2, 64, q_data_type=HALF)
    out = wrapper.forward(*(t.transpose(0, 1) for t in (x.q, x.k, x.v)), sm_scale=0.3, logits_soft_cap=2.0)
    mask = dense(chosen[0], rows[0], columns[0]).flatten().to(device)
    close(out.transpose(0, 1), x, Options(sm_scale=0.3, logits_soft_cap=2.0), Extras([mask]))


@pytest.mark.parametrize(
    "given", (dict(sm_scale=float("nan")), dict(block_mask=torch.ones(2, 9, 9) > 0)), ids=("scale", "map")
)
def test_a_refused_plan_leaves_the_one_before(given, device):
    x = one(4, 8, device, heads=(2, 2))
    indptr, indices = torch.tensor([0, 1, 3]), torch.tensor([1, 0, 1])
    wrapper = flashinfer.BlockSparseAttentionWrapper(workspace(device))
    wrapper.plan(indptr, indices, 4, 8, 2, 4, 2, 2, 64, **DTYPES, k_scale=2.0)
    wanted = wrapper.run(x.q, x.k, x.v)
    with pytest.raises(ValueError, match="^(sm_scale|block_mask): got"):
        wrapper.plan(indptr, indices, 3, 8, 2, 2, 2, 2, 64, **DTYPES | given)
    assert_bitwise(wrapper.run(x.q, x.k, x.v), wanted)
    assert (wrapper.M, wrapper.N, wrapper.R, wrapper.C) == (4, 8, 2, 4)


def test_bad_input(device):
    x = one(12, 32, device)
    wrapper = flashinfer.BlockSparseAttentionWrapper(workspace(device))
    with pytest.raises(ValueError, match="plan"):
        wrapper.run(x.q, x.k, x.v)
    indptr, indices = bsr(torch.ones(3, 4, dtype=torch.bool), device)
    sizes = dict(M=12, N=32, R=4, C=8, num_qo_heads=4, num_kv_heads=2, head_dim=64)
    good = dict(indptr=indptr, indices=indices) | sizes
    some = torch.ones(1, device=device)
    for name, change in (
        ("R", dict(R=0)), ("C", dict(C=5)), ("indptr", dict(M=8)), ("mask", dict(mask=torch.ones(3, 4, 8))),
        ("block_mask", dict(block_mask=torch.ones(3, 4))), ("pos_encoding_mode", dict(pos_encoding_mode="ALIBI")),
        ("kv_block_lens", dict(kv_block_lens=some)), ("q2k_indices", dict(q2k_indices=some)),
        ("q2k_num", dict(q2k_num=some)), ("kv_splits", dict(kv_splits=2)), ("indices", dict(indices=some)),
        ("block_mask", dict(block_mask=torch.ones(3, 5), indptr=None, indices=None)),
        ("packed_mask", dict(packed_mask=some)),
    ):  # fmt: skip
        with pytest.raises((ValueError, UnsupportedConfig), match=f"^{name}:"):
            wrapper.plan(**(good | change))
    wrapper.plan(**good, **DTYPES)
    for name, args in (("q", (x.q[:-1], x.k, x.v)), ("k", (x.q, x.k[:-1], x.v)), ("v", (x.q, x.k, x.v[:-1]))):
        with pytest.raises(ValueError, match=f"^{name}:"):
            wrapper.run(*args)
    variable = flashinfer.VariableBlockSparseAttentionWrapper(workspace(device))
    chosen, rows, columns = torch.ones(2, 1, 2), torch.tensor([[3], [3]]), torch.tensor([[3, 2], [2, 3]])
    for name, args in (
        ("block_mask_map", (chosen[0], rows, columns)), ("block_row_sz", (chosen, rows.T, columns)),
        ("block_col_sz", (chosen, rows, columns - 3)), ("block_row_sz", (chosen, torch.tensor([[3], [4]]), columns)),
    ):  # fmt: skip
        with pytest.raises(ValueError, match=f"^{name}:"):
            variable.plan(*args, 4, 2, 64)
