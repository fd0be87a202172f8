"""Adapters of experts against float64, with tables of addresses."""

import pytest
import torch

from flashinfer import fused_moe
from flashinfer.testing.compare import assert_bitwise, assert_close
from tests.ops.norm.variants import variant  # the fixture

BF16 = torch.bfloat16
HALF = torch.float16  # the interpreter rounds to it as a GPU does, and to bfloat16 it does not
ADAPTERS, EXPERTS, RANK = 3, 4, 8


def bank(rows, columns, dtype, device):
    """[ADAPTERS, EXPERTS, rows, columns] out of a larger one."""
    return torch.randn(ADAPTERS, EXPERTS + 1, rows, columns, device=device).mul(columns**-0.5).to(dtype)[:, 1:]


def table(banks, device):
    found = torch.full((len(banks), EXPERTS), -1, dtype=torch.int64, device=device)
    return found, [fused_moe.fill_w_ptr(found, weights, EXPERTS, s) for s, weights in enumerate(banks)][0]


def pairs(device):
    """Two pairs of most tokens in no order, one token without an adapter, and pairs of no token and no expert."""
    token = torch.tensor([2, 0, 1, 4, 0, 3, 2, 5, -1, 1], device=device)
    expert = torch.tensor([1, 3, 0, 2, 0, 1, 3, 2, 0, 4], device=device)
    return token, expert, torch.tensor([1, 0, 2, -1, 0], device=device)


def products(x, banks, given, dtype, between, by_pair=False):
    """B @ (A @ x) of each pair in `dtype`, A's rounded to `between` unless None: [pairs, columns], and who counts."""
    token, expert, adapter = (ids.tolist() for ids in given)
    rows, there = [], []
    for pair, (t, e) in enumerate(zip(token, expert, strict=True)):
        there.append(0 <= t < len(adapter) and 0 <= e < EXPERTS and adapter[t] >= 0)
        if not there[-1]:
            rows.append(torch.zeros(sum(len(b[0, 0]) for _, b in banks), dtype=dtype, device=x.device))
            continue
        parts = []
        for a, b in banks:
            low = a[adapter[t], e].to(dtype) @ x[pair if by_pair else t].to(dtype)
            low = low if between is None else low.to(between).to(dtype)
            parts.append(b[adapter[t], e].to(dtype) @ low)
        rows.append(torch.cat(parts))
    return torch.stack(rows), torch.tensor(there, device=x.device)


def summed(rows, weights, token, tokens):
    out = torch.zeros(tokens, rows.shape[1], dtype=rows.dtype, device=rows.device)
    there = (token >= 0) & (token < tokens)
    return out.index_add(0, token[there], (rows * weights.to(rows.dtype)[:, None])[there])


@pytest.mark.parametrize("dtype, columns, extra", [(BF16, (40,), None), (torch.float16, (24, 33), 60)])
def test_bgmv_moe(variant, device, dtype, columns, extra):
    x, given = torch.randn(5, 300, device=device).to(dtype), pairs(device)
    banks = [(bank(RANK, 300, dtype, device), bank(n, RANK, dtype, device)) for n in columns]
    weights = torch.rand(len(given[0]), device=device)
    a, b = ([pair[i] for pair in banks] for i in (0, 1))
    out = fused_moe.bgmv_moe(x, a, b, *given, weights, EXPERTS, extra)
    truth, same = (
        summed(products(x, banks, given, kind, between)[0], weights, given[0], 5)
        for kind, between in ((torch.float64, None), (torch.float32, dtype))
    )
    assert_close(out[:, : sum(columns)], same.to(dtype), truth)
    assert not out[:, sum(columns) :].any() and not out[3].any()
    plan = fused_moe.prepare_bgmv_moe(x, a, b, *given, weights, EXPERTS)
    first = plan.run().clone()
    assert_bitwise(plan.run(), first)
    assert_bitwise(first.to(dtype), out[:, : sum(columns)])
    assert plan.run() is plan.y_accum and plan.y_accum.dtype == torch.float32
    weights.zero_()
    assert not plan.run().any()


def test_shrink_adds_and_expand_stores(variant, device):
    x, given = torch.randn(10, 40, device=device).to(BF16), pairs(device)
    banks = [(bank(RANK, 40, BF16, device), bank(24, RANK, BF16, device)) for _ in range(2)]
    of_a, of_b = table([a for a, _ in banks], device), table([b for _, b in banks], device)
    before = torch.randn(2, 10, RANK, device=device).to(BF16)
    low = before.clone()
    fused_moe.bgmv_moe_shrink(low, x, of_a[0], *given, of_a[1], per_pair_input=True)
    eye = torch.eye(RANK, device=device).to(BF16).expand(ADAPTERS, EXPERTS, -1, -1)
    for s, (a, _) in enumerate(banks):
        truth, there = products(x, [(a, eye)], given, torch.float64, None, by_pair=True)
        same, _ = products(x, [(a, eye)], given, torch.float32, None, by_pair=True)
        assert_close(low[s], (same + before[s].float()).to(BF16), truth + before[s].double())
        assert_bitwise(low[s][~there], before[s][~there])
    token, expert, adapter = given
    out = torch.full((10, 60), 7.0, device=device)
    starts = torch.tensor([30, 2], device=device)
    fused_moe.bgmv_moe_expand(
        out, low, of_b[0], token, expert, torch.full((10,), torch.nan, device=device), adapter, starts, [24, 24],
        of_b[1], finalize=False,
    )  # fmt: skip
    for s, begin in enumerate(starts.tolist()):
        b = banks[s][1]
        truth, there = products(low[s], [(eye, b)], given, torch.float64, None, by_pair=True)
        same, _ = products(low[s], [(eye, b)], given, torch.float32, None, by_pair=True)
        assert_close(out[there, begin : begin + 24], same[there], truth[there])
    assert (out[~there] == 7).all() and (out[:, :2] == 7).all() and (out[:, 26:30] == 7).all()


