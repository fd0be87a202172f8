"""Modes of torch that see every op: calls are ops under them, and nothing runs on tensors without memory."""

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._python_dispatch import TorchDispatchMode

import flashinfer
from flashinfer.causal_conv1d import causal_conv1d_update
from flashinfer.gdn_decode import gated_delta_rule_decode
from flashinfer.testing.compare import assert_bitwise

HALF = torch.float16


def norms(x):
    return flashinfer.rmsnorm(x, x[0])


def activations(x):
    return flashinfer.silu_and_mul(x)


def choices(x):
    return flashinfer.top_k(x, 3, sorted=True)


def draws(x):
    return flashinfer.sampling.top_k_renorm_probs(x.float(), 3), flashinfer.sampling.softmax(x)


def attention(x):
    heads = x.view(-1, 2, 32)
    return flashinfer.single_prefill_with_kv_cache(heads, heads, heads, causal=True, return_lse=True)


def products(x):
    return flashinfer.mm_bf16(x.bfloat16(), x.bfloat16().T)


def experts(x):
    rows, weights = x[:, :16].contiguous(), x.reshape(2, 32, -1)[:, :, :16].contiguous()
    chosen = torch.zeros(len(x), 1, dtype=torch.int32, device=x.device)
    second = weights[:, :16, :].contiguous()
    return flashinfer.cutlass_fused_moe(rows, chosen, chosen.float(), weights, second, HALF, None)[0]


def convolutions(x):
    return causal_conv1d_update(x, x.new_ones(len(x), x.shape[1], 3), x.T[:, :4].contiguous())


def recurrences(x):
    q, raw = x.view(len(x), 1, 2, 32), x[:, None, :2].contiguous()
    return gated_delta_rule_decode(q, q, q, x.new_zeros(len(x), 2, 32, 32, dtype=torch.float32), raw[0, 0], raw,
                                   raw[0, 0], raw)  # fmt: skip


def tables(x, batch):
    """An empty workspace, block tables and lengths."""
    pages = torch.arange(batch * 2, dtype=torch.int32, device=x.device).view(batch, 2) % 4
    return x.new_empty(0), pages, torch.full((batch,), 20, dtype=torch.int32, device=x.device)


def offsets(x, *ends):
    return torch.tensor([0, *ends], dtype=torch.int32, device=x.device)


def decodes(x):
    """Without a plan, as engines call them."""
    q, cache = x.view(-1, 4, 32)[:4], x.new_ones(4, 2, 2, 16, 32)
    scratch, pages, lens = tables(x, 2)
    given = dict(q_len_per_req=2, bmm1_scale=0.1)
    first = flashinfer.decode.trtllm_batch_decode_with_kv_cache(
        q, cache, scratch, pages, lens, 20, out_dtype="float32", return_lse=True, sinks=[x[0, :4].float()],
        request_order=object(), **given,
    )  # fmt: skip
    pair = cache.unbind(1)
    given |= dict(kv_layout="HND", mask=None)
    second = flashinfer.decode.xqa_batch_decode_with_kv_cache(q, pair, scratch, pages, lens, 20, **given)
    third = flashinfer.cudnn.cudnn_batch_decode_with_kv_cache(
        q[:2], *pair, 0.1, scratch, max_sequence_kv=20, actual_seq_lens_kv=lens, block_tables=pages
    )
    out = torch.empty_like(q[:2, None])
    flashinfer.xqa(q[:2, None], *pair, pages, lens, out, scratch, scratch, 2, 16, kv_layout="HND")
    return *first, second, third, out


