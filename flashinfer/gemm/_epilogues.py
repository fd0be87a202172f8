"""Products of linear layers in float32, and what is done with them before they are rounded."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from flashinfer._core.checks import require, same_device
from flashinfer.gemm import _operands as given
from flashinfer.gemm.blockscaled import mm_fp4
from flashinfer.gemm.dense import mm_fp8
from flashinfer.quantization import nvfp4_quantize

_E4M3 = torch.float8_e4m3fn
_E4M3_MAX = 448.0
_HEAD, _EPS = 128, 1e-6


class Rotation(NamedTuple):
    """The norms of Q and K, and the rotation of each token."""

    q_norm_weight: torch.Tensor
    k_norm_weight: torch.Tensor
    cos_sin: torch.Tensor
    positions: torch.Tensor


def fp8_product(a, weight, a_scale, weight_scale, bias, qkv_scale, config, name: str = "weight") -> torch.Tensor:
    """float32 [M, N], scaled."""
    require(not getattr(config, "separate_qkv_output", False), "config", config, "one without separate_qkv_output")
    for which, x in (("a", a), (name, weight)):
        given.check_matrix(which, x, 2, (_E4M3,))
    given.same(name, weight.shape[1], "a", a.shape[1], "K")
    scales = {"a_scale": (a_scale, len(a)), f"{name}_scale": (weight_scale, len(weight))}
    for which, (x, count) in scales.items():
        require(x.shape == (count,) and x.dtype == torch.float32, which, f"{x.dtype} {tuple(x.shape)}",
                f"float32 [{count}]")  # fmt: skip
    same_device(a=a, **{name: weight}, a_scale=a_scale, **{f"{name}_scale": weight_scale})
    y = mm_fp8(a, weight, None, torch.float32)
    y *= a_scale[:, None]
    y *= weight_scale
    if bias is not None:
        y += _bias(bias, y)
    return y if qkv_scale is None else _by_thirds(y, qkv_scale)


def fp4_product(a, a_factors, weight, weight_factors, scale, bias, qkv_scale=None, name="weight") -> torch.Tensor:
    """float32 [M, N], scaled. `qkv_scale` stands for `scale`."""
    codes, others = given.fp4("a_packed", a), given.fp4(f"{name}_packed", weight)
    given.same(f"{name}_packed", 2 * others.shape[1], "a_packed", 2 * codes.shape[1], "K")
    blocks = given.blocks_of("a_packed", 2 * codes.shape[1], 16)
    a_factors = given.factors("a_block_scale", a_factors, len(codes), blocks, "128x4")
    weight_factors = given.factors(f"{name}_block_scale", weight_factors, len(others), blocks, "128x4")
    same_device(a_packed=a, a_block_scale=a_factors, weight_packed=weight, weight_block_scale=weight_factors)
    y = mm_fp4(codes, others.mT, a_factors, weight_factors, None, torch.float32)
    if bias is not None:
        y += _bias(bias, y)
    if qkv_scale is not None:
        return _by_thirds(y, qkv_scale)
    y *= float(scale)
    return y


def _bias(bias, y) -> torch.Tensor:
    fits = bias.shape == (y.shape[1],) and bias.dtype == torch.bfloat16
    require(fits, "bias", f"{bias.dtype} {tuple(bias.shape)}", f"bfloat16 [{y.shape[1]}]")
    same_device(a=y, bias=bias)
    return bias


def _by_thirds(y, scale) -> torch.Tensor:
    require(scale.shape == (3,) and scale.dtype == torch.float32, "qkv_scale", f"{scale.dtype} {tuple(scale.shape)}",
            "float32 [3]")  # fmt: skip
    n = y.shape[1]
    require(n % 96 == 0, "qkv_scale", "a tensor", f"None with {n} columns, no multiple of 96")
    same_device(a=y, qkv_scale=scale)
    y.view(len(y), 3, n // 3).mul_(scale[:, None])
    return y


def gated(name: str, y) -> torch.Tensor:
    require(y.shape[1] % 2 == 0, name, y.shape[1], "an even number of rows, with SwiGLU")
    return y[:, ::2] * torch.nn.functional.silu(y[:, 1::2])


def check_heads(name: str, weight, queries: int, keys: int, head: int) -> None:
    """Refuse what is no weight of as many heads of Q, K and V."""
    require(queries == keys, "num_kv_heads", keys, f"{queries}, as num_q_heads")
    require(head == _HEAD, "head_dim", head, str(_HEAD))
    require(weight.dim() == 2 and len(weight) == 3 * queries * head, name, tuple(weight.shape),
            f"[{3 * queries * head}, K]")  # fmt: skip


def rotated(y, rotation: Rotation, is_neox: bool, dtype: torch.dtype) -> None:
    """Norms and rotations of the first two thirds of y's columns, in place."""
    require(not is_neox, "is_neox", is_neox, "False")
    allowed = {"q_norm_weight": ((_HEAD,), torch.bfloat16), "k_norm_weight": ((_HEAD,), torch.bfloat16),
               "cos_sin": ((len(y), _HEAD), torch.float32), "positions": ((len(y),), torch.int64)}  # fmt: skip
    for name, (shape, kind) in allowed.items():
        x = getattr(rotation, name)
        require(x is not None and x.shape == shape and x.dtype == kind, name,
                "None" if x is None else f"{x.dtype} {tuple(x.shape)}", f"{kind} {list(shape)}")  # fmt: skip
    same_device(a=y, **rotation._asdict())
    n = y.shape[1]
    require(n % (3 * _HEAD) == 0, "weight_packed", n, f"rows a multiple of {3 * _HEAD}: Q, K and V")
    heads = y.view(len(y), 3, n // (3 * _HEAD), _HEAD)[:, :2]
    wide = _rounded(heads, dtype).float()
    wide *= torch.rsqrt(wide.square().mean(-1, keepdim=True) + _EPS)
    wide *= torch.stack((rotation.q_norm_weight, rotation.k_norm_weight))[:, None].float()
    positions = rotation.positions
    positions = torch.where((positions < 0) | (positions >= len(y)), 0, positions)
    cos, sin = rotation.cos_sin[positions][:, None, None].chunk(2, -1)
    even, odd = wide[..., ::2], wide[..., 1::2]
    heads.copy_(torch.stack((even * cos - odd * sin, odd * cos + even * sin), -1).flatten(-2))


def _rounded(x, dtype) -> torch.Tensor:
    return x.clamp(-_E4M3_MAX, _E4M3_MAX).to(_E4M3) if dtype == _E4M3 else x.to(dtype)


def finished(y, dtype, scale, out, *, narrow=False) -> Any:
    """What a call returns of its float32 result. narrow : it may be NVFP4."""
    allowed = (torch.bfloat16, _E4M3, torch.uint8) if narrow else (torch.bfloat16, _E4M3)
    require(dtype in allowed, "out_dtype", dtype, ", ".join(map(str, allowed)))
    made = torch.ones(1, dtype=torch.float32, device=y.device) if scale is None else scale
    if dtype == torch.bfloat16:
        require(scale is None, "output_quant_scale", "a tensor", "None with bfloat16")
    require(made.numel() == 1 and made.dtype == torch.float32, "output_quant_scale",
            f"{made.dtype} {tuple(made.shape)}", "one float32")  # fmt: skip
    same_device(a=y, output_quant_scale=made, out=out)
    m, n = y.shape
    if dtype == torch.uint8:
        require(n % 16 == 0, "out_dtype", dtype, f"another with {n} columns, no multiple of 16")
    shape = (m, n // 2) if dtype == torch.uint8 else (m, n)
    if out is not None:
        fits = out.shape == shape and out.dtype == dtype
        require(fits, "out", f"{out.dtype} {tuple(out.shape)}", f"{dtype} {list(shape)}")
    factors = ()
    if dtype == torch.uint8:
        result, found = nvfp4_quantize(y, made, nvfp4_4over6=None)
        factors = (found.view(-1),)
    else:
        result = _rounded(y * made if dtype == _E4M3 else y, dtype)
    result = result if out is None else out.copy_(result)
    rest = (*factors, made) if scale is None and dtype != torch.bfloat16 else factors
    return (result, *rest) if rest else result
