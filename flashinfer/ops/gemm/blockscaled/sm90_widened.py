"""Codes with factors times tokens on Hopper: builds and launches the kernel of `sm90_widened_kernel.py`."""

from __future__ import annotations

import torch

from flashinfer._core.gluon_compat import tensordesc
from flashinfer._core.implementation import Implementation
from flashinfer._core.launch import Build, Launcher, TensorMap
from flashinfer._core.target import named, target_of
from flashinfer.ops import layouts
from flashinfer.ops.gemm.blockscaled import Widen, config, portable_widen
from flashinfer.ops.gemm.blockscaled.sm90_widened_kernel import widened_sm90_kernel
from flashinfer.ops.gemm.slices import scratch


def _box(c) -> tuple[int, ...]:
    """The TMA box of the tokens."""
    return 1, c.tokens, 64


def _code_box(p, c) -> tuple[int, ...]:
    """The TMA box of codes: a tile's rows, and 128 elements of K."""
    bytes_of = 16 * config.BITS[p.b]
    return (1, c.rows // 16, 8, 4, bytes_of) if p.shuffled else (1, 2 * c.rows, bytes_of)


def _by_box(p, codes: torch.Tensor) -> torch.Tensor:
    """The bytes of codes as their tensor map sees them; of shuffled ones, row 8 i + j of 32 is row 4 j + i."""
    codes = codes.view(torch.uint8)
    return codes.unflatten(1, (-1, 4, 8)).transpose(2, 3) if p.shuffled else codes


def build(p, c) -> Build:
    step = "i64:4" if p.out == "fp32" else "i64:8"
    types = {
        "a_map": tensordesc("fp16" if config.as_half(p) else "bf16", _box(c)),
        "b_map": tensordesc("u8", _code_box(p, c)),
        "b_scale.at": "*u8:4",
        "b_scale.entry": "i64:4",
        "b_scale.blocks": "i32:4",
        "out.rows": f"*{p.out}:16",
        "out.entry": step,
        "out.row": step,
        "alpha": "*fp32",
        "partial": "*fp32:16",
        "arrived": "*i32",
        "M": "i32",
        "N": "i32:8",
        **dict.fromkeys(("K", "batch", "slices"), "i32"),
    }
    constants = dict(
        TOKENS=c.tokens, ROWS=c.rows, BOXES=c.boxes, STAGES=c.stages, CODE_STAGES=c.code_stages, GROUP=c.group,
        REGISTERS=c.registers, COPY_REGISTERS=c.copy_registers, FORMAT=p.b, SCALE=p.scale, WIDTH=p.width,
        FACTOR_LAYOUT=p.b_layout, SHUFFLED=p.shuffled, ALPHA=bool(p.alpha),
    )  # fmt: skip
    return Build(widened_sm90_kernel, types, constants, num_warps=4)


widened_sm90 = Launcher("widened_sm90", build)


def _arranged(p) -> Widen:
    """The problem of bringing the tokens into the order of the kernel."""
    scale = p.scale if p.a_layout else ""
    apart = 4 if p.b == "e2m1" else 1
    return Widen(p.a, scale, p.width, p.a_layout, whole=False, arranged=apart, half=config.as_half(p))


def kernels(p, c):
    """(launcher, problem, config) of each kernel that may run for a problem, for compiling ahead."""
    yield portable_widen.launch, _arranged(p), config.widen(p, named("90a"))
    for of_tokens in config.widened_tiles(p):
        yield widened_sm90, p, of_tokens


def run(p, c, a, b, a_scale, b_scale, alpha, out, slices: int = 0) -> None:
    """slices : the number of K slices; 0 for the number that is estimated as fastest."""
    batch, m, n = out.shape
    k = b.shape[2] * 8 // config.BITS[p.b]
    dtype = torch.float16 if config.as_half(p) else torch.bfloat16
    tokens = torch.empty(batch, m, k, dtype=dtype, device=out.device)
    target = target_of(out.device)
    portable_widen.run(_arranged(p), config.widen(p, target), a, a_scale, tokens)
    c, chosen = config.widened_tile(p, batch, m, n, k, target.sms)
    slices = slices or chosen
    tiles = batch * -(-m // c.tokens) * -(-n // (2 * c.rows))
    partial = arrived = None
    if slices > 1:
        partial, arrived = scratch(out.device, tiles * slices * 2 * c.rows * c.tokens, 4 * tiles)
    blocks = layouts.padded(1, k // p.width, p.b_layout)[1]
    widened_sm90(
        p, c, (min(target.sms, tiles * slices), 1, 1), TensorMap(tokens, _box(c)),
        TensorMap(_by_box(p, b), _code_box(p, c)), b_scale, b_scale.stride(0), blocks, out, *out.stride()[:2], alpha,
        partial, arrived, m, n, k, batch, slices,
    )  # fmt: skip


# 16 bytes with FP8 and 256 tokens, on Triton 3.6: values that are set before the loop over K and used after it.
IMPLEMENTATION = Implementation(run, (widened_sm90, portable_widen.launch), kernels=kernels, stack_budget=16)