@pytest.mark.parametrize("shared", [False, True])
def test_gemm1_delta(variant, device, shared):
    x, inner = torch.randn(5, 72, device=device), 24
    ids = torch.tensor([[0, 3], [1, 2], [2, 0], [3, 1], [-1, 1]], dtype=torch.int32, device=device)
    adapter = torch.tensor([1, 0, 2, -1, 0], dtype=torch.int32, device=device)
    columns = (2 * inner,) if shared else (inner, inner)
    banks = [(bank(RANK, 72, HALF, device), bank(n, RANK, HALF, device)) for n in columns]
    of_a, of_b = (table([pair[i] for pair in banks], device) for i in (0, 1))
    tables = [found[0] if shared else found for found, _ in (of_a, of_b)]
    out = fused_moe.bgmv_moe_gemm1_lora_delta(
        x, tables[0], of_a[1], tables[1], of_b[1], ids, adapter, RANK, inner, lora_dtype=HALF,
        scale=0.5, out_dtype=torch.float32,
    )  # fmt: skip
    given = torch.arange(10, device=device) // 2, ids.flatten(), adapter
    truth, _ = products(x.to(HALF), banks, given, torch.float64, None)
    same, _ = products(x.to(HALF), banks, given, torch.float32, HALF)
    assert_close(out.view(10, -1), same * 0.5, truth * 0.5, through=torch.finfo(HALF).eps)


def test_gemm2_delta(variant, device):
    rows, hidden = torch.randn(16, 40, device=device).to(HALF), 33
    ids = torch.tensor([[0, 3], [1, 2], [2, 0], [3, 1]], device=device)
    row = torch.tensor([3, 0, 15, -1, 7, 8, 9, 16], dtype=torch.int32, device=device)
    adapter = torch.tensor([1, 0, 2, -1], device=device)
    weights = torch.rand(4, 2, device=device)
    banks = [(bank(RANK, 40, HALF, device), bank(hidden, RANK, HALF, device))]
    of_a, of_b = (table([banks[0][i]], device) for i in (0, 1))
    out = fused_moe.bgmv_moe_gemm2_lora_delta(
        rows, row, *of_a, *of_b, ids, weights, adapter, RANK, hidden, lora_dtype=HALF,
        scale=2.0, out_dtype=torch.float32,
    )  # fmt: skip
    there = (row >= 0) & (row < 16)
    token, expert = torch.arange(8, device=device) // 2, ids.flatten().masked_fill(~there, -1)
    x = rows[row.clamp(0, 15).long()]
    truth, same = (
        summed(products(x, banks, (token, expert, adapter), kind, between, True)[0], weights.flatten(), token, 4) * 2
        for kind, between in ((torch.float64, None), (torch.float32, HALF))
    )
    assert_close(out, same, truth, through=torch.finfo(HALF).eps)
    empty = fused_moe.bgmv_moe_gemm2_lora_delta(
        rows[:0], row[:0], *of_a, *of_b, ids[:0], weights[:0], adapter[:0], RANK, hidden
    )
    assert empty.shape == (0, hidden) and empty.dtype == BF16


def test_refusals():
    x, given = torch.randn(5, 16).to(BF16), pairs("cpu")
    a, b, weights = bank(RANK, 16, BF16, "cpu"), bank(24, RANK, BF16, "cpu"), torch.rand(10)
    names = ("x", "lora_a_weights", "lora_b_weights", "sorted_token_ids", "expert_ids", "lora_indices", "topk_weights")
    call = dict(zip(names, (x, [a], [b], *given, weights), strict=True)) | {"num_experts": EXPERTS}
    for wrong in (
        {"x": x.float()}, {"x": x[:4]}, {"lora_a_weights": []}, {"lora_b_weights": [b, b]},
        {"lora_a_weights": [a.half()]}, {"lora_b_weights": [b[..., :4]]}, {"output_dim": 23},
        {"lora_a_weights": [a.mT.contiguous().mT]},
        {"expert_ids": given[1].int()}, {"expert_ids": given[1][:4]}, {"topk_weights": weights.double()},
        {"lora_indices": given[2] + 1},
    ):  # fmt: skip
        with pytest.raises(ValueError, match=f"^{next(iter(wrong))}"):
            fused_moe.bgmv_moe(**call | wrong)
    with pytest.raises(ValueError, match="^num_experts|^lora_a_weights"):
        fused_moe.bgmv_moe(**call | {"num_experts": 9})
    with pytest.raises(ValueError, match="^backend"):
        fused_moe.prepare_bgmv_moe(**call, backend="cuda")
    with pytest.raises(ValueError, match="^y_accum"):
        fused_moe.prepare_bgmv_moe(**call, y_accum=torch.empty(5, 23))


@pytest.mark.parametrize("columns", (None, 60))
def test_under_the_compiler(columns, device):
    """One graph; the addresses of the weights are read where it runs."""
    x, given = torch.randn(5, 40, device=device).to(HALF), pairs(device)
    a, b = bank(RANK, 40, HALF, device), bank(24, RANK, HALF, device)
    weights = torch.rand(len(given[0]), device=device)

    def call(x, a, b):
        return fused_moe.bgmv_moe(x * 2, [a, a], [b, b], *given, weights, EXPERTS, columns) + 1

    torch._dynamo.reset()
    assert_bitwise(torch.compile(call, fullgraph=True, backend="aot_eager")(x, a, b), call(x, a, b))
