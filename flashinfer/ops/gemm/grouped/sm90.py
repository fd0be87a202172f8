"""Grouped GEMM on Hopper: builds and launches the kernels of `sm90_scaled.py` and `sm90_unscaled.py`."""

from __future__ import annotations

from flashinfer._core.gluon_compat import tensordesc
from flashinfer._core.implementation import Implementation
from flashinfer._core.launch import Build, Launcher, TensorMap
from flashinfer._core.target import target_of
from flashinfer.ops.gemm.grouped.sm90_scaled import grouped_sm90_kernel
from flashinfer.ops.gemm.grouped.sm90_unscaled import unscaled_sm90_kernel
from flashinfer.ops.gemm.hopper import boxes, is_wide, may_enlarge, enlarged


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


def build_unscaled(p, c) -> Build:
    a_box, b_box = boxes(c, p.columns_first, scaled=False)
    step = "i64:4" if p.out == "fp32" else "i64:8"
    types = dict(
        a_map=tensordesc(p.a, a_box), b_map=tensordesc(p.b, b_box), out=f"*{p.out}:16", alpha="*fp32",
        groups=f"*{p.index}", weights=f"*{p.weights or p.index}", M="i32", N="i32:8", K="i32", count="i32",
        weight_count="i32", out_entry=step, out_row=step,
    )  # fmt: skip
    constants = dict(
        BLOCK_M=c.block_m, BLOCK_N=c.block_n, BLOCK_K=c.block_k, STAGES=c.stages, GROUP=c.group,
        REGISTERS=c.registers, COPY_REGISTERS=c.copy_registers, KIND=p.kind, B_MAJOR="n" if p.columns_first else "k",
        ALPHA=bool(p.alpha), WEIGHTS=bool(p.weights),
    )  # fmt: skip
    return Build(unscaled_sm90_kernel, types, constants, num_warps=4)


grouped_sm90 = Launcher("grouped_sm90", build)
unscaled_sm90 = Launcher("grouped_unscaled_sm90", build_unscaled)


def kernels(p, c):
    """(launcher, problem, config) of each kernel that may run for a problem, for compiling ahead."""
    launcher = grouped_sm90 if p.scale else unscaled_sm90
    yield launcher, p, c
    if may_enlarge(p, c):
        yield launcher, p, enlarged(c)


def run(p, c, a, b, a_scale, b_scale, alpha, out, groups, weights) -> None:
    m, n = out.shape[-2:]
    if p.kind != "counts":
        a, out = a[None], out[None]
    count = len(groups) - 1 if p.kind == "offsets" else len(b) if p.kind == "indices" else len(groups)
    # The groups' lengths are on the device, so the choice of the tile assumes the largest number of rows.
    sms, height = target_of(out.device).sms, m * count if p.kind == "counts" else m
    if may_enlarge(p, c) and is_wide(-(-height // 128), n, sms):
        c = enlarged(c)
    a_box, b_box = boxes(c, p.columns_first, bool(p.scale))
    maps = TensorMap(a, a_box), TensorMap(b, b_box)
    if not p.scale:
        unscaled_sm90(
            p, c, (sms, 1, 1), *maps, out, alpha, groups, weights, m, n, a.shape[2], count, len(b), *out.stride()[:2]
        )
        return
    if p.kind != "counts":
        a_scale = a_scale[None]
    # Offsets may describe more groups than there are weights: those past the last weight are skipped.
    grouped_sm90(
        p, c, (sms, 1, 1), *maps, out, a_scale, b_scale, groups, m, n, a.shape[2], min(count, len(b)),
        *a_scale.stride(), *b_scale.stride(), *out.stride()[:2],
    )  # fmt: skip


IMPLEMENTATION = Implementation(run, (grouped_sm90, unscaled_sm90), kernels=kernels)
