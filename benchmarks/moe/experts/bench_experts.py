"""Mixtures of experts against the weights that they read and the operations that they do, and a torch loop."""

from collections.abc import Iterator
from functools import partial

import torch
from torch.nn.functional import silu

from flashinfer import fused_moe
from flashinfer.ops import narrow
from flashinfer.testing.bench import Case, Target, Work

# name -> hidden, intermediate of one rank, experts, top_k, FP8 with block scales
_MODELS = {
    "Mixtral 8x7B": (4096, 14336, 8, 2, False),
    "Qwen3-30B": (2048, 768, 128, 8, False),
    "DeepSeek-V3 TP8 FP8": (7168, 256, 256, 8, True),
}
_SMALL = {"small": (64, 32, 4, 2, False), "small FP8": (256, 128, 4, 2, True)}


def cases(device: torch.device) -> Iterator[Case]:
    """1 to 4096 tokens of three models on a GPU; a few of small ones on a CPU."""
    on_gpu = device.type == "cuda"
    for name, model in (_MODELS if on_gpu else _SMALL).items():
        for tokens in (1, 8, 64, 128, 512, 4096) if on_gpu else (3,):
            targets = (Target("us", 700),) if name.startswith("DeepSeek") and tokens == 128 else ()
            yield Case(f"{name}, {tokens} tokens", partial(_layer, tokens, *model), name, targets)


def _layer(tokens, hidden, middle, experts, top_k, fp8, device) -> Work:
    x = torch.randn(tokens, hidden, device=device).bfloat16()
    chosen = torch.rand(tokens, experts, device=device).topk(top_k)
    ids, s = chosen.indices.int(), chosen.values / chosen.values.sum(1, keepdim=True)
    w1, w2 = (_weights(experts, n, k, device) for n, k in ((2 * middle, hidden), (hidden, middle)))
    per_expert = (w1.nbytes + w2.nbytes) // experts // (2 if fp8 else 1)
    used, flops = int(ids.unique().numel()), 6 * tokens * top_k * hidden * middle
    if fp8:
        run, inputs, w1, w2, x = _fp8(x, ids, s, w1, w2)
    else:
        run, inputs = _bf16, (x, ids, s, w1, w2)

    def check(result):
        truth = _loop(x.float(), ids, s, w1, w2)
        error = (result.float() - truth).norm() / truth.norm()
        if not error < 0.05:
            raise AssertionError(f"relative error {error:.3g}")

    # An FP8 layer and its bfloat16 weights do not fit together, copied as inputs are.
    peer = {} if fp8 else {"torch": _loop}
    return Work(run, inputs, bytes=used * per_expert, flops=flops, peers=peer, check=check)


def _weights(experts, n, k, device):
    w = torch.empty(experts, n, k, device=device, dtype=torch.bfloat16)
    for expert in w:
        expert.copy_(torch.randn(n, k, device=device) / k**0.5)
    return w


def _bf16(x, ids, s, w1, w2):
    return fused_moe.cutlass_fused_moe(x, ids, s, w1, w2, torch.bfloat16, None)[0]


def _fp8(x, ids, s, w1, w2):
    """The call, its inputs, and what they stand for: weights (an expert at a time) and rows."""
    experts, hidden, middle = w2.shape
    codes, scale = narrow.quantize_fp8(x.float(), 128, torch.float8_e4m3fn)
    given = []
    for w in (w1, w2):
        factors = torch.rand(experts, w.shape[1] // 128, w.shape[2] // 128, device=w.device) * 0.01 + 0.01
        given += [(w * 64).to(torch.float8_e4m3fn), factors]

    def run(x, x_scale, w1, s1, w2, s2, ids, s):
        return fused_moe.trtllm_fp8_block_scale_routed_moe(
            (ids, s), None, x, x_scale, w1, s1, w2, s2, experts, ids.shape[1], None, None, middle, 0, experts, None
        )

    rows = codes.float() * scale.repeat_interleave(128, 1)
    inputs = (codes, scale.T.contiguous(), *given, ids, s)
    return run, inputs, _Decoded(*given[:2]), _Decoded(*given[2:]), rows


class _Decoded:
    """Weights of FP8 with block scales, decoded an expert at a time."""

    def __init__(self, codes, factors):
        self.codes, self.factors = codes, factors

    def __getitem__(self, expert):
        wide = self.factors[expert].repeat_interleave(128, 0).repeat_interleave(128, 1)
        return self.codes[expert].float() * wide


def _loop(x, ids, s, w1, w2):
    """An expert after another, as torch has it."""
    out = torch.zeros_like(x)
    for expert in ids.unique().tolist():
        token, choice = (ids == expert).nonzero(as_tuple=True)
        up, gate = (x[token] @ w1[expert].to(x.dtype).T).chunk(2, 1)
        rows = (silu(gate) * up) @ w2[expert].to(x.dtype).T
        out.index_add_(0, token, rows * s[token, choice, None].to(x.dtype))
    return out
