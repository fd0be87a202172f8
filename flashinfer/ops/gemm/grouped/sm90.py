"""FP8 products in groups with float32 block scales on Hopper, in Gluon: what is compiled, how tensors reach it."""

from __future__ import annotations

from flashinfer._core.gluon_compat import tensordesc
from flashinfer._core.launch import Build, Launcher, TensorMap
from flashinfer._core.target import target_of
from flashinfer.ops.gemm._device.grouped_sm90 import grouped_sm90_kernel
from flashinfer.ops.gemm.hopper import boxes, is_wide, widened


def build(p, c) -> Build:
    a_box, b_box = boxes(c)
    step = "i64:4" if p.out == "fp32" else "i64:8"
    types = dict(
        a_map=tensordesc(p.a, a_box), b_map=tensordesc(p.b, b_box), out=f"*{p.out}:16", a_scale="*fp32",
        b_scale="*fp32", groups=f"*{p.index}", M="i32", N="i32:8", K="i32", count="i32", a_entry="i64", a_row="i64",
        a_k="i64", b_entry="i64", b_column="i64", b_k="i64", out_entry=step, out_row=step,
    )  # fmt: skip
    constants = dict(
        BLOCK_M=c.block_m, BLOCK_N=c.block_n, STAGES=c.stages, UNROLL=c.unroll, GROUP=c.group,
        REGISTERS=c.registers, COPY_REGISTERS=c.copy_registers, KIND=p.kind, ROW_BLOCK=p.rows,
    )  # fmt: skip
    return Build(grouped_sm90_kernel, types, constants, num_warps=4)


grouped_sm90 = Launcher("grouped_sm90", build)
LAUNCHERS = (grouped_sm90,)

# Bytes of stack a thread may use: what a tile is found by, put aside between tiles, not in their loops over K.
STACK_BUDGET = 192


def kernels(p, c):
    """What runs for a problem: (launcher, problem, config) of each kernel, for compiling ahead."""
    yield grouped_sm90, p, c
    if c.block_m == 128 and p.out != "fp32":
        yield grouped_sm90, p, widened(c)


def run(p, c, a, b, a_scale, b_scale, alpha, out, groups, weights) -> None:
    """alpha, weights : None."""
    m, n = out.shape[-2:]
    if p.kind != "counts":
        a, a_scale, out = a[None], a_scale[None], out[None]
    # A group of offsets that has no weight is none, and there are as many of indices as there are weights.
    count = min(len(groups) - 1, len(b)) if p.kind == "offsets" else len(b)
    # The lengths of groups are on the device: as many rows as there can be.
    sms, height = target_of(out.device).sms, m * count if p.kind == "counts" else m
    if is_wide(c, p.out, -(-height // 128), n, sms):
        c = widened(c)
    a_box, b_box = boxes(c)
    grouped_sm90(
        p, c, (sms, 1, 1), TensorMap(a, a_box), TensorMap(b, b_box), out, a_scale, b_scale, groups, m, n, a.shape[2],
        count, *a_scale.stride(), *b_scale.stride(), *out.stride()[:2],
    )  # fmt: skip