def prefills(x):
    q, cache = x.view(-1, 4, 32)[:5], x.new_ones(4, 2, 2, 16, 32)
    scratch, pages, lens = tables(x, 2)
    ends, keys = offsets(x, 3, 5), offsets(x, 20, 40)
    rows = x.repeat(2, 1)[:, :60].reshape(-1, 2, 30)[:40].contiguous()
    k, v = rows.new_ones(40, 2, 32), rows.new_ones(40, 2, 16)
    first = flashinfer.prefill.trtllm_batch_context_with_kv_cache(
        q, cache, scratch, pages, lens, 3, 20, 0.1, 1.0, 2, ends, keys, return_lse=True
    )
    second = flashinfer.prefill.trtllm_ragged_attention_deepseek(
        q, k, v, scratch, lens, 3, 20, 0.1, 1.0, 1.0, 2, -1, ends, keys, False, True, True
    )
    third = flashinfer.trtllm_fmha_v2_prefill(
        (q, k, v), "SEPARATE_Q_K_V", scratch, lens, 3, 20, 0.1, 1.0, 2, ends, keys, save_softmax_stats=True
    )
    fourth = flashinfer.cudnn.cudnn_batch_prefill_with_kv_cache(
        q, *cache.unbind(1), 0.1, scratch, max_token_per_sequence=3, max_sequence_kv=20, actual_seq_lens_kv=lens,
        actual_seq_lens_q=ends.diff(), block_tables=pages, causal=True, return_lse=True, batch_offsets_q=ends,
        batch_offsets_units="tokens",
    )  # fmt: skip
    heads = x.view(1, -1, 2, 32)
    last = flashinfer.prefill.fmha_v2_prefill_deepseek(
        heads, heads, heads, torch.empty_like(heads), 2, 32, heads.shape[1], 1.0, return_lse=True
    )
    return *first, *second, *third, *fourth, *last


def latents(x):
    q, cache = x.new_ones(2, 1, 8, 96), x.new_ones(4, 16, 96)
    scratch, pages, lens = tables(x, 2)
    sizes, given = (32, 64, 32), dict(bmm1_scale=0.1)
    first = flashinfer.mla.trtllm_batch_decode_with_kv_cache_mla(
        q, cache, scratch, *sizes, pages, lens, 20, return_lse=True, **given
    )
    second = flashinfer.mla.xqa_batch_decode_with_kv_cache_mla(q, cache, scratch, *sizes, pages, lens, 20, **given)
    chosen = torch.arange(16, dtype=torch.int32, device=x.device).expand(2, 16).contiguous()
    third = flashinfer.decode.trtllm_batch_decode_sparse_mla_dsv4(q, cache[:, None], scratch, chosen, bmm1_scale=0.1)
    return *first, second, third


CALLS = norms, activations, choices, draws, attention, products, experts, convolutions, recurrences, decodes, prefills
CALLS += (latents,)


def flat(result):
    return [result] if isinstance(result, torch.Tensor) else list(result)


@pytest.mark.parametrize("call", CALLS, ids=lambda call: call.__name__)
class TestModes:
    @pytest.fixture
    def x(self, device):
        return torch.randn(16, 64, dtype=torch.float32, device=device).half()

    def test_fake_tensors(self, call, x):
        """Shapes, dtypes, strides and devices of the results; a kernel would find no memory."""
        with FakeTensorMode() as mode:
            results = flat(call(mode.from_tensor(x)))
        for fake, real in zip(results, flat(call(x)), strict=True):
            alike = ((y.shape, y.dtype, y.stride(), y.device) for y in (fake, real))
            assert isinstance(fake, torch._subclasses.FakeTensor) and next(alike) == next(alike)

    def test_recorded(self, call, x):
        made = make_fx(lambda x: flat(call(x)), tracing_mode="fake")(x)
        assert "flashinfer" in made.code
        for recorded, expected in zip(made(x), flat(call(x)), strict=True):
            assert_bitwise(recorded, expected)

    def test_looked_at(self, call, x):
        """A mode that only looks, as a profiler's."""
        seen = []

        class Looks(TorchDispatchMode):
            def __torch_dispatch__(self, op, types, args=(), kwargs=None):
                seen.append(str(op))
                return op(*args, **kwargs or {})

        with Looks():
            results = flat(call(x))
        for looked_at, expected in zip(results, flat(call(x)), strict=True):
            assert_bitwise(looked_at, expected)


def test_a_planned_wrapper_under_fake_tensors(device):
    wrapper = flashinfer.BatchPrefillWithRaggedKVCacheWrapper(torch.empty(1 << 16, dtype=torch.uint8, device=device))
    offsets = torch.tensor([0, 3, 8], dtype=torch.int32)
    wrapper.plan(offsets, offsets, 4, 2, 64, q_data_type=HALF)
    with FakeTensorMode():
        q, k = (torch.empty(8, heads, 64, dtype=HALF, device=device) for heads in (4, 2))
        out, lse = wrapper.run(q, k, k, return_lse=True)
    assert out.shape == q.shape and lse.shape == (8, 4) and isinstance(out, torch._subclasses.FakeTensor)
