"""User variants on latent attention, against their definition in float64."""

import pytest
import torch

from flashinfer import AttentionVariant
from flashinfer.mla import BatchMLAPagedAttentionWrapper
from flashinfer.testing.compare import assert_close
from tests.ops.attention import samples_variants as samples
from tests.ops.attention.cases import backends, workspace
from tests.ops.attention.mla.latents import LOG2E, latents
from tests.ops.attention.oracle import weigh

HALF = torch.float16
SCALE, LONGEST, CAP, BIAS = 0.13, 90, 1.5, -1.0
SOFT_CAP = AttentionVariant(logits=samples.soft_cap, params={"cap": "fp32"})
DOCUMENTS = AttentionVariant(mask=samples.same_document, params={"documents": "*i32", "longest": "i32"})
SIGMOID = AttentionVariant(logits=samples.sigmoid, params={"bias": "fp32"}, use_softmax=False)
Q_LENS, KV_LENS, HEADS = [1, 3, 2, 1], [70, 33, 2, 0], 5


def plan(x, variant, backend):
    wrapper = BatchMLAPagedAttentionWrapper(workspace(x.q.device), backend=backend, variant=variant)
    wrapper.plan(*x.tables, HEADS, x.ckv, x.q.shape[-1] - x.ckv, 8, True, SCALE, HALF)
    return wrapper


def expected(x, dtype, change, seen=None, softmax=True):
    """`change` of causal logits [rows, heads, keys], and `seen` (request, q_pos, kv_pos) of them."""
    outs, lses = [], []
    ends = x.qo_indptr.tolist()
    for request, (a, b, keys) in enumerate(zip(ends, ends[1:], x.keys)):
        wide = torch.promote_types(dtype, torch.float32)
        q, k = x.q[a:b].to(dtype).to(wide), keys.to(dtype).to(wide)
        q_pos = torch.arange(b - a, device=q.device)[:, None] + len(keys) - (b - a)
        kv_pos = torch.arange(len(keys), device=q.device)[None]
        ok = kv_pos <= q_pos
        if seen is not None:
            ok = ok & seen(request, q_pos, kv_pos)
        s = change(torch.einsum("qhd,kd->qhk", q, k) * SCALE)
        if softmax:
            s = s.masked_fill(~ok[:, None], -torch.inf)
            p, total = weigh(s, dtype)
        else:
            p, total = s.masked_fill(~ok[:, None], 0.0).to(dtype).to(wide), 1.0
        outs.append((torch.einsum("qhk,kd->qhd", p, k[:, : x.ckv]) / total).to(dtype))
        lses.append(torch.logsumexp(s, -1) * LOG2E)
    return torch.cat(outs), torch.cat(lses)


@pytest.mark.parametrize("name", ("logits", "mask", "weights"))
def test_the_functions_of_a_variant(name, device):
    x = latents(Q_LENS, KV_LENS, HEADS, device=device)
    documents = torch.arange(LONGEST, dtype=torch.int32, device=device).div(20, rounding_mode="floor")
    documents = documents.repeat(len(KV_LENS), 1)
    documents[1] = 7
    variant, params, definition = {
        "logits": (SOFT_CAP, {"cap": CAP}, dict(change=lambda s: CAP * torch.tanh(s / CAP))),
        "mask": (
            DOCUMENTS, {"documents": documents, "longest": LONGEST},
            dict(change=lambda s: s, seen=lambda r, q, k: documents[r][q.clamp(min=0)] == documents[r][k]),
        ),
        "weights": (SIGMOID, {"bias": BIAS}, dict(change=lambda s: torch.sigmoid(s + BIAS), softmax=False)),
    }[name]  # fmt: skip
    truth, truth_lse = expected(x, torch.float64, **definition)
    same, _ = expected(x, HALF, **definition)
    _, same_lse = expected(x, torch.float32, **definition)
    for backend in backends(device):
        wrapper = plan(x, variant, backend)
        if name == "weights":
            assert_close(wrapper.run(*x.parts(), params=params), same, truth)
            with pytest.raises(ValueError, match="return_lse"):
                wrapper.run(*x.parts(), params=params, return_lse=True)
        else:
            out, lse = wrapper.run(*x.parts(), params=params, return_lse=True)
            assert_close(out, same, truth)
            assert_close(lse, same_lse, truth_lse, "lse")


def test_split_keys_of_a_variant(device):
    x = latents([1] * 4, [700, 3, 450, 0], HEADS, device=device)
    truth, truth_lse = expected(x, torch.float64, lambda s: CAP * torch.tanh(s / CAP))
    same, _ = expected(x, HALF, lambda s: CAP * torch.tanh(s / CAP))
    _, same_lse = expected(x, torch.float32, lambda s: CAP * torch.tanh(s / CAP))
    out, lse = plan(x, SOFT_CAP, backends(device)[1]).run(*x.parts(), params={"cap": CAP}, return_lse=True)
    assert_close(out, same, truth)
    assert_close(lse, same_lse, truth_lse, "lse")


def test_parameters_are_checked_by_name(device):
    x = latents(Q_LENS, KV_LENS, HEADS, device=device)
    with pytest.raises(ValueError, match="params"):
        plan(x, SOFT_CAP, "auto").run(*x.parts(), params={"bias": 1.0})
    with pytest.raises(ValueError, match="params"):
        plan(x, None, "auto").run(*x.parts(), params={"cap": 1.0})
