"""Layers of experts in every format: random codes, what they stand for in float64, and the layer in float64."""

import torch

import flashinfer
from flashinfer.fused_moe import convert_to_block_layout, interleave_moe_scales_for_sm90_mixed_gemm
from flashinfer.fused_moe.core import get_w2_permute_indices_with_cache, get_w3_w1_permute_indices_with_cache
from flashinfer.ops import narrow

# Of e2m1, by code: sign, two bits of exponent, one of mantissa.
E2M1 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, 0, -0.5, -1, -1.5, -2, -3, -4, -6], dtype=torch.float64)
# Elements to a factor, where it is not 128.
WIDTH = {"mxfp8": 32, "nvfp4": 16, "mxfp4": 32, "mxint4": 32}


def nibbles(codes):
    return torch.stack((codes & 15, codes >> 4), -1).flatten(-2).long()


def random(encoding, *shape, device="cpu"):
    """Codes of values of about 1, with their scale factors, and float64 values; rows are the last dimension."""
    count = shape[-1]
    if encoding in ("bf16", "fp16", "fp32"):
        codes = torch.randn(shape, device=device).to({"bf16": torch.bfloat16, "fp16": torch.float16}.get(encoding))
        return codes, None, codes.double()
    if encoding in ("fp8", "fp8_block", "mxfp8"):
        codes = torch.randn(shape, device=device).to(torch.float8_e4m3fn)
        value = codes.double()
    else:
        codes = torch.randint(256, (*shape[:-1], count // 2), dtype=torch.uint8, device=device)
        halves = nibbles(codes)
        signed = torch.where(halves > 7, halves - 16, halves).double()
        value = signed if encoding == "mxint4" else E2M1.to(device)[halves]
    if encoding == "fp8":
        return codes, None, value
    blocks = (*shape[:-1], count // WIDTH.get(encoding, 128))
    if encoding == "fp8_block":
        factors = torch.rand(blocks, device=device) + 0.5
        wide = factors.double()
    elif encoding == "nvfp4":
        factors = (torch.rand(blocks, device=device) + 0.2).to(torch.float8_e4m3fn)
        wide, factors = factors.double(), factors.view(torch.uint8)
    elif encoding == "mxint4":
        factors = (torch.rand(blocks, device=device) * 0.1 + 0.1).to(torch.bfloat16)
        wide = factors.double()
    else:
        factors = torch.randint(124, 128, blocks, dtype=torch.uint8, device=device)
        wide = torch.exp2(factors.double() - 127)
    return codes, factors, value * wide.repeat_interleave(WIDTH.get(encoding, 128), -1)


def weights(encoding, experts, n, k, device="cpu"):
    """As `random`, scaled so that a product of rows of about 1 is of about 1."""
    if encoding == "fp8_block":
        codes = (torch.randn(experts, n, k, device=device) * 40).to(torch.float8_e4m3fn)
        factors = (torch.rand(experts, -(-n // 128), -(-k // 128), device=device) + 0.5) / 40 / k**0.5
        wide = factors.double().repeat_interleave(128, 1)[:, :n].repeat_interleave(128, 2)[:, :, :k]
        return codes, factors, codes.double() * wide
    if encoding == "fp8":
        codes = (torch.randn(experts, n, k, device=device) * 4 / k**0.5).to(torch.float8_e4m3fn)
        return codes, None, codes.double()
    codes, factors, value = random(encoding, experts, n, k, device=device)
    if factors is None:
        codes = (codes.float() / k**0.5).to(codes.dtype)
        return codes, None, codes.double()
    if encoding == "nvfp4":
        factors = (factors.view(torch.float8_e4m3fn).float() / 8).to(torch.float8_e4m3fn)
        value = E2M1.to(device)[nibbles(codes)] * factors.double().repeat_interleave(16, -1)
        factors = factors.view(torch.uint8)
    elif encoding in ("mxfp8", "mxfp4"):
        factors = factors - 4
        value = value / 16
    elif encoding == "mxint4":
        factors = factors / 16
        value = value / 16
    return codes, factors, value


def arranged(codes, factors, gated: bool, tile: int = 128, block: int = 0):
    """Weights and byte (or bfloat16) factors as TensorRT-LLM's calls take them, by the public helpers."""
    order = get_w3_w1_permute_indices_with_cache if gated else get_w2_permute_indices_with_cache
    codes = torch.stack([w.view(torch.uint8)[order({}, w.view(torch.uint8), tile)].view(w.dtype) for w in codes])
    if factors is not None:
        factors = torch.stack([f[order({}, f, tile)] for f in factors])
        factors = torch.stack([flashinfer.block_scale_interleave(f) for f in factors])
    if block:
        codes = torch.stack([convert_to_block_layout(w, block) for w in codes])
    return codes, factors


def tiled(factors):
    """Row-major factors of bytes, [rows, blocks] or of experts, in 128x4 tiles."""
    if factors.dim() == 3:
        return torch.stack([tiled(f) for f in factors])
    return flashinfer.block_scale_interleave(factors)


def strips(factors):
    return interleave_moe_scales_for_sm90_mixed_gemm(factors)


def swiglu(y, alpha=1.0, beta=0.0, limit=float("inf")):
    up, gate = y.chunk(2)
    gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
    return gate * torch.sigmoid(alpha * gate) * (up + beta)


def situ(up, gate):
    return 2 * torch.tanh(gate / 2) * torch.sigmoid(gate) * 3 * torch.tanh(up / 3)


ACTS = {
    "Swiglu": swiglu,
    "Geglu": lambda y: torch.nn.functional.gelu(y.chunk(2)[1]) * y.chunk(2)[0],
    "GegluTanh": lambda y: torch.nn.functional.gelu(y.chunk(2)[1], approximate="tanh") * y.chunk(2)[0],
    "SwigluStep": lambda y: torch.nn.functional.silu(y.chunk(2)[1]).clamp(max=7) * y.chunk(2)[0].clamp(-7, 7),
    "Situ": lambda y: situ(*y.chunk(2)),
    "Relu2": lambda y: y.relu().square(),
    "Relu": lambda y: y.relu(),
    "Silu": lambda y: torch.nn.functional.silu(y),
    "Gelu": lambda y: torch.nn.functional.gelu(y),
    "Identity": lambda y: y,
}  # fmt: skip


def between(encoding, scale=1.0, dtype=torch.bfloat16):
    """What stands between the products, [n] in float64, through its format and back, times `scale` in it."""

    def through(h):
        if encoding == "fp8":
            return (h.float() * scale).clamp(-448, 448).to(torch.float8_e4m3fn).double()
        h = h.to(dtype).float()[None]
        if encoding == "fp8_block":
            codes, factors = narrow.quantize_fp8(h, 128, torch.float8_e4m3fn)
            return (codes.double() * factors.double().repeat_interleave(128, 1))[0]
        if encoding == "mxfp8":
            codes, factors = narrow.quantize_mxfp8(h)
            return (codes.double() * torch.exp2(factors.double() - 127).repeat_interleave(32, 1))[0]
        if encoding == "nvfp4":
            codes, factors = narrow.quantize_nvfp4(h, torch.tensor(float(scale), device=h.device))
            return (E2M1.to(h.device)[nibbles(codes)] * factors.double().repeat_interleave(16, 1))[0]
        return h[0].double()

    return through


def mixture(x, w1, w2, ids, s, *, act=swiglu, b1=None, b2=None, d1=1.0, d2=1.0, through=None, on_input=False,
            offset=0, of_expert=False, dtype=torch.float64, multiply=torch.matmul):  # fmt: skip
    """The layer, token after token, choice after choice, in `dtype`. d1, d2 : factors of the products, [experts].

    act : of y, and with `of_expert` of its expert. multiply : makes the products of matrices.
    """
    x, w1, w2 = x.to(dtype), w1.to(dtype), w2.to(dtype)
    d1, d2 = (d.double() if torch.is_tensor(d) else torch.full((len(w1),), d).double() for d in (d1, d2))
    through = through or (lambda h: h)
    out = torch.zeros(len(x), w2.shape[1], dtype=torch.float64, device=x.device)
    for token, row in enumerate(ids.tolist()):
        for choice, expert in enumerate(row):
            e = expert - offset
            if expert < 0 or not 0 <= e < len(w1):
                continue
            weight = float(s[token, choice])
            y = multiply(w1[e], x[token, :, None])[:, 0].to(dtype) * float(d1[e]) * (weight if on_input else 1)
            y = y if b1 is None else y + b1[e].to(dtype)
            h = act(y, e) if of_expert else act(y)
            r = multiply(w2[e], through(h.double()).to(dtype)[:, None])[:, 0].to(dtype) * float(d2[e])
            r = r if b2 is None else r + b2[e].to(dtype)
            out[token] += r.double() * (1 if on_input else weight)
    return out.to(dtype)
