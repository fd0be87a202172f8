"""User variants: the functions of samples_variants.py in the kernels and on the CPU, against float64 formulas."""

import math
from dataclasses import dataclass, field, replace
from typing import Callable

import pytest
import torch

import flashinfer
from flashinfer import AttentionVariant
from flashinfer._core.checks import UnsupportedConfig
from flashinfer.testing import generate
from flashinfer.testing.compare import assert_bitwise, assert_close
from tests.ops.attention import samples_variants as samples
from tests.ops.attention.cases import backends, workspace

LONGEST = 48


@dataclass
class Case:
    """A variant, what its functions are given, and the same in torch on [q_len, kv_len] of one request and head."""

    variant: AttentionVariant
    logits: Callable = lambda s, batch, q, k, head, p: s
    mask: Callable = lambda s, batch, q, k, head, p: torch.ones_like(s, dtype=torch.bool)
    params: dict = field(default_factory=dict)
    plan: dict = field(default_factory=dict)

    def given(self, device):
        return {n: v.to(device) if isinstance(v, torch.Tensor) else v for n, v in self.params.items()}


DOCUMENTS = (torch.arange(8)[:, None] + torch.arange(LONGEST)[None] // 7).int().flatten()
CASES = {
    "soft cap": Case(
        AttentionVariant(samples.soft_cap, params={"cap": "fp32"}),
        lambda s, batch, q, k, head, p: p["cap"] * torch.tanh(s / p["cap"]), params={"cap": 1.5}, plan={"causal": True},
    ),
    "alibi": Case(
        AttentionVariant(samples.alibi, params={"slopes": "*fp32"}),
        lambda s, batch, q, k, head, p: s + p["slopes"][head].to(s.dtype) * (k - q),
        params={"slopes": torch.tensor([0.5, 0.25, 0.0625, 0.125])}, plan={"logits_soft_cap": 3.0},
    ),
    "documents": Case(
        AttentionVariant(mask=samples.same_document, params={"documents": "*i32", "longest": "i32"}),
        mask=lambda s, batch, q, k, head, p: p["documents"].view(-1, LONGEST)[batch][q]
        == p["documents"].view(-1, LONGEST)[batch][k],
        params={"documents": DOCUMENTS, "longest": LONGEST}, plan={"causal": True},
    ),
    "both, under a window": Case(
        AttentionVariant(samples.cold_heads, samples.strided),
        lambda s, batch, q, k, head, p: (s / math.log(10)).masked_fill((head % 2 == 1) & (k % 2 == 1), -math.inf),
        lambda s, batch, q, k, head, p: torch.fmod(k - q, 3) == -(batch % 2),
        plan={"causal": True, "window_left": 11},
    ),
    "sigmoid": Case(
        AttentionVariant(samples.sigmoid, params={"bias": "fp32"}, use_softmax=False),
        lambda s, batch, q, k, head, p: torch.sigmoid(s + p["bias"]), params={"bias": -1.0}, plan={"causal": True},
    ),
    "a mask in the place of causal": Case(
        AttentionVariant(mask=samples.strided, owns_mask=True),
        mask=lambda s, batch, q, k, head, p: torch.fmod(k - q, 3) == -(batch % 2), plan={"causal": True},
    ),
}  # fmt: skip


def formula(x, case, dtype):
    """out and base-2 lse of every request, by definition, in `dtype`."""
    outs, lses = [], []
    variant, plan = case.variant, case.plan
    params = {n: v.cpu() if isinstance(v, torch.Tensor) else v for n, v in case.params.items()}
    for batch in range(len(x.qo_indptr) - 1):
        q, k, v = (t.cpu().to(dtype) for t in x.request(batch))
        out = q.new_zeros(q.shape[0], q.shape[1], v.shape[2])
        lse = q.new_full(q.shape[:2], -math.inf)
        q_pos, k_pos = torch.arange(q.shape[0])[:, None] + k.shape[0] - q.shape[0], torch.arange(k.shape[0])[None]
        for head in range(q.shape[1] if k.shape[0] else 0):
            kv_head = head * k.shape[1] // q.shape[1]
            s = q[:, head] @ k[:, kv_head].T / math.sqrt(q.shape[2])
            if "logits_soft_cap" in plan:
                s = plan["logits_soft_cap"] * torch.tanh(s / plan["logits_soft_cap"])
            given = batch, q_pos.expand_as(s), k_pos.expand_as(s), head, params
            seen = case.mask(s, *given)
            if plan.get("causal") and not variant.owns_mask:
                seen = seen & (k_pos <= q_pos)
            if "window_left" in plan:
                seen = seen & (k_pos >= q_pos - plan["window_left"])
            s = case.logits(s, *given)
            if not variant.use_softmax:
                out[:, head] = s.masked_fill(~seen, 0) @ v[:, kv_head]
                continue
            s = s.masked_fill(~seen, -math.inf)
            some = (s > -math.inf).any(1)
            out[some, head] = torch.softmax(s[some], 1) @ v[:, kv_head]
            lse[some, head] = torch.logsumexp(s[some], 1) / math.log(2)
        outs.append(out)
        lses.append(lse)
    return torch.cat(outs), torch.cat(lses)


def batch(device, qo=(3, 0, 17, 1), kv=(5, 7, 40, 0), dim=32, dtype=torch.float16):
    return generate.ragged_batch(list(qo), list(kv), 4, 2, dim, dtype=dtype, device=device)


def check(x, case, result):
    out, lse = result if isinstance(result, tuple) else (result, None)
    truth, truth_lse = formula(x, case, torch.float64)
    same, same_lse = formula(x, case, torch.float32 if x.q.dtype == torch.float32 else torch.float16)
    assert_close(out.cpu(), same.to(out.dtype), truth, "out")
    if lse is not None:
        assert_close(lse.cpu(), formula(x, case, torch.float32)[1], truth_lse, "lse")


def planned_ragged(x, case, backend, **plan):
    heads = x.q.shape[1], x.k.shape[1], x.q.shape[2]
    wrapper = flashinfer.BatchPrefillWithRaggedKVCacheWrapper(
        workspace(x.q.device), backend=backend, variant=case.variant
    )
    wrapper.plan(x.qo_indptr, x.kv_indptr, *heads, q_data_type=x.q.dtype, **case.plan, **plan)
    return wrapper


def run_ragged(x, case, backend, **plan):
    wrapper = planned_ragged(x, case, backend, **plan)
    return wrapper.run(x.q, x.k, x.v, return_lse=case.variant.use_softmax, params=case.given(x.q.device))


@pytest.mark.parametrize("name", CASES)
def test_ragged(name, device):
    x = batch(device)
    for backend in backends(device):
        check(x, CASES[name], run_ragged(x, CASES[name], backend))


@pytest.mark.parametrize("name", CASES)
def test_paged_with_split_keys(name, device):
    x, case = batch(device, (5, 1, 0, 19), (48, 33, 7, 19)), CASES[name]
    pages = generate.paged(x, 5)
    for backend in backends(device):
        wrapper = flashinfer.BatchPrefillWithPagedKVCacheWrapper(
            workspace(device), backend=backend, variant=case.variant
        )
        wrapper.plan(
            x.qo_indptr, pages.indptr, pages.indices, pages.last_page_len, 4, 2, 32, 5, q_data_type=x.q.dtype,
            fixed_split_size=32, **case.plan,
        )  # fmt: skip
        given = case.given(device)
        check(x, case, wrapper.run(x.q, pages.kv_cache, return_lse=case.variant.use_softmax, params=given))


@pytest.mark.parametrize("name", ("alibi", "documents", "sigmoid"))
def test_decode(name, device):
    x, case = batch(device, (1,) * 4, (40, 1, 0, 33)), CASES[name]
    pages = generate.paged(x, 8)
    plan = {n: v for n, v in case.plan.items() if n != "causal"}
    for backend in backends(device):
        wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(
            workspace(device), backend=backend, jit_args=case.variant
        )
        wrapper.plan(pages.indptr, pages.indices, pages.last_page_len, 4, 2, 32, 8, q_data_type=x.q.dtype, **plan)
        # upstream's form: tensors and scalars in the variant's order
        run = wrapper.run_return_lse if case.variant.use_softmax else wrapper.run
        check(x, case, run(x.q, pages.kv_cache, *case.given(device).values()))
