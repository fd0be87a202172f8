"""bfloat16 times codes with factors on Hopper: builds and launches the kernel of `sm90_widened_kernel.py`."""

from __future__ import annotations

from dataclasses import replace

import torch

from flashinfer._core.gluon_compat import tensordesc
from flashinfer._core.implementation import Implementation
from flashinfer._core.launch import Build, Launcher, TensorMap
from flashinfer._core.target import target_of
from flashinfer.ops import layouts
from flashinfer.ops.gemm.blockscaled.sm90_widened_kernel import widened_sm90_kernel
from flashinfer.ops.gemm.slices import choose_split, scratch



def _box(c) -> tuple[int, ...]:
    """The TMA box of A."""
    return 1, c.box, 64


def build(p, c) -> Build:
    step = "i64:4" if p.out == "fp32" else "i64:8"
    types = {
        "a_map": tensordesc("bf16", _box(c)),
        "b.at": "*u8:16",
        **dict.fromkeys(("b.entry", "b.row"), "i64:16"),
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
        BLOCK_M=c.block_m, BLOCK_N=c.block_n, STAGES=c.stages, BOX=c.box, GROUP=c.group, LEAD=c.lead,
        REGISTERS=c.registers, COPY_REGISTERS=c.copy_registers, FORMAT=p.b, SCALE=p.scale,
        WIDTH=p.width, FACTOR_LAYOUT=p.b_layout, SHUFFLED=p.shuffled, ALPHA=bool(p.alpha),
    )  # fmt: skip
    return Build(widened_sm90_kernel, types, constants, num_warps=4)


widened_sm90 = Launcher("widened_sm90", build)


def _wide(c):
    """The config with tiles of 256 columns, of which fewer stages fit."""
    return replace(c, block_n=256, stages=4)


def kernels(p, c):
    """(launcher, problem, config) of each kernel that may run for a problem, for compiling ahead."""
    yield widened_sm90, p, c
    if c.block_m == 128:
        yield widened_sm90, p, _wide(c)


def run(p, c, a, b, a_scale, b_scale, alpha, out, slices: int = 0) -> None:
    """slices : the number of K slices; 0 for the number that is estimated as fastest."""
    batch, m, n = out.shape
    k = a.shape[2]
    # By the bytes of a row of B where it is read as codes, and by those of a row of A where products take longer.
    k_bytes = b.shape[2] * b.element_size() + k // p.width if c.block_m == 64 else 2 * k
    columns, chosen = choose_split(batch, m, n, k_bytes, target_of(out.device).sms, 128)
    slices = slices or chosen
    c = _wide(c) if columns == 256 and slices == 1 else c
    tiles = batch * -(-m // c.block_m) * -(-n // c.block_n)
    partial = arrived = None
    if c.block_n < 256:
        partial, arrived = scratch(out.device, tiles * slices * c.block_m * c.block_n, 2 * tiles)
    blocks = layouts.padded(1, k // p.width, p.b_layout)[1]
    widened_sm90(
        p, c, (min(target_of(out.device).sms, tiles * slices), 1, 1), TensorMap(a, _box(c)), b.view(torch.uint8),
        *b.stride()[:2], b_scale, b_scale.stride(0), blocks, out, *out.stride()[:2], alpha, partial, arrived, m, n, k,
        batch, slices,
    )  # fmt: skip


IMPLEMENTATION = Implementation(run, (widened_sm90,), kernels=kernels)
