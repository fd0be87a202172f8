"""Mixtures of experts against the weights that they read and the operations that they do."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial

import torch
from torch.nn.functional import silu

from flashinfer import fused_moe
from flashinfer.testing.bench import Case, Target, Work

# name -> hidden, intermediate of one rank, experts, top_k
_MODELS = {
    "Mixtral 8x7B": (4096, 14336, 8, 2),
    "Qwen3-30B-A3B": (2048, 768, 128, 8),
    "DeepSeek-V3 TP8": (7168, 256, 256, 8),
    "gpt-oss-120b": (2880, 2880, 128, 4),
}
# Rows of a result that are checked, and the allowed error of its norm: with activations in bfloat16, or in e4m3.
_SAMPLE, _NEAR, _NEAR_FP8 = 64, 0.01, 0.05
_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
# gpt-oss's gate: alpha, what is added to the up-projection, and where both are cut off.
_ALPHA, _BETA, _LIMIT = 1.702, 1.0, 7.0
_HEADLINES = (
    "Mixtral 8x7B bf16, 8 tokens",
    "Mixtral 8x7B bf16, 4096 tokens",
    "Qwen3-30B-A3B bf16, 64 tokens",
    "DeepSeek-V3 TP8 fp8 blocks, 64 tokens",
    "DeepSeek-V3 TP8 fp8 blocks, 4096 tokens",
    "gpt-oss-120b mxfp4, 8 tokens",
    "gpt-oss-120b mxfp4, 64 tokens",
    "gpt-oss-120b mxfp4, 512 tokens",
    "gpt-oss-120b mxfp4, 4096 tokens",
)


@dataclass(frozen=True)
class _Layer:
    """A call, its arguments but ids and s, and what they stand for: x and weights in bfloat16.

    `stored` has the weights as a checkpoint has them, for other libraries.
    """

    run: Callable
    given: tuple
    x: torch.Tensor
    up: torch.Tensor
    down: torch.Tensor
    near: float
    gate: Callable
    biases: tuple = (None, None)
    stored: dict = field(default_factory=dict)


def cases(device: torch.device) -> Iterator[Case]:
    """1 to 4096 tokens of four models on a GPU; a few of small ones on a CPU."""
    if device.type != "cuda":
        for number_format in _FORMATS:
            yield _row("small", (256, 128, 4, 2), number_format, 3)
        return
    for name, model in _MODELS.items():
        formats = {"gpt-oss-120b": ("mxfp4",), "Mixtral 8x7B": ("bf16", "fp8")}.get(name, ("bf16", "fp8 blocks"))
        for number_format in formats:
            for tokens in (1, 8, 64, 512, 4096):
                yield _row(name, model, number_format, tokens)
    yield _row("DeepSeek-V3 TP8", _MODELS["DeepSeek-V3 TP8"], "fp8 blocks", 128, Target("us", 700))


def _row(name: str, model: tuple, number_format: str, tokens: int, *targets: Target) -> Case:
    label = f"{name} {number_format}, {tokens} tokens"
    targets = (*targets, Target("peers", 1.1))
    make = partial(_work, tokens, *model, _FORMATS[number_format], "fp8" if number_format.startswith("fp8") else "bf16")
    problem = f"experts {number_format}"
    return Case(label, make, name, targets, label in _HEADLINES, builds=number_format, problem=problem)


def _work(tokens, hidden, middle, experts, top_k, make_layer, operands, device) -> Work:
    x = torch.randn(tokens, hidden, device=device).bfloat16()
    chosen = torch.rand(tokens, experts, device=device).topk(top_k)
    ids, s = chosen.indices.int(), chosen.values / chosen.values.sum(1, keepdim=True)
    layer = make_layer(x, hidden, middle, experts)
    stored = sum(t.nbytes for t in layer.stored.values() if len(t) == experts) / experts
    inputs = (layer.given[0], ids, s, *layer.given[1:])

    def check(result):
        few = slice(0, _SAMPLE)
        truth = _loop(layer, layer.x[few].float(), s[few], layer.up, layer.down, _routes(ids[few]))
        error = ((result[few, :hidden].float() - truth).norm() / truth.norm()).nan_to_num(torch.inf).item()
        assert error <= layer.near, f"wrong result: error {error:.3g} of its norm, allowed {layer.near}"

    return Work(
        run=layer.run,
        inputs=inputs,
        bytes=int(ids.unique().numel() * stored) + 2 * x.nbytes,
        flops=6 * tokens * top_k * hidden * middle,
        operands=operands,
        check=check,
        given={"x": x, "ids": ids, "s": s, **layer.stored},
    )


def _routes(ids) -> dict[int, tuple[torch.Tensor, torch.Tensor]]:
    """Expert -> the tokens that chose it, and as which choice."""
    return {expert: (ids == expert).nonzero(as_tuple=True) for expert in ids.unique().tolist()}


def _loop(layer: _Layer, x, s, up, down, routes):
    """An expert after another, as torch has it."""
    out, s = torch.zeros_like(x), s.to(x.dtype)
    for expert, (token, choice) in routes.items():
        rows = x[token] @ up[expert].to(x.dtype).T
        if layer.biases[0] is not None:
            rows += layer.biases[0][expert]
        rows = layer.gate(rows) @ down[expert].to(x.dtype).T
        if layer.biases[1] is not None:
            rows += layer.biases[1][expert]
        out.index_add_(0, token, rows * s[token, choice, None])
    return out


def _swiglu(rows):
    up, gate = rows.chunk(2, 1)
    return silu(gate) * up


def _swiglu_oss(rows):
    up, gate = rows.chunk(2, 1)
    up, gate = up.clamp(-_LIMIT, _LIMIT), gate.clamp(max=_LIMIT)
    return (up + _BETA) * gate * torch.sigmoid(_ALPHA * gate)


def _unit(k: int) -> float:
    """The power of two next to 1 / sqrt(k): products of k random numbers by it stay as large as they were."""
    return 2.0 ** round(torch.tensor(k).log2().item() / -2)


def _bf16(x, hidden, middle, experts) -> _Layer:
    def weights(n, k):
        w = torch.empty(experts, n, k, device=x.device, dtype=torch.bfloat16)
        for expert in w:
            expert.copy_(torch.randn(n, k, device=x.device) * _unit(k))
        return w

    def run(x, ids, s, up, down):
        return fused_moe.cutlass_fused_moe(x, ids, s, up, down, torch.bfloat16, None)[0]

    up, down = weights(2 * middle, hidden), weights(hidden, middle)
    return _Layer(run, (x, up, down), x, up, down, _NEAR, _swiglu, stored={"up": up, "down": down})


def _codes(experts, n, k, device):
    codes = torch.empty(experts, n, k, device=device, dtype=torch.float8_e4m3fn)
    for expert in codes:
        expert.copy_(torch.randn(n, k, device=device))
    return codes


def _fp8(x, hidden, middle, experts) -> _Layer:
    """One scale a tensor; what stands between the products is multiplied by 32 before it is rounded."""
    up, down = _codes(experts, 2 * middle, hidden, x.device), _codes(experts, hidden, middle, x.device)
    of_up, of_down, between = _unit(hidden), _unit(middle), 32.0
    d1, d2 = (torch.full((experts,), scale, device=x.device) for scale in (of_up, of_down / between))
    q2, one = torch.tensor(between, device=x.device), torch.tensor(1.0, device=x.device)

    def run(x, ids, s, up, down):
        return fused_moe.cutlass_fused_moe(x, ids, s, up, down, torch.bfloat16, [d1, q2, d2, one])[0]

    codes = x.to(torch.float8_e4m3fn)
    wide = (up.bfloat16() * of_up, down.bfloat16() * of_down)
    stored = {"up": up, "down": down}
    return _Layer(run, (codes, up, down), codes.bfloat16(), *wide, _NEAR_FP8, _swiglu, stored=stored)


def _fp8_blocks(x, hidden, middle, experts) -> _Layer:
    """A scale for 128 x 128 of weights, and for 1 x 128 of what they are multiplied with, which the call rounds."""
    given, wide = [], []
    for n, k in ((2 * middle, hidden), (hidden, middle)):
        codes = _codes(experts, n, k, x.device)
        powers = torch.randint(-1, 2, (experts, n // 128, k // 128), device=x.device)
        scales = _unit(k) * torch.exp2(powers.float())
        given.append((codes, scales))
        wide.append(codes.bfloat16() * scales.bfloat16().repeat_interleave(128, 1).repeat_interleave(128, 2))
    (up, of_up), (down, of_down) = given

    def run(x, ids, s, up, down, of_up, of_down):
        return fused_moe.cutlass_fused_moe(
            x, ids, s, up, down, torch.bfloat16, [of_up, of_down], use_deepseek_fp8_block_scale=True
        )[0]

    stored = {"up": up, "down": down, "of_up": of_up, "of_down": of_down}
    return _Layer(run, (x, up, down, of_up, of_down), _rounded(x), *wide, _NEAR_FP8, _swiglu, stored=stored)


def _rounded(x):
    """x as the call rounds it: to e4m3, the largest of each 128 to 448."""
    blocks = x.float().unflatten(1, (-1, 128))
    scale = blocks.abs().amax(2, keepdim=True) / 448
    return ((blocks / scale).to(torch.float8_e4m3fn).float() * scale).flatten(1).bfloat16()


def _mxfp4(x, hidden, middle, experts) -> _Layer:
    """gpt-oss's: weights of 4 bits with a power of two for each 32, activations in bfloat16, biases, a gate cut off.

    The call has both sizes padded with zeros to whole 128s, as engines do: 2880 to 2944.
    """
    stored, wide, given = [], [], []
    for n, k in ((2 * middle, hidden), (hidden, middle)):
        codes = torch.randint(256, (experts, n, k // 2), device=x.device, dtype=torch.uint8)
        # numbers of e2m1 are three times as large as normal ones
        byte = 126 + int(torch.tensor(_unit(k) / 2).log2())
        powers = torch.randint(byte, byte + 3, (experts, n, k // 32), device=x.device, dtype=torch.uint8)
        wide.append(_e2m1(codes, powers))
        stored += [codes, powers]
        halves = 2 if n == 2 * middle else 1
        given += [
            fused_moe.interleave_moe_weights_for_sm90_mixed_gemm(_padded(codes, halves, 64), "fp4"),
            fused_moe.interleave_moe_scales_for_sm90_mixed_gemm(_padded(powers, halves, 4)),
        ]
    up, of_up, down, of_down = given
    biases = tuple(torch.randn(experts, n, device=x.device).bfloat16() for n in (2 * middle, hidden))
    added = [_padded(bias[..., None], halves, 1)[..., 0] for bias, halves in zip(biases, (2, 1))]
    shape = {"swiglu_alpha": _ALPHA, "swiglu_beta": _BETA, "swiglu_limit": _LIMIT}
    shape = {name: torch.full((experts,), value, device=x.device) for name, value in shape.items()}

    def run(x, ids, s, up, down, of_up, of_down):
        return fused_moe.cutlass_fused_moe(
            x, ids, s, up, down, torch.bfloat16, [of_up, of_down], *added, **shape, use_w4_group_scaling=True
        )[0]

    names = "up", "of_up", "down", "of_down", "up_bias", "down_bias"
    stored = dict(zip(names, (*stored, *biases)))
    padded = torch.nn.functional.pad(x, (0, -hidden % 128))
    return _Layer(run, (padded, up, down, of_up, of_down), x, *wide, _NEAR, _swiglu_oss, biases, stored)


def _padded(rows, halves, whole):
    """[experts, halves x n, columns] with zeros up to whole 128s of n and `whole` columns."""
    experts, n, columns = rows.shape
    room = (0, -columns % whole, 0, -(n // halves) % 128)
    return torch.nn.functional.pad(rows.view(experts * halves, n // halves, columns), room).view(
        experts, -1, columns + room[1]
    )


def _e2m1(codes, powers):
    """bfloat16 of two codes a byte, the first in the low half, times 2^(power - 127) for each 32."""
    values = torch.tensor([*_E2M1, *(-v for v in _E2M1)], device=codes.device, dtype=torch.bfloat16)
    wide = codes.new_empty(*codes.shape[:2], 2 * codes.shape[2], dtype=torch.bfloat16)
    for expert, code, power in zip(wide, codes, powers):
        factors = torch.exp2(power.float() - 127).bfloat16().repeat_interleave(32, 1)
        torch.mul(values[torch.stack([code & 15, code >> 4], -1).flatten(1).long()], factors, out=expert)
    return wide


_FORMATS = {"bf16": _bf16, "fp8": _fp8, "fp8 blocks": _fp8_blocks, "mxfp4": _mxfp4}
